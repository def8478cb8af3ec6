//! `associate: instance`: the public address of a NIC's primary IP configuration.

use vipgate_cloud::{Associate, Binding, Capacity, ErrorKind};

use crate::azure::bench::{Bench, VIP_1, VIP_2, kind, nic_id, our_claim};
use crate::calls::Calls;

async fn claimed() -> Bench {
    let bench = Bench::with(Associate::Instance).await;
    bench.provider.claim(&bench.address(VIP_1).await, &our_claim()).await.expect("claimed");
    bench
}

#[tokio::test]
async fn each_claimed_address_is_bound_to_each_primary_address() {
    let bench = claimed().await;
    let observed = bench.observe().await;
    assert!(observed.nics.iter().all(|nic| nic.capacity == Capacity::ipv4(1) && nic.associate == Associate::Instance));
    assert_eq!(observed.addresses[0].private.len(), 3);
    assert!(observed.addresses[1].private.is_empty(), "without a claim it is bound to nothing");
    let primary = bench.server.with(|cloud| cloud.private("gw-2-nic"))["primary"].clone();
    assert_eq!(observed.addresses[0].private[&nic_id("gw-2-nic")].to_string(), primary);
}

#[tokio::test]
async fn a_vip_is_attached_moved_and_detached_without_another_private_address() {
    let bench = claimed().await;
    let address = bench.address(VIP_1).await;
    let nic = bench.nic("gw-1").await;
    bench.log();
    bench.provider.prepare(&nic, std::slice::from_ref(&address), &[]).await.expect("prepared");
    assert_eq!(bench.changes(), ["PUT gw-1-nic"], "forwarding");
    bench.attach("gw-1").await.expect("attached");
    bench.assert_places(Some("gw-1-nic"), None);
    bench.move_to("gw-1-nic", "gw-2").await.expect("moved");
    bench.assert_places(Some("gw-2-nic"), None);
    let (nic, bindings) = bench.bindings("gw-2").await;
    bench.log();
    bench.provider.unprepare(&nic, &bindings).await.expect("nothing");
    assert_eq!(bench.log(), Vec::<String>::new());
    bench.provider.detach(&nic.id, &[address]).await.expect("detached");
    bench.assert_places(None, None);
    assert_eq!(bench.server.with(|cloud| cloud.private("gw-2-nic")).len(), 1);
}

#[tokio::test]
async fn the_public_address_of_somebody_else_stays_at_the_primary_address() {
    let bench = claimed().await;
    let stale = bench.bindings("gw-1").await;
    bench.server.with(|cloud| cloud.attach("other", "gw-1-nic", "primary"));
    let nic = bench.nic("gw-1").await;
    assert_eq!(nic.capacity, Capacity::default());
    assert_eq!(nic.missing.len(), 1);
    bench.log();
    assert_eq!(kind(bench.provider.attach(&stale.0, &stale.1).await), ErrorKind::InUse);
    assert_eq!(bench.changes(), Vec::<String>::new());
}

#[tokio::test]
async fn an_unclaimed_address_of_the_pool_stays_where_somebody_attached_it() {
    let bench = claimed().await;
    bench.server.with(|cloud| cloud.attach("vip-2", "gw-1-nic", "primary"));
    let observed = bench.observe().await;
    assert_eq!(observed.nic_of("gw-1").expect("a gateway").capacity, Capacity::default());
    let address = observed.addresses[1].clone();
    assert_eq!(kind(bench.provider.claim(&address, &our_claim()).await), ErrorKind::InUse);
    let nic = observed.nic_of("gw-2").expect("a gateway");
    let private = bench.address(VIP_1).await.private[&nic.id];
    let binding = Binding { address: bench.address(VIP_2).await, private };
    let moved = bench.provider.move_from_dead(&nic_id("gw-1-nic"), nic, &[binding]).await;
    assert_eq!(kind(moved), ErrorKind::InUse);
    bench.assert_places(None, Some("gw-1-nic"));
}
