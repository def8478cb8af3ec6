//! The record of addresses in the status of AddressPools: what is given is in it first, and what it says outlives servers.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use vipgate_tests::kubernetes::{ApiServer, POLICYD};
use vipgate_tests::policyd::Policyd;
use vipgate_tests::{Testbed, wait_for};

use crate::access::grant_all_but;
use crate::fixture::{source, start_policyd};
use crate::ipam::{addresses, service, wait_addresses};

/// `reuseAfter` of the pool `public`.
const REUSE_AFTER: Duration = Duration::from_secs(20);

const POOLS: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: tenant-a}
---
apiVersion: vipgate.io/v1alpha1
kind: AddressPool
metadata: {name: public}
spec: {ranges: [203.0.113.30-203.0.113.31], reuseAfter: 20s}
---
apiVersion: vipgate.io/v1alpha1
kind: AddressPool
metadata: {name: limited}
spec: {ranges: [203.0.113.40-203.0.113.41], autoAssign: false, maxPerNamespace: 1}
---
apiVersion: vipgate.io/v1alpha1
kind: AddressPool
metadata: {name: policies}
spec: {ranges: [203.0.113.48/30], autoAssign: false}
";

/// A policy with an address of the pool `policies`.
fn policy(name: &str) -> String {
    format!(
        "apiVersion: vipgate.io/v1alpha1\nkind: EgressPolicy\nmetadata: {{name: {name}, namespace: tenant-a}}\n\
         spec: {{selectors: [{{podSelector: {{matchLabels: {{app: {name}}}}}}}], pools: [{{name: policies}}]}}\n"
    )
}

/// Who has which address of a pool by its record: `ADDRESS` by `KIND NAMESPACE/NAME`.
fn owners(api: &ApiServer, pool: &str) -> BTreeMap<String, String> {
    let pool = api.get("addresspool", "", pool);
    let lines = pool["status"]["addresses"].as_array().cloned().unwrap_or_default();
    let owner = |line: &str| match line.split(' ').collect::<Vec<_>>()[..] {
        [address, kind, path] => Some((format!("{kind} {path}"), address.to_owned())),
        _ => None,
    };
    lines.iter().filter_map(|line| owner(line.as_str().unwrap())).collect()
}

#[track_caller]
fn wait_owners(api: &ApiServer, policyd: &Policyd, pool: &str, count: usize) -> BTreeMap<String, String> {
    let has = || owners(api, pool).len() == count;
    assert!(wait_for(Duration::from_secs(15), has), "{:?}\n{}", owners(api, pool), policyd.log());
    owners(api, pool)
}

/// Ends a server, and starts another one, which leads.
fn restart(testbed: &Testbed, api: &ApiServer, mut policyd: Policyd) -> Policyd {
    policyd.process().signal("TERM").unwrap();
    policyd.wait_for_log(&["leader_released"]);
    drop(policyd);
    let policyd = start_policyd(testbed, &source(api, POLICYD, ""));
    policyd.wait_for_log(&["leader_elected"]);
    policyd
}

#[test]
fn an_address_that_is_given_up_is_kept_from_others_for_a_while() {
    let testbed = Testbed::new("k8s-quarantine");
    let api = ApiServer::new(&testbed.gateway);
    grant_all_but(&api, None);
    api.apply(POOLS);
    let policyd = start_policyd(&testbed, &source(&api, POLICYD, ""));
    for (name, address) in [("first", "203.0.113.30"), ("second", "203.0.113.31")] {
        api.apply(&service(name, "", ""));
        wait_addresses(&api, &policyd, name, &[address]);
    }
    // Its former owner gets it again.
    api.delete("service", "tenant-a", "first");
    wait_owners(&api, &policyd, "public", 1);
    api.apply(&service("first", "", ""));
    wait_addresses(&api, &policyd, "first", &["203.0.113.30"]);

    let deleted = Instant::now();
    api.delete("service", "tenant-a", "first");
    api.apply(&service("third", "", ""));
    let refused = ["address_refused", "tenant-a/third", "others are quarantined"];
    policyd.wait_for_log(&refused);
    assert!((policyd.metric("vipgate_ipam_addresses", "pool=\"public\",state=\"quarantined\"") - 1.0).abs() < 0.1);
    let policyd = restart(&testbed, &api, policyd);
    policyd.wait_for_log(&refused);
    let is_given = || addresses(&api, "third") == ["203.0.113.30"];
    assert!(wait_for(2 * REUSE_AFTER, is_given), "{}", policyd.log());
    assert!(deleted.elapsed() >= REUSE_AFTER, "{:?}", deleted.elapsed());
    policyd.kill();
}

