//! Policies keep their addresses of pools when policy servers restart, and all servers of one etcd give the same ones.

use std::time::Duration;

use vipgate_lab::reflector::query_udp;
use vipgate_tests::etcd::Etcd;
use vipgate_tests::{SERVER, Testbed, tenant_with_pool, wait_for};

use super::etcd::{start, status};

#[test]
fn a_server_that_reads_files_gives_the_same_addresses_after_a_restart() {
    let mut testbed = Testbed::new("record");
    testbed.uses_policy_server = true;
    let state = testbed.folder.path().join("state");
    let more = format!("state: {}", state.display());
    testbed.write_policy("tenant-c.yaml", &tenant_with_pool(&["a", "b"]));
    testbed.start_policyd(&more);
    testbed.start("");
    let source = || query_udp(&testbed.pods[3], SERVER[0].parse().unwrap()).unwrap();
    let vip = source();
    testbed.policyd.take().unwrap().kill();
    // What `a` has given up is quarantined: `c` waits.
    testbed.write_policy("tenant-c.yaml", &tenant_with_pool(&["b", "c"]));
    testbed.start_policyd(&more);
    testbed.policyd().wait_for_log(&["tenant-c", "VG0420"]);
    let is_in_step = || status(&testbed, 0)["gateways"][0]["in_step"] == true;
    assert!(wait_for(Duration::from_secs(15), is_in_step), "{}", testbed.policyd().log());
    assert_eq!(query_udp(&testbed.pods[3], SERVER[0].parse().unwrap()).unwrap(), vip);
    let record = std::fs::read_to_string(state.join("addresses")).unwrap();
    assert!(record.contains(&format!("{vip} EgressPolicy tenant-c/b\n")) && record.lines().count() == 2, "{record}");
}

#[test]
fn servers_of_one_etcd_give_the_same_addresses() {
    let testbed = Testbed::new("shared");
    let folder = testbed.folder.path();
    let etcd = Etcd::start(&testbed.gateway);
    etcd.put(&tenant_with_pool(&["a", "b"]));
    let servers = [1, 2].map(|n| start(&testbed, folder, n));
    let is_same = || status(&testbed, 1)["version"] == status(&testbed, 2)["version"];
    assert!(wait_for(Duration::from_secs(10), is_same), "{}", servers[0].log());
    etcd.put(&tenant_with_pool(&["c"]));
    etcd.delete("/vipgate/EgressPolicy/tenant-c/a");
    for server in &servers {
        server.wait_for_log(&["VG0420"]);
    }
    assert!(wait_for(Duration::from_secs(10), is_same), "{}", servers[0].log());
    let record = etcd.etcdctl(&["get", "--print-value-only", "/vipgate-members/addresses"]);
    let free = |line: &&str| line.contains("tenant-c/a 20");
    assert_eq!(record.lines().filter(free).count(), 1, "{record}");
    assert!(record.lines().any(|line| line.ends_with("EgressPolicy tenant-c/b")), "{record}");
}
