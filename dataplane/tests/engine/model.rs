//! The engine, with one worker or two, against a simple, slow reference NAT that is a list of sessions. Both receive the
//! same packets at the same times, on any queue; packets sent, drops by reason and the number of sessions must be equal. Ports are the engine's choice:
//! the model records them, and checks that each one was allowed.

use std::collections::HashMap;
use std::net::SocketAddr;

use proptest::prelude::*;
use proptest::test_runner::{FileFailurePersistence, TestCaseResult};
use vipgate_coverage::{Coverage, property};
use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::ports::PortRange;
use vipgate_dataplane::session::timeout::Timeouts;
use vipgate_testkit::*;

const PODS: [&str; 3] = ["10.244.1.5", "10.244.1.6", "10.244.1.21"];
const VIPS: [&str; 3] = ["192.0.2.10", "192.0.2.10", "192.0.2.11"];
const REMOTES: [&str; 3] = ["198.51.100.10:53", "198.51.100.10:443", "198.51.100.11:443"];
/// The first SNAT port, and how many there are: less than the pods want, or two blocks.
const FIRST_PORT: u16 = 20_000;
const PORT_COUNTS: [u16; 2] = [3, 128];
/// Ages of sessions are sums of these: never within the second after a timeout in which the expiry sweep may or may not
/// have run.
const PASSES: [u32; 3] = [10, 4_000, 12_000];

fn timeouts() -> Timeouts {
    Timeouts { tcp_established: 30_000, tcp_transitory: 6_000, udp: 5_000, icmp: 5_000, quarantine: 2_000 }
}

/// A session of the reference NAT.
#[derive(Clone, Copy, Debug)]
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
    /// Not yet with a port, nor with a packet.
    fn new(protocol: Protocol, (pod, remote): (SocketAddr, SocketAddr), vip: &'static str, now: u32) -> Self {
        let (syn, fin) = ([false; 2], [false; 2]);
        Self { protocol, pod, remote, port: 0, vip, last_packet: now, syn, fin, replied: false, acked: false }
    }

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
    Pod {
        protocol: Protocol,
        pod: usize,
        port: u16,
        remote: usize,
        flags: usize,
    },
    Reply {
        which: prop::sample::Index,
        flags: usize,
    },
    Stray {
        port: u16,
        remote: usize,
    },
    Pass(u32),
    /// The same policy is published again.
    Publish,
}

const FLAGS: [&str; 4] = ["S", "A", "FA", "PA"];
const REPLIES: [&str; 3] = ["SA", "A", "FA"];

fn step() -> impl Strategy<Value = Step> {
    let protocol = prop_oneof![3 => Just(Protocol::Tcp), 1 => Just(Protocol::Udp), 1 => Just(Protocol::Echo)];
    prop_oneof![
        6 => (protocol, 0..PODS.len(), 1000_u16..1004, 0..REMOTES.len(), 0..FLAGS.len())
            .prop_map(|(protocol, pod, port, remote, flags)| Step::Pod { protocol, pod, port, remote, flags }),
        4 => (any::<prop::sample::Index>(), 0..REPLIES.len()).prop_map(|(which, flags)| Step::Reply { which, flags }),
        1 => (FIRST_PORT..FIRST_PORT + 3, 0..REMOTES.len()).prop_map(|(port, remote)| Step::Stray { port, remote }),
        2 => prop::sample::select(PASSES.to_vec()).prop_map(Step::Pass),
        1 => Just(Step::Publish),
    ]
}

fn config() -> ProptestConfig {
    let seeds = FileFailurePersistence::Direct("tests/engine/model.regressions");
    ProptestConfig { cases: 500, failure_persistence: Some(Box::new(seeds)), ..ProptestConfig::default() }
}

/// The engine and the model, side by side.
struct Run<'a> {
    gateway: Gateway,
    /// The queue of the next packet.
    worker: usize,
    ports: std::ops::Range<u16>,
    model: Vec<ModelSession>,
    now: u32,
    coverage: &'a Coverage,
}

