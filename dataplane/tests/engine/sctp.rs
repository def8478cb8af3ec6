//! SCTP associations: opened by INIT only, forwarded with a valid CRC32c, closed and aborted only with a valid
//! verification tag.

use std::net::SocketAddr;

use etherparse::IpNumber;
use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::replication::queue::FirstRecord;
use vipgate_dataplane::wire::sctp;
use vipgate_testkit::cluster::{Cluster, three_gateways};
use vipgate_testkit::*;

pub(crate) const INIT: u8 = 1;
pub(crate) const INIT_ACK: u8 = 2;
const DATA: u8 = 0;
const SACK: u8 = 3;
const ABORT: u8 = 6;
const ERROR: u8 = 9;
const COOKIE_ECHO: u8 = 10;
const SHUTDOWN_ACK: u8 = 8;
const SHUTDOWN_COMPLETE: u8 = 14;

pub(crate) fn packet(source: SocketAddr, destination: SocketAddr, tag: u32, chunk: u8) -> Vec<u8> {
    handshake_packet(0x0707_0707, source, destination, tag, chunk)
}

/// A packet with a chunk that carries this initiate tag, if it is an INIT or INIT ACK.
fn handshake_packet(initiate_tag: u32, source: SocketAddr, destination: SocketAddr, tag: u32, chunk: u8) -> Vec<u8> {
    let mut bytes = vec![chunk, 0, 0, 20];
    bytes.extend(initiate_tag.to_be_bytes());
    bytes.extend([7; 12]);
    packet_of(&bytes, source, destination, tag)
}

/// A packet with these chunks, padding included.
fn packet_of(chunks: &[u8], source: SocketAddr, destination: SocketAddr, tag: u32) -> Vec<u8> {
    let mut body = Vec::new();
    body.extend(source.port().to_be_bytes());
    body.extend(destination.port().to_be_bytes());
    body.extend(tag.to_be_bytes());
    body.extend([0; 4]);
    body.extend(chunks);
    let crc = crc32c(&body);
    body[8..12].copy_from_slice(&crc.to_le_bytes());
    let mut frame = Vec::new();
    on_ip(source, destination).write(&mut frame, IpNumber::SCTP, &body).unwrap();
    frame
}

/// Bitwise, as in RFC 9260 appendix A.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 })
    })
}

/// Both ends of a packet that was sent with a valid checksum.
fn translated_ends(frame: &[u8]) -> (SocketAddr, SocketAddr) {
    assert!(sctp::verify(&frame[if frame[12] == 8 { 34 } else { 54 }..]), "CRC32c");
    ends(frame)
}

const ENDS: [(&str, &str, &str); 2] = [
    ("10.244.1.5:4000", "198.51.100.10:2905", "192.0.2.10"),
    ("[fd00:244:1::5]:4000", "[2001:db8:51::10]:2905", "2001:db8::10"),
];

/// Opens an association; returns the pod's external address and port.
fn open(gateway: &mut Gateway, pod: SocketAddr, remote: SocketAddr) -> SocketAddr {
    let sent = gateway.receive(0, INSIDE, &handshake_packet(0x11, pod, remote, 0, INIT));
    let (vip, to) = translated_ends(&sent[0].1);
    assert_eq!(to, remote);
    let reply = gateway.receive(0, OUTSIDE, &handshake_packet(0x22, remote, vip, 0x11, INIT_ACK));
    assert_eq!(translated_ends(&reply[0].1), (remote, pod));
    assert_eq!(gateway.receive(0, INSIDE, &packet(pod, remote, 0x22, COOKIE_ECHO)).len(), 1);
    vip
}

