//! Special-purpose addresses: each row of the table (RFC 6890), as source and destination, on each side, translated or
//! not, in tunnels; and link-local addresses of next hops, which are in no packet.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use vipgate_dataplane::flow::address::{Address, V6};
use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::flow::special_purpose::{BLOCKS, Block, find};
use vipgate_dataplane::flow::tunnel_metadata::{HAIRPIN_SIDE, TunnelMetadata};
use vipgate_dataplane::policy::spec::*;
use vipgate_dataplane::wire::icmp_error::IcmpError;
use vipgate_testkit::cluster::three_gateways;
use vipgate_testkit::services::{VIPS, both_pods, service, with_services};
use vipgate_testkit::*;

use crate::icmp::{error_about, quoted};
use crate::overlay;

/// A pod in each address family.
const PODS: [&str; 2] = ["10.244.1.5", "fd00:244:1::5"];
/// A remote in each address family.
const REMOTES: [&str; 2] = ["198.51.100.10", "2001:db8:51::10"];
const PROTOCOLS: [Protocol; 3] = [Protocol::Tcp, Protocol::Udp, Protocol::Echo];

/// The first and the last address of a block.
fn first_and_last(block: &Block) -> [IpAddr; 2] {
    let last: IpAddr = match block.network {
        IpAddr::V4(network) => Ipv4Addr::from_bits(network.to_bits().last_of_prefix(block.length)).into(),
        IpAddr::V6(network) => {
            Ipv6Addr::from_bits(V6::from_bits(network.to_bits()).last_of_prefix(block.length).to_bits()).into()
        }
    };
    [block.network, last]
}

/// An address of each row, and whether packets from it and to it are forwarded.
fn addresses() -> impl Iterator<Item = (IpAddr, bool, bool)> {
    BLOCKS.iter().flat_map(first_and_last).map(|address| {
        let block = find(address).unwrap();
        (address, block.is_forwarded_from(), block.is_forwarded_to())
    })
}

/// The one of the address's family.
fn of_family(address: IpAddr, each: [&str; 2]) -> &str {
    each[usize::from(address.is_ipv6())]
}

/// A packet with the MAC addresses of its interface.
fn packet_at(interface: InterfaceId, protocol: Protocol, source: IpAddr, destination: IpAddr) -> Vec<u8> {
    let (source, destination) = (SocketAddr::from((source, 4000)), SocketAddr::from((destination, 80)));
    on_link(interface, packet(protocol, source, destination))
}

/// Asserts that nothing is sent of a packet, and that it is dropped as a martian.
fn assert_martian(gateway: &mut Gateway, interface: InterfaceId, frame: &[u8], case: &str) {
    assert_eq!(gateway.receive(0, interface, frame), [], "{case}");
    assert_eq!((gateway.sessions(), gateway.drops()), (0, [(DropReason::Martian, 1)].into()), "{case}");
    gateway.assert_delta("drop martian 1");
}

#[test]
fn a_pods_packet_is_translated_to_what_is_forwardable_alone() {
    for (address, _, is_forwarded) in addresses() {
        for protocol in PROTOCOLS {
            let mut gateway = Gateway::new(&Setup::default());
            let frame = packet_at(INSIDE, protocol, ip(of_family(address, PODS)), address);
            let case = format!("to {address}, {protocol:?}");
            if is_forwarded {
                gateway.receive(0, INSIDE, &frame);
                assert_eq!((gateway.sessions(), gateway.drops()), (1, [].into()), "{case}");
                // On the outside link it awaits its neighbor, and isn't counted yet.
                gateway.skip_counter_check();
            } else {
                assert_martian(&mut gateway, INSIDE, &frame, &case);
            }
        }
    }
}

