//! Invariants for any sequence of packets, times and queues, checked against a model of what is visible outside.

use std::collections::HashMap;
use std::net::SocketAddr;

use proptest::prelude::*;
use proptest::test_runner::{FileFailurePersistence, TestCaseResult};
use vipgate_coverage::{Coverage, property};
use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::io::memory::MemoryIo;
use vipgate_dataplane::ports::PortRange;
use vipgate_dataplane::worker::Worker;
use vipgate_testkit::*;

/// One step of a scenario.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// A pod sends a packet of a new or existing flow, received on a worker's queue.
    Pod { protocol: Protocol, pod: usize, port: u16, remote: usize, worker: usize },
    /// The remote replies to one of the packets that it has received.
    Reply { which: prop::sample::Index, worker: usize },
    /// Time passes.
    Pass(u32),
    /// The same policy is published again.
    Publish,
}

const PODS: [&str; 3] = ["10.244.1.5", "10.244.1.6", "10.244.1.21"];
const REMOTES: [&str; 3] = ["198.51.100.10:53", "198.51.100.10:443", "198.51.100.11:53"];

fn protocol() -> impl Strategy<Value = Protocol> {
    prop_oneof![Just(Protocol::Tcp), Just(Protocol::Udp), Just(Protocol::Echo)]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (protocol(), 0..PODS.len(), 1000_u16..1008, 0..REMOTES.len(), 0_usize..2)
            .prop_map(|(protocol, pod, port, remote, worker)| Step::Pod { protocol, pod, port, remote, worker }),
        4 => (any::<prop::sample::Index>(), 0_usize..2).prop_map(|(which, worker)| Step::Reply { which, worker }),
        1 => (1_u32..4_000).prop_map(Step::Pass),
        1 => Just(Step::Publish),
    ]
}

/// A flow as seen from outside: its pod, its last packet, and when that was.
struct Flow {
    pod: SocketAddr,
    last_packet: u32,
    packet: Vec<u8>,
}

/// Seeds of failures are kept in a file, and tried first.
fn config() -> ProptestConfig {
    let seeds = FileFailurePersistence::Direct("tests/engine/properties.regressions");
    ProptestConfig { cases: 200, failure_persistence: Some(Box::new(seeds)), ..ProptestConfig::default() }
}

/// A gateway, and what was seen outside.
struct Run<'a> {
    gateway: Gateway,
    /// By external tuple: protocol, and both ends.
    flows: HashMap<(u8, SocketAddr, SocketAddr), Flow>,
    now: u32,
    coverage: &'a Coverage,
}

/// The shortest timeout of a flow, milliseconds.
const MIN_TIMEOUT: u32 = 3_000;

impl Run<'_> {
    fn step(&mut self, step: Step) -> TestCaseResult {
        match step {
            Step::Pod { protocol, pod, port, remote, worker } => {
                return self.pod_sends(protocol, (ip(PODS[pod]), port).into(), at(REMOTES[remote]), worker);
            }
            Step::Reply { which, worker } => return self.remote_replies(which, worker),
            Step::Pass(ms) => {
                self.gateway.advance(ms);
                self.now += ms;
            }
            Step::Publish => {
                self.coverage.count("published");
                self.gateway.set_policy(&policy());
            }
        }
        Ok(())
    }

    fn pod_sends(
        &mut self,
        protocol: Protocol,
        source: SocketAddr,
        remote: SocketAddr,
        worker: usize,
    ) -> TestCaseResult {
        let sent = self.gateway.receive(worker, INSIDE, &packet(protocol, source, remote));
        prop_assert_eq!(sent.len(), 1, "{:?}, {:?}", sent, self.gateway.drops());
        let (interface, bytes) = &sent[0];
        self.coverage.count(format!("{protocol:?}"));
        prop_assert_eq!(*interface, OUTSIDE);
        let (vip, remote) = ends(bytes);
        prop_assert!(["192.0.2.10", "192.0.2.11"].map(ip).contains(&vip.ip()), "leaked {}", vip);
        let key = (protocol as u8, vip, remote);
        self.coverage.count(if self.flows.contains_key(&key) { "sent again" } else { "sent" });
        if let Some(existing) = self.flows.get(&key) {
            let is_live = self.now - existing.last_packet < MIN_TIMEOUT;
            prop_assert!(
                !is_live || existing.pod == source,
                "two live flows share an external tuple: {} and {}",
                existing.pod,
                source
            );
        }
        self.flows.insert(key, Flow { pod: source, last_packet: self.now, packet: bytes.clone() });
        Ok(())
    }

    fn remote_replies(&mut self, which: prop::sample::Index, worker: usize) -> TestCaseResult {
        let mut existing: Vec<_> = self.flows.iter_mut().collect();
        existing.sort_by_key(|(key, _)| **key);
        if existing.is_empty() {
            return Ok(());
        }
        let at = which.index(existing.len());
        let (key, flow) = &mut existing[at];
        let protocol = [Protocol::Tcp, Protocol::Udp, Protocol::Echo][usize::from(key.0)];
        let sent = self.gateway.receive(worker, OUTSIDE, &reply_to(&flow.packet, protocol));
        let is_live = self.now - flow.last_packet < MIN_TIMEOUT;
        self.coverage.count(match (is_live, sent.is_empty()) {
            (true, _) => "reply delivered",
            (false, false) => "late reply delivered",
            (false, true) => "late reply dropped",
        });
        prop_assert!(!is_live || sent.len() == 1, "a reply was dropped: {:?}", self.gateway.drops());
        if let Some((interface, bytes)) = sent.first() {
            prop_assert_eq!(*interface, INSIDE);
            prop_assert_eq!(ends(bytes).1, flow.pod);
            prop_assert_eq!(ends(bytes).0.ip(), key.2.ip());
            flow.last_packet = self.now;
        }
        Ok(())
    }
}

