use std::fmt::Write;
use std::sync::Arc;

use vipgate_policy::manifest::{Manifests, ObjectId, UnsupportedKinds, read};
use vipgate_policy::yaml::Source;

use super::*;

/// Pools of two addresses, each with what its status has recorded, and a Service without an address.
fn snapshot(pools: &[(&str, &[&str])]) -> Snapshot {
    let mut text = "apiVersion: v1\nkind: Service\n\
                    metadata: {name: s, namespace: t, annotations: {vipgate.io/announce: L2}}\n\
                    spec: {type: LoadBalancer, ports: [{port: 80}]}\n"
        .to_owned();
    for (n, (name, lines)) in pools.iter().enumerate() {
        let _ = write!(
            text,
            "---\napiVersion: vipgate.io/v1alpha1\nkind: AddressPool\nmetadata: {{name: {name}}}\n\
             spec: {{ranges: [203.0.113.{}/31]}}\nstatus: {{addresses: {lines:?}}}\n",
            2 * n
        );
    }
    let mut manifests = Manifests::default();
    read(&Source::new("test.yaml", text).into(), UnsupportedKinds::Reject, &mut manifests);
    assert_eq!(manifests.diagnostics, []);
    let objects = manifests.objects.into_iter().map(Arc::new).collect();
    Snapshot { objects, is_complete: true, ..Snapshot::default() }
}

/// Pools as they were read.
fn listed(pools: &[(&str, &[&str])]) -> BTreeMap<String, ListedPool> {
    let pool = |(name, lines): &(&str, &[&str])| {
        let record = AddressRecord::from_lines(lines.iter().copied()).unwrap();
        ((*name).to_owned(), ListedPool { record, has_record: true, uid: "u".into(), version: "1".to_owned() })
    };
    pools.iter().map(pool).collect()
}

/// The plan for the Service with what was read.
fn plan(snapshot: &Snapshot, listed: &BTreeMap<String, ListedPool>) -> AllocationPlan {
    snapshot.plan(&snapshot.services(), merged(listed), "2026-01-01T00:00:00Z".parse().unwrap())
}

/// The names of the pools whose records are to be written, in order.
fn changed(listed: &BTreeMap<String, ListedPool>, plan: &AllocationPlan) -> Vec<String> {
    changes(listed, plan).iter().map(|change| change.pool.to_owned()).collect()
}

#[test]
fn a_record_is_written_until_the_api_has_it_and_until_it_is_observed() {
    let pools: [(&str, &[&str]); 2] = [("a", &[]), ("b", &[])];
    let (before, pools) = (snapshot(&pools), listed(&pools));
    let planned = plan(&before, &pools);
    assert_eq!(changed(&pools, &planned), ["a"]);
    assert!(!are_observed(&planned.records, &before));
    let written: [(&str, &[&str]); 2] = [("a", &["203.0.113.0 Service t/s"]), ("b", &[])];
    assert!(changes(&listed(&written), &planned).is_empty());
    assert!(are_observed(&planned.records, &snapshot(&written)));
}

#[test]
fn an_address_that_comes_to_another_pool_is_recorded_there_first() {
    let line = "203.0.113.2 ClusterEgressPolicy c";
    let mut snapshot = snapshot(&[("a", &[line]), ("b", &[])]);
    let owner = ObjectId { kind: Kind::ClusterEgressPolicy, namespace: String::new(), name: "c".to_owned() };
    snapshot.policy_addresses = vec![("203.0.113.2".parse().unwrap(), owner)];
    let pools = listed(&[("a", &[line]), ("b", &[])]);
    let planned = plan(&snapshot, &pools);
    assert_eq!(planned.records["b"].lines().collect::<Vec<_>>(), [line]);
    assert_eq!(changed(&pools, &planned), ["b", "a"]);
}

#[test]
fn a_service_waits_for_the_record_of_its_new_address_alone() {
    let pools: [(&str, &[&str]); 2] = [("a", &[]), ("b", &[])];
    let (snapshot, empty) = (snapshot(&pools), listed(&pools));
    let planned = plan(&snapshot, &empty);
    let (mut services, addresses) = (snapshot.services(), planned.decisions[0].addresses.clone());
    assert_eq!(addresses.len(), 1);
    let unwritten = changes(&empty, &planned);
    assert!(waits_for(&services[0], &addresses, &unwritten));
    assert!(!waits_for(&services[0], &addresses, &[]), "it is written");
    assert!(!waits_for(&services[0], &[], &unwritten), "it gives up what it has");
    // As in the other pools: the write that fails may not be about it.
    let recorded = listed(&[("a", &["203.0.113.0 Service t/s", "203.0.113.1 Service t/gone"]), ("b", &[])]);
    let unwritten = changes(&recorded, &planned);
    assert_eq!(unwritten.len(), 1);
    assert!(!waits_for(&services[0], &addresses, &unwritten), "it is recorded as its own");
    // A pool that the API doesn't have can't record anything.
    let missing = listed(&[("b", &[])]);
    let unwritten = changes(&missing, &planned);
    assert!(unwritten[0].listed.is_none() && waits_for(&services[0], &addresses, &unwritten));
    services[0].current = addresses.clone();
    assert!(!waits_for(&services[0], &addresses, &unwritten), "it has it already");
}

#[test]
fn what_another_leader_has_recorded_of_a_policy_stays_until_the_snapshot_has_the_record() {
    let lines = ["203.0.113.0 EgressPolicy t/new", "203.0.113.1 Service t/gone"];
    let pools: [(&str, &[&str]); 1] = [("a", &lines)];
    let pools = listed(&pools);
    let freed = |snapshot: &Snapshot| {
        let planned = plan(&with_unobserved(snapshot, &merged(&pools)), &pools);
        planned.records["a"].iter().map(|(_, holding)| holding.freed.is_some()).collect::<Vec<_>>()
    };
    assert_eq!(freed(&snapshot(&[("a", &[])])), [false, true], "Services are read with the record");
    assert_eq!(freed(&snapshot(&[("a", &lines)])), [true, true]);
}
