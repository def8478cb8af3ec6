//! The engine against a simple, slow reference NAT that is a list of sessions. Both receive the same packets at the
//! same times; packets sent, drops by reason and the number of sessions must be equal. Ports are the engine's choice:
//! the model records them, and checks that each one was allowed.

use std::net::SocketAddr;

use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use vipgate_coverage::property;
use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::ports::PortRange;
use vipgate_dataplane::session::timeout::Timeouts;
use vipgate_testkit::*;

const PODS: [&str; 3] = ["10.244.1.5", "10.244.1.6", "10.244.1.21"];
const VIPS: [&str; 3] = ["192.0.2.10", "192.0.2.10", "192.0.2.11"];
const REMOTES: [&str; 2] = ["198.51.100.10:53", "198.51.100.11:443"];
const PORTS: std::ops::RangeInclusive<u16> = 20_000..=20_002;
/// Ages of sessions are sums of these: never within the second after a timeout in which the expiry sweep may or may not
/// have run.
const PASSES: [u32; 3] = [10, 4_000, 12_000];

fn timeouts() -> Timeouts {
    Timeouts { tcp_established: 30_000, tcp_transitory: 6_000, udp: 5_000, icmp: 5_000, quarantine: 2_000 }
}

/// A session of the reference NAT.
#[derive(Clone, Debug)]
struct ModelSession {
    protocol: Protocol,
    pod: SocketAddr,
    remote: SocketAddr,
    port: u16,
    vip: &'static str,
    last_packet: u32,
    /// TCP: seen from the pod and from the remote.
    syn: [bool; 2],
    fin: [bool; 2],
    /// Whether the remote has replied, and whether the pod has acknowledged that.
    replied: bool,
    acked: bool,
}

impl ModelSession {
    fn timeout(&self) -> u32 {
        match self.protocol {
            Protocol::Udp | Protocol::Echo => 5_000,
            Protocol::Tcp if self.syn == [true; 2] && self.acked && self.fin != [true; 2] => 30_000,
            Protocol::Tcp => 6_000,
        }
    }

    fn is_live(&self, now: u32) -> bool {
        now - self.last_packet < self.timeout()
    }