impl Run<'_> {
    fn step(&mut self, (step, worker): (Step, usize)) -> TestCaseResult {
        self.worker = worker % self.gateway.workers.len();
        match step {
            Step::Pod { protocol, pod, port, remote, flags } => {
                let flags = if protocol == Protocol::Tcp { FLAGS[flags] } else { "" };
                let mut remote = at(REMOTES[remote]);
                if protocol == Protocol::Echo {
                    remote.set_port(0);
                }
                self.pod_sends(protocol, (pod, port), remote, flags)
            }
            Step::Reply { which, flags } => self.remote_replies(which, flags),
            Step::Stray { port, remote } => {
                let to: SocketAddr = (ip("192.0.2.10"), port).into();
                let from = (at(REMOTES[remote]).ip(), 9).into();
                self.receive_dropped(OUTSIDE, &packet(Protocol::Udp, from, to), DropReason::NoService)?;
                self.coverage.count("stray");
                Ok(())
            }
            Step::Pass(ms) => {
                self.coverage.add("long pass", u64::from(ms > 1000));
                self.gateway.advance(ms);
                self.now += ms;
                self.model.retain(|s| s.is_live(self.now) || s.may_be_quarantined(self.now));
                Ok(())
            }
            Step::Publish => {
                self.coverage.count("published");
                self.gateway.set_policy(&policy());
                Ok(())
            }
        }
    }

    /// The gateway receives a packet; returns what it sends, and drops by reason since then.
    fn receive(&mut self, interface: InterfaceId, bytes: &[u8]) -> (Vec<(InterfaceId, Vec<u8>)>, Drops) {
        let before = self.gateway.drops();
        let sent = self.gateway.receive(self.worker, interface, bytes);
        let mut drops = self.gateway.drops();
        for (reason, count) in before {
            *drops.entry(reason).or_default() -= count;
        }
        drops.retain(|_, count| *count > 0);
        (sent, drops)
    }

    /// The gateway receives a packet that it must drop, only for this reason.
    fn receive_dropped(&mut self, interface: InterfaceId, bytes: &[u8], reason: DropReason) -> TestCaseResult {
        let (sent, drops) = self.receive(interface, bytes);
        prop_assert_eq!(sent, vec![]);
        prop_assert_eq!(drops, Drops::from([(reason, 1)]));
        Ok(())
    }

    fn pod_sends(
        &mut self,
        protocol: Protocol,
        (pod, port): (usize, u16),
        remote: SocketAddr,
        flags: &str,
    ) -> TestCaseResult {
        let (source, vip, now): (SocketAddr, _, _) = ((ip(PODS[pod]), port).into(), VIPS[pod], self.now);
        let is_same = |s: &ModelSession| s.protocol == protocol && s.pod == source && s.remote == remote;
        let bytes = if protocol == Protocol::Tcp {
            let ack = 5001 + u32::from(self.model.iter().any(|s| is_same(s) && s.fin[1]));
            tcp(source, remote, flags, if flags == "S" { 1000 } else { 1001 }, ack)
        } else {
            packet(protocol, source, remote)
        };
        let existing = self.model.iter().position(|s| is_same(s) && s.is_live(now));
        if existing.is_none() && protocol == Protocol::Tcp && flags != "S" {
            self.receive_dropped(INSIDE, &bytes, DropReason::NoSession)?;
            self.coverage.count("no session");
            return Ok(());
        }
        let (sent, drops) = self.receive(INSIDE, &bytes);
        let index = if let Some(index) = existing {
            self.coverage.count("existing session");
            prop_assert_eq!(sent.len(), 1, "{} of a live session: {:?}", flags, drops);
            prop_assert_eq!(ends(&sent[0].1).0.port(), self.model[index].port);
            index
        } else {
            let port = sent.first().map(|(_, bytes)| ends(bytes).0.port());
            let new = ModelSession::new(protocol, (source, remote), vip, now);
            let Some(index) = self.opened(new, port, &drops)? else { return Ok(()) };
            index
        };
        prop_assert_eq!(sent[0].0, OUTSIDE);
        prop_assert_eq!(ends(&sent[0].1).0.ip(), ip(vip));
        update(&mut self.model[index], 0, flags, now);
        Ok(())
    }

    /// A new session got this port, or was rejected; returns its index in the model.
    fn opened(&mut self, new: ModelSession, port: Option<u16>, drops: &Drops) -> Result<Option<usize>, TestCaseError> {
        let Self { model, now, coverage, ports, .. } = self;
        let to_same_remote =
            |s: &&ModelSession| s.protocol == new.protocol && s.vip == new.vip && s.remote == new.remote;
        let in_use: Vec<u16> =
            model.iter().filter(to_same_remote).filter(|s| s.is_live(*now)).map(|s| s.port).collect();
        let Some(port) = port else {
            let quarantined = model.iter().filter(to_same_remote).filter(|s| s.may_be_quarantined(*now)).count();
            prop_assert_eq!(drops, &Drops::from([(DropReason::PortsExhausted, 1)]));
            prop_assert!(in_use.len() + quarantined >= ports.len(), "rejected with free ports: {:?}", in_use);
            coverage.count("exhausted");
            return Ok(None);
        };
        prop_assert!(ports.contains(&port) && !in_use.contains(&port), "{} of {:?}", port, in_use);
        let is_same = |s: &ModelSession| s.protocol == new.protocol && s.pod == new.pod && s.remote == new.remote;
        coverage.count(if model.iter().any(is_same) { "reopened" } else { "opened" });
        model.retain(|s| !is_same(s));
        model.push(ModelSession { port, ..new });
        Ok(Some(model.len() - 1))
    }

    fn remote_replies(&mut self, which: prop::sample::Index, flags: usize) -> TestCaseResult {
        if self.model.is_empty() {
            return Ok(());
        }
        // One of the latest sessions; older ones have mostly ended.
        let index = self.model.len() - 1 - which.index(self.model.len().min(4));
        let session = self.model[index];
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
        let owner = self.model.iter().position(|s| {
            s.protocol == session.protocol
                && s.vip == session.vip
                && s.port == session.port
                && s.remote == session.remote
                && s.is_live(self.now)
        });
        self.coverage.count(if owner.is_some() { "reply delivered" } else { "reply dropped" });
        let Some(owner) = owner else { return self.receive_dropped(OUTSIDE, &bytes, DropReason::NoService) };
        let (sent, drops) = self.receive(OUTSIDE, &bytes);
        prop_assert_eq!(sent.len(), 1, "a reply to a live session: {:?}", drops);
        let owner = &mut self.model[owner];
        let (from, to) = ends(&sent[0].1);
        prop_assert_eq!((sent[0].0, from.ip(), to), (INSIDE, owner.remote.ip(), owner.pod));
        update(owner, 1, flags, self.now);
        self.coverage.add("closed", u64::from(owner.fin == [true; 2]));
        Ok(())
    }
}

