//! NAT log: which endpoint of which tenant could use which ports of a VIP, and when. Exported as IPFIX (RFC 8158) to a
//! collector: a record for each endpoint and VIP when policy or the owners of shards change, and optionally one for
//! each created or deleted session.
//!
//! `port_blocks` derives the records from policy, `ipfix` encodes them, `exporter` sends them. An unreachable collector
//! costs the gateway a bounded queue only; when it is reachable again, it receives all port blocks of that time.

mod exporter;
mod ipfix;
mod port_blocks;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::SystemTime;

use arc_swap::ArcSwapOption;
use tokio::sync::mpsc;
use vipgate_common::Task;
use vipgate_dataplane::observe::session_log::SessionEventQueue;
use vipgate_dataplane::policy::compiled::Policy;

use crate::config::NatLog as Settings;

/// Length of the policy queue. If it overflows, the exporter skips policies.
const MAX_QUEUED_POLICIES: usize = 64;
/// Length of the session queue: 0.3 s at 100 000 sessions a second.
pub const SESSION_QUEUE_CAPACITY: usize = 1 << 15;

/// Export statistics.
#[derive(Debug, Default)]
pub struct ExportStats {
    sent: AtomicU64,
    lost: AtomicU64,
    /// Why the collector is unreachable; `None` while no error is known.
    error: ArcSwapOption<String>,
}

impl ExportStats {
    /// Records written to the socket.
    pub fn sent(&self) -> u64 {
        self.sent.load(Relaxed)
    }

    /// Records lost: the queue was full while the collector was unreachable, or the connection failed while sending.
    pub fn lost(&self) -> u64 {
        self.lost.load(Relaxed)
    }

    /// Why the collector is unreachable.
    pub fn error(&self) -> Option<Arc<String>> {
        self.error.load_full()
    }
}

/// The NAT log of a gateway.
#[derive(Debug)]
pub(crate) struct NatLog {
    policies: mpsc::Sender<(SystemTime, Arc<Policy>)>,
    task: Task,
}

/// Status of the NAT log.
#[derive(Debug)]
pub struct NatLogStatus {
    /// Transport and address of the collector, for display.
    pub collector: String,
    /// Whether sessions are logged, too.
    pub sessions: bool,
    /// Export statistics.
    pub stats: ExportStats,
}

impl NatLogStatus {
    /// The initial status for these settings.
    pub fn new(settings: &Settings) -> Self {
        let collector = format!("{} {}", settings.transport.name(), settings.collector);
        Self { collector, sessions: settings.sessions, stats: ExportStats::default() }
    }
}

impl NatLog {
    /// Starts the export; `ports` are the first and last SNAT port. Returns the queue for session events, if sessions
    /// are logged.
    pub(crate) fn start(
        settings: &Settings,
        ports: (u16, u16),
        status: Arc<NatLogStatus>,
    ) -> (Self, Option<Arc<SessionEventQueue>>) {
        let (sender, receiver) = mpsc::channel(MAX_QUEUED_POLICIES);
        let queue = settings.sessions.then(|| Arc::new(SessionEventQueue::new(SESSION_QUEUE_CAPACITY)));
        let exporter = exporter::Exporter::new(settings, ports, status, queue.clone());
        (Self { policies: sender, task: Task::spawn(exporter.run(receiver)) }, queue)
    }

    /// A policy is in force from now on.
    pub(crate) fn set_policy(&self, policy: &Arc<Policy>) {
        // If the queue is full, this policy is skipped.
        let _ = self.policies.try_send((SystemTime::now(), policy.clone()));
    }

    /// Sends the queued records, for at most one second.
    pub(crate) async fn close(log: Option<Self>) {
        let Some(Self { policies, task }) = log else { return };
        drop(policies);
        let _ = tokio::time::timeout(std::time::Duration::from_secs(1), task).await;
    }
}
