//! Attach, move and detach: state and requests.

use vipgate_cloud::{Attachment, ErrorKind};

use crate::azure::bench::{Bench, VIP_1, VIP_2, ip, kind, nic_id};
use crate::calls::Calls;

#[tokio::test]
async fn all_addresses_of_a_nic_are_attached_by_one_change() {
    let bench = Bench::prepared().await;
    bench.attach("gw-1").await.expect("attached");
    let expected = ["GET publicIPAddresses", "GET gw-1-nic", "PUT gw-1-nic", "GET operation"];
    let mut log = bench.log();
    log[..2].sort_unstable();
    let mut expected = expected.map(str::to_owned);
    expected[..2].sort_unstable();
    assert_eq!(log, expected);
    bench.assert_places(Some("gw-1-nic"), Some("gw-1-nic"));
    let address = bench.address(VIP_1).await;
    let private = address.private[&nic_id("gw-1-nic")];
    assert_eq!(
        address.attachment,
        Some(Attachment { nic: Some(nic_id("gw-1-nic")), private: Some(private), id: None })
    );
}

#[tokio::test]
async fn what_is_attached_already_is_not_changed() {
    let bench = Bench::attached().await;
    let before = bench.resource("gw-1-nic");
    bench.attach("gw-1").await.expect("attached");
    assert_eq!(bench.changes(), Vec::<String>::new());
    assert_eq!(bench.resource("gw-1-nic"), before);
}

#[tokio::test]
async fn a_change_keeps_everything_else_of_the_nic() {
    let bench = Bench::prepared().await;
    let mut before = bench.resource("gw-1-nic");
    bench.attach("gw-1").await.expect("attached");
    let mut after = bench.resource("gw-1-nic");
    for (at, name) in [(1, "vip-1"), (2, "vip-2")] {
        let properties = &mut after["properties"]["ipConfigurations"][at]["properties"];
        let public = properties.as_object_mut().and_then(|it| it.remove("publicIPAddress")).expect("an address");
        assert_eq!(public["id"], bench.resource(name)["id"]);
    }
    assert_ne!(before["etag"], after["etag"]);
    before["etag"] = after["etag"].clone();
    assert_eq!(before, after);
}

#[tokio::test]
async fn a_move_is_one_change_of_each_nic() {
    let bench = Bench::attached().await;
    bench.move_to("gw-1-nic", "gw-2").await.expect("moved");
    let log = bench.log();
    let mut reads = log[..3].to_vec();
    reads.sort_unstable();
    assert_eq!(reads, ["GET gw-1-nic", "GET gw-2-nic", "GET publicIPAddresses"]);
    assert_eq!(log[3..], ["PUT gw-1-nic", "GET operation", "PUT gw-2-nic", "GET operation"]);
    bench.assert_places(Some("gw-2-nic"), Some("gw-2-nic"));
    let private = bench.server.with(|cloud| cloud.private("gw-1-nic"));
    assert_eq!(private.len(), 3, "the private addresses stay: {private:?}");
}

#[tokio::test]
async fn a_move_of_one_address_leaves_the_others() {
    let bench = Bench::attached().await;
    let (nic, bindings) = bench.bindings("gw-2").await;
    bench.log();
    bench.provider.move_from_dead(&nic_id("gw-1-nic"), &nic, &bindings[..1]).await.expect("moved");
    let log = bench.log();
    assert_eq!(log.len(), 7, "{log:?}");
    assert!(log.contains(&"GET vip-1".to_owned()), "one address is read alone");
    bench.assert_places(Some("gw-2-nic"), Some("gw-1-nic"));
}

#[tokio::test]
async fn a_move_that_is_done_changes_nothing() {
    let bench = Bench::attached().await;
    for is_first in [true, false] {
        bench.move_to("gw-1-nic", "gw-2").await.expect("moved");
        assert_eq!(bench.changes().len(), if is_first { 2 } else { 0 });
    }
}

#[tokio::test]
async fn from_a_nic_that_does_not_exist_any_more_the_move_is_one_change() {
    let bench = Bench::attached().await;
    bench.server.with(|cloud| cloud.remove_instance("gw-1"));
    bench.move_to("gw-1-nic", "gw-2").await.expect("moved");
    assert_eq!(bench.changes(), ["PUT gw-2-nic"]);
    bench.assert_places(Some("gw-2-nic"), Some("gw-2-nic"));
}

#[tokio::test]
async fn an_address_that_is_attached_elsewhere_is_not_taken() {
    let bench = Bench::prepared().await;
    let stale = bench.bindings("gw-1").await;
    bench.server.with(|cloud| cloud.attach("vip-1", "other-vm-nic", "primary"));
    assert_eq!(kind(bench.provider.attach(&stale.0, &stale.1).await), ErrorKind::InUse);
    bench.assert_places(Some("other-vm-nic"), Some("gw-1-nic"));
    let moved = bench.provider.move_from_dead(&nic_id("gw-2-nic"), &stale.0, &stale.1).await;
    assert_eq!(kind(moved), ErrorKind::InUse);
    bench.assert_places(Some("other-vm-nic"), Some("gw-1-nic"));
}

#[tokio::test]
async fn nothing_is_taken_from_load_balancers_and_nat_gateways() {
    let bench = Bench::prepared().await;
    let stale = bench.bindings("gw-1").await;
    bench.server.with(|cloud| {
        cloud.attach_to_nat_gateway("vip-1", "nat");
        cloud.attach_to_load_balancer("vip-2", "lb");
    });
    bench.log();
    assert_eq!(kind(bench.provider.attach(&stale.0, &stale.1).await), ErrorKind::InUse);
    assert_eq!(bench.changes(), Vec::<String>::new());
    bench.assert_places(None, None);
}

