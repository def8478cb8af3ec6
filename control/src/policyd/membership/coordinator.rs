//! Membership coordinator: the one task that owns the membership state. It applies a batch of heartbeats, decides the
//! next view, stores it and replies only then, so no gateway learns of a decision that the next server doesn't have. Only
//! the coordinator of the server that leads does so; others refuse heartbeats, and follow the view in the record.

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
use super::store::config_map::ConfigMapStore;
use super::store::etcd::EtcdStore;
#[cfg(test)]
use super::store::fake::FakeStore;
use super::store::file::FileStore;
use super::store::writer::RecordWriter;
use super::store::{RecordStore, StoreError, WriteError};
use crate::config::{PolicydConfig, PolicydSource};
use crate::membership::authority::{HeartbeatOutcome, MembershipState, Rejection};
use crate::membership::{DrainBlock, Heartbeat, MembershipView};
use crate::policyd::leader::Leadership;
use crate::policyd::stats::Stats;
use crate::xds::publication::Publication;

/// Capacity of the event queue; when it is full, streams wait.
const QUEUE: usize = 1024;
/// Maximum number of events in a batch.
const MAX_BATCH: usize = 100;
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
    #[error("another policy server has written the membership record")]
    Conflict,
    #[error(
        "the membership record is older than a view that gateways know: until their leases have expired, this server \
         decides nothing"
    )]
    Outdated,
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

/// Starts the membership authority with the record that belongs to the source of manifests. With `leadership`, only the
/// server that leads decides; else the one that has the record's lock.
pub fn open(
    config: &PolicydConfig,
    leadership: Option<watch::Receiver<Leadership>>,
    published: watch::Receiver<Option<Arc<Publication>>>,
    stats: Arc<Stats>,
) -> MembershipHandle {
    let ttl = config.leases.ttl;
    let mut state = MembershipState::new(ttl);
    state.set_max_unavailable(config.membership.max_unavailable.map(|limit| limit.0));
    match &config.source {
        PolicydSource::Etcd(etcd) => {
            let store = || EtcdStore::new(etcd, ttl);
            start_with(state, leadership, RecordWriter::shared(store(), store()), published, stats)
        }
        PolicydSource::Kubernetes(api) => {
            let store = || ConfigMapStore::new(api.clone());
            start_with(state, leadership, RecordWriter::shared(store(), store()), published, stats)
        }
        PolicydSource::Files(_) => {
            let store = FileStore::new(&config.state);
            start_with(state, leadership, RecordWriter::of_single_server(store), published, stats)
        }
    }
}

/// Starts the membership authority of a server that always decides.
#[cfg(test)]
pub(crate) fn start(
    ttl: Duration,
    store: &FakeStore,
    published: watch::Receiver<Option<Arc<Publication>>>,
    stats: Arc<Stats>,
) -> MembershipHandle {
    start_with(MembershipState::new(ttl), None, store.writer(), published, stats)
}

/// Starts the membership authority. Ends when the sender of publications is dropped.
pub(super) fn start_with(
    state: MembershipState,
    leadership: Option<watch::Receiver<Leadership>>,
    records: RecordWriter<impl RecordStore>,
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
        role: Role::new(leadership),
        records,
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
    records: RecordWriter<S>,
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

impl<S: RecordStore> Coordinator<S> {
    async fn run(mut self) {
        self.load_policy();
        let mut batch = Vec::new();
        loop {
            let is_decider = self.decides();
            let deadline = self.state.next_deadline().filter(|_| is_decider).map(Instant::from_std);
            let take_over_at = self.take_over_at();
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
                record = self.records.next_remote_record() => if !is_decider {
                    self.state.follow(&record);
                },
                () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {}
                () = sleep_until(take_over_at.unwrap_or_else(Instant::now)), if take_over_at.is_some() => {}
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

    /// Processes a batch: applies its events, decides the next view, stores it and replies.
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
        let previous = self.state.clone();
        let now = Instant::now().into_std();
        let outcomes: Vec<_> = requests.iter().map(|(heartbeat, ..)| self.state.heartbeat(now, heartbeat)).collect();
        self.state.decide(now);
        let result = match self.commit(&previous).await {
            Ok(()) => {
                self.log_view_change(previous.view());
                self.log_drain_blocks(&previous);
                self.log_record(&previous);
                self.result_of(outcomes)
            }
            Err(error) => {
                self.state = previous;
                self.state.reset_timeouts(Instant::now().into_std());
                Err(error)
            }
        };
        self.publish();
        self.reply(requests, result);
    }

    /// What is replied once the view is stored.
    fn result_of(
        &mut self,
        outcomes: Vec<Result<HeartbeatOutcome, Rejection>>,
    ) -> Result<Vec<Result<HeartbeatOutcome, Rejection>>, HeartbeatError> {
        if self.state.is_outdated() {
            return Err(HeartbeatError::Outdated);
        }
        // The view is in the record, and the next server's, too; but leases are for that one to grant.
        if self.decides() { Ok(outcomes) } else { Err(HeartbeatError::NotLeader) }
    }

    /// Handles the end of a stream. It means the end of a process only if the process's accepted heartbeats came over
    /// this stream: anybody can open a stream with some name and incarnation and close it.
    fn close_stream(&mut self, name: &Arc<str>, incarnation: u64, origin: StreamOrigin) {
        if self.origins.get(name) == Some(&origin) {
            self.origins.remove(name);
            self.state.stream_closed(name, incarnation);
        }
    }

    /// Stores the new view, if there is one.
    async fn commit(&mut self, previous: &MembershipState) -> Result<(), HeartbeatError> {
        if previous.view() == self.state.view() {
            // Without a write there is no evidence of whether the store works.
            return Ok(());
        }
        let written = self.records.commit(&self.state.stored_record()).await;
        let error = match written {
            Ok(()) => None,
            Err(WriteError::Conflict) => Some(HeartbeatError::Conflict),
            Err(WriteError::Unavailable(error)) => Some(HeartbeatError::Store(error)),
        };
        self.log_outage(error.as_ref());
        error.map_or(Ok(()), Err)
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
                    if outcome == HeartbeatOutcome::UnknownGateway {
                        self.log_unknown_gateway(gateway);
                    }
                    let is_accepted = outcome == HeartbeatOutcome::Accepted;
                    let rival = if is_accepted { self.rivals.remove(gateway) } else { None };
                    if is_accepted {
                        self.origins.insert(gateway.clone(), origin);
                    }
                    let lease = is_accepted.then(|| self.state.grant(now, gateway, heartbeat.incarnation)).flatten();
                    let drain_block = self.state.drain_block(gateway).cloned();
                    Ok(HeartbeatReply { lease, view: view.clone(), rival, drain_block })
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
