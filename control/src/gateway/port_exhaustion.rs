//! Port exhaustion: logs VIPs that have run out of SNAT ports, as a whole or in a shard.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use vipgate_dataplane::ports::pool::RefusedAllocations;

use crate::admin::ports;
use crate::state::GatewayState;

/// Minimum interval between log messages about one VIP.
const LOG_INTERVAL: Duration = Duration::from_mins(1);
/// Maximum number of VIPs logged by one call.
const MAX_LOGGED: usize = 5;

/// The refusals that were last logged, by VIP, and when.
#[derive(Debug, Default)]
pub(super) struct PortExhaustionLog(BTreeMap<IpAddr, (RefusedAllocations, Instant)>);

impl PortExhaustionLog {
    /// Logs the VIPs that have run out of ports since they were last logged.
    pub(super) fn update(&mut self, state: &GatewayState, now: Instant) {
        let policy = state.compiled.load();
        let mut logged = 0;
        for vip in policy.vips() {
            let refused = vip.ports.pool.refused();
            let is_logged = match self.0.get(&vip.address) {
                None => refused == RefusedAllocations::default(),
                Some((last, at)) => *last == refused || now.saturating_duration_since(*at) < LOG_INTERVAL,
            };
            if is_logged {
                continue;
            }
            logged += 1;
            if logged > MAX_LOGGED {
                break;
            }
            self.0.insert(vip.address, (refused, now));
            for note in ports::exhaustion_notes(&ports::vip_ports_without_usage(vip, &policy, state)) {
                tracing::warn!(event = "ports_exhausted", vip = %vip.address, "{note}");
            }
        }
        self.0.retain(|address, _| policy.vip_at(*address).is_some());
    }
}
