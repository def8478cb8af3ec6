//! Services: a gateway's node and zone decide which backends it may choose.

use super::*;
use crate::xds::fixtures::sample_placement;

/// The policy change for a gateway from `before` to `after`, through encoded resources.
fn change(gateway: &GatewayLocality, before: &Placement, after: &Placement) -> PolicyChange {
    let (before, after) = (ServerPolicy::of(before), ServerPolicy::of(after));
    let mut store = store_with(&before);
    for response in responses(&after.diff(&before)) {
        store.stage(response).unwrap();
    }
    assert!(store.is_complete() || !store.has_staged());
    store.update_for(gateway).change
}

/// Last bytes of the backends for external and for internal clients, and the local endpoints that health checks report.
fn eligible(service: &ServiceSpec) -> (Vec<u8>, Vec<u8>, u32) {
    let last = |address: IpAddr| if let IpAddr::V4(v4) = address { v4.octets()[3] } else { 0 };
    let select = |is_eligible: fn(&BackendSpec) -> bool| {
        service.backends.iter().filter(|it| is_eligible(it)).map(|it| last(it.address)).collect()
    };
    (select(|it| it.external), select(|it| it.internal), service.health.unwrap().local_endpoints)
}

fn on_node(node: &str) -> GatewayLocality {
    GatewayLocality { node: node.into(), ..GatewayLocality::named("g1") }
}

#[test]
fn an_update_has_added_changed_and_removed_services() {
    let with = |backends: &[u8]| Placement { services: vec![service(backends)].into(), ..sample_placement(2) };
    let none = Placement { services: Table::default(), ..sample_placement(2) };
    let added = change(&on_node("n1"), &none, &with(&[1, 2]));
    assert_eq!((added.services.changed().count(), added.services.removed().count()), (1, 0));
    let changed = change(&on_node("n1"), &with(&[1, 2]), &with(&[2]));
    let expected = service(&[2]).for_gateway(&GatewayLocality { zone: "z1".into(), ..on_node("n1") });
    assert_eq!(changed.services, vec![expected].into());
    let removed = change(&on_node("n1"), &with(&[1, 2]), &none);
    assert_eq!(removed.services, Entries::default().without(["Service a/s".into()]));
    assert!(change(&on_node("n1"), &with(&[1]), &with(&[1])).is_empty());
}

#[test]
fn the_gateways_node_and_zone_decide_which_backends_are_eligible() {
    let services = |gateway: &GatewayLocality| {
        let change = change(gateway, &Placement::default(), &sample_placement(2));
        change.services.changed().cloned().collect::<Vec<_>>()
    };
    // The placement has gateway g1 in zone z1.
    let [service] = &*services(&on_node("n2")) else { panic!("one Service") };
    assert_eq!(eligible(service), (vec![2], vec![1], 1));
    let [service] = &*services(&GatewayLocality { zone: "z2".into(), ..on_node("n3") }) else { panic!("one Service") };
    assert_eq!(eligible(service), (vec![], vec![2], 0));
    let [service] = &*services(&GatewayLocality::named("g9")) else { panic!("one Service") };
    assert_eq!(eligible(service), (vec![], vec![1, 2], 0));
}

#[test]
fn a_zone_change_of_the_gateway_reevaluates_its_services() {
    let at = |zone: &str| {
        let peers = sample_placement(2).peers.into_iter().map(|peer| Peer { zone: zone.into(), ..peer });
        Placement { peers: peers.collect(), ..sample_placement(2) }
    };
    let moved = change(&on_node("n1"), &at("z1"), &at("z2"));
    assert_eq!(moved.services.changed().map(|it| eligible(it)).collect::<Vec<_>>(), [(vec![1], vec![2], 1)]);
    // The zone of the gateway's configuration takes precedence over its resource; zones without backends are equal.
    assert!(change(&GatewayLocality { zone: "z1".into(), ..on_node("n1") }, &at("z1"), &at("z2")).is_empty());
    assert!(change(&on_node("n1"), &at("z8"), &at("z9")).is_empty());
    let without_peer = change(&on_node("n1"), &at("z1"), &Placement { peers: vec![], ..sample_placement(2) });
    assert_eq!(without_peer.services.changed().map(|it| eligible(it)).collect::<Vec<_>>(), [(vec![1], vec![1, 2], 1)]);
    // Services that are changed or removed anyway are in the change once.
    let changed = change(&on_node("n1"), &at("z1"), &Placement { services: vec![service(&[1])].into(), ..at("z2") });
    assert_eq!(changed.services.changed().count(), 1);
    let removed = change(&on_node("n1"), &at("z1"), &Placement { services: Table::default(), ..at("z2") });
    assert_eq!((removed.services.changed().count(), removed.services.removed().count()), (0, 1));
}