    /// The port may still be in quarantine: up to a second until the sweep, two of quarantine, a second until the next
    /// sweep.
    fn may_be_quarantined(&self, now: u32) -> bool {
        !self.is_live(now) && now - self.last_packet < self.timeout() + 4_500
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Pod { protocol: Protocol, pod: usize, port: u16, remote: usize, flags: usize },
    Reply { which: prop::sample::Index, flags: usize },
    Stray { port: u16, remote: usize },
    Pass(u32),
}

const FLAGS: [&str; 4] = ["S", "A", "FA", "PA"];
const REPLIES: [&str; 3] = ["SA", "A", "FA"];

fn step() -> impl Strategy<Value = Step> {
    let protocol = prop_oneof![3 => Just(Protocol::Tcp), 1 => Just(Protocol::Udp), 1 => Just(Protocol::Echo)];
    prop_oneof![
        6 => (protocol, 0..PODS.len(), 1000_u16..1004, 0..REMOTES.len(), 0..FLAGS.len())
            .prop_map(|(protocol, pod, port, remote, flags)| Step::Pod { protocol, pod, port, remote, flags }),
        4 => (any::<prop::sample::Index>(), 0..REPLIES.len()).prop_map(|(which, flags)| Step::Reply { which, flags }),
        1 => (PORTS, 0..REMOTES.len()).prop_map(|(port, remote)| Step::Stray { port, remote }),
        2 => prop::sample::select(PASSES.to_vec()).prop_map(Step::Pass),
    ]
}

fn config() -> ProptestConfig {
    let seeds = FileFailurePersistence::Direct("tests/engine/model.regressions");
    ProptestConfig { cases: 300, failure_persistence: Some(Box::new(seeds)), ..ProptestConfig::default() }
}

#[test]
#[expect(clippy::too_many_lines, reason = "the model and the engine, step by step")]
fn the_engine_matches_the_reference_nat() {
    let classes = [
        "existing session",
        "opened",
        "no session",
        "exhausted",
        "reply delivered",
        "reply dropped",
        "stray",
        "long pass",
        "closed",
        "reopened",
    ];
    property(config(), &prop::collection::vec(step(), 1..150), &classes, |steps, coverage| {
        let range = PortRange::new(*PORTS.start(), *PORTS.end()).unwrap();
        let mut gateway = Gateway::new(&Setup { range, timeouts: timeouts(), ..Setup::default() });
        gateway.skip_counter_check();
        let mut model: Vec<ModelSession> = Vec::new();
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
                Step::Pod { protocol, pod, port, remote, flags } => {
                    let (source, remote, vip): (SocketAddr, _, _) =
                        ((ip(PODS[pod]), port).into(), at(REMOTES[remote]), VIPS[pod]);
                    let flags = if protocol == Protocol::Tcp { FLAGS[flags] } else { "" };
                    let bytes = match protocol {
                        Protocol::Tcp => {
                            let is_same =
                                |s: &ModelSession| s.pod == source && s.remote == remote && s.protocol == protocol;
                            let ack = 5001 + u32::from(model.iter().any(|s| is_same(s) && s.fin[1]));
                            tcp(source, remote, flags, if flags == "S" { 1000 } else { 1001 }, ack)
                        }
                        _ => packet(protocol, source, remote),
                    };
                    let is_same = |s: &ModelSession| s.protocol == protocol && s.pod == source && s.remote == remote;
                    let existing = model.iter().position(|s| is_same(s) && s.is_live(now));
                    let sent = gateway.receive(0, INSIDE, &bytes);
                    let index = if let Some(index) = existing {
                        coverage.count("existing session");
                        prop_assert_eq!(sent.len(), 1, "{:?} of a live session: {:?}", step, gateway.drops());
                        prop_assert_eq!(ends(&sent[0].1).0.port(), model[index].port);
                        index
                    } else if protocol == Protocol::Tcp && flags != "S" {
                        prop_assert!(
                            sent.is_empty() && dropped(&gateway, DropReason::NoSession),
                            "{:?}",
                            gateway.drops()
                        );
                        coverage.count("no session");
                        continue;
                    } else {
                        let to_same_remote =
                            |s: &&ModelSession| s.protocol == protocol && s.vip == vip && s.remote == remote;
                        let in_use: Vec<u16> =
                            model.iter().filter(to_same_remote).filter(|s| s.is_live(now)).map(|s| s.port).collect();
                        let quarantined =
                            model.iter().filter(to_same_remote).filter(|s| s.may_be_quarantined(now)).count();
                        if sent.is_empty() {
                            prop_assert!(dropped(&gateway, DropReason::PortsExhausted), "{:?}", gateway.drops());
                            prop_assert!(
                                in_use.len() + quarantined >= PORTS.len(),
                                "rejected with free ports: {:?}",
                                in_use
                            );
                            coverage.count("exhausted");
                            continue;
                        }
                        let port = ends(&sent[0].1).0.port();
                        prop_assert!(PORTS.contains(&port) && !in_use.contains(&port), "{} of {:?}", port, in_use);
                        coverage.count(if model.iter().any(is_same) { "reopened" } else { "opened" });
                        model.retain(|s| !is_same(s));
                        model.push(ModelSession {
                            protocol,
                            pod: source,
                            remote,
                            port,
                            vip,
                            last_packet: now,
                            syn: [false; 2],
                            fin: [false; 2],
                            replied: false,
                            acked: false,
                        });
                        model.len() - 1
                    };
                    prop_assert_eq!(sent[0].0, OUTSIDE);
                    prop_assert_eq!(ends(&sent[0].1).0.ip(), ip(vip));
                    update(&mut model[index], 0, flags, now);
                }
                Step::Reply { which, flags } => {
                    if model.is_empty() {
                        continue;
                    }
                    // One of the latest sessions; older ones have mostly ended.
                    let index = model.len() - 1 - which.index(model.len().min(4));
                    let session = model[index].clone();
                    let to: SocketAddr = (ip(session.vip), session.port).into();
                    // A FIN before the SYN has no sequence number that could be acknowledged (RFC 9293 section 3.5).
                    let flags = match session.protocol {
                        Protocol::Tcp if REPLIES[flags] == "FA" && !session.syn[1] => "SA",
                        Protocol::Tcp => REPLIES[flags],
                        _ => "",
                    };
                    let bytes = match session.protocol {
                        Protocol::Tcp => {
                            let ack = 1001 + u32::from(session.fin[0]);
                            tcp(session.remote, to, flags, if flags == "SA" { 5000 } else { 5001 }, ack)
                        }
                        Protocol::Udp => packet(Protocol::Udp, session.remote, to),
                        Protocol::Echo => echo(false, session.remote, to, session.port),
                    };
                    // The port may belong to another live session by now, which then gets the reply.
                    let owner = model.iter().position(|s| {
                        s.protocol == session.protocol
                            && s.vip == session.vip
                            && s.port == session.port
                            && s.remote == session.remote
                            && s.is_live(now)
                    });
                    let sent = gateway.receive(0, OUTSIDE, &bytes);
                    coverage.count(if owner.is_some() { "reply delivered" } else { "reply dropped" });
                    if let Some(owner) = owner {
                        prop_assert_eq!(sent.len(), 1, "a reply to a live session: {:?}", gateway.drops());
                        prop_assert_eq!((sent[0].0, ends(&sent[0].1).1), (INSIDE, model[owner].pod));
                        update(&mut model[owner], 1, flags, now);
                        coverage.add("closed", u64::from(model[owner].fin == [true; 2]));
                    } else {
                        prop_assert!(
                            sent.is_empty() && dropped(&gateway, DropReason::NoService),
                            "{:?}",
                            gateway.drops()
                        );
                    }
                }
                Step::Stray { port, remote } => {
                    let to: SocketAddr = (ip("192.0.2.10"), port).into();
                    let from = (at(REMOTES[remote]).ip(), 9).into();
                    prop_assert!(gateway.receive(0, OUTSIDE, &packet(Protocol::Udp, from, to)).is_empty());
                    prop_assert!(dropped(&gateway, DropReason::NoService));
                    coverage.count("stray");
                }
                Step::Pass(ms) => {
                    coverage.add("long pass", u64::from(ms > 1000));
                    gateway.advance(ms);
                    now += ms;
                    model.retain(|s| s.is_live(now) || s.may_be_quarantined(now));
                }
            }
        }
        gateway.advance(60_000);
        prop_assert_eq!(gateway.sessions(), 0);
        Ok(())
    });
}

/// Updates a session for a packet from the pod (0) or from the remote (1).
fn update(session: &mut ModelSession, side: usize, flags: &str, now: u32) {
    if flags == "S" {
        if session.fin == [true; 2] {
            (session.syn, session.fin, session.replied, session.acked) = ([false; 2], [false; 2], false, false);
        } else if session.acked {
            // An open connection is not reopened by a SYN.
            return;
        }
    }
    session.last_packet = now;
    session.syn[side] |= flags.starts_with('S');
    session.replied |= side == 1;
    session.acked |= side == 0 && flags.contains('A') && session.replied;
    session.fin[side] |= flags.starts_with('F');
}
