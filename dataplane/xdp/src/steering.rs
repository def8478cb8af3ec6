//! The steering program's tables: what is captured. Loaded once for all interfaces; filled before the program is
//! attached, and kept in step with policy by differences.

mod ranges;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, BorrowedFd};

use aya::maps::lpm_trie::Key;
use aya::maps::{Array, HashMap, LpmTrie, Map, MapData, MapError, PerCpuArray, XskMap};
use aya::programs::{ProgramError, SchedClassifier, TestRun, TestRunOptions, Xdp};
use aya::{Ebpf, EbpfError, EbpfLoader};
use ipnet::IpNet;
use thiserror::Error;
use vipgate_dataplane::io::InterfaceId;

use self::ranges::Ranges;
use crate::guard::GUARD;
use crate::program::NAME;

static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/steer.bpf.o"));

/// What the program answers for what isn't captured (linux/bpf.h).
const XDP_PASS: u32 = 2;

/// Queues of one interface that the program has room for.
pub const MOST_QUEUES: u32 = 64;

/// What is captured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SteeringTables {
    /// Covered pods, and the number of the policy that covers each.
    pub endpoints: BTreeMap<IpAddr, u32>,
    /// VIPs.
    pub vips: BTreeSet<IpAddr>,
    /// Where backends of Services listen: address, port, IP protocol number.
    pub listeners: BTreeSet<Listener>,
    /// Addresses of the gateway's own kernel: what pods send there is not captured.
    pub locals: BTreeSet<IpAddr>,
    /// Where tunnels end: an address of this gateway, and a UDP port.
    pub tunnels: BTreeSet<(IpAddr, u16)>,
    /// For each policy, whether a destination is translated; the longest prefix counts, and no match means no.
    pub cidrs: BTreeMap<(u32, IpNet), bool>,
    /// Pods' addresses: what comes from there inside, and goes to where the cluster ends, is captured, covered or not.
    pub pods: BTreeSet<IpNet>,
    /// The cluster's own addresses: no policy translates what goes there, unless it names it as closely.
    pub inside: BTreeSet<IpNet>,
}

/// Where a backend listens: address, port, IP protocol number.
pub type Listener = (IpAddr, u16, u8);

/// What the program has done with packets, since it was loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcomes {
    /// Given to the kernel.
    pub passed: u64,
    /// Given to a socket.
    pub captured: u64,
    /// Captured, but no socket listened: dropped.
    pub no_socket: u64,
    /// Would have been captured, but the program was off: dropped by the second line.
    pub guarded: u64,
}

/// The program can't be loaded or its tables can't be changed.
#[derive(Debug, Error)]
pub enum SteeringError {
    /// The kernel refused to load it.
    #[error("cannot load the steering program: {}{}", chain(.0), hint(&chain(.0)))]
    Load(#[source] EbpfError),
    /// The kernel refused to verify it.
    #[error("the kernel refused the steering program: {}{}", chain(.0), hint(&chain(.0)))]
    Verify(#[source] ProgramError),
    /// A table can't be changed.
    #[error("cannot change the steering program's table {table}: {}", chain(.source))]
    Table {
        /// Its name.
        table: &'static str,
        /// What the kernel says.
        source: MapError,
    },
    /// The program has no such part: it is not the one that this version was built with.
    #[error("the steering program has no {0}")]
    NoSuchPart(&'static str),
}

fn hint(text: &str) -> &'static str {
    if text.contains("Operation not permitted") || text.contains("os error 1)") || text.contains("Permission denied") {
        " (vipgate needs root, or CAP_NET_ADMIN, CAP_BPF and CAP_PERFMON)"
    } else {
        ""
    }
}

/// An error and its causes in one line, each once.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let part = error.to_string();
        if !text.contains(&part) {
            text = format!("{text}: {part}");
        }
        cause = error.source();
    }
    text
}

/// An IPv6 address as the program's tables hold it.
type V6Key = [u8; 16];
/// What an address is to the program: the number of its policy, if it is an endpoint, and its kinds as bits.
type Host = [u32; 2];
const VIP: u32 = 1;
const ENDPOINT: u32 = 2;
const LOCAL: u32 = 4;
const BACKEND: u32 = 8;
const TUNNEL: u32 = 16;
/// The protocol of tunnels.
const UDP: u8 = 17;
/// As the program lays them out: address, port, protocol.
type Listener4 = [u8; 8];
type Listener6 = [u8; 24];
/// One table for each address family.
type Hosts = (HashMap<MapData, [u8; 4], Host>, HashMap<MapData, V6Key, Host>);
/// Policy number and address, behind the prefix length that [`Key`] adds.
type Cidr4 = [u8; 8];
type Cidr6 = [u8; 20];
/// What is said of a prefix, and its length.
type Reach = [u8; 2];
/// The bits of the program's switch.
const CLOSED: u32 = 1;
const UNCOVERED: u32 = 2;

