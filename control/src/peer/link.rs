//! One link after the TLS handshake: exchanges Hello frames, sends and echoes heartbeats, dispatches received frames.
//! All of its tasks end together with the first error.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prost::Message;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf, split};
use tokio::pin;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::mpsc::{self};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout, timeout_at};
use vipgate_dataplane::flow::time::Tick;

use super::PeerEvent;
use super::frame::{self, LinkError};
use super::mesh::SharedState;
use super::proto::frame::Kind;
use super::proto::{Echo, Heartbeat, Hello, RelayedView};
use crate::membership;
use crate::membership::group_state::ReceivedEcho;
use crate::membership::replication::WINDOW;
use crate::membership::succession::Claim;
use crate::peer::replication::receiver::RecordReceiver;
use crate::peer::replication::send_loop::{LinkHandle, SendCommand};
use crate::xds::membership_message::check_number;
use crate::xds::proto;

/// Heartbeat intervals without a frame after which the link is down.
const MAX_MISSED_HEARTBEATS: u32 = 4;
/// After this many heartbeats with an older view than ours, a peer is sent our view. The policy server is faster while
/// it is reachable.
const STALE_VIEW_HEARTBEATS: u32 = 3;
/// Maximum number of heartbeats awaiting their echo.
const MAX_UNECHOED: usize = 64;
/// Capacity of the queue for heartbeats, echoes and acknowledgements.
const URGENT_QUEUE: usize = 64;
/// Timeout for sending the Farewell frame.
const FAREWELL_TIMEOUT: Duration = Duration::from_millis(100);

/// The byte stream of a link.
pub(super) trait LinkStream: AsyncRead + AsyncWrite + Send + Unpin + 'static {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin + 'static> LinkStream for T {}

/// The peer's Hello, with the negotiated version.
#[derive(Debug)]
pub(super) struct PeerHello {
    pub(super) name: String,
    pub(super) claim: Claim,
    pub(super) version: u32,
}

/// Exchanges Hello frames and negotiates the protocol version.
pub(super) async fn exchange_hello(stream: &mut impl LinkStream, shared: &SharedState) -> Result<PeerHello, LinkError> {
    let config = &shared.config;
    let (min, max) = config.versions;
    let Claim { incarnation, predecessors } = config.claim.clone();
    let hello = Hello { min, max, name: config.name.to_string(), incarnation, predecessors };
    stream.write_all(&frame::encode(Kind::Hello(hello))).await?;
    stream.flush().await?;
    let peer_hello = match frame::read(stream, &mut Vec::new()).await? {
        Some(Kind::Hello(hello)) => hello,
        Some(Kind::Farewell(farewell)) => return Err(LinkError::ClosedByPeer(farewell.reason)),
        _ => return Err(LinkError::ProtocolViolation("the first frame isn't a Hello")),
    };
    let version = max.min(peer_hello.max);
    if version < min.max(peer_hello.min) {
        return Err(LinkError::UnsupportedVersion { theirs: (peer_hello.min, peer_hello.max), ours: (min, max) });
    }
    let claim = Claim::new(peer_hello.incarnation, peer_hello.predecessors);
    Ok(PeerHello { name: peer_hello.name, claim, version })
}

/// Sends a Farewell with the reason, best effort.
pub(super) async fn send_farewell(stream: &mut (impl AsyncWrite + Unpin), reason: &LinkError) {
    let bytes = frame::encode_farewell(reason);
    let sent = async {
        stream.write_all(&bytes).await?;
        stream.shutdown().await
    };
    let _ = timeout(FAREWELL_TIMEOUT, sent).await;
}

/// An authenticated, registered link.
pub(super) struct Link<S> {
    pub(super) id: u64,
    pub(super) peer: Arc<str>,
    pub(super) version: u32,
    /// The peer's incarnation.
    pub(super) incarnation: u64,
    pub(super) stream: S,
    pub(super) stop: (mpsc::Sender<LinkError>, mpsc::Receiver<LinkError>),
}

/// A heartbeat without an echo so far.
struct SentHeartbeat {
    sequence: u64,
    tick: Tick,
    at: Instant,
}

struct LinkTasks<'a> {
    shared: &'a SharedState,
    peer: &'a Arc<str>,
    /// The peer's incarnation.
    incarnation: u64,
    id: u64,
    urgent: mpsc::Sender<Vec<u8>>,
    unechoed: Mutex<VecDeque<SentHeartbeat>>,
}

