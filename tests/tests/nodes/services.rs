//! Services whose endpoints are outside of the cluster: the decision is by the endpoint, wherever it is chosen.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;

use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrStorage, bind, setsockopt, socket, sockopt};
use vipgate_lab::Host;
use vipgate_lab::reflector::{HTTP, UDP, query_http, query_udp};
use vipgate_tests::cluster::{Captures, L2_VIPS, SERVER, sleep_ms};
use vipgate_tests::verifier::{Frame, Packet};

use crate::scenario::{NEIGHBOR, NODE_ADDRESS, Scenario};

/// ClusterIPs of a Service with the server as its endpoint, and of one with the neighbor.
const TO_SERVER: [&str; 2] = ["10.96.0.50", "fd00:96::50"];
const TO_NEIGHBOR: [&str; 2] = ["10.96.0.51", "fd00:96::51"];
/// The node's addresses, which masquerading uses.
const NODE_ADDRESSES: [&str; 2] = [NODE_ADDRESS, "fd00:5:1::1"];
/// Of datagrams that the node sends.
const PORT: u16 = 7712;
const COUNT: usize = 20;

/// The Services in the form of kube-proxy's nftables mode.
fn add_services(node: &Host) {
    for (family, ip) in ["ip", "ip6"].into_iter().enumerate() {
        let translate = |service: &str, endpoint: &str| {
            let target = |port: u16| SocketAddr::new(endpoint.parse().unwrap(), port);
            let rule = |protocol: &str, port: u16| {
                format!("    {ip} daddr {service} {protocol} dport {port} dnat to {}\n", target(port))
            };
            rule("tcp", HTTP) + &rule("udp", UDP)
        };
        let rules = translate(TO_SERVER[family], SERVER[family]) + &translate(TO_NEIGHBOR[family], NEIGHBOR[family]);
        let table = format!(
            "table {ip} kube-proxy {{\n  chain nat-prerouting {{\n    type nat hook prerouting priority dstnat;\n\
             {rules}  }}\n}}\n"
        );
        node.output(&["nft", &table]).unwrap();
    }
}

fn addresses(texts: [&str; 2]) -> [IpAddr; 2] {
    texts.map(|text| text.parse().unwrap())
}

/// How many packets the node has dropped for a reason.
fn drops(scenario: &Scenario, reason: &str) -> u64 {
    let status = scenario.node.query(&["status"]);
    let drops = status["drops"].as_array().unwrap().iter().filter(|drop| drop["reason"] == reason);
    drops.filter_map(|drop| drop["packets"].as_u64()).sum()
}

#[test]
fn a_packet_to_a_cluster_ip_is_judged_by_the_endpoint() {
    let scenario = Scenario::start("node-service");
    add_services(&scenario.node.host);
    let leaks = scenario.capture_leaks();
    for family in [0, 1] {
        let (to_server, to_neighbor) = (addresses(TO_SERVER)[family], addresses(TO_NEIGHBOR)[family]);
        let covered = &scenario.covered().host;
        assert_eq!(query_http(covered, to_server).unwrap(), L2_VIPS[family], "{}", scenario.evidence());
        assert_eq!(query_udp(covered, to_server).unwrap(), L2_VIPS[family], "{}", scenario.evidence());
        // The CNI's masquerading applies.
        let uncovered = &scenario.uncovered().host;
        assert_eq!(query_http(uncovered, to_neighbor).unwrap(), NODE_ADDRESSES[family], "{}", scenario.evidence());
        assert_eq!(query_udp(uncovered, to_neighbor).unwrap(), NODE_ADDRESSES[family], "{}", scenario.evidence());
    }
    let neighbor = NEIGHBOR.map(|address| format!("dst host {address}")).join(" or ");
    let uplink = scenario.cluster.capture_uplink(&scenario.node, &neighbor);
    for service in addresses(TO_NEIGHBOR) {
        assert!(query_udp(&scenario.unknown().host, service).is_err(), "{}", scenario.evidence());
        assert!(query_http(&scenario.unknown().host, service).is_err(), "{}", scenario.evidence());
    }
    let left = uplink.end();
    assert!(left.is_empty(), "{} packets of an unknown pod left by the node", left.len());
    // A datagram, and a SYN or more, in each family.
    assert!(drops(&scenario, "unknown_pod") >= 4, "{}", scenario.evidence());
    // Once it is known, by its VIP.
    scenario.name_unknown();
    scenario.node.wait_for_pods(6);
    for (service, vip) in addresses(TO_SERVER).into_iter().zip(L2_VIPS) {
        assert_eq!(query_http(&scenario.unknown().host, service).unwrap(), vip, "{}", scenario.evidence());
    }
    scenario.check_kernel_agrees();
    let leaked = leaks.end();
    assert!(leaked.is_empty(), "{} packets left by the node", leaked.len());
}

