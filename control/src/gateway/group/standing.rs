//! What is known of all gateways, and what follows of it: no I/O, and time is an argument.
//!
//! A share that comes to this gateway may be opened in only when nobody else does so any more: whoever had it has said so, or its lease
//! had ended before the view was made, or so much time has passed since the view that every lease of the one before has ended. And this
//! gateway asks to serve only when it has what those who serve have told.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vipgate_dataplane::snapshot::members::{Authentication, MemberSpec, MembersSpec};
use vipgate_dataplane::time::Tick;

use super::authentication::Tunnels;
use crate::config::{Config, PolicySource};
use crate::members::{Authority, Member, Status, View, Wish};
use crate::peer::{self, PeersStatus};
use crate::policy;

/// Whoever serves tells all by each view by which others serve than before, and begins at once. If nothing of that is seen for so long, it
/// is asked to: it may not have seen that there was such a view, and not all versions know it by the next one.
const ROUND_TIMEOUT: Duration = Duration::from_secs(1);

/// Who says who serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::gateway) enum Source {
    /// Nobody: all do, always.
    Static,
    /// The policy server, where it does so.
    Server,
}

impl Source {
    /// Who says it where policy comes from there.
    pub(super) fn of(config: &Config) -> Self {
        match config.policy {
            PolicySource::Server(_) => Self::Server,
            PolicySource::Files(_) => Self::Static,
        }
    }
}

/// All that is known.
#[derive(Debug)]
pub(in crate::gateway) struct Standing {
    name: Arc<str>,
    /// Where this gateway is reached by others.
    own: Option<SocketAddr>,
    source: Source,
    policy: Vec<policy::Peer>,
    authority: Authority,
    view: Arc<View>,
    ttl: Duration,
    /// Whether a lease has said so.
    is_granted: bool,
    links: Arc<PeersStatus>,
    /// Up to which view each gateway has let go of what it takes from it.
    released: BTreeMap<Arc<str>, u64>,
    /// The view since which the same ones serve, and when it came.
    changed: Option<(u64, Instant)>,
    /// Gateways that may have had what is this one's by now, the number of the view by which they have to let go, and when it came.
    awaited: BTreeMap<Arc<str>, (u64, Instant)>,
    /// Whether this gateway has served ever since it may have opened sessions in its own shares.
    opened: bool,
    draining: bool,
    /// When those were asked last who have told all by an older view only.
    asked: Option<Instant>,
    tunnels: Tunnels,
    /// Why this gateway can't do what it serves for, if it can't.
    unable: Option<Arc<str>>,
}

impl Standing {
    pub(super) fn new(name: Arc<str>, own: Option<SocketAddr>, source: Source, tunnels: Tunnels) -> Self {
        let authority = if source == Source::Static { Authority::None } else { Authority::Unknown };
        Self {
            name,
            own,
            source,
            policy: Vec::new(),
            authority,
            view: Arc::default(),
            ttl: Duration::ZERO,
            is_granted: false,
            links: Arc::default(),
            released: BTreeMap::new(),
            changed: None,
            awaited: BTreeMap::new(),
            opened: false,
            draining: false,
            asked: None,
            tunnels,
            unable: None,
        }
    }

    pub(super) fn set_policy(&mut self, gateways: &[policy::Peer]) {
        self.policy = gateways.to_vec();
    }

    pub(super) fn set_draining(&mut self, draining: bool) {
        self.draining = draining;
    }

    pub(super) fn set_unable(&mut self, reason: Option<Arc<str>>) {
        self.unable = reason;
    }

    pub(super) fn unable(&self) -> Option<&Arc<str>> {
        self.unable.as_ref()
    }

    pub(super) fn is_draining(&self) -> bool {
        self.draining
    }

    pub(super) fn view(&self) -> &Arc<View> {
        &self.view
    }

    pub(super) fn set_status(&mut self, status: &Status, now: Instant) {
        debug_assert!(self.source == Source::Server, "nobody tells without a server");
        let served = self.serves(&self.name);
        self.await_others(&status.view, now);
        if self.changed.is_none() || !self.view.serves_alike(&status.view) {
            self.changed = Some((status.view.number, now));
        }
        (self.authority, self.view) = (status.authority, status.view.clone());
        (self.ttl, self.is_granted) = (status.ttl, status.is_granted);
        self.tunnels.see(&self.name, &self.view, now, self.ttl);
        self.opened &= served && self.serves(&self.name);
    }

    /// Notes who has to let go before this gateway may open sessions in what is new to it. While it serves, that only ever comes from
    /// gateways that have stopped meanwhile, seen or not: their epochs say so. When it begins to serve, from any.
    fn await_others(&mut self, view: &View, now: Instant) {
        let own = |view: &View| view.member(&self.name).filter(|member| member.serving).map(|member| member.epoch);
        let goes_on = own(&self.view).is_some() && own(&self.view) == own(view);
        let has_stopped = |member: &Member| {
            let before = self.view.member(&member.name);
            before.is_none_or(|it| it.epoch != member.epoch || (it.serving && !member.serving))
        };
        let is_new = self.changed.is_none() || self.view.number != view.number;
        let others = view.members.iter().filter(|member| is_new && member.name != self.name);
        let awaited = others.filter(|member| !goes_on || has_stopped(member));
        let awaited: Vec<_> = awaited.map(|member| (member.name.clone(), (view.number, now))).collect();
        self.awaited.extend(awaited);
        self.awaited.retain(|name, _| view.member(name).is_some());
    }

