//! A one-armed gateway: pods and the outside are at the same interface. Packets to pods keep VIPs.

use std::net::SocketAddr;

use vipgate_dataplane::policy::spec::{HopSpec, NetworkSpec, Role, RouteTarget};
use vipgate_dataplane::wire::icmp_error::IcmpError;
use vipgate_testkit::services::*;
use vipgate_testkit::*;

use super::{PODS, PRIVATE, REMOTES, VIP, with_private};
use crate::icmp::{error_about, quoted};

/// All of the test network at one interface.
fn one_armed() -> NetworkSpec {
    let mut network = network();
    network.interfaces.truncate(1);
    network.interfaces[0].role = Role::Both;
    network.interfaces[0].addresses = vec![ip("172.31.0.2"), ip("fd31::2")];
    for route in &mut network.routes {
        let RouteTarget::Via(hops) = &mut route.target else { continue };
        let on_interface = |hop: &HopSpec| HopSpec { interface: INSIDE, ..*hop };
        *hops = hops.iter().map(on_interface).collect();
    }
    network.neighbors.iter_mut().for_each(|neighbor| neighbor.interface = INSIDE);
    network
}

fn gateway() -> Gateway {
    let mut backends = both_pods();
    backends.push(backend("10.244.1.7"));
    let mut set = with_private(with_services(&[service(&backends)]), "gw-a", PRIVATE);
    super::add_private(&mut set, "gw-a", "192.0.2.11", "172.31.0.11");
    Gateway::with(&Setup { reject: true, ..Setup::default() }, one_armed(), &set)
}

/// The one packet that is sent because of a packet, with its destination MAC address.
fn pass(gateway: &mut Gateway, frame: &[u8]) -> ([u8; 6], Vec<u8>) {
    let mut sent = gateway.receive(0, INSIDE, &on_link(INSIDE, frame.to_vec()));
    assert_eq!(sent.len(), 1, "{:?}", gateway.drops());
    let bytes = sent.remove(0).1;
    (*bytes.first_chunk().unwrap(), bytes)
}

#[test]
fn pods_reach_the_outside_from_private_addresses() {
    let mut gateway = gateway();
    for (i, (pod, remote)) in PODS.into_iter().zip(REMOTES).enumerate() {
        let (mac, sent) = pass(&mut gateway, &packet(Protocol::Udp, at(pod), at(remote)));
        assert_eq!((mac, ends(&sent).0.ip(), ends(&sent).1), (ROUTER_MAC, ip(PRIVATE[i]), at(remote)));
        let (mac, received) = pass(&mut gateway, &reply_to(&sent, Protocol::Udp));
        assert_eq!((mac, ends(&received)), (POD_MAC, (at(remote), at(pod))));
        let router = ["203.0.113.77", "2001:db8:77::1"][i];
        let error = error_about(&sent, router, IcmpError::HostUnreachable, false);
        let (source, destination, quote) = quoted(&pass(&mut gateway, &error).1);
        assert_eq!((source, destination, ends(&quote)), (ip(router), at(pod).ip(), (at(pod), at(remote))));
    }
    gateway.assert_delta("egress 2, reply 4, created 2");
}

#[test]
fn clients_reach_services_at_private_addresses() {
    let mut gateway = gateway();
    for i in 0..2 {
        let (client, private) = (at(CLIENTS[i]), SocketAddr::new(ip(PRIVATE[i]), 80));
        let (_, received) = pass(&mut gateway, &tcp(client, private, "S", 1000, 0));
        let (source, backend) = ends(&received);
        assert_eq!(source, client);
        let (mac, sent) = pass(&mut gateway, &tcp(backend, client, "SA", 5000, 1001));
        assert_eq!((mac, ends(&sent)), (ROUTER_MAC, (private, client)));
        // The gateway's own error, to the outside.
        let closed = SocketAddr::new(ip(PRIVATE[i]), 81);
        let (_, error) = pass(&mut gateway, &packet(Protocol::Udp, client, closed));
        let (source, destination, quote) = quoted(&error);
        assert_eq!((source, destination, ends(&quote)), (closed.ip(), client.ip(), (client, closed)));
    }
    gateway.assert_delta("inbound 2, service_reply 2, drop no_service 2, created 2, replies sent 2");
}

#[test]
fn hairpin_packets_have_vips_also_at_a_backend_without_a_policy() {
    let mut gateway = gateway();
    let mut backends = std::collections::BTreeSet::new();
    for n in 0..40 {
        let (pod, frontend) = (SocketAddr::new(ip("10.244.1.21"), 3000 + n), SocketAddr::new(ip(VIP[0]), 80));
        let (_, received) = pass(&mut gateway, &tcp(pod, frontend, "S", 1000, 0));
        let (caller, backend) = ends(&received);
        assert_eq!(caller.ip(), ip("192.0.2.11"));
        backends.insert(backend.ip());
        let (mac, answered) = pass(&mut gateway, &tcp(backend, caller, "SA", 5000, 1001));
        assert_eq!((mac, ends(&answered)), (POD_MAC, (frontend, pod)));
    }
    assert_eq!(backends, ["10.244.1.5", "10.244.1.6", "10.244.1.7"].map(ip).into());
    for i in 0..2 {
        let other = SocketAddr::new(ip(["10.244.1.6", "fd00:244:1::6"][i]), 3000);
        let (_, received) = pass(&mut gateway, &packet(Protocol::Udp, other, (ip(VIP[i]), 53).into()));
        assert_eq!(ends(&received).0.ip(), ip(VIP[i]), "its own VIP");
        // An error of the gateway to a pod is about the VIP that the pod called.
        let closed = SocketAddr::new(ip(VIP[i]), 81);
        let (_, error) = pass(&mut gateway, &packet(Protocol::Udp, other, closed));
        let (source, destination, quote) = quoted(&error);
        assert_eq!((source, destination, ends(&quote)), (closed.ip(), other.ip(), (other, closed)));
    }
    gateway.skip_counter_check();
}

/// The pod has the VIP as its peer, whichever of both addresses it has called.
#[test]
fn a_pods_packet_to_a_private_address_reaches_the_vip() {
    let mut gateway = gateway();
    let pod = at("10.244.1.21:3000");
    let (_, received) = pass(&mut gateway, &packet(Protocol::Udp, pod, (ip(PRIVATE[0]), 53).into()));
    let (caller, backend) = ends(&received);
    assert_eq!((caller.ip(), backend.port()), (ip("192.0.2.11"), 5353));
    let (_, answered) = pass(&mut gateway, &packet(Protocol::Udp, backend, caller));
    assert_eq!(ends(&answered), ((ip(VIP[0]), 53).into(), pod));
    gateway.assert_delta("egress 1, reply 1, inbound 1, service_reply 1, created 2");
}