/// The loaded program and its tables.
pub struct Steering {
    program: Ebpf,
    /// The kernel's number of it.
    id: u32,
    interfaces: Array<MapData, u32>,
    insides: Array<MapData, u32>,
    sockets: XskMap<MapData>,
    closed: Array<MapData, u32>,
    is_closed: bool,
    hosts: Hosts,
    listeners: (HashMap<MapData, Listener4, u8>, HashMap<MapData, Listener6, u8>),
    cidrs: (LpmTrie<MapData, Cidr4, Reach>, LpmTrie<MapData, Cidr6, Reach>),
    ranges: Ranges,
    outcomes: PerCpuArray<MapData, u64>,
    /// Whatever is in the tables is named here.
    applied: Entries,
    /// A change failed half-way: values may be others than `applied` says, and some may be missing.
    is_unsure: bool,
}

impl std::fmt::Debug for Steering {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Steering").field("applied", &self.applied).finish_non_exhaustive()
    }
}

impl Steering {
    /// Loads the program; it captures nothing and is attached nowhere yet.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn load() -> Result<Self, SteeringError> {
        let mut program = EbpfLoader::new().load(OBJECT).map_err(SteeringError::Load)?;
        let steer: &mut Xdp = program
            .program_mut(NAME)
            .ok_or(SteeringError::NoSuchPart(NAME))?
            .try_into()
            .map_err(SteeringError::Verify)?;
        steer.load().map_err(SteeringError::Verify)?;
        let id = steer.info().map_err(SteeringError::Verify)?.id();
        Ok(Self {
            id,
            interfaces: take(&mut program, "interfaces")?,
            insides: take(&mut program, "insides")?,
            sockets: take(&mut program, "sockets")?,
            closed: take(&mut program, "closed")?,
            is_closed: false,
            hosts: (take(&mut program, "hosts4")?, take(&mut program, "hosts6")?),
            listeners: (take(&mut program, "listeners4")?, take(&mut program, "listeners6")?),
            cidrs: (take(&mut program, "cidrs4")?, take(&mut program, "cidrs6")?),
            ranges: Ranges::of(&mut program)?,
            outcomes: take(&mut program, "outcomes")?,
            program,
            applied: Entries::default(),
            is_unsure: false,
        })
    }

    /// Says which number an interface has, and whether pods are behind it.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn add_interface(&mut self, ifindex: u32, id: InterfaceId, is_inside: bool) -> Result<(), SteeringError> {
        let refused = |table| move |source| SteeringError::Table { table, source };
        self.insides.set(id.0.into(), u32::from(is_inside), 0).map_err(refused("insides"))?;
        self.interfaces.set(id.0.into(), ifindex, 0).map_err(refused("interfaces"))
    }

    /// Connects a queue of an interface to its socket.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn connect(&mut self, interface: InterfaceId, queue: u32, socket: i32) -> Result<(), SteeringError> {
        let index = u32::from(interface.0) * MOST_QUEUES + queue;
        self.sockets.set(index, socket, 0).map_err(|source| SteeringError::Table { table: "sockets", source })
    }

    /// Lets nothing through but what is for the gateway's own kernel, or ends that: for as long as nobody knows the policy.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn close(&mut self, closed: bool) -> Result<(), SteeringError> {
        self.is_closed = closed;
        self.switch(!self.ranges.pods.is_empty())
    }

    /// Sets the switch; `uncovered`: whether any pod's packets are captured although nothing covers it.
    fn switch(&mut self, uncovered: bool) -> Result<(), SteeringError> {
        let bits = if self.is_closed { CLOSED } else { 0 } | if uncovered { UNCOVERED } else { 0 };
        self.closed.set(0, bits, 0).map_err(|source| SteeringError::Table { table: "closed", source })
    }

    fn set_ranges(&mut self, pods: BTreeSet<IpNet>, inside: BTreeSet<IpNet>) -> Result<(), SteeringError> {
        let uncovered = !pods.is_empty();
        self.ranges.set(pods, inside)?;
        self.switch(uncovered)
    }

    /// The same, beside those that there are.
    fn add_ranges(&mut self, pods: &BTreeSet<IpNet>, inside: &BTreeSet<IpNet>) -> Result<(), SteeringError> {
        let more = (&self.ranges.pods | pods, &self.ranges.inside | inside);
        self.set_ranges(more.0, more.1)
    }

    /// Captures what `tables` say and nothing else: what is new first, so that nothing which stays is open for a moment.
    ///
    /// # Errors
    /// When the kernel refuses; what was changed until then stays, and the next call makes up for the rest.
    pub fn apply(&mut self, tables: SteeringTables) -> Result<(), SteeringError> {
        let (pods, inside) = (tables.pods.clone(), tables.inside.clone());
        let wanted = Entries::of(tables);
        let ranges = self.add_ranges(&pods, &inside);
        let mut old = std::mem::take(&mut self.applied);
        let outcome = ranges.and_then(|()| self.change(&old, &wanted));
        self.is_unsure = outcome.is_err();
        self.applied = if self.is_unsure {
            old.hosts.extend(wanted.hosts);
            old.cidrs.extend(wanted.cidrs);
            old.listeners.extend(wanted.listeners);
            old
        } else {
            wanted
        };
        outcome.and_then(|()| self.set_ranges(pods, inside))
    }

    /// Whether a change failed half-way, so that only [`Self::apply`] makes sure of what is captured.
    pub fn is_unsure(&self) -> bool {
        self.is_unsure || self.ranges.is_unsure
    }

    /// Captures what `more` says, too. What an address was before it still is, but an endpoint has the policy that `more` says.
    ///
    /// # Errors
    /// When the kernel refuses; some of it may be captured then.
    pub fn extend(&mut self, more: SteeringTables) -> Result<(), SteeringError> {
        self.add_ranges(&more.pods, &more.inside)?;
        let more = Entries::of(more);
        self.is_unsure = true;
        for (&(policy, net), &translated) in &more.cidrs {
            self.set_cidr(policy, net, Some(translated))?;
            self.applied.cidrs.insert((policy, net), translated);
        }
        for &listener in &more.listeners {
            self.set_listener(listener, true)?;
            self.applied.listeners.insert(listener);
        }
        for (&address, &[policy, kinds]) in &more.hosts {
            let known = self.applied.hosts.entry(address).or_default();
            let policy = if kinds & ENDPOINT == 0 { known[0] } else { policy };
            *known = [policy, known[1] | kinds];
            set(&mut self.hosts, address, Some(*known))?;
        }
        self.is_unsure = false;
        Ok(())
    }

    /// Lets go of what `less` says: of an address, what it says that it is; of prefixes, those that it names.
    ///
    /// # Errors
    /// When the kernel refuses; some of it may be captured still.
    pub fn reduce(&mut self, less: SteeringTables) -> Result<(), SteeringError> {
        let left = (&self.ranges.pods - &less.pods, &self.ranges.inside - &less.inside);
        self.set_ranges(left.0, left.1)?;
        let less = Entries::of(less);
        self.is_unsure = true;
        for listener in &less.listeners {
            self.applied.listeners.remove(listener);
        }
        for (&address, &[_, kinds]) in &less.hosts {
            let Some(&[policy, known]) = self.applied.hosts.get(&address) else { continue };
            // On another port it may listen still.
            let listens = self.applied.listeners.range((address, 0, 0)..=(address, u16::MAX, u8::MAX)).next().is_some();
            let left = known & !(if listens { kinds & !BACKEND } else { kinds });
            let host = (left != 0).then_some([policy, left]);
            set(&mut self.hosts, address, host)?;
            match host {
                Some(host) => self.applied.hosts.insert(address, host),
                None => self.applied.hosts.remove(&address),
            };
        }
        for &listener in &less.listeners {
            self.set_listener(listener, false)?;
        }
        for &(policy, net) in less.cidrs.keys() {
            self.set_cidr(policy, net, None)?;
            self.applied.cidrs.remove(&(policy, net));
        }
        self.is_unsure = false;
        Ok(())
    }

    fn change(&mut self, old: &Entries, wanted: &Entries) -> Result<(), SteeringError> {
        let anew = self.is_unsure;
        for (&(policy, net), &translated) in difference(&wanted.cidrs, &old.cidrs, anew) {
            self.set_cidr(policy, net, Some(translated))?;
        }
        for &listener in wanted.listeners.iter().filter(|it| anew || !old.listeners.contains(it)) {
            self.set_listener(listener, true)?;
        }
        for (&address, &[policy, kinds]) in difference(&wanted.hosts, &old.hosts, anew) {
            let [old_policy, old_kinds] = old.hosts.get(&address).copied().unwrap_or_default();
            let policy = if kinds & ENDPOINT == 0 { old_policy } else { policy };
            set(&mut self.hosts, address, Some([policy, kinds | old_kinds]))?;
        }
        for (&address, &[_, kinds]) in &old.hosts {
            match wanted.hosts.get(&address) {
                Some(&host @ [_, stays]) if kinds & !stays != 0 => set(&mut self.hosts, address, Some(host))?,
                Some(_) => {}
                None => set(&mut self.hosts, address, None)?,
            }
        }
        for &listener in old.listeners.difference(&wanted.listeners) {
            self.set_listener(listener, false)?;
        }
        for &(policy, net) in old.cidrs.keys().filter(|key| !wanted.cidrs.contains_key(key)) {
            self.set_cidr(policy, net, None)?;
        }
        Ok(())
    }

    /// What the program has done with packets.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn outcomes(&self) -> Result<Outcomes, SteeringError> {
        let read = |index: u32| {
            let values =
                self.outcomes.get(&index, 0).map_err(|source| SteeringError::Table { table: "outcomes", source })?;
            Ok::<u64, SteeringError>(values.iter().sum())
        };
        Ok(Outcomes { passed: read(0)?, captured: read(1)?, no_socket: read(2)?, guarded: read(3)? })
    }

    /// Whether the program, as it is in the kernel now, captures a frame that comes in on the first queue of an interface, by its kernel's
    /// number. The kernel runs it for this one frame, which goes nowhere; the program's own outcomes count it.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn captures(&mut self, frame: &[u8], ifindex: u32) -> Result<bool, SteeringError> {
        let end = u32::try_from(frame.len()).unwrap_or(u32::MAX);
        // `struct xdp_md` of linux/bpf.h: data, data_end, data_meta, ingress_ifindex, rx_queue_index, egress_ifindex.
        let context: Vec<u8> = [0, end, 0, ifindex, 0, 0].iter().flat_map(|word| word.to_ne_bytes()).collect();
        let options = TestRunOptions { data_in: Some(frame), ctx_in: Some(&context), ..TestRunOptions::default() };
        let outcome = self.program_mut()?.test_run(options).map_err(SteeringError::Verify)?;
        Ok(outcome.return_value != XDP_PASS)
    }

    /// The kernel's number of the loaded program.
    pub(crate) fn program_id(&self) -> u32 {
        self.id
    }

    /// The second line (`guard.rs`), loaded when it is first asked for.
    pub(crate) fn guard_fd(&mut self) -> Result<BorrowedFd<'_>, SteeringError> {
        let program = self.program.program_mut(GUARD).ok_or(SteeringError::NoSuchPart(GUARD))?;
        let guard: &mut SchedClassifier = program.try_into().map_err(SteeringError::Verify)?;
        if guard.fd().is_err() {
            guard.load().map_err(SteeringError::Verify)?;
        }
        guard.fd().map(AsFd::as_fd).map_err(SteeringError::Verify)
    }

    /// The loaded program.
    pub(crate) fn program_fd(&self) -> Result<BorrowedFd<'_>, SteeringError> {
        let program: &Xdp = self
            .program
            .program(NAME)
            .ok_or(SteeringError::NoSuchPart(NAME))?
            .try_into()
            .map_err(SteeringError::Verify)?;
        program.fd().map(AsFd::as_fd).map_err(SteeringError::Verify)
    }

    /// The loaded program, to attach it by a link that dies with the process.
    pub(crate) fn program_mut(&mut self) -> Result<&mut Xdp, SteeringError> {
        let program = self.program.program_mut(NAME).ok_or(SteeringError::NoSuchPart(NAME))?;
        program.try_into().map_err(SteeringError::Verify)
    }

    fn set_listener(&mut self, (address, port, protocol): Listener, is_there: bool) -> Result<(), SteeringError> {
        // The port as packets have it, the protocol as a number of 16 bits.
        let [high, low] = port.to_be_bytes();
        let [first, second] = u16::from(protocol).to_ne_bytes();
        let result = match address {
            IpAddr::V4(v4) => {
                let [a, b, c, d] = v4.octets();
                let key = [a, b, c, d, high, low, first, second];
                let table = &mut self.listeners.0;
                if is_there { table.insert(key, 1, 0) } else { forget_missing(table.remove(&key)) }
            }
            IpAddr::V6(v6) => {
                let mut key = Listener6::default();
                key[..16].copy_from_slice(&v6.octets());
                key[16..20].copy_from_slice(&[high, low, first, second]);
                let table = &mut self.listeners.1;
                if is_there { table.insert(key, 1, 0) } else { forget_missing(table.remove(&key)) }
            }
        };
        result.map_err(|source| SteeringError::Table { table: "listeners", source })
    }

    fn set_cidr(&mut self, policy: u32, net: IpNet, value: Option<bool>) -> Result<(), SteeringError> {
        let value = value.map(|translated| [u8::from(translated), net.prefix_len()]);
        let policy = policy.to_ne_bytes();
        let length = 32 + u32::from(net.prefix_len());
        let result = match net {
            IpNet::V4(net) => {
                let mut data = Cidr4::default();
                data[..4].copy_from_slice(&policy);
                data[4..].copy_from_slice(&net.network().octets());
                let key = Key::new(length, data);
                match value {
                    Some(value) => self.cidrs.0.insert(&key, value, 0),
                    None => forget_missing(self.cidrs.0.remove(&key)),
                }
            }
            IpNet::V6(net) => {
                let mut data = Cidr6::default();
                data[..4].copy_from_slice(&policy);
                data[4..].copy_from_slice(&net.network().octets());
                let key = Key::new(length, data);
                match value {
                    Some(value) => self.cidrs.1.insert(&key, value, 0),
                    None => forget_missing(self.cidrs.1.remove(&key)),
                }
            }
        };
        result.map_err(|source| SteeringError::Table { table: "cidrs", source })
    }
}

