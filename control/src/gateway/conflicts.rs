//! Hosts that claim a VIP of this gateway on the link: what is said of them, and when the VIP is defended.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use vipgate_dataplane::command::Command;
use vipgate_dataplane::conflicts::Conflict;
use vipgate_dataplane::snapshot::policy::Policy;

use super::state::GatewayState;

/// How often the log says so of one VIP.
const SAY_AGAIN: Duration = Duration::from_mins(1);
/// How often a VIP is defended (RFC 5227 section 1.1, DEFEND_INTERVAL).
const DEFEND_AGAIN: Duration = Duration::from_secs(10);
/// How long a claim is shown after it was last heard.
const REMEMBERED: Duration = Duration::from_hours(1);

/// Who claims which VIP.
pub type Claims = BTreeMap<IpAddr, Claim>;

/// The last claim to a VIP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Who claims it.
    pub mac: [u8; 6],
    /// When that was last heard.
    pub heard: Instant,
    said: Option<Instant>,
    defended: Option<Instant>,
}

/// What a claim calls for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Reaction {
    say: bool,
    defend: bool,
}

/// Hears what all workers have seen since the last time.
pub(super) fn follow(state: &GatewayState, now: Instant) {
    let mut news = state.workers.iter().flat_map(|worker| std::iter::from_fn(|| worker.counters.conflicts.take()));
    let first = news.next();
    let known = state.conflicts.load();
    let policy = state.compiled.load();
    if first.is_none() && known.values().all(|claim| now - claim.heard < REMEMBERED) {
        return;
    }
    let mut claims = Claims::clone(&known);
    for conflict in first.into_iter().chain(news) {
        let reaction = note(&mut claims, conflict, now);
        let Conflict { vip, mac } = conflict;
        if reaction.say {
            let mac = spelled(mac);
            tracing::warn!(event = "vip_conflict", %vip, mac, "another host on the link claims a VIP of this gateway");
        }
        // What policy has taken away meanwhile is the other's by right.
        if reaction.defend && policy.live_vips().any(|live| live.address == vip) {
            defend(state, vip);
        }
    }
    forget(&mut claims, &policy, now);
    state.conflicts.store(claims.into());
}

fn defend(state: &GatewayState, vip: IpAddr) {
    let Some(first) = state.workers.first() else { return };
    // A worker that is too busy is asked again when the claim is repeated.
    if first.commands.try_send(Command::Defend(vip)).is_ok() {
        first.doorbell.wake();
    }
}

fn note(claims: &mut Claims, Conflict { vip, mac }: Conflict, now: Instant) -> Reaction {
    let before = claims.get(&vip);
    let is_due = |last: Option<Instant>, pause| last.is_none_or(|last| now - last >= pause);
    let say = is_due(before.and_then(|claim| claim.said), SAY_AGAIN);
    let defend = is_due(before.and_then(|claim| claim.defended), DEFEND_AGAIN);
    let last = |due: bool, last: Option<Instant>| if due { Some(now) } else { last };
    let said = last(say, before.and_then(|claim| claim.said));
    let defended = last(defend, before.and_then(|claim| claim.defended));
    claims.insert(vip, Claim { mac, heard: now, said, defended });
    Reaction { say, defend }
}

/// Claims that were not heard for long, and those to what is no VIP any more.
fn forget(claims: &mut Claims, policy: &Policy, now: Instant) {
    let live: BTreeSet<IpAddr> = policy.live_vips().map(|vip| vip.address).collect();
    claims.retain(|vip, claim| now - claim.heard < REMEMBERED && live.contains(vip));
}

/// A link address as people write it.
pub(crate) fn spelled(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

#[cfg(test)]
mod tests {
    use vipgate_dataplane::snapshot::build::Builder;
    use vipgate_dataplane::snapshot::spec::NetworkSpec;

    use super::*;

    #[test]
    fn a_claim_is_said_once_a_minute_and_defended_every_ten_seconds() {
        let mut claims = Claims::new();
        let start = Instant::now();
        let (mut said, mut defended) = (Vec::new(), Vec::new());
        for second in 0..120 {
            let conflict = Conflict { vip: [192, 0, 2, 10].into(), mac: [2, 0, 0, 0, 0, (second % 2) as u8] };
            let reaction = note(&mut claims, conflict, start + Duration::from_secs(second));
            said.extend(reaction.say.then_some(second));
            defended.extend(reaction.defend.then_some(second));
        }
        assert_eq!(said, [0, 60]);
        assert_eq!(defended, (0..12).map(|n| n * 10).collect::<Vec<_>>());
        let claim = claims[&IpAddr::from([192, 0, 2, 10])];
        assert_eq!((spelled(claim.mac).as_str(), claim.heard), ("02:00:00:00:00:01", start + Duration::from_secs(119)));
    }

    #[test]
    fn vips_are_told_apart() {
        let mut claims = Claims::new();
        let now = Instant::now();
        for last in [10, 11] {
            let conflict = Conflict { vip: [192, 0, 2, last].into(), mac: [2; 6] };
            assert_eq!(note(&mut claims, conflict, now), Reaction { say: true, defend: true });
        }
        let none = Builder::new(NetworkSpec::default()).snapshot().policy.clone();
        forget(&mut claims, &none, now);
        assert!(claims.is_empty(), "no VIPs, no claims");
    }
}
