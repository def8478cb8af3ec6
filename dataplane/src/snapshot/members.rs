//! The gateways that there are, and how each stands: what decides, beside the deal, who owns which share.

use std::net::SocketAddr;
use std::sync::Arc;

use crate::wire::tunnel_tag::TagKey;

/// Gateways that can have a number at most.
pub const MOST_GATEWAYS: usize = 255;

/// A gateway's number in this process: it stays the same for as long as the process lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GatewayId(pub u8);

/// All gateways as one of them sees them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MembersSpec {
    /// The name of this one; `None`: it is alone, and everything is its own.
    pub this: Option<Arc<str>>,
    /// Those whose state is known, this one included, each once. Of others, policy may speak all the same; they don't serve.
    pub gateways: Vec<MemberSpec>,
    /// The number of the view since which the same ones serve; 0 where nobody counts.
    pub since: u64,
    /// How often those who serve have changed; 0 where nobody counts.
    pub serving_changes: u64,
}

/// One gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberSpec {
    /// Its name.
    pub name: Arc<str>,
    /// Where it takes packets that are its own.
    pub tunnel: Option<SocketAddr>,
    /// Whether it serves.
    pub serving: bool,
    /// Whether it takes copies of sessions now.
    pub linked: bool,
    /// Whether this gateway may open sessions in shares whose home is that one: nobody else does.
    pub may_open: bool,
    /// How packets between it and this one are authenticated.
    pub authentication: Authentication,
}

/// How packets through the tunnel between this gateway and another one are authenticated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Authentication {
    /// Not at all: its packets are known by their source address and the interface that they come in on.
    #[default]
    None,
    /// Each has a tag.
    Tagged {
        /// The key of what this gateway sends.
        sent: TagKey,
        /// Those of what it takes: of the other one's process, and for a while of the process before that.
        taken: [Option<TagKey>; 2],
    },
    /// Each must have a tag, and the other one has no key: nothing of it is taken.
    Refused,
}

/// All gateways as the stages read them, by number.
#[derive(Clone, Debug, Default)]
pub struct Members {
    this: Option<GatewayId>,
    list: Vec<Member>,
    since: u64,
    serving_changes: u64,
    replica_changes: u64,
}

/// One of them. Of a gateway that policy speaks of, but whose state isn't known, only the name.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Member {
    name: Arc<str>,
    tunnel: Option<SocketAddr>,
    serving: bool,
    linked: bool,
    may_open: bool,
    authentication: Authentication,
}

impl Member {
    fn unknown(name: Arc<str>) -> Self {
        let authentication = Authentication::None;
        Self { name, tunnel: None, serving: false, linked: false, may_open: false, authentication }
    }
}

impl Members {
    /// This gateway; `None`: it is alone.
    pub fn this(&self) -> Option<GatewayId> {
        self.this
    }

    /// The number of the view since which the same ones serve.
    pub fn since(&self) -> u64 {
        self.since
    }

    /// Counts the changes of who is to have the sessions of a share, whether by a view or by policy: within one epoch it is the same for
    /// each of them. The first one is 1.
    pub fn replication_epoch(&self) -> u64 {
        self.replica_changes + 1
    }

    /// Another one begins.
    pub(super) fn begin_replication_epoch(&mut self) {
        self.replica_changes += 1;
    }

    /// How often those who serve have changed.
    pub(super) fn serving_changes(&self) -> u64 {
        self.serving_changes
    }

    /// The gateway of this name.
    pub fn id(&self, name: &str) -> Option<GatewayId> {
        self.list.iter().position(|member| *member.name == *name).map(|at| GatewayId(at as u8))
    }

    /// A gateway's name.
    pub fn name(&self, id: GatewayId) -> &Arc<str> {
        &self.list[usize::from(id.0)].name
    }

    /// Where a gateway takes packets that are its own.
    pub fn tunnel(&self, id: GatewayId) -> Option<SocketAddr> {
        self.list.get(usize::from(id.0))?.tunnel
    }

    /// How packets between a gateway and this one are authenticated.
    pub(super) fn authentication(&self, id: GatewayId) -> Authentication {
        self.list.get(usize::from(id.0)).map_or(Authentication::None, |member| member.authentication)
    }

    /// All of them.
    pub fn ids(&self) -> impl Iterator<Item = GatewayId> + use<> {
        (0..self.list.len()).map(|at| GatewayId(at as u8))
    }

    /// Whether a gateway serves.
    pub fn is_serving(&self, id: GatewayId) -> bool {
        self.is(id, |member| member.serving)
    }

    /// Whether it takes copies of sessions.
    pub(super) fn is_linked(&self, id: GatewayId) -> bool {
        self.is(id, |member| member.linked)
    }

    /// Whether this gateway may open sessions in shares whose home that is.
    pub(super) fn may_open(&self, home: GatewayId) -> bool {
        self.is(home, |member| member.may_open)
    }

    fn is(&self, id: GatewayId, what: impl Fn(&Member) -> bool) -> bool {
        self.list.get(usize::from(id.0)).is_some_and(what)
    }

    /// How many more gateways can have a number.
    pub(super) fn room(&self) -> usize {
        MOST_GATEWAYS - self.list.len()
    }

    /// The number of a gateway, which it has from now on.
    pub(super) fn number(&mut self, name: &Arc<str>) -> GatewayId {
        self.id(name).unwrap_or_else(|| {
            self.list.push(Member::unknown(name.clone()));
            GatewayId((self.list.len() - 1) as u8)
        })
    }

    /// The same numbers with other states. Gateways behind the last number are left out.
    pub(super) fn with(&self, spec: &MembersSpec) -> Self {
        let mut members = Self { since: spec.since, serving_changes: spec.serving_changes, ..self.clone() };
        for member in &mut members.list {
            *member = Member::unknown(member.name.clone());
        }
        for it in &spec.gateways {
            if members.room() == 0 && members.id(&it.name).is_none() {
                continue;
            }
            let at = members.number(&it.name);
            members.list[usize::from(at.0)] = Member {
                name: it.name.clone(),
                tunnel: it.tunnel,
                serving: it.serving,
                linked: it.linked,
                may_open: it.may_open,
                authentication: it.authentication,
            };
        }
        members.this = spec
            .this
            .as_ref()
            .filter(|name| members.room() > 0 || members.id(name).is_some())
            .cloned()
            .map(|name| members.number(&name));
        members
    }
}
