//! etcd as the policy source: equivalent to files, and its faults interrupt nothing.

use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use vipgate_lab::reflector::query_udp;
use vipgate_tests::etcd::{ENDPOINT, Etcd};
use vipgate_tests::policyd::{Policyd, PolicydConfig};
use vipgate_tests::traffic::Traffic;
use vipgate_tests::{EXTRA_ENDPOINT, SERVER, Testbed, VIP_B, session_state, wait_for};

/// URLs of three servers on the gateway's host: one reads files, two read etcd.
const URLS: [&str; 3] = ["http://127.0.0.1:18000", "http://127.0.0.1:18001", "http://127.0.0.1:18002"];

/// Starts the server of a URL: the first one reads files, the others etcd.
pub(super) fn start(testbed: &Testbed, folder: &Path, n: u16) -> Policyd {
    let (name, listen) = (format!("policyd-{n}"), format!("127.0.0.1:{}", 18000 + n));
    let source = format!("source: {{etcd: {{endpoints: [\"{ENDPOINT}\"]}}}}");
    let more = if n == 0 { "" } else { &source };
    Policyd::start(
        &testbed.gateway,
        folder,
        PolicydConfig { name: &name, listen: &listen, metrics: 9470 + n, extra: more },
    )
}

fn server_config(testbed: &Testbed, extra: &str, n: usize) -> String {
    let cache = testbed.folder.path().join("policy.cache").display().to_string();
    format!("{extra}\npolicy: {{server: {{url: \"{}\", cache: {cache}}}}}", URLS[n])
}

/// Status of a server.
pub(super) fn status(testbed: &Testbed, n: usize) -> Value {
    let (code, stdout, stderr) = testbed.policy_status(&["--server", URLS[n], "-o", "json"]);
    assert_eq!(code, 0, "{stderr}");
    serde_json::from_str(&stdout).unwrap()
}

/// Waits until the gateway has a server's policy in force; returns the version.
fn wait_in_step(testbed: &Testbed, n: usize) -> String {
    let in_step = || status(testbed, n)["gateways"][0]["in_step"] == true;
    assert!(wait_for(Duration::from_secs(15), in_step), "{}", status(testbed, n));
    let version = status(testbed, n)["version"].as_str().unwrap().to_owned();
    assert_eq!(testbed.query(&["status"])["policy"]["version"], version.as_str());
    version
}

/// The active policy without traffic counters.
fn in_force(testbed: &Testbed) -> [Value; 2] {
    let mut endpoints = testbed.query(&["endpoints"]);
    for endpoint in endpoints["endpoints"].as_array_mut().unwrap() {
        endpoint["sessions"] = Value::Null;
    }
    [endpoints, testbed.vips()]
}

fn wait_p4_covered(testbed: &Testbed) {
    let is_covered = || query_udp(&testbed.pods[3], SERVER[0].parse().unwrap()).is_ok_and(|source| source == VIP_B[0]);
    assert!(wait_for(Duration::from_secs(15), is_covered), "{}", testbed.log());
}

fn wait_p4_uncovered(testbed: &Testbed) {
    testbed.wait_uncovered(&testbed.pods[3], SERVER[0], "10.1.0.31");
}

