//! The log of translations: which endpoint of which tenant could have had which ports of a VIP, and when, for whoever must say so
//! later. As IPFIX (RFC 8158) to a collector: a record for each endpoint and VIP when policy or the gateways' shares change, and, where
//! that is asked for, one for each session that begins or ends.
//!
//! `blocks` says what there is to tell of a policy, `ipfix` how it is written, `exporter` sends it. A collector that is away costs the
//! gateway a bounded queue and nothing else; when it is back, it is told anew of all blocks as they are then.

mod blocks;
mod exporter;
mod ipfix;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::SystemTime;

use arc_swap::ArcSwapOption;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use vipgate_dataplane::snapshot::policy::Policy;
use vipgate_dataplane::watch::log::SessionQueue;

use crate::config::NatLog as Settings;

/// Policies that wait for the exporter. Should it be so far behind, it looks at the newest one only.
const POLICIES: usize = 64;
/// Sessions that wait for the exporter: at a hundred thousand a second, a third of a second's.
pub const SESSIONS: usize = 1 << 15;

/// What became of the records.
#[derive(Debug, Default)]
pub struct Figures {
    sent: AtomicU64,
    lost: AtomicU64,
    /// Why the collector can't be reached; `None` while it can, as far as anybody knows.
    error: ArcSwapOption<String>,
}

impl Figures {
    /// Records that were handed to the network.
    pub fn sent(&self) -> u64 {
        self.sent.load(Relaxed)
    }

    /// Records that found no room while the collector was away, or were on their way to it when it went.
    pub fn lost(&self) -> u64 {
        self.lost.load(Relaxed)
    }

    /// Why the collector can't be reached.
    pub fn error(&self) -> Option<Arc<String>> {
        self.error.load_full()
    }
}

/// The log of a gateway.
#[derive(Debug)]
pub(crate) struct NatLog {
    policies: mpsc::Sender<(SystemTime, Arc<Policy>)>,
    task: JoinHandle<()>,
}

/// What others may know of it.
#[derive(Debug)]
pub struct NatLogStatus {
    /// Where it goes, for people.
    pub collector: String,
    /// Whether sessions are told, too.
    pub sessions: bool,
    /// What became of it.
    pub figures: Figures,
}

impl NatLogStatus {
    /// Of a log that goes there.
    pub fn new(settings: &Settings) -> Self {
        let collector = format!("{} {}", settings.transport.name(), settings.collector);
        Self { collector, sessions: settings.sessions, figures: Figures::default() }
    }
}

impl NatLog {
    /// Begins to log; `ports` are the first and the last that the gateway gives out. Returns where workers put sessions, if they shall.
    pub(crate) fn start(
        settings: &Settings,
        ports: (u16, u16),
        status: Arc<NatLogStatus>,
    ) -> (Self, Option<Arc<SessionQueue>>) {
        let (sender, receiver) = mpsc::channel(POLICIES);
        let queue = settings.sessions.then(|| Arc::new(SessionQueue::new(SESSIONS)));
        let exporter = exporter::Exporter::new(settings, ports, status, queue.clone());
        (Self { policies: sender, task: tokio::spawn(exporter.run(receiver)) }, queue)
    }

    /// This policy is in force from now on.
    pub(crate) fn put(&self, policy: &Arc<Policy>) {
        // Full: the exporter is busy with those before, and asks for the newest when it comes to the end.
        let _ = self.policies.try_send((SystemTime::now(), policy.clone()));
    }

    /// Sends what still waits, within a second.
    pub(crate) async fn close(log: Option<Self>) {
        let Some(Self { policies, task }) = log else { return };
        drop(policies);
        let _ = tokio::time::timeout(std::time::Duration::from_secs(1), task).await;
    }
}
