//! Members of the gateway group and their state, which decides, with the placement, the owner of each shard.

use std::net::SocketAddr;
use std::sync::Arc;

use crate::flow::ids::GatewayId;
use crate::wire::tunnel_auth::TagKey;

/// Limit of gateway numbers.
pub const MAX_GATEWAYS: usize = 256;

/// Membership view of one gateway.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MembersSpec {
    /// The name of this gateway; `None`: standalone, it owns everything.
    pub this: Option<Arc<str>>,
    /// Gateways with known state, this one included, each once. Policy may name others; they are inactive.
    pub gateways: Vec<MemberSpec>,
    /// Number of the first view with the current active members; 0 without views.
    pub active_since: u64,
    /// Number of changes of the active members; 0 without views.
    pub active_changes: u64,
}

/// State of one gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberSpec {
    pub name: Arc<str>,
    pub tunnel: Option<SocketAddr>,
    /// Whether it is an active member.
    pub active: bool,
    /// Whether its replication channel is up.
    pub connected: bool,
    /// Whether this gateway may open sessions in shards whose home is that one; no other gateway does.
    pub may_open: bool,
    /// What it has released by policy.
    pub policy_release: PolicyRelease,
    /// Authentication of packets between it and this gateway.
    pub authentication: Authentication,
}

/// Whether a gateway has released what the policy takes from it, and sent its sessions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PolicyRelease {
    /// Its releases are never awaited.
    #[default]
    NotAwaited,
    /// It has released what the policy with this version takes from it; empty: none is known.
    Version(Arc<str>),
}

impl PolicyRelease {
    /// It is unknown by the next policy. That may have a version that was in force before: what was released then counts
    /// no longer.
    pub fn forget(&mut self) {
        if let Self::Version(version) = self {
            *version = "".into();
        }
    }
}

/// Authentication of tunnel packets between this gateway and another one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Authentication {
    /// None: packets are identified by source address and receiving interface.
    #[default]
    None,
    /// Every packet has a tag.
    Tagged {
        /// Key of transmitted packets.
        transmit_key: TagKey,
        /// Keys of received packets: of the peer's process and, for a while, of its previous one.
        receive_keys: [Option<TagKey>; 2],
    },
    /// Tags are required but the peer has no key: all its packets are dropped.
    Rejected,
}

/// All gateways by number, as the stages read them.
#[derive(Clone, Debug, Default)]
pub struct Members {
    this: Option<GatewayId>,
    list: Vec<Member>,
    active_since: u64,
    active_changes: u64,
    replica_changes: u64,
    /// Version of the policy in force.
    policy_version: Arc<str>,
}

/// A gateway. Only its name is set if policy names it but its state isn't known.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Member {
    name: Arc<str>,
    tunnel: Option<SocketAddr>,
    active: bool,
    connected: bool,
    may_open: bool,
    /// `None`: it isn't in the group.
    policy_release: Option<PolicyRelease>,
    authentication: Authentication,
}

impl Member {
    fn unknown(name: Arc<str>) -> Self {
        Self {
            name,
            tunnel: None,
            active: false,
            connected: false,
            may_open: false,
            policy_release: None,
            authentication: Authentication::None,
        }
    }
}

/// A set of gateways.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct GatewaySet([u64; MAX_GATEWAYS / 64]);

impl GatewaySet {
    fn contains(&self, id: GatewayId) -> bool {
        self.0[usize::from(id.0) / 64] >> (id.0 % 64) & 1 == 1
    }

    /// Union of two sets.
    pub(super) fn union(mut self, other: &Self) -> Self {
        self.0.iter_mut().zip(other.0).for_each(|(word, other)| *word |= other);
        self
    }

    /// Number of gateways.
    pub(super) fn count(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }
}

impl FromIterator<GatewayId> for GatewaySet {
    fn from_iter<I: IntoIterator<Item = GatewayId>>(ids: I) -> Self {
        let mut set = Self::default();
        ids.into_iter().for_each(|id| set.0[usize::from(id.0) / 64] |= 1 << (id.0 % 64));
        set
    }
}

impl Members {
    /// This gateway; `None`: standalone.
    pub fn this(&self) -> Option<GatewayId> {
        self.this
    }

    /// Name of this gateway; `None`: standalone.
    pub fn this_name(&self) -> Option<&str> {
        self.list.get(usize::from(self.this?.0)).map(|member| &*member.name)
    }

    /// Number of the first view with the current active members.
    pub fn active_since(&self) -> u64 {
        self.active_since
    }

    /// Number of the replication epoch, from 1. An epoch starts when the replica of any shard changes, by a view or by
    /// policy.
    pub fn replication_epoch(&self) -> u64 {
        self.replica_changes + 1
    }

    /// Starts the next replication epoch.
    pub(super) fn begin_replication_epoch(&mut self) {
        self.replica_changes += 1;
    }

    /// Number of changes of the active members.
    pub(super) fn active_changes(&self) -> u64 {
        self.active_changes
    }

    /// The gateway of this name, if it has a number.
    pub fn id(&self, name: &str) -> Option<GatewayId> {
        self.list.iter().position(|member| *member.name == *name).map(|at| GatewayId(at as u8))
    }

