//! Promises that hold for every sequence of packets, whatever the order, the time and the queue: checked against a model
//! that knows only what the outside sees.

use std::collections::HashMap;
use std::net::SocketAddr;

use crate::support::*;
use crate::tally::property;
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use vipgate_dataplane::io::InterfaceId;
use vipgate_dataplane::io::memory::MemoryIo;
use vipgate_dataplane::ports::PortRange;
use vipgate_dataplane::worker::Worker;

/// One thing that happens.
#[derive(Clone, Debug)]
enum Step {
    /// A pod sends a new or known flow's packet, on a worker's queue.
    Pod { protocol: Protocol, pod: usize, port: u16, far: usize, worker: usize },
    /// The far side answers one of the packets that it has seen.
    Answer { which: prop::sample::Index, worker: usize },
    /// Time passes.
    Pass(u32),
    /// The policy is published anew, unchanged.
    Publish,
}

const PODS: [&str; 3] = ["10.244.1.5", "10.244.1.6", "10.244.1.21"];
const FARS: [&str; 3] = ["198.51.100.10:53", "198.51.100.10:443", "198.51.100.11:53"];

fn protocol() -> impl Strategy<Value = Protocol> {
    prop_oneof![Just(Protocol::Tcp), Just(Protocol::Udp), Just(Protocol::Echo)]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (protocol(), 0..PODS.len(), 1000_u16..1008, 0..FARS.len(), 0_usize..2)
            .prop_map(|(protocol, pod, port, far, worker)| Step::Pod { protocol, pod, port, far, worker }),
        4 => (any::<prop::sample::Index>(), 0_usize..2).prop_map(|(which, worker)| Step::Answer { which, worker }),
        1 => (1_u32..4_000).prop_map(Step::Pass),
        1 => Just(Step::Publish),
    ]
}

/// What the outside knows of a flow: who it was, as the test sent it, and when it was last heard of.
struct Flow {
    pod: SocketAddr,
    heard: u32,
    packet: Vec<u8>,
}

/// Each failure is kept in a file, from which later runs try it first.
fn config() -> ProptestConfig {
    let kept = FileFailurePersistence::Direct("tests/engine/properties.regressions");
    ProptestConfig { cases: 200, failure_persistence: Some(Box::new(kept)), ..ProptestConfig::default() }
}

/// reverse(forward(p)) == p; no two live sessions share (protocol, VIP, port, remote, remote port); every packet sent
/// has right checksums (checked in `run`); no frame is lost (checked in `run`).
#[test]
fn every_answer_finds_the_pod_that_asked() {
    let classes =
        ["sent", "sent again", "answered", "answered late", "answered in vain", "published", "Tcp", "Udp", "Echo"];
    property(config(), &prop::collection::vec(step(), 1..120), &classes, |steps, tally| {
        let range = PortRange::new(20_000, 20_127).unwrap();
        let mut gateway = Gateway::new(&Setup { workers: 2, range, ..Setup::default() });
        gateway.counts_vary();
        let shortest = 3_000;
        // By what the far side sees: protocol, and both ends.
        let mut flows: HashMap<(u8, SocketAddr, SocketAddr), Flow> = HashMap::new();
        let mut now = 0_u32;
        for step in steps {
            match step {
                Step::Pod { protocol, pod, port, far, worker } => {
                    let source: SocketAddr = (ip(PODS[pod]), port).into();
                    let sent = gateway.arrives(worker, INSIDE, &packet(protocol, source, at(FARS[far])));
                    let [(interface, bytes)] = &sent[..] else {
                        prop_assert!(false, "{:?} sent, {:?}", sent, gateway.drops());
                        continue;
                    };
                    tally.count(format!("{protocol:?}"));
                    prop_assert_eq!((*interface, sent.len()), (OUTSIDE, 1));
                    let seen = ends(bytes);
                    prop_assert!(
                        ["192.0.2.10", "192.0.2.11"].contains(&seen.0.ip().to_string().as_str()),
                        "leaked {}",
                        seen.0
                    );
                    let key = (protocol as u8, seen.0, seen.1);
                    tally.count(if flows.contains_key(&key) { "sent again" } else { "sent" });
                    if let Some(known) = flows.get(&key) {
                        let alive = now - known.heard < shortest;
                        prop_assert!(
                            !alive || known.pod == source,
                            "two live flows look alike: {} and {}",
                            known.pod,
                            source
                        );
                    }
                    flows.insert(key, Flow { pod: source, heard: now, packet: bytes.clone() });
                }
                Step::Answer { which, worker } => {
                    let mut known: Vec<_> = flows.iter_mut().collect();
                    known.sort_by_key(|(key, _)| **key);
                    if known.is_empty() {
                        continue;
                    }
                    let at = which.index(known.len());
                    let (key, flow) = &mut known[at];
                    let protocol = [Protocol::Tcp, Protocol::Udp, Protocol::Echo][usize::from(key.0)];
                    let sent = gateway.arrives(worker, OUTSIDE, &answer_to(&flow.packet, protocol));
                    let alive = now - flow.heard < shortest;
                    tally.count(match (alive, sent.is_empty()) {
                        (true, _) => "answered",
                        (false, false) => "answered late",
                        (false, true) => "answered in vain",
                    });
                    prop_assert!(!alive || sent.len() == 1, "an answer was lost: {:?}", gateway.drops());
                    if let Some((interface, bytes)) = sent.first() {
                        prop_assert_eq!(*interface, INSIDE);
                        prop_assert_eq!(ends(bytes).1, flow.pod);
                        prop_assert_eq!(ends(bytes).0.ip(), key.2.ip());
                        flow.heard = now;
                    }
                }
                Step::Pass(ms) => {
                    gateway.pass(ms);
                    now += ms;
                }
                Step::Publish => {
                    tally.count("published");
                    gateway.set_policy(&policy());
                }
            }
        }
        // Long after the last packet nothing is left, and every port can be had again.
        gateway.pass(60_000);
        prop_assert_eq!(gateway.sessions(), 0);
        let taken = (0..128_u16).filter(|n| {
            let source: SocketAddr = (ip("10.244.1.5"), 5_000 + n).into();
            gateway.arrives(usize::from(n % 2), INSIDE, &packet(Protocol::Udp, source, at("203.0.113.99:53"))).len()
                == 1
        });
        prop_assert_eq!(taken.count(), 128, "every port of the range");
        Ok(())
    });
}