#[test]
fn an_association_can_be_replicated_with_its_init_ack() {
    let (pod, remote) = (at(ENDS[0].0), at(ENDS[0].1));
    let mut cluster = Cluster::new(3, &Setup { first_record: FirstRecord::WithReply, ..Setup::default() });
    let sender = cluster.gateways[0].replication_senders[0].clone();
    let sent = cluster.receive(0, INSIDE, &handshake_packet(0x11, pod, remote, 0, INIT));
    let (vip, _) = translated_ends(&sent[0].2);
    // A blind packet from outside is no answer.
    cluster.receive(0, OUTSIDE, &packet(remote, vip, 0x77, DATA));
    assert!(sender.pop().is_none());
    cluster.receive(0, OUTSIDE, &handshake_packet(0x22, remote, vip, 0x11, INIT_ACK));
    assert!(sender.pop().is_some() && sender.pop().is_none());
    cluster.skip_counter_check();
}

#[test]
fn an_association_is_opened_by_init_and_established() {
    for (pod, remote, vip) in ENDS {
        let mut gateway = Gateway::new(&Setup::default());
        assert!(gateway.receive(0, INSIDE, &packet(at(pod), at(remote), 0x22, DATA)).is_empty());
        assert_eq!(gateway.drops().get(&DropReason::NoSession), Some(&1), "only INIT opens");
        let external = open(&mut gateway, at(pod), at(remote));
        assert_eq!(external.ip(), ip(vip));
        gateway.advance(20_000);
        assert_eq!(gateway.sessions(), 1, "established: 30 seconds here");
        assert_eq!(gateway.receive(0, OUTSIDE, &packet(at(remote), external, 0x11, DATA)).len(), 1);
        gateway.assert_delta("egress 2, reply 2, drop no_session 1, created 1");
    }
}

/// The change of the checksum can't be computed from the first fragment alone.
#[test]
fn sctp_fragments_are_dropped() {
    for (pod, remote, _) in ENDS {
        for order in [[0, 1], [1, 0]] {
            let mut gateway = Gateway::new(&Setup::default());
            let external = open(&mut gateway, at(pod), at(remote));
            for (interface, frame) in
                [(INSIDE, packet(at(pod), at(remote), 0x22, DATA)), (OUTSIDE, packet(at(remote), external, 0x11, DATA))]
            {
                let fragments = ip_fragments(&frame, 24, 77);
                for at in order {
                    assert!(gateway.receive(0, interface, &fragments[at]).is_empty());
                }
            }
            gateway.assert_delta("egress 2, reply 1, drop fragment 4, created 1");
        }
    }
}

#[test]
fn an_abort_requires_a_valid_verification_tag() {
    let (pod, remote, _) = ENDS[0];
    let mut gateway = Gateway::new(&Setup::default());
    let external = open(&mut gateway, at(pod), at(remote));
    gateway.receive(0, OUTSIDE, &packet(at(remote), external, 0xbad, ABORT));
    gateway.advance(10_000);
    assert_eq!(gateway.sessions(), 1, "a guessed tag doesn't end the association");
    gateway.receive(0, OUTSIDE, &packet(at(remote), external, 0x11, ABORT));
    gateway.advance(5_000);
    assert_eq!(gateway.sessions(), 0, "closing: 4 seconds here");
    gateway.assert_delta("egress 2, reply 3, ended reset 1, created 1, out of window 1");
}

