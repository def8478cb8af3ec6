//! One gateway that plays a scenario in given batches.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use crossbeam::channel::bounded;
use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::observe::packet_summary::PacketSummary;
use vipgate_dataplane::policy::spec::*;
use vipgate_dataplane::ports::PortRange;
use vipgate_dataplane::session::query::SessionFilter;
use vipgate_dataplane::session::timeout::Timeouts;
use vipgate_dataplane::wire::icmp_error::IcmpError;
use vipgate_dataplane::worker::Worker;
use vipgate_dataplane::worker::command::{Command, FlushChunk};
use vipgate_testkit::services::{backend, service, tcp_service};
use vipgate_testkit::*;

use super::script::{
    Action, BACKENDS, GatewayEvent, OUTSIDE_BACKEND, PacketId, PolicyVariant, QUARANTINE_MS, REPLY_DIRECTION,
    UNCOVERED_BACKEND, taggable_packet, write_tag,
};
use crate::fragments::udp_fragments;
use crate::icmp::error_about;
use crate::static_nat::cloud::Cloud;

/// Batch sizes, repeated cyclically: packets per batch, and turns before the next one (0: until idle).
#[derive(Clone, Debug)]
pub(crate) struct Batches(pub(crate) Vec<(usize, usize)>);

impl Batches {
    /// Each packet is sent before the next one arrives.
    pub(crate) fn one_by_one() -> Self {
        Self(vec![(1, 0)])
    }
}

/// How a scenario is played.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setting {
    pub(crate) workers: u8,
    /// There are few ports, and limits apply; else more than enough.
    pub(crate) scarce_ports: bool,
    pub(crate) queues: Queues,
    pub(crate) world: World,
}

impl Setting {
    pub(crate) const fn new(workers: u8) -> Self {
        Self { workers, scarce_ports: false, queues: Queues::ByFlow, world: World::OneService }
    }
}

/// On which worker's queue a packet arrives.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Queues {
    /// The packets of a flow on one queue, its replies on another one.
    ByFlow,
    /// Each packet on any queue, drawn from this seed.
    Any(u64),
}

impl Queues {
    fn worker(self, id: PacketId, workers: u8) -> usize {
        let number = match self {
            Self::ByFlow => u64::from(id.flow & !REPLY_DIRECTION ^ id.flow >> 31),
            Self::Any(seed) => (seed ^ u64::from(id.tag)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33,
        };
        (number % u64::from(workers)) as usize
    }
}

/// What there is beside the pods' policies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum World {
    /// A Service with one backend in each address family.
    OneService,
    /// Frontends that share pods and ports, a backend outside, clients that policy excludes, and pods that it doesn't
    /// cover.
    SharedBackends,
}

/// A packet sent.
pub(crate) struct Sent {
    pub(crate) interface: InterfaceId,
    pub(crate) bytes: Vec<u8>,
    /// How many gateway events came before it, and how many processes had ended.
    pub(crate) epoch: usize,
    pub(crate) process: usize,
}

pub(crate) struct ScenarioRun {
    gateway: Gateway,
    setup: Setup,
    setting: Setting,
    policy: PolicySet,
    pub(crate) sent: Vec<Sent>,
    /// Counter changes of each epoch.
    pub(crate) counter_changes: Vec<String>,
    /// Identity of each packet by its tag, and who sent it.
    pub(crate) packet_ids: HashMap<u32, PacketId>,
    senders: HashMap<u32, (IpAddr, u16)>,
    /// Whether a packet came back to its sender: to a port of its VIP that its own session got by chance.
    pub(crate) reached_sender: bool,
    process: usize,
    /// Its number of policy changes, if the gateway is in a cloud; and the cloud.
    cloud_policy: Option<usize>,
    cloud: Cloud,
    /// Packets that the cloud has translated.
    pub(crate) translated: u64,
}

/// Private addresses of the VIPs, one after the other; without any at times.
const PRIVATE: [&[[&str; 2]]; 4] = [
    &[["192.0.2.10", "172.31.0.10"], ["192.0.2.11", "172.31.0.11"], ["2001:db8::10", "fd31::10"]],
    &[["192.0.2.10", "172.31.0.11"], ["192.0.2.11", "172.31.0.10"], ["2001:db8::10", "fd31::11"]],
    &[["192.0.2.11", "172.31.7.7"]],
    &[],
];

