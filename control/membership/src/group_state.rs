//! Group state and the decisions that follow from it. No I/O; time is an argument.
//!
//! This gateway opens sessions in a new shard only when no other gateway does so any more: the previous owner has
//! released it, its lease had expired before the view was created, or the view is older than the TTL, so all leases
//! under earlier views have expired. It asks to become active only once it has the sessions of all active members; one
//! that takes its predecessor's place without the server opens sessions only then.

mod releases;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vipgate_dataplane::flow::time::Tick;
use vipgate_dataplane::policy::members::{Authentication, MemberSpec, MembersSpec, PolicyRelease};
use vipgate_policy::compiler;

use self::releases::{AwaitedRelease, PolicyReleases};
use super::replication::{Release, ReplicationStatus};
use super::status::{Authority, MembershipStatus};
use super::succession::Claim;
use super::{DesiredState, DrainBlock, DrainBlockReason, Member, MembershipView};

/// An active member starts a full sync after each view that changes the active members. If none has started within this
/// time, it is requested: the peer may have missed that view, and not all versions detect that from the next one.
const SYNC_TIMEOUT: Duration = Duration::from_secs(1);

/// The source of membership.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MembershipSource {
    /// The gateways of the policy: a fixed view.
    Fixed,
    /// The policy server, if it is a membership authority.
    Server,
}

/// One of our heartbeats that a peer has echoed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceivedEcho {
    /// When it was sent, or slightly earlier.
    pub sent: Tick,
    /// The view that the peer used when it echoed.
    pub view: u64,
}

/// What decisions need to know about a peer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerState {
    /// Whether the link to it is up.
    pub linked: bool,
    /// The last of our heartbeats that it has echoed.
    pub last_echo: Option<ReceivedEcho>,
    /// When we last echoed one of its heartbeats, or slightly later.
    pub echo_sent_at: Option<Tick>,
    /// Its view at the start of its last full sync to this gateway; `None` until one has ended since the link came up.
    pub sync_view: Option<u64>,
    /// Whether it has all sessions of this gateway.
    pub in_sync_to: bool,
    /// What it has released last.
    pub released: Option<Release>,
    /// The version of the policy in this gateway's last release that it has acknowledged.
    pub acknowledged_policy: Option<Arc<str>>,
    /// Whether its last full sync to this gateway was by another policy.
    pub has_other_policy: bool,
}

impl PeerState {
    /// The state of a peer with this replication status.
    pub fn of(linked: bool, replication: &ReplicationStatus) -> Self {
        Self {
            linked,
            last_echo: None,
            echo_sent_at: None,
            sync_view: replication.in_sync_from.then_some(replication.sync_view),
            in_sync_to: replication.in_sync_to,
            released: replication.peer_released.clone(),
            acknowledged_policy: replication.released.as_ref().map(|release| release.policy.clone()),
            has_other_policy: replication.has_other_policy,
        }
    }
}

/// By what right this process has its gateway's place in the view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Entitlement {
    /// The policy server names it, or will.
    Assigned,
    /// The view names a predecessor, and the server was away: it doesn't have the sessions of all active members yet.
    CatchingUp,
    /// The same, and it has had them.
    Inherited,
}

/// State of the group as seen by this gateway.
#[derive(Clone, Debug)]
pub struct GroupState {
    name: Arc<str>,
    /// This process, and its predecessors; `None`: it isn't distinguished from others of this name.
    claim: Option<Claim>,
    entitlement: Entitlement,
    /// Tunnel endpoint of this gateway.
    endpoint: Option<SocketAddr>,
    source: MembershipSource,
    policy: Vec<compiler::Peer>,
    policy_releases: PolicyReleases,
    authority: Authority,
    view: Arc<MembershipView>,
    ttl: Duration,
    /// Whether `ttl` comes from a granted lease.
    is_granted: bool,
    links: BTreeMap<Arc<str>, PeerState>,
    /// For each gateway, what it has released last.
    released: BTreeMap<Arc<str>, Release>,
    /// The view of the last change of active members, and when it was received.
    active_change: Option<(u64, Instant)>,
    /// Gateways that may have owned shards of this one.
    awaiting_release: BTreeMap<Arc<str>, AwaitedRelease>,
    /// When this process had its first membership. Until then, its predecessor may have made promises.
    started: Option<Tick>,
    /// Whether this gateway may open sessions in its own shards; holds while it stays active.
    owns_home_shards: bool,
    draining: bool,
    /// Why the drain is blocked, as the policy server has last replied.
    drain_block: Option<DrainBlock>,
    /// When full syncs were last requested.
    sync_requested: Option<Instant>,
    /// The fault that makes this gateway unable to forward.
    unable: Option<Arc<str>>,
}

