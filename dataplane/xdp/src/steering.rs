//! The steering program and its BPF maps, which define the captured traffic. Loaded once for all interfaces; the maps
//! are filled before the program is attached, and updated incrementally on policy changes.

mod cluster_prefixes;
mod error;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, BorrowedFd};

use aya::maps::lpm_trie::Key;
use aya::maps::{Array, HashMap, LpmTrie, Map, MapData, MapError, PerCpuArray, XskMap};
use aya::programs::{ProgramError, SchedClassifier, TestRun, TestRunOptions, Xdp};
use aya::{Ebpf, EbpfLoader};
use ipnet::IpNet;
use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::io::frame_layout::FrameLayout;

use crate::guard::GUARD_NAME;
use crate::program::PROGRAM_NAME;
use crate::steering::cluster_prefixes::ClusterPrefixes;
pub use crate::steering::error::SteeringError;
pub(crate) use crate::steering::error::error_chain;

static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/steer.bpf.o"));
/// The same for packets in several buffers.
static MULTI_BUFFER_OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/steer_frags.bpf.o"));

/// Return code for packets that aren't captured (linux/bpf.h).
const XDP_PASS: u32 = 2;

/// Maximum number of queues per interface.
pub const MAX_QUEUES: u32 = 64;

/// The captured traffic.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SteeringTables {
    /// Covered pods, with the ID of their policy.
    pub endpoints: BTreeMap<IpAddr, u32>,
    /// VIPs.
    pub vips: BTreeSet<IpAddr>,
    /// Private addresses of VIPs in a cloud. One may be a local address, too: what resolves and keeps it is the kernel's.
    pub private_addresses: BTreeSet<IpAddr>,
    /// Listening addresses of Services' backends.
    pub listeners: BTreeSet<Listener>,
    /// Addresses of the gateway's kernel: packets from pods to them are not captured.
    pub local_addresses: BTreeSet<IpAddr>,
    /// Tunnel endpoints: an address of this gateway, and a UDP port.
    pub tunnels: BTreeSet<(IpAddr, u16)>,
    /// Destinations by policy, and whether they are translated. Longest prefix match; without a match, not translated.
    pub policy_cidrs: BTreeMap<(u32, IpNet), bool>,
    /// Pod prefixes: packets from them on inside interfaces to destinations outside of the cluster are captured even if
    /// no policy covers them.
    pub pod_cidrs: BTreeSet<IpNet>,
    /// Prefixes in the cluster: destinations in them are translated only by policy prefixes of at least the same
    /// length.
    pub cluster_cidrs: BTreeSet<IpNet>,
}

/// Listening address of a backend: address, port, IP protocol number.
pub type Listener = (IpAddr, u16, u8);

/// Packet counters of the program since it was loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcomes {
    /// Passed to the kernel.
    pub passed: u64,
    /// Redirected to a socket.
    pub captured: u64,
    /// Captured, but dropped because there is no socket for the queue.
    pub no_socket: u64,
    /// Dropped by the tc guard while the program was detached.
    pub guarded: u64,
}

/// An IPv6 address as map key.
type V6Key = [u8; 16];
/// Map value of an address: policy ID if it is an endpoint, and its roles as bits.
type Host = [u32; 2];
const VIP: u32 = 1;
const ENDPOINT: u32 = 2;
const LOCAL: u32 = 4;
const BACKEND: u32 = 8;
const TUNNEL: u32 = 16;
const PRIVATE: u32 = 32;
/// IP protocol of tunnels.
const UDP: u8 = 17;
/// Map keys of listeners: address, port, protocol.
type Listener4 = [u8; 8];
type Listener6 = [u8; 24];
/// One map per address family.
type Hosts = (HashMap<MapData, [u8; 4], Host>, HashMap<MapData, V6Key, Host>);
/// Map keys of destinations: policy ID and address, after the prefix length that [`Key`] adds.
type Cidr4 = [u8; 8];
type Cidr6 = [u8; 20];
/// Map value of a prefix: flag and prefix length.
type PrefixValue = [u8; 2];
/// Bits of the map `flags`.
const CLOSED: u32 = 1;
const UNCOVERED: u32 = 2;

