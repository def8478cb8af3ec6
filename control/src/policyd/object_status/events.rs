//! Events of changes of conditions. A change is an Event once, under any leader, since the condition is in the API.

use super::accepted::{ACCEPTED, ADDRESS_CONFLICT};
use super::condition::{Transition, Truth};
use super::gateways::{DRAINED, READY};
use super::policies::{PROGRAMMED, REJECTED_BY_GATEWAY};
use super::pools::{ALLOCATED, ATTACHED, EXHAUSTED, IN_PROGRESS, PROVIDER_READY};
use crate::policyd::events::ObjectEvent;
use crate::policyd::kubernetes::writer::ObjectReference;

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
        (PROVIDER_READY | ATTACHED | ALLOCATED, Truth::False) if condition.reason != IN_PROGRESS => {
            warning(&condition.reason, message)
        }
        (PROVIDER_READY | ATTACHED | ALLOCATED, Truth::True) if was(Truth::False) => normal(&condition.reason, message),
        (READY, Truth::False) if condition.reason == DRAINED && was(Truth::True) => normal(DRAINED, message),
        (READY, Truth::False) if was(Truth::True) => {
            warning("Failover", &format!("{message}; other gateways take over its VIPs"))
        }
        (READY, Truth::True) if was(Truth::False) => normal("Active", message),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use vipgate_policy::manifest::Kind;

    use super::*;
    use crate::policyd::object_status::condition::Condition;

    /// The Event of a change of a pool's condition.
    fn event(kind: &'static str, status: bool, reason: &str, before: Option<bool>) -> Option<String> {
        let condition = Condition::new(kind, status, reason, "a message");
        let before = before.map(|before| Truth::from(before).as_str().to_owned());
        let pool = ObjectReference::of_manifest(Kind::AddressPool, "AddressPool/public", &"1".into());
        event_of(&pool, &Transition { condition: &condition, before }).map(|event| event.text())
    }

    #[test]
    fn what_fails_at_a_provider_is_a_warning_with_its_reason_and_its_end_an_event() {
        for kind in [PROVIDER_READY, ATTACHED, ALLOCATED] {
            let expected = |text: &str| Some(format!("{text} AddressPool/public: a message"));
            assert_eq!(event(kind, false, "Throttled", None), expected("Warning Throttled"));
            assert_eq!(event(kind, false, IN_PROGRESS, Some(true)), None, "it ends by itself");
            assert_eq!(event(kind, true, "Attached", Some(false)), expected("Normal Attached"));
            assert_eq!(event(kind, true, "Attached", None), None, "nothing was wrong before");
        }
    }
}
