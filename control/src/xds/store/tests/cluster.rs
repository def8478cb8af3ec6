//! The cluster's own prefixes: those of the server, merged with the gateway's configuration.

use vipgate_policy::compiler::Cluster;
use vipgate_policy::manifest::UncoveredAction;

use super::*;
use crate::xds::fixtures::sample_placement;

fn cluster(pods: &[&str], uncovered: Option<UncoveredAction>) -> Cluster {
    let cidrs: Vec<_> = pods.iter().map(|text| text.parse().unwrap()).collect();
    Cluster::from_config(&cidrs, &[], uncovered)
}

fn spec(pods: &[&str], drop_uncovered: bool) -> ClusterSpec {
    let pods = pods.iter().map(|text| text.parse().unwrap()).collect();
    ClusterSpec { pods, others: vec![], drop_uncovered }
}

fn update(
    store: &mut ResourceStore,
    server: &ServerPolicy,
    before: &ServerPolicy,
    gateway: &GatewayLocality,
) -> Option<ClusterSpec> {
    for response in responses(&server.diff(before)) {
        store.stage(response).unwrap();
    }
    let change = store.update_for(gateway).change;
    store.commit();
    change.cluster
}

#[test]
fn prefixes_of_gateway_and_server_are_merged_from_the_first_update_on() {
    let gateway = GatewayLocality { cluster: cluster(&["10.1.0.0/16"], None), ..GatewayLocality::named("g1") };
    let with = |cluster: Option<Cluster>| ServerPolicy::of(&Placement { cluster, ..sample_placement(2) });
    let (none, some) = (with(None), with(Some(cluster(&["10.2.0.0/16"], Some(UncoveredAction::Pass)))));
    let mut store = ResourceStore::default();
    let nothing = ServerPolicy::default();
    assert_eq!(
        update(&mut store, &none, &nothing, &gateway),
        Some(spec(&["10.1.0.0/16"], true)),
        "only those of the configuration"
    );
    assert_eq!(update(&mut store, &some, &none, &gateway), Some(spec(&["10.1.0.0/16", "10.2.0.0/16"], false)));
    // The gateway's own resource overrides the cluster's.
    let mut with_override =
        Placement { cluster: Some(cluster(&["10.2.0.0/16"], Some(UncoveredAction::Pass))), ..sample_placement(2) };
    with_override.peers[0].uncovered = Some(UncoveredAction::Drop);
    with_override.peers[0].pods = ["10.3.0.0/16".parse().unwrap()].into();
    let with_override = ServerPolicy::of(&with_override);
    let all = ["10.1.0.0/16", "10.2.0.0/16", "10.3.0.0/16"];
    assert_eq!(update(&mut store, &with_override, &some, &gateway), Some(spec(&all, true)));
    assert_eq!(update(&mut store, &none, &with_override, &gateway), Some(spec(&["10.1.0.0/16"], true)));
    assert_eq!(update(&mut store, &with(None), &none, &gateway), None, "unchanged");
    // The same from a cache.
    let mut store = ResourceStore::default();
    store.stage_cached(some.resources.clone()).unwrap();
    assert_eq!(store.update_for(&gateway).change.cluster, Some(spec(&["10.1.0.0/16", "10.2.0.0/16"], false)));
}
