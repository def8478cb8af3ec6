//! The life of a VIP, step by step, as the policy server carries it out: planned, executed, observed, until nothing is left to do.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vipgate_cloud::execute::{ActionKind, describe};
use vipgate_cloud::plan::{Action, Desired, DesiredVip, GatewayState, plan};
use vipgate_cloud::{Allocation, CallMeter, Claim, Observation, Provider, Scope};

/// Rounds that a step takes at most.
const MAX_ROUNDS: u32 = 60;
/// Owner in the claim.
const OWNER: &str = "EgressPolicy cloud-smoke/test";

/// What a step took.
#[derive(Clone, Debug)]
pub(crate) struct StepReport {
    pub(crate) name: &'static str,
    /// Time until it was observed to be done.
    pub(crate) time: Duration,
    /// Changes, in words.
    pub(crate) changes: Vec<String>,
    /// Requests by operation and result.
    pub(crate) requests: BTreeMap<(&'static str, String), u64>,
}

/// A VIP of two gateways.
#[derive(Debug)]
pub(crate) struct Flow<P> {
    pub(crate) provider: P,
    /// Its requests.
    pub(crate) meter: Arc<CallMeter>,
    /// The address's tags, and the two gateways.
    pub(crate) scope: Scope,
    /// Name of the cluster in claims.
    pub(crate) cluster: String,
    /// Pause between rounds.
    pub(crate) pause: Duration,
}

impl<P: Provider> Flow<P> {
    /// Attaches an address to the first gateway, fails over to the second one, hands it back, and gives it up. `vip`: an
    /// address that nobody uses; `None`: allocates one, and releases it in the end. `report` is called after each step.
    ///
    /// # Errors
    /// What can't be done, in words. What was changed until then is given up, as far as possible.
    pub(crate) async fn run(&self, vip: Option<IpAddr>, mut report: impl FnMut(&StepReport)) -> Result<(), String> {
        let observed = self.observe().await?;
        let [first, second] = [0, 1].map(|at| self.scope.gateways.get(at).map(|gateway| gateway.gateway.clone()));
        let (first, second) = first.zip(second).ok_or("needs two gateways")?;
        for gateway in [&first, &second] {
            let nic = observed.nic_of(gateway).ok_or_else(|| format!("{gateway} has no NIC at the provider"))?;
            if let Some(missing) = nic.missing.first() {
                println!("note: {gateway} ({}): {missing}", nic.id);
            }
        }
        let is_allocated = vip.is_none();
        let vip = match vip {
            Some(vip) if observed.free().any(|address| address.address == vip) => vip,
            Some(vip) => return Err(format!("{vip} isn't free, or hasn't the tags")),
            None => self.allocate(&mut report).await?,
        };
        let outcome = self.attach_and_move(vip, [&first, &second], &mut report).await;
        let mut nothing = self.desired(&[&first, &second]);
        if is_allocated {
            let observed = self.observe().await?;
            let ids = observed.addresses.iter().filter(|it| it.address == vip).map(|it| it.id.clone());
            nothing.releasable.extend(ids);
        }
        let ended = self.converge("give up", &nothing, &mut report).await;
        outcome.and(ended)
    }

    async fn attach_and_move(
        &self,
        vip: IpAddr,
        gateways: [&str; 2],
        report: &mut impl FnMut(&StepReport),
    ) -> Result<(), String> {
        let [first, second] = gateways;
        let at = |owner: &str, standby: &str| {
            let vip_at = DesiredVip {
                owner: OWNER.to_owned(),
                gateway: Some(owner.to_owned()),
                standbys: vec![standby.to_owned()],
            };
            Desired { vips: [(vip, vip_at)].into(), ..self.desired(&gateways) }
        };
        self.converge("attach", &at(first, second), report).await?;
        let mut dead = at(second, first);
        dead.gateways.insert(first.to_owned(), GatewayState::Dead);
        self.converge("fail over", &dead, report).await?;
        self.converge("hand back", &at(first, second), report).await
    }

    async fn allocate(&self, report: &mut impl FnMut(&StepReport)) -> Result<IpAddr, String> {
        let claim = Claim { cluster: self.cluster.clone(), owner: OWNER.to_owned() };
        let token = format!("cloud-smoke-{}", self.cluster);
        let tags = self.scope.tags.clone();
        let allocation = Allocation { tags, claim, is_ipv6: false, zone: None, token: token.clone() };
        let (began, before) = (Instant::now(), self.requests());
        let done = self.provider.execute(&Action::Allocate(allocation), &[]).await;
        done.map_err(|error| format!("allocate: {error}"))?;
        for _ in 0..MAX_ROUNDS {
            let observed = self.observe().await?;
            if let Some(address) = observed.addresses.iter().find(|it| it.token.as_ref() == Some(&token)) {
                let (time, changes) = (began.elapsed(), vec![format!("allocate {}", address.address)]);
                report(&StepReport { name: "allocate", time, changes, requests: self.since(&before) });
                return Ok(address.address);
            }
            tokio::time::sleep(self.pause).await;
        }
        Err("allocate: reads never showed the address".to_owned())
    }

    fn desired(&self, gateways: &[&str]) -> Desired {
        let gateways = gateways.iter().map(|name| ((*name).to_owned(), GatewayState::Active)).collect();
        Desired { cluster: self.cluster.clone(), gateways, ..Desired::default() }
    }

    async fn observe(&self) -> Result<Observation, String> {
        self.provider.observe(&self.scope).await.map_err(|error| format!("observe: {error}"))
    }

    /// Plans and executes until the plan is empty, twice: a read may be old.
    async fn converge(
        &self,
        name: &'static str,
        desired: &Desired,
        report: &mut impl FnMut(&StepReport),
    ) -> Result<(), String> {
        let (began, before) = (Instant::now(), self.requests());
        let (mut changes, mut quiet, mut failure) = (Vec::new(), 0, None);
        for _ in 0..MAX_ROUNDS {
            let observed = self.observe().await?;
            let next = plan(desired, &observed);
            let is_done = next.actions.is_empty() && !next.is_waiting && next.attached.len() == desired.vips.len();
            quiet = if is_done { quiet + 1 } else { 0 };
            if quiet == 2 {
                let requests = self.since(&before);
                report(&StepReport { name, time: began.elapsed(), changes, requests });
                return Ok(());
            }
            for action in &next.actions {
                let text = format!("{} {}", ActionKind::of(action).as_str(), describe(action));
                match self.provider.execute(action, &[]).await {
                    Ok(()) => changes.push(text),
                    Err(error) => failure = Some(format!("{text}: {error}")),
                }
            }
            failure = next.problems.iter().next().map(|(vip, problem)| format!("{vip}: {problem}")).or(failure);
            tokio::time::sleep(self.pause).await;
        }
        Err(format!("{name}: {}", failure.unwrap_or_else(|| "reads never showed the changes".to_owned())))
    }

    fn requests(&self) -> BTreeMap<(&'static str, String), u64> {
        self.meter.samples().into_iter().map(|call| ((call.operation, call.code), call.count)).collect()
    }

    fn since(&self, before: &BTreeMap<(&'static str, String), u64>) -> BTreeMap<(&'static str, String), u64> {
        let mut requests = self.requests();
        for (key, count) in &mut requests {
            *count -= before.get(key).copied().unwrap_or_default();
        }
        requests.retain(|_, count| *count > 0);
        requests
    }
}