#[test]
fn a_namespace_gets_no_more_addresses_of_a_pool_than_its_limit() {
    let testbed = Testbed::new("k8s-limit");
    let api = ApiServer::new(&testbed.gateway);
    grant_all_but(&api, None);
    api.apply(POOLS);
    let policyd = start_policyd(&testbed, &source(&api, POLICYD, ""));
    let pool = ", vipgate.io/pool: limited";
    api.apply(&service("first", pool, ""));
    wait_addresses(&api, &policyd, "first", &["203.0.113.40"]);
    api.apply(&service("second", pool, ""));
    policyd.wait_for_log(&["address_refused", "tenant-a/second", "namespace_limit", "`maxPerNamespace`"]);
    assert!(policyd.metric("vipgate_ipam_refused", "reason=\"namespace_limit\"") > 0.5);
    assert_eq!(addresses(&api, "second"), [""; 0]);
    policyd.kill();
}

#[test]
fn no_address_is_given_that_is_not_recorded_and_another_leader_gives_what_is() {
    let testbed = Testbed::new("k8s-record");
    let api = ApiServer::new(&testbed.gateway);
    grant_all_but(&api, Some("addresspools/status"));
    api.apply(POOLS);
    api.apply(&service("web", "", ""));
    let policyd = start_policyd(&testbed, &source(&api, POLICYD, ""));
    policyd.wait_for_log(&["address_failed", "AddressPool public", "addresspools/status", "forbidden"]);
    assert_eq!(addresses(&api, "web"), [""; 0]);

    grant_all_but(&api, Some("services/status"));
    let recorded = wait_owners(&api, &policyd, "public", 1);
    assert_eq!(recorded, [("Service tenant-a/web".to_owned(), "203.0.113.30".to_owned())].into());
    policyd.wait_for_log(&["address_failed", "Service tenant-a/web", "forbidden"]);
    assert_eq!(addresses(&api, "web"), [""; 0]);
    policyd.kill();

    grant_all_but(&api, None);
    let policyd = start_policyd(&testbed, &source(&api, POLICYD, ""));
    wait_addresses(&api, &policyd, "web", &["203.0.113.30"]);
    assert_eq!(owners(&api, "public"), recorded);
    policyd.kill();
}

#[test]
fn a_policy_keeps_its_address_when_others_come_and_go() {
    let testbed = Testbed::new("k8s-stays");
    let api = ApiServer::new(&testbed.gateway);
    grant_all_but(&api, None);
    api.apply(POOLS);
    for name in ["p1", "p2", "p3", "p4"] {
        api.apply(&policy(name));
    }
    let policyd = start_policyd(&testbed, &source(&api, POLICYD, ""));
    let mut expected = wait_owners(&api, &policyd, "policies", 4);
    api.delete("egresspolicy", "tenant-a", "p1");
    expected.remove("EgressPolicy tenant-a/p1");
    assert_eq!(wait_owners(&api, &policyd, "policies", 3), expected);
    let policyd = restart(&testbed, &api, policyd);
    // The only free address is quarantined.
    api.apply(&policy("p5"));
    let is_refused = || api.get("egresspolicy", "tenant-a", "p5")["status"].to_string().contains("VG0420");
    assert!(wait_for(Duration::from_secs(15), is_refused), "{}", policyd.log());
    assert_eq!(owners(&api, "policies"), expected);
    policyd.kill();
}
