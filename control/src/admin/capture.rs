//! `Capture`: taps on all workers, for as long as the client listens.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tonic::Status;
use vipgate_dataplane::command::Command;
use vipgate_dataplane::counters::Direction;
use vipgate_dataplane::ports::pool::WorkerId;
use vipgate_dataplane::verdict::{Then, Verdict};
use vipgate_dataplane::watch::tap::{Captured, Tap, TapFilter, TapRing};

use super::capture_filter::compile;
use super::proto::{CaptureReply, CaptureRequest, CapturedPacket};
use crate::gateway;
use crate::gateway::state::GatewayState;

/// Bytes of a packet, unless another number is asked for.
pub const SNAP_LENGTH: u32 = 256;
/// The most that can be: a frame has no more.
const LONGEST: u32 = 2048;
/// Packets a second of each worker, unless another number is asked for.
pub const RATE: u32 = 10_000;
const MOST_RATE: u32 = 1_000_000;
/// Packets of one worker that wait to be taken: 50 ms of the usual rate, twice.
pub const PLACES: usize = 1024;
/// How often they are taken.
const PACE: Duration = Duration::from_millis(50);
/// Packets in one reply.
const REPLY: usize = 512;

/// One capture at a time: each costs the workers something.
#[derive(Debug)]
pub(super) struct Captures(Arc<Semaphore>);

impl Default for Captures {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(1)))
    }
}

impl Captures {
    /// Begins to capture; the replies come by way of the receiver.
    pub(super) fn begin(
        &self,
        request: &CaptureRequest,
        state: &Arc<GatewayState>,
    ) -> Result<mpsc::Receiver<Result<CaptureReply, Status>>, Status> {
        let network = state.network.load_full();
        let filter = request.filter.clone().unwrap_or_default();
        let filter = compile(&filter, &network).map_err(|error| Status::invalid_argument(error.to_string()))?;
        let given = |number: u32, usual: u32, most: u32, what: &str| match number {
            0 => Ok(usual),
            number if number <= most => Ok(number),
            number => Err(Status::invalid_argument(format!("{what} {number}: at most {most}"))),
        };
        let length = given(request.snap_length, SNAP_LENGTH, LONGEST, "snap length")? as usize;
        let rate = given(request.rate, RATE, MOST_RATE, "rate")?;
        let permit = self.0.clone().try_acquire_owned();
        let permit = permit.map_err(|_| {
            Status::resource_exhausted("somebody else captures at this gateway; there is one capture at a time")
        })?;
        let taps = Taps::set(state, &filter, length, rate, permit)?;
        let (sender, receiver) = mpsc::channel(2);
        let interfaces = network.interfaces.iter().map(|interface| interface.name.clone()).collect();
        tracing::info!(event = "capture", length, rate, filter = ?request.filter, "a capture begins");
        tokio::spawn(async move { taps.send(interfaces, sender).await });
        Ok(receiver)
    }
}

/// The taps of all workers. They are taken away when this is dropped.
struct Taps {
    state: Arc<GatewayState>,
    rings: Vec<Arc<TapRing>>,
    _permit: OwnedSemaphorePermit,
}

impl Taps {
    fn set(
        state: &Arc<GatewayState>,
        filter: &TapFilter,
        length: usize,
        rate: u32,
        permit: OwnedSemaphorePermit,
    ) -> Result<Self, Status> {
        let mut taps = Self { state: state.clone(), rings: Vec::new(), _permit: permit };
        for (worker, number) in state.workers.iter().zip(0..) {
            let ring = Arc::new(TapRing::new(PLACES, length));
            let tap = Tap::new(filter.clone(), ring.clone(), WorkerId(number), length, rate);
            taps.rings.push(ring);
            // What is set already goes with `taps`.
            let sent = worker.commands.try_send(Command::Capture(Some(Box::new(tap))));
            sent.map_err(|_| {
                Status::unavailable(format!("worker {number} takes no commands: it is stuck, or very busy"))
            })?;
            worker.doorbell.wake();
        }
        Ok(taps)
    }

    /// Sends what is captured until nobody listens.
    async fn send(self, interfaces: Vec<String>, sender: mpsc::Sender<Result<CaptureReply, Status>>) {
        let mut reply = CaptureReply { interfaces, ..CaptureReply::default() };
        let mut pace = tokio::time::interval(PACE);
        loop {
            reply.missed = self.rings.iter().map(|ring| ring.missed()).sum();
            // An empty one, too: it tells whether anybody still listens.
            if sender.send(Ok(reply)).await.is_err() {
                return;
            }
            reply = CaptureReply::default();
            tokio::select! {
                _ = pace.tick() => {}
                () = sender.closed() => return,
            }
            let mut taken = true;
            while taken && reply.packets.len() < REPLY {
                taken = false;
                for ring in &self.rings {
                    let Some(place) = ring.take() else { continue };
                    reply.packets.push(packet(&place));
                    ring.give(place);
                    taken = true;
                }
            }
            reply.packets.sort_by_key(|packet| packet.time_ms);
            if reply.packets.len() >= REPLY {
                pace.reset_immediately();
            }
        }
    }
}

impl Drop for Taps {
    fn drop(&mut self) {
        for worker in &self.state.workers {
            // Whoever takes no commands any more captures nothing either: its ring is full soon, and nobody empties it.
            let _ = worker.commands.send_timeout(Command::Capture(None), PACE);
            worker.doorbell.wake();
        }
        tracing::info!(event = "capture", "the capture has ended");
    }
}

fn packet(captured: &Captured) -> CapturedPacket {
    let age = gateway::now().since(captured.at);
    let time_ms = gateway::unix_ms(SystemTime::now()).saturating_sub(age.into());
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
        verdict: sentence(captured),
        reason: reason.to_owned(),
        direction: captured.direction.map_or("", Direction::name).to_owned(),
        again: !captured.is_first,
    }
}

/// How a packet's way ended.
fn sentence(captured: &Captured) -> String {
    let (worker, direction) = (captured.worker.0, captured.direction.map_or("", Direction::name));
    let what = match captured.verdict {
        Verdict::Forward(_) => format!("{direction}: sent on"),
        Verdict::Cut(_) | Verdict::CutIntoTunnel => format!("{direction}: sent on in pieces"),
        Verdict::Answer(_) => "answered by the gateway".to_owned(),
        Verdict::Heard | Verdict::Undecided => "taken in by the gateway".to_owned(),
        Verdict::HandOff(to) => format!("handed to worker {}", to.0),
        Verdict::Wait(Then::Answer) => {
            "answered by the gateway, waits for the link address of its neighbour".to_owned()
        }
        Verdict::Wait(_) => format!("{direction}: waits for the link address of its neighbour"),
        Verdict::Park => "waits for the first fragment of its datagram".to_owned(),
        Verdict::Defer(_) => "waits until its share has changed hands".to_owned(),
        Verdict::Requeue => "comes around, behind what it must not overtake".to_owned(),
        Verdict::Around => format!("{direction}: for a VIP of this gateway, comes around"),
        Verdict::Drop(reason) => format!("dropped, {}: {}", reason.name(), reason.help()),
    };
    format!("worker {worker}: {what}")
}