/// Ages of sessions are sums of the scenario's delays: never within the second in which the expiry sweep may or may not
/// have run.
fn timeouts() -> Timeouts {
    Timeouts { tcp_established: 30_000, tcp_transitory: 6_000, udp: 5_000, icmp: 5_000, quarantine: QUARANTINE_MS }
}

fn policy_of(change: PolicyVariant, world: World) -> PolicySet {
    let mut set = policy();
    let mut api = service(&BACKENDS.map(backend));
    if world == World::SharedBackends {
        set.policies[0].excluded = ["198.51.100.11/32", "2001:db8:51::11/128"].map(|net| net.parse().unwrap()).into();
        let pods = ["10.244.0.0/16", "fd00:244::/32"].map(|net| net.parse().unwrap()).into();
        set.cluster = ClusterSpec { pods, others: vec![], drop_uncovered: true };
        set.services = vec![
            // As there is one backend in each family, a hairpinned packet reaches the same one whatever its random port is.
            tcp_service("Service tenant/web", "192.0.2.11", &[80, 81], 8080, &api.backends),
            tcp_service("Service tenant/outer", "192.0.2.11", &[90], 9090, &[backend(OUTSIDE_BACKEND)]),
            tcp_service("Service tenant/bare", "192.0.2.11", &[91], 9090, &[backend(UNCOVERED_BACKEND)]),
        ];
    }
    match change {
        PolicyVariant::Whole => {}
        PolicyVariant::NoPod => set.endpoints.retain(|endpoint| endpoint.address != ip("10.244.1.5")),
        PolicyVariant::OtherVip => set.endpoints[0].vips = vec![ip("192.0.2.11")],
        PolicyVariant::Excluded => set.policies[0].excluded = vec!["198.51.100.11/32".parse().unwrap()],
        PolicyVariant::Limited => {
            set.policies[0].limits =
                Limits { sessions: Some(2), new_sessions_per_second: Some(3), guaranteed_ports: None }
        }
        PolicyVariant::NoBackend => api.backends.clear(),
    }
    set.services.insert(0, api);
    set
}

/// Gives the VIPs private addresses, if the gateway is in a cloud.
fn enter_cloud(set: &mut PolicySet, number: Option<usize>) -> Cloud {
    let mut cloud = Cloud::default();
    for [vip, private] in number.map(|number| PRIVATE[number % PRIVATE.len()]).into_iter().flatten() {
        let spec = set.vips.iter_mut().find(|it| it.address == ip(vip)).unwrap();
        spec.private = vec![PrivateAddressSpec { gateway: "gw-a".into(), address: ip(private) }];
        cloud.0.push((ip(vip), ip(private)));
    }
    cloud
}

impl ScenarioRun {
    /// Plays a scenario in these batches.
    pub(crate) fn play(scenario: &[Action], batches: &Batches, setting: Setting) -> Self {
        Self::new(scenario, setting, None).run(scenario, batches)
    }

    /// Plays a scenario with a gateway in a cloud, with private addresses outside. What is sent is what the cloud sends.
    pub(crate) fn play_in_cloud(scenario: &[Action], batches: &Batches, setting: Setting) -> Self {
        Self::new(scenario, setting, Some(0)).run(scenario, batches)
    }

    fn new(scenario: &[Action], setting: Setting, cloud_policy: Option<usize>) -> Self {
        static FILES: AtomicU32 = AtomicU32::new(0);
        let restarts = scenario.iter().any(|action| matches!(action, Action::Event(GatewayEvent::Restart)));
        let file = || format!("vipgate-batches-{}-{}", std::process::id(), FILES.fetch_add(1, Relaxed));
        let state = restarts.then(|| std::env::temp_dir().join(file()));
        let range = PortRange::new(20_000, if setting.scarce_ports { 20_001 } else { 27_999 }).unwrap();
        let setup =
            Setup { workers: setting.workers, range, timeouts: timeouts(), capacity: 256, state, ..Setup::default() };
        let mut policy = policy_of(PolicyVariant::Whole, setting.world);
        let cloud = enter_cloud(&mut policy, cloud_policy);
        let mut gateway = Gateway::with(&setup, network(), &policy);
        gateway.skip_counter_check();
        let (sent, counter_changes, packet_ids, senders) = Default::default();
        Self {
            gateway,
            setup,
            setting,
            policy,
            sent,
            counter_changes,
            packet_ids,
            senders,
            reached_sender: false,
            process: 0,
            cloud_policy,
            cloud,
            translated: 0,
        }
    }

