//! Which objects get a new status now. Pure: time is an argument.
//!
//! Nothing is written that is there already, so a restart and a new leader write nothing. What is provisional, such as a
//! policy that a gateway is about to acknowledge, waits for a while.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use vipgate_policy::manifest::Kind;

use super::accepted::Acceptance;
use super::condition::{Condition, DesiredStatus, condition_of, differs};
use super::events::event_of;
use super::gateways::Gateways;
use super::inputs::Inputs;
use super::policies::Policies;
use super::pools::pool_status;
use crate::policyd::events::ObjectEvent;
use crate::policyd::kubernetes::writer::{ObjectReference, in_turns};
use crate::source::kubernetes::ObservedObject;

/// How long what is provisional isn't written over the status of the same generation, and over that of an earlier one.
const HOLD_TIME: Duration = Duration::from_secs(10);
const NEW_GENERATION_HOLD_TIME: Duration = Duration::from_secs(2);

/// A status that is to be written.
#[derive(Clone, Debug)]
pub(super) struct StatusWrite {
    pub(super) object: ObjectReference,
    pub(super) status: Value,
    /// Events of what it changes.
    pub(super) events: Vec<ObjectEvent>,
    /// Whether the status of a condition changes; then it comes first.
    pub(super) is_transition: bool,
    manifest: Arc<str>,
    /// The observed status that it replaces.
    observed: Option<Arc<Value>>,
}

/// What is to be written now, the most important first.
#[derive(Debug, Default)]
pub(super) struct StatusPlan {
    pub(super) writes: Vec<StatusWrite>,
    /// Whether time alone will cause further writes.
    pub(super) is_waiting: bool,
}

/// A status that was written and may not have been observed yet.
#[derive(Debug)]
struct Written {
    uid: Arc<str>,
    observed: Option<Arc<Value>>,
    status: Arc<Value>,
}

/// Remembers what is on its way, by manifest.
#[derive(Debug, Default)]
pub(super) struct Planner {
    written: HashMap<Arc<str>, Written>,
    provisional_since: HashMap<Arc<str>, Duration>,
}

impl Planner {
    /// The writes that lead from what is observed to what is to be.
    pub(super) fn plan(&mut self, inputs: &Inputs, now: Duration, timestamp: &str) -> StatusPlan {
        let acceptance = Acceptance::of(&inputs.compilation.outcome);
        let (policies, gateways) = (Policies::new(inputs, &acceptance), Gateways::new(inputs, &acceptance));
        let mut plan = StatusPlan::default();
        for (name, object) in inputs.observed.iter() {
            let Some(kind) = name.split_once('/').and_then(|(kind, _)| Kind::named(kind)) else { continue };
            if !kind.is_custom() {
                continue;
            }
            if object.revision > inputs.compilation.outcome.revision {
                // Its compilation is under way.
                continue;
            }
            let desired = match kind {
                Kind::EgressPolicy | Kind::ClusterEgressPolicy => policies.status(name),
                Kind::Gateway => gateways.status(name),
                Kind::AddressPool => match pool_status(&acceptance, name, &inputs.pools, &inputs.clouds) {
                    Some(status) => status,
                    None => continue,
                },
                _ => DesiredStatus { conditions: vec![acceptance.condition(name)], ..DesiredStatus::default() },
            };
            self.plan_object(&mut plan, kind, name, object, &desired, now, timestamp);
        }
        self.written.retain(|name, _| inputs.observed.contains_key(name));
        self.provisional_since.retain(|name, _| inputs.observed.contains_key(name));
        plan.writes = in_turns(plan.writes, |write| {
            let ObjectReference { namespace, name, .. } = &write.object;
            (write.is_transition, if namespace.is_empty() { name.clone() } else { namespace.clone() })
        });
        plan
    }

    fn plan_object(
        &mut self,
        plan: &mut StatusPlan,
        kind: Kind,
        name: &Arc<str>,
        object: &ObservedObject,
        desired: &DesiredStatus,
        now: Duration,
        timestamp: &str,
    ) {
        let present = self.present(name, object);
        let status = desired.document(&present, object.generation, timestamp);
        if !differs(kind, &status, &present) {
            self.provisional_since.remove(name);
            return;
        }
        if !desired.is_provisional {
            self.provisional_since.remove(name);
        } else if self.is_held(name, object, desired, &present, now) {
            plan.is_waiting = true;
            return;
        }
        let transitions = desired.transitions(&present);
        let reference = ObjectReference::of_manifest(kind, name, &object.uid);
        plan.writes.push(StatusWrite {
            events: transitions.iter().filter_map(|it| event_of(&reference, it)).collect(),
            is_transition: transitions.iter().any(|it| it.before.as_deref() != Some(it.condition.status.as_str())),
            object: reference,
            status,
            manifest: name.clone(),
            observed: object.status.clone(),
        });
    }

    /// The status that the object has as far as known.
    fn present(&mut self, name: &Arc<str>, object: &ObservedObject) -> Arc<Value> {
        if let Some(written) = self.written.get(name) {
            if written.uid == object.uid && is_same_status(written.observed.as_ref(), object.status.as_ref()) {
                return written.status.clone();
            }
            self.written.remove(name);
        }
        object.status.clone().unwrap_or_default()
    }

    /// Whether what is provisional isn't written yet.
    fn is_held(
        &mut self,
        name: &Arc<str>,
        object: &ObservedObject,
        desired: &DesiredStatus,
        present: &Value,
        now: Duration,
    ) -> bool {
        let since = *self.provisional_since.entry(name.clone()).or_insert(now);
        let is_observed = |condition: &Condition| {
            condition_of(present, condition.kind).is_some_and(|it| it["observedGeneration"] == object.generation)
        };
        let hold = if desired.conditions.iter().all(is_observed) { HOLD_TIME } else { NEW_GENERATION_HOLD_TIME };
        now.saturating_sub(since) < hold
    }

    /// A status was written.
    pub(super) fn written(&mut self, write: StatusWrite) {
        let StatusWrite { object, status, manifest, observed, .. } = write;
        self.written.insert(manifest, Written { uid: object.uid, observed, status: Arc::new(status) });
    }

    /// Forgets everything: another server leads.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}

fn is_same_status(one: Option<&Arc<Value>>, other: Option<&Arc<Value>>) -> bool {
    match (one, other) {
        (Some(one), Some(other)) => Arc::ptr_eq(one, other),
        (None, None) => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests;
