//! `Capture` request: captures on all workers while the client is connected.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use vipgate_dataplane::flow::direction::Direction;
use vipgate_dataplane::flow::ids::WorkerId;
use vipgate_dataplane::flow::verdict::{AfterResolution, Verdict};
use vipgate_dataplane::observe::capture::{self as engine, Capture, CaptureFilter, CaptureRing};
use vipgate_dataplane::worker::command::Command;

use super::capture_filter::{Expression, compile};
use super::connection::{Replies, several};
use super::protocol::RequestError;
use crate::clock;
use crate::state::GatewayState;

/// Default captured bytes per packet.
pub const DEFAULT_SNAP_LENGTH: u32 = 256;
/// Limit of captured bytes per packet: the size of a frame.
const MAX_SNAP_LENGTH: u32 = 2048;
/// Default rate limit: packets per second and worker.
pub const DEFAULT_RATE: u32 = 10_000;
const MAX_RATE: u32 = 1_000_000;
/// Capacity of a worker's ring in packets: twice what the default rate fills in a poll interval of 50 ms.
pub const RING_CAPACITY: usize = 1024;
/// How often the rings are polled.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Packets per reply.
const MAX_PACKETS: usize = 512;

/// A request to capture packets.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CaptureRequest {
    pub filter: Expression,
    /// Maximum number of bytes captured per packet; 0: 256.
    pub snap_length: u32,
    /// Maximum number of packets per second and worker; 0: 10000.
    pub rate: u32,
}

/// Captured packets.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CaptureReply {
    /// Names of the gateway's interfaces, by index; only in the first reply.
    pub interfaces: Vec<String>,
    pub packets: Vec<CapturedPacket>,
    /// Packets over the rate limit, since the start of the capture.
    pub missed: u64,
}

/// A packet before and after translation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CapturedPacket {
    /// Milliseconds since the Unix epoch.
    pub time_ms: u64,
    pub worker: u32,
    /// Ingress interface: an index of `interfaces`.
    pub interface: u32,
    /// The packet as received, and its length.
    pub before: Vec<u8>,
    pub before_length: u32,
    /// The packet as sent, and its length; empty: it wasn't sent.
    pub after: Vec<u8>,
    pub after_length: u32,
    /// Egress interface, if it was sent.
    pub out: Option<u32>,
    /// The verdict, as a sentence.
    pub verdict: String,
    /// Drop reason; empty: it wasn't dropped.
    pub reason: String,
    /// Direction under which it is counted, if it was forwarded.
    pub direction: String,
    /// Whether it was handed off by another worker, or is a hairpin.
    pub again: bool,
}

/// Limits captures to one at a time: each costs the workers CPU time.
#[derive(Debug)]
pub(super) struct Captures(Arc<Semaphore>);

impl Default for Captures {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(1)))
    }
}

impl Captures {
    /// Starts a capture, which ends with its replies.
    pub(super) fn start(&self, request: &CaptureRequest, state: &Arc<GatewayState>) -> Result<Replies, RequestError> {
        let network = state.network.load_full();
        let filter = compile(&request.filter, &network).map_err(|error| RequestError::invalid(error.to_string()))?;
        let limited = |number: u32, default: u32, max: u32, what: &str| match number {
            0 => Ok(default),
            number if number <= max => Ok(number),
            number => Err(RequestError::invalid(format!("{what} {number}: at most {max}"))),
        };
        let length = limited(request.snap_length, DEFAULT_SNAP_LENGTH, MAX_SNAP_LENGTH, "snap length")? as usize;
        let rate = limited(request.rate, DEFAULT_RATE, MAX_RATE, "rate")?;
        let permit = self.0.clone().try_acquire_owned();
        let permit = permit.map_err(|_| {
            RequestError::unavailable("another capture is running on this gateway; only one is allowed at a time")
        })?;
        let mut captures =
            WorkerCaptures { state: state.clone(), rings: Vec::new(), filter, length, rate, _permit: permit };
        captures.capture_workers()?;
        let interfaces = network.interfaces.iter().map(|interface| interface.name.clone()).collect();
        tracing::info!(event = "capture", length, rate, filter = ?request.filter, "capture started");
        Ok(several(|sender| captures.send(interfaces, sender)))
    }
}

/// The captures of all workers, removed on drop.
struct WorkerCaptures {
    state: Arc<GatewayState>,
    /// The ring of each tapped worker.
    rings: Vec<Arc<CaptureRing>>,
    filter: CaptureFilter,
    length: usize,
    rate: u32,
    _permit: OwnedSemaphorePermit,
}

