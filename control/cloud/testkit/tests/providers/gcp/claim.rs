//! Claims.

use vipgate_cloud::{Capacity, Claim, ErrorKind, NicId, PublicAddress};
use vipgate_cloud_testkit::Fault;
use vipgate_cloud_testkit::gcp::error_reply;

use crate::calls::Calls;
use crate::gcp::bench::{Bench, NIC_1, kind, our_claim};

fn conflict() -> Fault {
    Fault::Reply(error_reply(412, "conditionNotMet"))
}

#[tokio::test]
async fn a_claim_is_written_once_and_leaves_other_labels() {
    let bench = Bench::new().await;
    let address = bench.address("vip-1").await;
    bench.log();
    bench.provider.claim(&address, &our_claim()).await.expect("claimed");
    assert_eq!(bench.log(), ["GET vip-1", "POST setLabels", "POST wait"]);
    let labels = bench.server.with(|cloud| cloud.labels("vip-1"));
    assert_eq!(labels, ["pool=edge", "team=net", "vipgate-cluster=prod", "vipgate-vip=shop_-web"]);
    bench.provider.claim(&address, &our_claim()).await.expect("it is claimed");
    assert_eq!(bench.log(), ["GET vip-1"]);
    assert_eq!(bench.address("vip-1").await.claim, Some(our_claim()));
}

#[tokio::test]
async fn an_address_with_another_claim_is_in_use() {
    let bench = Bench::claimed().await;
    let free = bench.address("vip-1").await;
    let other_owner = Claim { owner: "shop/mail".to_owned(), ..our_claim() };
    let other_cluster = Claim { cluster: "test".to_owned(), ..our_claim() };
    assert_eq!(kind(bench.provider.claim(&free, &other_cluster).await), ErrorKind::InUse);
    for claim in [other_owner, other_cluster] {
        let mut stale = free.clone();
        stale.claim = Some(claim);
        assert_eq!(kind(bench.provider.unclaim(&stale).await), ErrorKind::InUse);
    }
    assert_eq!(bench.writes(), [""; 0]);
    assert_eq!(bench.address("vip-1").await.claim, Some(our_claim()));
}

/// A VIP that another Service gets, or whose Service has another name now.
#[tokio::test]
async fn a_claim_of_another_owner_of_the_cluster_is_replaced() {
    let bench = Bench::attached().await;
    let claim = Claim { owner: "shop/mail".to_owned(), ..our_claim() };
    bench.provider.claim(&bench.address("vip-1").await, &claim).await.expect("claimed");
    assert_eq!(bench.address("vip-1").await.claim, Some(claim));
    assert!(bench.route().is_some(), "it is still attached");
}

#[tokio::test]
async fn an_address_that_somebody_else_uses_is_in_use() {
    let bench = Bench::new().await;
    let address = bench.address("vip-1").await;
    bench.server.with(|cloud| cloud.attach("203.0.113.1", "other-vm"));
    bench.log();
    assert_eq!(kind(bench.provider.claim(&address, &our_claim()).await), ErrorKind::InUse);
    assert_eq!(bench.log(), ["GET vip-1"]);
}

/// Somebody removed the claim of a VIP: its access config still has vipgate's name.
#[tokio::test]
async fn an_address_that_vipgate_has_attached_is_claimed_again() {
    let bench = Bench::attached().await;
    let claimed = bench.address("vip-1").await;
    bench.provider.unclaim(&claimed).await.expect("given up");
    let observed = bench.address("vip-1").await;
    assert_eq!(observed.private.keys().collect::<Vec<_>>(), [&NicId(NIC_1.to_owned())]);
    assert_eq!(bench.nic(NIC_1).await.capacity, Capacity::ipv4(1));
    bench.provider.claim(&observed, &our_claim()).await.expect("claimed");
    assert_eq!(bench.address("vip-1").await, claimed_again(claimed, &bench).await);
}

/// The same with the version that it has now.
async fn claimed_again(claimed: PublicAddress, bench: &Bench) -> PublicAddress {
    PublicAddress { version: bench.address("vip-1").await.version, ..claimed }
}

#[tokio::test]
async fn a_changed_fingerprint_is_read_again() {
    let bench = Bench::new().await;
    let address = bench.address("vip-1").await;
    bench.log();
    bench.fault(1, conflict(), "/setLabels");
    bench.provider.claim(&address, &our_claim()).await.expect("claimed at the second attempt");
    assert_eq!(bench.log(), ["GET vip-1", "GET vip-1", "POST setLabels", "POST setLabels", "POST wait"]);
    bench.fault(9, conflict(), "/setLabels");
    assert_eq!(kind(bench.provider.unclaim(&bench.address("vip-1").await).await), ErrorKind::Conflict);
    assert_eq!(bench.writes().len(), 3);
}

/// Reads are older than a claim of another cluster: the fingerprint keeps it from being overwritten.
#[tokio::test]
async fn a_stale_read_overwrites_no_claim() {
    let bench = Bench::new().await;
    let address = bench.address("vip-1").await;
    bench.server.with(|cloud| {
        cloud.change(|state| {
            let address = state.addresses.get_mut("vip-1").expect("there");
            address.labels.insert("vipgate-cluster".to_owned(), "test".to_owned());
            address.label_version += 1;
        });
        cloud.lag = 1;
    });
    assert_eq!(kind(bench.provider.claim(&address, &our_claim()).await), ErrorKind::Conflict);
    bench.server.with(|cloud| cloud.lag = 0);
    assert_eq!(kind(bench.provider.claim(&address, &our_claim()).await), ErrorKind::InUse);
    let labels = bench.server.with(|cloud| cloud.labels("vip-1"));
    assert_eq!(labels, ["pool=edge", "team=net", "vipgate-cluster=test"]);
}

#[tokio::test]
async fn a_claim_is_removed_once() {
    let bench = Bench::claimed().await;
    let address = bench.address("vip-1").await;
    bench.log();
    bench.provider.unclaim(&address).await.expect("unclaimed");
    assert_eq!(bench.log(), ["GET vip-1", "POST setLabels", "POST wait"]);
    assert_eq!(bench.server.with(|cloud| cloud.labels("vip-1")), ["pool=edge", "team=net"]);
    bench.provider.unclaim(&address).await.expect("it has no claim");
    assert_eq!(bench.log(), ["GET vip-1"]);
    bench.server.with(|cloud| cloud.change(|state| state.addresses.remove("vip-1")));
    bench.provider.unclaim(&address).await.expect("what doesn't exist has no claim");
    assert_eq!(kind(bench.provider.claim(&address, &our_claim()).await), ErrorKind::NotFound);
}

#[tokio::test]
async fn an_address_that_is_being_reserved_is_busy() {
    let bench = Bench::new().await;
    let address = bench.address("vip-1").await;
    let reserve = |state: &mut vipgate_cloud_testkit::GcpState| {
        state.addresses.get_mut("vip-1").expect("there").is_reserving = true;
    };
    bench.server.with(|cloud| cloud.change(reserve));
    assert_eq!(kind(bench.provider.claim(&address, &our_claim()).await), ErrorKind::Busy);
    assert_eq!(bench.writes(), [""; 0]);
}