/// A SACK, or the error that it reports, may precede what ends an association (RFC 9260 section 6.10).
#[test]
fn a_bundled_abort_or_shutdown_ends_an_association_under_a_valid_verification_tag() {
    const SACKED: [u8; 16] = [SACK, 0, 0, 16, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0];
    // The cause is five bytes long and padded to eight.
    const FAILED: [u8; 12] = [ERROR, 0, 0, 9, 0, 10, 0, 5, 0, 0, 0, 0];
    let bundled = |closing: u8| [&SACKED[..], &FAILED, &[closing, 0, 0, 4]].concat();
    for (pod, remote, _) in ENDS {
        let (pod, remote) = (at(pod), at(remote));
        let mut gateway = Gateway::new(&Setup::default());
        let external = open(&mut gateway, pod, remote);
        let truncated = [&SACKED[..], &[ABORT, 0, 0, 8]].concat();
        let after_init = [&SACKED[..], &[INIT, 0, 0, 4], &[ABORT, 0, 0, 4]].concat();
        for (chunks, tag) in [(bundled(ABORT), 0xbad), (truncated, 0x11), (after_init, 0x11)] {
            assert_eq!(gateway.receive(0, OUTSIDE, &packet_of(&chunks, remote, external, tag)).len(), 1);
            gateway.advance(10_000);
            assert_eq!(gateway.sessions(), 1, "open: 30 seconds here");
        }
        gateway.receive(0, OUTSIDE, &packet_of(&bundled(ABORT), remote, external, 0x11));
        gateway.advance(5_000);
        assert_eq!(gateway.sessions(), 0, "closing: 4 seconds here");
        gateway.assert_delta("egress 2, reply 5, ended reset 1, created 1, out of window 1");

        gateway.advance(3_000);
        let external = open(&mut gateway, pod, remote);
        gateway.receive(0, OUTSIDE, &packet_of(&bundled(SHUTDOWN_ACK), remote, external, 0x11));
        gateway.receive(0, INSIDE, &packet_of(&bundled(SHUTDOWN_ACK), pod, remote, 0x22));
        gateway.advance(5_000);
        assert_eq!(gateway.sessions(), 0, "closed: 4 seconds here");
        gateway.assert_delta("egress 3, reply 2, ended closed 1, created 1");
    }
}

#[test]
fn an_init_among_other_chunks_opens_no_association() {
    for (pod, remote, _) in ENDS {
        let mut gateway = Gateway::new(&Setup::default());
        let mut init = vec![INIT, 0, 0, 20, 0, 0, 0, 0x11];
        init.extend([7; 12]);
        init.extend([SACK, 0, 0, 4]);
        assert_eq!(gateway.receive(0, INSIDE, &packet_of(&init, at(pod), at(remote), 0)), vec![]);
        gateway.assert_delta("drop no_session 1");
    }
}

/// A host that rejects an INIT aborts with the INIT's initiate tag, and keeps its association (RFC 9260 section 5.2.2).
#[test]
fn an_abort_in_reply_to_a_spoofed_init_does_not_end_the_association() {
    for (pod, remote, _) in ENDS {
        let (pod, remote) = (at(pod), at(remote));
        let mut gateway = Gateway::new(&Setup::default());
        let external = open(&mut gateway, pod, remote);
        gateway.receive(0, OUTSIDE, &handshake_packet(0xbad, remote, external, 0, INIT));
        gateway.receive(0, INSIDE, &packet(pod, remote, 0xbad, ABORT));
        gateway.receive(0, INSIDE, &packet(pod, remote, 0x22, DATA));
        gateway.advance(10_000);
        assert_eq!(gateway.sessions(), 1, "open: 30 seconds here");
        gateway.receive(0, INSIDE, &packet(pod, remote, 0x22, ABORT));
        gateway.advance(5_000);
        assert_eq!(gateway.sessions(), 0, "closing: 4 seconds here");
        gateway.assert_delta("egress 5, reply 2, ended reset 1, created 1, out of window 2");
    }
}

#[test]
fn spoofed_inits_do_not_reopen_a_clients_association() {
    use vipgate_testkit::services::{CLIENTS, VIPS, both_pods, service};
    let mut gateway = Gateway::with_service(&Setup::default(), &service(&both_pods()));
    for (client, vip) in CLIENTS.iter().zip(VIPS) {
        let (client, vip) = (at(client), SocketAddr::from((ip(vip), 3868)));
        let sent = gateway.receive(0, OUTSIDE, &handshake_packet(7, client, vip, 0, INIT));
        let backend = translated_ends(&sent[0].1).1;
        gateway.receive(0, INSIDE, &handshake_packet(9, backend, client, 7, INIT_ACK));
        gateway.receive(0, OUTSIDE, &packet(client, vip, 9, COOKIE_ECHO));
        for spoofed_tag in [0xbad, 0xbee] {
            gateway.receive(0, OUTSIDE, &handshake_packet(spoofed_tag, client, vip, 0, INIT));
            gateway.receive(0, INSIDE, &packet(backend, client, spoofed_tag, ABORT));
        }
        assert_eq!(gateway.receive(0, OUTSIDE, &packet(client, vip, 9, DATA)).len(), 1);
        assert_eq!(gateway.receive(0, INSIDE, &packet(backend, client, 7, DATA)).len(), 1);
    }
    gateway.advance(10_000);
    assert_eq!(gateway.sessions(), 2, "open: 30 seconds here");
    gateway.assert_delta("inbound 10, service_reply 8, created 2, out of window 8");
}

