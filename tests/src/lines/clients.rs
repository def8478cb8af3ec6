//! The clients: each sends numbered lines and expects each of them back, in a task of its own with one timer.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::future::pending;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use std::{io, mem};

use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep_until, timeout_at};

use super::socket::Socket;
use super::{decode, encode, take_lines};
use crate::cluster::{Client, ClientConfig, unix_time};
use crate::flood::Random;

/// Time for outstanding replies over UDP, at most: some are lost, so there is no waiting for all.
const UDP_GRACE: Duration = Duration::from_millis(500);
/// Bytes that are read at once, at least.
const READ_SIZE: usize = 2048;

/// The result of a client, and its socket if it keeps its port.
type Outcome = (Client, Option<Socket>);

/// What all clients share.
#[derive(Debug)]
struct Shared {
    /// The identity of the first one.
    first: u32,
    server: SocketAddr,
    config: ClientConfig<'static>,
    /// Clients that have got a reply and haven't ended.
    open: AtomicUsize,
}

/// Runs clients until they have sent all their lines, or until `stop`; their results.
pub(super) async fn run(
    first: u32,
    config: ClientConfig<'static>,
    stop: impl Future<Output = ()>,
) -> io::Result<Vec<Client>> {
    let (address, port) = config.server;
    let server = SocketAddr::new(address.parse::<IpAddr>().map_err(io::Error::other)?, port);
    let shared = Arc::new(Shared { first, server, config, open: AtomicUsize::new(0) });
    let (stopper, stopped) = watch::channel(());
    let (mut tasks, mut outcomes) = (JoinSet::new(), Vec::new());
    let complete = async {
        start_all(&shared, &stopped, &mut tasks, &mut outcomes).await;
        if shared.config.lines == 0 {
            pending::<()>().await;
        }
        join_all(&mut tasks, &mut outcomes).await;
    };
    tokio::select! {
        () = complete => {}
        () = stop => {}
    }
    drop(stopper);
    join_all(&mut tasks, &mut outcomes).await;
    // Ports are kept until here.
    let mut results: Vec<Client> = outcomes.into_iter().map(|(client, _)| client).collect();
    results.sort_by(|one, other| one.identity.cmp(&other.identity));
    Ok(results)
}

/// Starts all clients at their rate, and reports how many got a reply.
async fn start_all(
    shared: &Arc<Shared>,
    stopped: &watch::Receiver<()>,
    tasks: &mut JoinSet<Outcome>,
    outcomes: &mut Vec<Outcome>,
) {
    let config = &shared.config;
    let (begin, mut started) = (Instant::now(), Vec::new());
    for number in 0..config.count {
        let start = begin + Duration::from_secs_f64(f64::from(number) / f64::from(config.rate));
        sleep_until(start.into()).await;
        while tasks.len() >= config.max_concurrent as usize {
            outcomes.extend(tasks.join_next().await.map(Result::unwrap));
        }
        let (no_reply_yet, has_reply) = oneshot::channel();
        let client = LineClient::new(shared.clone(), number, no_reply_yet);
        started.push((Instant::now(), has_reply));
        tasks.spawn(client.run(stopped.clone()));
    }
    // With a number of lines, clients may have ended already.
    if config.lines == 0 {
        for (start, has_reply) in started {
            // It has a reply, or has failed, or its time is over.
            let _ = timeout_at((start + config.reply_timeout()).into(), has_reply).await;
        }
    }
    println!("open {}", shared.open.load(Relaxed));
}

async fn join_all(tasks: &mut JoinSet<Outcome>, outcomes: &mut Vec<Outcome>) {
    while let Some(outcome) = tasks.join_next().await {
        outcomes.push(outcome.unwrap());
    }
}

/// Waits until a socket is readable; without one, forever.
async fn readable(socket: Option<&Socket>) -> io::Result<()> {
    match socket {
        Some(socket) => socket.readable().await,
        None => pending().await,
    }
}

/// Waits until a time; without one, forever.
async fn reached(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time.into()).await,
        None => pending().await,
    }
}

