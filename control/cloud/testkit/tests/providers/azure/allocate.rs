//! Allocation and release.

use serde_json::json;
use vipgate_cloud::{Allocation, Claim, ErrorKind, PublicAddress, Tags};
use vipgate_cloud_testkit::Fault;

use crate::azure::bench::{Bench, VIP_1, kind, our_claim};
use crate::calls::Calls;

fn allocation() -> Allocation {
    let tags: Tags =
        [("pool", "edge"), ("team", "net")].map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    Allocation { tags, claim: our_claim(), is_ipv6: false, zone: None, token: "token-1".to_owned() }
}

/// The region is that of the gateways, which are observed first.
async fn observed() -> Bench {
    let bench = Bench::new().await;
    bench.observe().await;
    bench.log();
    bench
}

fn name_of(address: &PublicAddress) -> String {
    address.id.0.rsplit('/').next().expect("a name").to_owned()
}

#[tokio::test]
async fn an_address_is_allocated_with_its_tags_and_claim() {
    let bench = observed().await;
    let address = bench.provider.allocate(&allocation()).await.expect("allocated");
    let name = name_of(&address);
    let list = "GET publicIPAddresses";
    let expected = [format!("GET {name}"), format!("PUT {name}"), "GET operation".into(), list.into()];
    assert_eq!(bench.log(), expected);
    let created = bench.resource(&name);
    assert_eq!(created["sku"]["name"], json!("Standard"));
    assert_eq!(created["properties"]["publicIPAllocationMethod"], json!("Static"));
    assert_eq!(created["location"], json!("westeurope"), "that of the gateways");
    let tags = bench.server.with(|cloud| cloud.tags(&name));
    let own = ["vipgate.io_allocated=token-1", "vipgate.io_cluster=prod", "vipgate.io_vip=shop/web"];
    assert_eq!(tags, [&["pool=edge", "team=net"][..], &own].concat());
    assert_eq!((&address.claim, address.token.as_deref()), (&Some(our_claim()), Some("token-1")));
    assert_eq!(bench.addresses().await.into_iter().find(|it| it.id == address.id), Some(address));
}

#[tokio::test]
async fn the_same_token_is_the_same_address() {
    let bench = observed().await;
    let first = bench.provider.allocate(&allocation()).await.expect("allocated");
    bench.log();
    assert_eq!(bench.provider.allocate(&allocation()).await, Ok(first.clone()));
    assert_eq!(bench.log(), [format!("GET {}", name_of(&first)), "GET publicIPAddresses".into()]);
    let other = Allocation { token: "token-2".to_owned(), ..allocation() };
    assert_ne!(bench.provider.allocate(&other).await.expect("allocated").id, first.id);
}

#[tokio::test]
async fn an_ipv6_address_of_a_zone_is_allocated() {
    let bench = observed().await;
    let wanted = Allocation { is_ipv6: true, zone: Some("2".to_owned()), ..allocation() };
    let address = bench.provider.allocate(&wanted).await.expect("allocated");
    assert!(address.address.is_ipv6());
    assert_eq!(address.zone.as_deref(), Some("2"));
}

#[tokio::test]
async fn a_lost_request_or_reply_allocates_one_address() {
    for fault in [Fault::LostReply, Fault::LostRequest] {
        let bench = observed().await;
        bench.server.plan_fault(1, fault, |request| request.method == "PUT");
        bench.provider.allocate(&allocation()).await.expect("allocated");
        assert_eq!(bench.addresses().await.len(), 3);
    }
}

#[tokio::test]
async fn the_quota_of_the_subscription_has_its_own_class() {
    let bench = observed().await;
    bench.server.with(|cloud| cloud.max_addresses = 3);
    assert_eq!(kind(bench.provider.allocate(&allocation()).await), ErrorKind::Quota);
    assert_eq!(bench.changes().len(), 1, "another attempt changes nothing");
}

#[tokio::test]
async fn an_address_of_that_name_that_is_somebody_elses_stays() {
    let bench = observed().await;
    let address = bench.provider.allocate(&allocation()).await.expect("allocated");
    let name = name_of(&address);
    bench.server.with(|cloud| cloud.set_tag(&name, "vipgate.io_vip", Some("shop/other")));
    assert_eq!(kind(bench.provider.allocate(&allocation()).await), ErrorKind::InUse);
    bench.server.with(|cloud| cloud.set_tag(&name, "vipgate.io_allocated", None));
    assert_eq!(kind(bench.provider.allocate(&allocation()).await), ErrorKind::InUse);
}

#[tokio::test]
async fn what_vipgate_allocated_is_released_once() {
    for has_location_only in [false, true] {
        let bench = observed().await;
        bench.server.with(|cloud| cloud.has_location_only = has_location_only);
        let address = bench.provider.allocate(&allocation()).await.expect("allocated");
        bench.log();
        for is_first in [true, false] {
            bench.provider.release(&address).await.expect("released");
            assert_eq!(bench.changes().len(), usize::from(is_first));
            assert_eq!(bench.addresses().await.len(), 2);
            bench.log();
        }
    }
}

#[tokio::test]
async fn what_vipgate_did_not_allocate_is_not_released() {
    let bench = observed().await;
    let address = bench.address(VIP_1).await;
    assert_eq!(kind(bench.provider.release(&address).await), ErrorKind::Denied);
    assert_eq!(bench.changes(), Vec::<String>::new());
}

#[tokio::test]
async fn what_is_in_use_is_not_released() {
    let bench = observed().await;
    let address = bench.provider.allocate(&allocation()).await.expect("allocated");
    let name = name_of(&address);
    bench.server.with(|cloud| cloud.set_tag(&name, "vipgate.io_vip", Some("shop/other")));
    assert_eq!(kind(bench.provider.release(&address).await), ErrorKind::InUse);
    bench.server.with(|cloud| cloud.set_tag(&name, "vipgate.io_vip", Some("shop/web")));
    bench.server.with(|cloud| cloud.attach(&name, "other-vm-nic", "primary"));
    assert_eq!(kind(bench.provider.release(&address).await), ErrorKind::InUse);
    assert_eq!(bench.addresses().await.len(), 3);
}

#[tokio::test]
async fn what_is_claimed_between_read_and_release_stays() {
    let bench = observed().await;
    let address = bench.provider.allocate(&allocation()).await.expect("allocated");
    bench.provider.unclaim(&address).await.expect("given up");
    let free = PublicAddress { claim: None, ..address.clone() };
    bench.server.plan_fault(1, Fault::Delay(std::time::Duration::from_millis(300)), |it| it.method == "DELETE");
    let claim = Claim { owner: "shop/new".to_owned(), ..our_claim() };
    let late = async {
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        bench.provider.claim(&free, &claim).await
    };
    let (released, claimed) = tokio::join!(bench.provider.release(&free), late);
    claimed.expect("claimed");
    assert_eq!(kind(released), ErrorKind::InUse);
    assert_eq!(bench.addresses().await.len(), 3);
}

#[tokio::test]
async fn without_a_region_nothing_is_allocated() {
    let bench = Bench::new().await;
    assert_eq!(kind(bench.provider.allocate(&allocation()).await), ErrorKind::Unavailable);
    assert_eq!(bench.changes(), Vec::<String>::new());
}
