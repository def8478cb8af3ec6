//! Attachments: attach, move, detach, prepare.

use vipgate_cloud::{Binding, Capacity, ErrorKind, NicId};
use vipgate_cloud_testkit::Fault;

use crate::calls::Calls;
use crate::gcp::bench::{Bench, NIC_1, NIC_2, ip, kind};

/// What a failover asks for.
const MOVE: [&str; 7] =
    ["GET gw-1", "GET gw-2", "GET vip-1", "POST addAccessConfig", "POST deleteAccessConfig", "POST wait", "POST wait"];

#[tokio::test]
async fn an_address_is_attached_once() {
    let bench = Bench::claimed().await;
    bench.attach(NIC_1).await.expect("attached");
    assert_eq!(bench.log(), ["GET gw-1", "GET vip-1", "POST addAccessConfig", "POST wait"]);
    assert_eq!(bench.route(), Some((NIC_1.to_owned(), ip("10.0.0.11"))));
    bench.attach(NIC_1).await.expect("it is attached");
    assert_eq!(bench.writes(), [""; 0]);
}

#[tokio::test]
async fn an_address_that_anybody_else_uses_is_never_taken() {
    for user in ["gw-2", "other-vm", "a forwarding rule", "gw-1/nic1"] {
        let bench = Bench::claimed().await;
        let (binding, nic) = (bench.binding(NIC_1).await, bench.nic(NIC_1).await);
        bench.server.with(|cloud| match user {
            "a forwarding rule" => {
                let rule = "https://www.googleapis.com/compute/v1/projects/p1/regions/europe-west1/forwardingRules/web";
                cloud.change(|state| state.addresses.get_mut("vip-1").expect("there").user = Some(rule.to_owned()));
            }
            "gw-1/nic1" => {
                cloud.attach("203.0.113.1", "gw-1");
                cloud.change(|state| {
                    let interfaces = &mut state.instances.get_mut("gw-1").expect("there").interfaces;
                    let second = interfaces.remove("nic0").expect("there");
                    let first =
                        vipgate_cloud_testkit::GcpInterface { network_ip: "10.0.0.11".to_owned(), access_config: None };
                    interfaces.extend([("nic0".to_owned(), first), ("nic1".to_owned(), second)]);
                });
            }
            instance => cloud.attach("203.0.113.1", instance),
        });
        let before = bench.server.with(|cloud| cloud.state.clone());
        bench.log();
        assert_eq!(kind(bench.provider.attach(&nic, std::slice::from_ref(&binding)).await), ErrorKind::InUse, "{user}");
        assert_eq!(bench.writes(), [""; 0], "{user}");
        let from = NicId("europe-west1-b/gw-9/nic0".to_owned());
        assert_eq!(kind(bench.provider.move_from_dead(&from, &nic, &[binding]).await), ErrorKind::InUse, "{user}");
        assert_eq!(bench.writes(), [""; 0], "{user}");
        assert_eq!(bench.server.with(|cloud| cloud.state.clone()), before, "{user}");
    }
}

/// Attached between our read and our request, and reads are late: the API refuses.
#[tokio::test]
async fn an_address_that_is_taken_meanwhile_is_in_use() {
    for finds_use_late in [false, true] {
        let bench = Bench::claimed().await;
        let (binding, nic) = (bench.binding(NIC_1).await, bench.nic(NIC_1).await);
        bench.server.with(|cloud| {
            cloud.attach("203.0.113.1", "other-vm");
            cloud.lag = 1;
            cloud.finds_use_late = finds_use_late;
        });
        assert_eq!(kind(bench.provider.attach(&nic, std::slice::from_ref(&binding)).await), ErrorKind::InUse);
        bench.server.with(|cloud| cloud.lag = 0);
        assert_eq!(kind(bench.provider.attach(&nic, &[binding]).await), ErrorKind::InUse);
        assert_eq!(bench.route(), Some(("europe-west1-c/other-vm/nic0".to_owned(), ip("10.0.0.13"))));
    }
}

#[tokio::test]
async fn only_an_address_with_the_claim_is_attached_moved_or_detached() {
    let bench = Bench::attached().await;
    let (mut binding, nic) = (bench.binding(NIC_2).await, bench.nic(NIC_2).await);
    let from = NicId(NIC_1.to_owned());
    bench.log();
    let other = vipgate_cloud::Claim { cluster: "test".to_owned(), owner: "shop/web".to_owned() };
    for claim in [None, Some(other)] {
        binding.address.claim = claim;
        let bindings = [binding.clone()];
        assert_eq!(kind(bench.provider.attach(&nic, &bindings).await), ErrorKind::InUse);
        assert_eq!(kind(bench.provider.move_from_dead(&from, &nic, &bindings).await), ErrorKind::InUse);
        assert_eq!(kind(bench.provider.detach(&from, std::slice::from_ref(&binding.address)).await), ErrorKind::InUse);
    }
    assert_eq!(bench.writes(), [""; 0]);
    assert_eq!(bench.route(), Some((NIC_1.to_owned(), ip("10.0.0.11"))));
}

