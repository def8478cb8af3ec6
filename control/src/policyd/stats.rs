//! Statistics of the policy server, exported as Prometheus metrics.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// A counter: only ever increases.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    pub fn increment(&self) {
        self.0.fetch_add(1, Relaxed);
    }

    /// The current value.
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// Counters that are updated as events happen.
#[derive(Debug, Default)]
pub struct Stats {
    /// Responses sent to gateways.
    pub responses: Counter,
    /// Responses that gateways acknowledged (ACK).
    pub acks: Counter,
    /// Responses that gateways rejected (NACK).
    pub nacks: Counter,
    /// Connections rejected for a missing or invalid client certificate.
    pub tls_rejected: Counter,
    /// Streams rejected because the certificate or token is another gateway's or node's, or a token is that of no gateway
    /// of the policy.
    pub certificate_mismatches: Counter,
    /// Streams rejected because a live process already uses the gateway's name.
    pub name_conflicts: Counter,
    /// Streams rejected because they claim a process without its secret.
    pub invalid_secrets: Counter,
    /// Commands (status, cloud, accept-empty) denied to unauthorized clients.
    pub commands_denied: Counter,
    pub publications: Counter,
    /// Reads of the policy source and change notifications from it.
    pub source_updates: Counter,
    /// Gateways that lost active status without a drain: heartbeats timed out, or another process took the name.
    pub lease_expiries: Counter,
    /// Drains refused because no other gateway could take over.
    pub drains_refused: Counter,
    /// Heartbeats rejected because another process has the name.
    pub rejected_heartbeats: Counter,
    /// Duration of the last compilation, microseconds.
    pub compile_us: AtomicU64,
}