#[test]
fn a_client_reaches_a_service_from_what_is_forwardable_alone() {
    for (address, is_forwarded, _) in addresses() {
        let mut gateway = Gateway::with(&Setup::default(), network(), &with_services(&[service(&both_pods())]));
        let frame = packet_at(OUTSIDE, Protocol::Tcp, address, ip(of_family(address, VIPS)));
        let case = format!("from {address}");
        if is_forwarded {
            assert_eq!(gateway.receive(0, OUTSIDE, &frame).len(), 1, "{case}: {:?}", gateway.drops());
            gateway.assert_delta("inbound 1, created 1");
        } else {
            assert_martian(&mut gateway, OUTSIDE, &frame, &case);
        }
    }
}

/// They aren't pods' addresses, so none is forwarded: the reason differs.
#[test]
fn sources_inside_that_are_not_forwardable_are_martians() {
    for (address, is_forwarded, _) in addresses() {
        for protocol in PROTOCOLS {
            let mut gateway = Gateway::new(&Setup::default());
            let frame = packet_at(INSIDE, protocol, address, ip(of_family(address, REMOTES)));
            if is_forwarded {
                assert_eq!(gateway.receive(0, INSIDE, &frame), [], "from {address}");
                gateway.assert_delta("drop no_policy 1");
            } else {
                assert_martian(&mut gateway, INSIDE, &frame, &format!("from {address}, {protocol:?}"));
            }
        }
    }
}

/// What policy excludes, and the cluster's own addresses, are routed without translation: also these only if they are
/// forwardable.
#[test]
fn excluded_destinations_are_routed_unchanged_if_they_are_forwardable() {
    // More specific than the destinations that policy translates.
    let everything: Vec<_> = ["0.0.0.0/1", "128.0.0.0/1", "::/1", "8000::/1"].map(|net| net.parse().unwrap()).into();
    let mut excluded = policy();
    excluded.policies[0].excluded.clone_from(&everything);
    let cluster = ClusterSpec { pods: vec![], others: everything, drop_uncovered: true };
    let in_cluster = PolicySet { cluster, ..policy() };
    for set in [excluded, in_cluster] {
        for (address, is_forwarded_from, is_forwarded_to) in addresses() {
            let pod = ip(of_family(address, PODS));
            for (interface, source, destination, is_forwarded) in
                [(INSIDE, pod, address, is_forwarded_to), (OUTSIDE, address, pod, is_forwarded_from)]
            {
                let mut gateway = Gateway::with(&Setup::default(), network(), &set);
                let frame = packet_at(interface, Protocol::Udp, source, destination);
                let case = format!("{source} -> {destination}");
                if is_forwarded {
                    gateway.receive(0, interface, &frame);
                    assert_eq!((gateway.sessions(), gateway.drops()), (0, [].into()), "{case}");
                    gateway.skip_counter_check();
                } else {
                    assert_martian(&mut gateway, interface, &frame, &case);
                }
            }
        }
    }
}

#[test]
fn martians_in_tunnels_are_dropped() {
    let metadata = |sides| TunnelMetadata { sides, hop_count: 1, requests_port: false };
    let (inside, outside) = (metadata(Role::Inside.sides()), metadata(Role::Outside.sides()));
    let martians: Vec<IpAddr> = addresses().filter(|&(_, from, to)| !from && !to).map(|(it, ..)| it).collect();
    for &address in &martians {
        let [pod, vip] = [PODS, VIPS].map(|each| ip(of_family(address, each)));
        let mut cluster = three_gateways();
        for (mark, source, destination) in [
            (inside, pod, address),
            (outside, address, vip),
            (outside, address, pod),
            (metadata(HAIRPIN_SIDE), address, vip),
            (metadata(HAIRPIN_SIDE), vip, address),
        ] {
            let inner = packet_at(INSIDE, Protocol::Udp, source, destination);
            let frame = cluster.peer_packet(1, 0, mark, &inner);
            assert_eq!(cluster.receive(0, INSIDE, &frame), vec![], "{mark:?} {source} -> {destination}");
        }
        cluster.assert_delta(&["peer_in 5, drop martian 5", "", ""]);
        // Nor does a gateway forward one to the pod's own gateway.
        let other_pod = ip(of_family(address, ["10.244.1.6", "fd00:244:1::6"]));
        let frame = packet_at(INSIDE, Protocol::Udp, other_pod, address);
        assert_eq!(cluster.receive(0, INSIDE, &frame), vec![], "{address}");
        cluster.assert_delta(&["drop martian 1", "", ""]);
        // Out of a node's tunnel.
        let mut gateway = overlay::gateway(false, policy());
        let inner = packet_at(INSIDE, Protocol::Udp, pod, address);
        let frame =
            overlay::node_packet(overlay::vtep(1, false).ip(), overlay::local_vtep(false), overlay::VNI, &inner);
        assert_martian(&mut gateway, INSIDE, &frame, &format!("node: {pod} -> {address}"));
    }
}