impl<S: LinkStream> Link<S> {
    /// Runs the link until it ends; returns the reason.
    pub(super) async fn run(self, shared: &SharedState) -> LinkError {
        let Self { id, peer, version, incarnation, stream, stop: (stop, mut stop_receiver) } = self;
        let (read, mut write) = split(stream);
        let (urgent, urgent_receiver) = mpsc::channel(URGENT_QUEUE);
        let (bulk, bulk_receiver) = mpsc::channel(WINDOW);
        // No more frames than the window may be unacknowledged, and one of them is being processed.
        let (inbound_frames, frames) = mpsc::channel(WINDOW);
        let receiver = RecordReceiver {
            peer: peer.clone(),
            workers: shared.config.workers.clone(),
            sync_rounds: shared.sync_rounds.clone(),
            apply_locks: &shared.apply_locks,
            status: shared.status.clone(),
            events: shared.events.clone(),
            view: shared.view.subscribe(),
            outgoing: urgent.clone(),
            is_first: shared.config.name < peer,
        };
        let now = (shared.config.clock)();
        shared.status.update(&peer, |peer| {
            (peer.linked, peer.since, peer.version) = (true, Some(now), version);
            peer.replication.link_up();
        });
        let link = LinkHandle { id, incarnation, bulk, urgent: urgent.clone(), stop };
        shared.send_command(SendCommand::LinkUp { peer: peer.clone(), link }).await;
        let tasks = LinkTasks { shared, peer: &peer, incarnation, id, urgent, unechoed: Mutex::default() };
        let reason = tokio::select! {
            biased;
            Some(reason) = stop_receiver.recv() => reason,
            reason = tasks.receive_frames(read, inbound_frames) => reason,
            reason = tasks.send_heartbeats() => reason,
            reason = receiver.run(frames) => reason,
            reason = send(&mut write, urgent_receiver, bulk_receiver) => reason,
        };
        send_farewell(&mut write, &reason).await;
        shared.send_command(SendCommand::LinkDown { peer: peer.clone(), link: id }).await;
        reason
    }
}

