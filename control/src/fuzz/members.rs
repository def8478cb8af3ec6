//! Fuzzing of membership: heartbeats, view updates and records, applied to the server's membership state.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::next;
use crate::membership::authority::{MAX_REPORTED_NUMBER, MembershipState, Record};
use crate::membership::replication::policy_release_timeout;
use crate::membership::{Heartbeat, MembershipView};
use crate::xds::proto;

const TTL: Duration = Duration::from_millis(600);
/// Names of the gateways in the policy.
const NAMES: [&str; 4] = ["a", "b", "c", "gw-1"];
/// Maximum number of steps of one input.
const MAX_STEPS: usize = 64;

/// Executes the input as a sequence of steps, each with a leading kind byte: time passes, the policy changes, a term
/// begins, or a message arrives.
pub fn members(mut data: &[u8]) {
    let start = Instant::now();
    let mut now = start;
    let mut state = MembershipState::new(TTL);
    for _ in 0..MAX_STEPS {
        let [kind, rest @ ..] = data else { break };
        data = rest;
        let previous = state.view().clone();
        match kind % 8 {
            0 => now += Duration::from_millis(u64::from(kind / 8) * 40),
            1 => state.set_policy(
                NAMES.iter().zip(0..).filter(|(_, bit)| kind >> (3 + bit) & 1 == 1).map(|(it, _)| Arc::from(*it)),
            ),
            2 => state.stream_closed(NAMES[usize::from(kind / 8) % NAMES.len()], u64::from(kind / 32)),
            3 => state.reset_timeouts(now),
            4 => {
                let Some(message) = next::<proto::View>(&mut data) else { break };
                // A record only contains views that servers have written, each number once.
                let is_next =
                    |view: &MembershipView| (state.view().number + 1..MAX_REPORTED_NUMBER).contains(&view.number);
                let Some(view) = valid_view(message).filter(is_next) else { continue };
                let record = Record { term: u64::from(kind / 8), view: Arc::new(view) };
                if kind & 8 == 0 {
                    state.begin_term(&record.next_term());
                } else {
                    state.follow(&record);
                }
            }
            5 => {
                let Some(update) = next::<proto::MembershipUpdate>(&mut data) else { break };
                update.view.and_then(valid_view);
            }
            _ => {
                let Some(message) = next::<proto::Heartbeat>(&mut data) else { break };
                let Ok(heartbeat) = Heartbeat::try_from(message.clone()) else { continue };
                let secrets = proto::Heartbeat {
                    secret: message.secret,
                    predecessor: message.predecessor,
                    ..proto::Heartbeat::of(&heartbeat, message.sequence)
                };
                assert_eq!(Heartbeat::try_from(secrets).as_ref(), Ok(&heartbeat), "round trip of a heartbeat");
                apply_heartbeat(&mut state, now, &heartbeat);
            }
        }
        state.decide(now);
        check_view(&previous, state.view());
    }
    // Whatever the input, the next deadline is near, or there is none.
    assert!(state.next_deadline().is_none_or(|due| due <= now + policy_release_timeout(TTL)), "{state:?}");
}

/// Applies a heartbeat, and asserts that a lease is only granted to an active gateway's process.
fn apply_heartbeat(state: &mut MembershipState, now: Instant, heartbeat: &Heartbeat) {
    let _ = state.heartbeat(now, heartbeat);
    state.decide(now);
    if let Some(lease) = state.grant(now, &heartbeat.gateway, heartbeat.incarnation) {
        assert!(lease < TTL, "a lease is shorter than the failure detection timeout");
        let member = state.view().member(&heartbeat.gateway);
        assert!(member.is_some_and(|it| it.serving && it.incarnation == heartbeat.incarnation), "{heartbeat:?}");
    }
}

/// Asserts that a view may follow another one, and that it is valid for all gateways.
fn check_view(previous: &MembershipView, view: &MembershipView) {
    assert!(view.number >= previous.number, "view numbers never decrease: {previous:?}, {view:?}");
    assert!(view.number > previous.number || *view == *previous, "one view per number: {previous:?}, {view:?}");
    let names: BTreeSet<_> = view.members.iter().map(|member| &member.name).collect();
    assert_eq!(names.len(), view.members.len(), "no duplicate members: {view:?}");
    // Whatever input the server has received, its view must be valid for all.
    assert_eq!(MembershipView::try_from(proto::View::from(view)).as_ref(), Ok(view));
}

/// Converts a valid view, and asserts its round trip.
fn valid_view(message: proto::View) -> Option<MembershipView> {
    let view = MembershipView::try_from(message).ok()?;
    assert_eq!(MembershipView::try_from(proto::View::from(&view)).as_ref(), Ok(&view), "round trip of a view");
    assert!(view.members.is_sorted_by(|a, b| a.name < b.name));
    Some(view)
}