impl WorkerCaptures {
    /// Captures at the workers that have no capture yet. A capture may start before the initial policy, when there are
    /// no workers.
    fn capture_workers(&mut self) -> Result<(), RequestError> {
        for (worker, number) in self.state.workers().iter().zip(0..).skip(self.rings.len()) {
            let ring = Arc::new(CaptureRing::new(RING_CAPACITY, self.length));
            let capture = Capture::new(self.filter.clone(), ring.clone(), WorkerId(number), self.length, self.rate);
            self.rings.push(ring);
            // On an error, dropping `self` removes those that are set already.
            let sent = worker.commands.try_send(Command::Capture(Some(Box::new(capture))));
            sent.map_err(|_| {
                RequestError::unavailable(format!("worker {number} accepts no commands: it is stuck or overloaded"))
            })?;
            worker.doorbell.wake();
        }
        Ok(())
    }

    /// Streams captured packets until the client disconnects.
    async fn send(mut self, interfaces: Vec<String>, sender: mpsc::Sender<Result<CaptureReply, RequestError>>) {
        let mut reply = CaptureReply { interfaces, ..CaptureReply::default() };
        let mut interval = tokio::time::interval(POLL_INTERVAL);
        loop {
            reply.missed = self.rings.iter().map(|ring| ring.missed()).sum();
            // Empty replies, too: sending detects a disconnected client.
            if sender.send(Ok(reply)).await.is_err() {
                return;
            }
            reply = CaptureReply::default();
            tokio::select! {
                _ = interval.tick() => {}
                () = sender.closed() => return,
            }
            if let Err(error) = self.capture_workers() {
                return drop(sender.send(Err(error)).await);
            }
            let mut has_more = true;
            while has_more && reply.packets.len() < MAX_PACKETS {
                has_more = false;
                for ring in &self.rings {
                    let Some(slot) = ring.pop() else { continue };
                    reply.packets.push(packet(&slot));
                    ring.recycle(slot);
                    has_more = true;
                }
            }
            reply.packets.sort_by_key(|packet| packet.time_ms);
            if reply.packets.len() >= MAX_PACKETS {
                interval.reset_immediately();
            }
        }
    }
}

impl Drop for WorkerCaptures {
    fn drop(&mut self) {
        for worker in self.state.workers() {
            // A worker that accepts no commands soon captures nothing either: nothing empties its ring.
            let _ = worker.commands.send_timeout(Command::Capture(None), POLL_INTERVAL);
            worker.doorbell.wake();
        }
        tracing::info!(event = "capture", "capture ended");
    }
}

fn packet(captured: &engine::CapturedPacket) -> CapturedPacket {
    let age = clock::now().since(captured.at);
    let time_ms = clock::unix_ms(SystemTime::now()).saturating_sub(age.into());
    let reason = if let Verdict::Drop(reason) = captured.verdict { reason.name() } else { "" };
    CapturedPacket {
        time_ms,
        worker: captured.worker.0.into(),
        interface: captured.interface.0.into(),
        before: captured.before.clone(),
        before_length: captured.before_length.into(),
        after: captured.after.clone(),
        after_length: captured.after_length.into(),
        out: captured.out.map(|id| id.0.into()),
        verdict: verdict_text(captured),
        reason: reason.to_owned(),
        direction: captured.direction.map_or("", Direction::name).to_owned(),
        again: !captured.is_first,
    }
}

/// The verdict as text.
fn verdict_text(captured: &engine::CapturedPacket) -> String {
    let (worker, direction) = (captured.worker.0, captured.direction.map_or("", Direction::name));
    let what = match captured.verdict {
        Verdict::Forward(_) => format!("{direction}: forwarded"),
        Verdict::Fragment(_) | Verdict::FragmentIntoTunnel => format!("{direction}: forwarded in fragments"),
        Verdict::Reply(_) => "reply of the gateway".to_owned(),
        Verdict::Consume | Verdict::Undecided => "consumed by the gateway".to_owned(),
        Verdict::HandOff(to) => format!("handed off to worker {}", to.0),
        Verdict::AwaitNeighbor(AfterResolution::Reply) => {
            "reply of the gateway, queued for neighbor resolution".to_owned()
        }
        Verdict::AwaitNeighbor(_) => format!("{direction}: queued for neighbor resolution"),
        Verdict::AwaitFirstFragment => "queued for the first fragment of its datagram".to_owned(),
        Verdict::Defer(_) => "queued until the failover of its shard is complete".to_owned(),
        Verdict::Requeue => "requeued, to keep the packet order".to_owned(),
        Verdict::Hairpin => format!("{direction}: hairpin to a VIP of this gateway"),
        Verdict::Drop(reason) => format!("dropped, {}: {}", reason.name(), reason.help()),
    };
    format!("worker {worker}: {what}")
}
