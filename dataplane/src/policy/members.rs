//! Members of the gateway group and their state, which decides, with the placement, the owner of each shard.

use std::net::SocketAddr;
use std::sync::Arc;

use crate::flow::ids::GatewayId;
use crate::wire::tunnel_auth::TagKey;

/// Limit of gateway numbers.
pub const MAX_GATEWAYS: usize = 255;

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
    /// Its name.
    pub name: Arc<str>,
    /// Its tunnel address.
    pub tunnel: Option<SocketAddr>,
    /// Whether it is an active member.
    pub active: bool,
    /// Whether its replication channel is up.
    pub connected: bool,
    /// Whether this gateway may open sessions in shards whose home is that one; no other gateway does.
    pub may_open: bool,
    /// Authentication of packets between it and this gateway.
    pub authentication: Authentication,
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
}

/// A gateway. Only its name is set if policy names it but its state isn't known.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Member {
    name: Arc<str>,
    tunnel: Option<SocketAddr>,
    active: bool,
    connected: bool,
    may_open: bool,
    authentication: Authentication,
}

impl Member {
    fn unknown(name: Arc<str>) -> Self {
        let authentication = Authentication::None;
        Self { name, tunnel: None, active: false, connected: false, may_open: false, authentication }
    }
}

impl Members {
    /// This gateway; `None`: standalone.
    pub fn this(&self) -> Option<GatewayId> {
        self.this
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

    /// The gateway of this name.
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
    pub(super) fn is_connected(&self, id: GatewayId) -> bool {
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

    fn is(&self, id: GatewayId, what: impl Fn(&Member) -> bool) -> bool {
        self.list.get(usize::from(id.0)).is_some_and(what)
    }

    /// Free gateway numbers.
    pub(super) fn free_ids(&self) -> usize {
        MAX_GATEWAYS - self.list.len()
    }

    /// The number of a gateway, assigned if it has none.
    pub(super) fn assign_id(&mut self, name: &Arc<str>) -> GatewayId {
        self.id(name).unwrap_or_else(|| {
            self.list.push(Member::unknown(name.clone()));
            GatewayId((self.list.len() - 1) as u8)
        })
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
