//! Membership coordinator: the one task that owns the membership state. It applies a batch of heartbeats, decides the
//! next view, commits both to the store and replies only then, so no gateway learns of a decision that other servers
//! don't have. Where servers elect a leader, only that one's coordinator does so; others refuse heartbeats, and follow
//! the view in the store.

mod log;
mod role;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until};

use self::role::Role;
use super::outage::Outage;
use super::store::kubernetes::KubernetesStore;
use super::store::{CommitOutcome, EtcdStore, MemoryStore, RemoteWrite, Store, StoreError, Transaction};
use crate::config::{Leases, MembershipLimits, PolicydSource};
use crate::membership::authority::{HeartbeatOutcome, MembershipState, Rejection};
use crate::membership::{DrainBlock, Heartbeat, Member, MembershipView};
use crate::policyd::leader::Leadership;
use crate::policyd::stats::Stats;
use crate::xds::publication::Publication;

/// Capacity of the event queue; when it is full, streams wait.
const QUEUE: usize = 1024;
/// Maximum number of events in a batch: etcd allows 128 operations in a transaction.
const MAX_BATCH: usize = 100;
/// Attempts to commit while other servers write concurrently.
const MAX_ATTEMPTS: usize = 8;
/// Maximum number of gateways with a rival to report.
const MAX_RIVALS: usize = 1024;

/// Identity of a stream, and its remote address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StreamOrigin {
    /// A number that differs for each stream of this server.
    pub(super) stream: u64,
    pub(super) address: Option<SocketAddr>,
}

#[derive(Debug)]
pub(super) enum StreamEvent {
    /// A gateway has sent a heartbeat.
    Heartbeat(Box<Heartbeat>, StreamOrigin, oneshot::Sender<Result<HeartbeatReply, HeartbeatError>>),
    /// The stream of a process has ended.
    Closed(Arc<str>, u64, StreamOrigin),
}

/// Reply to a heartbeat.
#[derive(Clone, Debug)]
pub(super) struct HeartbeatReply {
    /// Duration of the lease, from when the heartbeat was sent.
    pub(super) lease: Option<Duration>,
    /// The view under which it is granted.
    pub(super) view: Arc<MembershipView>,
    /// Address of another process that has tried to use the gateway's name.
    pub(super) rival: Option<SocketAddr>,
    /// Why the drain that the heartbeat requests is blocked.
    pub(super) drain_block: Option<DrainBlock>,
    /// Whether the policy doesn't name this gateway.
    pub(super) is_unknown_gateway: bool,
}

/// Why a heartbeat is answered with an error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum HeartbeatError {
    #[error("{rejection}{}", live_address.map(|it| format!("; its address is {it}")).unwrap_or_default())]
    Rejected {
        rejection: Rejection,
        /// Address of the process that has the name, if it is connected to this server.
        live_address: Option<SocketAddr>,
    },
    #[error("the membership store is unavailable: {0}")]
    Store(#[from] StoreError),
    #[error("this policy server doesn't lead: another one decides membership")]
    NotLeader,
    #[error("{MAX_ATTEMPTS} attempts to commit failed because other servers wrote concurrently")]
    Conflict,
}

/// Handle of the membership authority, for streams, status and metrics.
#[derive(Clone, Debug)]
pub struct MembershipHandle {
    pub(super) events: mpsc::Sender<StreamEvent>,
    /// The current membership view.
    pub view: watch::Receiver<Arc<MembershipView>>,
    /// The membership state, with the last heartbeat of each gateway.
    pub state: Arc<ArcSwap<MembershipState>>,
}

