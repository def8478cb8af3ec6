//! Preparation: private addresses, forwarding, limits.

use std::collections::BTreeSet;

use ipnet::IpNet;
use serde_json::json;
use vipgate_cloud::ErrorKind;

use crate::azure::bench::{Bench, VIP_1, ip, kind, nic_id};
use crate::calls::Calls;

fn nets(texts: &[&str]) -> Vec<IpNet> {
    texts.iter().map(|text| text.parse().expect("a prefix")).collect()
}

#[tokio::test]
async fn forwarding_and_all_private_addresses_are_one_change() {
    let bench = Bench::new().await;
    bench.claim_all().await;
    let (nic, addresses) = (bench.nic("gw-1").await, bench.addresses().await);
    let before = bench.resource("gw-1-nic");
    bench.log();
    bench.provider.prepare(&nic, &addresses, &[]).await.expect("prepared");
    assert_eq!(bench.log(), ["GET gw-1-nic", "PUT gw-1-nic", "GET operation"]);
    let mut after = bench.resource("gw-1-nic");
    assert_eq!(after["properties"]["enableIPForwarding"], json!(true));
    let configurations = after["properties"]["ipConfigurations"].as_array_mut().expect("configurations");
    let added = configurations.split_off(1);
    for (added, name) in added.iter().zip(["vipgate-vip-1", "vipgate-vip-2"]) {
        let properties = &added["properties"];
        assert_eq!(added["name"], json!(name));
        assert_eq!(properties["primary"], json!(false));
        assert_eq!(properties["privateIPAllocationMethod"], json!("Dynamic"));
        assert_eq!(properties["subnet"], before["properties"]["ipConfigurations"][0]["properties"]["subnet"]);
        assert!(properties["publicIPAddress"].is_null());
    }
    after["etag"] = before["etag"].clone();
    after["properties"]["enableIPForwarding"] = json!(false);
    assert_eq!(after, before, "nothing else changes");
    bench.provider.prepare(&nic, &addresses, &[]).await.expect("prepared");
    assert_eq!(bench.log(), ["GET gw-1-nic"], "a second time changes nothing");
}

#[tokio::test]
async fn private_addresses_are_in_the_next_observation_and_differ() {
    let bench = Bench::prepared().await;
    let mut all = BTreeSet::new();
    for address in bench.addresses().await {
        let of: Vec<_> = address.private.keys().cloned().collect();
        assert_eq!(of, [nic_id("gw-1-nic"), nic_id("gw-2-nic")]);
        all.extend(address.private.into_values());
    }
    assert_eq!(all.len(), 4);
}

#[tokio::test]
async fn candidates_are_chosen_in_the_subnet_of_the_nic() {
    let bench = Bench::new().await;
    bench.claim_all().await;
    let candidates = nets(&["10.0.1.64/29", "10.0.2.64/29"]);
    for (gateway, net) in [("gw-1", "10.0.1.64/29"), ("gw-2", "10.0.2.64/29")] {
        let (nic, addresses) = (bench.nic(gateway).await, bench.addresses().await);
        bench.provider.prepare(&nic, &addresses, &candidates).await.expect("prepared");
        let net: IpNet = net.parse().expect("a prefix");
        for address in bench.addresses().await {
            assert!(net.contains(&address.private[&nic.id]), "{address:?}");
        }
        let nic = bench.resource(&format!("{gateway}-nic"));
        let method = &nic["properties"]["ipConfigurations"][1]["properties"]["privateIPAllocationMethod"];
        assert_eq!(method, &json!("Static"));
    }
}

#[tokio::test]
async fn a_candidate_that_something_else_has_is_replaced() {
    let bench = Bench::new().await;
    bench.claim_all().await;
    bench.server.with(|cloud| cloud.taken.extend((64..70).map(|last| ip(&format!("10.0.1.{last}")))));
    let (nic, addresses) = (bench.nic("gw-1").await, bench.addresses().await);
    bench.provider.prepare(&nic, &addresses, &nets(&["10.0.1.64/29"])).await.expect("prepared");
    let found: BTreeSet<_> = bench.addresses().await.iter().map(|it| it.private[&nic.id]).collect();
    assert_eq!(found, BTreeSet::from([ip("10.0.1.70"), ip("10.0.1.71")]));
}

#[tokio::test]
async fn when_no_candidate_is_left_it_is_a_matter_of_quota() {
    let bench = Bench::new().await;
    bench.claim_all().await;
    let (nic, addresses) = (bench.nic("gw-1").await, bench.addresses().await);
    for candidates in [nets(&["10.0.1.64/32"]), nets(&["10.0.2.64/29"]), nets(&["10.0.1.0/30"])] {
        assert_eq!(kind(bench.provider.prepare(&nic, &addresses, &candidates).await), ErrorKind::Quota);
    }
    assert_eq!(bench.server.with(|cloud| cloud.private("gw-1-nic")).len(), 1);
}

