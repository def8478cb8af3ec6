//! One gateway that lives through a story, which comes to it in some batches.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crossbeam::channel::bounded;
use vipgate_dataplane::command::{Command, FlushChunk, SessionFilter};
use vipgate_dataplane::io::InterfaceId;
use vipgate_dataplane::ports::PortRange;
use vipgate_dataplane::session::timeout::Timeouts;
use vipgate_dataplane::snapshot::spec::*;
use vipgate_dataplane::wire::icmp_error::Error;
use vipgate_dataplane::worker::Worker;

use super::script::{Action, BACKENDS, Change, Event, Place, QUARANTINE_MS, REPLY, segment, tag};
use crate::fragments::pieces;
use crate::icmp::error_about;
use crate::support::services::{backend, service};
use crate::support::*;

/// Where batches end: after so many packets each, in turn, with so many turns before the next one comes; 0 turns: as many as it takes.
#[derive(Clone, Debug)]
pub(crate) struct Cuts(pub(crate) Vec<(usize, usize)>);

/// What left because of the story.
pub(crate) struct Sent {
    pub(crate) interface: InterfaceId,
    pub(crate) bytes: Vec<u8>,
    /// How often anything that isn't a packet had happened before, and how many processes had ended.
    pub(crate) epoch: usize,
    pub(crate) process: usize,
}

pub(crate) struct Run {
    gateway: Gateway,
    setup: Setup,
    policy: PolicySet,
    pub(crate) sent: Vec<Sent>,
    /// What was counted in each epoch.
    pub(crate) counted: Vec<String>,
    /// Places of tags.
    pub(crate) places: HashMap<u32, Place>,
    process: usize,
}

/// Ages of sessions are sums of the story's times: never within the second in which the sweep may or may not have come.
fn timeouts() -> Timeouts {
    Timeouts { tcp_established: 30_000, tcp_transitory: 6_000, udp: 5_000, icmp: 5_000, quarantine: QUARANTINE_MS }
}

fn policy_of(change: Change) -> PolicySet {
    let mut set = policy();
    let mut api = service(&BACKENDS.map(backend));
    match change {
        Change::Whole => {}
        Change::NoPod => set.endpoints.retain(|endpoint| endpoint.address != ip("10.244.1.5")),
        Change::OtherVip => set.endpoints[0].vips = vec![ip("192.0.2.11")],
        Change::Excluded => set.policies[0].excluded = vec!["198.51.100.11/32".parse().unwrap()],
        Change::Limited => {
            set.policies[0].limits =
                Limits { sessions: Some(2), new_sessions_per_second: Some(3), guaranteed_ports: None }
        }
        Change::NoBackend => api.backends.clear(),
    }
    set.services = vec![api];
    set
}

impl Run {
    /// The story with these cuts. `narrow`: there are few ports, and limits count; else there are more than enough.
    pub(crate) fn of(story: &[Action], cuts: &Cuts, workers: u8, narrow: bool) -> Self {
        static FILES: AtomicU32 = AtomicU32::new(0);
        let lives_on = story.iter().any(|action| matches!(action, Action::Event(Event::Restart)));
        let file = || format!("vipgate-cuts-{}-{}", std::process::id(), FILES.fetch_add(1, Relaxed));
        let state = lives_on.then(|| std::env::temp_dir().join(file()));
        let range = PortRange::new(20_000, if narrow { 20_001 } else { 20_255 }).unwrap();
        let setup = Setup { workers, range, timeouts: timeouts(), capacity: 256, state, ..Setup::default() };
        let policy = policy_of(Change::Whole);
        let mut gateway = Gateway::with(&setup, network(), &policy);
        gateway.counts_vary();
        let (sent, counted, places) = Default::default();
        let mut run = Self { gateway, setup, policy, sent, counted, places, process: 0 };
        let mut sizes = cuts.0.iter().copied().cycle();
        let (mut size, mut turns) = sizes.next().unwrap();
        let (mut come, mut opening, mut around) = (0, HashSet::new(), HashSet::new());
        for action in story {
            if let Action::Event(event) = action {
                run.settle();
                run.happens(*event, narrow);
                run.settle();
                run.counted.push(run.gateway.take_delta());
                come = 0;
                continue;
            }
            let Some((place, interface, bytes)) = run.packet(action) else { continue };
            // What may open a session leaves before it is answered. At two workers, the two directions of a flow may overtake each
            // other.
            if opening.contains(&(place.flow ^ REPLY)) {
                run.settle();
                opening.clear();
            }
            // A backend's answer to a pod comes around by way of the VIP, and so do fragments that waited: what opens their session anew
            // may overtake them.
            if place.opens && around.contains(&(place.flow ^ REPLY)) {
                run.settle();
                around.clear();
            }
            if place.flow & REPLY != 0 && (interface == INSIDE || place.datagram != 0) {
                around.insert(place.flow);
            }
            if place.opens || workers > 1 {
                opening.insert(place.flow);
            }
            run.places.insert(place.tag, place);
            let worker = (place.flow & !REPLY ^ place.flow >> 31) as usize % usize::from(workers);
            assert!(run.gateway.workers[worker].io().inject(interface, &bytes), "a frame for each");
            come += 1;
            if come >= size {
                if turns == 0 {
                    run.settle();
                } else {
                    for _ in 0..turns {
                        run.turn();
                    }
                }
                (size, turns) = sizes.next().unwrap();
                come = 0;
            }
        }
        run.settle();
        run.counted.push(run.gateway.take_delta());
        run
    }