#[tokio::test]
async fn an_access_config_of_others_stays() {
    let bench = Bench::claimed().await;
    let (binding, nic) = (bench.binding(NIC_1).await, bench.nic(NIC_1).await);
    bench.server.with(|cloud| cloud.attach("203.0.113.9", "gw-1"));
    bench.log();
    assert_eq!(kind(bench.provider.attach(&nic, std::slice::from_ref(&binding)).await), ErrorKind::Quota);
    let nic = bench.nic(NIC_1).await;
    assert_eq!(kind(bench.provider.prepare(&nic, std::slice::from_ref(&binding.address), &[]).await), ErrorKind::Quota);
    assert_eq!(bench.writes(), [""; 0]);
    let route = bench.server.with(|cloud| cloud.routes()[&ip("203.0.113.9")].clone());
    assert_eq!(route, (NIC_1.to_owned(), ip("10.0.0.11")));
    // Two at once are one too many, whatever they are.
    assert_eq!(kind(bench.provider.attach(&nic, &[binding.clone(), binding]).await), ErrorKind::Quota);
}

#[tokio::test]
async fn a_private_address_must_be_the_primary_one() {
    let bench = Bench::claimed().await;
    let (binding, nic) = (bench.binding(NIC_1).await, bench.nic(NIC_1).await);
    let wrong = Binding { private: ip("10.0.0.99"), ..binding.clone() };
    bench.log();
    assert_eq!(kind(bench.provider.attach(&nic, &[wrong]).await), ErrorKind::Invalid);
    let addresses = [binding.address.clone()];
    let inside = ["10.0.0.0/24".parse().expect("a prefix")];
    let outside = ["10.1.0.0/24".parse().expect("a prefix")];
    bench.provider.prepare(&nic, &addresses, &inside).await.expect("ready");
    bench.provider.prepare(&nic, &addresses, &[]).await.expect("ready");
    assert_eq!(kind(bench.provider.prepare(&nic, &addresses, &outside).await), ErrorKind::Invalid);
    bench.provider.unprepare(&nic, &[binding]).await.expect("nothing to take back");
    bench.server.with(|cloud| {
        cloud.change(|state| state.instances.get_mut("gw-1").expect("there").can_ip_forward = false);
    });
    assert_eq!(kind(bench.provider.prepare(&nic, &addresses, &[]).await), ErrorKind::Invalid);
    assert_eq!(bench.writes(), [""; 0]);
}

#[tokio::test]
async fn a_failover_is_seven_requests() {
    let bench = Bench::attached().await;
    bench.move_to(NIC_1, NIC_2).await.expect("moved");
    assert_eq!(bench.log(), MOVE);
    assert_eq!(bench.route(), Some((NIC_2.to_owned(), ip("10.0.0.12"))));
    bench.move_to(NIC_1, NIC_2).await.expect("it is there");
    assert_eq!(bench.writes(), [""; 0]);
}

#[tokio::test]
async fn an_instance_that_is_gone_has_nothing_to_be_removed() {
    let bench = Bench::attached().await;
    bench.server.with(|cloud| cloud.change(|state| state.instances.remove("gw-1")));
    bench.move_to(NIC_1, NIC_2).await.expect("moved");
    assert_eq!(bench.log(), ["GET gw-1", "GET gw-2", "GET vip-1", "POST addAccessConfig", "POST wait"]);
    assert_eq!(bench.route(), Some((NIC_2.to_owned(), ip("10.0.0.12"))));
}

/// Removed there, not added here: the next attachment, or the same move, does the rest.
#[tokio::test]
async fn half_a_move_is_finished_by_the_next_attempt() {
    for moves_again in [false, true] {
        let bench = Bench::attached().await;
        bench.fault(3, Fault::LostRequest, "/addAccessConfig");
        assert_eq!(kind(bench.move_to(NIC_1, NIC_2).await), ErrorKind::Unknown);
        assert_eq!(bench.route(), None);
        let result = if moves_again { bench.move_to(NIC_1, NIC_2).await } else { bench.attach(NIC_2).await };
        result.expect("attached");
        assert_eq!(bench.route(), Some((NIC_2.to_owned(), ip("10.0.0.12"))));
        assert_eq!(bench.writes(), ["POST addAccessConfig"]);
    }
}

#[tokio::test]
async fn the_dead_gateways_next_address_stays_there() {
    let bench = Bench::attached().await;
    let (binding, nic) = (bench.binding(NIC_2).await, bench.nic(NIC_2).await);
    bench.server.with(|cloud| cloud.attach("203.0.113.9", "gw-1"));
    bench.provider.move_from_dead(&NicId(NIC_1.to_owned()), &nic, &[binding]).await.expect("moved");
    let routes = bench.server.with(|cloud| cloud.routes());
    assert_eq!(routes[&ip("203.0.113.9")].0, NIC_1);
    assert_eq!(routes[&ip("203.0.113.1")].0, NIC_2);
    assert!(!bench.writes().contains(&"POST deleteAccessConfig".to_owned()));
}

