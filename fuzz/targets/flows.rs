//! Sequences of what hosts do: pods send, far sides answer, clients ask and backends answer, packets are repeated, bent, cut short, time passes, policy is published.
//! What was not bent leaves with right checksums (checked for each), answers go to the pod that asked, nothing leaks, and in
//! the end everything expires.
#![no_main]

use std::net::SocketAddr;

use libfuzzer_sys::fuzz_target;
use vipgate_dataplane::ports::PortRange;
use vipgate_fuzz::support::services::{VIPS, client};
use vipgate_fuzz::support::*;
use vipgate_fuzz::{arrives, gateway, policy, policy_without};

const PODS: [&str; 4] = ["10.244.1.5", "10.244.1.6", "10.244.1.21", "fd00:244:1::5"];
const FARS: [&str; 4] = ["198.51.100.10:53", "198.51.100.11:443", "192.0.2.11:20000", "[2001:db8:51::10]:443"];
const FLAGS: [&str; 8] = ["S", "SA", "A", "PA", "FA", "R", "RA", "SF"];

fuzz_target!(|data: &[u8]| {
    let range = PortRange::new(20_000, 20_127).expect("a range");
    let mut gateway = gateway(&Setup { workers: 2, capacity: 128, frames: 128, range, ..Setup::default() });
    let mut seen: Vec<(Protocol, SocketAddr, Vec<u8>)> = Vec::new();
    // What backends have heard from clients.
    let mut asked: Vec<(Protocol, Vec<u8>)> = Vec::new();
    for step in data.chunks_exact(4).take(200) {
        let [what, which, how, where_] = [step[0], step[1], step[2], step[3]];
        let worker = usize::from(where_ & 1);
        let protocol = [Protocol::Tcp, Protocol::Udp, Protocol::Echo][usize::from(which) % 3];
        let pod: SocketAddr = (ip(PODS[usize::from(which >> 2) % 4]), 1000 + u16::from(which >> 4)).into();
        let far = at(FARS[usize::from(how) % 4]);
        gateway.hostile = false;
        match what % 10 {
            0 | 1 if pod.is_ipv4() == far.is_ipv4() => {
                let bytes = match protocol {
                    Protocol::Tcp => tcp(pod, far, FLAGS[usize::from(how >> 3) % 8], u32::from(where_) * 100, 7),
                    _ => packet(protocol, pod, far),
                };
                for (interface, frame) in arrives(&mut gateway, worker, true, &bytes) {
                    let kept = interface == OUTSIDE && seen.len() < 64;
                    if kept && (protocol != Protocol::Tcp || how >> 3 & 7 == 0) && ends(&frame).1 == far {
                        seen.push((protocol, pod, frame));
                    }
                }
            }
            2 if !seen.is_empty() => {
                let (protocol, pod, frame) = &seen[usize::from(how) % seen.len()];
                for (interface, home) in arrives(&mut gateway, worker, false, &answer_to(frame, *protocol)) {
                    // Whoever has the port by now: the pod that asked, or another one after the port has rested.
                    let to = ends(&home).1.ip();
                    assert!(interface == INSIDE && PODS.iter().any(|pod| ip(pod) == to), "{pod} asked, {to} hears");
                }
            }
            3 if !seen.is_empty() => {
                // Bent or cut, from the side where answers come from.
                gateway.hostile = true;
                let (protocol, _, frame) = &seen[usize::from(how) % seen.len()];
                let mut bytes = answer_to(frame, *protocol);
                let place = usize::from(which) % bytes.len();
                if where_ & 2 == 0 {
                    bytes[place] ^= where_ | 1
                } else {
                    bytes.truncate(place)
                }
                arrives(&mut gateway, worker, where_ & 4 == 0, &bytes);
            }
            4 => gateway.pass(u32::from(which) * 20),
            5 => gateway.set_policy(&policy()),
            6 => gateway.set_policy(&policy_without(which.into())),
            7 if protocol != Protocol::Echo => {
                let to = |port: u16| SocketAddr::from((ip(VIPS[0]), port));
                let from = client(1000 + u16::from(which >> 2));
                let bytes = match protocol {
                    Protocol::Tcp => {
                        let flags = FLAGS[usize::from(how >> 3) % 8];
                        tcp(from, to([80, 30_000][usize::from(how) % 2]), flags, u32::from(where_) * 100, 7)
                    }
                    _ => packet(protocol, from, to(53)),
                };
                for (interface, frame) in arrives(&mut gateway, worker, false, &bytes) {
                    if interface == INSIDE && asked.len() < 64 {
                        assert_eq!(ends(&frame).0.ip(), from.ip(), "the client's own address");
                        asked.push((protocol, frame));
                    }
                }
            }
            8 if !asked.is_empty() => {
                let (protocol, frame) = &asked[usize::from(how) % asked.len()];
                let to = ends(frame).0;
                for (interface, home) in arrives(&mut gateway, worker, true, &answer_to(frame, *protocol)) {
                    let (source, client) = ends(&home);
                    let is_served = source.ip() == ip(VIPS[0]) || source.ip() == ip("10.244.1.7");
                    assert!(interface == OUTSIDE && is_served && client.ip() == to.ip(), "{source} answers {client}");
                }
            }
            _ => {
                gateway.hostile = true;
                arrives(&mut gateway, worker, which & 1 == 0, step);
            }
        }
    }
    gateway.pass(40_000);
    assert_eq!(gateway.sessions(), 0, "everything expires");
    gateway.check_frames();
});