/// Nothing that a frame contains can stop a worker, and each frame is answered for: sent, or dropped by name.
#[test]
fn any_bytes_are_survived_and_accounted_for() {
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
    property(config(), &prop::collection::vec(hostile(), 1..80), &classes, |frames, tally| {
        let mut gateway = Gateway::new(&Setup { workers: 2, ..Setup::default() });
        gateway.hostile = true;
        gateway.counts_vary();
        for (n, (interface, frame)) in frames.iter().enumerate() {
            let before = accounted_for(&gateway);
            let sent = gateway.arrives(n % 2, *interface, frame).len() as u64;
            prop_assert!(sent > 0 || accounted_for(&gateway) == before + 1, "{:02x?}", frame);
            tally.add("sent", sent);
        }
        gateway.drops().into_iter().for_each(|(reason, count)| tally.add(reason.name(), count));
        let good = packet(Protocol::Udp, at("10.244.1.6:4000"), at("198.51.100.10:53"));
        prop_assert_eq!(gateway.arrives(0, INSIDE, &good).len(), 1, "and the next good packet passes");
        Ok(())
    });
}

/// Frames that weren't sent on: dropped, taken in, or waiting for something.
fn accounted_for(gateway: &Gateway) -> u64 {
    let of = |it: &Worker<MemoryIo>| it.counters().heard.get() + u64::from(it.tables().fragments.parked());
    gateway.kept() + gateway.workers.iter().map(of).sum::<u64>()
}

/// Good packets with some bytes changed, some of them cut somewhere, or from the other side, and plain noise.
fn hostile() -> impl Strategy<Value = (InterfaceId, Vec<u8>)> {
    let good = (protocol(), any::<bool>(), any::<bool>()).prop_map(|(protocol, v6, answer)| {
        let (pod, far, vip) = if v6 {
            ("[fd00:244:1::5]:1000", "[2001:db8:51::1]:53", "[2001:db8::10]:20000")
        } else {
            ("10.244.1.5:1000", "198.51.100.10:53", "192.0.2.10:20000")
        };
        if answer {
            (OUTSIDE, packet(protocol, at(far), at(vip)))
        } else {
            (INSIDE, packet(protocol, at(pod), at(far)))
        }
    });
    let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4);
    let end = prop::option::weighted(0.2, any::<prop::sample::Index>());
    // What a receiver checks first is right in some of them, so that they get further.
    let mutated = (good, changes, end, 0..10_u8, any::<bool>()).prop_map(
        |((mut interface, mut bytes), changes, end, special, sealed)| {
            if special == 0 {
                set_ttl(&mut bytes, 1);
            } else if special == 1 && bytes[12] == 8 {
                bytes[20] = 0x20;
                seal_header(&mut bytes);
            } else if special == 2 {
                interface = if interface == INSIDE { OUTSIDE } else { INSIDE };
                bytes[..6].copy_from_slice(&if interface == INSIDE { INSIDE_MAC } else { OUTSIDE_MAC });
            }
            for (at, byte) in changes {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            if sealed {
                seal_header(&mut bytes);
            }
            bytes.truncate(bytes.len() - end.map_or(0, |end| end.index(bytes.len()) / 4));
            (interface, bytes)
        },
    );
    let side = prop::sample::select(vec![INSIDE, OUTSIDE]);
    prop_oneof![5 => mutated, 1 => (side, prop::collection::vec(any::<u8>(), 0..200))]
}
