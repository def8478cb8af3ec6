//! Publication of snapshots while a worker is in a turn.

use std::mem;

use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::policy::publish::Publisher;
use vipgate_testkit::*;

/// An update is acknowledged once it is published: what is sent from then on is processed by it, also by a worker that
/// began its turn before.
#[test]
fn a_packet_received_after_publication_is_processed_by_the_new_snapshot() {
    let packet = tcp(at("10.244.1.5:4000"), at("198.51.100.10:443"), "S", 1000, 0);
    let mut without_pod = policy();
    without_pod.endpoints.retain(|endpoint| endpoint.address != ip("10.244.1.5"));
    let mut gateway = Gateway::with(&Setup::default(), network(), &without_pod);
    assert!(gateway.receive(0, INSIDE, &packet).is_empty());
    assert_eq!(gateway.drops(), [(DropReason::NoPolicy, 1)].into());

    let current = gateway.builder.with_policy(&without_pod).unwrap();
    let mut publisher = mem::replace(&mut gateway.publisher, Publisher::new(current));
    let next = gateway.builder.with_policy(&policy()).unwrap();
    gateway.workers[0].io().before_rx(move || publisher.publish(next));
    assert_eq!(gateway.receive(0, INSIDE, &packet).len(), 1);
    gateway.assert_delta("egress 1, drop no_policy 1, created 1");
}
