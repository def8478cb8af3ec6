//! Membership service over gRPC: one task per stream of a gateway. Heartbeats that arrive while one is being processed are coalesced
//! to the last one, so a slow store delays replies, but never builds up a queue.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until};
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::membership::authority::Rejection;
use crate::membership::{Heartbeat, MembershipView};
use crate::policyd::identity::{ClientIdentity, RejectionLog};
use crate::policyd::membership::coordinator::{
    HeartbeatError, HeartbeatReply, MembershipHandle, StreamEvent, StreamOrigin,
};
use crate::policyd::stats::Stats;
use crate::xds::proto;
use crate::xds::proto::membership_server::{Membership, MembershipServer};

/// Capacity of a stream's queue of notices.
const QUEUE: usize = 4;
/// Maximum length of a heartbeat, bytes.
const MAX_HEARTBEAT_BYTES: usize = 16 << 10;
/// Timeouts of a stream's first heartbeat, and of the next one: longer than any TTL.
const FIRST_HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(10);
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(75);

/// The gRPC service of the membership authority.
pub fn server(
    membership: MembershipHandle,
    stats: Arc<Stats>,
    rejections: Arc<RejectionLog>,
) -> MembershipServer<Service> {
    let service = Service { membership, stats, rejections, streams: Arc::default() };
    MembershipServer::new(service).max_decoding_message_size(MAX_HEARTBEAT_BYTES)
}

/// The membership service; shared by all streams.
#[derive(Clone, Debug)]
pub struct Service {
    membership: MembershipHandle,
    stats: Arc<Stats>,
    rejections: Arc<RejectionLog>,
    /// Number of the last stream.
    streams: Arc<AtomicU64>,
}

#[tonic::async_trait]
impl Membership for Service {
    type JoinStream = Pin<Box<dyn Stream<Item = Result<proto::MembershipUpdate, Status>> + Send>>;

    async fn join(&self, request: Request<Streaming<proto::Heartbeat>>) -> Result<Response<Self::JoinStream>, Status> {
        let (sender, receiver) = mpsc::channel(QUEUE);
        let (events, view) = (self.membership.events.clone(), self.membership.view.clone());
        let client = ClientIdentity::from_request(&request);
        let origin = StreamOrigin { stream: self.streams.fetch_add(1, Relaxed) + 1, address: client.address };
        let (service, sent_view, process) = (self.clone(), None, None);
        let task = StreamTask { service, client, origin, events, view, sender, sent_view, process };
        tokio::spawn(task.run(request.into_inner()));
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }
}

/// Task of one gateway's stream.
struct StreamTask {
    service: Service,
    client: ClientIdentity,
    origin: StreamOrigin,
    events: mpsc::Sender<StreamEvent>,
    view: watch::Receiver<Arc<MembershipView>>,
    sender: mpsc::Sender<Result<proto::MembershipUpdate, Status>>,
    /// The view that was sent last.
    sent_view: Option<Arc<MembershipView>>,
    /// Name and incarnation, from the first heartbeat.
    process: Option<(Arc<str>, u64)>,
}

/// A heartbeat that is being processed.
struct Pending {
    sequence: u64,
    reply: oneshot::Receiver<Result<HeartbeatReply, HeartbeatError>>,
}

impl Pending {
    async fn wait(
        pending: &mut Option<Self>,
    ) -> Result<Result<HeartbeatReply, HeartbeatError>, oneshot::error::RecvError> {
        match pending {
            Some(pending) => (&mut pending.reply).await,
            None => std::future::pending().await,
        }
    }
}

impl StreamTask {
    async fn run(mut self, mut heartbeats: Streaming<proto::Heartbeat>) {
        if let Err(Some(status)) = self.process_events(&mut heartbeats).await {
            // The client may have disconnected; then the status is dropped.
            let _ = self.sender.send(Err(status)).await;
        }
        if let Some((name, incarnation)) = self.process {
            let _ = self.events.send(StreamEvent::Closed(name, incarnation, self.origin)).await;
        }
    }