/// The loaded program and its maps.
pub struct Steering {
    program: Ebpf,
    /// Program ID.
    id: u32,
    interfaces: Array<MapData, u32>,
    inside_flags: Array<MapData, u32>,
    sockets: XskMap<MapData>,
    flags: Array<MapData, u32>,
    is_closed: bool,
    hosts: Hosts,
    listeners: (HashMap<MapData, Listener4, u8>, HashMap<MapData, Listener6, u8>),
    cidrs: (LpmTrie<MapData, Cidr4, PrefixValue>, LpmTrie<MapData, Cidr6, PrefixValue>),
    cluster: ClusterPrefixes,
    outcomes: PerCpuArray<MapData, u64>,
    /// All keys in the maps, with their values unless `needs_full_apply`.
    applied: Entries,
    /// An update failed: values may differ from `applied`, and entries may be missing.
    needs_full_apply: bool,
}

impl std::fmt::Debug for Steering {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Steering").field("applied", &self.applied).finish_non_exhaustive()
    }
}

impl Steering {
    /// Loads the program for these packet buffers, with empty maps and not attached.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn load(frames: FrameLayout) -> Result<Self, SteeringError> {
        let (object, refused): (_, fn(ProgramError) -> SteeringError) = match frames {
            FrameLayout::Standard | FrameLayout::Page => (OBJECT, SteeringError::Verify),
            FrameLayout::MultiBuffer => (MULTI_BUFFER_OBJECT, SteeringError::MultiBuffer),
        };
        let mut program = EbpfLoader::new().load(object).map_err(SteeringError::Load)?;
        let steer: &mut Xdp = program
            .program_mut(PROGRAM_NAME)
            .ok_or(SteeringError::NoSuchPart(PROGRAM_NAME))?
            .try_into()
            .map_err(SteeringError::Verify)?;
        steer.load().map_err(refused)?;
        let id = steer.info().map_err(SteeringError::Verify)?.id();
        Ok(Self {
            id,
            interfaces: take_map(&mut program, "interfaces")?,
            inside_flags: take_map(&mut program, "inside_flags")?,
            sockets: take_map(&mut program, "sockets")?,
            flags: take_map(&mut program, "flags")?,
            is_closed: false,
            hosts: (take_map(&mut program, "hosts4")?, take_map(&mut program, "hosts6")?),
            listeners: (take_map(&mut program, "listeners4")?, take_map(&mut program, "listeners6")?),
            cidrs: (take_map(&mut program, "cidrs4")?, take_map(&mut program, "cidrs6")?),
            cluster: ClusterPrefixes::new(&mut program)?,
            outcomes: take_map(&mut program, "outcomes")?,
            program,
            applied: Entries::default(),
            needs_full_apply: false,
        })
    }

    /// Sets the ID of an interface, and whether it is an inside interface.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn add_interface(&mut self, ifindex: u32, id: InterfaceId, is_inside: bool) -> Result<(), SteeringError> {
        let error = |table| move |source| SteeringError::Table { table, source };
        self.inside_flags.set(id.0.into(), u32::from(is_inside), 0).map_err(error("inside_flags"))?;
        self.interfaces.set(id.0.into(), ifindex, 0).map_err(error("interfaces"))
    }

    /// Adds the socket of a queue to the XSKMAP.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn set_socket(&mut self, interface: InterfaceId, queue: u32, socket: i32) -> Result<(), SteeringError> {
        let index = u32::from(interface.0) * MAX_QUEUES + queue;
        self.sockets.set(index, socket, 0).map_err(|source| SteeringError::Table { table: "sockets", source })
    }

    /// Closes the program, or opens it again. Closed, while the policy is unknown, it captures all packets but those to
    /// local addresses and with link-local scope.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn set_closed(&mut self, closed: bool) -> Result<(), SteeringError> {
        self.is_closed = closed;
        self.write_flags(!self.cluster.pods.is_empty())
    }

    /// Writes the flags; `uncovered`: whether there are pod prefixes whose uncovered packets are captured.
    fn write_flags(&mut self, uncovered: bool) -> Result<(), SteeringError> {
        let bits = if self.is_closed { CLOSED } else { 0 } | if uncovered { UNCOVERED } else { 0 };
        self.flags.set(0, bits, 0).map_err(|source| SteeringError::Table { table: "flags", source })
    }

    fn set_cluster_prefixes(&mut self, pods: BTreeSet<IpNet>, cluster: BTreeSet<IpNet>) -> Result<(), SteeringError> {
        let uncovered = !pods.is_empty();
        self.cluster.set(pods, cluster)?;
        self.write_flags(uncovered)
    }

    fn add_cluster_prefixes(&mut self, pods: &BTreeSet<IpNet>, cluster: &BTreeSet<IpNet>) -> Result<(), SteeringError> {
        let (pods, cluster) = (&self.cluster.pods | pods, &self.cluster.prefixes | cluster);
        self.set_cluster_prefixes(pods, cluster)
    }

    /// Sets the captured traffic. New entries are added before others are removed, so that traffic captured before and
    /// after the update is captured at any time.
    ///
    /// # Errors
    /// When the kernel refuses; the update is partly applied, and the next call rewrites all entries.
    pub fn apply(&mut self, tables: SteeringTables) -> Result<(), SteeringError> {
        let (pods, cluster) = (tables.pod_cidrs.clone(), tables.cluster_cidrs.clone());
        let target = Entries::of(tables);
        let added = self.add_cluster_prefixes(&pods, &cluster);
        let mut old = std::mem::take(&mut self.applied);
        let result = added.and_then(|()| self.update(&old, &target));
        self.needs_full_apply = result.is_err();
        self.applied = if self.needs_full_apply {
            old.hosts.extend(target.hosts);
            old.cidrs.extend(target.cidrs);
            old.listeners.extend(target.listeners);
            old
        } else {
            target
        };
        result.and_then(|()| self.set_cluster_prefixes(pods, cluster))
    }

    /// Whether an update failed, after which the captured traffic is undefined until [`Self::apply`] succeeds.
    pub fn needs_full_apply(&self) -> bool {
        self.needs_full_apply || self.cluster.needs_full_write
    }

    /// Captures additional traffic. Addresses keep their other roles; the policy of an endpoint is replaced.
    ///
    /// # Errors
    /// When the kernel refuses; some of it may be captured.
    pub fn extend(&mut self, additions: SteeringTables) -> Result<(), SteeringError> {
        self.add_cluster_prefixes(&additions.pod_cidrs, &additions.cluster_cidrs)?;
        let additions = Entries::of(additions);
        self.needs_full_apply = true;
        for (&(policy, net), &translated) in &additions.cidrs {
            self.set_cidr(policy, net, Some(translated))?;
            self.applied.cidrs.insert((policy, net), translated);
        }
        for &listener in &additions.listeners {
            self.set_listener(listener, true)?;
            self.applied.listeners.insert(listener);
        }
        for (&address, &[policy, roles]) in &additions.hosts {
            let host = self.applied.hosts.entry(address).or_default();
            let policy = if roles & ENDPOINT == 0 { host[0] } else { policy };
            *host = [policy, host[1] | roles];
            set(&mut self.hosts, address, Some(*host))?;
        }
        self.needs_full_apply = false;
        Ok(())
    }

    /// Stops capturing some traffic: removes the given roles of addresses, and the given prefixes.
    ///
    /// # Errors
    /// When the kernel refuses; some of it may still be captured.
    pub fn reduce(&mut self, removals: SteeringTables) -> Result<(), SteeringError> {
        let (pods, cluster) =
            (&self.cluster.pods - &removals.pod_cidrs, &self.cluster.prefixes - &removals.cluster_cidrs);
        self.set_cluster_prefixes(pods, cluster)?;
        let removals = Entries::of(removals);
        self.needs_full_apply = true;
        for listener in &removals.listeners {
            self.applied.listeners.remove(listener);
        }
        for (&address, &[_, removed]) in &removals.hosts {
            let Some(&[policy, roles]) = self.applied.hosts.get(&address) else { continue };
            // A backend keeps its role while it listens on another port.
            let listens = self.applied.listeners.range((address, 0, 0)..=(address, u16::MAX, u8::MAX)).next().is_some();
            let remaining = roles & !(if listens { removed & !BACKEND } else { removed });
            let host = (remaining != 0).then_some([policy, remaining]);
            set(&mut self.hosts, address, host)?;
            match host {
                Some(host) => self.applied.hosts.insert(address, host),
                None => self.applied.hosts.remove(&address),
            };
        }
        for &listener in &removals.listeners {
            self.set_listener(listener, false)?;
        }
        for &(policy, net) in removals.cidrs.keys() {
            self.set_cidr(policy, net, None)?;
            self.applied.cidrs.remove(&(policy, net));
        }
        self.needs_full_apply = false;
        Ok(())
    }

    fn update(&mut self, old: &Entries, target: &Entries) -> Result<(), SteeringError> {
        let write_all = self.needs_full_apply;
        for (&(policy, net), &translated) in changed_entries(&target.cidrs, &old.cidrs, write_all) {
            self.set_cidr(policy, net, Some(translated))?;
        }
        for &listener in target.listeners.iter().filter(|it| write_all || !old.listeners.contains(it)) {
            self.set_listener(listener, true)?;
        }
        for (&address, &[policy, roles]) in changed_entries(&target.hosts, &old.hosts, write_all) {
            let [old_policy, old_roles] = old.hosts.get(&address).copied().unwrap_or_default();
            let policy = if roles & ENDPOINT == 0 { old_policy } else { policy };
            set(&mut self.hosts, address, Some([policy, roles | old_roles]))?;
        }
        for (&address, &[_, old_roles]) in &old.hosts {
            match target.hosts.get(&address) {
                Some(&host @ [_, roles]) if old_roles & !roles != 0 => set(&mut self.hosts, address, Some(host))?,
                Some(_) => {}
                None => set(&mut self.hosts, address, None)?,
            }
        }
        for &listener in old.listeners.difference(&target.listeners) {
            self.set_listener(listener, false)?;
        }
        for &(policy, net) in old.cidrs.keys().filter(|key| !target.cidrs.contains_key(key)) {
            self.set_cidr(policy, net, None)?;
        }
        Ok(())
    }

    /// Reads the packet counters.
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

    /// Whether the program captures a frame received on queue 0 of an interface. Runs the program in the kernel
    /// (BPF_PROG_TEST_RUN); the frame isn't forwarded, but counted in the outcomes.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn captures(&mut self, frame: &[u8], ifindex: u32) -> Result<bool, SteeringError> {
        let end = u32::try_from(frame.len()).unwrap_or(u32::MAX);
        // `struct xdp_md` of linux/bpf.h: data, data_end, data_meta, ingress_ifindex, rx_queue_index, egress_ifindex.
        let context: Vec<u8> = [0, end, 0, ifindex, 0, 0].iter().flat_map(|word| word.to_ne_bytes()).collect();
        let options = TestRunOptions { data_in: Some(frame), ctx_in: Some(&context), ..TestRunOptions::default() };
        let result = self.program_mut()?.test_run(options).map_err(SteeringError::Verify)?;
        Ok(result.return_value != XDP_PASS)
    }

    /// ID of the loaded program.
    pub(crate) fn program_id(&self) -> u32 {
        self.id
    }

    /// The tc guard (`guard.rs`), loaded on first use.
    pub(crate) fn guard_fd(&mut self) -> Result<BorrowedFd<'_>, SteeringError> {
        let program = self.program.program_mut(GUARD_NAME).ok_or(SteeringError::NoSuchPart(GUARD_NAME))?;
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
            .program(PROGRAM_NAME)
            .ok_or(SteeringError::NoSuchPart(PROGRAM_NAME))?
            .try_into()
            .map_err(SteeringError::Verify)?;
        program.fd().map(AsFd::as_fd).map_err(SteeringError::Verify)
    }

    /// The loaded program, for attachment by a BPF link.
    pub(crate) fn program_mut(&mut self) -> Result<&mut Xdp, SteeringError> {
        let program = self.program.program_mut(PROGRAM_NAME).ok_or(SteeringError::NoSuchPart(PROGRAM_NAME))?;
        program.try_into().map_err(SteeringError::Verify)
    }

    fn set_listener(&mut self, (address, port, protocol): Listener, is_present: bool) -> Result<(), SteeringError> {
        // Port in network order, protocol as u16 in host order.
        let [high, low] = port.to_be_bytes();
        let [first, second] = u16::from(protocol).to_ne_bytes();
        let result = match address {
            IpAddr::V4(v4) => {
                let [a, b, c, d] = v4.octets();
                let key = [a, b, c, d, high, low, first, second];
                let map = &mut self.listeners.0;
                if is_present { map.insert(key, 1, 0) } else { ignore_missing(map.remove(&key)) }
            }
            IpAddr::V6(v6) => {
                let mut key = Listener6::default();
                key[..16].copy_from_slice(&v6.octets());
                key[16..20].copy_from_slice(&[high, low, first, second]);
                let map = &mut self.listeners.1;
                if is_present { map.insert(key, 1, 0) } else { ignore_missing(map.remove(&key)) }
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
                    None => ignore_missing(self.cidrs.0.remove(&key)),
                }
            }
            IpNet::V6(net) => {
                let mut data = Cidr6::default();
                data[..4].copy_from_slice(&policy);
                data[4..].copy_from_slice(&net.network().octets());
                let key = Key::new(length, data);
                match value {
                    Some(value) => self.cidrs.1.insert(&key, value, 0),
                    None => ignore_missing(self.cidrs.1.remove(&key)),
                }
            }
        };
        result.map_err(|source| SteeringError::Table { table: "cidrs", source })
    }
}