/// A running client.
struct LineClient {
    shared: Arc<Shared>,
    identity: u32,
    random: Random,
    /// The shortest and the longest interval between its lines, seconds.
    interval: (f64, f64),
    is_connected: bool,
    /// What has arrived and isn't a whole line yet.
    received: Vec<u8>,
    /// When the next line is due.
    due: Option<Instant>,
    /// When it started, was connected or got its last reply.
    last: Instant,
    /// TCP: when lines were sent that have no reply yet.
    unanswered: VecDeque<Instant>,
    /// UDP: the same by the lines' numbers, seconds since the epoch.
    lost: BTreeMap<u64, f64>,
    /// When all clients were stopped.
    stopped: Option<Instant>,
    /// Dropped with the first reply.
    no_reply_yet: Option<oneshot::Sender<()>>,
    result: Client,
}

impl LineClient {
    fn new(shared: Arc<Shared>, number: u32, no_reply_yet: oneshot::Sender<()>) -> Self {
        let (identity, config) = (shared.first + number, &shared.config);
        let mut random = Random(u64::from(identity));
        let interval = choose_interval(&config.intervals, between(&mut random, (0.0, 100.0)));
        let sources = &config.source_addresses;
        let source = sources.get(number as usize % sources.len().max(1)).cloned().unwrap_or_default();
        let result = Client {
            identity: format!("{identity:08}"),
            source,
            started_at: unix_time(),
            interval: f64::midpoint(interval.0, interval.1),
            lines: [0, 0],
            longest_wait: [0.0, 0.0],
            end: String::new(),
            misdelivered: 0,
            lost: Vec::new(),
        };
        Self {
            shared,
            identity,
            random,
            interval,
            is_connected: false,
            received: Vec::new(),
            due: None,
            last: Instant::now(),
            unanswered: VecDeque::new(),
            lost: BTreeMap::new(),
            stopped: None,
            no_reply_yet: Some(no_reply_yet),
            result,
        }
    }

    async fn run(mut self, stopped: watch::Receiver<()>) -> Outcome {
        let mut socket = None;
        let end = self.exchange(&mut socket, stopped).await;
        self.result.end = end.map_or_else(|error| error.to_string(), str::to_owned);
        if let Some(sent) = self.unanswered.front().copied() {
            self.record_wait(sent.elapsed());
        }
        if self.no_reply_yet.is_none() {
            self.shared.open.fetch_sub(1, Relaxed);
        }
        self.result.lost = self.lost.into_values().collect();
        (self.result, socket.filter(|_| self.shared.config.keep_port))
    }

