//! Queries to the workers: commands with a timeout, session listing and flush.
//!
//! Sessions are read in chunks: a worker handles at most one between two batches, and a listing of any length needs the
//! memory of a few chunks only.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError, SendTimeoutError, Sender, bounded};
use serde::{Deserialize, Serialize};
use tokio::sync::{Semaphore, mpsc};
use vipgate_common::spawn_blocking;
use vipgate_dataplane::io::handoff::Wake;
use vipgate_dataplane::session::query::{SessionFilter, SessionInfo};
use vipgate_dataplane::worker::command::{Command, FlushChunk, SessionChunk};

use super::filter::protocol_name;
use super::protocol::RequestError;
use crate::state::GatewayState;

/// Sessions per chunk.
const CHUNK: usize = 512;
/// Timeout of a worker's reply.
const WORKER_TIMEOUT: Duration = Duration::from_secs(5);
/// Concurrent queries of all clients: each blocks a thread.
const MAX_QUERIES: usize = 4;

/// A session.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Session {
    pub worker: u32,
    pub protocol: String,
    pub endpoint: String,
    pub vip: String,
    pub remote: String,
    pub state: String,
    pub idle_ms: u32,
    pub expires_ms: u32,
    pub packets_out: u64,
    pub bytes_out: u64,
    pub packets_in: u64,
    pub bytes_in: u64,
    /// egress: opened by a pod; inbound: opened by a client of a Service.
    pub direction: String,
}

/// Query interface to the workers of a gateway.
#[derive(Debug)]
pub(super) struct Workers {
    state: Arc<GatewayState>,
    permits: Arc<Semaphore>,
}

impl Workers {
    pub(super) fn new(state: Arc<GatewayState>) -> Self {
        Self { state, permits: Arc::new(Semaphore::new(MAX_QUERIES)) }
    }

    /// Streams matching sessions, chunk by chunk, until the limit, the end, or the client has disconnected. Chunks
    /// without a match are sent, too: they keep the client's timeout from expiring.
    pub(super) async fn list_sessions(
        &self,
        filter: SessionFilter,
        limit: u64,
        sender: mpsc::Sender<Result<Vec<Session>, RequestError>>,
    ) {
        let mut remaining = limit;
        for worker in 0..self.state.workers().len() {
            let mut chunk =
                SessionChunk { filter: filter.clone(), cursor: Some(0), records: Vec::with_capacity(CHUNK) };
            while chunk.cursor.is_some() && remaining > 0 {
                chunk.records.clear();
                chunk = match self.query(worker, |reply| Command::Sessions { chunk, reply }).await {
                    Ok(chunk) => chunk,
                    Err(error) => return drop(sender.send(Err(error)).await),
                };
                let take = usize::try_from(remaining).unwrap_or(usize::MAX).min(chunk.records.len());
                remaining -= take as u64;
                let sessions = chunk.records[..take].iter().map(|record| session(worker, record)).collect();
                if sender.send(Ok(sessions)).await.is_err() {
                    return;
                }
            }
        }
    }

    /// Ends matching sessions of all workers; returns their number.
    pub(super) async fn flush_sessions(&self, filter: &SessionFilter) -> Result<u64, RequestError> {
        let mut ended = 0;
        for worker in 0..self.state.workers().len() {
            let mut chunk = FlushChunk { filter: filter.clone(), cursor: Some(0), ended: 0 };
            while chunk.cursor.is_some() {
                chunk = self.query(worker, |reply| Command::Flush { chunk, reply }).await?;
            }
            ended += chunk.ended;
        }
        Ok(ended)
    }

    /// Sends a command to a worker and waits for its reply, on a blocking thread.
    pub(super) async fn query<T: Send + 'static>(
        &self,
        number: usize,
        command: impl FnOnce(Sender<T>) -> Command,
    ) -> Result<T, RequestError> {
        let worker = &self.state.workers()[number];
        let (reply, response) = bounded(1);
        let command = command(reply);
        let (commands, doorbell) = (worker.commands.clone(), Arc::clone(&worker.doorbell));
        let permit = self.permits.clone().acquire_owned().await;
        let permit = permit.map_err(|_| RequestError::unavailable("the gateway is stopping"))?;
        let exchanged = spawn_blocking(move || {
            // Also when the request is given up: the thread is in use until then.
            let _permit = permit;
            exchange(&commands, &*doorbell, command, &response, WORKER_TIMEOUT)
        });
        exchanged.await.map_err(|error| {
            let what = match error {
                RecvTimeoutError::Disconnected => {
                    "has ended: the gateway is stopping, or its log has the reason".to_owned()
                }
                RecvTimeoutError::Timeout => {
                    format!("has not replied within {} s: it is stuck, or its core is busy", WORKER_TIMEOUT.as_secs())
                }
            };
            RequestError::unavailable(format!("worker {number} (core {}) {what}", worker.core))
        })
    }
}

fn exchange<T>(
    commands: &Sender<Command>,
    doorbell: &dyn Wake,
    command: Command,
    response: &Receiver<T>,
    timeout: Duration,
) -> Result<T, RecvTimeoutError> {
    let deadline = Instant::now() + timeout;
    // Before sending, too: a worker that sleeps while its queue is full would never drain it.
    doorbell.wake();
    commands.send_deadline(command, deadline).map_err(|error| match error {
        SendTimeoutError::Timeout(_) => RecvTimeoutError::Timeout,
        SendTimeoutError::Disconnected(_) => RecvTimeoutError::Disconnected,
    })?;
    doorbell.wake();
    response.recv_deadline(deadline)
}

fn session(worker: usize, record: &SessionInfo) -> Session {
    Session {
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

    fn flush_command() -> (Command, Receiver<FlushChunk>) {
        let (reply, response) = bounded(1);
        let chunk = FlushChunk { filter: SessionFilter::default(), cursor: Some(0), ended: 0 };
        (Command::Flush { chunk, reply }, response)
    }

    #[test]
    fn a_silent_worker_times_out() {
        let (commands, _receiver) = bounded(1);
        let (command, response) = flush_command();
        let begin = Instant::now();
        let result = exchange(&commands, &Bell::default(), command, &response, Duration::from_millis(50));
        assert_eq!(result.unwrap_err(), RecvTimeoutError::Timeout);
        assert!(begin.elapsed() >= Duration::from_millis(50));
    }

    #[test]
    fn a_full_queue_times_out_within_the_same_deadline() {
        let (commands, _receiver) = bounded(1);
        commands.send(Command::Announce(Vec::new())).unwrap();
        let (command, response) = flush_command();
        let bell = Bell::default();
        let result = exchange(&commands, &bell, command, &response, Duration::from_millis(50));
        assert_eq!(result.unwrap_err(), RecvTimeoutError::Timeout);
        assert_eq!(bell.0.load(Ordering::Relaxed), 1, "woken to drain its queue");
    }

    #[test]
    fn a_worker_that_ends_is_reported_at_once() {
        let (commands, receiver) = bounded(1);
        let (command, response) = flush_command();
        let worker = thread::spawn(move || drop(receiver.recv()));
        let begin = Instant::now();
        let result = exchange(&commands, &Bell::default(), command, &response, Duration::from_secs(30));
        assert_eq!(result.unwrap_err(), RecvTimeoutError::Disconnected);
        worker.join().unwrap();
        let (command, response) = flush_command();
        let result = exchange(&commands, &Bell::default(), command, &response, Duration::from_secs(30));
        assert_eq!(result.unwrap_err(), RecvTimeoutError::Disconnected);
        assert!(begin.elapsed() < Duration::from_secs(10));
    }
}