    /// Receives heartbeats and sends notices until the stream ends, with a status unless the client has closed it.
    async fn process_events(&mut self, heartbeats: &mut Streaming<proto::Heartbeat>) -> Result<(), Option<Status>> {
        let (mut next, mut pending) = (None::<(u64, Heartbeat)>, None::<Pending>);
        let mut deadline = Instant::now() + FIRST_HEARTBEAT_TIMEOUT;
        loop {
            tokio::select! {
                message = heartbeats.message() => {
                    let Some(message) = message.map_err(Some)? else { return Ok(()) };
                    deadline = Instant::now() + HEARTBEAT_TIMEOUT;
                    next = Some(self.parse(message)?);
                }
                reply = Pending::wait(&mut pending) => {
                    let sequence = pending.take().map_or(0, |pending| pending.sequence);
                    let reply = reply.map_err(|_| Some(stopping()))?;
                    let reply = reply.map_err(|error| Some(self.reject(&error)))?;
                    self.send_notice(sequence, reply).await?;
                }
                // Not before the first heartbeat was processed: the gateway may know a later view.
                changed = self.view.changed(), if self.sent_view.is_some() => {
                    changed.map_err(|_| Some(stopping()))?;
                    let view = self.view.borrow_and_update().clone();
                    if self.sent_view.as_ref() != Some(&view) {
                        let reply = HeartbeatReply { lease: None, view, rival: None, drain_block: None };
                        self.send_notice(0, reply).await?;
                    }
                }
                () = sleep_until(deadline) => return Err(Some(Status::deadline_exceeded("heartbeat timeout"))),
                () = self.sender.closed() => return Ok(()),
            }
            if pending.is_none()
                && let Some((sequence, heartbeat)) = next.take()
            {
                let (sender, reply) = oneshot::channel();
                self.events
                    .send(StreamEvent::Heartbeat(Box::new(heartbeat), self.origin, sender))
                    .await
                    .map_err(|_| None)?;
                pending = Some(Pending { sequence, reply });
            }
        }
    }

    /// Validates a heartbeat; the first one authorizes the stream for its gateway and process.
    fn parse(&mut self, message: proto::Heartbeat) -> Result<(u64, Heartbeat), Option<Status>> {
        let sequence = message.sequence;
        let heartbeat =
            Heartbeat::try_from(message).map_err(|error| Some(Status::invalid_argument(error.to_string())))?;
        if self.process.is_none()
            && let Err(status) = self.client.authorize_gateway(&heartbeat.gateway)
        {
            self.service.stats.certificate_mismatches.increment();
            self.service.rejections.log_gateway(&self.client, &heartbeat.gateway, &status);
            return Err(Some(status));
        }
        let process = (heartbeat.gateway.clone(), heartbeat.incarnation);
        let own = self.process.get_or_insert_with(|| process.clone());
        if *own != process {
            let reason = format!(
                "this stream belongs to a process of gateway {}, the heartbeat to another one of gateway {}: open a \
                 stream for each",
                own.0, heartbeat.gateway
            );
            return Err(Some(Status::invalid_argument(reason)));
        }
        Ok((sequence, heartbeat))
    }

    async fn send_notice(&mut self, sequence: u64, reply: HeartbeatReply) -> Result<(), Option<Status>> {
        let HeartbeatReply { lease, view, rival, drain_block } = reply;
        let is_new_view = self.sent_view.as_ref() != Some(&view);
        let notice = proto::MembershipUpdate {
            sequence,
            lease_ms: lease.map_or(0, |lease| u32::try_from(lease.as_millis()).unwrap_or(u32::MAX)),
            view: is_new_view.then(|| (&*view).into()),
            rival: rival.map(|address| address.to_string()).unwrap_or_default(),
            drain_block: drain_block.as_ref().map(Into::into),
        };
        self.sent_view = Some(view);
        self.sender.send(Ok(notice)).await.map_err(|_| None)
    }
}

impl StreamTask {
    /// The stream's status after an error; counts and logs a rejection.
    fn reject(&self, error: &HeartbeatError) -> Status {
        let status = status(error);
        if let (HeartbeatError::Rejected { rejection, .. }, Some((name, _))) = (error, &self.process) {
            match rejection {
                Rejection::NameInUse { .. } => self.service.stats.name_conflicts.increment(),
                Rejection::InvalidSecret { .. } => self.service.stats.invalid_secrets.increment(),
            }
            self.service.rejections.log_gateway(&self.client, name, &status);
        }
        status
    }
}

/// The status of streams when the membership authority ends.
fn stopping() -> Status {
    Status::unavailable("the policy server is stopping")
}

fn status(error: &HeartbeatError) -> Status {
    match error {
        HeartbeatError::Rejected { rejection: Rejection::NameInUse { .. }, .. } => {
            Status::already_exists(error.to_string())
        }
        HeartbeatError::Rejected { rejection: Rejection::InvalidSecret { .. }, .. } => {
            Status::permission_denied(error.to_string())
        }
        HeartbeatError::NotLeader | HeartbeatError::Store(_) | HeartbeatError::Conflict | HeartbeatError::Outdated => {
            Status::unavailable(error.to_string())
        }
    }
}
