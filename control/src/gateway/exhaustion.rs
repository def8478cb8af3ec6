//! VIPs that run out of ports: says so in the log, and whether it is the VIP or a shard of it.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use vipgate_dataplane::ports::pool::Refused;

use super::state::GatewayState;
use crate::admin::ports;

/// Between two lines about one VIP.
const PAUSE: Duration = Duration::from_mins(1);
/// Lines at once.
const MOST: usize = 5;

/// What was said of VIPs that ran out of ports.
#[derive(Debug, Default)]
pub(super) struct Shortages(BTreeMap<IpAddr, (Refused, Instant)>);

impl Shortages {
    /// Says which VIPs have run out of ports since it was last said.
    pub(super) fn follow(&mut self, state: &GatewayState, now: Instant) {
        let policy = state.compiled.load();
        let mut said = 0;
        for vip in policy.vips() {
            let refused = vip.pool.refused();
            let is_known = match self.0.get(&vip.address) {
                None => refused == Refused::default(),
                Some((known, at)) => *known == refused || now.saturating_duration_since(*at) < PAUSE,
            };
            if is_known {
                continue;
            }
            said += 1;
            if said > MOST {
                break;
            }
            self.0.insert(vip.address, (refused, now));
            for note in ports::shortage(&ports::without_use(vip, &policy, state)) {
                tracing::warn!(event = "ports_exhausted", vip = %vip.address, "{note}");
            }
        }
        self.0.retain(|address, _| policy.vip_at(*address).is_some());
    }
}
