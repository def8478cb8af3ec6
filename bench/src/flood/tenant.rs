//! Traffic of tenant A: persistent connections with periodic requests, and short connections with one request; half of
//! them egress from pods, half of them to the VIP. Hosts use Linux TCP; each host runs in one thread.
//!
//! Requests are sent on a fixed schedule, so queueing delay is part of the latency. A gateway that evicts a session
//! drops its packets silently, so a connection also counts as lost when its oldest request gets no reply for
//! [`REPLY_TIMEOUT`], in the phase in which that request was sent.
//!
//! Tenant B's backends, if the flood needs them, are listening sockets on the pods' host.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use hdrhistogram::Histogram;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::time::{Instant, interval_at, sleep, sleep_until, timeout};

use crate::flood::testbed::{
    POD_PORT, PODS_A, PODS_B, REMOTE_PORT, SERVICE_PORTS, VIP_A, tenant_a_pod, tenant_a_remote, tenant_b_pod,
};

/// Request interval and size of persistent connections.
const REQUEST_INTERVAL: Duration = Duration::from_millis(250);
const REQUEST_SIZE: usize = 512;
/// Maximum number of outstanding requests of a connection.
const MAX_OUTSTANDING: usize = 64;
/// Timeout of a short connection, from its SYN to its reply, and of a request on a persistent one. TCP retransmits a
/// lost SYN after one and after three seconds.
pub(super) const REPLY_TIMEOUT: Duration = Duration::from_secs(5);
/// A slower handshake lost its SYN or its SYN-ACK: TCP retransmits either after one second (RFC 6298 section 2.1).
const LATE_HANDSHAKE: Duration = Duration::from_millis(900);
/// Backlog of a backend's listening socket. The kernel retransmits the SYN-ACKs of these half-open connections, and
/// replies to all other SYNs with SYN cookies, once and without state, so its queues never limit a flood: at 70 000
/// SYNs per second it replied to each of 20 000.
const BACKLOG: u32 = 16;
/// Interval at which new connections are started.
const START_INTERVAL: Duration = Duration::from_millis(10);

/// Counters of one phase.
#[derive(Debug)]
pub(super) struct TrafficCounters {
    /// Bytes of replies on persistent connections.
    pub(super) bytes: u64,
    /// Latency from request to reply on persistent connections; microseconds.
    pub(super) latencies: Histogram<u64>,
    /// New connections: attempted, and completed with a reply.
    pub(super) attempted: u64,
    pub(super) completed: u64,
    /// Handshakes with a retransmission.
    pub(super) late: u64,
    /// Time from SYN to reply of new connections; microseconds.
    pub(super) setup_times: Histogram<u64>,
    /// Established connections that were closed or got no reply for [`REPLY_TIMEOUT`].
    pub(super) lost: u64,
    /// Replies that don't match the request.
    pub(super) mismatched: u64,
}

/// Counters that late replies are still added to.
pub(super) type SharedCounters = Arc<Mutex<TrafficCounters>>;

pub(super) fn lock_counters(shared: &SharedCounters) -> MutexGuard<'_, TrafficCounters> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// State shared by both hosts and the measuring thread.
#[derive(Debug)]
pub(super) struct TrafficState {
    current: Mutex<SharedCounters>,
    established: AtomicU32,
    is_stopped: AtomicBool,
}

impl TrafficState {
    pub(super) fn new() -> Result<Self> {
        let current = Mutex::new(new_counters()?);
        Ok(Self { current, established: AtomicU32::new(0), is_stopped: AtomicBool::new(false) })
    }

    /// Starts the next phase; returns the counters of the previous one, to which outstanding replies are still added.
    pub(super) fn next_phase(&self) -> Result<SharedCounters> {
        let next = new_counters()?;
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(std::mem::replace(&mut *current, next))
    }

    /// Persistent connections established so far.
    pub(super) fn established(&self) -> u32 {
        self.established.load(Relaxed)
    }

    /// Stops both hosts.
    pub(super) fn stop(&self) {
        self.is_stopped.store(true, Relaxed);
    }

