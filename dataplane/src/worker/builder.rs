//! Assembly of workers: the tables of each, and what all of them share, from sizes, keys and the time that the caller
//! passes.
//!
//! ```text
//!   WorkersConfig, SharedKeys -> WorkerBuilder --build(WorkerInputs, time)--> WorkerParts -> Worker::new
//!                                     ^ once per gateway       ^ once per worker
//! ```

use std::sync::Arc;

use crossbeam::channel::Receiver;
use vipgate_mem::{MemoryError, StorageError};

use super::WorkerParts;
use super::command::Command;
use super::neighbor_queue::{NeighborQueue, ResolutionRequests};
use crate::flow::time::Tick;
use crate::flow::tuple::HashKey;
use crate::io::handoff::WorkerLinks;
use crate::observe::Observer;
use crate::policy::compiled::Policy;
use crate::policy::publish::Publisher;
use crate::ports::PortRange;
use crate::ports::allocator::Allocator;
use crate::reassembly::VirtualReassembly;
use crate::replication::lease::Lease;
use crate::replication::queue::{FirstRecord, ReplicationQueue};
use crate::replication::sender::ReplicationSender;
use crate::session::Sessions;
use crate::session::affinity::AffinityTable;
use crate::session::embryonic::Embryonic;
use crate::session::eviction::Eviction;
use crate::session::flow_directory::FlowDirectory;
use crate::session::lending::WorkerShares;
use crate::session::restore::Restorer;
use crate::session::timeout::Timeouts;
use crate::stage::context::{SessionRules, Tables};
use crate::stage::reply_limiter::ReplyLimiter;
use crate::wire::ip_id::IpIdAllocator;

/// Fragmented datagrams that a worker tracks.
const MAX_DATAGRAMS: u32 = 16_384;
/// Fragments of a worker that wait for their first fragment.
const MAX_QUEUED_FRAGMENTS: u32 = 512;
/// Sessions for each entry of the client affinity table.
const SESSIONS_PER_CLIENT: usize = 16;
/// Sessions for each embryonic session that a VIP may have.
const SESSIONS_PER_EMBRYONIC: u32 = 8;
/// Sessions for each one in the reserve.
pub const SESSIONS_PER_RESERVED: u32 = 32;

/// Sizes of the tables: of each worker, except for the last two, which all workers share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableSizes {
    /// Capacity of the session table, sessions.
    pub sessions: u32,
    /// Part of that capacity reserved for holders below their fair share, sessions.
    pub reserve: u32,
    /// Sessions that the queue of embryonic ones is sized for.
    pub embryonic_queue: u32,
    /// Embryonic sessions of a VIP.
    pub embryonic_per_vip: u32,
    /// Fragmented datagrams in virtual reassembly.
    pub datagrams: u32,
    /// Fragments that wait for their first fragment.
    pub queued_fragments: u32,
    /// Clients in the affinity table.
    pub affinity_clients: usize,
    /// Flows in the flow directory, which a single worker doesn't have.
    pub directory_flows: usize,
}

impl TableSizes {
    /// Sizes for `sessions` sessions of that many workers together; `None` if a worker's part exceeds the slot numbers
    /// of its table.
    pub fn for_sessions(sessions: u64, workers: u8) -> Option<Self> {
        let of_worker = u32::try_from(sessions.div_ceil(workers.max(1).into())).ok()?;
        let total = usize::try_from(sessions).unwrap_or(usize::MAX);
        Some(Self {
            sessions: of_worker,
            reserve: of_worker / SESSIONS_PER_RESERVED,
            embryonic_queue: of_worker,
            embryonic_per_vip: of_worker / SESSIONS_PER_EMBRYONIC,
            datagrams: MAX_DATAGRAMS,
            queued_fragments: MAX_QUEUED_FRAGMENTS,
            affinity_clients: total / SESSIONS_PER_CLIENT,
            // Inbound sessions have an entry for each direction.
            directory_flows: total.saturating_mul(2),
        })
    }
}

/// Configuration of all workers of a gateway.
#[derive(Clone, Copy, Debug)]
pub struct WorkersConfig {
    /// Number of workers.
    pub workers: u8,
    /// Sizes of their tables.
    pub sizes: TableSizes,
    /// Range of SNAT ports.
    pub ports: PortRange,
    /// Idle timeouts of sessions.
    pub timeouts: Timeouts,
    /// Timeout of a fragmented datagram, milliseconds.
    pub fragment_timeout: u32,
    /// When a session is first replicated.
    pub first_record: FirstRecord,
    /// Conditions for opening a session.
    pub rules: SessionRules,
}

