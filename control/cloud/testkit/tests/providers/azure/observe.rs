//! Observation: addresses by tags, NICs of gateways, old reads.

use std::time::Duration;

use vipgate_cloud::{Attachment, Capacity, GatewayNic, Provider, Scope, Tags};

use crate::azure::bench::{Bench, VIP_1, VIP_2, ip, nic_id};
use crate::calls::Calls;

#[tokio::test]
async fn addresses_of_the_pool_and_nics_of_the_gateways_are_observed() {
    let bench = Bench::new().await;
    let observed = bench.observe().await;
    assert_eq!(observed.addresses.iter().map(|it| it.address).collect::<Vec<_>>(), [ip(VIP_1), ip(VIP_2)]);
    let nics: Vec<_> = observed.nics.iter().map(|nic| (nic.gateway.as_str(), nic.id.clone(), nic.capacity)).collect();
    let capacity = Capacity { v4: 255, v6: 1 };
    let expected = [1, 2, 3].map(|n| (["gw-1", "gw-2", "gw-3"][n - 1], nic_id(&format!("gw-{n}-nic")), capacity));
    assert_eq!(nics, expected);
    assert_eq!(observed.nics[1].zone.as_deref(), Some("2"));
    assert!(observed.nics.iter().all(|nic| !nic.is_busy && nic.missing.is_empty() && !nic.version.is_empty()));
    assert!(observed.addresses.iter().all(|it| it.zone.is_none() && it.attachment.is_none() && it.has_tags));
    assert_eq!(bench.log().len(), 7, "the list, and a machine and a NIC for each gateway");
}

#[tokio::test]
async fn all_pages_of_the_list_are_read_at_the_endpoint() {
    let bench = Bench::new().await;
    bench.server.with(|cloud| {
        cloud.page_size = 1;
        cloud.links = Some("https://management.example.com".to_owned());
    });
    assert_eq!(bench.addresses().await.len(), 2);
    assert_eq!(bench.log().iter().filter(|line| *line == "GET publicIPAddresses").count(), 3);
}

#[tokio::test]
async fn tags_have_values_in_exact_case_and_names_in_any() {
    let bench = Bench::new().await;
    let scope =
        |name: &str, value: &str| Scope { tags: [(name.to_owned(), value.to_owned())].into(), ..Scope::default() };
    for (name, value, count) in [("POOL", "edge", 2), ("pool", "Edge", 0), ("pool", "mail", 1)] {
        let observed = bench.provider.observe(&scope(name, value)).await.expect("an observation");
        assert_eq!(observed.addresses.len(), count, "{name}={value}");
    }
    bench.log();
    let all = bench.provider.observe(&Scope { tags: Tags::new(), ..Scope::default() }).await.expect("an observation");
    assert!(all.addresses.is_empty(), "a pool is never all that there is");
    assert_eq!(bench.log(), Vec::<String>::new());
}

#[tokio::test]
async fn an_address_of_one_zone_is_of_that_zone() {
    let bench = Bench::new().await;
    for (zones, expected) in [(&["2"][..], Some("2")), (&["1", "2"], None), (&[], None)] {
        bench.server.with(|cloud| cloud.set_zones("vip-1", zones));
        assert_eq!(bench.address(VIP_1).await.zone.as_deref(), expected, "{zones:?}");
    }
}

#[tokio::test]
async fn users_of_all_kinds_are_attachments() {
    let bench = Bench::new().await;
    bench.server.with(|cloud| {
        cloud.attach("vip-1", "other-vm-nic", "primary");
        cloud.attach_to_nat_gateway("vip-2", "nat");
    });
    let addresses = bench.addresses().await;
    let foreign = Attachment { nic: Some(nic_id("other-vm-nic")), private: None, id: None };
    assert_eq!(addresses[0].attachment, Some(foreign));
    let nat = addresses[1].attachment.clone().expect("an attachment");
    assert_eq!((nat.nic, nat.private), (None, None));
    assert!(nat.id.expect("an id").ends_with("natGateways/nat"));
}

#[tokio::test]
async fn a_nic_that_was_a_gateways_is_known_by_its_ip_configuration() {
    let bench = Bench::attached().await;
    let private = bench.address(VIP_1).await.private[&nic_id("gw-1-nic")];
    let mut scope = bench.scope();
    scope.gateways.remove(0);
    bench.log();
    let observed = bench.provider.observe(&scope).await.expect("an observation");
    assert_eq!(bench.log().iter().filter(|line| *line == "GET gw-1-nic").count(), 1, "read once for two addresses");
    assert_eq!(observed.nics.len(), 2);
    for address in &observed.addresses {
        let at = address.attachment.as_ref().expect("an attachment");
        assert_eq!(at.nic, Some(nic_id("gw-1-nic")));
        assert_eq!(at.private, address.private.get(&nic_id("gw-1-nic")).copied());
    }
    assert_eq!(observed.addresses[0].private[&nic_id("gw-1-nic")], private);
    bench.provider.detach(&nic_id("gw-1-nic"), &observed.addresses).await.expect("detached");
    bench.assert_places(None, None);
}