    fn run(mut self, scenario: &[Action], batches: &Batches) -> Self {
        let run = &mut self;
        let Setting { workers, queues, .. } = run.setting;
        let mut sizes = batches.0.iter().copied().cycle();
        let (mut size, mut turns) = sizes.next().unwrap();
        let (mut batch_size, mut pending_openers, mut pending_hairpins) = (0, HashSet::new(), HashSet::new());
        for action in scenario {
            if let Action::Event(event) = action {
                run.run_until_idle();
                run.apply_event(*event);
                run.run_until_idle();
                run.counter_changes.push(run.gateway.take_delta());
                batch_size = 0;
                continue;
            }
            let Some((id, interface, bytes)) = run.packet(action) else { continue };
            // A packet that may open a session is sent before its reply is received. With two workers, the two
            // directions of a flow may overtake each other.
            if pending_openers.contains(&(id.flow ^ REPLY_DIRECTION)) {
                run.run_until_idle();
                pending_openers.clear();
            }
            // A backend's reply to a pod is hairpinned at the VIP, and fragments wait for their first one: what reopens
            // their session may overtake them.
            if id.may_open_session && pending_hairpins.contains(&(id.flow ^ REPLY_DIRECTION)) {
                run.run_until_idle();
                pending_hairpins.clear();
            }
            if id.flow & REPLY_DIRECTION != 0 && (interface == INSIDE || id.datagram != 0) {
                pending_hairpins.insert(id.flow);
            }
            if id.may_open_session || workers > 1 {
                pending_openers.insert(id.flow);
            }
            run.packet_ids.insert(id.tag, id);
            run.senders.extend(end_points(&bytes).map(|[sender, _]| (id.tag, sender)));
            let worker = queues.worker(id, workers);
            let received = if interface == OUTSIDE { run.cloud.to_gateway(&bytes) } else { bytes };
            assert!(run.gateway.workers[worker].io().inject(interface, &received), "a frame for each");
            batch_size += 1;
            if batch_size >= size {
                if turns == 0 {
                    run.run_until_idle();
                } else {
                    for _ in 0..turns {
                        run.turn();
                    }
                }
                (size, turns) = sizes.next().unwrap();
                batch_size = 0;
            }
        }
        run.run_until_idle();
        run.counter_changes.push(run.gateway.take_delta());
        self
    }

    fn turn(&mut self) -> bool {
        let now = self.gateway.now;
        let received: usize = self.gateway.workers.iter_mut().map(|worker| worker.turn(now)).sum();
        let (epoch, process) = (self.counter_changes.len(), self.process);
        for worker in &mut self.gateway.workers {
            while let Some((interface, bytes)) = worker.io().pop_sent() {
                check_packet(&bytes);
                let (tag, ends) = (u32::from_be_bytes(*bytes.last_chunk().unwrap()), end_points(&bytes));
                self.reached_sender |= ends.is_some_and(|[_, receiver]| self.senders.get(&tag) == Some(&receiver));
                let seen = if interface == OUTSIDE { self.cloud.to_internet(&bytes) } else { bytes.clone() };
                self.translated += u64::from(seen != bytes);
                self.sent.push(Sent { interface, bytes: seen, epoch, process });
            }
        }
        received > 0 || !self.gateway.workers.iter().all(Worker::is_idle)
    }

    /// Runs until the workers are idle.
    fn run_until_idle(&mut self) {
        let turns = (0..1_000).take_while(|_| self.turn()).count();
        assert!(turns < 1_000, "packets loop without end");
        self.gateway.check_frames();
    }

    /// The index of packet `tag` in `sent`; runs until idle if it was not sent yet.
    fn find_sent(&mut self, tag: u32) -> Option<usize> {
        let is_it = |sent: &Sent| sent.bytes.ends_with(&tag.to_be_bytes()) && !is_icmp_error(&sent.bytes);
        let found = self.sent.iter().position(is_it);
        if found.is_some() {
            return found;
        }
        self.run_until_idle();
        self.sent.iter().position(is_it)
    }