impl GroupState {
    /// The state before the first policy and the first view.
    pub fn new(name: Arc<str>, endpoint: Option<SocketAddr>, source: MembershipSource) -> Self {
        let authority = if source == MembershipSource::Fixed { Authority::Fixed } else { Authority::Unknown };
        Self {
            name,
            claim: None,
            entitlement: Entitlement::Assigned,
            endpoint,
            source,
            policy: Vec::new(),
            policy_releases: PolicyReleases::default(),
            authority,
            view: Arc::default(),
            ttl: Duration::ZERO,
            is_granted: false,
            links: BTreeMap::new(),
            released: BTreeMap::new(),
            active_change: None,
            awaiting_release: BTreeMap::new(),
            started: None,
            owns_home_shards: false,
            draining: false,
            drain_block: None,
            sync_requested: None,
            unable: None,
        }
    }

    /// Sets which process this is.
    pub fn set_claim(&mut self, claim: Claim) {
        self.claim = Some(claim);
    }

    /// Sets the gateways and the version of the policy in force.
    pub fn set_policy(&mut self, gateways: &[compiler::Peer], version: &Arc<str>, now: Instant) {
        self.policy = gateways.to_vec();
        self.policy_releases.set_version(version, now);
    }

    /// Sets whether the engine awaits releases by policy.
    pub fn set_awaits_policy_release(&mut self, awaits: bool, now: Instant) {
        self.policy_releases.set_awaited(awaits, now);
    }

    /// Starts or ends draining.
    pub fn set_draining(&mut self, draining: bool) {
        self.draining = draining;
    }

    /// Why the drain is blocked, if it is.
    pub fn drain_block(&self) -> Option<&DrainBlock> {
        self.drain_block.as_ref()
    }

    /// Gives up a drain that the policy server refuses, and returns why it does.
    pub fn give_up_refused_drain(&mut self) -> Option<DrainBlock> {
        let block = self.drain_block.take_if(|block| block.reason == DrainBlockReason::NoBackup)?;
        self.draining = false;
        Some(block)
    }

    /// Sets the fault that makes this gateway unable to forward; `None`: it has none.
    pub fn set_unable(&mut self, reason: Option<Arc<str>>) {
        self.unable = reason;
    }

    /// The fault that makes this gateway unable to forward.
    pub fn unable(&self) -> Option<&Arc<str>> {
        self.unable.as_ref()
    }

