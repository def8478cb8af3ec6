//! Unauthenticated peers, in the peer network and elsewhere.

use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

use vipgate_tests::cluster::{Captures, Cluster, PEER_PORT, SERVER, script_path, sleep_ms};
use vipgate_tests::tls::{CertificateAuthority, tomorrow};
use vipgate_tests::verifier::{Packet, client_identity};
use vipgate_tests::wait_for;

use crate::scenario::{MAX_OUTAGE, Scenario};

#[test]
fn unauthenticated_peers_are_rejected() {
    let cluster = Cluster::running("unauth", 3);
    let scenario = Scenario::start(&cluster, 200, 20);
    let own = CertificateAuthority::new(cluster.folder.path(), "unknown").sign("gw-1", &["gw-1"], tomorrow());
    let port = PEER_PORT.to_string();
    let script = script_path("cluster/unauthenticated_peer.py");
    let calls = [("garbage", None), ("silent", None), ("tls", None), ("tls", Some(&own))];
    for (number, (how, certificate)) in calls.into_iter().enumerate() {
        let gateway = &cluster.gateways[number % cluster.gateways.len()];
        let mut command = vec!["python3", &script, &gateway.peer_address, &port, how];
        command.extend(certificate.into_iter().flat_map(|it| [it.cert.as_str(), it.key.as_str()]));
        let output = cluster.unauthenticated_peer.output(&command).unwrap();
        assert!(output.starts_with("refused"), "{how} at {}: {output}", gateway.name);
        assert!(!output.contains("Connection refused"), "no listener at {}", gateway.name);
        println!("{how} at {}: {}", gateway.name, output.trim());
    }
    // They don't occupy the gateways either.
    cluster.wait_converged();
    scenario.end(&cluster).check_uninterrupted(MAX_OUTAGE / 2.0);
}

/// A tunnel packet with a datagram of a pod to the server.
fn forged(number: u32) -> Vec<u8> {
    let payload = format!("{number:08} 000000\n");
    let mut udp = [5000_u16, 7700].map(u16::to_be_bytes).concat();
    udp.extend((8 + payload.len() as u16).to_be_bytes());
    udp.extend([0, 0]);
    udp.extend(payload.as_bytes());
    let mut ip = vec![0x45, 0];
    ip.extend((20 + udp.len() as u16).to_be_bytes());
    ip.extend([0, 1, 0, 0, 64, 17, 0, 0, 10, 1, 0, 11, 198, 51, 100, 10]);
    let sum = ip.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum::<u32>();
    let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    let mut packet = vec![8, 0, 0, 0, 0x76, 0x70, 1, 0];
    packet.extend([2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0]);
    packet.extend(ip);
    packet.extend(udp);
    packet
}

/// A tunnel packet with an unsolicited reply to a pod of another tenant.
fn forged_to_pod(number: u32) -> Vec<u8> {
    let mut packet = forged(number);
    // Flag: it came in outside. From the server, to pod p3 of tenant B.
    packet[6] = 0x0a;
    let ip = 8 + 14;
    packet[ip + 12..ip + 20].copy_from_slice(&[198, 51, 100, 10, 10, 1, 0, 21]);
    packet[ip + 10..ip + 12].fill(0);
    let header = &packet[ip..ip + 20];
    let sum = header.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum::<u32>();
    let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
    packet[ip + 10..ip + 12].copy_from_slice(&sum.to_be_bytes());
    packet
}

#[test]
fn forged_tunnel_packets_are_dropped_and_counted() {
    const COUNT: u32 = 50;
    let cluster = Cluster::running("forged", 3);
    let server = Captures::start(cluster.folder.path(), "server", &[(&cluster.server, "eth0".into())], "udp");
    let unknown = |number: usize| cluster.gateways[number].metric("vipgate_drops_total", "reason=\"peer_unknown\"");
    let send_forged = |host: &vipgate_lab::Host, to: String, first: u32| {
        let to: SocketAddr = to.parse().unwrap();
        let sending = host.run(move || {
            let socket = UdpSocket::bind("0.0.0.0:0")?;
            (0..COUNT).try_for_each(|number| socket.send_to(&forged(first + number), to).map(drop))
        });
        sending.join().unwrap().unwrap();
    };
    cluster.accounting.expect_exactly([("peer_unknown", 3 * u64::from(COUNT))]);
    for number in cluster.indices() {
        let before = unknown(number);
        send_forged(
            &cluster.unauthenticated_peer,
            format!("{}:{PEER_PORT}", cluster.gateways[number].peer_address),
            10_000_000,
        );
        let counted = || (unknown(number) - before - f64::from(COUNT)).abs() < 0.5;
        assert!(
            wait_for(Duration::from_secs(3), counted),
            "{} of {COUNT}\n{}",
            unknown(number) - before,
            cluster.drop_summary()
        );
        // From the server outside, and from a pod.
        send_forged(&cluster.server, format!("203.0.113.{}:{PEER_PORT}", number + 1), 20_000_000);
        send_forged(&cluster.pods[3], format!("10.4.{}.1:{PEER_PORT}", number + 1), 30_000_000);
    }
    sleep_ms(300);
    let frames = server.end();
    let delivered = frames
        .iter()
        .filter_map(|frame| Packet::in_frame(&frame.bytes))
        .filter(|packet| packet.addresses[1].to_string() == SERVER[0] && client_identity(packet.payload).is_some());
    assert_eq!(delivered.count(), 0, "a forged packet was forwarded");
    cluster.check_frames();
}

