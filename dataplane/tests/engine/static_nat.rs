//! Static NAT: outside, packets have the private address of a VIP at the gateway; inside, in sessions and in tunnels, the VIP.

mod addresses;
pub(crate) mod cloud;
mod equivalence;
mod fragments;
mod gateways;
mod icmp_errors;
mod neighbors;
mod one_armed;
mod policy_changes;

use std::net::{IpAddr, SocketAddr};

use vipgate_dataplane::policy::spec::PrivateAddressSpec;
use vipgate_dataplane::wire::arp::{Arp, Operation};
use vipgate_dataplane::wire::ethernet;
use vipgate_testkit::services::*;
use vipgate_testkit::*;

const REMOTES: [&str; 2] = ["198.51.100.7:443", "[2001:db8:99::7]:443"];
const PODS: [&str; 2] = ["10.244.1.5:4000", "[fd00:244:1::5]:4000"];
const PRIVATE: [&str; 2] = ["172.31.0.10", "fd31::10"];
const VIP: [&str; 2] = ["192.0.2.10", "2001:db8::10"];

fn add_private(set: &mut PolicySet, gateway: &str, vip: &str, private: &str) {
    let vip = set.vips.iter_mut().find(|it| it.address == ip(vip)).unwrap();
    vip.private.push(PrivateAddressSpec { gateway: gateway.into(), address: ip(private) });
}

fn with_private(mut set: PolicySet, gateway: &str, addresses: [&str; 2]) -> PolicySet {
    for (vip, private) in VIP.into_iter().zip(addresses) {
        add_private(&mut set, gateway, vip, private);
    }
    set
}

/// A gateway with this policy, whose VIPs have private addresses.
fn in_cloud(set: PolicySet) -> Gateway {
    let mut gateway = Gateway::new(&Setup::default());
    gateway.set_policy(&with_private(set, "gw-a", PRIVATE));
    gateway
}

fn gateway() -> Gateway {
    in_cloud(policy())
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
fn arp_for_the_private_address_is_answered_and_for_the_vip_is_not() {
    let mut gateway = gateway();
    let host = [0xc6, 0x33, 0x64, 0x01];
    let request = |target: &str| {
        let target = match ip(target) {
            IpAddr::V4(v4) => v4.to_bits(),
            IpAddr::V6(_) => unreachable!("ARP is of IPv4"),
        };
        Arp::request(ROUTER_MAC, u32::from_be_bytes(host), target).frame(ethernet::BROADCAST)
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