#[tokio::test]
async fn a_nic_is_named_by_id_name_or_index() {
    let bench = Bench::new().await;
    let id = bench.server.with(|cloud| cloud.add_second_interface("gw-1", "gw-1-outside", 2));
    for (named, expected) in [
        (None, Some("gw-1-nic")),
        (Some("GW-1-outside"), Some("gw-1-outside")),
        (Some(id.as_str()), Some("gw-1-outside")),
        (Some("0"), Some("gw-1-outside")),
        (Some("1"), Some("gw-1-nic")),
        (Some("2"), None),
        (Some("other-vm-nic"), None),
    ] {
        let mut scope = bench.scope();
        scope.gateways.truncate(1);
        scope.gateways[0].nic = named.map(str::to_owned);
        let observed = bench.provider.observe(&scope).await.expect("an observation");
        let found = observed.nics.first().map(|nic| nic.id.clone());
        assert_eq!(found, expected.map(nic_id), "{named:?}");
    }
}

#[tokio::test]
async fn gateways_that_cannot_have_addresses_are_left_out_or_say_why() {
    let bench = Bench::new().await;
    let mut scope = bench.scope();
    let machine = scope.gateways[0].instance.clone();
    let gateway = |instance: &str| GatewayNic { gateway: "x".into(), instance: instance.to_owned(), nic: None };
    let machines = machine.replace("gw-1", "gone");
    let set = machine.replace("virtualMachines/gw-1", "virtualMachineScaleSets/set/virtualMachines/0");
    scope.gateways = vec![gateway("aws:///eu-west-1a/i-0abc"), gateway(&machines)];
    let observed = bench.provider.observe(&scope).await.expect("an observation");
    assert!(observed.nics.is_empty());
    scope.gateways = vec![gateway(&set)];
    let observed = bench.provider.observe(&scope).await.expect("an observation");
    assert_eq!(observed.nics[0].capacity, Capacity::default());
    assert!(observed.nics[0].missing[0].contains("scale set"));
    scope.gateways = vec![gateway(&machine.to_ascii_uppercase().replace("AZURE", "azure"))];
    let observed = bench.provider.observe(&scope).await.expect("an observation");
    assert_eq!(observed.nics[0].id, nic_id("gw-1-nic"), "in whatever case");
}

#[tokio::test]
async fn a_nic_is_busy_while_an_operation_on_it_is_under_way() {
    let bench = Bench::prepared().await;
    bench.server.with(|cloud| cloud.operation_time = Duration::from_millis(600));
    let (nic, bindings) = bench.bindings("gw-1").await;
    let busy = async {
        tokio::time::sleep(Duration::from_millis(250)).await;
        let observed = bench.observe().await;
        observed.nics.into_iter().map(|nic| nic.is_busy).collect::<Vec<_>>()
    };
    let (attached, busy) = tokio::join!(bench.provider.attach(&nic, &bindings), busy);
    attached.expect("attached");
    assert_eq!(busy, [true, false, false]);
    assert!(!bench.nic("gw-1").await.is_busy);
}

#[tokio::test]
async fn old_reads_lead_to_no_wrong_change() {
    let bench = Bench::attached().await;
    bench.move_to("gw-1-nic", "gw-2").await.expect("moved");
    let (nic, bindings) = bench.bindings("gw-1").await;
    // Both NICs and both addresses are seen as before the move.
    bench.server.with(|cloud| cloud.lag = 2);
    bench.assert_places(Some("gw-2-nic"), Some("gw-2-nic"));
    bench.provider.attach(&nic, &bindings).await.expect("seen as done");
    let addresses: Vec<_> = bindings.iter().map(|binding| binding.address.clone()).collect();
    let detached = bench.provider.detach(&nic.id, &addresses).await;
    assert!(detached.is_err(), "the etag of the old read isn't that of the NIC");
    bench.assert_places(Some("gw-2-nic"), Some("gw-2-nic"));
}

#[tokio::test]
async fn an_attachment_that_reads_do_not_show_yet_is_done_when_they_do() {
    let bench = Bench::prepared().await;
    let (nic, bindings) = bench.bindings("gw-1").await;
    bench.provider.attach(&nic, &bindings).await.expect("attached");
    bench.server.with(|cloud| cloud.lag = 1);
    let again = bench.provider.attach(&nic, &bindings).await;
    assert!(again.is_err(), "refused: the read was old");
    bench.server.with(|cloud| cloud.lag = 0);
    bench.provider.attach(&nic, &bindings).await.expect("seen as done");
    bench.assert_places(Some("gw-1-nic"), Some("gw-1-nic"));
}
