//! Reconciler of one pool: observes, plans, carries out, and reports, until its inputs end.
//!
//! ```text
//!   inputs (what to observe, what there is to be, whether this server leads) ---> plan ---> provider
//!   provider: every INTERVAL, and after each change ---> observation -----------^  |
//!                                                         state <------------------+
//! ```
//! A change of the inputs is acted on at once, with the last observation: the provider looks again before it takes anything
//! away. What fails is tried again, later each time.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};
use vipgate_common::{delay_after, jittered};

use crate::api::BACKOFF;
use crate::error::CloudError;
use crate::execute::{self, ActionKind, Provider};
use crate::plan::{Action, AddressPlan, Desired, plan};
use crate::provider::{Observation, Scope};

/// Interval of observations when nothing changes.
pub const INTERVAL: Duration = Duration::from_secs(10);
/// Pause after changes, before they are observed: reads of providers lag behind.
const OBSERVATION_DELAY: Duration = Duration::from_millis(100);
/// Time after an attachment during which a read that doesn't show it may be old.
const MAX_READ_LAG: Duration = Duration::from_secs(30);
/// Actions at a time.
const MAX_CONCURRENT: usize = 16;

/// What a reconciler works on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inputs {
    /// What to observe.
    pub scope: Scope,
    /// What there is to be; `None`: not known yet, so nothing is changed.
    pub desired: Option<Arc<Desired>>,
    /// Private addresses that VIPs may get; empty: any of the subnet.
    pub candidates: Arc<[IpNet]>,
    /// Whether this server may change anything.
    pub leads: bool,
}

/// State of a pool.
#[derive(Clone, Debug, Default)]
pub struct PoolState {
    /// The last observation; `None`: there was none yet.
    pub observation: Option<Arc<Observation>>,
    /// When it was made.
    pub observed_at: Option<Instant>,
    /// Why there is no newer one.
    pub observe_error: Option<CloudError>,
    /// The last plan, carried out or not.
    pub plan: Arc<AddressPlan>,
    /// The actions that failed since the last that didn't, by kind.
    pub failures: BTreeMap<ActionKind, CloudError>,
    /// Actions by kind: those that were carried out, and those that failed.
    pub counts: BTreeMap<ActionKind, [u64; 2]>,
    /// VIPs that were attached again after somebody had detached them.
    pub repaired: u64,
    /// The last time that a VIP took from when its gateway was to have it until it was attached.
    pub attach_time: Option<Duration>,
}

/// Reconciles a pool until the inputs end. `leads` says whether this server may change anything at this moment.
pub async fn run<P: Provider + 'static>(
    provider: Arc<P>,
    mut inputs: watch::Receiver<Inputs>,
    states: watch::Sender<Arc<PoolState>>,
    leads: impl Fn() -> bool + Send + Sync,
) {
    let mut reconciler = Reconciler {
        provider,
        state: PoolState::default(),
        states,
        failed_rounds: 0,
        pending: BTreeMap::new(),
        attached: BTreeMap::new(),
    };
    let mut observe_at = Instant::now();
    loop {
        let current = inputs.borrow_and_update().clone();
        if Instant::now() >= observe_at {
            reconciler.observe(&current.scope).await;
            observe_at = Instant::now() + reconciler.pause();
        }
        let outcomes = reconciler.act(&current, current.leads && leads()).await;
        // What can be done goes on, whatever fails for others.
        let pause = if outcomes.has_changed { OBSERVATION_DELAY } else { reconciler.pause() };
        observe_at = observe_at.min(Instant::now() + pause);
        tokio::select! {
            () = sleep_until(observe_at) => {}
            changed = inputs.changed() => if changed.is_err() { return },
        }
    }
}

struct Reconciler<P> {
    provider: Arc<P>,
    state: PoolState,
    states: watch::Sender<Arc<PoolState>>,
    /// Rounds since the last one without an error.
    failed_rounds: u32,
    /// Since when a VIP isn't where it is to be, with the gateway.
    pending: BTreeMap<IpAddr, (String, Instant)>,
    /// Where VIPs are attached as desired, and since when.
    attached: BTreeMap<IpAddr, (String, Instant)>,
}

/// What has become of the actions of a round.
#[derive(Clone, Copy, Debug, Default)]
struct Outcomes {
    has_changed: bool,
    has_failed: bool,
}