/// Hash keys of the tables that all workers share.
#[derive(Clone, Copy, Debug)]
pub struct SharedKeys {
    /// Of the affinity table.
    pub affinity: HashKey,
    /// Of the flow directory.
    pub directory: HashKey,
}

impl SharedKeys {
    /// Keys from a source of random ones.
    ///
    /// # Errors
    /// The first error of the source.
    pub fn draw<E>(mut key: impl FnMut() -> Result<HashKey, E>) -> Result<Self, E> {
        Ok(Self { affinity: key()?, directory: key()? })
    }
}

/// Hash keys of the tables of one worker. In a gateway, all differ: what one table reveals says nothing about another.
#[derive(Clone, Copy, Debug)]
pub struct WorkerKeys {
    /// Of the port allocator.
    pub ports: HashKey,
    /// Of the session table, if it is new.
    pub sessions: HashKey,
    /// Of virtual reassembly.
    pub reassembly: HashKey,
    /// Of the IP identifications.
    pub ip_ids: HashKey,
    /// Of the limiter of ICMP errors, resets and replies to health checks.
    pub reply_limiter: HashKey,
}

impl WorkerKeys {
    /// Keys from a source of random ones.
    ///
    /// # Errors
    /// The first error of the source.
    pub fn draw<E>(mut key: impl FnMut() -> Result<HashKey, E>) -> Result<Self, E> {
        let (ports, sessions) = (key()?, key()?);
        Ok(Self { ports, sessions, reassembly: key()?, ip_ids: key()?, reply_limiter: key()? })
    }

    /// One key for all tables: for tests and benchmarks, whose runs must not differ.
    pub fn same(key: HashKey) -> Self {
        Self { ports: key, sessions: key, reassembly: key, ip_ids: key, reply_limiter: key }
    }
}

/// What workers share with control.
#[derive(Clone, Copy, Debug)]
pub struct ControlLinks<'a> {
    /// Publisher of snapshots.
    pub publisher: &'a Publisher,
    /// Requests to resolve neighbors.
    pub neighbor_requests: &'a ResolutionRequests,
    /// The gateway's lease on its ports.
    pub lease: &'a Arc<Lease>,
}

/// What belongs to one worker alone.
#[derive(Debug)]
pub struct WorkerInputs<Io> {
    /// Its device.
    pub io: Io,
    /// Its rings to the other workers; they say which worker it is.
    pub links: WorkerLinks,
    /// Commands from control.
    pub commands: Receiver<Command>,
    /// Takes its replication records.
    pub replication: Arc<ReplicationSender>,
    /// Keys of its tables.
    pub keys: WorkerKeys,
}

/// The session table that a worker needs, and what a restored one takes up.
#[derive(Debug)]
pub struct SessionTableRequest<'a> {
    /// Capacity, sessions.
    pub capacity: u32,
    /// Idle timeouts.
    pub timeouts: Timeouts,
    /// Hash key of a new table.
    pub key: HashKey,
    /// The current time.
    pub now: Tick,
    /// Takes up ports, quotas and directory entries of restored sessions.
    pub restorer: Restorer<'a>,
}

impl SessionTableRequest<'_> {
    /// An empty table in process memory.
    ///
    /// # Errors
    /// If memory for it can't be allocated.
    pub fn in_memory(&self) -> Result<Sessions, StorageError> {
        Sessions::new(self.capacity, self.timeouts, self.key)
    }
}

/// Error of building a worker.
#[derive(Debug, thiserror::Error)]
pub enum BuildError<E> {
    /// Memory for a table other than that of sessions can't be allocated.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The session table can't be opened.
    #[error("{0}")]
    Sessions(E),
}

/// Builds the workers of one gateway.
#[derive(Debug)]
pub struct WorkerBuilder<'a> {
    config: WorkersConfig,
    control: ControlLinks<'a>,
    policy: Arc<Policy>,
    affinity: Arc<AffinityTable>,
    directory: Option<Arc<FlowDirectory>>,
    shares: Option<Arc<WorkerShares>>,
}