    /// A gateway's name.
    pub fn name(&self, id: GatewayId) -> &Arc<str> {
        &self.list[usize::from(id.0)].name
    }

    /// A gateway's tunnel address.
    pub fn tunnel(&self, id: GatewayId) -> Option<SocketAddr> {
        self.list.get(usize::from(id.0))?.tunnel
    }

    /// Authentication of packets between a gateway and this one.
    pub(super) fn authentication(&self, id: GatewayId) -> Authentication {
        self.list.get(usize::from(id.0)).map_or(Authentication::None, |member| member.authentication)
    }

    /// All gateways.
    pub fn ids(&self) -> impl Iterator<Item = GatewayId> + use<> {
        (0..self.list.len()).map(|at| GatewayId(at as u8))
    }

    /// Whether a gateway is an active member.
    pub fn is_active(&self, id: GatewayId) -> bool {
        self.is(id, |member| member.active)
    }

    /// Whether its replication channel is up.
    pub fn is_connected(&self, id: GatewayId) -> bool {
        self.is(id, |member| member.connected)
    }

    /// Whether the replication channel to any other gateway is up.
    pub fn has_connected_peer(&self) -> bool {
        self.ids().any(|id| Some(id) != self.this && self.is_connected(id))
    }

    /// Whether this gateway may open sessions in shards with that home.
    pub(super) fn may_open(&self, home: GatewayId) -> bool {
        self.is(home, |member| member.may_open)
    }

    /// The version of the policy in force.
    pub fn policy_version(&self) -> &Arc<str> {
        &self.policy_version
    }

    /// Sets the version of the policy in force.
    pub(super) fn set_policy_version(&mut self, version: &str) {
        if *self.policy_version != *version {
            self.policy_version = version.into();
            self.list.iter_mut().filter_map(|member| member.policy_release.as_mut()).for_each(PolicyRelease::forget);
        }
    }

    /// Whether any other gateway still has to release what the policy in force takes from it: not only the former owner
    /// of a shard has sessions of its endpoints. A gateway that is inactive owns nothing, once it has released its
    /// shards by the view that makes it inactive.
    pub(super) fn awaits_policy_release(&self) -> bool {
        let awaits = |member: &Member| match &member.policy_release {
            None | Some(PolicyRelease::NotAwaited) => false,
            Some(PolicyRelease::Version(version)) => {
                !member.may_open || (member.active && *version != self.policy_version)
            }
        };
        self.ids().filter(|id| self.this != Some(*id)).any(|id| self.is(id, awaits))
    }

    fn is(&self, id: GatewayId, what: impl Fn(&Member) -> bool) -> bool {
        self.list.get(usize::from(id.0)).is_some_and(what)
    }

    /// Free gateway numbers.
    pub(super) fn free_ids(&self) -> usize {
        MAX_GATEWAYS - self.list.iter().filter(|member| !member.name.is_empty()).count()
    }

    /// The number of a gateway, assigned if it has none.
    pub(super) fn assign_id(&mut self, name: &Arc<str>) -> GatewayId {
        self.id(name).unwrap_or_else(|| {
            let free = self.list.iter().position(|member| member.name.is_empty());
            let at = free.filter(|_| self.list.len() == MAX_GATEWAYS).unwrap_or(self.list.len());
            debug_assert!(at < MAX_GATEWAYS, "validated against the limit");
            if at == self.list.len() {
                self.list.push(Member::unknown(name.clone()));
            } else {
                self.list[at] = Member::unknown(name.clone());
            }
            GatewayId(at as u8)
        })
    }

    /// The gateways whose state is known, and this one.
    pub(super) fn in_group(&self) -> impl Iterator<Item = GatewayId> + use<'_> {
        self.ids().filter(|&id| self.this == Some(id) || self.is(id, |member| member.policy_release.is_some()))
    }

    /// Frees the numbers of all gateways but these.
    pub(super) fn retain(&mut self, in_use: &GatewaySet) {
        for id in self.ids() {
            if !in_use.contains(id) {
                self.list[usize::from(id.0)] = Member::unknown("".into());
            }
        }
    }

    /// The same numbers with other states. Gateways beyond the last number are left out.
    pub(super) fn with_states(&self, spec: &MembersSpec) -> Self {
        let mut members = Self { active_since: spec.active_since, active_changes: spec.active_changes, ..self.clone() };
        for member in &mut members.list {
            *member = Member::unknown(member.name.clone());
        }
        for it in &spec.gateways {
            if members.free_ids() == 0 && members.id(&it.name).is_none() {
                continue;
            }
            let at = members.assign_id(&it.name);
            members.list[usize::from(at.0)] = Member {
                name: it.name.clone(),
                tunnel: it.tunnel,
                active: it.active,
                connected: it.connected,
                may_open: it.may_open,
                policy_release: Some(it.policy_release.clone()),
                authentication: it.authentication,
            };
        }
        members.this = spec
            .this
            .as_ref()
            .filter(|name| members.free_ids() > 0 || members.id(name).is_some())
            .cloned()
            .map(|name| members.assign_id(&name));
        members
    }
}