#[test]
fn simultaneous_inits_open_an_association() {
    for (pod, remote, _) in ENDS {
        let (pod, remote) = (at(pod), at(remote));
        let mut gateway = Gateway::new(&Setup::default());
        let sent = gateway.receive(0, INSIDE, &handshake_packet(0x11, pod, remote, 0, INIT));
        let external = translated_ends(&sent[0].1).0;
        gateway.receive(0, OUTSIDE, &handshake_packet(0x22, remote, external, 0, INIT));
        gateway.receive(0, INSIDE, &handshake_packet(0x11, pod, remote, 0x22, INIT_ACK));
        gateway.receive(0, OUTSIDE, &handshake_packet(0x22, remote, external, 0x11, INIT_ACK));
        gateway.receive(0, INSIDE, &packet(pod, remote, 0x22, COOKIE_ECHO));
        gateway.advance(10_000);
        assert_eq!(gateway.sessions(), 1, "open: 30 seconds here");
        gateway.assert_delta("egress 3, reply 2, created 1");
    }
}

/// If replies take another path, or the INIT ACK is lost, the pod's packets keep the association alive.
#[test]
fn an_association_without_init_ack_is_tracked_by_the_pods_tag() {
    for (pod, remote, _) in ENDS {
        let (pod, remote) = (at(pod), at(remote));
        let mut gateway = Gateway::new(&Setup::default());
        gateway.receive(0, INSIDE, &handshake_packet(0x11, pod, remote, 0, INIT));
        for chunk in [COOKIE_ECHO, DATA, DATA, DATA] {
            assert_eq!(gateway.receive(0, INSIDE, &packet(pod, remote, 0x22, chunk)).len(), 1);
            gateway.advance(3_000);
        }
        assert_eq!(gateway.sessions(), 1, "opening: 4 seconds here, not confirmed");
        gateway.advance(2_000);
        assert_eq!(gateway.sessions(), 0);
        gateway.assert_delta("egress 5, ended unanswered 1, created 1");
    }
}

/// A handshake via the first gateway with these verification tags of the pod and of the remote; returns the pod's
/// external address and port.
fn associate(
    cluster: &mut Cluster,
    pod: SocketAddr,
    remote: SocketAddr,
    [pod_tag, remote_tag]: [u32; 2],
) -> SocketAddr {
    let external = translated_ends(&cluster.pod_sends(0, 0, &handshake_packet(pod_tag, pod, remote, 0, INIT))).0;
    cluster.remote_sends(0, 0, &handshake_packet(remote_tag, remote, external, pod_tag, INIT_ACK));
    cluster.pod_sends(0, 0, &packet(pod, remote, remote_tag, COOKIE_ECHO));
    external
}

#[test]
fn a_restarted_association_fails_over_with_its_new_tags() {
    for (pod, remote, _) in ENDS {
        let (pod, remote) = (at(pod), at(remote));
        let mut cluster = three_gateways();
        let external = associate(&mut cluster, pod, remote, [0x11, 0x22]);
        cluster.advance(200);
        assert_eq!(cluster.standby_sessions(1), 1);
        assert_eq!(associate(&mut cluster, pod, remote, [0x33, 0x44]), external);
        cluster.advance(200);
        cluster.kill(0);
        assert_eq!(translated_ends(&cluster.pod_sends(1, 1, &packet(pod, remote, 0x44, DATA))), (external, remote));
        assert_eq!(translated_ends(&cluster.remote_sends(1, 1, &packet(remote, external, 0x33, DATA))), (remote, pod));
        cluster.assert_delta(&[
            "egress 4, reply 2, created 1, out of window 2",
            "egress 1, reply 1, failed over 1",
            "",
        ]);
    }
}

