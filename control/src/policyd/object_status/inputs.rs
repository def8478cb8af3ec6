//! What the status of objects is derived from, as one consistent value.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use vipgate_policy::ipam::PoolUsage;

use crate::membership::DesiredState;
use crate::policyd::cloud::{CloudState, PoolFacts};
use crate::policyd::ipam::IpamState;
use crate::policyd::membership::MembershipHandle;
use crate::policyd::object_state::{Compilation, ObjectState, RecentVersions};
use crate::policyd::registry::Registry;
use crate::source::kubernetes::ObservedMap;
use crate::xds::publication::{Publication, without_mark};
use crate::xds::resource::Key;

/// Where the inputs come from.
#[derive(Debug)]
pub(in crate::policyd) struct InputSources {
    pub(in crate::policyd) objects: Arc<ObjectState>,
    pub(in crate::policyd) ipam: Arc<IpamState>,
    pub(in crate::policyd) cloud: Arc<CloudState>,
    pub(in crate::policyd) registry: Arc<Registry>,
    /// Agents of nodes.
    pub(in crate::policyd) nodes: Arc<Registry>,
    pub(in crate::policyd) membership: MembershipHandle,
}

#[derive(Clone, Debug)]
pub(super) struct Inputs {
    pub(super) observed: Arc<ObservedMap>,
    pub(super) compilation: Arc<Compilation>,
    /// By name.
    pub(super) gateways: Vec<GatewayFacts>,
    /// Usage of the pools that address management has planned with.
    pub(super) pools: Vec<PoolUsage>,
    /// Pools with a cloud provider.
    pub(super) clouds: Vec<PoolFacts>,
    /// How long this server has been the leader.
    pub(super) leading_for: Duration,
}

/// A gateway: of the policy, in the membership view, or connected.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts")]
pub(super) struct GatewayFacts {
    pub(super) name: Arc<str>,
    /// Whether the policy names it, or names none.
    pub(super) is_known: bool,
    /// Whether it gets its policy from this server.
    pub(super) is_connected: bool,
    /// The publication that it has in force: as acknowledged, or as in its heartbeats if it gets its policy elsewhere.
    pub(super) in_force: u64,
    /// Why it has rejected a later one.
    pub(super) rejection: Option<String>,
    /// What is set aside for it, with the reasons.
    pub(super) set_aside: Vec<(Key, Arc<str>)>,
    /// Whether anything is set aside for it by the policy server that it is connected to, which isn't this one.
    pub(super) lacks_unknown: bool,
    pub(super) version: Option<String>,
    /// Its active sessions as of the last sample; `None`: there is none of it.
    pub(super) sessions: Option<u64>,
    pub(super) is_active: bool,
    /// The state that it requests.
    pub(super) desired_state: Option<DesiredState>,
    pub(super) fault: Option<Arc<str>>,
    pub(super) drain_block: Option<String>,
}

impl Inputs {
    /// The inputs now; `None` while there is no policy.
    pub(super) fn gather(sources: &InputSources, leading_for: Duration) -> Option<Self> {
        // Objects last: a generation that isn't compiled yet is recognized, one that isn't observed yet isn't.
        let objects = &sources.objects;
        let compilation = objects.compilation.load_full()?;
        let (pools, clouds) = (sources.ipam.pools(), sources.cloud.facts());
        let gateways = gateways(sources, &compilation.published, &objects.recent);
        let observed = objects.observed.snapshot();
        Some(Self { observed, compilation, gateways, pools, clouds, leading_for })
    }

    /// Whether the same status follows from both, except for what time changes.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.observed, &other.observed)
            && Arc::ptr_eq(&self.compilation, &other.compilation)
            && self.gateways == other.gateways
            && self.pools == other.pools
            && self.clouds == other.clouds
    }

    /// The gateways that forward: those that are connected to this server, and those that the membership view has as
    /// active. One that is neither has no part in what is in force.
    pub(super) fn forwarding(&self) -> impl Iterator<Item = &GatewayFacts> {
        self.gateways.iter().filter(|gateway| gateway.is_known && (gateway.is_connected || gateway.is_active))
    }
}

fn gateways(sources: &InputSources, published: &Publication, recent: &RecentVersions) -> Vec<GatewayFacts> {
    let (registry, membership) = (sources.registry.list(), sources.membership.state.load());
    let (peers, view) = (&published.placement.peers, membership.view());
    let mut names: BTreeSet<Arc<str>> = peers.iter().map(|peer| peer.name.clone()).collect();
    names.extend(view.members.iter().map(|member| member.name.clone()));
    names.extend(registry.keys().map(|name| Arc::from(name.as_str())));
    let mut facts = BTreeMap::new();
    for name in names {
        let member = view.member(&name);
        let record = member
            .and_then(|member| membership.record(&name).filter(|record| record.incarnation == member.incarnation));
        let connected = registry.get(&*name).filter(|gateway| gateway.streams > 0);
        let version = record.and_then(|record| record.policy_version.as_deref());
        let reported = version.and_then(|version| recent.number_of(version));
        let refusals = connected.iter().flat_map(|gateway| gateway.refusals.active());
        facts.insert(
            name.clone(),
            GatewayFacts {
                is_known: peers.is_empty() || published.placement.peer(&name).is_some(),
                is_connected: connected.is_some(),
                in_force: connected.map_or(reported.unwrap_or_default(), |gateway| gateway.in_force),
                set_aside: refusals.map(|(key, refusal)| (key.clone(), refusal.reason.clone())).collect(),
                lacks_unknown: connected.is_none() && version.is_some_and(|version| without_mark(version).1),
                rejection: connected.and_then(|gateway| gateway.error.clone()),
                version: connected.and_then(|gateway| gateway.version.clone()),
                sessions: record.map(|record| record.sessions),
                is_active: member.is_some_and(|member| member.serving),
                desired_state: record.map(|record| record.desired_state),
                fault: member.and_then(|member| member.unable.clone()),
                drain_block: membership.drain_block(&name).map(ToString::to_string),
                name,
            },
        );
    }
    facts.into_values().collect()
}
