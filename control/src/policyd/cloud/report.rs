//! State of a pool at its provider, for status, metrics and `vipgate cloud`.

use std::collections::BTreeMap;
use std::sync::Arc;

use vipgate_cloud::execute::ActionKind;
use vipgate_cloud::plan::Desired;
use vipgate_cloud::reconciler::PoolState;
use vipgate_cloud::{CallMeter, CallSample};
use vipgate_policy::manifest::{Ownership, ProviderSpec};

use crate::metric::Family;
use crate::metrics::definitions::policy_server as defined;

/// State of a pool at its provider.
#[derive(Clone, Debug, Default)]
pub(in crate::policyd) struct PoolReport {
    /// Name of the provider.
    pub(in crate::policyd) provider: &'static str,
    /// What there is to be.
    pub(in crate::policyd) desired: Option<Arc<Desired>>,
    /// Addresses that are lacking beyond those that may be allocated.
    pub(in crate::policyd) beyond_limit: usize,
    /// Whether addresses are allocated on demand.
    pub(in crate::policyd) allocates: bool,
    /// What there is, and what is done.
    pub(in crate::policyd) state: Arc<PoolState>,
    /// Why the provider isn't used at all.
    pub(in crate::policyd) error: Option<String>,
    /// Calls of the provider's API.
    pub(in crate::policyd) calls: Vec<CallSample>,
}

impl PoolReport {
    pub(super) fn of(spec: &ProviderSpec, state: Arc<PoolState>, meter: &CallMeter) -> Self {
        let provider = spec.name().unwrap_or_default();
        let allocates = spec.ownership == Ownership::Reserve;
        Self { provider, allocates, state, calls: meter.samples(), ..Self::default() }
    }

    pub(super) fn failed(spec: &ProviderSpec, error: &str) -> Self {
        Self { provider: spec.name().unwrap_or_default(), error: Some(error.to_owned()), ..Self::default() }
    }

    /// Addresses that are to be allocated.
    fn missing(&self) -> usize {
        self.desired.as_ref().map_or(0, |desired| desired.allocations.len())
    }

    /// Addresses that Services and policies lack.
    pub(super) fn lacking(&self) -> usize {
        self.missing() + self.beyond_limit
    }

    /// Numbers of addresses by state: attached as they are to be, not yet or not any more, free, and those that there aren't.
    fn addresses(&self) -> [(&'static str, u64); 4] {
        let plan = &self.state.plan;
        let wanted = self.desired.as_ref().map_or(0, |desired| desired.vips.len());
        let free = self.state.observation.as_ref().map_or(0, |observation| observation.free().count());
        let attached = plan.attached.len().min(wanted);
        [
            ("attached", attached as u64),
            ("pending", (wanted - attached) as u64),
            ("free", free as u64),
            ("lacking", self.lacking() as u64),
        ]
    }
}

/// What the status of a pool says of its provider.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::policyd) struct PoolFacts {
    /// The pool's name.
    pub(in crate::policyd) name: String,
    /// Why it isn't observed: reason and message.
    pub(in crate::policyd) fault: Option<(String, String)>,
    /// Whether it was ever observed.
    pub(in crate::policyd) is_observed: bool,
    /// VIPs of the pool.
    pub(in crate::policyd) vips: usize,
    /// VIPs that are attached to the gateway that owns them.
    pub(in crate::policyd) attached: usize,
    /// Why the first of the others isn't: reason and message.
    pub(in crate::policyd) problem: Option<(String, String)>,
    /// What it lacks; `None`: nothing is allocated for it.
    pub(in crate::policyd) allocation: Option<AllocationFacts>,
}

/// What a pool lacks whose addresses are allocated on demand.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::policyd) struct AllocationFacts {
    /// Addresses that are to be allocated.
    pub(in crate::policyd) missing: usize,
    /// Those that are lacking beyond `max`.
    pub(in crate::policyd) beyond_limit: usize,
    /// Why the last allocation failed: reason and message.
    pub(in crate::policyd) failure: Option<(String, String)>,
}

impl PoolFacts {
    pub(super) fn of(name: &str, report: &PoolReport) -> Self {
        let state = &report.state;
        let fault = report.error.clone().map(|error| ("NotConfigured".to_owned(), error));
        let of_error = |error: &vipgate_cloud::CloudError| (camel_case(error.kind.as_str()), error.to_string());
        let allocation = report.allocates.then(|| AllocationFacts {
            missing: report.missing(),
            beyond_limit: report.beyond_limit,
            failure: state.failures.get(&ActionKind::Allocate).map(of_error),
        });
        let problem = state.plan.problems.iter().next();
        let problem = problem.map(|(vip, problem)| (problem.reason().to_owned(), format!("{vip}: {problem}")));
        Self {
            name: name.to_owned(),
            fault: fault.or_else(|| state.observe_error.as_ref().map(of_error)),
            is_observed: state.observation.is_some(),
            vips: report.desired.as_ref().map_or(0, |desired| desired.vips.len()),
            attached: state.plan.attached.len(),
            problem: state.failures.values().next().map(of_error).or(problem),
            allocation,
        }
    }
}

/// `not_found` as `NotFound`.
fn camel_case(name: &str) -> String {
    let capitalized = name.split('_').map(|word| {
        let (first, rest) = word.split_at(word.len().min(1));
        first.to_uppercase() + rest
    });
    capitalized.collect::<Vec<_>>().concat()
}

/// A sample: its labels beside the pool, and its value.
type Sample = (Vec<(&'static str, String)>, u64);

/// Metrics of all pools.
pub(super) fn families(pools: &BTreeMap<String, PoolReport>) -> Vec<Family> {
    let per_pool = |samples: fn(&PoolReport) -> Vec<Sample>| {
        let with_pool = |(name, report): (&String, &PoolReport)| {
            let add = |(labels, value): Sample| ([vec![("pool", name.clone())], labels].concat(), value);
            samples(report).into_iter().map(add).collect::<Vec<_>>()
        };
        pools.iter().flat_map(with_pool).collect::<Vec<_>>()
    };
    vec![
        defined::CLOUD_REACHABLE.family(per_pool(|report| {
            let is_reachable = report.state.observation.is_some() && report.state.observe_error.is_none();
            vec![(vec![], is_reachable.into())]
        })),
        defined::CLOUD_ADDRESSES.family(per_pool(|report| {
            let addresses = report.addresses();
            addresses.map(|(state, count)| (vec![("state", state.to_owned())], count)).to_vec()
        })),
        defined::CLOUD_ACTIONS.family(per_pool(|report| {
            let counts = report.state.counts.iter();
            let results = |(kind, [done, failed]): (_, &[u64; 2])| {
                let kind: &ActionKind = kind;
                [("done", *done), ("failed", *failed)].map(|(result, count)| {
                    (vec![("action", kind.as_str().to_owned()), ("result", result.to_owned())], count)
                })
            };
            counts.flat_map(results).collect()
        })),
        defined::CLOUD_REQUESTS.family(per_pool(|report| {
            let sample = |call: &CallSample| {
                (vec![("operation", call.operation.to_owned()), ("code", call.code.clone())], call.count)
            };
            report.calls.iter().map(sample).collect()
        })),
        defined::CLOUD_REPAIRED.family(per_pool(|report| vec![(vec![], report.state.repaired)])),
        defined::CLOUD_ATTACH_TIME.family(per_pool(|report| {
            let time = report.state.attach_time.map(|time| time.as_millis() as u64);
            time.into_iter().map(|time| (vec![], time)).collect()
        })),
    ]
}
