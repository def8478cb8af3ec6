//! Sends the log: over UDP or TCP, in its own time. What waits is bounded; what finds no room is counted.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, SystemTime};

use tokio::io::AsyncWriteExt;
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use vipgate_dataplane::counters::Direction;
use vipgate_dataplane::snapshot::policy::Policy;
use vipgate_dataplane::watch::log::{SessionEvent, SessionQueue};

use super::NatLogStatus;
use super::blocks::{self, Block, Blocks};
use super::ipfix::{Encoder, Event};
use crate::config::{NatLog as Settings, NatLogTransport};
use crate::gateway::{self, unix_ms};

/// How often what waits is sent, and how many messages at a time: three thousand a second, so that no buffer on the way overflows.
const PACE: Duration = Duration::from_millis(20);
const MESSAGES: usize = 60;
/// Records that wait while the collector is away.
const WAITING: usize = 1 << 16;
/// A message that every network carries whole.
const UDP_LONGEST: usize = 1400;
const TCP_LONGEST: usize = 16 << 10;
/// How often templates are repeated over UDP (RFC 7011 section 8.1 has ten minutes for usual; a collector that was restarted waits that long).
const TEMPLATES: Duration = Duration::from_mins(1);
/// How long the collector may take to be connected to, or to read.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long until it is tried again: twice as long each time.
const RETRIES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];

/// Something to tell, with its time.
#[derive(Clone, Debug)]
enum Told {
    Block { at_ms: u64, allocated: bool, key: (IpAddr, IpAddr), block: Block },
    Session { at_ms: u64, event: SessionEvent, tenant: Arc<str> },
}

/// Sends the log of one gateway.
#[derive(Debug)]
pub(super) struct Exporter {
    collector: SocketAddr,
    transport: NatLogTransport,
    domain: u32,
    ports: (u16, u16),
    status: Arc<NatLogStatus>,
    sessions: Option<Arc<SessionQueue>>,
    /// Sessions that found no room and are counted already.
    sessions_lost: u64,
    policy: Option<Arc<Policy>>,
    /// What is so now, and since when.
    blocks: Blocks,
    since_ms: u64,
    waiting: VecDeque<Told>,
    /// Records in the message that is being written.
    begun: u64,
    line: Line,
}

/// How it stands with the collector.
#[derive(Debug)]
enum Line {
    Down { again: Instant, wait: Duration },
    Udp { socket: UdpSocket, encoder: Encoder, templates: Instant },
    Tcp { stream: TcpStream, encoder: Encoder },
}

impl Exporter {
    pub(super) fn new(
        settings: &Settings,
        ports: (u16, u16),
        status: Arc<NatLogStatus>,
        sessions: Option<Arc<SessionQueue>>,
    ) -> Self {
        Self {
            collector: settings.collector,
            transport: settings.transport,
            domain: settings.domain,
            ports,
            status,
            sessions,
            sessions_lost: 0,
            policy: None,
            blocks: Blocks::new(),
            since_ms: 0,
            waiting: VecDeque::new(),
            begun: 0,
            line: Line::Down { again: Instant::now(), wait: RETRIES[0] },
        }
    }

