//! Somebody who is no gateway, on the gateways' own segment and elsewhere.

use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

use vipgate_tests::cluster::{Captures, Cluster, PEER, SERVER, pass, script};
use vipgate_tests::judge::{Packet, identity};
use vipgate_tests::tls::{Authority, tomorrow};
use vipgate_tests::wait_for;

use crate::scene::{OUTAGE, Scene};

#[test]
fn strangers_are_no_peers() {
    let cluster = Cluster::running("strange", 3);
    let scene = Scene::begin(&cluster, 200, 20);
    let own = Authority::new(cluster.folder.path(), "strange").sign("gw-1", &["gw-1"], tomorrow());
    let port = PEER.to_string();
    let script = script("cluster/strange_peer.py");
    let calls = [("garbage", None), ("silent", None), ("tls", None), ("tls", Some(&own))];
    for (number, (how, certificate)) in calls.into_iter().enumerate() {
        let gateway = &cluster.gateways[number % cluster.gateways.len()];
        let mut command = vec!["python3", &script, &gateway.peer, &port, how];
        command.extend(certificate.into_iter().flat_map(|it| [it.cert.as_str(), it.key.as_str()]));
        let said = cluster.stranger.output(&command).unwrap();
        assert!(said.starts_with("refused"), "{how} at {}: {said}", gateway.name);
        assert!(!said.contains("Connection refused"), "nobody listens at {}", gateway.name);
        println!("{how} at {}: {}", gateway.name, said.trim());
    }
    // Nobody can be kept busy by them either.
    cluster.wait_whole();
    scene.end(&cluster).check_unharmed(OUTAGE / 2.0);
}

/// A packet of a pod to the server, as it would travel between gateways.
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

/// The same from outside to a pod of somebody else: an answer that no tenant has asked for.
fn forged_to_pod(number: u32) -> Vec<u8> {
    let mut packet = forged(number);
    // In a mark: it came in outside. From the server, to pod p3 of tenant B.
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
    let send = |host: &vipgate::lab::Host, to: String, first: u32| {
        let to: SocketAddr = to.parse().unwrap();
        let sending = host.run(move || {
            let socket = UdpSocket::bind("0.0.0.0:0")?;
            (0..COUNT).try_for_each(|number| socket.send_to(&forged(first + number), to).map(drop))
        });
        sending.join().unwrap().unwrap();
    };
    cluster.ledger.expect_exactly([("peer_unknown", 3 * u64::from(COUNT))]);
    for number in cluster.all() {
        let before = unknown(number);
        send(&cluster.stranger, format!("{}:{PEER}", cluster.gateways[number].peer), 10_000_000);
        let counted = || (unknown(number) - before - f64::from(COUNT)).abs() < 0.5;
        assert!(
            wait_for(Duration::from_secs(3), counted),
            "{} of {COUNT}\n{}",
            unknown(number) - before,
            cluster.drops()
        );
        // From the world, and from a pod.
        send(&cluster.server, format!("203.0.113.{}:{PEER}", number + 1), 20_000_000);
        send(&cluster.pods[3], format!("10.4.{}.1:{PEER}", number + 1), 30_000_000);
    }
    pass(300);
    let frames = server.end();
    let came = frames
        .iter()
        .filter_map(|frame| Packet::in_frame(&frame.bytes))
        .filter(|packet| packet.addresses[1].to_string() == SERVER[0] && identity(packet.payload).is_some());
    assert_eq!(came.count(), 0, "a forged packet went on");
    cluster.check_frames();
}

/// Whoever has a peer's address as its own source, or writes it there, is not that peer: neither on the outside link, where packets with it
/// don't come from, nor on the gateways' own segment, where a tag is missing. Traffic goes on meanwhile.
#[test]
fn a_peers_source_address_makes_no_peer() {
    const COUNT: u32 = 50;
    let cluster = Cluster::running("feigned", 3);
    let scene = Scene::begin(&cluster, 200, 20);
    let hosts = [&cluster.server, &cluster.pods[2]].map(|host| (host, "eth0".to_owned()));
    let seen = Captures::start(cluster.folder.path(), "all", &hosts, "udp");
    let dropped = |number: usize, reason: &str| {
        cluster.gateways[number].metric("vipgate_drops_total", &format!("reason=\"{reason}\""))
    };
    let each = 2 * COUNT;
    let count = cluster.gateways.len();
    cluster.ledger.expect_exactly([
        ("peer_unknown", count as u64 * u64::from(each)),
        ("peer_unauthenticated", count as u64 * u64::from(each)),
    ]);
    for number in cluster.all() {
        let (gateway, feigned) = (&cluster.gateways[number], cluster.gateways[(number + 1) % count].peer.clone());
        let to: SocketAddr = format!("{}:{PEER}", gateway.peer).parse().unwrap();
        let before = ["peer_unknown", "peer_unauthenticated"].map(|reason| dropped(number, reason));
        for (host, interface, via) in
            [(&cluster.outside, "public", Some(format!("203.0.113.{}", number + 1))), (&cluster.stranger, "eth0", None)]
        {
            // An address of its own that is the peer's, for as long as it sends: it asks for none with it, and answers for none.
            host.sysctl("net.ipv4.conf.all.arp_announce", 2).unwrap();
            host.sysctl("net.ipv4.conf.all.arp_ignore", 1).unwrap();
            let route = [to.ip().to_string(), format!("{feigned}/32")];
            host.ip(&["address", "add", &route[1], "dev", "lo"]).unwrap();
            let mut command = vec!["route", "replace", &route[0], "dev", interface, "src", &feigned];
            command.extend(via.iter().flat_map(|via| ["via", via.as_str()]));
            host.ip(&command).unwrap();
            let source: SocketAddr = format!("{feigned}:0").parse().unwrap();
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
            let counted = || (dropped(number, reason) - before - f64::from(each)).abs() < 0.5;
            assert!(wait_for(Duration::from_secs(3), counted), "{reason} at {}\n{}", gateway.name, cluster.drops());
        }
    }
    pass(300);
    let forged = seen.end();
    let forged = forged
        .iter()
        .filter_map(|frame| Packet::in_frame(&frame.bytes))
        .filter(|packet| identity(packet.payload).is_some_and(|number| (40_000_000..60_000_000).contains(&number)));
    assert_eq!(forged.count(), 0, "a forged packet went on");
    scene.end(&cluster).check_unharmed(OUTAGE / 2.0);
    cluster.check_frames();
}
