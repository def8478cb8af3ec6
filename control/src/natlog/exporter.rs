//! IPFIX exporter: sends the NAT log over UDP or TCP, at a limited rate. The queue is bounded; lost records are
//! counted.

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
use vipgate_common::{Backoff, RECOVERY, spawn_blocking};
use vipgate_dataplane::flow::direction::Direction;
use vipgate_dataplane::observe::session_log::{SessionEvent, SessionEventQueue};
use vipgate_dataplane::policy::compiled::Policy;

use super::NatLogStatus;
use super::ipfix::{Encoder, NatEvent};
use crate::clock;
use crate::clock::unix_ms;
use crate::config::{NatLog as Settings, NatLogTransport};
use crate::natlog::port_blocks;
use crate::natlog::port_blocks::{PortBlock, PortBlocks};

/// Send interval, and maximum number of messages in each: 3000 a second, so that buffers on the path don't overflow.
const SEND_INTERVAL: Duration = Duration::from_millis(20);
const MAX_MESSAGES: usize = 60;
/// Maximum number of queued records while the collector is unreachable.
const MAX_QUEUED: usize = 1 << 16;
/// Maximum message size over UDP, bytes: isn't fragmented by any usual network.
const MAX_UDP_MESSAGE: usize = 1400;
/// Maximum message size over TCP, bytes.
const MAX_TCP_MESSAGE: usize = 16 << 10;
/// Interval of templates over UDP. RFC 7011 section 8.1 suggests ten minutes; a restarted collector can't decode
/// records until the next ones.
const TEMPLATE_INTERVAL: Duration = Duration::from_mins(1);
/// Timeout for connecting to the collector, and for a write.
const IO_TIMEOUT: Duration = Duration::from_secs(5);
/// Delay before reconnecting.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(4));
const _: () = assert!(BACKOFF.1.as_secs() + IO_TIMEOUT.as_secs() < RECOVERY.as_secs());

/// A queued record, with its time.
#[derive(Clone, Debug)]
enum Record {
    Block { at_ms: u64, allocated: bool, key: (IpAddr, IpAddr), block: PortBlock },
    Session { at_ms: u64, event: SessionEvent, tenant: Arc<str> },
}

/// Exports the NAT log of one gateway.
#[derive(Debug)]
pub(super) struct Exporter {
    collector: SocketAddr,
    transport: NatLogTransport,
    domain: u32,
    ports: (u16, u16),
    status: Arc<NatLogStatus>,
    sessions: Option<Arc<SessionEventQueue>>,
    /// Session events lost in the queue that are already counted.
    counted_lost: u64,
    policy: Option<Arc<Policy>>,
    /// The current port blocks, and since when they apply.
    blocks: PortBlocks,
    since_ms: u64,
    queue: VecDeque<Record>,
    /// Number of records in the unfinished message.
    unfinished: u64,
    connection: Connection,
    backoff: Backoff,
}

/// The transport session with the collector.
#[derive(Debug)]
enum Connection {
    Down { retry_at: Instant },
    Udp { socket: UdpSocket, encoder: Encoder, templates: Instant },
    Tcp { stream: TcpStream, encoder: Encoder },
}

impl Exporter {
    pub(super) fn new(
        settings: &Settings,
        ports: (u16, u16),
        status: Arc<NatLogStatus>,
        sessions: Option<Arc<SessionEventQueue>>,
    ) -> Self {
        Self {
            collector: settings.collector,
            transport: settings.transport,
            domain: settings.domain,
            ports,
            status,
            sessions,
            counted_lost: 0,
            policy: None,
            blocks: PortBlocks::new(),
            since_ms: 0,
            queue: VecDeque::new(),
            unfinished: 0,
            connection: Connection::Down { retry_at: Instant::now() },
            backoff: Backoff::new(BACKOFF),
        }
    }

