//! Events of changes of conditions. A change is an Event once, under any leader, since the condition is in the API.

use super::accepted::{ACCEPTED, ADDRESS_CONFLICT};
use super::condition::{Transition, Truth};
use super::gateways::{DRAINED, READY};
use super::policies::{PROGRAMMED, REJECTED_BY_GATEWAY};
use super::pools::EXHAUSTED;
use crate::policyd::events::{ObjectEvent, ObjectReference};

/// The Event of a change, if people are to see it.
pub(super) fn event_of(object: &ObjectReference, transition: &Transition<'_>) -> Option<ObjectEvent> {
    let Transition { condition, before } = transition;
    let was = |status: Truth| before.as_deref() == Some(status.as_str());
    let warning = |reason: &str, message: &str| Some(ObjectEvent::warning(object.clone(), reason, message));
    let normal = |reason: &str, message: &str| Some(ObjectEvent::normal(object.clone(), reason, message));
    let message = condition.message.as_str();
    match (condition.kind, condition.status) {
        (ACCEPTED, Truth::False) if condition.reason == ADDRESS_CONFLICT => warning(ADDRESS_CONFLICT, message),
        (ACCEPTED, Truth::False) => warning("Rejected", message),
        (ACCEPTED, Truth::True) if was(Truth::False) => normal(ACCEPTED, message),
        (PROGRAMMED, Truth::False) if condition.reason == REJECTED_BY_GATEWAY => warning(REJECTED_BY_GATEWAY, message),
        (EXHAUSTED, Truth::True) => warning("PoolExhausted", message),
        (READY, Truth::False) if condition.reason == DRAINED && was(Truth::True) => normal(DRAINED, message),
        (READY, Truth::False) if was(Truth::True) => {
            warning("Failover", &format!("{message}; other gateways take over its VIPs"))
        }
        (READY, Truth::True) if was(Truth::False) => normal("Active", message),
        _ => None,
    }
}
