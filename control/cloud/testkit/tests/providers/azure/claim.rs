//! Claims: who has an address, and that two never have it.

use vipgate_cloud::azure::Azure;
use vipgate_cloud::{Associate, Claim, ErrorKind};
use vipgate_cloud_testkit::Fault;

use crate::azure::bench::{Bench, VIP_1, config, is, kind, our_claim};
use crate::calls::Calls;

fn other_claim() -> Claim {
    Claim { cluster: "staging".to_owned(), owner: "shop/web".to_owned() }
}

#[tokio::test]
async fn a_claim_is_two_tags_beside_those_that_there_are() {
    let bench = Bench::new().await;
    let address = bench.address(VIP_1).await;
    bench.log();
    let before = bench.resource("vip-1");
    bench.provider.claim(&address, &our_claim()).await.expect("claimed");
    assert_eq!(bench.log(), ["GET vip-1", "PUT vip-1", "GET operation"]);
    let tags = bench.server.with(|cloud| cloud.tags("vip-1"));
    assert_eq!(tags, ["pool=edge", "team=net", "vipgate.io_cluster=prod", "vipgate.io_vip=shop/web"]);
    let mut after = bench.resource("vip-1");
    for name in ["tags", "etag"] {
        after[name] = before[name].clone();
    }
    assert_eq!(after, before, "nothing else changes");
    bench.provider.claim(&address, &our_claim()).await.expect("claimed");
    assert_eq!(bench.log(), ["GET vip-1"], "a second time changes nothing");
    assert_eq!(bench.address(VIP_1).await.claim, Some(our_claim()));
}

#[tokio::test]
async fn a_claim_of_another_cluster_stays() {
    let bench = Bench::new().await;
    let address = bench.address(VIP_1).await;
    bench.server.with(|cloud| cloud.set_tag("vip-1", "Vipgate.IO_Cluster", Some("staging")));
    bench.log();
    assert_eq!(kind(bench.provider.claim(&address, &our_claim()).await), ErrorKind::InUse);
    assert_eq!(kind(bench.provider.unclaim(&address).await), ErrorKind::InUse);
    assert_eq!(bench.changes(), Vec::<String>::new());
}

#[tokio::test]
async fn a_claim_of_the_same_cluster_is_replaced() {
    let bench = Bench::attached().await;
    let new = Claim { owner: "shop/new".to_owned(), ..our_claim() };
    bench.provider.claim(&bench.address(VIP_1).await, &new).await.expect("claimed");
    assert_eq!(bench.address(VIP_1).await.claim, Some(new));
    bench.assert_places(Some("gw-1-nic"), Some("gw-1-nic"));
}

#[tokio::test]
async fn of_two_claims_at_the_same_time_one_wins() {
    let bench = Bench::new().await;
    let address = bench.address(VIP_1).await;
    // Between our read and our change, the other cluster's claim is made.
    let mut theirs = config(&bench.server.url(), Associate::Nic);
    theirs.cluster = "staging".to_owned();
    let theirs = Azure::new(&theirs, bench.meter.clone()).expect("a valid configuration");
    let delay = Fault::Delay(std::time::Duration::from_millis(300));
    bench.server.plan_fault(1, delay, is("PUT", "vip-1"));
    let (ours, claim) = (our_claim(), other_claim());
    let late = async {
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        theirs.claim(&address, &claim).await
    };
    let (ours, theirs) = tokio::join!(bench.provider.claim(&address, &ours), late);
    theirs.expect("the first change");
    assert_eq!(kind(ours), ErrorKind::InUse);
    assert_eq!(bench.address(VIP_1).await.claim, Some(other_claim()));
}

#[tokio::test]
async fn an_unrelated_change_in_between_is_kept() {
    let bench = Bench::new().await;
    let address = bench.address(VIP_1).await;
    bench.log();
    bench.server.plan_fault(1, Fault::Delay(std::time::Duration::from_millis(200)), is("PUT", "vip-1"));
    let meddle = async {
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        bench.server.with(|cloud| cloud.set_tag("vip-1", "cost", Some("7")));
    };
    let claim = our_claim();
    let (claimed, ()) = tokio::join!(bench.provider.claim(&address, &claim), meddle);
    claimed.expect("claimed at the second attempt");
    assert_eq!(bench.changes(), ["PUT vip-1", "PUT vip-1"]);
    let tags = bench.server.with(|cloud| cloud.tags("vip-1"));
    assert!(tags.contains(&"cost=7".to_owned()) && tags.contains(&"vipgate.io_cluster=prod".to_owned()), "{tags:?}");
}

#[tokio::test]
async fn what_somebody_uses_without_a_claim_is_not_claimed() {
    let bench = Bench::new().await;
    let address = bench.address(VIP_1).await;
    bench.server.with(|cloud| cloud.attach("vip-1", "other-vm-nic", "primary"));
    assert_eq!(kind(bench.provider.claim(&address, &our_claim()).await), ErrorKind::InUse);
    bench.server.with(|cloud| {
        cloud.detach("other-vm-nic", "primary");
        cloud.attach_to_nat_gateway("vip-1", "nat");
    });
    assert_eq!(kind(bench.provider.claim(&address, &our_claim()).await), ErrorKind::InUse);
    bench.server.with(|cloud| cloud.tags("vip-1")).iter().for_each(|tag| assert!(!tag.starts_with("vipgate")));
}

#[tokio::test]
async fn a_claim_that_somebody_removed_comes_back_where_vipgate_attached_it() {
    let bench = Bench::attached().await;
    bench.server.with(|cloud| {
        cloud.set_tag("vip-1", "vipgate.io_cluster", None);
        cloud.set_tag("vip-1", "vipgate.io_vip", None);
    });
    let address = bench.address(VIP_1).await;
    assert_eq!(address.claim, None);
    bench.provider.claim(&address, &our_claim()).await.expect("claimed");
    assert_eq!(bench.address(VIP_1).await.claim, Some(our_claim()));
}

#[tokio::test]
async fn a_claim_is_given_up_once() {
    let bench = Bench::prepared().await;
    let address = bench.address(VIP_1).await;
    bench.log();
    for is_first in [true, false] {
        bench.provider.unclaim(&address).await.expect("given up");
        assert_eq!(bench.changes().len(), usize::from(is_first));
        assert_eq!(bench.server.with(|cloud| cloud.tags("vip-1")), ["pool=edge", "team=net"]);
    }
}

#[tokio::test]
async fn an_owner_that_is_too_long_for_a_tag_is_refused() {
    let bench = Bench::new().await;
    let address = bench.address(VIP_1).await;
    bench.log();
    let claim = Claim { owner: format!("shop/{}", "x".repeat(252)), ..our_claim() };
    assert_eq!(kind(bench.provider.claim(&address, &claim).await), ErrorKind::Invalid);
    assert_eq!(bench.log(), Vec::<String>::new());
    let claim = Claim { owner: "ü".repeat(256), ..our_claim() };
    bench.provider.claim(&address, &claim).await.expect("256 characters, not bytes");
}

#[tokio::test]
async fn an_address_that_does_not_exist_is_not_found_and_has_no_claim() {
    let bench = Bench::new().await;
    let mut address = bench.address(VIP_1).await;
    address.id.0.push_str("-gone");
    assert_eq!(kind(bench.provider.claim(&address, &our_claim()).await), ErrorKind::NotFound);
    bench.provider.unclaim(&address).await.expect("no claim");
    address.id.0 = "vip-1".to_owned();
    assert_eq!(kind(bench.provider.claim(&address, &our_claim()).await), ErrorKind::Invalid);
}
