//! Tenant A: connections that stand and say a line again and again, new ones that say one line and end, half of them out of pods and
//! half of them to the VIP. The hosts are Linux's own TCP; all of a side runs in one thread.
//!
//! Lines are due when they are due: what waits is part of what is measured. A gateway that evicts a session drops its packets silently, so a
//! connection also counts as lost once its oldest line has waited for [`REPLY_TIMEOUT`], in the phase that sent this line.
//!
//! Tenant B's backends, where an attack needs them, are listening sockets on the pods' host.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use hdrhistogram::Histogram;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::time::{Instant, interval_at, sleep, sleep_until, timeout};

use super::ground::{FAR_PORT, POD_PORT, PODS_A, PODS_B, SERVICE, VIP_A, far, pod_a, pod_b};

/// How often each connection says a line, and how long that is.
const PACE: Duration = Duration::from_millis(250);
const LINE: usize = 512;
/// Lines on their way; who has so many waits for answers.
const MOST_WAITING: usize = 64;
/// How long a new connection may take, from its SYN to its answer, and a line of one that stands: TCP sends a lost SYN again after one
/// second, and after three.
pub(super) const REPLY_TIMEOUT: Duration = Duration::from_secs(5);
/// A handshake that takes longer has lost its SYN or its SYN-ACK: TCP retransmits either after a second (RFC 6298 section 2.1).
const LATE_HANDSHAKE: Duration = Duration::from_millis(900);
/// Half-open connections of a backend that the kernel keeps, and whose SYN-ACK it retransmits. It answers all other SYNs with SYN cookies, once
/// and without state, so its queues never limit a flood: of 20 000 SYNs at 70 000 a second it answered each one.
const BACKLOG: u32 = 16;
/// New connections begin in steps.
const STEP: Duration = Duration::from_millis(10);

/// What came of a phase.
#[derive(Debug)]
pub(super) struct Tally {
    /// Answered lines, in bytes.
    pub(super) bytes: u64,
    /// Of those lines, from the call that sent one to its answer; microseconds.
    pub(super) delays: Histogram<u64>,
    /// New connections that began, and that were answered.
    pub(super) asked: u64,
    pub(super) served: u64,
    /// Handshakes that needed a retransmission.
    pub(super) late: u64,
    /// From the beginning of those to their answer; microseconds.
    pub(super) openings: Histogram<u64>,
    /// Connections that stood, and ended or got no reply for [`REPLY_TIMEOUT`].
    pub(super) lost: u64,
    /// Answers that weren't what was said.
    pub(super) wrong: u64,
}

/// A tally that answers are still entered in.
pub(super) type Shared = Arc<Mutex<Tally>>;

/// A tally's counts so far.
pub(super) fn hold(shared: &Shared) -> MutexGuard<'_, Tally> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What both sides share with who measures.
#[derive(Debug)]
pub(super) struct Stage {
    tally: Mutex<Shared>,
    standing: AtomicU32,
    ended: AtomicBool,
}

impl Stage {
    pub(super) fn new() -> Result<Self> {
        Ok(Self { tally: Mutex::new(tally()?), standing: AtomicU32::new(0), ended: AtomicBool::new(false) })
    }

    /// Begins a phase; the tally of the one before, in which answers that are under way are still entered.
    pub(super) fn next(&self) -> Result<Shared> {
        let next = tally()?;
        let mut now = self.tally.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(std::mem::replace(&mut *now, next))
    }

    /// Connections that have stood.
    pub(super) fn standing(&self) -> u32 {
        self.standing.load(Relaxed)
    }

    /// Ends both sides.
    pub(super) fn end(&self) {
        self.ended.store(true, Relaxed);
    }