/// Dropped packets, by reason.
type Drops = HashMap<DropReason, u64>;

#[test]
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
        "published",
        "handed off",
    ];
    let steps = prop::collection::vec((step(), 0..2_usize), 1..150);
    let strategy = (steps, 1_u8..=2, prop::sample::select(PORT_COUNTS.to_vec()));
    property(config(), &strategy, &classes, |(steps, workers, count), coverage| {
        let ports = FIRST_PORT..FIRST_PORT + count;
        let range = PortRange::new(ports.start, ports.end - 1).unwrap();
        let mut gateway = Gateway::new(&Setup { workers, range, timeouts: timeouts(), ..Setup::default() });
        gateway.skip_counter_check();
        let mut run = Run { gateway, worker: 0, ports, model: Vec::new(), now: 0, coverage };
        for step in steps {
            run.step(step)?;
        }
        let mut gateway = run.gateway;
        coverage.add("handed off", gateway.handoffs());
        // Long after the last packet all sessions have expired, and every port is free.
        gateway.advance(60_000);
        prop_assert_eq!(gateway.sessions(), 0);
        for n in 0..count {
            let request = packet(Protocol::Udp, (ip("10.244.1.5"), 5_000 + n).into(), at("203.0.113.99:53"));
            let sent = gateway.receive(usize::from(n) % gateway.workers.len(), INSIDE, &request);
            prop_assert_eq!(sent.len(), 1, "port {} of the range: {:?}", n, gateway.drops());
        }
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
