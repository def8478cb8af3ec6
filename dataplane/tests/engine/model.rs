//! The engine beside a simple, slow NAT: a list of sessions that anyone can read. Both see the same packets and the same time; what
//! leaves, what is dropped and why, and how many sessions there are must be the same. Ports are the engine's choice: the
//! model learns them, and says which ones were allowed.

use std::net::SocketAddr;

use crate::support::*;
use crate::tally::property;
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use vipgate_dataplane::counters::DropReason;
use vipgate_dataplane::ports::PortRange;
use vipgate_dataplane::session::timeout::Timeouts;

const PODS: [&str; 3] = ["10.244.1.5", "10.244.1.6", "10.244.1.21"];
const VIPS: [&str; 3] = ["192.0.2.10", "192.0.2.10", "192.0.2.11"];
const FARS: [&str; 2] = ["198.51.100.10:53", "198.51.100.11:443"];
const PORTS: std::ops::RangeInclusive<u16> = 20_000..=20_002;
/// Ages of sessions are sums of these: never within the second after a timeout in which the sweep may or may not have come.
const PASSES: [u32; 3] = [10, 4_000, 12_000];

fn timeouts() -> Timeouts {
    Timeouts { tcp_established: 30_000, tcp_transitory: 6_000, udp: 5_000, icmp: 5_000, quarantine: 2_000 }
}

/// One session of the simple NAT.
#[derive(Clone, Debug)]
struct Simple {
    protocol: Protocol,
    pod: SocketAddr,
    far: SocketAddr,
    port: u16,
    vip: &'static str,
    heard: u32,
    /// TCP: what has passed from the pod and from the far side.
    syn: [bool; 2],
    fin: [bool; 2],
    /// Whether the remote has answered, and whether the pod has acknowledged that.
    answered: bool,
    acked: bool,
}

impl Simple {
    fn timeout(&self) -> u32 {
        match self.protocol {
            Protocol::Udp | Protocol::Echo => 5_000,
            Protocol::Tcp if self.syn == [true; 2] && self.acked && self.fin != [true; 2] => 30_000,
            Protocol::Tcp => 6_000,
        }
    }

    fn lives(&self, now: u32) -> bool {
        now - self.heard < self.timeout()
    }