#[tokio::test]
async fn a_nic_has_no_more_ip_configurations_than_azure_allows() {
    let bench = Bench::new().await;
    bench.claim_all().await;
    assert_eq!(bench.nic("gw-1").await.capacity.v4, 255);
    bench.server.with(|cloud| (0..254).for_each(|n| cloud.add_configuration("gw-1-nic", &format!("other-{n}"))));
    let (nic, addresses) = (bench.nic("gw-1").await, bench.addresses().await);
    assert_eq!(nic.capacity.v4, 1);
    assert_eq!(kind(bench.provider.prepare(&nic, &addresses, &[]).await), ErrorKind::Quota);
    // The subnet has 251 addresses, fewer than the NIC could have.
    assert_eq!(kind(bench.provider.prepare(&nic, &addresses[..1], &[]).await), ErrorKind::Quota);
    bench.server.with(|cloud| cloud.max_configurations = 10);
    assert_eq!(kind(bench.provider.prepare(&nic, &addresses[..1], &[]).await), ErrorKind::Quota);
}

#[tokio::test]
async fn a_nic_has_one_ipv6_address() {
    let bench = Bench::new().await;
    bench.server.with(|cloud| {
        for n in 1..=2 {
            let tags = [("pool", "edge"), ("team", "net")];
            cloud.add_address(&format!("six-{n}"), ip(&format!("2001:db8::{n}")), &tags);
        }
    });
    bench.claim_all().await;
    let (nic, first, second) =
        (bench.nic("gw-1").await, bench.address("2001:db8::1").await, bench.address("2001:db8::2").await);
    bench.provider.prepare(&nic, &[first], &[]).await.expect("prepared");
    assert_eq!(kind(bench.provider.prepare(&nic, &[second], &[]).await), ErrorKind::Quota);
    bench.attach("gw-1").await.expect("attached");
    let (place, private) = bench.server.with(|cloud| cloud.routes())[&ip("2001:db8::1")].clone();
    assert_eq!(place, "gw-1-nic");
    assert!("fd00:0:0:1::/64".parse::<IpNet>().expect("a prefix").contains(&private));
}

#[tokio::test]
async fn an_ipv6_candidate_is_chosen_for_an_ipv6_address() {
    let bench = Bench::new().await;
    bench.server.with(|cloud| {
        cloud.add_address("six", ip("2001:db8::1"), &[("pool", "edge"), ("team", "net")]);
    });
    bench.claim_all().await;
    let (nic, addresses) = (bench.nic("gw-1").await, bench.addresses().await);
    let candidates = nets(&["10.0.1.64/29", "fd00:0:0:1::40/124"]);
    bench.provider.prepare(&nic, &addresses, &candidates).await.expect("prepared");
    for address in bench.addresses().await {
        assert!(candidates.iter().any(|net| net.contains(&address.private[&nic.id])));
        assert_eq!(address.private[&nic.id].is_ipv6(), address.address.is_ipv6());
    }
}

#[tokio::test]
async fn what_was_prepared_is_taken_back_once() {
    let bench = Bench::prepared().await;
    let (nic, bindings) = bench.bindings("gw-1").await;
    bench.log();
    for is_first in [true, false] {
        bench.provider.unprepare(&nic, &bindings).await.expect("taken back");
        let expected: &[&str] = if is_first { &["PUT gw-1-nic"] } else { &[] };
        assert_eq!(bench.changes(), expected);
        let private = bench.server.with(|cloud| cloud.private("gw-1-nic"));
        assert_eq!(private.into_keys().collect::<Vec<_>>(), ["primary"]);
    }
    bench.server.with(|cloud| cloud.remove_instance("gw-1"));
    bench.provider.unprepare(&nic, &bindings).await.expect("a NIC that doesn't exist has nothing");
}

#[tokio::test]
async fn what_is_attached_or_has_changed_is_not_taken_back() {
    let bench = Bench::prepared().await;
    let (nic, mut bindings) = bench.bindings("gw-1").await;
    bench.provider.attach(&nic, &bindings[..1]).await.expect("attached");
    bindings[1].private = ip("10.0.1.99");
    bench.log();
    bench.provider.unprepare(&nic, &bindings).await.expect("nothing to do");
    assert_eq!(bench.changes(), Vec::<String>::new());
    bench.assert_places(Some("gw-1-nic"), None);
}

#[tokio::test]
async fn an_ip_configuration_with_the_address_of_somebody_else_is_not_bound() {
    let bench = Bench::prepared().await;
    let stale = bench.bindings("gw-1").await;
    bench.server.with(|cloud| cloud.attach("other", "gw-1-nic", "vipgate-vip-1"));
    let address = bench.address(VIP_1).await;
    assert_eq!(address.private.keys().cloned().collect::<Vec<_>>(), [nic_id("gw-2-nic")]);
    bench.log();
    bench.provider.unprepare(&stale.0, &stale.1[..1]).await.expect("nothing to do");
    assert_eq!(bench.changes(), Vec::<String>::new());
}