/// The addresses of routers on a link aren't those of packets: clouds and unnumbered BGP have link-local ones.
#[test]
fn next_hops_may_have_link_local_addresses() {
    let mut network = network();
    let routers = [("0.0.0.0/0", "169.254.1.1"), ("::/0", "fe80::1")];
    for (prefix, router) in routers {
        let prefix = prefix.parse().unwrap();
        network.routes.retain(|route| route.prefix != prefix);
        let target = RouteTarget::Via(vec![HopSpec { interface: OUTSIDE, gateway: Some(ip(router)) }]);
        network.routes.push(RouteSpec { prefix, target });
        network.neighbors.push(NeighborSpec { interface: OUTSIDE, address: ip(router), mac: ROUTER_MAC });
    }
    // Its own addresses there, too: errors about packets have another source, which other routers forward.
    for interface in &mut network.interfaces {
        interface.addresses = vec![ip("169.254.1.2"), ip("fe80::2")];
    }
    for (pod, remote) in POD_AND_REMOTE {
        let mut gateway = Gateway::with(&Setup::default(), network.clone(), &policy());
        let request = packet(Protocol::Udp, at(pod), at(remote));
        let seen = gateway.pod_sends(&request);
        assert_eq!(seen[..6], ROUTER_MAC);
        gateway.remote_sends(&reply_to(&seen, Protocol::Udp));
        gateway.assert_delta("egress 1, reply 1, created 1");
        let mut expiring = request;
        set_ttl(&mut expiring, 1);
        let sent = gateway.receive(0, INSIDE, &expiring);
        if at(pod).is_ipv4() {
            assert_eq!(quoted(&sent[0].1).0, ip("192.0.0.8"));
            gateway.assert_delta("drop ttl 1, replies sent 1");
        } else {
            assert_eq!(sent, [], "it has no address for one");
            gateway.assert_delta("drop ttl 1");
        }
    }
}

/// Routers without an IPv4 address of their own report path MTUs from the dummy address (RFC 7600 section 4.8), routers
/// with link-local ones alone can't.
#[test]
fn icmp_errors_from_the_dummy_address_are_translated_and_from_link_local_ones_dropped() {
    let error = IcmpError::PacketTooBig { mtu: 1400 };
    let mut gateway = Gateway::new(&Setup::default());
    let seen = gateway.pod_sends(&packet(Protocol::Udp, at(POD_AND_REMOTE[0].0), at(POD_AND_REMOTE[0].1)));
    let received = gateway.receive(0, OUTSIDE, &error_about(&seen, "192.0.0.8", error, false));
    assert_eq!((received.len(), received[0].0), (1, INSIDE), "{:?}", gateway.drops());
    assert_eq!(quoted(&received[0].1).0, ip("192.0.0.8"));
    gateway.assert_delta("egress 1, reply 1, created 1");
    for (router, (pod, remote)) in ["169.254.1.1", "fe80::1"].into_iter().zip(POD_AND_REMOTE) {
        let mut gateway = Gateway::new(&Setup::default());
        let seen = gateway.pod_sends(&packet(Protocol::Udp, at(pod), at(remote)));
        assert_eq!(gateway.receive(0, OUTSIDE, &error_about(&seen, router, error, false)), []);
        gateway.assert_delta("egress 1, drop martian 1, created 1");
    }
}