/// Packets with a peer's address as their source are not accepted: outside, since packets of that peer don't arrive
/// there, and in the peer network, since they lack the authentication tag. Traffic continues.
#[test]
fn a_spoofed_peer_address_is_dropped() {
    const COUNT: u32 = 50;
    let cluster = Cluster::running("feigned", 3);
    let scenario = Scenario::start(&cluster, 200, 20);
    let hosts = [&cluster.server, &cluster.pods[2]].map(|host| (host, "eth0".to_owned()));
    let captures = Captures::start(cluster.folder.path(), "all", &hosts, "udp");
    let dropped = |number: usize, reason: &str| {
        cluster.gateways[number].metric("vipgate_drops_total", &format!("reason=\"{reason}\""))
    };
    let per_gateway = 2 * COUNT;
    let count = cluster.gateways.len();
    cluster.accounting.expect_exactly([
        ("peer_unknown", count as u64 * u64::from(per_gateway)),
        ("peer_unauthenticated", count as u64 * u64::from(per_gateway)),
    ]);
    for number in cluster.indices() {
        let (gateway, spoofed) =
            (&cluster.gateways[number], cluster.gateways[(number + 1) % count].peer_address.clone());
        let to: SocketAddr = format!("{}:{PEER_PORT}", gateway.peer_address).parse().unwrap();
        let before = ["peer_unknown", "peer_unauthenticated"].map(|reason| dropped(number, reason));
        for (host, interface, via) in [
            (&cluster.outside, "public", Some(format!("203.0.113.{}", number + 1))),
            (&cluster.unauthenticated_peer, "eth0", None),
        ] {
            // It has the peer's address while it sends, but neither uses it for ARP requests nor replies for it.
            host.sysctl("net.ipv4.conf.all.arp_announce", 2).unwrap();
            host.sysctl("net.ipv4.conf.all.arp_ignore", 1).unwrap();
            let route = [to.ip().to_string(), format!("{spoofed}/32")];
            host.ip(&["address", "add", &route[1], "dev", "lo"]).unwrap();
            let mut command = vec!["route", "replace", &route[0], "dev", interface, "src", &spoofed];
            command.extend(via.iter().flat_map(|via| ["via", via.as_str()]));
            host.ip(&command).unwrap();
            let source: SocketAddr = format!("{spoofed}:0").parse().unwrap();
            let sending = host.run(move || {
                let socket = UdpSocket::bind(source)?;
                (0..COUNT).try_for_each(|number| {
                    socket.send_to(&forged(40_000_000 + number), to)?;
                    socket.send_to(&forged_to_pod(50_000_000 + number), to).map(drop)
                })
            });
            sending.join().unwrap().unwrap();
            host.ip(&["route", "del", &route[0], "dev", interface]).unwrap();
            host.ip(&["address", "del", &route[1], "dev", "lo"]).unwrap();
        }
        for (reason, before) in ["peer_unknown", "peer_unauthenticated"].into_iter().zip(before) {
            let counted = || (dropped(number, reason) - before - f64::from(per_gateway)).abs() < 0.5;
            assert!(
                wait_for(Duration::from_secs(3), counted),
                "{reason} at {}\n{}",
                gateway.name,
                cluster.drop_summary()
            );
        }
    }
    sleep_ms(300);
    let delivered = captures.end();
    let delivered = delivered.iter().filter_map(|frame| Packet::in_frame(&frame.bytes)).filter(|packet| {
        client_identity(packet.payload).is_some_and(|number| (40_000_000..60_000_000).contains(&number))
    });
    assert_eq!(delivered.count(), 0, "a forged packet was forwarded");
    scenario.end(&cluster).check_uninterrupted(MAX_OUTAGE / 2.0);
    cluster.check_frames();
}