/// reverse(forward(p)) == p; no two live sessions share (protocol, VIP, port, remote, remote port); every packet sent
/// has valid checksums (checked in `run`); no frame is lost (checked in `run`).
#[test]
fn every_reply_reaches_the_pod_that_sent_the_request() {
    let classes = [
        "sent",
        "sent again",
        "reply delivered",
        "late reply delivered",
        "late reply dropped",
        "published",
        "Tcp",
        "Udp",
        "Echo",
    ];
    property(config(), &prop::collection::vec(step(), 1..120), &classes, |steps, coverage| {
        let range = PortRange::new(20_000, 20_127).unwrap();
        let mut gateway = Gateway::new(&Setup { workers: 2, range, ..Setup::default() });
        gateway.skip_counter_check();
        let mut run = Run { gateway, flows: HashMap::new(), now: 0, coverage };
        for step in steps {
            run.step(step)?;
        }
        let mut gateway = run.gateway;
        // Long after the last packet all sessions have expired, and every port is free.
        gateway.advance(60_000);
        prop_assert_eq!(gateway.sessions(), 0);
        let reallocated = (0..128_u16).filter(|n| {
            let source: SocketAddr = (ip("10.244.1.5"), 5_000 + n).into();
            gateway.receive(usize::from(n % 2), INSIDE, &packet(Protocol::Udp, source, at("203.0.113.99:53"))).len()
                == 1
        });
        prop_assert_eq!(reallocated.count(), 128, "every port of the range");
        Ok(())
    });
}

/// No frame stops a worker, and each one is accounted for: forwarded, or dropped with a reason.
#[test]
fn arbitrary_frames_are_survived_and_accounted_for() {
    let classes = [
        "sent",
        "malformed",
        "bad_checksum",
        "unknown_protocol",
        "no_service",
        "spoofed_source",
        "not_ours",
        "martian",
        "fragment",
        "ttl",
    ];
    property(config(), &prop::collection::vec(malformed_packets(), 1..80), &classes, |frames, coverage| {
        let mut gateway = Gateway::new(&Setup { workers: 2, ..Setup::default() });
        gateway.hostile = true;
        gateway.skip_counter_check();
        for (n, (interface, frame)) in frames.iter().enumerate() {
            let before = accounted(&gateway);
            let sent = gateway.receive(n % 2, *interface, frame).len() as u64;
            prop_assert!(sent > 0 || accounted(&gateway) == before + 1, "{:02x?}", frame);
            coverage.add("sent", sent);
        }
        gateway.drops().into_iter().for_each(|(reason, count)| coverage.add(reason.name(), count));
        let valid = packet(Protocol::Udp, at("10.244.1.6:4000"), at("198.51.100.10:53"));
        prop_assert_eq!(gateway.receive(0, INSIDE, &valid).len(), 1, "the next valid packet is forwarded");
        Ok(())
    });
}

/// Frames not forwarded: dropped, consumed, or buffered.
fn accounted(gateway: &Gateway) -> u64 {
    let of = |it: &Worker<MemoryIo>| it.counters().consumed.get() + u64::from(it.tables().reassembly.buffered());
    gateway.not_forwarded() + gateway.workers.iter().map(of).sum::<u64>()
}

/// Valid packets with modified bytes, truncated or from the wrong side, and random bytes.
fn malformed_packets() -> impl Strategy<Value = (InterfaceId, Vec<u8>)> {
    let valid = (protocol(), any::<bool>(), any::<bool>()).prop_map(|(protocol, v6, is_reply)| {
        let (pod, remote, vip) = if v6 {
            ("[fd00:244:1::5]:1000", "[2001:db8:51::1]:53", "[2001:db8::10]:20000")
        } else {
            ("10.244.1.5:1000", "198.51.100.10:53", "192.0.2.10:20000")
        };
        if is_reply {
            (OUTSIDE, packet(protocol, at(remote), at(vip)))
        } else {
            (INSIDE, packet(protocol, at(pod), at(remote)))
        }
    });
    let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4);
    let truncation = prop::option::weighted(0.2, any::<prop::sample::Index>());
    // Some have a valid header checksum, to get past the first checks.
    let mutated = (valid, changes, truncation, 0..10_u8, any::<bool>()).prop_map(
        |((mut interface, mut bytes), changes, truncation, variant, valid_checksum)| {
            if variant == 0 {
                set_ttl(&mut bytes, 1);
            } else if variant == 1 && bytes[12] == 8 {
                bytes[20] = 0x20;
                update_header_checksum(&mut bytes);
            } else if variant == 2 {
                interface = if interface == INSIDE { OUTSIDE } else { INSIDE };
                bytes[..6].copy_from_slice(&if interface == INSIDE { INSIDE_MAC } else { OUTSIDE_MAC });
            }
            for (at, byte) in changes {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            if valid_checksum {
                update_header_checksum(&mut bytes);
            }
            bytes.truncate(bytes.len() - truncation.map_or(0, |truncation| truncation.index(bytes.len()) / 4));
            (interface, bytes)
        },
    );
    let side = prop::sample::select(vec![INSIDE, OUTSIDE]);
    prop_oneof![5 => mutated, 1 => (side, prop::collection::vec(any::<u8>(), 0..200))]
}
