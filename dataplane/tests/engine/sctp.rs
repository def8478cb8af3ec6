//! SCTP associations: opened by INIT only, translated with a right CRC32c, closed and aborted by those who belong to them.

use std::net::{IpAddr, SocketAddr};

use crate::support::cluster::{Cluster, only, three};
use crate::support::*;
use vipgate_dataplane::counters::DropReason;
use vipgate_dataplane::wire::sctp;

const INIT: u8 = 1;
const INIT_ACK: u8 = 2;
const DATA: u8 = 0;
const ABORT: u8 = 6;
const COOKIE_ECHO: u8 = 10;
const SHUTDOWN_ACK: u8 = 8;
const SHUTDOWN_COMPLETE: u8 = 14;

fn packet(source: SocketAddr, destination: SocketAddr, tag: u32, chunk: u8) -> Vec<u8> {
    wanting(0x0707_0707, source, destination, tag, chunk)
}

/// A packet whose chunk, if it is of a handshake, says which tag its sender wants.
fn wanting(wanted: u32, source: SocketAddr, destination: SocketAddr, tag: u32, chunk: u8) -> Vec<u8> {
    let mut body = Vec::new();
    body.extend(source.port().to_be_bytes());
    body.extend(destination.port().to_be_bytes());
    body.extend(tag.to_be_bytes());
    body.extend([0; 4]);
    body.extend([chunk, 0, 0, 20]);
    body.extend(wanted.to_be_bytes());
    body.extend([7; 12]);
    let crc = crc32c(&body);
    body[8..12].copy_from_slice(&crc.to_le_bytes());
    let from_pod = source.ip().to_string().starts_with("10.") || source.ip().to_string().starts_with("fd00:244");
    let link = if from_pod { [INSIDE_MAC, POD_MAC] } else { [OUTSIDE_MAC, ROUTER_MAC] }.concat();
    match (source.ip(), destination.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let mut header = vec![0x45, 0, 0, 20 + body.len() as u8, 0, 0, 0x40, 0, 64, 132, 0, 0];
            header.extend(from.octets());
            header.extend(to.octets());
            let mut frame = [&link[..], &[8, 0], &header, &body].concat();
            seal_header(&mut frame);
            frame
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            let mut header = vec![0x60, 0, 0, 0, 0, body.len() as u8, 132, 64];
            header.extend(from.octets());
            header.extend(to.octets());
            [&link[..], &[0x86, 0xdd], &header, &body].concat()
        }
        _ => panic!("mixed families"),
    }
}

/// Bit by bit, as RFC 9260 appendix A has it.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 })
    })
}

/// Both ends of a packet that left, whose checksum is right.
fn seen(frame: &[u8]) -> (SocketAddr, SocketAddr) {
    let v4 = frame[12] == 8;
    let (addresses, l4) = if v4 { (26, 34) } else { (22, 54) };
    assert!(sctp::verify(&frame[l4..]), "CRC32c");
    let address = |at: usize| -> IpAddr {
        if v4 {
            <[u8; 4]>::try_from(&frame[at..at + 4]).unwrap().into()
        } else {
            <[u8; 16]>::try_from(&frame[at..at + 16]).unwrap().into()
        }
    };
    let port = |at: usize| u16::from_be_bytes([frame[at], frame[at + 1]]);
    let size = if v4 { 4 } else { 16 };
    ((address(addresses), port(l4)).into(), (address(addresses + size), port(l4 + 2)).into())
}

const ENDS: [(&str, &str, &str); 2] = [
    ("10.244.1.5:4000", "198.51.100.10:2905", "192.0.2.10"),
    ("[fd00:244:1::5]:4000", "[2001:db8:51::10]:2905", "2001:db8::10"),
];

/// An open association; the port that it left with.
fn open(gateway: &mut Gateway, pod: SocketAddr, far: SocketAddr) -> SocketAddr {
    let sent = gateway.arrives(0, INSIDE, &wanting(0x11, pod, far, 0, INIT));
    let (vip, to) = seen(&sent[0].1);
    assert_eq!(to, far);
    let back = gateway.arrives(0, OUTSIDE, &wanting(0x22, far, vip, 0x11, INIT_ACK));
    assert_eq!(seen(&back[0].1), (far, pod));
    assert_eq!(gateway.arrives(0, INSIDE, &packet(pod, far, 0x22, COOKIE_ECHO)).len(), 1);
    vip
}