fn take_map<T: TryFrom<Map, Error = MapError>>(program: &mut Ebpf, table: &'static str) -> Result<T, SteeringError> {
    let map = program.take_map(table).ok_or(SteeringError::NoSuchPart(table))?;
    map.try_into().map_err(|source| SteeringError::Table { table, source })
}

fn set((v4, v6): &mut Hosts, address: IpAddr, host: Option<Host>) -> Result<(), SteeringError> {
    let result = match (address, host) {
        (IpAddr::V4(address), Some(host)) => v4.insert(address.octets(), host, 0),
        (IpAddr::V6(address), Some(host)) => v6.insert(address.octets(), host, 0),
        (IpAddr::V4(address), None) => ignore_missing(v4.remove(&Ipv4Addr::octets(&address))),
        (IpAddr::V6(address), None) => ignore_missing(v6.remove(&Ipv6Addr::octets(&address))),
    };
    result.map_err(|source| SteeringError::Table { table: "hosts", source })
}

/// Contents of the program's maps.
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
        let of_roles = [(tables.vips, VIP), (tables.private_addresses, PRIVATE), (tables.local_addresses, LOCAL)];
        for (addresses, role) in of_roles {
            for address in addresses {
                hosts.entry(address).or_default()[1] |= role;
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
        Self { hosts, listeners, cidrs: tables.policy_cidrs }
    }
}

/// Ignores the removal of a missing entry: an earlier update may have failed.
fn ignore_missing(result: Result<(), MapError>) -> Result<(), MapError> {
    match result {
        Err(MapError::SyscallError(error)) if error.io_error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        result => result,
    }
}

/// Entries to write: those that differ, or all.
fn changed_entries<'a, K: Ord, V: PartialEq>(
    target: &'a BTreeMap<K, V>,
    old: &'a BTreeMap<K, V>,
    all: bool,
) -> impl Iterator<Item = (&'a K, &'a V)> {
    target.iter().filter(move |(key, value)| all || old.get(key) != Some(value))
}

#[cfg(test)]
mod tests;