    pub(super) fn set_links(&mut self, links: Arc<PeersStatus>) {
        for (name, peer) in &links.peers {
            if let Some(view) = peer.copies.released_by {
                let known = self.released.entry(name.clone()).or_default();
                *known = view.max(*known);
            }
        }
        self.links = links;
    }

    /// A gateway has let go of what a view takes from it.
    pub(super) fn release(&mut self, gateway: Arc<str>, view: u64) {
        let known = self.released.entry(gateway).or_default();
        *known = view.max(*known);
    }

    /// Whether the view says that a gateway serves.
    fn serves(&self, name: &str) -> bool {
        self.view.member(name).is_some_and(|member| member.serving)
    }

    /// Whether the view says that this gateway serves.
    pub(super) fn is_serving(&self) -> bool {
        self.serves(&self.name)
    }

    /// All other gateways of the view.
    pub(super) fn others(&self) -> impl Iterator<Item = &Arc<str>> {
        self.view.members.iter().map(|member| &member.name).filter(|name| **name != self.name)
    }

    /// Whether it isn't known yet whether anybody decides, and it matters.
    pub(super) fn is_unknown(&self) -> bool {
        self.authority == Authority::Unknown && !self.policy.is_empty()
    }

    /// Whether anybody decides who serves.
    fn is_decided(&self) -> bool {
        self.source == Source::Server && self.authority != Authority::None
    }

    /// Whether others could have this gateway's shares.
    pub(super) fn needs_lease(&self) -> bool {
        self.is_decided() && (self.policy.len() > 1 || self.others().next().is_some())
    }

    /// The view as links need it.
    pub(super) fn links_view(&self) -> Arc<peer::View> {
        let member = |member: &Member| peer::Member {
            name: member.name.clone(),
            address: member.peer,
            fingerprint: member.fingerprint.map(peer::Fingerprint),
            serving: member.serving,
            incarnation: member.incarnation,
        };
        Arc::new(peer::View {
            number: self.view.number,
            members: self.view.members.iter().map(member).collect(),
            said: self.view.clone(),
        })
    }

    /// What the engine is to be told.
    pub(super) fn spec(&mut self, now: Instant, tick: Tick) -> MembersSpec {
        if self.policy.is_empty() {
            return MembersSpec::default();
        }
        let gateways = if self.needs_lease() { self.decided(now, tick) } else { self.undecided() };
        MembersSpec {
            this: Some(self.name.clone()),
            gateways,
            since: self.since(),
            serving_changes: self.view.most_serving_changes(),
        }
    }

    /// The number of the view since which the same ones serve; 0 where nobody counts.
    pub(super) fn since(&self) -> u64 {
        self.changed.map_or(0, |(number, _)| number)
    }

    /// Nobody decides, or there is nobody else: all serve.
    fn undecided(&self) -> Vec<MemberSpec> {
        let port = self.own.map_or(0, |own| own.port());
        let member = |peer: &policy::Peer| MemberSpec {
            name: peer.name.clone(),
            tunnel: if *peer.name == *self.name { self.own } else { peer.address.map(|it| SocketAddr::new(it, port)) },
            serving: true,
            linked: false,
            may_open: true,
            authentication: self.tunnels.without_key(),
        };
        self.policy.iter().map(member).collect()
    }

    fn decided(&mut self, now: Instant, tick: Tick) -> Vec<MemberSpec> {
        let is_free = self.is_free(now, tick);
        self.opened |= is_free && self.serves(&self.name);
        let own = self.opened;
        let member = |member: &Member| MemberSpec {
            name: member.name.clone(),
            tunnel: if member.name == self.name {
                self.own
            } else {
                member.peer.or_else(|| self.told_by_policy(&member.name))
            },
            serving: member.serving,
            linked: self.links.peers.get(&member.name).is_some_and(|peer| peer.linked),
            may_open: if member.name == self.name { own } else { is_free },
            authentication: if member.name == self.name {
                Authentication::None
            } else {
                self.tunnels.with(&member.name, now)
            },
        };
        self.view.members.iter().map(member).collect()
    }

    fn told_by_policy(&self, name: &str) -> Option<SocketAddr> {
        let port = self.own?.port();
        self.policy.iter().find(|peer| *peer.name == *name)?.address.map(|address| SocketAddr::new(address, port))
    }

