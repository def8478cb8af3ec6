//! How interfaces and next hops stand, as the admin socket tells it.

use std::time::Instant;

use super::proto;
use crate::gateway::tracking::{Capture, TrackedCapture, TrackingStatus};
use crate::kernel::LinkState;

/// Why an interface can't be used; empty: it can.
pub(super) fn down(tracking: &TrackingStatus, interface: &str) -> String {
    let link = tracking.links.iter().find(|link| link.name == interface && link.state != LinkState::Up);
    link.map(|link| link.state.phrase().to_owned()).unwrap_or_default()
}

/// What is captured on an interface.
pub(super) fn xdp(tracking: &TrackingStatus, interface: &str) -> String {
    capture(tracking, interface).map_or_else(String::new, |it| match &it.state {
        Capture::Attached => "attached".to_owned(),
        Capture::Missing => "missing".to_owned(),
        Capture::Replaced { id } => format!("another program, id {id}"),
    })
}

/// How often the program was found to be off an interface.
pub(super) fn detached(tracking: &TrackingStatus, interface: &str) -> u64 {
    capture(tracking, interface).map_or(0, |it| it.detached)
}

fn capture<'a>(tracking: &'a TrackingStatus, interface: &str) -> Option<&'a TrackedCapture> {
    tracking.captures.iter().find(|it| it.interface == interface)
}

/// How long it is held down still.
pub(super) fn held_down_ms(tracking: &TrackingStatus) -> u64 {
    let left = tracking.held_down.map(|until| until.saturating_duration_since(Instant::now()));
    left.map_or(0, |left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX))
}

/// The next hops that are probed.
pub(super) fn next_hops(tracking: &TrackingStatus) -> Vec<proto::NextHopStatus> {
    let name = |id| tracking.links.iter().find(|link| link.id == id).map_or_else(String::new, |link| link.name.clone());
    let hops = tracking.next_hops.iter().map(|hop| proto::NextHopStatus {
        interface: name(hop.interface),
        address: hop.address.to_string(),
        state: hop.state.name().to_owned(),
        answered_ms_ago: hop
            .answered
            .map_or(0, |at| u64::try_from(at.elapsed().as_millis()).unwrap_or(u64::MAX).max(1)),
    });
    hops.collect()
}
