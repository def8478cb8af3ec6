//! What must hold after each batch of changes.

mod identity;
mod limits;
mod part;
mod privacy;

use std::collections::BTreeMap;

use serde_json::Value;
use vipgate_coverage::Coverage;
use vipgate_policy::compiler::Placement;
use vipgate_policy::diagnostic::Severity;
use vipgate_policy::manifest::ObjectId;

use super::history::History;
use super::pipeline::Pipeline;
use crate::source::store::CompileOutcome;

/// A world after a batch, with all tenants and without the others.
pub(super) struct Observation<'a> {
    pub(super) history: &'a History,
    pub(super) whole: (&'a Pipeline, &'a CompileOutcome),
    pub(super) alone: (&'a Pipeline, &'a CompileOutcome),
    /// All objects as they were readable last.
    pub(super) objects: BTreeMap<&'a ObjectId, Value>,
}

impl Observation<'_> {
    fn placement(&self) -> &Placement {
        self.whole.1.placement.as_ref().expect("a placement")
    }
}

/// Checks everything but what gateways make of it.
pub(super) fn check(observation: &Observation<'_>, coverage: &Coverage) {
    limits::check(observation);
    if observation.history.setting.has_pods {
        identity::check(observation, coverage);
    } else if !observation.placement().endpoints.is_empty() {
        assert!(observation.whole.1.slices_unverified, "nobody says that slices aren't verified");
    }
    privacy::check(observation);
    part::check(observation, coverage);
    count_outcomes(observation, coverage);
}

/// Checks that a fresh start with the same objects brings the same into force.
pub(super) fn check_fresh(observation: &Observation<'_>, fresh: &CompileOutcome, coverage: &Coverage) {
    let (pipeline, outcome) = observation.whole;
    assert_eq!(outcome.placement, fresh.placement, "differs from a fresh start");
    let refused = |outcome: &CompileOutcome| -> Vec<ObjectId> {
        let all =
            outcome.faulty.iter().filter(|(id, faulty)| !faulty.has_last_good && pipeline.entries.is_readable(id));
        all.map(|(id, _)| id.clone()).collect()
    };
    assert_eq!(refused(outcome), refused(fresh), "a fresh start sets aside others");
    if outcome.faulty.values().any(|faulty| faulty.has_last_good) {
        coverage.count("outcome: in force as it was readable last");
    }
}

/// Counts what becomes of hostile objects.
fn count_outcomes(observation: &Observation<'_>, coverage: &Coverage) {
    let (pipeline, outcome) = observation.whole;
    let is_hostile = |namespace: &str| observation.history.others.contains(&namespace);
    let mut named = std::collections::BTreeSet::new();
    for diagnostic in &outcome.diagnostics {
        let Some(id) = pipeline.entries.object_of(diagnostic).filter(|id| is_hostile(&id.namespace)) else { continue };
        named.insert(id);
        if diagnostic.severity == Severity::Warning {
            coverage.count("outcome: ignored with a warning");
        }
        coverage.count(format!("{}", diagnostic.code));
    }
    let refused = outcome.faulty.iter().filter(|(id, faulty)| is_hostile(&id.namespace) && !faulty.has_last_good);
    coverage.add("outcome: set aside", refused.count() as u64);
    let of_others = |policy: &str| namespace_of(policy).is_some_and(is_hostile);
    let closed = observation.placement().endpoints.iter().filter(|it| it.vips.is_empty() && of_others(&it.policy));
    coverage.add("outcome: closed", closed.count() as u64);
    let hostile = observation.objects.keys().filter(|id| is_hostile(&id.namespace) && !named.contains(**id));
    coverage.add("outcome: unaffected", hostile.count() as u64);
}

/// The namespace in `Kind namespace/name`; `None`: it has none.
fn namespace_of(name: &str) -> Option<&str> {
    Some(name.split_once(' ')?.1.split_once('/')?.0)
}
