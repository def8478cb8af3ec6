//! Allocation and release.

use vipgate_cloud::{Allocation, ErrorKind, Tags};
use vipgate_cloud_testkit::{Fault, GcpState};

use crate::calls::Calls;
use crate::gcp::bench::{Bench, kind, our_claim};

fn allocation() -> Allocation {
    Allocation {
        tags: Tags::from([("pool".to_owned(), "edge".to_owned()), ("team".to_owned(), "net".to_owned())]),
        claim: our_claim(),
        is_ipv6: false,
        zone: None,
        token: "Token/1".to_owned(),
    }
}

#[tokio::test]
async fn an_address_is_allocated_once_for_a_token() {
    let bench = Bench::new().await;
    let address = bench.provider.allocate(&allocation()).await.expect("allocated");
    let (name, id) = (address.id.0.clone(), address.id.0.as_str());
    let expected =
        ["GET addresses", &format!("GET {id}"), "POST addresses", "POST setLabels", "POST wait", "POST wait"];
    assert_eq!(bench.log(), expected);
    let labels = bench.server.with(|cloud| cloud.labels(&name));
    assert_eq!(
        labels,
        ["pool=edge", "team=net", "vipgate-allocated=_54oken_-1", "vipgate-cluster=prod", "vipgate-vip=shop_-web"]
    );
    assert!(address.token.is_some());
    assert_eq!(address.claim, Some(our_claim()));
    let again = bench.provider.allocate(&allocation()).await.expect("found");
    assert_eq!(again, address);
    assert_eq!(bench.server.with(|cloud| cloud.state.allocated), 1);
    let observed = bench.address(&name).await;
    assert_eq!((observed.claim, observed.token), (address.claim, address.token));
}

#[tokio::test]
async fn an_address_without_labels_yet_is_finished_by_the_next_attempt() {
    let bench = Bench::new().await;
    bench.fault(3, Fault::LostRequest, "/setLabels");
    assert_eq!(kind(bench.provider.allocate(&allocation()).await), ErrorKind::Unknown);
    assert_eq!(bench.observe().await.addresses.len(), 2);
    bench.provider.allocate(&allocation()).await.expect("finished");
    assert_eq!(bench.observe().await.addresses.len(), 3);
    assert_eq!(bench.server.with(|cloud| cloud.state.allocated), 1);
}

/// Another server, without this allocation, saw an address that is no VIP.
#[tokio::test]
async fn an_address_whose_claim_ended_meanwhile_is_claimed_again() {
    let bench = Bench::new().await;
    let address = bench.provider.allocate(&allocation()).await.expect("allocated");
    bench.provider.unclaim(&address).await.expect("given up");
    let again = bench.provider.allocate(&allocation()).await.expect("found");
    assert_eq!((&again.id, again.claim), (&address.id, address.claim));
    let id = again.id.0.clone();
    assert_eq!(bench.address(&id).await.claim, Some(our_claim()));
}

#[tokio::test]
async fn an_address_of_somebody_else_with_the_same_name_is_not_taken() {
    let bench = Bench::new().await;
    let name = bench.provider.allocate(&allocation()).await.expect("allocated").id.0;
    let forge = |state: &mut GcpState| {
        let address = state.addresses.get_mut(&name).expect("there");
        address.labels.clear();
        address.description = "by hand".to_owned();
    };
    bench.server.with(|cloud| cloud.change(forge));
    bench.log();
    assert_eq!(kind(bench.provider.allocate(&allocation()).await), ErrorKind::InUse);
    assert_eq!(bench.writes(), ["POST addresses"]);
}

#[tokio::test]
async fn a_quota_is_a_quota_and_ipv6_is_not_possible() {
    let bench = Bench::new().await;
    bench.server.with(|cloud| cloud.state.quota = 3);
    assert_eq!(kind(bench.provider.allocate(&allocation()).await), ErrorKind::Quota);
    assert_eq!(bench.log(), ["POST addresses"]);
    let ipv6 = Allocation { is_ipv6: true, ..allocation() };
    assert_eq!(kind(bench.provider.allocate(&ipv6).await), ErrorKind::Invalid);
    let label = Allocation { tags: Tags::from([("Team".to_owned(), "x".to_owned())]), ..allocation() };
    assert_eq!(kind(bench.provider.allocate(&label).await), ErrorKind::Invalid);
    assert_eq!(bench.log(), [""; 0]);
}

#[tokio::test]
async fn only_what_vipgate_allocated_and_nothing_uses_is_released() {
    let bench = Bench::new().await;
    let address = bench.provider.allocate(&allocation()).await.expect("allocated");
    let reserved = bench.address("vip-1").await;
    bench.log();
    assert_eq!(kind(bench.provider.release(&reserved).await), ErrorKind::Denied);
    let text = address.address.to_string();
    bench.server.with(|cloud| cloud.attach(&text, "other-vm"));
    assert_eq!(kind(bench.provider.release(&address).await), ErrorKind::InUse);
    assert_eq!(bench.writes(), [""; 0]);
    // An attachment that isn't seen yet: the API refuses.
    bench.server.with(|cloud| cloud.lag = 1);
    assert_eq!(kind(bench.provider.release(&address).await), ErrorKind::InUse);
    bench.server.with(|cloud| {
        cloud.lag = 0;
        cloud.change(|state| state.instances.remove("other-vm"));
    });
    let mut other = address.clone();
    other.claim = None;
    assert_eq!(kind(bench.provider.release(&other).await), ErrorKind::InUse);
    bench.provider.release(&address).await.expect("released");
    bench.provider.release(&address).await.expect("it doesn't exist");
    assert!(!bench.server.with(|cloud| cloud.state.addresses.contains_key(&address.id.0)));
}