    /// Sends lines and receives replies until it ends; how it ended.
    async fn exchange(
        &mut self,
        socket: &mut Option<Socket>,
        mut stopped: watch::Receiver<()>,
    ) -> io::Result<&'static str> {
        let source = match &*self.result.source {
            "" => None,
            source => Some(source.parse::<IpAddr>().map_err(io::Error::other)?),
        };
        let mut opening = pin!(Socket::open(source, self.shared.server, self.shared.config.udp));
        let mut stopped = pin!(stopped.changed());
        loop {
            if let Some(end) = self.end(Instant::now()) {
                return Ok(end);
            }
            let next = [self.due, self.deadline()].into_iter().flatten().min();
            tokio::select! {
                biased;
                ready = readable(socket.as_ref()) => {
                    ready?;
                    if let Some(socket) = socket {
                        self.receive(socket)?;
                    }
                }
                opened = &mut opening, if socket.is_none() => {
                    *socket = Some(opened?);
                    self.start();
                }
                () = reached(next) => {
                    let is_due = self.due.is_some_and(|due| due <= Instant::now());
                    if let Some(socket) = socket && is_due {
                        self.send(socket)?;
                    }
                }
                _ = &mut stopped, if self.stopped.is_none() => self.stop(),
            }
        }
    }

    /// When it ends if it gets no more replies.
    fn deadline(&self) -> Option<Instant> {
        let config = &self.shared.config;
        let timeout = config.reply_timeout();
        if config.lines > 0 {
            return Some(self.last + timeout);
        }
        Some(self.stopped? + if config.udp { timeout.min(UDP_GRACE) } else { timeout })
    }

    /// How it ends, if it does now.
    fn end(&self, now: Instant) -> Option<&'static str> {
        let config = &self.shared.config;
        let is_over = self.deadline().is_some_and(|deadline| deadline <= now);
        // Datagrams may be lost.
        let is_alive = config.udp || (self.is_connected && self.unanswered.is_empty());
        let state = if is_alive { "alive" } else { "silent" };
        if config.lines > 0 {
            let is_done = self.result.lines[1] >= u64::from(config.lines);
            return if is_done {
                Some("done")
            } else if is_over {
                Some("silent")
            } else {
                self.stopped.map(|_| state)
            };
        }
        // Over UDP there may be more replies.
        let is_complete = is_alive && !config.udp;
        self.stopped.filter(|_| is_over || is_complete).map(|_| state)
    }

    /// It is connected; its first line is due.
    fn start(&mut self) {
        if !self.shared.config.udp {
            self.record_wait(self.last.elapsed());
        }
        self.is_connected = true;
        self.last = Instant::now();
        if self.stopped.is_none() {
            self.due = Some(self.last);
        }
    }

    /// Sends no more lines.
    fn stop(&mut self) {
        let now = Instant::now();
        (self.stopped, self.due) = (Some(now), None);
        if self.shared.config.udp && self.shared.config.lines == 0 {
            self.record_wait(now - self.last);
        }
    }

    fn send(&mut self, socket: &Socket) -> io::Result<()> {
        let (config, number, now) = (&self.shared.config, self.result.lines[0], Instant::now());
        let line = encode(self.identity, number, config.line_length as usize);
        match socket.send(&line) {
            Ok(length) if length < line.len() => return Err(io::Error::other("a line was sent in part")),
            Ok(_) => {
                if config.udp {
                    self.lost.insert(number, unix_time());
                } else {
                    self.unanswered.push_back(now);
                }
                self.result.lines[0] += 1;
            }
            // The socket's buffer is full: this line is left out.
            Err(error) if config.udp || error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        let was_last = config.lines > 0 && self.result.lines[0] >= u64::from(config.lines);
        self.due = (!was_last).then(|| now + Duration::from_secs_f64(between(&mut self.random, self.interval)));
        Ok(())
    }

    fn receive(&mut self, socket: &Socket) -> io::Result<()> {
        let (is_udp, size) = (self.shared.config.udp, READ_SIZE.max(self.shared.config.line_length as usize));
        loop {
            self.received.reserve(size);
            match socket.receive(&mut self.received) {
                Ok(0) if !is_udp => return Err(io::Error::other("closed by the server")),
                Ok(_) => self.take_replies(),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                // An ICMP error.
                Err(_) if is_udp => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn take_replies(&mut self) {
        let (mut received, now) = (mem::take(&mut self.received), Instant::now());
        take_lines(&mut received, |line| self.count_reply(line, now));
        self.received = received;
    }

    fn count_reply(&mut self, line: &[u8], now: Instant) {
        let is_udp = self.shared.config.udp;
        match decode(line) {
            Some((identity, number)) if is_udp && identity == self.identity => {
                self.lost.remove(&number);
                self.record_wait(now - self.last);
            }
            Some(reply) if !is_udp && reply == (self.identity, self.result.lines[1]) => {
                let sent = self.unanswered.pop_front().unwrap_or(now);
                self.record_wait(now - sent);
            }
            _ => self.result.misdelivered += 1,
        }
        self.last = now;
        self.result.lines[1] += 1;
        if self.no_reply_yet.take().is_some() {
            self.shared.open.fetch_add(1, Relaxed);
        }
    }

    fn record_wait(&mut self, wait: Duration) {
        let seconds = wait.as_secs_f64();
        if seconds > self.result.longest_wait[0] {
            self.result.longest_wait = [seconds, unix_time()];
        }
    }
}

/// The interval of the client that draws this percentage.
fn choose_interval(intervals: &[(u32, f64, f64)], mut draw: f64) -> (f64, f64) {
    let mut interval = (1.0, 1.0);
    for (percent, shortest, longest) in intervals {
        interval = (*shortest, *longest);
        if draw < f64::from(*percent) {
            break;
        }
        draw -= f64::from(*percent);
    }
    interval
}

/// A random number between two others.
fn between(random: &mut Random, (from, to): (f64, f64)) -> f64 {
    let part = f64::from((random.next_u64() >> 32) as u32) / f64::from(u32::MAX);
    from + (to - from) * part
}