#[test]
fn an_association_opens_and_lives_like_a_connection() {
    for (pod, far, vip) in ENDS {
        let mut gateway = Gateway::new(&Setup::default());
        assert!(gateway.arrives(0, INSIDE, &packet(at(pod), at(far), 0x22, DATA)).is_empty());
        assert_eq!(gateway.drops().get(&DropReason::NoSession), Some(&1), "only INIT opens");
        let left = open(&mut gateway, at(pod), at(far));
        assert_eq!(left.ip(), ip(vip));
        gateway.pass(20_000);
        assert_eq!(gateway.sessions(), 1, "established: 30 seconds here");
        assert_eq!(gateway.arrives(0, OUTSIDE, &packet(at(far), left, 0x11, DATA)).len(), 1);
        gateway.assert_delta("egress 2, reply 2, drop no_session 1, created 1");
    }
}

/// A packet in two IP fragments, the first one of 24 bytes.
fn in_fragments(frame: &[u8]) -> [Vec<u8>; 2] {
    let v4 = frame[12] == 8;
    let (header, body) = frame.split_at(if v4 { 34 } else { 54 });
    [(&body[..24], true, 0), (&body[24..], false, 24_u16)].map(|(piece, more, offset)| {
        let mut fragment = header.to_vec();
        if v4 {
            fragment[16..18].copy_from_slice(&(20 + piece.len() as u16).to_be_bytes());
            fragment[18..20].copy_from_slice(&77_u16.to_be_bytes());
            fragment[20..22].copy_from_slice(&(u16::from(more) << 13 | (offset / 8)).to_be_bytes());
            fragment.extend(piece);
            seal_header(&mut fragment);
        } else {
            fragment[18..20].copy_from_slice(&(8 + piece.len() as u16).to_be_bytes());
            fragment[20] = 44;
            fragment.extend([132, 0]);
            fragment.extend((offset | u16::from(more)).to_be_bytes());
            fragment.extend(77_u32.to_be_bytes());
            fragment.extend(piece);
        }
        fragment
    })
}

/// Nobody knows from its first fragment by how much its checksum changes.
#[test]
fn no_fragment_leaves_with_a_wrong_checksum() {
    for (pod, far, _) in ENDS {
        for order in [[0, 1], [1, 0]] {
            let mut gateway = Gateway::new(&Setup::default());
            let left = open(&mut gateway, at(pod), at(far));
            for (interface, whole) in
                [(INSIDE, packet(at(pod), at(far), 0x22, DATA)), (OUTSIDE, packet(at(far), left, 0x11, DATA))]
            {
                let fragments = in_fragments(&whole);
                for at in order {
                    assert!(gateway.arrives(0, interface, &fragments[at]).is_empty());
                }
            }
            gateway.assert_delta("egress 2, reply 1, drop fragment 4, created 1");
        }
    }
}

#[test]
fn an_abort_counts_only_with_the_right_tag() {
    let (pod, far, _) = ENDS[0];
    let mut gateway = Gateway::new(&Setup::default());
    let left = open(&mut gateway, at(pod), at(far));
    gateway.arrives(0, OUTSIDE, &packet(at(far), left, 0xbad, ABORT));
    gateway.pass(10_000);
    assert_eq!(gateway.sessions(), 1, "a guess ends nothing");
    gateway.arrives(0, OUTSIDE, &packet(at(far), left, 0x11, ABORT));
    gateway.pass(5_000);
    assert_eq!(gateway.sessions(), 0, "closing: 4 seconds here");
    gateway.assert_delta("egress 2, reply 3, ended reset 1, created 1, out of window 1");
}

/// A host answers an INIT that it refuses with the tag that this brought, and keeps its association (RFC 9260 section 5.2.2).
#[test]
fn an_abort_that_answers_somebody_elses_init_ends_nothing() {
    for (pod, far, _) in ENDS {
        let (pod, far) = (at(pod), at(far));
        let mut gateway = Gateway::new(&Setup::default());
        let left = open(&mut gateway, pod, far);
        gateway.arrives(0, OUTSIDE, &wanting(0xbad, far, left, 0, INIT));
        gateway.arrives(0, INSIDE, &packet(pod, far, 0xbad, ABORT));
        gateway.arrives(0, INSIDE, &packet(pod, far, 0x22, DATA));
        gateway.pass(10_000);
        assert_eq!(gateway.sessions(), 1, "open: 30 seconds here");
        gateway.arrives(0, INSIDE, &packet(pod, far, 0x22, ABORT));
        gateway.pass(5_000);
        assert_eq!(gateway.sessions(), 0, "closing: 4 seconds here");
        gateway.assert_delta("egress 5, reply 2, ended reset 1, created 1, out of window 2");
    }
}