#[test]
fn a_shutdown_closes_and_an_init_reopens() {
    let (pod, remote, _) = ENDS[0];
    let mut gateway = Gateway::new(&Setup::default());
    let external = open(&mut gateway, at(pod), at(remote));
    gateway.receive(0, OUTSIDE, &packet(at(remote), external, 0x11, SHUTDOWN_ACK));
    gateway.receive(0, INSIDE, &packet(at(pod), at(remote), 0x22, SHUTDOWN_COMPLETE));
    assert_eq!(open(&mut gateway, at(pod), at(remote)), external, "the same port");
    gateway.advance(20_000);
    assert_eq!(gateway.sessions(), 1);
    gateway.receive(0, OUTSIDE, &packet(at(remote), external, 0x11, SHUTDOWN_ACK));
    gateway.receive(0, INSIDE, &packet(at(pod), at(remote), 0x22, SHUTDOWN_COMPLETE));
    gateway.advance(5_000);
    assert_eq!(gateway.sessions(), 0);
    gateway.assert_delta("egress 6, reply 4, ended closed 1, created 1");
}

#[test]
fn sctp_associations_to_a_service_are_translated() {
    use vipgate_testkit::services::{CLIENTS, VIPS, both_pods, service};
    for workers in [1, 2] {
        let setup = Setup { workers, ..Setup::default() };
        let mut gateway = Gateway::with_service(&setup, &service(&both_pods()));
        for (client, vip) in CLIENTS.iter().zip(VIPS) {
            let (client, vip) = (at(client), SocketAddr::from((ip(vip), 3868)));
            assert!(gateway.receive(0, OUTSIDE, &packet(client, vip, 7, DATA)).is_empty(), "only INIT opens");
            let sent = gateway.receive(0, OUTSIDE, &handshake_packet(7, client, vip, 0, INIT));
            let (source, backend) = translated_ends(&sent[0].1);
            assert_eq!((sent[0].0, source, backend.port()), (INSIDE, client, 3868));
            let exchange = [
                (backend, client, 7, INIT_ACK, INSIDE, vip, client),
                (client, vip, 9, COOKIE_ECHO, OUTSIDE, client, backend),
            ];
            for (from, to, tag, chunk, interface, external, destination) in exchange {
                let sent =
                    gateway.receive(usize::from(workers) - 1, interface, &handshake_packet(9, from, to, tag, chunk));
                assert_eq!(translated_ends(&sent[0].1), (external, destination), "{:?}", gateway.drops());
            }
        }
        assert_eq!(gateway.sessions(), 2);
        gateway.advance(10_000);
        assert_eq!(gateway.sessions(), 2, "both sides have confirmed the handshake");
        let handed_off = ["", ", handed off 4"][usize::from(workers) - 1];
        gateway.assert_delta(&format!("inbound 4, service_reply 2, drop no_session 2, created 2{handed_off}"));
    }
}

/// The first packet is data, as for an association that was opened via another network.
#[test]
fn an_association_opened_elsewhere_is_kept_by_its_packets() {
    for (pod, remote, _) in ENDS {
        let (pod, remote) = (at(pod), at(remote));
        let mut gateway = Gateway::new(&Setup { require_syn: false, ..Setup::default() });
        let sent = gateway.receive(0, INSIDE, &packet(pod, remote, 0x22, DATA));
        let external = translated_ends(&sent[0].1).0;
        for _ in 0..3 {
            gateway.advance(3_000);
            gateway.receive(0, OUTSIDE, &packet(remote, external, 0x11, DATA));
        }
        gateway.receive(0, OUTSIDE, &packet(remote, external, 0xbad, ABORT));
        assert_eq!(gateway.sessions(), 1);
        gateway.assert_delta("egress 1, reply 4, created 1, out of window 1");
    }
}
