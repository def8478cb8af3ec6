//! Fuzz target of packet sequences: egress packets and replies, client packets and backends' replies, corrupted and
//! truncated packets, elapsed time, policy updates. Uncorrupted packets are sent with valid checksums (checked for
//! each), replies reach the pod that sent the request, no pod address leaks, and finally all sessions expire.
#![no_main]

use std::net::SocketAddr;

use libfuzzer_sys::fuzz_target;
use vipgate_dataplane::ports::PortRange;
use vipgate_fuzz::{gateway, inject, policy, policy_without};
use vipgate_testkit::services::{VIPS, client};
use vipgate_testkit::{INSIDE, OUTSIDE, Protocol, Setup, at, ends, ip, packet, reply_to, tcp};

const PODS: [&str; 4] = ["10.244.1.5", "10.244.1.6", "10.244.1.21", "fd00:244:1::5"];
const REMOTES: [&str; 4] = ["198.51.100.10:53", "198.51.100.11:443", "192.0.2.11:20000", "[2001:db8:51::10]:443"];
const FLAGS: [&str; 8] = ["S", "SA", "A", "PA", "FA", "R", "RA", "SF"];

/// Whether these bits of a step choose a lone SYN, the first of [`FLAGS`].
fn is_syn(step: u8) -> bool {
    usize::from(step >> 3).is_multiple_of(FLAGS.len())
}

fuzz_target!(|data: &[u8]| {
    let range = PortRange::new(20_000, 20_127).expect("a range");
    let mut gateway = gateway(&Setup { workers: 2, capacity: 128, frames: 128, range, ..Setup::default() });
    // Packets sent to remotes, with the pod that sent them.
    let mut egress: Vec<(Protocol, SocketAddr, Vec<u8>)> = Vec::new();
    // Clients' packets forwarded to backends.
    let mut inbound: Vec<(Protocol, Vec<u8>)> = Vec::new();
    for step in data.chunks_exact(4).take(200) {
        let [action, a, b, c] = [step[0], step[1], step[2], step[3]];
        let worker = usize::from(c & 1);
        let protocol = [Protocol::Tcp, Protocol::Udp, Protocol::Echo][usize::from(a) % 3];
        let pod: SocketAddr = (ip(PODS[usize::from(a >> 2) % 4]), 1000 + u16::from(a >> 4)).into();
        let remote = at(REMOTES[usize::from(b) % 4]);
        gateway.hostile = false;
        match action % 10 {
            0 | 1 if pod.is_ipv4() == remote.is_ipv4() => {
                let bytes = match protocol {
                    Protocol::Tcp => tcp(pod, remote, FLAGS[usize::from(b >> 3) % 8], u32::from(c) * 100, 7),
                    _ => packet(protocol, pod, remote),
                };
                for (interface, frame) in inject(&mut gateway, worker, true, &bytes) {
                    let is_recorded = interface == OUTSIDE && egress.len() < 64;
                    if is_recorded && (protocol != Protocol::Tcp || is_syn(b)) && ends(&frame).1 == remote {
                        egress.push((protocol, pod, frame));
                    }
                }
            }
            2 if !egress.is_empty() => {
                let (protocol, pod, frame) = &egress[usize::from(b) % egress.len()];
                for (interface, reply) in inject(&mut gateway, worker, false, &reply_to(frame, *protocol)) {
                    // The owner of the port: the sender of the request, or another pod after the quarantine.
                    let to = ends(&reply).1.ip();
                    assert!(
                        interface == INSIDE && PODS.iter().any(|pod| ip(pod) == to),
                        "reply for {pod} sent to {to}"
                    );
                }
            }
            3 if !egress.is_empty() => {
                // A corrupted or truncated reply.
                gateway.hostile = true;
                let (protocol, _, frame) = &egress[usize::from(b) % egress.len()];
                let mut bytes = reply_to(frame, *protocol);
                let offset = usize::from(a) % bytes.len();
                if c & 2 == 0 {
                    bytes[offset] ^= c | 1;
                } else {
                    bytes.truncate(offset);
                }
                inject(&mut gateway, worker, c & 4 == 0, &bytes);
            }
            4 => gateway.advance(u32::from(a) * 20),
            5 => gateway.set_policy(&policy()),
            6 => gateway.set_policy(&policy_without(a.into())),
            7 if protocol != Protocol::Echo => {
                let vip = |port: u16| SocketAddr::from((ip(VIPS[0]), port));
                let from = client(1000 + u16::from(a >> 2));
                let bytes = match protocol {
                    Protocol::Tcp => {
                        let flags = FLAGS[usize::from(b >> 3) % 8];
                        tcp(from, vip([80, 30_000][usize::from(b) % 2]), flags, u32::from(c) * 100, 7)
                    }
                    _ => packet(protocol, from, vip(53)),
                };
                for (interface, frame) in inject(&mut gateway, worker, false, &bytes) {
                    if interface == INSIDE && inbound.len() < 64 {
                        assert_eq!(ends(&frame).0.ip(), from.ip(), "the client's address is preserved");
                        inbound.push((protocol, frame));
                    }
                }
            }
            8 if !inbound.is_empty() => {
                let (protocol, frame) = &inbound[usize::from(b) % inbound.len()];
                let to = ends(frame).0;
                for (interface, reply) in inject(&mut gateway, worker, true, &reply_to(frame, *protocol)) {
                    let (source, client) = ends(&reply);
                    let is_valid_source = source.ip() == ip(VIPS[0]) || source.ip() == ip("10.244.1.7");
                    assert!(
                        interface == OUTSIDE && is_valid_source && client.ip() == to.ip(),
                        "reply from {source} to {client}"
                    );
                }
            }
            _ => {
                gateway.hostile = true;
                inject(&mut gateway, worker, a & 1 == 0, step);
            }
        }
    }
    gateway.advance(40_000);
    assert_eq!(gateway.sessions(), 0, "all sessions expire");
    gateway.check_frames();
});