    /// Whether it is draining.
    pub fn is_draining(&self) -> bool {
        self.draining
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// The latest view.
    pub fn view(&self) -> &Arc<MembershipView> {
        &self.view
    }

    /// Updates membership: the latest view, the authority and the lease TTL.
    pub fn set_status(&mut self, status: &MembershipStatus, now: Instant) {
        debug_assert!(self.source == MembershipSource::Server, "membership without a policy server");
        let was_active = self.is_active_member(&self.name);
        self.await_releases(&status.view, now);
        self.forget_releases(&status.view);
        if self.active_change.is_none() || !self.view.has_same_active_members(&status.view) {
            self.active_change = Some((status.view.number, now));
        }
        (self.authority, self.view) = (status.authority, status.view.clone());
        (self.ttl, self.is_granted) = (status.ttl, status.is_ttl_confirmed);
        self.update_entitlement();
        self.drain_block = status.drain_block.clone().filter(|_| self.draining);
        self.owns_home_shards &= was_active && self.is_active_member(&self.name);
    }

    /// Whether the view names a predecessor of this process.
    fn is_successor(&self) -> bool {
        let succeeds = |member: &Member| self.claim.as_ref().is_some_and(|claim| claim.succeeds(member.incarnation));
        self.view.member(&self.name).is_some_and(succeeds)
    }

    /// Whether the view names this process, or a predecessor. Another one may have a lease.
    fn is_entitled(&self) -> bool {
        let is_own = |member: &Member| self.claim.as_ref().is_none_or(|claim| claim.incarnation == member.incarnation);
        self.is_successor() || self.view.member(&self.name).is_some_and(is_own)
    }

    /// A process takes its predecessor's place while the server is away, and gives it up to no earlier view than one that
    /// names another process.
    fn update_entitlement(&mut self) {
        self.entitlement = match self.entitlement {
            _ if !self.is_successor() => Entitlement::Assigned,
            Entitlement::Assigned if self.authority == Authority::Unreachable => Entitlement::CatchingUp,
            entitlement => entitlement,
        };
    }

    /// Whether this process has its predecessor's place, which no view has given it.
    pub fn has_taken_place(&self) -> bool {
        self.entitlement != Entitlement::Assigned
    }

    /// The peers whose last full sync was by another policy.
    pub fn peers_ahead(&self) -> impl Iterator<Item = &Arc<str>> {
        let is_ahead = |peer: &&Arc<str>| self.links.get(*peer).is_some_and(|it| it.has_other_policy);
        self.peers().filter(is_ahead)
    }

    /// Sets the state of all peers.
    pub fn set_links(&mut self, links: BTreeMap<Arc<str>, PeerState>) {
        for (name, peer) in &links {
            if let Some(release) = &peer.released {
                self.mark_released(name.clone(), release);
            }
        }
        self.links = links;
    }

    /// Whether a gateway is active in the current view.
    fn is_active_member(&self, name: &str) -> bool {
        self.view.member(name).is_some_and(|member| member.serving)
    }

    /// Whether this gateway is active in the current view.
    pub fn is_active(&self) -> bool {
        self.is_active_member(&self.name)
    }

    /// The peers: all other gateways in the view.
    pub fn peers(&self) -> impl Iterator<Item = &Arc<str>> {
        self.view.members.iter().map(|member| &member.name).filter(|name| **name != self.name)
    }

    /// Whether it is unknown yet if there is a membership authority, and the policy names gateways.
    pub fn is_authority_unknown(&self) -> bool {
        self.authority == Authority::Unknown && !self.policy.is_empty()
    }

    /// Whether there is a membership authority, or may be.
    fn has_authority(&self) -> bool {
        self.source == MembershipSource::Server && self.authority != Authority::Fixed
    }

    /// Whether a lease is required: other gateways could own this gateway's shards.
    pub fn needs_lease(&self) -> bool {
        let has_others = self.policy.len() > 1 || self.peers().next().is_some() || self.gone().next().is_some();
        self.has_authority() && has_others
    }

    /// The membership for the engine, without the authentication of tunnels.
    pub fn spec(&mut self, now: Instant, tick: Tick) -> MembersSpec {
        self.started.get_or_insert(tick);
        if self.policy.is_empty() {
            return MembersSpec::default();
        }
        let gateways = if self.needs_lease() { self.members_of_view(now, tick) } else { self.fixed_members() };
        MembersSpec {
            this: Some(self.name.clone()),
            gateways,
            active_since: self.active_since(),
            active_changes: self.view.serving_changes,
        }
    }

    /// The number of the view of the last change of active members; 0 without views.
    pub fn active_since(&self) -> u64 {
        self.active_change.map_or(0, |(number, _)| number)
    }

    /// The members of a fixed view, or of a single gateway: all are active.
    fn fixed_members(&self) -> Vec<MemberSpec> {
        let port = self.endpoint.map_or(0, |endpoint| endpoint.port());
        let member = |peer: &compiler::Peer| MemberSpec {
            name: peer.name.clone(),
            tunnel: if *peer.name == *self.name {
                self.endpoint
            } else {
                peer.address.map(|it| SocketAddr::new(it, port))
            },
            active: true,
            connected: false,
            may_open: true,
            policy_release: PolicyRelease::NotAwaited,
            authentication: Authentication::None,
        };
        self.policy.iter().map(member).collect()
    }

    /// The members of the current view.
    fn members_of_view(&mut self, now: Instant, tick: Tick) -> Vec<MemberSpec> {
        if self.entitlement == Entitlement::CatchingUp && self.is_synced(now) {
            self.entitlement = Entitlement::Inherited;
        }
        let all_released = self.entitlement != Entitlement::CatchingUp && self.all_released(now, tick);
        self.update_policy_releases(now);
        self.owns_home_shards |= all_released && self.is_active_member(&self.name);
        let owns_home_shards = self.owns_home_shards;
        let member = |member: &Member| MemberSpec {
            name: member.name.clone(),
            tunnel: if member.name == self.name {
                self.endpoint
            } else {
                member.peer.or_else(|| self.endpoint_in_policy(&member.name))
            },
            active: member.serving,
            connected: self.links.get(&member.name).is_some_and(|peer| peer.linked),
            may_open: if member.name == self.name { owns_home_shards } else { all_released },
            policy_release: self.policy_releases.published.get(&member.name).cloned().unwrap_or_default(),
            authentication: Authentication::None,
        };
        let gone = self.gone().map(|name| MemberSpec {
            name: name.clone(),
            tunnel: None,
            active: false,
            connected: false,
            may_open: all_released,
            policy_release: PolicyRelease::Version("".into()),
            authentication: Authentication::None,
        });
        self.view.members.iter().map(member).chain(gone).collect()
    }

    fn endpoint_in_policy(&self, name: &str) -> Option<SocketAddr> {
        let port = self.endpoint?.port();
        self.policy.iter().find(|peer| *peer.name == *name)?.address.map(|address| SocketAddr::new(address, port))
    }

    fn ttl_ms(&self) -> u32 {
        u32::try_from(self.ttl.as_millis()).unwrap_or(u32::MAX)
    }

    /// The next deadline at which decisions may change without new input.
    pub fn next_deadline(&self, now: Instant) -> Option<Instant> {
        let deadlines = self.awaited_deadlines();
        let deadlines = deadlines.chain(self.sync_deadline(now)).chain(self.policy_deadlines());
        let deadlines = deadlines.filter(|deadline| *deadline > now);
        // After each one, decisions are evaluated again.
        deadlines.min().filter(|_| self.needs_lease())
    }

    /// The state that this gateway wants to be in.
    pub fn desired_state(&self, now: Instant) -> DesiredState {
        if self.unable.is_some() {
            // At once: sessions that the standby gateways don't have yet are lost in any case.
            return DesiredState::Draining;
        }
        if self.draining {
            // Once inactive, it doesn't become active again to replicate the rest.
            return if self.is_replicated() || !self.is_active() {
                DesiredState::Draining
            } else {
                DesiredState::Ready
            };
        }
        if self.is_removed() && (self.is_handed_over(now) || !self.is_active()) {
            return DesiredState::Draining;
        }
        if self.is_active_member(&self.name) || self.is_synced(now) {
            DesiredState::Ready
        } else {
            DesiredState::Joining
        }
    }

    /// Whether all peers that could take over have this gateway's sessions.
    fn is_replicated(&self) -> bool {
        self.reachable().all(|peer| self.links.get(&peer.name).is_some_and(|it| it.linked && it.in_sync_to))
    }

    /// Whether the policy names gateways, and not this one.
    pub fn is_removed(&self) -> bool {
        !self.policy.is_empty() && !self.policy.iter().any(|peer| *peer.name == *self.name)
    }

    /// Whether each active member has completed a full sync to this gateway that began under the current active
    /// members.
    fn is_synced(&self, now: Instant) -> bool {
        let has_sync = |peer: &Member| {
            let is_current = self.sync_view(peer).is_some_and(|view| view >= self.active_since());
            // A peer with another policy doesn't know yet what this gateway has to get.
            is_current && self.has_policy(&peer.name, now)
        };
        self.view.number > 0 && self.reachable().all(has_sync)
    }

    /// The view under which the last full sync of a peer began; `None` while it is incomplete.
    fn sync_view(&self, peer: &Member) -> Option<u64> {
        self.links.get(&peer.name).filter(|it| it.linked)?.sync_view
    }

    /// When to request full syncs from peers whose last one began under an older view.
    fn sync_deadline(&self, now: Instant) -> Option<Instant> {
        let awaits_sync =
            self.entitlement == Entitlement::CatchingUp || self.desired_state(now) == DesiredState::Joining;
        let (_, received) = self.active_change.filter(|_| awaits_sync)?;
        Some(self.sync_requested.map_or(received, |requested| requested.max(received)) + SYNC_TIMEOUT)
    }

    /// The peers to request a full sync from, since they haven't started one under the current view.
    pub fn sync_targets(&mut self, now: Instant) -> Vec<Arc<str>> {
        if self.sync_deadline(now).is_none_or(|deadline| now < deadline) {
            return Vec::new();
        }
        let is_old = |peer: &&Member| self.sync_view(peer).is_some_and(|view| view < self.active_since());
        let overdue: Vec<_> = self.reachable().filter(is_old).map(|peer| peer.name.clone()).collect();
        if !overdue.is_empty() {
            self.sync_requested = Some(now);
        }
        overdue
    }

    /// The active peers that links can connect to.
    fn reachable(&self) -> impl Iterator<Item = &Member> {
        let is_reachable =
            |member: &&Member| member.peer.is_some() && member.fingerprint.is_some() && self.endpoint.is_some();
        self.view.active_members().filter(|member| member.name != self.name).filter(is_reachable)
    }

    /// Whether this gateway forwards packets: before it has a view, or while it is active without a lease and without the
    /// server, it drops them.
    pub fn forwards(&self, has_lease: bool) -> bool {
        let is_in_place = match self.authority {
            Authority::Unknown => false,
            Authority::Unreachable => has_lease || !self.is_active(),
            Authority::Fixed | Authority::Reachable => true,
        };
        is_in_place || !self.needs_lease()
    }

    /// Until when all peers have promised not to use this gateway's shards, while the policy server is unreachable, or
    /// doesn't know yet that this process has taken its predecessor's place. A gateway that the server has assigned them
    /// to would use a newer view, and promise nothing under this one. Nor does a gateway of the policy that this view
    /// doesn't have yet. Before the first lease, it is unknown for how long a promise holds.
    pub fn lease_from_peers(&self) -> Option<Tick> {
        let counts = match self.authority {
            Authority::Unreachable => true,
            Authority::Reachable => self.entitlement != Entitlement::Assigned,
            Authority::Unknown | Authority::Fixed => false,
        };
        if !counts || !self.is_granted || !self.is_active_member(&self.name) || !self.is_entitled() {
            return None;
        }
        let promise = |name: &Arc<str>| {
            let peer = self.links.get(name)?;
            let echoed = peer.last_echo.filter(|echoed| echoed.view == self.view.number)?;
            Some(echoed.sent.plus(self.ttl_ms()))
        };
        let mut until: Option<Tick> = None;
        let in_policy = self.policy.iter().map(|peer| &peer.name).filter(|name| **name != self.name);
        for name in self.peers().chain(in_policy) {
            let promised = promise(name)?;
            until = Some(until.map_or(promised, |until| if until.reached(promised) { promised } else { until }));
        }
        until
    }
}

#[cfg(test)]
mod tests;