/// At a third NIC, even if that is one of the same instance.
#[tokio::test]
async fn an_address_at_another_nic_of_the_dead_gateway_stays() {
    let bench = Bench::attached().await;
    let (binding, nic) = (bench.binding(NIC_2).await, bench.nic(NIC_2).await);
    bench.server.with(|cloud| {
        cloud.change(|state| {
            let interfaces = &mut state.instances.get_mut("gw-1").expect("there").interfaces;
            let first = interfaces.remove("nic0").expect("there");
            interfaces.insert("nic1".to_owned(), first);
        });
    });
    bench.log();
    let from = NicId(NIC_1.to_owned());
    assert_eq!(kind(bench.provider.move_from_dead(&from, &nic, &[binding]).await), ErrorKind::InUse);
    assert_eq!(bench.writes(), [""; 0]);
    assert_eq!(bench.route(), Some(("europe-west1-b/gw-1/nic1".to_owned(), ip("10.0.0.11"))));
}

#[tokio::test]
async fn a_nic_that_was_not_read_is_found_by_the_address() {
    let bench = Bench::attached().await;
    bench.move_to("europe-west1-b/gw-1/-", NIC_2).await.expect("moved");
    assert_eq!(bench.route(), Some((NIC_2.to_owned(), ip("10.0.0.12"))));
    bench.detach("europe-west1-c/gw-2/-").await.expect("detached");
    assert_eq!(bench.route(), None);
}

#[tokio::test]
async fn an_address_is_detached_once_and_only_there() {
    let bench = Bench::attached().await;
    bench.detach(NIC_2).await.expect("it isn't there");
    assert_eq!(bench.writes(), [""; 0]);
    assert_eq!(bench.route(), Some((NIC_1.to_owned(), ip("10.0.0.11"))));
    bench.detach(NIC_1).await.expect("detached");
    assert_eq!(bench.log(), ["GET gw-1", "GET vip-1", "POST deleteAccessConfig", "POST wait"]);
    assert_eq!(bench.route(), None);
    bench.detach(NIC_1).await.expect("it isn't attached");
    assert_eq!(bench.writes(), [""; 0]);
    bench.detach("europe-west1-b/gone/nic0").await.expect("what doesn't exist has no address");
}

/// Reads are as old as before the attachment: the API refuses to attach twice, and nothing else happens.
#[tokio::test]
async fn reads_from_before_the_last_change_do_no_harm() {
    let bench = Bench::claimed().await;
    let (binding, nic) = (bench.binding(NIC_1).await, bench.nic(NIC_1).await);
    bench.provider.attach(&nic, std::slice::from_ref(&binding)).await.expect("attached");
    bench.server.with(|cloud| cloud.lag = 1);
    assert_eq!(kind(bench.provider.attach(&nic, std::slice::from_ref(&binding)).await), ErrorKind::Conflict);
    assert_eq!(bench.route(), Some((NIC_1.to_owned(), ip("10.0.0.11"))));
    // Its detachment isn't seen: it can't be removed twice.
    bench.server.with(|cloud| cloud.lag = 0);
    bench.detach(NIC_1).await.expect("detached");
    bench.server.with(|cloud| cloud.lag = 1);
    assert_eq!(kind(bench.provider.detach(&nic.id, &[binding.address]).await), ErrorKind::Conflict);
    assert_eq!(bench.route(), None);
}

/// Somebody detached the VIP and attached it again, by hand, to the very NIC.
#[tokio::test]
async fn an_access_config_with_another_name_is_somebody_elses() {
    let bench = Bench::claimed().await;
    let (binding, nic, other) = (bench.binding(NIC_1).await, bench.nic(NIC_1).await, bench.nic(NIC_2).await);
    bench.server.with(|cloud| cloud.attach("203.0.113.1", "gw-1"));
    let observed = bench.address("vip-1").await;
    assert_eq!(observed.attachment.as_ref().and_then(|it| it.private), None);
    assert_eq!(bench.nic(NIC_1).await.capacity, Capacity::ipv4(0));
    bench.log();
    assert_eq!(kind(bench.provider.attach(&nic, std::slice::from_ref(&binding)).await), ErrorKind::InUse);
    let from = NicId(NIC_1.to_owned());
    let elsewhere = Binding { private: ip("10.0.0.12"), ..binding };
    assert_eq!(kind(bench.provider.move_from_dead(&from, &other, &[elsewhere]).await), ErrorKind::InUse);
    assert_eq!(kind(bench.provider.detach(&from, &[observed]).await), ErrorKind::InUse);
    assert_eq!(bench.writes(), [""; 0]);
    assert!(bench.route().is_some());
}
