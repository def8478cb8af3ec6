//! Sessions of all workers: asked for in slices, so that a worker never does more than one between two batches, and so
//! that a listing of any length needs no more memory than a few of them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError, SendTimeoutError, Sender, bounded};
use tokio::sync::{Semaphore, mpsc};
use tonic::Status;
use vipgate_dataplane::command::{Command, FlushChunk, SessionChunk, SessionFilter, SessionRecord};
use vipgate_dataplane::link::handoff::Wake;

use super::filter::protocol_name;
use super::proto;
use crate::gateway::state::GatewayState;

/// Sessions in one slice.
const SLICE: usize = 512;
/// A worker that doesn't answer within this time has a problem.
const PATIENCE: Duration = Duration::from_secs(5);
/// Questions that wait for workers at once, of all clients together: each holds a thread.
const QUESTIONS: usize = 4;

/// Asks the workers of a gateway.
#[derive(Debug)]
pub(super) struct Workers {
    state: Arc<GatewayState>,
    gate: Semaphore,
}

impl Workers {
    pub(super) fn new(state: Arc<GatewayState>) -> Self {
        Self { state, gate: Semaphore::new(QUESTIONS) }
    }

    /// Sends matching sessions, slice by slice, until the limit, the end, or nobody listens any more. A slice without a
    /// match is sent as well: it tells the client that the gateway is at work.
    pub(super) async fn list(
        &self,
        filter: SessionFilter,
        limit: u64,
        sender: mpsc::Sender<Result<proto::SessionsReply, Status>>,
    ) {
        let mut left = limit;
        for worker in 0..self.state.workers.len() {
            let mut chunk =
                SessionChunk { filter: filter.clone(), cursor: Some(0), records: Vec::with_capacity(SLICE) };
            while chunk.cursor.is_some() && left > 0 {
                chunk.records.clear();
                chunk = match self.ask(worker, |reply| Command::Sessions { chunk, reply }).await {
                    Ok(chunk) => chunk,
                    Err(status) => return drop(sender.send(Err(status)).await),
                };
                let take = usize::try_from(left).unwrap_or(usize::MAX).min(chunk.records.len());
                left -= take as u64;
                let sessions = chunk.records[..take].iter().map(|record| session(worker, record)).collect();
                if sender.send(Ok(proto::SessionsReply { sessions })).await.is_err() {
                    return;
                }
            }
        }
    }

    /// Ends matching sessions of all workers; says how many.
    pub(super) async fn flush(&self, filter: &SessionFilter) -> Result<u64, Status> {
        let mut ended = 0;
        for worker in 0..self.state.workers.len() {
            let mut chunk = FlushChunk { filter: filter.clone(), cursor: Some(0), ended: 0 };
            while chunk.cursor.is_some() {
                chunk = self.ask(worker, |reply| Command::Flush { chunk, reply }).await?;
            }
            ended += chunk.ended;
        }
        Ok(ended)
    }

    /// Asks a worker and waits for its answer, on a thread of its own.
    pub(super) async fn ask<T: Send + 'static>(
        &self,
        number: usize,
        command: impl FnOnce(Sender<T>) -> Command,
    ) -> Result<T, Status> {
        let worker = &self.state.workers[number];
        let (reply, answer) = bounded(1);
        let command = command(reply);
        let (commands, doorbell) = (worker.commands.clone(), Arc::clone(&worker.doorbell));
        let _permit = self.gate.acquire().await.map_err(|_| Status::unavailable("the gateway stops"))?;
        let exchanged =
            tokio::task::spawn_blocking(move || exchange(&commands, &*doorbell, command, &answer, PATIENCE));
        let answer = exchanged.await.map_err(|_| Status::unavailable("the gateway stops"))?;
        answer.map_err(|silence| {
            let what = match silence {
                Silence::Ended => "has ended: the gateway stops, or its log says why".to_owned(),
                Silence::Late => {
                    format!("has not answered within {} s: it is stuck, or its core is taken", PATIENCE.as_secs())
                }
            };
            Status::unavailable(format!("worker {number} (core {}) {what}", worker.core))
        })
    }
}

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Silence {
    /// The worker is gone.
    Ended,
    /// It is there and says nothing.
    Late,
}

fn exchange<T>(
    commands: &Sender<Command>,
    doorbell: &dyn Wake,
    command: Command,
    answer: &Receiver<T>,
    patience: Duration,
) -> Result<T, Silence> {
    let until = Instant::now() + patience;
    // Before, too: a worker that sleeps over a full queue would never make room.
    doorbell.wake();
    commands.send_deadline(command, until).map_err(|error| match error {
        SendTimeoutError::Timeout(_) => Silence::Late,
        SendTimeoutError::Disconnected(_) => Silence::Ended,
    })?;
    doorbell.wake();
    answer.recv_deadline(until).map_err(|error| match error {
        RecvTimeoutError::Timeout => Silence::Late,
        RecvTimeoutError::Disconnected => Silence::Ended,
    })
}

fn session(worker: usize, record: &SessionRecord) -> proto::Session {
    proto::Session {
        worker: u32::try_from(worker).unwrap_or(u32::MAX),
        protocol: protocol_name(record.protocol),
        endpoint: record.endpoint.to_string(),
        vip: record.vip.to_string(),
        remote: record.remote.to_string(),
        state: record.state.name().to_owned(),
        idle_ms: record.idle_ms,
        expires_ms: record.expires_ms,
        packets_out: record.packets_out,
        bytes_out: record.bytes_out,
        packets_in: record.packets_in,
        bytes_in: record.bytes_in,
        direction: record.direction.name().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    use super::*;

    #[derive(Debug, Default)]
    struct Bell(AtomicUsize);

    impl Wake for Bell {
        fn wake(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn question() -> (Command, Receiver<FlushChunk>) {
        let (reply, answer) = bounded(1);
        let chunk = FlushChunk { filter: SessionFilter::default(), cursor: Some(0), ended: 0 };
        (Command::Flush { chunk, reply }, answer)
    }

    #[test]
    fn a_worker_that_says_nothing_is_late() {
        let (commands, _held) = bounded(1);
        let (command, answer) = question();
        let begin = Instant::now();
        let result = exchange(&commands, &Bell::default(), command, &answer, Duration::from_millis(50));
        assert_eq!(result.unwrap_err(), Silence::Late);
        assert!(begin.elapsed() >= Duration::from_millis(50));
    }

    #[test]
    fn a_full_queue_is_late_within_the_same_patience() {
        let (commands, _held) = bounded(1);
        commands.send(Command::Announce(Vec::new())).unwrap();
        let (command, answer) = question();
        let bell = Bell::default();
        let result = exchange(&commands, &bell, command, &answer, Duration::from_millis(50));
        assert_eq!(result.unwrap_err(), Silence::Late);
        assert_eq!(bell.0.load(Ordering::Relaxed), 1, "woken to make room");
    }

    #[test]
    fn a_worker_that_ends_is_known_at_once() {
        let (commands, held) = bounded(1);
        let (command, answer) = question();
        let worker = thread::spawn(move || drop(held.recv()));
        let begin = Instant::now();
        let result = exchange(&commands, &Bell::default(), command, &answer, Duration::from_secs(30));
        assert_eq!(result.unwrap_err(), Silence::Ended);
        worker.join().unwrap();
        let (command, answer) = question();
        let result = exchange(&commands, &Bell::default(), command, &answer, Duration::from_secs(30));
        assert_eq!(result.unwrap_err(), Silence::Ended);
        assert!(begin.elapsed() < Duration::from_secs(10));
    }
}