#[test]
fn two_inits_of_somebody_else_do_not_open_a_clients_association_anew() {
    use crate::support::services::{CLIENTS, VIPS, both_pods, service};
    let mut gateway = Gateway::with_service(&Setup::default(), &service(&both_pods()));
    for (client, vip) in CLIENTS.iter().zip(VIPS) {
        let (client, vip) = (at(client), SocketAddr::from((ip(vip), 3868)));
        let sent = gateway.arrives(0, OUTSIDE, &wanting(7, client, vip, 0, INIT));
        let backend = seen(&sent[0].1).1;
        gateway.arrives(0, INSIDE, &wanting(9, backend, client, 7, INIT_ACK));
        gateway.arrives(0, OUTSIDE, &packet(client, vip, 9, COOKIE_ECHO));
        for brought in [0xbad, 0xbee] {
            gateway.arrives(0, OUTSIDE, &wanting(brought, client, vip, 0, INIT));
            gateway.arrives(0, INSIDE, &packet(backend, client, brought, ABORT));
        }
        assert_eq!(gateway.arrives(0, OUTSIDE, &packet(client, vip, 9, DATA)).len(), 1);
        assert_eq!(gateway.arrives(0, INSIDE, &packet(backend, client, 7, DATA)).len(), 1);
    }
    gateway.pass(10_000);
    assert_eq!(gateway.sessions(), 2, "open: 30 seconds here");
    gateway.assert_delta("inbound 10, service_reply 8, created 2, out of window 8");
}

#[test]
fn both_may_open_at_once() {
    for (pod, far, _) in ENDS {
        let (pod, far) = (at(pod), at(far));
        let mut gateway = Gateway::new(&Setup::default());
        let sent = gateway.arrives(0, INSIDE, &wanting(0x11, pod, far, 0, INIT));
        let left = seen(&sent[0].1).0;
        gateway.arrives(0, OUTSIDE, &wanting(0x22, far, left, 0, INIT));
        gateway.arrives(0, INSIDE, &wanting(0x11, pod, far, 0x22, INIT_ACK));
        gateway.arrives(0, OUTSIDE, &wanting(0x22, far, left, 0x11, INIT_ACK));
        gateway.arrives(0, INSIDE, &packet(pod, far, 0x22, COOKIE_ECHO));
        gateway.pass(10_000);
        assert_eq!(gateway.sessions(), 1, "open: 30 seconds here");
        gateway.assert_delta("egress 3, reply 2, created 1");
    }
}

/// Where replies don't pass here, or their first one is lost, what the pod sends keeps its association alive.
#[test]
fn an_association_is_known_by_the_pods_first_tag_if_nobody_says_which_it_is() {
    for (pod, far, _) in ENDS {
        let (pod, far) = (at(pod), at(far));
        let mut gateway = Gateway::new(&Setup::default());
        gateway.arrives(0, INSIDE, &wanting(0x11, pod, far, 0, INIT));
        for chunk in [COOKIE_ECHO, DATA, DATA, DATA] {
            assert_eq!(gateway.arrives(0, INSIDE, &packet(pod, far, 0x22, chunk)).len(), 1);
            gateway.pass(3_000);
        }
        assert_eq!(gateway.sessions(), 1, "opening: 4 seconds here, and nobody is confirmed");
        gateway.pass(2_000);
        assert_eq!(gateway.sessions(), 0);
        gateway.assert_delta("egress 5, ended unanswered 1, created 1");
    }
}

/// A handshake via the first gateway, after which packets to the pod and to the remote have these tags; where the remote sees the pod.
fn associate(cluster: &mut Cluster, pod: SocketAddr, far: SocketAddr, [pods, fars]: [u32; 2]) -> SocketAddr {
    let sent = cluster.arrives(0, INSIDE, &wanting(pods, pod, far, 0, INIT));
    let left = seen(&only(sent, 0, OUTSIDE, cluster)).0;
    let back = cluster.arrives(0, OUTSIDE, &wanting(fars, far, left, pods, INIT_ACK));
    only(back, 0, INSIDE, cluster);
    let sent = cluster.arrives(0, INSIDE, &packet(pod, far, fars, COOKIE_ECHO));
    only(sent, 0, OUTSIDE, cluster);
    left
}