#[tokio::test]
async fn a_move_takes_nothing_that_somebody_else_attached_at_the_dead_gateway() {
    let bench = Bench::prepared().await;
    bench.server.with(|cloud| cloud.attach("vip-1", "gw-1-nic", "primary"));
    assert_eq!(kind(bench.move_to("gw-1-nic", "gw-2").await), ErrorKind::InUse);
    bench.assert_places(Some("gw-1-nic"), Some("gw-2-nic"));
    assert_eq!(bench.changes(), ["PUT gw-2-nic"]);
}

#[tokio::test]
async fn an_address_that_another_gateway_has_meanwhile_is_not_moved() {
    let bench = Bench::attached().await;
    let stale = bench.bindings("gw-2").await;
    let address = [bench.address(VIP_1).await];
    bench.provider.prepare(&bench.nic("gw-3").await, &address, &[]).await.expect("prepared");
    let (nic, bindings) = bench.bindings("gw-3").await;
    bench.provider.move_from_dead(&nic_id("gw-1-nic"), &nic, &bindings).await.expect("moved");
    let moved = bench.provider.move_from_dead(&nic_id("gw-1-nic"), &stale.0, &stale.1).await;
    assert_eq!(kind(moved), ErrorKind::InUse);
    bench.assert_places(Some("gw-3-nic"), Some("gw-2-nic"));
}

#[tokio::test]
async fn an_address_whose_claim_is_gone_is_neither_attached_nor_detached() {
    for cluster in [None, Some("other")] {
        let bench = Bench::attached().await;
        let address = [bench.address(VIP_1).await];
        bench.server.with(|cloud| cloud.set_tag("vip-1", "vipgate.io_cluster", cluster));
        let detached = bench.provider.detach(&nic_id("gw-1-nic"), &address).await;
        assert_eq!(kind(detached), ErrorKind::InUse);
        assert_eq!(kind(bench.move_to("gw-1-nic", "gw-2").await), ErrorKind::InUse);
        bench.assert_places(Some("gw-1-nic"), Some("gw-2-nic"));
    }
}

#[tokio::test]
async fn a_private_address_with_another_public_one_is_left_alone() {
    let bench = Bench::prepared().await;
    let stale = bench.bindings("gw-1").await;
    bench.server.with(|cloud| cloud.attach("other", "gw-1-nic", "vipgate-vip-1"));
    assert_eq!(kind(bench.provider.attach(&stale.0, &stale.1).await), ErrorKind::InUse);
    bench.assert_places(None, Some("gw-1-nic"));
    assert!(bench.server.with(|cloud| cloud.routes()).contains_key(&ip("203.0.113.9")));
}

#[tokio::test]
async fn without_its_private_address_nothing_is_attached() {
    let bench = Bench::prepared().await;
    let (nic, mut bindings) = bench.bindings("gw-1").await;
    bindings.truncate(1);
    bindings[0].private = ip("10.0.1.200");
    assert_eq!(kind(bench.provider.attach(&nic, &bindings).await), ErrorKind::NotFound);
    let nic = bench.nic("gw-3").await;
    assert_eq!(kind(bench.provider.attach(&nic, &bindings).await), ErrorKind::NotFound);
    bench.assert_places(None, None);
}

#[tokio::test]
async fn detaching_is_one_change_and_then_none() {
    let bench = Bench::attached().await;
    let addresses = bench.addresses().await;
    bench.log();
    for is_first in [true, false] {
        bench.provider.detach(&nic_id("gw-1-nic"), &addresses).await.expect("detached");
        let expected: &[&str] = if is_first { &["PUT gw-1-nic"] } else { &[] };
        assert_eq!(bench.changes(), expected);
        bench.assert_places(None, None);
    }
    assert_eq!(bench.server.with(|cloud| cloud.private("gw-1-nic")).len(), 3, "what is prepared stays");
}

#[tokio::test]
async fn what_is_attached_elsewhere_meanwhile_is_not_detached() {
    let bench = Bench::attached().await;
    let addresses = bench.addresses().await;
    bench.move_to("gw-1-nic", "gw-2").await.expect("moved");
    bench.log();
    bench.provider.detach(&nic_id("gw-1-nic"), &addresses).await.expect("nothing to do");
    assert_eq!(bench.changes(), Vec::<String>::new());
    bench.assert_places(Some("gw-2-nic"), Some("gw-2-nic"));
    bench.server.with(|cloud| cloud.remove_instance("gw-1"));
    bench.provider.detach(&nic_id("gw-1-nic"), &addresses).await.expect("a NIC that doesn't exist has nothing");
}

#[tokio::test]
async fn what_somebody_else_attached_is_not_detached() {
    let bench = Bench::prepared().await;
    bench.server.with(|cloud| cloud.attach("vip-2", "gw-1-nic", "primary"));
    bench.log();
    let addresses = [bench.address(VIP_2).await];
    let result = bench.provider.detach(&nic_id("gw-1-nic"), &addresses).await;
    assert_eq!(kind(result), ErrorKind::InUse);
    assert_eq!(bench.changes(), Vec::<String>::new());
    bench.assert_places(None, Some("gw-1-nic"));
}

#[tokio::test]
async fn nothing_to_do_is_no_request() {
    let bench = Bench::prepared().await;
    let nic = bench.nic("gw-1").await;
    bench.log();
    bench.provider.attach(&nic, &[]).await.expect("nothing");
    bench.provider.move_from_dead(&nic.id, &nic, &[]).await.expect("nothing");
    bench.provider.detach(&nic.id, &[]).await.expect("nothing");
    bench.provider.unprepare(&nic, &[]).await.expect("nothing");
    assert_eq!(bench.log(), Vec::<String>::new());
}