    /// Its port may still rest: a second for the sweep to come, two of rest, a second for the next sweep.
    fn may_rest(&self, now: u32) -> bool {
        !self.lives(now) && now - self.heard < self.timeout() + 4_500
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Pod { protocol: Protocol, pod: usize, port: u16, far: usize, flags: usize },
    Far { which: prop::sample::Index, flags: usize },
    Stray { port: u16, far: usize },
    Pass(u32),
}

const FLAGS: [&str; 4] = ["S", "A", "FA", "PA"];
const ANSWERS: [&str; 3] = ["SA", "A", "FA"];

fn step() -> impl Strategy<Value = Step> {
    let protocol = prop_oneof![3 => Just(Protocol::Tcp), 1 => Just(Protocol::Udp), 1 => Just(Protocol::Echo)];
    prop_oneof![
        6 => (protocol, 0..PODS.len(), 1000_u16..1004, 0..FARS.len(), 0..FLAGS.len())
            .prop_map(|(protocol, pod, port, far, flags)| Step::Pod { protocol, pod, port, far, flags }),
        4 => (any::<prop::sample::Index>(), 0..ANSWERS.len()).prop_map(|(which, flags)| Step::Far { which, flags }),
        1 => (PORTS, 0..FARS.len()).prop_map(|(port, far)| Step::Stray { port, far }),
        2 => prop::sample::select(PASSES.to_vec()).prop_map(Step::Pass),
    ]
}

fn config() -> ProptestConfig {
    let kept = FileFailurePersistence::Direct("tests/engine/model.regressions");
    ProptestConfig { cases: 300, failure_persistence: Some(Box::new(kept)), ..ProptestConfig::default() }
}

#[test]
#[expect(clippy::too_many_lines, reason = "the model beside the engine, step by step")]
fn the_engine_does_what_the_simple_nat_does() {
    let classes = [
        "known",
        "opened",
        "no session",
        "exhausted",
        "answered",
        "answered in vain",
        "stray",
        "long pass",
        "closed",
        "reopened",
    ];
    property(config(), &prop::collection::vec(step(), 1..150), &classes, |steps, tally| {
        let range = PortRange::new(*PORTS.start(), *PORTS.end()).unwrap();
        let mut gateway = Gateway::new(&Setup { range, timeouts: timeouts(), ..Setup::default() });
        gateway.counts_vary();
        let mut model: Vec<Simple> = Vec::new();
        let mut now = 0;
        for step in steps {
            let before = gateway.drops();
            let dropped = |gateway: &Gateway, reason| {
                let more =
                    gateway.drops().get(&reason).copied().unwrap_or(0) - before.get(&reason).copied().unwrap_or(0);
                let all = gateway.drops().values().sum::<u64>() - before.values().sum::<u64>();
                more == 1 && all == 1
            };
            match step {
                Step::Pod { protocol, pod, port, far, flags } => {
                    let (source, far, vip): (SocketAddr, _, _) =
                        ((ip(PODS[pod]), port).into(), at(FARS[far]), VIPS[pod]);
                    let flags = if protocol == Protocol::Tcp { FLAGS[flags] } else { "" };
                    let bytes = match protocol {
                        Protocol::Tcp => {
                            let same = |s: &Simple| s.pod == source && s.far == far && s.protocol == protocol;
                            let ack = 5001 + u32::from(model.iter().any(|s| same(s) && s.fin[1]));
                            tcp(source, far, flags, if flags == "S" { 1000 } else { 1001 }, ack)
                        }
                        _ => packet(protocol, source, far),
                    };
                    let same = |s: &Simple| s.protocol == protocol && s.pod == source && s.far == far;
                    let known = model.iter().position(|s| same(s) && s.lives(now));
                    let sent = gateway.arrives(0, INSIDE, &bytes);
                    let index = if let Some(index) = known {
                        tally.count("known");
                        prop_assert_eq!(sent.len(), 1, "{:?} of a live session: {:?}", step, gateway.drops());
                        prop_assert_eq!(ends(&sent[0].1).0.port(), model[index].port);
                        index
                    } else if protocol == Protocol::Tcp && flags != "S" {
                        prop_assert!(
                            sent.is_empty() && dropped(&gateway, DropReason::NoSession),
                            "{:?}",
                            gateway.drops()
                        );
                        tally.count("no session");
                        continue;
                    } else {
                        let toward = |s: &&Simple| s.protocol == protocol && s.vip == vip && s.far == far;
                        let taken: Vec<u16> =
                            model.iter().filter(toward).filter(|s| s.lives(now)).map(|s| s.port).collect();
                        let resting = model.iter().filter(toward).filter(|s| s.may_rest(now)).count();
                        if sent.is_empty() {
                            prop_assert!(dropped(&gateway, DropReason::PortsExhausted), "{:?}", gateway.drops());
                            prop_assert!(taken.len() + resting >= PORTS.len(), "refused with ports left: {:?}", taken);
                            tally.count("exhausted");
                            continue;
                        }
                        let port = ends(&sent[0].1).0.port();
                        prop_assert!(PORTS.contains(&port) && !taken.contains(&port), "{} of {:?}", port, taken);
                        tally.count(if model.iter().any(same) { "reopened" } else { "opened" });
                        model.retain(|s| !same(s));
                        model.push(Simple {
                            protocol,
                            pod: source,
                            far,
                            port,
                            vip,
                            heard: now,
                            syn: [false; 2],
                            fin: [false; 2],
                            answered: false,
                            acked: false,
                        });
                        model.len() - 1
                    };
                    prop_assert_eq!(sent[0].0, OUTSIDE);
                    prop_assert_eq!(ends(&sent[0].1).0.ip(), ip(vip));
                    note(&mut model[index], 0, flags, now);
                }
                Step::Far { which, flags } => {
                    if model.is_empty() {
                        continue;
                    }
                    // One of the last ones: older ones have ended, mostly.
                    let index = model.len() - 1 - which.index(model.len().min(4));
                    let session = model[index].clone();
                    let to: SocketAddr = (ip(session.vip), session.port).into();
                    // Nobody ends what it hasn't begun: a FIN before the SYN has no number that could be acknowledged (RFC 9293 section 3.5).
                    let flags = match session.protocol {
                        Protocol::Tcp if ANSWERS[flags] == "FA" && !session.syn[1] => "SA",
                        Protocol::Tcp => ANSWERS[flags],
                        _ => "",
                    };
                    let bytes = match session.protocol {
                        Protocol::Tcp => {
                            let ack = 1001 + u32::from(session.fin[0]);
                            tcp(session.far, to, flags, if flags == "SA" { 5000 } else { 5001 }, ack)
                        }
                        Protocol::Udp => packet(Protocol::Udp, session.far, to),
                        Protocol::Echo => echo(false, session.far, to, session.port),
                    };
                    // Its port may be another live session's by now, which then hears it.
                    let owner = model.iter().position(|s| {
                        s.protocol == session.protocol
                            && s.vip == session.vip
                            && s.port == session.port
                            && s.far == session.far
                            && s.lives(now)
                    });
                    let sent = gateway.arrives(0, OUTSIDE, &bytes);
                    tally.count(if owner.is_some() { "answered" } else { "answered in vain" });
                    if let Some(owner) = owner {
                        prop_assert_eq!(sent.len(), 1, "an answer to a live session: {:?}", gateway.drops());
                        prop_assert_eq!((sent[0].0, ends(&sent[0].1).1), (INSIDE, model[owner].pod));
                        note(&mut model[owner], 1, flags, now);
                        tally.add("closed", u64::from(model[owner].fin == [true; 2]));
                    } else {
                        prop_assert!(
                            sent.is_empty() && dropped(&gateway, DropReason::NoService),
                            "{:?}",
                            gateway.drops()
                        );
                    }
                }
                Step::Stray { port, far } => {
                    let to: SocketAddr = (ip("192.0.2.10"), port).into();
                    let from = (at(FARS[far]).ip(), 9).into();
                    prop_assert!(gateway.arrives(0, OUTSIDE, &packet(Protocol::Udp, from, to)).is_empty());
                    prop_assert!(dropped(&gateway, DropReason::NoService));
                    tally.count("stray");
                }
                Step::Pass(ms) => {
                    tally.add("long pass", u64::from(ms > 1000));
                    gateway.pass(ms);
                    now += ms;
                    model.retain(|s| s.lives(now) || s.may_rest(now));
                }
            }
        }
        gateway.pass(60_000);
        prop_assert_eq!(gateway.sessions(), 0);
        Ok(())
    });
}

/// Notes a packet from the pod (0) or from the far side (1).
fn note(session: &mut Simple, side: usize, flags: &str, now: u32) {
    if flags == "S" {
        if session.fin == [true; 2] {
            (session.syn, session.fin, session.answered, session.acked) = ([false; 2], [false; 2], false, false);
        } else if session.acked {
            // Of an open connection only its ends can say that it is over.
            return;
        }
    }
    session.heard = now;
    session.syn[side] |= flags.starts_with('S');
    session.answered |= side == 1;
    session.acked |= side == 0 && flags.contains('A') && session.answered;
    session.fin[side] |= flags.starts_with('F');
}