impl<'a> WorkerBuilder<'a> {
    /// Builds what all workers share. Stored sessions are restored under the policy in force now.
    pub fn new(config: WorkersConfig, control: ControlLinks<'a>, keys: SharedKeys) -> Self {
        let sizes = &config.sizes;
        let directory = || Arc::new(FlowDirectory::new(sizes.directory_flows, keys.directory));
        Self {
            policy: control.publisher.reader().read().policy.clone(),
            affinity: Arc::new(AffinityTable::new(sizes.affinity_clients, keys.affinity)),
            directory: (config.workers > 1).then(directory),
            shares: (config.workers > 1).then(|| Arc::new(WorkerShares::new(config.workers))),
            config,
            control,
        }
    }

    /// Builds one worker at the time `now`; `open_sessions` opens its session table.
    ///
    /// # Errors
    /// If memory can't be allocated, or with the error of `open_sessions`.
    pub fn build<Io, E>(
        &self,
        inputs: WorkerInputs<Io>,
        now: Tick,
        open_sessions: impl FnOnce(SessionTableRequest<'_>) -> Result<Sessions, E>,
    ) -> Result<WorkerParts<Io>, BuildError<E>> {
        let WorkersConfig { workers, sizes, timeouts, .. } = self.config;
        let WorkerInputs { io, links, commands, replication, keys } = inputs;
        let id = links.worker();
        let mut ports = Allocator::new(id, workers, self.config.ports, keys.ports)?;
        let directory = self.directory.as_deref();
        let affinity = &self.affinity;
        let restorer = Restorer { policy: &self.policy, ports: &mut ports, directory, affinity, worker: id };
        let request = SessionTableRequest { capacity: sizes.sessions, timeouts, key: keys.sessions, now, restorer };
        let mut sessions = open_sessions(request).map_err(BuildError::Sessions)?.with_reserve(sizes.reserve);
        if let Some(shares) = &self.shares {
            sessions = sessions.with_lending(shares.clone(), id);
        }
        let (datagrams, timeout) = (sizes.datagrams, self.config.fragment_timeout);
        let tables = Tables {
            sessions,
            embryonic: Embryonic::new(sizes.embryonic_queue, sizes.embryonic_per_vip),
            eviction: Eviction::default(),
            ports,
            reassembly: VirtualReassembly::new(datagrams, sizes.queued_fragments, timeout, keys.reassembly)?,
            ip_ids: IpIdAllocator::new(id.0, workers, keys.ip_ids),
            reply_limiter: ReplyLimiter::new(keys.reply_limiter, now),
            replication_queue: ReplicationQueue::new(replication, self.config.first_record),
            observer: Observer::default(),
        };
        Ok(WorkerParts {
            id,
            io,
            links,
            affinity: self.affinity.clone(),
            directory: self.directory.clone(),
            tables,
            reader: self.control.publisher.reader(),
            neighbor_queue: NeighborQueue::new(self.control.neighbor_requests.clone()),
            commands,
            counters: Arc::default(),
            rules: self.config.rules,
            lease: self.control.lease.clone(),
        })
    }

    /// Each worker claims its even share of the port blocks of each VIP that restored sessions have left. Call when all
    /// workers are built.
    pub fn claim_even_shares<'w, Io: 'w>(&self, workers: impl IntoIterator<Item = &'w mut WorkerParts<Io>>) {
        for worker in workers {
            self.policy.vips().for_each(|vip| worker.tables.ports.claim_even_share(&vip.ports));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sessions_are_divided_among_the_workers() {
        let sizes = TableSizes::for_sessions(1_000_001, 4).unwrap();
        assert_eq!((sizes.sessions, sizes.reserve, sizes.embryonic_per_vip), (250_001, 7_812, 31_250));
        assert_eq!((sizes.affinity_clients, sizes.directory_flows), (62_500, 2_000_002));
        assert_eq!(TableSizes::for_sessions(1 << 33, 1), None);
        assert!(TableSizes::for_sessions(1 << 33, 4).is_some());
    }

    #[test]
    fn every_table_of_a_worker_has_its_own_key() {
        let mut drawn = 0;
        let mut key = || {
            drawn += 1;
            if drawn > 7 { Err("no more keys") } else { Ok(HashKey::new([drawn; 4])) }
        };
        let shared = SharedKeys::draw(&mut key).unwrap();
        let keys = WorkerKeys::draw(&mut key).unwrap();
        let all = [shared.affinity, shared.directory, keys.ports, keys.sessions, keys.reassembly, keys.ip_ids];
        let mut words: Vec<_> = all.iter().chain([&keys.reply_limiter]).map(|key| key.words()[0]).collect();
        words.sort_unstable();
        assert_eq!(words, [1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(WorkerKeys::draw(key).unwrap_err(), "no more keys");
    }
}