    /// Runs until the policy channel is closed, then sends the queued records.
    pub(super) async fn run(mut self, mut policies: mpsc::Receiver<(SystemTime, Arc<Policy>)>) {
        let mut ticks = interval(SEND_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                policy = policies.recv() => match policy {
                    Some((at, policy)) => self.apply_policy(at, policy).await,
                    None => break,
                },
                _ = ticks.tick() => self.flush().await,
            }
        }
        self.flush().await;
    }

    /// Queues the port blocks that a policy adds and removes.
    async fn apply_policy(&mut self, at: SystemTime, policy: Arc<Policy>) {
        let (ports, input) = (self.ports, policy.clone());
        // On a blocking thread: there may be a hundred thousand endpoints.
        let after = spawn_blocking(move || port_blocks::for_policy(&input, ports)).await;
        let before = std::mem::replace(&mut self.blocks, after);
        self.since_ms = unix_ms(at);
        self.policy = Some(policy);
        // An unreachable collector receives all blocks when it is reachable again.
        if !matches!(self.connection, Connection::Down { .. }) {
            let at_ms = self.since_ms;
            let record = |(allocated, key, block): (bool, _, &PortBlock)| Record::Block {
                at_ms,
                allocated,
                key,
                block: block.clone(),
            };
            let changes: Vec<Record> = port_blocks::changes(&before, &self.blocks).map(record).collect();
            for record in changes {
                self.enqueue(record);
            }
        }
    }

    /// Collects session events and sends queued records; reconnects if due.
    async fn flush(&mut self) {
        self.collect();
        if let Connection::Down { retry_at } = self.connection {
            if Instant::now() < retry_at {
                return;
            }
            match self.connect().await {
                Ok(connection) => self.connected(connection),
                Err(error) => return self.disconnected(&error),
            }
        }
        if let Err(error) = self.send().await {
            self.disconnected(&error);
        }
    }

    /// Takes the session events from the workers' queue.
    fn collect(&mut self) {
        let Some(queue) = self.sessions.clone() else { return };
        let (now, now_ms) = (clock::now(), unix_ms(SystemTime::now()));
        while let Some(event) = queue.pop() {
            let at_ms = now_ms.saturating_sub(now.since(event.at).into());
            let tenant = self.tenant(&event);
            self.enqueue(Record::Session { at_ms, event, tenant });
        }
        let lost = queue.lost();
        self.status.stats.lost.fetch_add(lost - self.counted_lost, Relaxed);
        self.counted_lost = lost;
    }

    /// The tenant of a session; empty if policy doesn't contain its endpoint any more.
    fn tenant(&self, event: &SessionEvent) -> Arc<str> {
        let Some(policy) = &self.policy else { return "".into() };
        let pod = if event.direction == Direction::Inbound { event.after[1] } else { event.before[0] };
        match policy.endpoint_at(pod.ip()) {
            Some(endpoint) => port_blocks::tenant(&policy.egress_of(endpoint).spec.name, &endpoint.name),
            None if event.direction == Direction::Inbound => {
                policy.vip_at(event.before[1].ip()).map_or_else(|| "".into(), |vip| port_blocks::tenant(&vip.name, ""))
            }
            None => "".into(),
        }
    }

    /// Queues a record; a full queue drops the oldest one.
    fn enqueue(&mut self, record: Record) {
        if self.queue.len() >= MAX_QUEUED {
            self.queue.pop_front();
            self.status.stats.lost.fetch_add(1, Relaxed);
        }
        self.queue.push_back(record);
    }

    async fn connect(&self) -> io::Result<Connection> {
        match self.transport {
            NatLogTransport::Udp => {
                let any: SocketAddr =
                    if self.collector.is_ipv4() { ([0, 0, 0, 0], 0).into() } else { ([0; 8], 0).into() };
                let socket = UdpSocket::bind(any).await?;
                socket.connect(self.collector).await?;
                let encoder = Encoder::new(self.domain, MAX_UDP_MESSAGE);
                // If nothing listens there, the second send returns the ICMP error that the first one caused.
                for _ in 0..2 {
                    socket.send(&encoder.templates(unix_seconds())).await?;
                    tokio::time::sleep(SEND_INTERVAL * 2).await;
                }
                Ok(Connection::Udp { socket, encoder, templates: Instant::now() })
            }
            NatLogTransport::Tcp => {
                let connected = timeout(IO_TIMEOUT, TcpStream::connect(self.collector)).await;
                let mut stream = connected.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
                let encoder = Encoder::new(self.domain, MAX_TCP_MESSAGE);
                write(&mut stream, &encoder.templates(unix_seconds())).await?;
                Ok(Connection::Tcp { stream, encoder })
            }
        }
    }

    /// The collector is reachable: queues all current port blocks, before other queued records.
    fn connected(&mut self, connection: Connection) {
        self.connection = connection;
        self.backoff.reset();
        if self.status.stats.error.swap(None).is_some() {
            let collector = &self.status.collector;
            tracing::info!(event = "nat_log", collector, "the collector of the NAT log is reachable again");
        }
        let at_ms = self.since_ms;
        let sessions: Vec<Record> =
            self.queue.drain(..).filter(|record| matches!(record, Record::Session { .. })).collect();
        let blocks =
            self.blocks.iter().map(|(&key, block)| Record::Block { at_ms, allocated: true, key, block: block.clone() });
        // Not limited: `blocks` holds as many already.
        self.queue = blocks.collect();
        self.queue.extend(sessions);
    }

    fn disconnected(&mut self, error: &io::Error) {
        self.connection = Connection::Down { retry_at: Instant::now() + self.backoff.next_delay() };
        self.status.stats.lost.fetch_add(std::mem::take(&mut self.unfinished), Relaxed);
        let previous = self.status.stats.error.swap(Some(Arc::new(error.to_string())));
        if previous.is_none() {
            let collector = &self.status.collector;
            tracing::warn!(event = "nat_log", collector, %error, "the collector of the NAT log is unreachable");
        }
    }

    /// Sends up to [`MAX_MESSAGES`] messages of queued records.
    async fn send(&mut self) -> io::Result<()> {
        if let Connection::Udp { socket, encoder, templates } = &mut self.connection
            && templates.elapsed() >= TEMPLATE_INTERVAL
        {
            socket.send(&encoder.templates(unix_seconds())).await?;
            *templates = Instant::now();
        }
        for _ in 0..MAX_MESSAGES {
            let Some((message, records)) = self.message() else { return Ok(()) };
            let sent = match &mut self.connection {
                Connection::Udp { socket, .. } => socket.send(&message).await.map(drop),
                Connection::Tcp { stream, .. } => write(stream, &message).await,
                Connection::Down { .. } => return Ok(()),
            };
            let stats = &self.status.stats;
            let count = if sent.is_ok() { &stats.sent } else { &stats.lost };
            count.fetch_add(records, Relaxed);
            sent?;
        }
        Ok(())
    }

    /// The next message, and its number of records.
    fn message(&mut self) -> Option<(Vec<u8>, u64)> {
        let encoder = match &mut self.connection {
            Connection::Udp { encoder, .. } | Connection::Tcp { encoder, .. } => encoder,
            Connection::Down { .. } => return None,
        };
        while let Some(record) = self.queue.pop_front() {
            let (at_ms, event) = record.event();
            if let Some(message) = encoder.push(at_ms, &event) {
                // This record is the first of the next message.
                return Some((message, std::mem::replace(&mut self.unfinished, 1)));
            }
            self.unfinished += 1;
        }
        encoder.finish(unix_seconds()).map(|message| (message, std::mem::take(&mut self.unfinished)))
    }
}

impl Record {
    fn event(&self) -> (u64, NatEvent<'_>) {
        match self {
            Self::Block { at_ms, allocated, key: (endpoint, vip), block } => {
                let PortBlock { first, last, ports, tenant } = block;
                let (endpoint, vip) = (*endpoint, *vip);
                let event = NatEvent::Block {
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
                let event = NatEvent::Session {
                    created: event.opened,
                    inbound: event.direction == Direction::Inbound,
                    protocol: event.protocol,
                    original: event.before.into(),
                    translated: event.after.into(),
                    tenant,
                };
                (*at_ms, event)
            }
        }
    }
}

async fn write(stream: &mut TcpStream, bytes: &[u8]) -> io::Result<()> {
    timeout(IO_TIMEOUT, stream.write_all(bytes)).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
}

/// Seconds since the Unix epoch, modulo 2^32: the export time of IPFIX messages.
fn unix_seconds() -> u32 {
    (unix_ms(SystemTime::now()) / 1000) as u32
}