    /// Goes on until nobody tells it of policies any more; then sends what waits.
    pub(super) async fn run(mut self, mut policies: mpsc::Receiver<(SystemTime, Arc<Policy>)>) {
        let mut pace = interval(PACE);
        pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                policy = policies.recv() => match policy {
                    Some((at, policy)) => self.follow(at, policy).await,
                    None => break,
                },
                _ = pace.tick() => self.turn().await,
            }
        }
        self.turn().await;
    }

    /// Tells what a policy changes.
    async fn follow(&mut self, at: SystemTime, policy: Arc<Policy>) {
        let (ports, asked) = (self.ports, policy.clone());
        // There may be a hundred thousand endpoints: not on the thread that answers for the lease.
        let Ok(after) = tokio::task::spawn_blocking(move || blocks::of(&asked, ports)).await else { return };
        let before = std::mem::replace(&mut self.blocks, after);
        self.since_ms = unix_ms(at);
        self.policy = Some(policy);
        // Whoever is away is told all of it when he is back.
        if !matches!(self.line, Line::Down { .. }) {
            let at_ms = self.since_ms;
            let told = |(allocated, key, block): (bool, _, &Block)| Told::Block {
                at_ms,
                allocated,
                key,
                block: block.clone(),
            };
            let changes: Vec<Told> = blocks::changes(&before, &self.blocks).map(told).collect();
            for told in changes {
                self.wait(told);
            }
        }
    }

    async fn turn(&mut self) {
        self.collect();
        if let Line::Down { again, wait } = self.line {
            if Instant::now() < again {
                return;
            }
            match self.connect().await {
                Ok(line) => self.up(line),
                Err(error) => return self.down(&error, (wait * 2).min(RETRIES[1])),
            }
        }
        if let Err(error) = self.send().await {
            self.down(&error, RETRIES[0]);
        }
    }

    /// Takes in what workers tell of sessions.
    fn collect(&mut self) {
        let Some(queue) = self.sessions.clone() else { return };
        let (now, now_ms) = (gateway::now(), unix_ms(SystemTime::now()));
        while let Some(event) = queue.take() {
            let at_ms = now_ms.saturating_sub(now.since(event.at).into());
            let tenant = self.tenant(&event);
            self.wait(Told::Session { at_ms, event, tenant });
        }
        let lost = queue.lost();
        self.status.figures.lost.fetch_add(lost - self.sessions_lost, Relaxed);
        self.sessions_lost = lost;
    }

    /// Whose a session is, as far as policy still knows.
    fn tenant(&self, event: &SessionEvent) -> Arc<str> {
        let Some(policy) = &self.policy else { return "".into() };
        let pod = if event.direction == Direction::Inbound { event.after[1] } else { event.before[0] };
        match policy.endpoint_at(pod.ip()) {
            Some(endpoint) => blocks::tenant(&policy.egress_of(endpoint).spec.name, &endpoint.name),
            None if event.direction == Direction::Inbound => {
                policy.vip_at(event.before[1].ip()).map_or_else(|| "".into(), |vip| blocks::tenant(&vip.name, ""))
            }
            None => "".into(),
        }
    }

    fn wait(&mut self, told: Told) {
        if self.waiting.len() >= WAITING {
            self.waiting.pop_front();
            self.status.figures.lost.fetch_add(1, Relaxed);
        }
        self.waiting.push_back(told);
    }

    async fn connect(&self) -> io::Result<Line> {
        match self.transport {
            NatLogTransport::Udp => {
                let any: SocketAddr =
                    if self.collector.is_ipv4() { ([0, 0, 0, 0], 0).into() } else { ([0; 8], 0).into() };
                let socket = UdpSocket::bind(any).await?;
                socket.connect(self.collector).await?;
                let encoder = Encoder::new(self.domain, UDP_LONGEST);
                // Whoever isn't there is known by the kernel's answer to the first of them, which the second one brings.
                for _ in 0..2 {
                    socket.send(&encoder.templates(unix_seconds())).await?;
                    tokio::time::sleep(PACE * 2).await;
                }
                Ok(Line::Udp { socket, encoder, templates: Instant::now() })
            }
            NatLogTransport::Tcp => {
                let connected = timeout(PATIENCE, TcpStream::connect(self.collector)).await;
                let mut stream = connected.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
                let encoder = Encoder::new(self.domain, TCP_LONGEST);
                write(&mut stream, &encoder.templates(unix_seconds())).await?;
                Ok(Line::Tcp { stream, encoder })
            }
        }
    }

    /// The collector is there: it hears of all blocks as they are now, before all else that waits.
    fn up(&mut self, line: Line) {
        self.line = line;
        if self.status.figures.error.swap(None).is_some() {
            tracing::info!(event = "nat_log", collector = self.status.collector, "the collector is there again");
        }
        let at_ms = self.since_ms;
        let sessions: Vec<Told> = self.waiting.drain(..).filter(|told| matches!(told, Told::Session { .. })).collect();
        let told =
            self.blocks.iter().map(|(&key, block)| Told::Block { at_ms, allocated: true, key, block: block.clone() });
        // As many as there are: they are known to be in memory anyway.
        self.waiting = told.collect();
        self.waiting.extend(sessions);
    }

    fn down(&mut self, error: &io::Error, wait: Duration) {
        self.line = Line::Down { again: Instant::now() + wait, wait };
        self.status.figures.lost.fetch_add(std::mem::take(&mut self.begun), Relaxed);
        let said = self.status.figures.error.swap(Some(Arc::new(error.to_string())));
        if said.is_none() {
            let collector = &self.status.collector;
            tracing::warn!(event = "nat_log", collector, %error, "the collector of the NAT log can't be reached");
        }
    }

    /// Sends some of what waits.
    async fn send(&mut self) -> io::Result<()> {
        if let Line::Udp { socket, encoder, templates } = &mut self.line
            && templates.elapsed() >= TEMPLATES
        {
            socket.send(&encoder.templates(unix_seconds())).await?;
            *templates = Instant::now();
        }
        for _ in 0..MESSAGES {
            let Some((message, records)) = self.message() else { return Ok(()) };
            let sent = match &mut self.line {
                Line::Udp { socket, .. } => socket.send(&message).await.map(drop),
                Line::Tcp { stream, .. } => write(stream, &message).await,
                Line::Down { .. } => return Ok(()),
            };
            let figures = &self.status.figures;
            let count = if sent.is_ok() { &figures.sent } else { &figures.lost };
            count.fetch_add(records, Relaxed);
            sent?;
        }
        Ok(())
    }

    /// The next message, and how many records are in it.
    fn message(&mut self) -> Option<(Vec<u8>, u64)> {
        let encoder = match &mut self.line {
            Line::Udp { encoder, .. } | Line::Tcp { encoder, .. } => encoder,
            Line::Down { .. } => return None,
        };
        while let Some(told) = self.waiting.pop_front() {
            let (at_ms, event) = told.event();
            if let Some(message) = encoder.push(at_ms, &event) {
                // The record is the first of the next message.
                return Some((message, std::mem::replace(&mut self.begun, 1)));
            }
            self.begun += 1;
        }
        encoder.finish(unix_seconds()).map(|message| (message, std::mem::take(&mut self.begun)))
    }
}

impl Told {
    fn event(&self) -> (u64, Event<'_>) {
        match self {
            Self::Block { at_ms, allocated, key: (endpoint, vip), block } => {
                let Block { first, last, ports, tenant } = block;
                let (endpoint, vip) = (*endpoint, *vip);
                let event = Event::Block {
                    allocated: *allocated,
                    endpoint,
                    vip,
                    first: *first,
                    last: *last,
                    ports: *ports,
                    tenant,
                };
                (*at_ms, event)
            }
            Self::Session { at_ms, event, tenant } => {
                let event = Event::Session {
                    created: event.began,
                    inbound: event.direction == Direction::Inbound,
                    protocol: event.protocol,
                    before: event.before.into(),
                    after: event.after.into(),
                    tenant,
                };
                (*at_ms, event)
            }
        }
    }
}

async fn write(stream: &mut TcpStream, bytes: &[u8]) -> io::Result<()> {
    timeout(PATIENCE, stream.write_all(bytes)).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
}

/// Seconds since 1970, modulo 2^32, as messages have them.
fn unix_seconds() -> u32 {
    (unix_ms(SystemTime::now()) / 1000) as u32
}
