//! Address conflicts: hosts on the link that claim a VIP of this gateway. Logs them, and defends the VIP (RFC 5227).

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use vipgate_common::MinInterval;
use vipgate_dataplane::observe::address_conflict::AddressConflict;
use vipgate_dataplane::policy::compiled::Policy;
use vipgate_dataplane::worker::command::Command;

use crate::state::GatewayState;
use crate::state::conflicts::{Claim, Claims, format_mac};

/// Minimum interval between log messages about one VIP.
const LOG_INTERVAL: Duration = Duration::from_mins(1);
/// Minimum interval between defenses of a VIP (RFC 5227 section 1.1, DEFEND_INTERVAL).
const DEFEND_INTERVAL: Duration = Duration::from_secs(10);
/// How long a claim is reported after it was last seen.
const CLAIM_TIMEOUT: Duration = Duration::from_hours(1);

/// The reaction to a claim.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Reaction {
    log: bool,
    defend: bool,
}

/// Handles the conflicts that the workers have seen since the last call.
pub(super) fn poll(state: &GatewayState, now: Instant) {
    let mut conflicts =
        state.workers().iter().flat_map(|worker| std::iter::from_fn(|| worker.counters.conflicts.pop()));
    let first = conflicts.next();
    let previous = state.conflicts.load();
    let policy = state.compiled.load();
    if first.is_none() && previous.values().all(|claim| now - claim.last_seen < CLAIM_TIMEOUT) {
        return;
    }
    let mut claims = Claims::clone(&previous);
    for conflict in first.into_iter().chain(conflicts) {
        let reaction = record(&mut claims, conflict, now);
        let AddressConflict { vip, mac } = conflict;
        if reaction.log {
            let mac = format_mac(mac);
            tracing::warn!(event = "vip_conflict", %vip, mac, "another host on the link claims a VIP of this gateway");
        }
        // A VIP that policy has removed meanwhile isn't defended.
        if reaction.defend && policy.live_vips().any(|live| live.address == vip) {
            defend(state, vip);
        }
    }
    expire(&mut claims, &policy, now);
    state.conflicts.store(claims.into());
}

fn defend(state: &GatewayState, vip: IpAddr) {
    let Some(first) = state.workers().first() else { return };
    // If the command queue is full, the VIP is defended when the claim is repeated.
    if first.commands.try_send(Command::Defend(vip)).is_ok() {
        first.doorbell.wake();
    }
}

/// Records a claim; returns what to do about it.
fn record(claims: &mut Claims, AddressConflict { vip, mac }: AddressConflict, now: Instant) -> Reaction {
    let (log, defense) = (MinInterval::default(), MinInterval::default());
    let claim = claims.entry(vip).or_insert(Claim { mac, last_seen: now, log, defense });
    (claim.mac, claim.last_seen) = (mac, now);
    Reaction {
        log: claim.log.due(LOG_INTERVAL, now).is_some(),
        defend: claim.defense.due(DEFEND_INTERVAL, now).is_some(),
    }
}

/// Removes claims that haven't been seen for [`CLAIM_TIMEOUT`], and those to addresses that are no longer VIPs.
fn expire(claims: &mut Claims, policy: &Policy, now: Instant) {
    let live: BTreeSet<IpAddr> = policy.live_vips().map(|vip| vip.address).collect();
    claims.retain(|vip, claim| now - claim.last_seen < CLAIM_TIMEOUT && live.contains(vip));
}

#[cfg(test)]
mod tests {
    use vipgate_dataplane::policy::build::Builder;
    use vipgate_dataplane::policy::spec::NetworkSpec;

    use super::*;

    #[test]
    fn a_conflict_is_logged_once_a_minute_and_defended_every_ten_seconds() {
        let mut claims = Claims::new();
        let start = Instant::now();
        let (mut logged, mut defended) = (Vec::new(), Vec::new());
        for second in 0..120 {
            let conflict = AddressConflict { vip: [192, 0, 2, 10].into(), mac: [2, 0, 0, 0, 0, (second % 2) as u8] };
            let reaction = record(&mut claims, conflict, start + Duration::from_secs(second));
            logged.extend(reaction.log.then_some(second));
            defended.extend(reaction.defend.then_some(second));
        }
        assert_eq!(logged, [0, 60]);
        assert_eq!(defended, (0..12).map(|n| n * 10).collect::<Vec<_>>());
        let claim = claims[&IpAddr::from([192, 0, 2, 10])];
        assert_eq!(
            (format_mac(claim.mac).as_str(), claim.last_seen),
            ("02:00:00:00:00:01", start + Duration::from_secs(119))
        );
    }

    #[test]
    fn each_vip_has_its_own_intervals() {
        let mut claims = Claims::new();
        let now = Instant::now();
        for last in [10, 11] {
            let conflict = AddressConflict { vip: [192, 0, 2, last].into(), mac: [2; 6] };
            assert_eq!(record(&mut claims, conflict, now), Reaction { log: true, defend: true });
        }
        let empty = Builder::new(NetworkSpec::default()).snapshot().policy.clone();
        expire(&mut claims, &empty, now);
        assert!(claims.is_empty(), "without VIPs there are no claims");
    }
}
