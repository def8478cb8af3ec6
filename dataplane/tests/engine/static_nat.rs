//! Static NAT: outside, packets have the private address of a VIP at the gateway; inside, in sessions and in tunnels, the VIP.

pub(crate) mod cloud;
mod equivalence;

use std::net::{IpAddr, SocketAddr};

use vipgate_dataplane::policy::spec::{PolicySet, PrivateAddressSpec};
use vipgate_dataplane::wire::arp::{Arp, Operation};
use vipgate_dataplane::wire::ethernet;
use vipgate_testkit::cluster::*;
use vipgate_testkit::services::*;
use vipgate_testkit::*;

const REMOTES: [&str; 2] = ["198.51.100.7:443", "[2001:db8:99::7]:443"];
const PODS: [&str; 2] = ["10.244.1.5:4000", "[fd00:244:1::5]:4000"];
const PRIVATE: [&str; 2] = ["172.31.0.10", "fd31::10"];
const VIP: [&str; 2] = ["192.0.2.10", "2001:db8::10"];

fn with_private(mut set: PolicySet, gateway: &str, addresses: [&str; 2]) -> PolicySet {
    for (vip, private) in VIP.into_iter().zip(addresses) {
        let vip = set.vips.iter_mut().find(|it| it.address == ip(vip)).unwrap();
        vip.private.push(PrivateAddressSpec { gateway: gateway.into(), address: ip(private) });
    }
    set
}

fn gateway() -> Gateway {
    let mut gateway = Gateway::new(&Setup::default());
    gateway.set_policy(&with_private(policy(), "gw-a", PRIVATE));
    gateway
}

/// The same packet to another address.
fn redirected(to: IpAddr, protocol: Protocol, seen: &[u8]) -> Vec<u8> {
    let (source, destination) = ends(seen);
    packet(protocol, destination, SocketAddr::new(to, source.port()))
}

#[test]
fn outside_packets_of_pods_have_the_private_address_and_replies_to_it_come_back() {
    for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Echo] {
        let mut gateway = gateway();
        for (i, (pod, remote)) in PODS.into_iter().zip(REMOTES).enumerate() {
            let request = match protocol {
                Protocol::Tcp => tcp(at(pod), at(remote), "S", 1000, 0),
                _ => packet(protocol, at(pod), at(remote)),
            };
            let sent = gateway.pod_sends(&request);
            assert_eq!((ends(&sent).0.ip(), ends(&sent).1.ip()), (ip(PRIVATE[i]), at(remote).ip()), "{protocol:?}");
            let reply = match protocol {
                Protocol::Tcp => tcp(ends(&sent).1, ends(&sent).0, "SA", 5000, 1001),
                _ => reply_to(&sent, protocol),
            };
            let received = gateway.remote_sends(&reply);
            assert_eq!(ends(&received).1.ip(), at(pod).ip(), "{protocol:?}");
        }
        gateway.check_frames();
        gateway.assert_delta("egress 2, reply 2, created 2");
    }
}

#[test]
fn clients_reach_a_service_at_the_private_address() {
    let mut gateway = Gateway::new(&Setup::default());
    gateway.set_policy(&with_private(with_services(&[service(&both_pods())]), "gw-a", PRIVATE));
    let client = at("198.51.100.9:5000");
    let request = tcp(client, SocketAddr::new(ip(PRIVATE[0]), 80), "S", 1000, 0);
    let backend = gateway.client_sends(&request);
    assert_eq!(backend.port(), 8080);
    let answered = gateway.backend_sends(0, &tcp(backend, client, "SA", 5000, 1001));
    assert_eq!(answered, (SocketAddr::new(ip(PRIVATE[0]), 80), client));
    gateway.assert_delta("inbound 1, service_reply 1, created 1");
}

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
fn arp_for_the_private_address_is_answered_and_for_the_vip_is_not() {
    let mut gateway = gateway();
    let host = [0xc6, 0x33, 0x64, 0x01];
    let request = |target: &str| {
        let target = match ip(target) {
            IpAddr::V4(v4) => v4.to_bits(),
            IpAddr::V6(_) => unreachable!("ARP is of IPv4"),
        };
        let operation = Operation::Request;
        let sender = u32::from_be_bytes(host);
        Arp { operation, sender_mac: ROUTER_MAC, sender, target_mac: [0; 6], target }.frame(ethernet::BROADCAST)
    };
    let sent = gateway.receive(0, OUTSIDE, &request(PRIVATE[0]));
    let reply = Arp::parse(&sent[0].1[ethernet::HEADER..]).unwrap();
    assert_eq!((reply.operation, IpAddr::from(reply.sender.to_be_bytes())), (Operation::Reply, ip(PRIVATE[0])));
    assert_eq!(reply.sender_mac, OUTSIDE_MAC);
    for other in ["172.31.0.77", VIP[0]] {
        assert_eq!(gateway.receive(0, OUTSIDE, &request(other)), []);
    }
    gateway.assert_delta("drop not_ours 2, replies sent 1");
}

#[test]
fn a_reply_at_a_gateway_with_another_private_address_reaches_the_owner_in_the_tunnel() {
    let mut cluster = Cluster::new(2, &Setup::default());
    let others = ["172.31.16.10", "fd31:16::10"];
    cluster.change_policy(|set| *set = with_private(with_private(set.clone(), "gw-0", PRIVATE), "gw-1", others));
    let request = packet(Protocol::Udp, at(PODS[0]), at(REMOTES[0]));
    let sent = expect_one(cluster.receive(0, INSIDE, &request), 0, OUTSIDE, &cluster);
    assert_eq!(ends(&sent).0.ip(), ip(PRIVATE[0]));
    // The cloud has moved the address to the other gateway.
    let reply = redirected(ip(others[0]), Protocol::Udp, &sent);
    let received = expect_one(cluster.receive(1, OUTSIDE, &reply), 0, INSIDE, &cluster);
    assert_eq!(ends(&received).1, at(PODS[0]));
    cluster.advance(200);
    cluster.kill(0);
    let again = expect_one(cluster.receive(1, INSIDE, &request), 1, OUTSIDE, &cluster);
    assert_eq!(ends(&again).0, SocketAddr::new(ip(others[0]), ends(&sent).0.port()), "the session goes on");
    let received = expect_one(cluster.receive(1, OUTSIDE, &reply), 1, INSIDE, &cluster);
    assert_eq!(ends(&received).1, at(PODS[0]));
    cluster.assert_delta(&["egress 1, reply 1, peer_in 1, created 1", "egress 1, reply 1, peer_out 1, failed over 1"]);
}
