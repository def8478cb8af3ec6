//! State of interfaces, XDP programs and next hops, for `Status`.

use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::kernel::LinkState;
use crate::state::tracking::{Attachment, ProgramAttachment, TrackingStatus};

/// A monitored next hop.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NextHopStatus {
    pub interface: String,
    pub address: String,
    /// up, down, or unknown: it has never replied.
    pub state: String,
    /// Milliseconds since its last reply; 0: none.
    pub answered_ms_ago: u64,
}

/// Why an interface is down; empty: it is up.
pub(super) fn down(tracking: &TrackingStatus, interface: &str) -> String {
    let link = tracking.interfaces.iter().find(|link| link.name == interface && link.state != LinkState::Up);
    link.map(|link| link.state.description().to_owned()).unwrap_or_default()
}

/// The attachment of the XDP program and of the tc guard of an interface.
pub(super) fn programs(
    tracking: &TrackingStatus,
    interface: &str,
) -> (Option<ProgramAttachment>, Option<ProgramAttachment>) {
    let attachment = tracking.attachments.iter().find(|it| it.interface == interface);
    (attachment.map(|it| it.xdp), attachment.and_then(|it| it.guard))
}

/// State of a program; empty: there is none.
pub(super) fn program(attachment: Option<ProgramAttachment>) -> String {
    attachment.map_or_else(String::new, |it| match it.state {
        Attachment::Attached => "attached".to_owned(),
        Attachment::Missing => "missing".to_owned(),
        Attachment::Replaced { id } => format!("another program, id {id}"),
        Attachment::Unknown => "unknown".to_owned(),
    })
}

/// Remaining hold-down time of the gateway in milliseconds.
pub(super) fn held_down_ms(tracking: &TrackingStatus) -> u64 {
    let left = tracking.held_down.map(|until| until.saturating_duration_since(Instant::now()));
    left.map_or(0, |left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX))
}

/// The probed next hops.
pub(super) fn next_hops(tracking: &TrackingStatus) -> Vec<NextHopStatus> {
    let name =
        |id| tracking.interfaces.iter().find(|link| link.id == id).map_or_else(String::new, |link| link.name.clone());
    let hops = tracking.next_hops.iter().map(|hop| NextHopStatus {
        interface: name(hop.interface),
        address: hop.address.to_string(),
        state: hop.state.name().to_owned(),
        answered_ms_ago: hop
            .last_reply
            .map_or(0, |at| u64::try_from(at.elapsed().as_millis()).unwrap_or(u64::MAX).max(1)),
    });
    hops.collect()
}