fn take<T: TryFrom<Map, Error = MapError>>(program: &mut Ebpf, table: &'static str) -> Result<T, SteeringError> {
    let map = program.take_map(table).ok_or(SteeringError::NoSuchPart(table))?;
    map.try_into().map_err(|source| SteeringError::Table { table, source })
}

fn set((v4, v6): &mut Hosts, address: IpAddr, host: Option<Host>) -> Result<(), SteeringError> {
    let result = match (address, host) {
        (IpAddr::V4(address), Some(host)) => v4.insert(address.octets(), host, 0),
        (IpAddr::V6(address), Some(host)) => v6.insert(address.octets(), host, 0),
        (IpAddr::V4(address), None) => forget_missing(v4.remove(&Ipv4Addr::octets(&address))),
        (IpAddr::V6(address), None) => forget_missing(v6.remove(&Ipv6Addr::octets(&address))),
    };
    result.map_err(|source| SteeringError::Table { table: "hosts", source })
}

/// What the program's tables hold.
#[derive(Debug, Default)]
struct Entries {
    hosts: BTreeMap<IpAddr, Host>,
    listeners: BTreeSet<Listener>,
    cidrs: BTreeMap<(u32, IpNet), bool>,
}

impl Entries {
    fn of(tables: SteeringTables) -> Self {
        let mut hosts: BTreeMap<IpAddr, Host> =
            tables.endpoints.into_iter().map(|(address, policy)| (address, [policy, ENDPOINT])).collect();
        for (addresses, kind) in [(tables.vips, VIP), (tables.locals, LOCAL)] {
            for address in addresses {
                hosts.entry(address).or_default()[1] |= kind;
            }
        }
        for (address, ..) in &tables.listeners {
            hosts.entry(*address).or_default()[1] |= BACKEND;
        }
        let mut listeners = tables.listeners;
        for (address, port) in tables.tunnels {
            hosts.entry(address).or_default()[1] |= TUNNEL;
            listeners.insert((address, port, UDP));
        }
        Self { hosts, listeners, cidrs: tables.cidrs }
    }
}

/// Taking away what isn't there is no error: an earlier change may have failed half-way.
fn forget_missing(result: Result<(), MapError>) -> Result<(), MapError> {
    match result {
        Err(MapError::SyscallError(error)) if error.io_error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        result => result,
    }
}

/// What has to be written: what differs, or all of it.
fn difference<'a, K: Ord, V: PartialEq>(
    wanted: &'a BTreeMap<K, V>,
    old: &'a BTreeMap<K, V>,
    all: bool,
) -> impl Iterator<Item = (&'a K, &'a V)> {
    wanted.iter().filter(move |(key, value)| all || old.get(key) != Some(value))
}

#[cfg(test)]
mod tests;
