//! Private addresses that come, change and go while sessions run, and those of retired VIPs.

use std::net::SocketAddr;

use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_testkit::services::*;
use vipgate_testkit::*;

use super::{PODS, PRIVATE, REMOTES, VIP, gateway, with_private};

#[test]
fn a_mapping_that_comes_goes_or_changes_leaves_sessions_open() {
    let mut gateway = Gateway::new(&Setup::default());
    gateway.set_policy(&policy());
    let request = packet(Protocol::Udp, at(PODS[0]), at(REMOTES[0]));
    let first = ends(&gateway.pod_sends(&request)).0;
    assert_eq!(first.ip(), ip(VIP[0]));
    for private in ["172.31.0.10", "172.31.0.99", "192.0.2.10"] {
        let set =
            if ip(private) == first.ip() { policy() } else { with_private(policy(), "gw-a", [private, "fd31::1"]) };
        gateway.set_policy(&set);
        let sent = gateway.pod_sends(&request);
        assert_eq!(ends(&sent).0, SocketAddr::new(ip(private), first.port()));
        let received = gateway.remote_sends(&reply_to(&sent, Protocol::Udp));
        assert_eq!(ends(&received).1, at(PODS[0]));
    }
    assert_eq!(gateway.sessions(), 1);
    gateway.assert_delta("egress 4, reply 3, created 1");
}

#[test]
fn connections_to_services_survive_other_private_addresses() {
    let set = || with_services(&[service(&both_pods())]);
    let mut gateway = Gateway::new(&Setup::default());
    gateway.set_policy(&with_private(set(), "gw-a", PRIVATE));
    let client = at(CLIENTS[0]);
    let to = |private: &str| SocketAddr::new(ip(private), 80);
    let backend = gateway.client_sends(&tcp(client, to(PRIVATE[0]), "S", 1000, 0));
    gateway.backend_sends(0, &tcp(backend, client, "SA", 5000, 1001));
    for private in ["172.31.0.99", PRIVATE[0], VIP[0]] {
        let addresses = [private, "fd31::1"];
        gateway.set_policy(&if private == VIP[0] { set() } else { with_private(set(), "gw-a", addresses) });
        assert_eq!(gateway.client_sends(&tcp(client, to(private), "PA", 1001, 5001)), backend);
        assert_eq!(gateway.backend_sends(0, &tcp(backend, client, "A", 5001, 1001)), (to(private), client));
    }
    gateway.assert_delta("inbound 4, service_reply 4, created 1");
}

/// Two VIPs exchange their private addresses: each session keeps its VIP.
#[test]
fn vips_may_exchange_their_private_addresses() {
    let with = |addresses: [&str; 2]| {
        let mut set = policy();
        super::add_private(&mut set, "gw-a", "192.0.2.10", addresses[0]);
        super::add_private(&mut set, "gw-a", "192.0.2.11", addresses[1]);
        set
    };
    let mut gateway = Gateway::new(&Setup::default());
    let pods = ["10.244.1.5:4000", "10.244.1.21:4000"];
    let mut ports = [None; 2];
    for addresses in [["172.31.0.10", "172.31.0.11"], ["172.31.0.11", "172.31.0.10"], ["172.31.0.10", "172.31.0.11"]] {
        gateway.set_policy(&with(addresses));
        for (i, pod) in pods.into_iter().enumerate() {
            let sent = gateway.pod_sends(&packet(Protocol::Udp, at(pod), at(REMOTES[0])));
            let source = ends(&sent).0;
            assert_eq!(source.ip(), ip(addresses[i]));
            assert_eq!(*ports[i].get_or_insert(source.port()), source.port());
            assert_eq!(ends(&gateway.remote_sends(&reply_to(&sent, Protocol::Udp))).1, at(pod));
        }
    }
    gateway.assert_delta("egress 6, reply 6, created 2");
}

/// A VIP that is removed is retired as long as a worker holds ports of it: what arrives for its private address is what arrives for it.
#[test]
fn a_retired_vip_keeps_its_private_address_as_long_as_it_is_retired() {
    let mut gateway = gateway();
    let sent = gateway.pod_sends(&packet(Protocol::Udp, at(PODS[0]), at(REMOTES[0])));
    let reply = reply_to(&sent, Protocol::Udp);
    let mut removed = with_private(policy(), "gw-a", PRIVATE);
    removed.vips.retain(|vip| vip.address != ip(VIP[0]));
    removed.endpoints.retain(|endpoint| endpoint.vips != [ip(VIP[0])]);
    gateway.set_policy(&removed);
    assert_eq!(gateway.receive(0, OUTSIDE, &reply), []);
    assert_eq!(gateway.drops(), [(DropReason::NoService, 1)].into(), "the session has ended; the VIP is known");
    assert!(gateway.builder.snapshot().policy.static_nat().addresses().all(|(private, _)| private != ip(PRIVATE[0])));
    // Back before its ports are free, with another private address.
    let back = with_private(policy(), "gw-a", ["172.31.0.99", PRIVATE[1]]);
    gateway.set_policy(&back);
    let sent = gateway.pod_sends(&packet(Protocol::Udp, at(PODS[0]), at(REMOTES[0])));
    assert_eq!(ends(&sent).0.ip(), ip("172.31.0.99"));
    gateway.remote_sends(&reply_to(&sent, Protocol::Udp));
    assert_eq!(gateway.receive(0, OUTSIDE, &reply), [], "no longer its private address");
    assert_eq!(gateway.drops().get(&DropReason::NoPolicy), Some(&1));
    gateway.set_policy(&removed);
    let private = || packet(Protocol::Udp, at(REMOTES[0]), (ip("172.31.0.99"), 9).into());
    gateway.receive(0, OUTSIDE, &private());
    assert_eq!(gateway.drops().get(&DropReason::NoService), Some(&2));
    // Its ports are free after the quarantine, and the next change removes it.
    gateway.advance(30_000);
    gateway.set_policy(&removed);
    gateway.receive(0, OUTSIDE, &private());
    assert_eq!(gateway.drops().get(&DropReason::NoPolicy), Some(&2), "{:?}", gateway.drops());
    gateway.skip_counter_check();
}

/// The cloud gives the private address of a removed VIP to another one at once.
#[test]
fn a_vip_takes_the_private_address_of_a_retired_one() {
    let mut gateway = gateway();
    let sent = gateway.pod_sends(&packet(Protocol::Udp, at(PODS[0]), at(REMOTES[0])));
    let mut next = policy();
    next.vips.retain(|vip| vip.address != ip(VIP[0]));
    next.endpoints.retain(|endpoint| endpoint.vips != [ip(VIP[0])]);
    super::add_private(&mut next, "gw-a", "192.0.2.11", PRIVATE[0]);
    gateway.set_policy(&next);
    assert_eq!(gateway.receive(0, OUTSIDE, &reply_to(&sent, Protocol::Udp)), []);
    let sent = gateway.pod_sends(&packet(Protocol::Udp, at("10.244.1.21:4000"), at(REMOTES[0])));
    assert_eq!(ends(&sent).0.ip(), ip(PRIVATE[0]));
    assert_eq!(ends(&gateway.remote_sends(&reply_to(&sent, Protocol::Udp))).1, at("10.244.1.21:4000"));
    gateway.skip_counter_check();
}