impl<P: Provider + 'static> Reconciler<P> {
    async fn observe(&mut self, scope: &Scope) {
        match self.provider.observe(scope).await {
            Ok(observation) => {
                self.state.observation = Some(Arc::new(observation));
                self.state.observed_at = Some(Instant::now());
                self.state.observe_error = None;
                if self.state.failures.is_empty() {
                    self.failed_rounds = 0;
                }
            }
            Err(error) => {
                if self.state.observe_error.as_ref() != Some(&error) {
                    tracing::warn!(event = "cloud_failed", action = "observe", code = error.code, "{error}");
                }
                self.state.observe_error = Some(error);
                self.failed_rounds += 1;
            }
        }
    }

    /// Plans and, where this server leads, carries out; returns what has become of it.
    async fn act(&mut self, inputs: &Inputs, leads: bool) -> Outcomes {
        let (Some(observation), Some(desired)) = (&self.state.observation, &inputs.desired) else {
            self.report();
            return Outcomes::default();
        };
        let plan = plan(desired, observation);
        self.track(desired, &plan);
        self.state.plan = Arc::new(plan.clone());
        if plan.actions.is_empty() || !leads {
            self.state.failures.clear();
            self.report();
            return Outcomes::default();
        }
        // The plan is known before it is carried out, which may take a minute.
        self.report();
        let outcomes = self.carry_out(plan, &inputs.candidates).await;
        if outcomes.has_failed {
            self.failed_rounds += 1;
        } else {
            self.failed_rounds = 0;
        }
        self.report();
        outcomes
    }

    /// Carries out all actions at the same time.
    async fn carry_out(&mut self, plan: AddressPlan, candidates: &Arc<[IpNet]>) -> Outcomes {
        let mut running = JoinSet::new();
        let mut outcomes = Outcomes::default();
        for action in plan.actions {
            if running.len() >= MAX_CONCURRENT
                && let Some(outcome) = running.join_next().await
            {
                self.finish(outcome, &mut outcomes);
            }
            let (provider, candidates) = (self.provider.clone(), candidates.clone());
            running.spawn(async move {
                let outcome = provider.execute(&action, &candidates).await;
                (action, outcome)
            });
        }
        while let Some(outcome) = running.join_next().await {
            self.finish(outcome, &mut outcomes);
        }
        outcomes
    }

    fn finish(
        &mut self,
        outcome: Result<(Action, Result<(), CloudError>), tokio::task::JoinError>,
        outcomes: &mut Outcomes,
    ) {
        // A panic in an action is a fault of ours.
        let (action, outcome) = outcome.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()));
        let kind = ActionKind::of(&action);
        let counts = self.state.counts.entry(kind).or_default();
        match outcome {
            Ok(()) => {
                counts[0] += 1;
                tracing::info!(event = "cloud_changed", action = kind.as_str(), "{}", execute::describe(&action));
                self.state.failures.remove(&kind);
                self.finish_attachments(&action);
                outcomes.has_changed = true;
            }
            Err(error) => {
                counts[1] += 1;
                if self.state.failures.get(&kind) != Some(&error) {
                    let (action_kind, code) = (kind.as_str(), &error.code);
                    let text = execute::describe(&action);
                    tracing::warn!(event = "cloud_failed", action = action_kind, code, "{text}: {error}");
                }
                self.state.failures.insert(kind, error);
                outcomes.has_failed = true;
            }
        }
    }

    /// Notes since when VIPs aren't where they are to be, and what somebody else has changed.
    fn track(&mut self, desired: &Desired, plan: &AddressPlan) {
        let now = Instant::now();
        let mut pending = BTreeMap::new();
        for (vip, wanted) in &desired.vips {
            let Some(gateway) = &wanted.gateway else { continue };
            if plan.attached.contains(vip) {
                let before = self.attached.remove(vip).filter(|(before, _)| before == gateway);
                self.attached.insert(*vip, before.unwrap_or_else(|| (gateway.clone(), now)));
                continue;
            }
            let before = self.attached.remove(vip).filter(|(before, _)| before == gateway);
            if before.is_some_and(|(_, since)| now.duration_since(since) > MAX_READ_LAG) {
                self.state.repaired += 1;
                tracing::warn!(event = "cloud_drift", %vip, gateway, "somebody else has detached the VIP");
            }
            let since =
                self.pending.remove(vip).filter(|(before, _)| before == gateway).map_or(now, |(_, since)| since);
            pending.insert(*vip, (gateway.clone(), since));
        }
        self.attached.retain(|vip, _| desired.vips.contains_key(vip));
        self.pending = pending;
    }

    fn finish_attachments(&mut self, action: &Action) {
        let (Action::Attach(_, bindings) | Action::Move(_, _, bindings)) = action else { return };
        for binding in bindings {
            if let Some((_, since)) = self.pending.get(&binding.address.address) {
                self.state.attach_time = Some(since.elapsed());
            }
        }
    }

    fn report(&self) {
        self.states.send_replace(Arc::new(self.state.clone()));
    }

    fn pause(&self) -> Duration {
        if self.failed_rounds == 0 {
            return INTERVAL;
        }
        jittered(delay_after(self.failed_rounds, BACKOFF), getrandom::u32())
    }
}