    /// Whether nobody has anything any more of what a view has given to this gateway.
    fn is_free(&self, now: Instant, tick: Tick) -> bool {
        let has_let_go = |(name, (number, came)): (&Arc<str>, &(u64, Instant))| {
            // Without a lease it can't know how long one lasts, and can't do anything anyway.
            let is_over = self.is_granted && now >= *came + self.ttl;
            let Some(member) = self.view.member(name).filter(|_| !is_over) else { return true };
            let released = self.released.get(&member.name).copied().unwrap_or(0);
            let lapsed = !member.serving && member.lapsed && self.is_promise_over(&member.name, tick);
            // Nobody can have promised anything to a process that has promised nothing yet.
            lapsed || member.incarnation == 0 || released >= *number
        };
        self.changed.is_some() && self.awaited.iter().all(has_let_go)
    }

    /// Whether nothing that this gateway has promised another one holds any more: while the server can't be heard, that is its lease.
    fn is_promise_over(&self, name: &str, tick: Tick) -> bool {
        let promised = self.links.peers.get(name).and_then(|peer| peer.promised);
        promised.is_none_or(|promised| tick.reached(promised.plus(self.ttl_ms())))
    }

    fn ttl_ms(&self) -> u32 {
        u32::try_from(self.ttl.as_millis()).unwrap_or(u32::MAX)
    }

    /// When to look again without any news.
    pub(super) fn due(&self) -> Option<Instant> {
        let now = Instant::now();
        let dues = self.awaited.values().map(|(_, came)| *came + self.ttl).chain(self.tunnels.due());
        let dues = dues.chain(self.round_due());
        let dues = dues.filter(|due| *due > now);
        // Looked at once behind each, too.
        dues.min().filter(|_| self.needs_lease())
    }

    /// What this gateway wants.
    pub(super) fn wish(&self) -> Wish {
        if self.unable.is_some() {
            // At once: what those who stand in haven't got yet would be lost in any case.
            return Wish::Draining;
        }
        if self.draining {
            // Once it has stopped, it doesn't come back for what it has still to tell.
            return if self.is_told() || !self.serves(&self.name) { Wish::Draining } else { Wish::Ready };
        }
        if self.serves(&self.name) || self.has_all() { Wish::Ready } else { Wish::Joining }
    }

    /// Whether those who would stand in for this gateway have what it has.
    fn is_told(&self) -> bool {
        self.reachable()
            .all(|peer| self.links.peers.get(&peer.name).is_some_and(|it| it.linked && it.copies.in_sync_to))
    }

    /// Whether it has what those who serve have told, by a view by which they did.
    fn has_all(&self) -> bool {
        let has_round = |peer: &Member| self.round_of(peer).is_some_and(|view| view >= self.since());
        self.view.number > 0 && self.reachable().all(has_round)
    }

    /// The view by which a gateway has begun to tell all that it has told; `None` while something of it is missing.
    fn round_of(&self, peer: &Member) -> Option<u64> {
        let peer = self.links.peers.get(&peer.name).filter(|it| it.linked && it.copies.in_sync_from)?;
        Some(peer.copies.synced_by)
    }

    /// When whoever has told all only by an older view is asked to do so again.
    fn round_due(&self) -> Option<Instant> {
        let (_, came) = self.changed.filter(|_| self.wish() == Wish::Joining)?;
        Some(self.asked.map_or(came, |asked| asked.max(came)) + ROUND_TIMEOUT)
    }

    /// Who is to be asked for all sessions, since nothing else makes it tell them by the view that stands.
    pub(super) fn overdue(&mut self, now: Instant) -> Vec<Arc<str>> {
        if self.round_due().is_none_or(|due| now < due) {
            return Vec::new();
        }
        let is_old = |peer: &&Member| self.round_of(peer).is_some_and(|view| view < self.since());
        let overdue: Vec<_> = self.reachable().filter(is_old).map(|peer| peer.name.clone()).collect();
        if !overdue.is_empty() {
            self.asked = Some(now);
        }
        overdue
    }

    /// Others who serve, and say where they can be reached.
    fn reachable(&self) -> impl Iterator<Item = &Member> {
        let is_reachable =
            |member: &&Member| member.peer.is_some() && member.fingerprint.is_some() && self.own.is_some();
        self.view.serving().filter(|member| member.name != self.name).filter(is_reachable)
    }

    /// Until when every other gateway has promised to keep off this one's shares, where the policy server can't be heard: then it can't
    /// have given them to anybody who hasn't heard of it.
    pub(super) fn lease_by_peers(&self) -> Option<Tick> {
        if self.authority != Authority::Lost || !self.serves(&self.name) {
            return None;
        }
        let promise = |name: &Arc<str>| {
            let peer = self.links.peers.get(name)?;
            let echoed = peer.echoed.filter(|echoed| echoed.view == self.view.number)?;
            Some(echoed.sent.plus(self.ttl_ms()))
        };
        let mut until: Option<Tick> = None;
        for name in self.others() {
            let promised = promise(name)?;
            until = Some(until.map_or(promised, |until| if until.reached(promised) { promised } else { until }));
        }
        until
    }
}

#[cfg(test)]
mod tests;