    fn current(&self) -> SharedCounters {
        self.current.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn new_counters() -> Result<SharedCounters> {
    let histogram = || Histogram::new_with_max(60_000_000, 3);
    Ok(Arc::new(Mutex::new(TrafficCounters {
        bytes: 0,
        latencies: histogram()?,
        attempted: 0,
        completed: 0,
        late: 0,
        setup_times: histogram()?,
        lost: 0,
        mismatched: 0,
    })))
}

/// Traffic of one host.
#[derive(Clone, Copy, Debug)]
pub(super) struct TrafficHost {
    /// Whether it is the pods' host.
    pub(super) is_pod_host: bool,
    /// Whether tenant B's backends listen on it.
    pub(super) has_backends: bool,
    /// 0 is IPv4.
    pub(super) family: usize,
    /// Persistent connections, and new short ones per second.
    pub(super) connections: u32,
    pub(super) new_per_second: u32,
}

impl TrafficHost {
    /// Generates traffic in this thread until stopped.
    pub(super) fn run(self, state: &Arc<TrafficState>) -> Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(self.generate(state))
    }

    async fn generate(self, state: &Arc<TrafficState>) -> Result<()> {
        // A wildcard socket would take the port from tenant B's backends, which listen on the same host.
        for number in 0..PODS_A {
            let local =
                if self.is_pod_host { tenant_a_pod(self.family, number) } else { tenant_a_remote(self.family, number) };
            let local = address(&local, if self.is_pod_host { POD_PORT } else { REMOTE_PORT })?;
            let listener = TcpListener::bind(local).await;
            tokio::spawn(echo(listener.with_context(|| format!("tenant A cannot listen on {local}"))?));
        }
        let _backends = self.backends()?;
        // After this, the other host listens.
        sleep(Duration::from_millis(300)).await;
        for number in 0..self.connections {
            tokio::spawn(persistent_connection(state.clone(), self.addresses(number)?, number, REPLY_TIMEOUT));
            // All of them within a second.
            if number % 16 == 0 {
                sleep(Duration::from_millis(10)).await;
            }
        }
        let (start, mut number) = (Instant::now(), 0);
        while !state.is_stopped.load(Relaxed) {
            sleep(START_INTERVAL).await;
            let due = start.elapsed().as_secs_f64() * f64::from(self.new_per_second);
            while f64::from(number) < due {
                tokio::spawn(short_connection(state.current(), self.addresses(number)?, number));
                number += 1;
            }
        }
        Ok(())
    }

    /// Source and destination of a connection.
    fn addresses(self, number: u32) -> Result<[SocketAddr; 2]> {
        let (local, remote) = (number % PODS_A, number / PODS_A % PODS_A);
        if self.is_pod_host {
            Ok([
                address(&tenant_a_pod(self.family, local), 0)?,
                address(&tenant_a_remote(self.family, remote), REMOTE_PORT)?,
            ])
        } else {
            Ok([address(&tenant_a_remote(self.family, local), 0)?, address(VIP_A[self.family], SERVICE_PORTS[0])?])
        }
    }

    /// Tenant B's backends: the kernel answers SYNs, but no process accepts connections.
    fn backends(self) -> Result<Vec<TcpListener>> {
        let listen = |number| -> Result<TcpListener> {
            let local = address(&tenant_b_pod(self.family, number), POD_PORT)?;
            let socket = if local.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
            socket.bind(local).with_context(|| format!("tenant B cannot listen on {local}"))?;
            Ok(socket.listen(BACKLOG)?)
        };
        let count = if self.has_backends { PODS_B } else { 0 };
        (0..count).map(listen).collect()
    }
}

fn address(text: &str, port: u16) -> Result<SocketAddr> {
    Ok(SocketAddr::new(text.parse()?, port))
}

/// An echo server.
async fn echo(listener: TcpListener) {
    while let Ok((mut stream, _)) = listener.accept().await {
        tokio::spawn(async move {
            let mut buffer = [0; 4096];
            let _ = stream.set_nodelay(true);
            while let Ok(length @ 1..) = stream.read(&mut buffer).await {
                if stream.write_all(&buffer[..length]).await.is_err() {
                    break;
                }
            }
        });
    }
}

async fn connect([source, destination]: [SocketAddr; 2]) -> std::io::Result<TcpStream> {
    let socket = if source.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.bind(source)?;
    let stream = socket.connect(destination).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// A request: connection ID and request number, repeated.
fn request(connection: u32, number: u32) -> [u8; REQUEST_SIZE] {
    let mut request = [0; REQUEST_SIZE];
    let word = [connection.to_be_bytes(), number.to_be_bytes()].concat();
    request.chunks_mut(word.len()).for_each(|chunk| chunk.copy_from_slice(&word));
    request
}

/// A persistent connection, until it is closed or a request gets no reply for `reply_timeout`.
async fn persistent_connection(
    state: Arc<TrafficState>,
    addresses: [SocketAddr; 2],
    connection: u32,
    reply_timeout: Duration,
) {
    let Ok(mut stream) = connect(addresses).await else { return };
    state.established.fetch_add(1, Relaxed);
    let (mut reader, mut writer) = stream.split();
    let mut outstanding: VecDeque<(Instant, SharedCounters)> = VecDeque::new();
    let phase_shift = REQUEST_INTERVAL.mul_f64(f64::from(connection % 97) / 97.0);
    let mut schedule = interval_at(Instant::now() + phase_shift, REQUEST_INTERVAL);
    let (mut sent, mut received) = (0, 0);
    let (mut unread, mut buffer) = (Vec::with_capacity(2 * REQUEST_SIZE), [0; 4096]);
    loop {
        let oldest = outstanding.front().map_or_else(Instant::now, |(since, _)| *since);
        tokio::select! {
            _ = schedule.tick(), if outstanding.len() < MAX_OUTSTANDING => {
                outstanding.push_back((Instant::now(), state.current()));
                // Without acknowledgments the send buffer fills up.
                if !matches!(timeout(reply_timeout, writer.write_all(&request(connection, sent))).await, Ok(Ok(()))) {
                    break;
                }
                sent += 1;
            }
            length = reader.read(&mut buffer) => {
                let Ok(length @ 1..) = length else { break };
                unread.extend_from_slice(&buffer[..length]);
                lock_counters(&state.current()).bytes += length as u64;
                while unread.len() >= REQUEST_SIZE {
                    if unread[..REQUEST_SIZE] != request(connection, received) {
                        lock_counters(&state.current()).mismatched += 1;
                    }
                    unread.drain(..REQUEST_SIZE);
                    received += 1;
                    record_latency(&mut outstanding);
                }
            }
            // TCP's own retransmission timeout is about a quarter of an hour.
            () = sleep_until(oldest + reply_timeout), if !outstanding.is_empty() => break,
        }
    }
    let counters = outstanding.front().map_or_else(|| state.current(), |(_, counters)| counters.clone());
    lock_counters(&counters).lost += 1;
    // Requests without a reply enter the histogram with their time so far, a lower bound.
    while !outstanding.is_empty() {
        record_latency(&mut outstanding);
    }
}

fn record_latency(outstanding: &mut VecDeque<(Instant, SharedCounters)>) {
    if let Some((since, counters)) = outstanding.pop_front() {
        lock_counters(&counters).latencies.saturating_record(since.elapsed().as_micros() as u64);
    }
}

/// A short connection: one request, one reply, close.
async fn short_connection(counters: SharedCounters, addresses: [SocketAddr; 2], connection: u32) {
    lock_counters(&counters).attempted += 1;
    let start = Instant::now();
    let exchange = async {
        let mut stream = connect(addresses).await?;
        if start.elapsed() > LATE_HANDSHAKE {
            lock_counters(&counters).late += 1;
        }
        stream.write_all(&request(connection, 0)).await?;
        let mut reply = [0; REQUEST_SIZE];
        stream.read_exact(&mut reply).await?;
        Ok::<_, std::io::Error>(reply == request(connection, 0))
    };
    let outcome = timeout(REPLY_TIMEOUT, exchange).await;
    let mut counters = lock_counters(&counters);
    match outcome {
        Ok(Ok(true)) => {
            counters.completed += 1;
            counters.setup_times.saturating_record(start.elapsed().as_micros() as u64);
        }
        Ok(Ok(false)) => counters.mismatched += 1,
        Ok(Err(_)) | Err(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_millis(600);

    /// A new persistent connection, and the server's end of it.
    async fn established(state: &Arc<TrafficState>) -> Result<(tokio::task::JoinHandle<()>, TcpStream)> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let addresses = [address("127.0.0.1", 0)?, listener.local_addr()?];
        let connection = tokio::spawn(persistent_connection(state.clone(), addresses, 1, TIMEOUT));
        Ok((connection, listener.accept().await?.0))
    }

    fn run(test: impl Future<Output = Result<()>>) -> Result<()> {
        tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(test)
    }

    #[test]
    fn a_connection_without_replies_is_lost_in_the_phase_of_its_oldest_request() -> Result<()> {
        run(async {
            let state = Arc::new(TrafficState::new()?);
            let (connection, mut peer) = established(&state).await?;
            let mut message = [0; REQUEST_SIZE];
            peer.read_exact(&mut message).await?;
            peer.write_all(&message).await?;
            let quiet = state.next_phase()?;
            // The peer receives the next request, keeps the connection open and sends no reply.
            peer.read_exact(&mut message).await?;
            let flood = state.next_phase()?;
            timeout(5 * TIMEOUT, connection).await.context("the connection is still open")??;
            let lost = [quiet, flood, state.next_phase()?].map(|counters| lock_counters(&counters).lost);
            assert_eq!(lost, [0, 1, 0]);
            Ok(())
        })
    }

    #[test]
    fn a_closed_connection_is_lost() -> Result<()> {
        run(async {
            let state = Arc::new(TrafficState::new()?);
            let (connection, peer) = established(&state).await?;
            drop(peer);
            timeout(5 * TIMEOUT, connection).await.context("the connection is still open")??;
            assert_eq!(lock_counters(&state.next_phase()?).lost, 1);
            Ok(())
        })
    }
}