impl LinkTasks<'_> {
    /// Receives and dispatches frames until the stream ends, times out or violates the protocol.
    async fn receive_frames<S: LinkStream>(
        &self,
        mut stream: ReadHalf<S>,
        inbound_frames: mpsc::Sender<Kind>,
    ) -> LinkError {
        let (mut buffer, mut stale_heartbeats) = (Vec::new(), 0);
        loop {
            let kind = match self.receive(&mut stream, &mut buffer).await {
                Ok(Some(kind)) => kind,
                Ok(None) => continue,
                Err(reason) => return reason,
            };
            let result = match kind {
                Kind::Heartbeat(heartbeat) => {
                    self.echo(&heartbeat).and_then(|()| self.send_view_if_stale(&heartbeat, &mut stale_heartbeats))
                }
                Kind::RelayedView(relayed_view) => self.on_relayed_view(&relayed_view).await,
                Kind::Echo(echo) => {
                    self.on_echo(&echo);
                    Ok(())
                }
                Kind::Ack(ack) => {
                    let (peer, link) = (self.peer.clone(), self.id);
                    self.shared
                        .send_command(SendCommand::FramesAcknowledged {
                            peer,
                            link,
                            number: ack.number,
                            rejected: ack.refused,
                        })
                        .await;
                    Ok(())
                }
                Kind::SyncRequest(_) => {
                    self.shared.send_command(SendCommand::Resync(self.peer.clone())).await;
                    Ok(())
                }
                Kind::Sessions(_) | Kind::SyncBegin(_) | Kind::SyncEnd(_) | Kind::Released(_) => {
                    inbound_frames.try_send(kind).map_err(|error| match error {
                        TrySendError::Full(_) => LinkError::ProtocolViolation("too many unacknowledged frames"),
                        TrySendError::Closed(_) => LinkError::ShuttingDown,
                    })
                }
                Kind::Farewell(farewell) => Err(LinkError::ClosedByPeer(farewell.reason)),
                Kind::Hello(_) => Err(LinkError::ProtocolViolation("second Hello frame")),
            };
            if let Err(reason) = result {
                return reason;
            }
        }
    }

    /// The next frame; an error if none arrives within the heartbeat timeout.
    async fn receive<S: LinkStream>(
        &self,
        stream: &mut ReadHalf<S>,
        buffer: &mut Vec<u8>,
    ) -> Result<Option<Kind>, LinkError> {
        let (started_at, heartbeat) = (Instant::now(), self.shared.config.heartbeat);
        let read = frame::read(stream, buffer);
        pin!(read);
        for intervals in 2..=MAX_MISSED_HEARTBEATS {
            // `timeout_at` polls the read first: after a pause of this process, data that has arrived meanwhile counts.
            match timeout_at(started_at + heartbeat * intervals, &mut read).await {
                Ok(read) => return read,
                Err(_) => self.shared.status.update(self.peer, |peer| peer.heartbeats_missed += 1),
            }
        }
        Err(LinkError::HeartbeatTimeout((heartbeat * MAX_MISSED_HEARTBEATS).as_millis()))
    }

    /// Echoes a heartbeat if its sender is active in the latest view that we have received, and its process counts.
    fn echo(&self, heartbeat: &Heartbeat) -> Result<(), LinkError> {
        let Some((now, view)) = self.shared.promise(self.peer, self.incarnation) else { return Ok(()) };
        // Recorded before the echo is sent, so the status is never behind what the peer has received.
        self.shared.status.update(self.peer, |peer| peer.echo_sent_at = Some(now));
        let echo = Echo { sequence: heartbeat.sequence, view };
        self.urgent.try_send(frame::encode(Kind::Echo(echo))).map_err(|_| LinkError::SendQueueFull)
    }

    /// Sends our view to a peer whose last `stale_heartbeats` heartbeats had an older one.
    fn send_view_if_stale(&self, heartbeat: &Heartbeat, stale_heartbeats: &mut u32) -> Result<(), LinkError> {
        let view = self.shared.view.borrow().clone();
        *stale_heartbeats = if heartbeat.view < view.number { *stale_heartbeats + 1 } else { 0 };
        if *stale_heartbeats < STALE_VIEW_HEARTBEATS {
            return Ok(());
        }
        *stale_heartbeats = 0;
        let relayed_view = RelayedView { view: proto::View::from(&*view.membership).encode_to_vec() };
        self.urgent.try_send(frame::encode(Kind::RelayedView(relayed_view))).map_err(|_| LinkError::SendQueueFull)
    }

    /// Emits the view that the peer has sent as an event.
    async fn on_relayed_view(&self, relayed_view: &RelayedView) -> Result<(), LinkError> {
        let view =
            proto::View::decode(&*relayed_view.view).map_err(|error| LinkError::InvalidFrame(error.to_string()))?;
        let view = membership::MembershipView::try_from(view).and_then(|view| check_number(&view).map(|()| view));
        let view = view.map_err(|error| LinkError::InvalidFrame(error.to_string()))?;
        // Without a receiver, the event isn't needed.
        let _ =
            self.shared.events.send(PeerEvent::RelayedView { gateway: self.peer.clone(), view: Arc::new(view) }).await;
        Ok(())
    }

    fn on_echo(&self, echo: &Echo) {
        let mut unechoed = self.unechoed.lock().unwrap_or_else(PoisonError::into_inner);
        // Earlier heartbeats won't be echoed any more.
        while let Some(sent) = unechoed.pop_front_if(|sent| sent.sequence <= echo.sequence) {
            if sent.sequence == echo.sequence {
                self.shared.status.update(self.peer, |peer| {
                    peer.rtt = Some(sent.at.elapsed());
                    peer.last_echo = Some(ReceivedEcho { sent: sent.tick, view: echo.view });
                });
            }
        }
    }

    async fn send_heartbeats(&self) -> LinkError {
        let mut ticks = interval(self.shared.config.heartbeat);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        for sequence in 1.. {
            ticks.tick().await;
            let view = self.shared.view.borrow().number;
            let sent = SentHeartbeat { sequence, tick: (self.shared.config.clock)(), at: Instant::now() };
            let mut unechoed = self.unechoed.lock().unwrap_or_else(PoisonError::into_inner);
            if unechoed.len() == MAX_UNECHOED {
                unechoed.pop_front();
            }
            unechoed.push_back(sent);
            drop(unechoed);
            if self.urgent.try_send(frame::encode(Kind::Heartbeat(Heartbeat { sequence, view }))).is_err() {
                break;
            }
        }
        LinkError::SendQueueFull
    }
}

/// Sends queued frames; heartbeats have priority over session records.
async fn send<S: LinkStream>(
    stream: &mut WriteHalf<S>,
    mut urgent_receiver: mpsc::Receiver<Vec<u8>>,
    mut bulk_receiver: mpsc::Receiver<Vec<u8>>,
) -> LinkError {
    loop {
        let bytes = tokio::select! {
            biased;
            Some(bytes) = urgent_receiver.recv() => bytes,
            Some(bytes) = bulk_receiver.recv() => bytes,
            else => return LinkError::ShuttingDown,
        };
        let sent = async {
            stream.write_all(&bytes).await?;
            stream.flush().await
        };
        if let Err(error) = sent.await {
            return error.into();
        }
    }
}