/// Starts the membership authority with the configured store: where manifests are, if that can be written, else memory.
/// With `leadership`, only the leader decides.
pub fn open(
    source: &PolicydSource,
    leadership: Option<watch::Receiver<Leadership>>,
    leases: Leases,
    limits: MembershipLimits,
    published: watch::Receiver<Option<Arc<Publication>>>,
    stats: Arc<Stats>,
) -> MembershipHandle {
    let role = Role::new(leadership);
    let mut state = MembershipState::new(leases.ttl);
    state.set_max_unavailable(limits.max_unavailable.map(|limit| limit.0));
    match source {
        PolicydSource::Etcd(etcd) => start_with(state, role, EtcdStore::open(etcd, leases.ttl), published, stats),
        PolicydSource::Kubernetes(api) => start_with(state, role, KubernetesStore::open(api), published, stats),
        PolicydSource::Files(_) => start_with(state, role, MemoryStore, published, stats),
    }
}

/// Starts the membership authority: a gateway without heartbeats for longer than `ttl` is considered dead. Ends when
/// the sender of publications is dropped.
pub fn start(
    ttl: Duration,
    store: impl Store,
    published: watch::Receiver<Option<Arc<Publication>>>,
    stats: Arc<Stats>,
) -> MembershipHandle {
    start_with(MembershipState::new(ttl), Role::new(None), store, published, stats)
}

fn start_with(
    state: MembershipState,
    role: Role,
    store: impl Store,
    published: watch::Receiver<Option<Arc<Publication>>>,
    stats: Arc<Stats>,
) -> MembershipHandle {
    let (sender, events) = mpsc::channel(QUEUE);
    let (view, view_receiver) = watch::channel(Arc::default());
    let ttl = state.ttl();
    let shared_state = Arc::new(ArcSwap::from_pointee(state.clone()));
    let handle = MembershipHandle { events: sender, view: view_receiver, state: shared_state.clone() };
    let coordinator = Coordinator {
        ttl,
        state,
        role,
        store,
        events,
        published,
        view,
        shared_state,
        stats,
        unknown_gateways: BTreeSet::new(),
        origins: BTreeMap::new(),
        rivals: BTreeMap::new(),
        outage: Outage::default(),
    };
    tokio::spawn(coordinator.run());
    handle
}

struct Coordinator<S> {
    ttl: Duration,
    state: MembershipState,
    role: Role,
    store: S,
    events: mpsc::Receiver<StreamEvent>,
    published: watch::Receiver<Option<Arc<Publication>>>,
    view: watch::Sender<Arc<MembershipView>>,
    shared_state: Arc<ArcSwap<MembershipState>>,
    stats: Arc<Stats>,
    /// Gateways unknown to the policy that were logged.
    unknown_gateways: BTreeSet<Arc<str>>,
    /// Per gateway, the stream of the last accepted heartbeat.
    origins: BTreeMap<Arc<str>, StreamOrigin>,
    /// Per gateway, the address of a process that tried to use its name, until it is reported to the gateway.
    rivals: BTreeMap<Arc<str>, SocketAddr>,
    outage: Outage,
}

/// Heartbeats of a batch, with the senders of their replies.
type Requests = Vec<(Heartbeat, StreamOrigin, oneshot::Sender<Result<HeartbeatReply, HeartbeatError>>)>;

