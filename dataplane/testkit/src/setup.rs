//! Sizes and options of a gateway under test.

use std::net::SocketAddr;
use std::path::PathBuf;

use vipgate_dataplane::flow::tuple::HashKey;
use vipgate_dataplane::ports::PortRange;
use vipgate_dataplane::replication::queue::FirstRecord;
use vipgate_dataplane::session::Sessions;
use vipgate_dataplane::session::persistence::Identity;
use vipgate_dataplane::session::timeout::Timeouts;
use vipgate_dataplane::stage::context::SessionRules;
use vipgate_dataplane::worker::builder::{SESSIONS_PER_RESERVED, SessionTableRequest, TableSizes, WorkersConfig};
use vipgate_mem::{Region, StorageError};

/// Sizes and options of a gateway under test.
#[derive(Debug)]
pub struct Setup {
    /// Number of workers.
    pub workers: u8,
    /// Session capacity of each worker.
    pub capacity: u32,
    /// Sessions of the capacity reserved for holders below their fair share; `None`: the default.
    pub reserve: Option<u32>,
    /// Range of SNAT ports.
    pub range: PortRange,
    /// Idle timeouts of sessions.
    pub timeouts: Timeouts,
    /// Frames of each worker's device.
    pub frames: usize,
    /// MSS clamp.
    pub mss: Option<u16>,
    /// Whether clients receive a reset or ICMP error where no Service or backend is.
    pub reject: bool,
    /// Unconfirmed sessions per VIP.
    pub embryonic: u32,
    /// Whether only a SYN or INIT opens a connection.
    pub require_syn: bool,
    /// The gateway's own VXLAN address in the overlay network.
    pub overlay: Option<SocketAddr>,
    /// When sessions are first replicated.
    pub first_record: FirstRecord,
    /// Persistent session tables: one file per worker, this name with the worker's number as its extension.
    pub state: Option<PathBuf>,
}

impl Default for Setup {
    fn default() -> Self {
        let timeouts =
            Timeouts { tcp_established: 30_000, tcp_transitory: 4_000, udp: 5_000, icmp: 3_000, quarantine: 2_000 };
        Self {
            workers: 1,
            capacity: 4096,
            reserve: None,
            range: PortRange::default(),
            timeouts,
            frames: 512,
            mss: None,
            reject: false,
            embryonic: 1024,
            require_syn: true,
            overlay: None,
            first_record: FirstRecord::AtAge(100),
            state: None,
        }
    }
}

impl Setup {
    pub(crate) fn config(&self) -> WorkersConfig {
        WorkersConfig {
            workers: self.workers,
            sizes: TableSizes {
                sessions: self.capacity,
                reserve: self.reserve.unwrap_or(self.capacity / SESSIONS_PER_RESERVED),
                embryonic_queue: self.capacity,
                embryonic_per_vip: self.embryonic,
                datagrams: 64,
                queued_fragments: 32,
                affinity_clients: 4096,
                directory_flows: (2 * self.capacity as usize * usize::from(self.workers)).max(4096),
            },
            ports: self.range,
            timeouts: self.timeouts,
            fragment_timeout: 2_000,
            first_record: self.first_record,
            rules: SessionRules {
                require_syn: self.require_syn,
                cookie_key: HashKey::new([1, 3, 5, 7]),
                reject_no_service: self.reject,
                reject_no_backend: self.reject,
                mss_clamp: self.mss,
            },
        }
    }

    /// Opens a worker's session table, and restores the sessions of the previous process.
    pub(crate) fn open_sessions(&self, mut request: SessionTableRequest<'_>) -> Result<Sessions, StorageError> {
        let Some(path) = &self.state else { return request.in_memory() };
        let worker = request.restorer.worker.0;
        let region = Region::open(&path.with_extension(worker.to_string()))?;
        let (workers, capacity) = (self.workers.into(), request.capacity);
        let identity = Identity { worker: worker.into(), workers, capacity, boot: [1; 16] };
        let (mut sessions, _) = Sessions::in_region(region, identity, request.timeouts, request.key)?;
        sessions.restore(request.now, &mut request.restorer);
        Ok(sessions)
    }
}

/// The key of a worker's tables.
pub(crate) fn worker_key(worker: u8) -> HashKey {
    let last = 0x632b_e593_8a41_7d6f + u64::from(worker);
    HashKey::new([0x9e37_79b9_7f4a_7c15, 0xd1b5_4a32_d192_ed03, 0xaef1_7502_108e_f2d9, last])
}