#[test]
fn an_association_that_restarted_goes_on_at_another_gateway_with_its_new_tags() {
    for (pod, far, _) in ENDS {
        let (pod, far) = (at(pod), at(far));
        let mut cluster = three();
        let left = associate(&mut cluster, pod, far, [0x11, 0x22]);
        cluster.pass(200);
        assert_eq!(cluster.copies(1), 1);
        assert_eq!(associate(&mut cluster, pod, far, [0x33, 0x44]), left);
        cluster.pass(200);
        cluster.kill(0);
        let sent = cluster.arrives(1, INSIDE, &packet(pod, far, 0x44, DATA));
        assert_eq!(seen(&only(sent, 1, OUTSIDE, &cluster)), (left, far));
        let back = cluster.arrives(1, OUTSIDE, &packet(far, left, 0x33, DATA));
        assert_eq!(seen(&only(back, 1, INSIDE, &cluster)), (far, pod));
        cluster.assert_delta(&["egress 4, reply 2, created 1, out of window 2", "egress 1, reply 1, taken over 1", ""]);
    }
}

#[test]
fn a_shutdown_closes_and_an_init_opens_anew() {
    let (pod, far, _) = ENDS[0];
    let mut gateway = Gateway::new(&Setup::default());
    let left = open(&mut gateway, at(pod), at(far));
    gateway.arrives(0, OUTSIDE, &packet(at(far), left, 0x11, SHUTDOWN_ACK));
    gateway.arrives(0, INSIDE, &packet(at(pod), at(far), 0x22, SHUTDOWN_COMPLETE));
    assert_eq!(open(&mut gateway, at(pod), at(far)), left, "the same port");
    gateway.pass(20_000);
    assert_eq!(gateway.sessions(), 1);
    gateway.arrives(0, OUTSIDE, &packet(at(far), left, 0x11, SHUTDOWN_ACK));
    gateway.arrives(0, INSIDE, &packet(at(pod), at(far), 0x22, SHUTDOWN_COMPLETE));
    gateway.pass(5_000);
    assert_eq!(gateway.sessions(), 0);
    gateway.assert_delta("egress 6, reply 4, ended closed 1, created 1");
}

#[test]
fn a_client_associates_with_a_service_and_a_backend_answers_as_the_vip() {
    use crate::support::services::{CLIENTS, VIPS, both_pods, service};
    for workers in [1, 2] {
        let setup = Setup { workers, ..Setup::default() };
        let mut gateway = Gateway::with_service(&setup, &service(&both_pods()));
        for (client, vip) in CLIENTS.iter().zip(VIPS) {
            let (client, vip) = (at(client), SocketAddr::from((ip(vip), 3868)));
            assert!(gateway.arrives(0, OUTSIDE, &packet(client, vip, 7, DATA)).is_empty(), "only INIT opens");
            let sent = gateway.arrives(0, OUTSIDE, &wanting(7, client, vip, 0, INIT));
            let (source, backend) = seen(&sent[0].1);
            assert_eq!((sent[0].0, source, backend.port()), (INSIDE, client, 3868));
            let answers = [
                (backend, client, 7, INIT_ACK, INSIDE, vip, client),
                (client, vip, 9, COOKIE_ECHO, OUTSIDE, client, backend),
            ];
            for (from, to, tag, chunk, interface, left, reached) in answers {
                let sent = gateway.arrives(usize::from(workers) - 1, interface, &wanting(9, from, to, tag, chunk));
                assert_eq!(seen(&sent[0].1), (left, reached), "{:?}", gateway.drops());
            }
        }
        assert_eq!(gateway.sessions(), 2);
        gateway.pass(10_000);
        assert_eq!(gateway.sessions(), 2, "both have said that they hear each other");
        let handed_over = ["", ", handed over 4"][usize::from(workers) - 1];
        gateway.assert_delta(&format!("inbound 4, service_reply 2, drop no_session 2, created 2{handed_over}"));
    }
}

/// Its first packet here is data, as where it began by way of another network.
#[test]
fn an_association_that_was_open_before_lives_as_long_as_its_sides_talk() {
    for (pod, far, _) in ENDS {
        let (pod, far) = (at(pod), at(far));
        let mut gateway = Gateway::new(&Setup { require_syn: false, ..Setup::default() });
        let sent = gateway.arrives(0, INSIDE, &packet(pod, far, 0x22, DATA));
        let left = seen(&sent[0].1).0;
        for _ in 0..3 {
            gateway.pass(3_000);
            gateway.arrives(0, OUTSIDE, &packet(far, left, 0x11, DATA));
        }
        gateway.arrives(0, OUTSIDE, &packet(far, left, 0xbad, ABORT));
        assert_eq!(gateway.sessions(), 1);
        gateway.assert_delta("egress 1, reply 4, created 1, out of window 1");
    }
}