#[test]
#[expect(clippy::too_many_lines, reason = "one sequence of states, in which each step needs those before it")]
fn etcd_and_files_give_the_same_policy_and_etcd_may_fail() {
    let (_folder, more) = session_state();
    let mut testbed = Testbed::new("etcd");
    let folder = testbed.folder.path().to_owned();
    let mut etcd = Etcd::start(&testbed.gateway);
    let keys: Vec<String> =
        ["tenant-a.yaml", "tenant-b.yaml"].iter().flat_map(|name| etcd.put(&testbed.read_policy(name))).collect();
    assert!(keys.contains(&"/vipgate/EndpointSlice/tenant-a/api-ipv6".to_owned()), "{keys:?}");
    assert!(keys.contains(&"/vipgate/Namespace/tenant-b".to_owned()), "{keys:?}");
    let of_files = start(&testbed, &folder, 0);
    let first = start(&testbed, &folder, 1);

    // From a server with files the gateway moves to one with etcd, which has no differences to send.
    testbed.start_gateway(&server_config(&testbed, &more, 0));
    let version = wait_in_step(&testbed, 0);
    let from_files = in_force(&testbed);
    testbed.wait_cached();
    let traffic = Traffic::start(&testbed);
    testbed.stop("KILL");
    testbed.start_gateway(&server_config(&testbed, &more, 1));
    assert_eq!(wait_in_step(&testbed, 1), version);
    assert_eq!(in_force(&testbed), from_files);
    let responses = |server: &Policyd| server.metric("vipgate_policyd_responses_total", "");
    // The settings, which complete the update, and empty responses for shard maps, slices, gateways, nodes and cluster
    // addresses.
    assert!((responses(&first) - 6.0).abs() < 0.5, "known resources were sent again: {}", responses(&first));
    of_files.kill();
    traffic.end_after_outage();

    // Put and delete.
    let traffic = Traffic::start(&testbed);
    let added = etcd.put(EXTRA_ENDPOINT).remove(0);
    wait_p4_covered(&testbed);
    assert_ne!(wait_in_step(&testbed, 1), version);
    etcd.delete(&added);
    wait_p4_uncovered(&testbed);
    assert_eq!(wait_in_step(&testbed, 1), version, "the same version again");

    // etcd is killed: reported, without other effects.
    etcd.kill();
    let lost = || status(&testbed, 1)["source"]["connected"] == false;
    assert!(wait_for(Duration::from_secs(20), lost), "{}", first.log());
    let source = status(&testbed, 1)["source"].clone();
    assert!(source["error"].as_str().unwrap().contains(ENDPOINT), "{source}");
    let (_, table, _) = testbed.policy_status(&["--server", URLS[1]]);
    assert!(table.contains("UNREACHABLE: can't read etcd"), "{table}");
    assert!(first.metric("vipgate_policyd_source_connected", "") < 0.5);
    first.wait_for_log(&["source_lost"]);
    assert_eq!(testbed.policy_server_status()["connected"], true, "the policy server is still connected");
    assert_eq!(wait_in_step(&testbed, 1), version);

    // etcd restarts with changes whose history is compacted.
    etcd.restart();
    etcd.put(EXTRA_ENDPOINT);
    etcd.put(&EXTRA_ENDPOINT.replace("name: more", "name: gone"));
    etcd.delete("/vipgate/EndpointSlice/tenant-b/gone");
    etcd.compact();
    wait_p4_covered(&testbed);
    assert!(wait_for(Duration::from_secs(10), || status(&testbed, 1)["source"]["connected"] == true));
    first.wait_for_log(&["source_found"]);
    etcd.delete(&added);
    wait_p4_uncovered(&testbed);
    assert_eq!(wait_in_step(&testbed, 1), version);
    traffic.end();

    // A second server on the same etcd; the gateway moves to it, and the first server is killed.
    let second = start(&testbed, &folder, 2);
    assert_eq!(status(&testbed, 2)["version"], version.as_str());
    testbed.wait_cached();
    let traffic = Traffic::start(&testbed);
    testbed.stop("KILL");
    testbed.start_gateway(&server_config(&testbed, &more, 2));
    assert_eq!(wait_in_step(&testbed, 2), version);
    assert!((responses(&second) - 6.0).abs() < 0.5, "known resources were sent again: {}", responses(&second));
    traffic.end_after_outage();
    let traffic = Traffic::start(&testbed);
    first.kill();
    etcd.put(EXTRA_ENDPOINT);
    wait_p4_covered(&testbed);
    wait_in_step(&testbed, 2);
    traffic.end();
    testbed.check_frames();
}