    fn packet(&mut self, action: &Action) -> Option<(PacketId, InterfaceId, Vec<u8>)> {
        match *action {
            Action::Packet { id, interface, ref bytes, .. } => Some((id, interface, bytes.clone())),
            Action::Reply { id, to, flags, fragment } => {
                let seen = self.find_sent(to)?;
                let Sent { interface, bytes: seen, .. } = &self.sent[seen];
                let (source, destination) = ends(seen);
                let protocol = if seen[12] == 8 { seen[23] } else { seen[20] };
                let mut bytes = match (protocol, fragment) {
                    (6, None) => taggable_packet(Protocol::Tcp, destination, source, flags),
                    (17, None) => taggable_packet(Protocol::Udp, destination, source, ""),
                    (17, Some(fragment)) => udp_fragments(destination, source, 1400, id.datagram).swap_remove(fragment),
                    (1 | 58, None) => echo(false, destination, source, source.port()),
                    _ => return None,
                };
                bytes[..6].copy_from_slice(&seen[6..12]);
                bytes[6..12].copy_from_slice(&seen[..6]);
                write_tag(&mut bytes, id.tag);
                Some((id, *interface, bytes))
            }
            Action::Error { id, about, mtu } => {
                let seen = self.find_sent(about)?;
                let Sent { interface, bytes: seen, .. } = &self.sent[seen];
                let is_v4 = seen[12] == 8;
                let router = match (*interface == INSIDE, is_v4) {
                    (false, true) => "203.0.113.77",
                    (false, false) => "2001:db8:77::1",
                    (true, true) => "10.244.1.6",
                    (true, false) => "fd00:244:1::6",
                };
                let error = if mtu { IcmpError::PacketTooBig { mtu: 1300 } } else { IcmpError::HostUnreachable };
                Some((id, *interface, error_about(seen, router, error, *interface == INSIDE)))
            }
            Action::Event(_) => None,
        }
    }

    fn apply_event(&mut self, event: GatewayEvent) {
        match event {
            GatewayEvent::Advance(ms) => self.gateway.advance(ms),
            GatewayEvent::Policy(PolicyVariant::Limited) if !self.setting.scarce_ports => {}
            GatewayEvent::Policy(change) => {
                self.policy = policy_of(change, self.setting.world);
                self.cloud_policy = self.cloud_policy.map(|number| number + 1);
                self.cloud = enter_cloud(&mut self.policy, self.cloud_policy);
                self.gateway.set_policy(&self.policy);
            }
            GatewayEvent::Flush => {
                for worker in 0..self.gateway.workers.len() {
                    let filter = SessionFilter { endpoint: Some(ip("10.244.1.5")), ..SessionFilter::default() };
                    let mut chunk = FlushChunk { filter, cursor: Some(0), ended: 0 };
                    while chunk.cursor.is_some() {
                        let (reply, response) = bounded(1);
                        self.gateway.commands[worker].send(Command::Flush { chunk, reply }).unwrap();
                        self.turn();
                        chunk = response.try_recv().unwrap();
                    }
                }
            }
            GatewayEvent::Restart => {
                // The process's counters end with it.
                let counted = self.gateway.take_delta();
                self.counter_changes.push(counted);
                let now = self.gateway.now;
                let placeholder = Gateway::new(&Setup { frames: 1, ..Setup::default() });
                drop(std::mem::replace(&mut self.gateway, placeholder));
                self.gateway = Gateway::starting_at(&self.setup, network(), &self.policy, now);
                self.gateway.skip_counter_check();
                self.process += 1;
            }
        }
    }
}

impl Drop for ScenarioRun {
    fn drop(&mut self) {
        let file = |worker: u8| self.setup.state.as_ref().map(|path: &PathBuf| path.with_extension(worker.to_string()));
        for path in (0..self.setup.workers).filter_map(file) {
            // The session tables are not needed any more.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Addresses and ports of a packet that has ports.
fn end_points(bytes: &[u8]) -> Option<[(IpAddr, u16); 2]> {
    let PacketSummary { source, destination, ports, .. } = PacketSummary::of(bytes)?;
    ports.map(|[from, to]| [(source, from), (destination, to)])
}

/// Whether it is an ICMP error, which quotes another packet with its tag.
pub(crate) fn is_icmp_error(bytes: &[u8]) -> bool {
    let (protocol, l4) = if bytes[12] == 8 { (bytes[23], 34) } else { (bytes[20], 54) };
    match protocol {
        1 => matches!(bytes[l4], 3 | 11 | 12),
        58 => bytes[l4] < 128,
        _ => false,
    }
}