    fn turn(&mut self) -> bool {
        let now = self.gateway.now;
        let received: usize = self.gateway.workers.iter_mut().map(|worker| worker.turn(now)).sum();
        let (epoch, process) = (self.counted.len(), self.process);
        for worker in &mut self.gateway.workers {
            while let Some((interface, bytes)) = worker.io().sent() {
                check_packet(&bytes);
                self.sent.push(Sent { interface, bytes, epoch, process });
            }
        }
        received > 0 || !self.gateway.workers.iter().all(Worker::is_idle)
    }

    /// Nothing moves any more.
    fn settle(&mut self) {
        let moves = (0..1_000).take_while(|_| self.turn()).count();
        assert!(moves < 1_000, "packets go around without end");
        self.gateway.check_frames();
    }

    /// What packet `tag` has become, if it has left; all that came before it has had its time.
    fn became(&mut self, tag: u32) -> Option<usize> {
        let is_it = |sent: &Sent| sent.bytes.ends_with(&tag.to_be_bytes()) && !is_error(&sent.bytes);
        let found = self.sent.iter().position(is_it);
        if found.is_some() {
            return found;
        }
        self.settle();
        self.sent.iter().position(is_it)
    }

    fn packet(&mut self, action: &Action) -> Option<(Place, InterfaceId, Vec<u8>)> {
        match *action {
            Action::Packet { place, interface, ref bytes, .. } => Some((place, interface, bytes.clone())),
            Action::Answer { place, to, flags, piece } => {
                let seen = self.became(to)?;
                let Sent { interface, bytes: seen, .. } = &self.sent[seen];
                let (source, destination) = ends(seen);
                let protocol = if seen[12] == 8 { seen[23] } else { seen[20] };
                let mut bytes = match (protocol, piece) {
                    (6, None) => segment(Protocol::Tcp, destination, source, flags),
                    (17, None) => segment(Protocol::Udp, destination, source, ""),
                    (17, Some(piece)) => pieces(destination, source, 1400, place.datagram).swap_remove(piece),
                    (1 | 58, None) => echo(false, destination, source, source.port()),
                    _ => return None,
                };
                bytes[..6].copy_from_slice(&seen[6..12]);
                bytes[6..12].copy_from_slice(&seen[..6]);
                tag(&mut bytes, place.tag);
                Some((place, *interface, bytes))
            }
            Action::Error { place, about, mtu } => {
                let seen = self.became(about)?;
                let Sent { interface, bytes: seen, .. } = &self.sent[seen];
                let is_v4 = seen[12] == 8;
                let router = match (*interface == INSIDE, is_v4) {
                    (false, true) => "203.0.113.77",
                    (false, false) => "2001:db8:77::1",
                    (true, true) => "10.244.1.6",
                    (true, false) => "fd00:244:1::6",
                };
                let error = if mtu { Error::PacketTooBig { mtu: 1300 } } else { Error::HostUnreachable };
                Some((place, *interface, error_about(seen, router, error, *interface == INSIDE)))
            }
            Action::Event(_) => None,
        }
    }

    fn happens(&mut self, event: Event, narrow: bool) {
        match event {
            Event::Pass(ms) => self.gateway.pass(ms),
            Event::Policy(Change::Limited) if !narrow => {}
            Event::Policy(change) => {
                self.policy = policy_of(change);
                self.gateway.set_policy(&self.policy);
            }
            Event::Flush => {
                for worker in 0..self.gateway.workers.len() {
                    let filter = SessionFilter { endpoint: Some(ip("10.244.1.5")), ..SessionFilter::default() };
                    let mut chunk = FlushChunk { filter, cursor: Some(0), ended: 0 };
                    while chunk.cursor.is_some() {
                        let (reply, answer) = bounded(1);
                        self.gateway.commands[worker].send(Command::Flush { chunk, reply }).unwrap();
                        self.turn();
                        chunk = answer.try_recv().unwrap();
                    }
                }
            }
            Event::Restart => {
                // What it has counted goes with it.
                let counted = self.gateway.take_delta();
                self.counted.push(counted);
                let now = self.gateway.now;
                let nobody = Gateway::new(&Setup { frames: 1, ..Setup::default() });
                drop(std::mem::replace(&mut self.gateway, nobody));
                self.gateway = Gateway::starting_at(&self.setup, network(), &self.policy, now);
                self.gateway.counts_vary();
                self.process += 1;
            }
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let file = |worker: u8| self.setup.state.as_ref().map(|path: &PathBuf| path.with_extension(worker.to_string()));
        for path in (0..self.setup.workers).filter_map(file) {
            // Its sessions are of no use to anybody.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Whether it is an ICMP error, which quotes another packet, and its tag.
pub(crate) fn is_error(bytes: &[u8]) -> bool {
    let (protocol, l4) = if bytes[12] == 8 { (bytes[23], 34) } else { (bytes[20], 54) };
    match protocol {
        1 => matches!(bytes[l4], 3 | 11 | 12),
        58 => bytes[l4] < 128,
        _ => false,
    }
}
