//! What gateways, servers and stores say of who serves: beats, notices, views, and what becomes of them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::next;
use crate::members::{Beat, View};
use crate::policyd::members::{MOST_TOLD, Roster};
use crate::xds::proto;

const TTL: Duration = Duration::from_millis(600);
/// The names of the policy's gateways, which beats must find by chance.
const NAMES: [&str; 4] = ["a", "b", "c", "gw-1"];
/// Steps of one input.
const MOST: usize = 64;

/// Steps, each with its kind before it: time passes, policy changes, a store is read, or a message comes.
pub fn members(mut data: &[u8]) {
    let start = Instant::now();
    let mut now = start;
    let mut roster = Roster::new(TTL);
    for _ in 0..MOST {
        let [what, rest @ ..] = data else { break };
        data = rest;
        let before = roster.view().clone();
        match what % 8 {
            0 => now += Duration::from_millis(u64::from(what / 8) * 40),
            1 => roster.set_policy(
                NAMES.iter().zip(0..).filter(|(_, bit)| what >> (3 + bit) & 1 == 1).map(|(it, _)| Arc::from(*it)),
            ),
            2 => roster.left(NAMES[usize::from(what / 8) % NAMES.len()], u64::from(what / 32)),
            3 => roster.was_deaf(now),
            4 => {
                let Some(message) = next::<proto::View>(&mut data) else { break };
                // A store has what servers have written, each number once.
                let is_next = |view: &View| (roster.view().number + 1..MOST_TOLD).contains(&view.number);
                let Some(view) = sound_view(message).filter(is_next) else { continue };
                roster.load(now, Some(Arc::new(view)));
            }
            5 => {
                let Some(notice) = next::<proto::Notice>(&mut data) else { break };
                notice.view.and_then(sound_view);
            }
            _ => {
                let Some(message) = next::<proto::Beat>(&mut data) else { break };
                let sequence = message.sequence;
                let Ok(beat) = Beat::try_from(message) else { continue };
                // Servers write down no secret, neither its own nor its predecessor's.
                let kept = Beat { predecessor: None, ..beat.clone() };
                assert_eq!(Beat::kept(beat.message(sequence)), Ok(kept), "a beat comes back");
                let _ = roster.beat(now, &beat);
                roster.decide(now);
                if let Some(lease) = roster.grant(now, &beat.gateway, beat.incarnation) {
                    assert!(lease < TTL, "a lease is shorter than the silence that is taken for death");
                    let member = roster.view().member(&beat.gateway);
                    assert!(member.is_some_and(|it| it.serving && it.incarnation == beat.incarnation), "{beat:?}");
                }
            }
        }
        roster.decide(now);
        let view = roster.view();
        assert!(view.number >= before.number, "numbers of views never fall: {before:?}, {view:?}");
        assert!(view.number > before.number || **view == *before, "one number, one view: {before:?}, {view:?}");
        let names: BTreeSet<_> = view.members.iter().map(|member| &member.name).collect();
        assert_eq!(names.len(), view.members.len(), "each once: {view:?}");
        // Whatever a gateway or another server has said, what this one says of it must be understood by all.
        assert_eq!(View::try_from(proto::View::from(&**view)).as_ref(), Ok(&**view));
    }
    // A gateway's own clock goes on: whatever was said, the server has something to do at some time, or nothing to wait for.
    assert!(roster.due().is_none_or(|due| due <= now + 3 * TTL), "{roster:?}");
}

/// A view that is one; it comes back from the way.
fn sound_view(message: proto::View) -> Option<View> {
    let view = View::try_from(message).ok()?;
    assert_eq!(View::try_from(proto::View::from(&view)).as_ref(), Ok(&view), "a view comes back");
    assert!(view.members.is_sorted_by(|a, b| a.name < b.name));
    Some(view)
}