impl<S: Store> Coordinator<S> {
    async fn run(mut self) {
        self.load_policy();
        let mut batch = Vec::new();
        loop {
            let is_decider = self.role.decides();
            let deadline = self.state.next_deadline().filter(|_| is_decider).map(Instant::from_std);
            tokio::select! {
                biased;
                number = self.events.recv_many(&mut batch, MAX_BATCH) => if number == 0 {
                    return;
                },
                changed = self.published.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    self.load_policy();
                }
                () = self.role.changed() => {}
                write = self.store.next_remote_write() => self.apply_remote_write(write),
                () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {}
            }
            let woken = Instant::now();
            if deadline.is_some_and(|deadline| woken.saturating_duration_since(deadline) > self.ttl / 2) {
                // This process wasn't scheduled and may have missed heartbeats.
                self.state.reset_timeouts(woken.into_std());
            }
            if self.take_role().await {
                self.process(batch.drain(..)).await;
            } else {
                Self::refuse(batch.drain(..));
                self.publish();
            }
            if woken.elapsed() > self.ttl / 2 {
                self.state.reset_timeouts(Instant::now().into_std());
            }
        }
    }

    /// Applies the gateways of the current policy.
    fn load_policy(&mut self) {
        let published = self.published.borrow_and_update().clone();
        if let Some(published) = published {
            self.state.set_policy(published.placement.peers.iter().map(|peer| peer.name.clone()));
            self.state.set_shard_groups(published.shard_groups.clone());
        }
    }

    fn apply_remote_write(&mut self, write: RemoteWrite) {
        let now = Instant::now().into_std();
        match write {
            RemoteWrite::View(view) => self.state.load(now, Some(view)),
            RemoteWrite::Heartbeat(heartbeat) => self.state.observe(now, &heartbeat),
        }
    }

    /// Processes a batch: applies its events, decides the next view, commits and replies.
    async fn process(&mut self, batch: impl Iterator<Item = StreamEvent>) {
        let (mut requests, mut closed) = (Requests::new(), BTreeSet::new());
        for event in batch {
            match event {
                StreamEvent::Heartbeat(heartbeat, origin, reply) => requests.push((*heartbeat, origin, reply)),
                StreamEvent::Closed(name, incarnation, origin) => {
                    closed.insert(origin.stream);
                    self.close_stream(&name, incarnation, origin);
                }
            }
        }
        // Heartbeats of closed streams are dropped: their processes must not appear alive.
        requests.retain(|(_, origin, _)| !closed.contains(&origin.stream));
        let mut result = Err(HeartbeatError::Conflict);
        let mut was_store_used = true;
        for _ in 0..MAX_ATTEMPTS {
            if !self.role.decides() {
                result = Err(HeartbeatError::NotLeader);
                break;
            }
            let previous = self.state.clone();
            let now = Instant::now().into_std();
            let outcomes: Vec<_> =
                requests.iter().map(|(heartbeat, ..)| self.state.heartbeat(now, heartbeat)).collect();
            self.state.decide(now);
            match self.commit(&previous, &requests, &outcomes).await {
                Ok(done @ (None | Some(CommitOutcome::Committed))) => {
                    was_store_used = done.is_some();
                    self.log_view_change(previous.view());
                    self.log_drain_blocks(&previous);
                    // The view is in the store, and the next leader's, too; but leases are for that one to grant.
                    result = if self.role.decides() { Ok(outcomes) } else { Err(HeartbeatError::NotLeader) };
                    break;
                }
                Ok(Some(CommitOutcome::Conflict(stored))) => {
                    self.state = previous;
                    let now = Instant::now().into_std();
                    self.state.load(now, stored.view);
                    stored.heartbeats.iter().for_each(|heartbeat| self.state.observe(now, heartbeat));
                }
                Err(error) => {
                    self.state = previous;
                    self.state.reset_timeouts(Instant::now().into_std());
                    result = Err(error.into());
                    break;
                }
            }
        }
        // Without a write there is no evidence of whether the store works.
        if was_store_used && !matches!(result, Err(HeartbeatError::NotLeader)) {
            self.log_outage(result.as_ref().err());
        }
        self.publish();
        self.reply(requests, result);
    }

    /// Handles the end of a stream. It means the end of a process only if the process's accepted heartbeats came over
    /// this stream: anybody can open a stream with some name and incarnation and close it.
    fn close_stream(&mut self, name: &Arc<str>, incarnation: u64, origin: StreamOrigin) {
        if self.origins.get(name) == Some(&origin) {
            self.origins.remove(name);
            self.state.stream_closed(name, incarnation);
        }
    }

    /// Writes accepted heartbeats and the new view to the store; `None` if there is nothing to write.
    async fn commit(
        &mut self,
        previous: &MembershipState,
        requests: &Requests,
        outcomes: &[Result<HeartbeatOutcome, Rejection>],
    ) -> Result<Option<CommitOutcome>, StoreError> {
        let accepted = requests.iter().zip(outcomes).filter(|(_, outcome)| **outcome == Ok(HeartbeatOutcome::Accepted));
        let heartbeats: BTreeMap<&str, &Heartbeat> = accepted.map(|((it, ..), _)| (&*it.gateway, it)).collect();
        let heartbeats: Vec<&Heartbeat> = heartbeats.into_values().collect();
        let is_new_process =
            |it: &&Heartbeat| previous.record(&it.gateway).is_some_and(|record| record.incarnation != it.incarnation);
        let replaced = heartbeats.iter().copied().filter(is_new_process).map(|it| it.gateway.clone());
        let (old, new) = (previous.view(), self.state.view());
        let view = (old != new).then_some(&**new);
        let is_deactivated = |it: &&Member| !new.member(&it.name).is_some_and(|now| now.serving);
        let unchanged: BTreeSet<Arc<str>> =
            old.active_members().filter(is_deactivated).map(|it| it.name.clone()).chain(replaced).collect();
        let unchanged: Vec<Arc<str>> = unchanged.into_iter().collect();
        let removed = old.members.iter().filter(|it| new.member(&it.name).is_none());
        let removed: Vec<Arc<str>> = removed.map(|it| it.name.clone()).collect();
        if heartbeats.is_empty() && view.is_none() {
            return Ok(None);
        }
        self.store
            .commit(Transaction { heartbeats: &heartbeats, view, unchanged: &unchanged, removed: &removed })
            .await
            .map(Some)
    }

    fn reply(&mut self, requests: Requests, result: Result<Vec<Result<HeartbeatOutcome, Rejection>>, HeartbeatError>) {
        let outcomes = match result {
            Ok(outcomes) => outcomes,
            Err(error) => {
                for (_, _, sender) in requests {
                    // The stream may have ended; then the reply is dropped.
                    let _ = sender.send(Err(error.clone()));
                }
                return;
            }
        };
        let (now, view) = (Instant::now().into_std(), self.state.view().clone());
        for ((heartbeat, origin, sender), outcome) in requests.into_iter().zip(outcomes) {
            let gateway = &heartbeat.gateway;
            let reply = match outcome {
                Ok(outcome) => {
                    let is_unknown = outcome == HeartbeatOutcome::UnknownGateway;
                    if is_unknown {
                        self.log_unknown_gateway(gateway);
                    }
                    let is_accepted = outcome == HeartbeatOutcome::Accepted;
                    let rival = if is_accepted { self.rivals.remove(gateway) } else { None };
                    if is_accepted {
                        self.origins.insert(gateway.clone(), origin);
                    }
                    let lease = is_accepted.then(|| self.state.grant(now, gateway, heartbeat.incarnation)).flatten();
                    let drain_block = self.state.drain_block(gateway).cloned();
                    Ok(HeartbeatReply { lease, view: view.clone(), rival, drain_block, is_unknown_gateway: is_unknown })
                }
                Err(rejection) => {
                    self.stats.rejected_heartbeats.increment();
                    self.record_rival(gateway, origin);
                    let live_address = self.origins.get(gateway).and_then(|it| it.address);
                    Err(HeartbeatError::Rejected { rejection, live_address })
                }
            };
            let _ = sender.send(reply);
        }
    }

    /// Records the address of a rejected process, to be reported to the process that has the name.
    fn record_rival(&mut self, name: &Arc<str>, origin: StreamOrigin) {
        let has_capacity = self.rivals.len() < MAX_RIVALS || self.rivals.contains_key(name);
        if let Some(address) = origin.address.filter(|_| has_capacity) {
            self.rivals.insert(name.clone(), address);
        }
    }

    /// Makes the new view and state visible to streams, status and metrics.
    fn publish(&self) {
        let new = self.state.view();
        self.view.send_if_modified(|view| {
            let is_changed = view != new;
            view.clone_from(new);
            is_changed
        });
        self.shared_state.store(Arc::new(self.state.clone()));
    }
}

#[cfg(test)]
mod tests;
