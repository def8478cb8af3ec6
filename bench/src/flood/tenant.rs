//! Tenant A: connections that stand and say a line again and again, new ones that say one line and end, half of them out of pods and
//! half of them to the VIP. The hosts are Linux's own TCP; all of a side runs in one thread.
//!
//! Lines are due when they are due: what waits is part of what is measured.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use hdrhistogram::Histogram;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::time::{Instant, interval_at, sleep, timeout};

use super::ground::{FAR_PORT, POD_PORT, PODS_A, SERVICE, VIP_A, far, pod_a};

/// How often each connection says a line, and how long that is.
const PACE: Duration = Duration::from_millis(250);
const LINE: usize = 512;
/// Lines on their way; who has so many waits for answers.
const MOST_WAITING: usize = 64;
/// How long a new connection may take, from its SYN to its answer: TCP sends a lost SYN again after one second, and after three.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);
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
    /// From the beginning of those to their answer; microseconds.
    pub(super) openings: Histogram<u64>,
    /// Connections that stood and ended.
    pub(super) lost: u64,
    /// Answers that weren't what was said.
    pub(super) wrong: u64,
}

/// A tally that answers are still entered in.
pub(super) type Shared = Arc<Mutex<Tally>>;

fn hold(shared: &Shared) -> MutexGuard<'_, Tally> {
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
        let port = if self.is_pods { POD_PORT } else { FAR_PORT };
        let any = [IpAddr::from([0_u8; 4]), IpAddr::from([0_u8; 16])][self.family];
        let listener = TcpListener::bind((any, port)).await.context("tenant A cannot listen")?;
        tokio::spawn(answer(listener));
        // The other side listens by then.
        sleep(Duration::from_millis(300)).await;
        for number in 0..self.connections {
            tokio::spawn(stand(stage.clone(), self.ends(number)?, number));
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
        let address = |text: &str, port| Ok::<_, anyhow::Error>(SocketAddr::new(text.parse()?, port));
        let (here, there) = (number % PODS_A, number / PODS_A % PODS_A);
        if self.is_pods {
            Ok([address(&pod_a(self.family, here), 0)?, address(&far(self.family, there), FAR_PORT)?])
        } else {
            Ok([address(&far(self.family, here), 0)?, address(VIP_A[self.family], SERVICE[0])?])
        }
    }
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

/// A connection that stands.
async fn stand(stage: Arc<Stage>, ends: [SocketAddr; 2], who: u32) {
    let Ok(mut stream) = connect(ends).await else { return };
    stage.standing.fetch_add(1, Relaxed);
    let (mut reader, mut writer) = stream.split();
    let mut waiting: VecDeque<(Instant, Shared)> = VecDeque::new();
    let mut lines = interval_at(Instant::now() + PACE.mul_f64(f64::from(who % 97) / 97.0), PACE);
    let (mut said, mut heard, mut rest, mut buffer) = (0, 0, Vec::with_capacity(2 * LINE), [0; 4096]);
    loop {
        tokio::select! {
            _ = lines.tick(), if waiting.len() < MOST_WAITING => {
                waiting.push_back((Instant::now(), stage.now()));
                if writer.write_all(&line(who, said)).await.is_err() {
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
        }
    }
    hold(&stage.now()).lost += 1;
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
        stream.write_all(&line(who, 0)).await?;
        let mut answer = [0; LINE];
        stream.read_exact(&mut answer).await?;
        Ok::<_, std::io::Error>(answer == line(who, 0))
    };
    let outcome = timeout(PATIENCE, whole).await;
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
