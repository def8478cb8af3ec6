//! Services as a gateway is offered them: whom it may choose depends on where it is.

use super::*;
use crate::xds::fixtures::deal;

/// What changes for a gateway that has `before`, by way of the wire.
fn change(viewer: &Viewer, before: &Deal, after: &Deal) -> PolicyChange {
    let (before, after) = (Told::of(before), Told::of(after));
    let mut book = book_of(&before);
    for response in responses(&after.differences(&before)) {
        book.stage(response).unwrap();
    }
    assert!(book.is_whole() || !book.has_staged());
    book.offer(viewer).change
}

/// The last byte of whom clients outside and pods may be sent to, and how many a health check is told.
fn chosen(service: &ServiceSpec) -> (Vec<u8>, Vec<u8>, u32) {
    let last = |address: IpAddr| if let IpAddr::V4(v4) = address { v4.octets()[3] } else { 0 };
    let of = |may: fn(&BackendSpec) -> bool| {
        service.backends.iter().filter(|it| may(it)).map(|it| last(it.address)).collect()
    };
    (of(|it| it.external), of(|it| it.internal), service.health.unwrap().local_endpoints)
}

fn on_node(node: &str) -> Viewer {
    Viewer { node: node.into(), ..Viewer::named("g1") }
}

#[test]
fn a_service_that_changes_or_goes_is_offered_so() {
    let with = |backends: &[u8]| Deal { services: vec![service(backends)], ..deal(2) };
    let none = Deal { services: vec![], ..deal(2) };
    let came = change(&on_node("n1"), &none, &with(&[1, 2]));
    assert_eq!((came.services.len(), came.gone.services.len()), (1, 0));
    let changed = change(&on_node("n1"), &with(&[1, 2]), &with(&[2]));
    assert_eq!(changed.services, [service(&[2]).seen_by(&Viewer { zone: "z1".into(), ..on_node("n1") })]);
    let gone = change(&on_node("n1"), &with(&[1, 2]), &none);
    assert_eq!((gone.services, gone.gone.services), (vec![], vec!["Service a/s".into()]));
    assert!(change(&on_node("n1"), &with(&[1]), &with(&[1])).is_empty());
}

#[test]
fn a_gateways_own_node_and_zone_decide_whom_it_may_choose() {
    let offered = |viewer: &Viewer| change(viewer, &Deal::default(), &deal(2)).services;
    // The deal's own gateway is in zone 1, as its manifest says.
    let [service] = &*offered(&on_node("n2")) else { panic!("one Service") };
    assert_eq!(chosen(service), (vec![2], vec![1], 1));
    let [service] = &*offered(&Viewer { zone: "z2".into(), ..on_node("n3") }) else { panic!("one Service") };
    assert_eq!(chosen(service), (vec![], vec![2], 0));
    let [service] = &*offered(&Viewer::named("g9")) else { panic!("one Service") };
    assert_eq!(chosen(service), (vec![], vec![1, 2], 0));
}

#[test]
fn a_gateway_that_moves_to_another_zone_is_offered_its_services_anew() {
    let at = |zone: &str| {
        let peers = deal(2).peers.into_iter().map(|peer| Peer { zone: zone.into(), ..peer });
        Deal { peers: peers.collect(), ..deal(2) }
    };
    let moved = change(&on_node("n1"), &at("z1"), &at("z2"));
    assert_eq!(moved.services.iter().map(chosen).collect::<Vec<_>>(), [(vec![1], vec![2], 1)]);
    // Its own word on that goes before its manifest's; and no change but of zones is one of Services.
    assert!(change(&Viewer { zone: "z1".into(), ..on_node("n1") }, &at("z1"), &at("z2")).is_empty());
    assert!(change(&on_node("n1"), &at("z8"), &at("z9")).is_empty());
    let lost = change(&on_node("n1"), &at("z1"), &Deal { peers: vec![], ..deal(2) });
    assert_eq!(lost.services.iter().map(chosen).collect::<Vec<_>>(), [(vec![1], vec![1, 2], 1)]);
    // What goes or changes anyway is told once.
    let changed = change(&on_node("n1"), &at("z1"), &Deal { services: vec![service(&[1])], ..at("z2") });
    assert_eq!(changed.services.len(), 1);
    let gone = change(&on_node("n1"), &at("z1"), &Deal { services: vec![], ..at("z2") });
    assert_eq!((gone.services.len(), gone.gone.services.len()), (0, 1));
}