    fn now(&self) -> Shared {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn tally() -> Result<Shared> {
    let histogram = || Histogram::new_with_max(60_000_000, 3);
    Ok(Arc::new(Mutex::new(Tally {
        bytes: 0,
        delays: histogram()?,
        asked: 0,
        served: 0,
        late: 0,
        openings: histogram()?,
        lost: 0,
        wrong: 0,
    })))
}

/// What one side does.
#[derive(Clone, Copy, Debug)]
pub(super) struct Side {
    /// Whether it is the pods'.
    pub(super) is_pods: bool,
    /// Whether tenant B's backends listen on it.
    pub(super) has_backends: bool,
    /// 0 is IPv4.
    pub(super) family: usize,
    /// Connections that stand, and new ones a second.
    pub(super) connections: u32,
    pub(super) new_per_second: u32,
}

impl Side {
    /// Runs it, in a thread of its host, until the stage ends.
    pub(super) fn run(self, stage: &Arc<Stage>) -> Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(self.play(stage))
    }

    async fn play(self, stage: &Arc<Stage>) -> Result<()> {
        // A wildcard socket would take the port from tenant B's backends, which listen on the same host.
        for number in 0..PODS_A {
            let here = if self.is_pods { pod_a(self.family, number) } else { far(self.family, number) };
            let here = address(&here, if self.is_pods { POD_PORT } else { FAR_PORT })?;
            let listener = TcpListener::bind(here).await;
            tokio::spawn(answer(listener.with_context(|| format!("tenant A cannot listen at {here}"))?));
        }
        let _backends = self.backends()?;
        // The other side listens by then.
        sleep(Duration::from_millis(300)).await;
        for number in 0..self.connections {
            tokio::spawn(stand(stage.clone(), self.ends(number)?, number, REPLY_TIMEOUT));
            // All of them within a second.
            if number % 16 == 0 {
                sleep(Duration::from_millis(10)).await;
            }
        }
        let (begun, mut number) = (Instant::now(), 0);
        while !stage.ended.load(Relaxed) {
            sleep(STEP).await;
            // They begin when all stand.
            let due = begun.elapsed().as_secs_f64() * f64::from(self.new_per_second);
            while f64::from(number) < due {
                tokio::spawn(begin(stage.now(), self.ends(number)?, number));
                number += 1;
            }
        }
        Ok(())
    }

    /// Source and destination of a connection.
    fn ends(self, number: u32) -> Result<[SocketAddr; 2]> {
        let (here, there) = (number % PODS_A, number / PODS_A % PODS_A);
        if self.is_pods {
            Ok([address(&pod_a(self.family, here), 0)?, address(&far(self.family, there), FAR_PORT)?])
        } else {
            Ok([address(&far(self.family, here), 0)?, address(VIP_A[self.family], SERVICE[0])?])
        }
    }

    /// Tenant B's backends: the kernel answers SYNs, nothing accepts.
    fn backends(self) -> Result<Vec<TcpListener>> {
        let listen = |number| -> Result<TcpListener> {
            let here = address(&pod_b(self.family, number), POD_PORT)?;
            let socket = if here.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
            socket.bind(here).with_context(|| format!("tenant B cannot listen at {here}"))?;
            Ok(socket.listen(BACKLOG)?)
        };
        let count = if self.has_backends { PODS_B } else { 0 };
        (0..count).map(listen).collect()
    }
}

fn address(text: &str, port: u16) -> Result<SocketAddr> {
    Ok(SocketAddr::new(text.parse()?, port))
}

/// Says everything back.
async fn answer(listener: TcpListener) {
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

async fn connect([from, to]: [SocketAddr; 2]) -> std::io::Result<TcpStream> {
    let socket = if from.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.bind(from)?;
    let stream = socket.connect(to).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// A line: who says it, and its number, over and over.
fn line(who: u32, number: u32) -> [u8; LINE] {
    let mut line = [0; LINE];
    let word = [who.to_be_bytes(), number.to_be_bytes()].concat();
    line.chunks_mut(word.len()).for_each(|chunk| chunk.copy_from_slice(&word));
    line
}

/// A connection that stands until it ends, or until a line gets no reply for `reply_timeout`.
async fn stand(stage: Arc<Stage>, ends: [SocketAddr; 2], who: u32, reply_timeout: Duration) {
    let Ok(mut stream) = connect(ends).await else { return };
    stage.standing.fetch_add(1, Relaxed);
    let (mut reader, mut writer) = stream.split();
    let mut waiting: VecDeque<(Instant, Shared)> = VecDeque::new();
    let mut lines = interval_at(Instant::now() + PACE.mul_f64(f64::from(who % 97) / 97.0), PACE);
    let (mut said, mut heard, mut rest, mut buffer) = (0, 0, Vec::with_capacity(2 * LINE), [0; 4096]);
    loop {
        let oldest = waiting.front().map_or_else(Instant::now, |(since, _)| *since);
        tokio::select! {
            _ = lines.tick(), if waiting.len() < MOST_WAITING => {
                waiting.push_back((Instant::now(), stage.now()));
                // Without acknowledgements the send buffer fills up.
                if !matches!(timeout(reply_timeout, writer.write_all(&line(who, said))).await, Ok(Ok(()))) {
                    break;
                }
                said += 1;
            }
            length = reader.read(&mut buffer) => {
                let Ok(length @ 1..) = length else { break };
                rest.extend_from_slice(&buffer[..length]);
                hold(&stage.now()).bytes += length as u64;
                while rest.len() >= LINE {
                    if rest[..LINE] != line(who, heard) {
                        hold(&stage.now()).wrong += 1;
                    }
                    rest.drain(..LINE);
                    heard += 1;
                    enter(&mut waiting);
                }
            }
            // TCP itself gives up only after a quarter of an hour of retransmissions.
            () = sleep_until(oldest + reply_timeout), if !waiting.is_empty() => break,
        }
    }
    let tally = waiting.front().map_or_else(|| stage.now(), |(_, tally)| tally.clone());
    hold(&tally).lost += 1;
    // What it still waited for never came: so long it waited at least.
    while !waiting.is_empty() {
        enter(&mut waiting);
    }
}

fn enter(waiting: &mut VecDeque<(Instant, Shared)>) {
    if let Some((since, tally)) = waiting.pop_front() {
        hold(&tally).delays.saturating_record(since.elapsed().as_micros() as u64);
    }
}

/// A new connection: one line, and its end.
async fn begin(tally: Shared, ends: [SocketAddr; 2], who: u32) {
    hold(&tally).asked += 1;
    let begun = Instant::now();
    let whole = async {
        let mut stream = connect(ends).await?;
        if begun.elapsed() > LATE_HANDSHAKE {
            hold(&tally).late += 1;
        }
        stream.write_all(&line(who, 0)).await?;
        let mut answer = [0; LINE];
        stream.read_exact(&mut answer).await?;
        Ok::<_, std::io::Error>(answer == line(who, 0))
    };
    let outcome = timeout(REPLY_TIMEOUT, whole).await;
    let mut tally = hold(&tally);
    match outcome {
        Ok(Ok(true)) => {
            tally.served += 1;
            tally.openings.saturating_record(begun.elapsed().as_micros() as u64);
        }
        Ok(Ok(false)) => tally.wrong += 1,
        Ok(Err(_)) | Err(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_millis(600);

    /// A connection that has just begun to stand, and its far side.
    async fn standing(stage: &Arc<Stage>) -> Result<(tokio::task::JoinHandle<()>, TcpStream)> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let ends = [address("127.0.0.1", 0)?, listener.local_addr()?];
        let connection = tokio::spawn(stand(stage.clone(), ends, 1, TIMEOUT));
        Ok((connection, listener.accept().await?.0))
    }

    fn run(test: impl Future<Output = Result<()>>) -> Result<()> {
        tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(test)
    }

    #[test]
    fn a_connection_without_replies_is_lost_in_the_phase_of_its_oldest_line() -> Result<()> {
        run(async {
            let stage = Arc::new(Stage::new()?);
            let (connection, mut peer) = standing(&stage).await?;
            let mut line = [0; LINE];
            peer.read_exact(&mut line).await?;
            peer.write_all(&line).await?;
            let quiet = stage.next()?;
            // The peer receives the next line, keeps the connection and sends no reply.
            peer.read_exact(&mut line).await?;
            let flood = stage.next()?;
            timeout(5 * TIMEOUT, connection).await.context("the connection still waits")??;
            let lost = [quiet, flood, stage.next()?].map(|tally| hold(&tally).lost);
            assert_eq!(lost, [0, 1, 0]);
            Ok(())
        })
    }

    #[test]
    fn a_closed_connection_is_lost() -> Result<()> {
        run(async {
            let stage = Arc::new(Stage::new()?);
            let (connection, peer) = standing(&stage).await?;
            drop(peer);
            timeout(5 * TIMEOUT, connection).await.context("the connection still stands")??;
            assert_eq!(hold(&stage.next()?).lost, 1);
            Ok(())
        })
    }
}