/// Sends datagrams from the node with a pod's address. As what IPVS has translated, they come by `output` first.
fn send_as_pod(node: &Host, pod: &str, to: &str) {
    let (from, to): (IpAddr, IpAddr) = (pod.parse().unwrap(), to.parse().unwrap());
    let send = move || -> std::io::Result<()> {
        let family = if from.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
        let socket = socket(family, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
        setsockopt(&socket, sockopt::IpTransparent, &true)?;
        bind(socket.as_raw_fd(), &SockaddrStorage::from(SocketAddr::new(from, 0)))?;
        let socket = UdpSocket::from(socket);
        for _ in 0..COUNT {
            // An error if the rules drop it.
            let _ = socket.send_to(b"as a pod", (to, PORT));
            sleep_ms(1);
        }
        Ok(())
    };
    node.run(send).join().unwrap().unwrap();
}

/// The sources of the datagrams that arrive at a place while the node sends some with a pod's addresses, sorted.
fn arriving(scenario: &Scenario, place: (&Host, String), pod: &[String; 2], to: [&str; 2]) -> Vec<IpAddr> {
    let filter = format!("udp dst port {PORT}");
    let arrived = Captures::start(scenario.cluster.folder.path(), "arriving", &[place], &filter);
    for (pod, to) in pod.iter().zip(to) {
        send_as_pod(&scenario.node.host, pod, to);
    }
    let source = |frame: &Frame| Packet::in_frame(&frame.bytes).unwrap().addresses[0];
    let mut sources: Vec<IpAddr> = arrived.end().iter().map(source).collect();
    sources.sort_unstable();
    sources
}

/// All datagrams of both families, with these sources.
fn all_from(sources: [&str; 2]) -> Vec<IpAddr> {
    addresses(sources).into_iter().flat_map(|source| [source; COUNT]).collect()
}

/// IPVS needs its module. It sends a packet by `output`, with the pod's address as source and the endpoint as
/// destination; so does a transparent socket.
#[test]
fn what_ipvs_sends_is_steered_by_the_endpoint() {
    let scenario = Scenario::start("node-ipvs");
    let leaks = scenario.capture_leaks();
    let (server, neighbor) = (&scenario.cluster.server, &scenario.neighbor_host);
    let at = |host| (host, "eth0".to_owned());
    let covered = scenario.covered();
    for server in SERVER {
        query_udp(&covered.host, server.parse().unwrap()).unwrap();
    }
    let translated = arriving(&scenario, at(server), &covered.addresses, SERVER);
    assert_eq!(translated, all_from(L2_VIPS), "{}", scenario.evidence());
    let uplink = scenario.cluster.uplink(&scenario.node);
    let left = arriving(&scenario, uplink, &scenario.unknown().addresses, NEIGHBOR);
    assert!(left.is_empty(), "{left:?} {}", scenario.evidence());
    assert_eq!(drops(&scenario, "unknown_pod"), 2 * COUNT as u64, "{}", scenario.evidence());
    let leaked = leaks.end();
    assert!(leaked.is_empty(), "{} packets left by the node", leaked.len());
    // As without vipgate: masqueraded.
    let masqueraded = arriving(&scenario, at(neighbor), &scenario.uncovered().addresses, NEIGHBOR);
    assert_eq!(masqueraded, all_from(NODE_ADDRESSES), "{}", scenario.evidence());
    // The node's own, with an address in the pods' prefix, as bridges have it.
    let own = ["10.244.1.1", "fd00:244:1::1"].map(str::to_owned);
    scenario.node.host.addresses("lo", &["10.244.1.1/32", "fd00:244:1::1/128"]).unwrap();
    let masqueraded = arriving(&scenario, at(neighbor), &own, NEIGHBOR);
    assert_eq!(masqueraded, all_from(NODE_ADDRESSES), "{}", scenario.evidence());
}
