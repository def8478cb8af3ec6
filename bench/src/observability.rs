//! Observability overhead benchmark: captures of one pod, of one port, of drops and of all packets, the NAT log,
//! queries of drops and ports, and all of them together, in alternating rounds.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use crossbeam::channel::{Sender, bounded};
use serde::Serialize;
use vipgate::admin::capture::{DEFAULT_RATE, DEFAULT_SNAP_LENGTH, RING_CAPACITY};
use vipgate::natlog::SESSION_QUEUE_CAPACITY;
use vipgate_dataplane::flow::address::Address;
use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::flow::ids::WorkerId;
use vipgate_dataplane::flow::time::Tick;
use vipgate_dataplane::observe::capture::{Capture, CaptureFilter, CaptureRing, OutcomeFilter};
use vipgate_dataplane::observe::drops;
use vipgate_dataplane::observe::session_log::SessionEventQueue;
use vipgate_dataplane::worker::command::{Command, DropChunk, PortChunk};

use crate::Direction;
use crate::load::LoadGenerator;
use crate::packet_order::Order;
use crate::packets::FIRST_POD;
use crate::path::{PACKETS_PER_ROUND, median, round2};
use crate::rig::Rig;

/// Bytes captured per packet.
const LENGTH: usize = DEFAULT_SNAP_LENGTH as usize;
/// Interval of the queries.
const QUERY_INTERVAL: Duration = Duration::from_secs(1);

/// Measures the overhead of captures, the NAT log and queries on packets of established sessions
#[derive(Clone, Debug, Args)]
pub(crate) struct Options {
    /// Established sessions; a comma-separated list is measured one by one
    #[arg(long, value_delimiter = ',', default_values_t = [1000, 65_536, 1_048_576])]
    sessions: Vec<u32>,
    /// Measured rounds per observer; medians are reported
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// No effect: results are always JSON
    #[arg(long)]
    json: bool,
}

/// The observability feature in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Feature {
    /// None: the baseline.
    None,
    /// `capture --filter 'host ..'` of one pod among a thousand.
    CaptureHost,
    /// `capture --filter 'port ..'` of one session.
    CapturePort,
    /// `capture --filter dropped`; no packet matches.
    CaptureDrops,
    /// `capture` of all packets, up to its rate limit.
    CaptureAll,
    /// `nat_log` with sessions.
    NatLog,
    /// `drops` and `ports`, every second.
    Queries,
    /// A capture of one pod, the NAT log and the queries.
    All,
}

impl Feature {
    const ALL: [Self; 8] = [
        Self::None,
        Self::CaptureHost,
        Self::CapturePort,
        Self::CaptureDrops,
        Self::CaptureAll,
        Self::NatLog,
        Self::Queries,
        Self::All,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::None => "nobody",
            Self::CaptureHost => "capture_one",
            Self::CapturePort => "capture_port",
            Self::CaptureDrops => "capture_drops",
            Self::CaptureAll => "capture_all",
            Self::NatLog => "log",
            Self::Queries => "queries",
            Self::All => "all",
        }
    }

    fn capture_filter(self, port: u16) -> Option<CaptureFilter> {
        match self {
            Self::CaptureHost | Self::All => {
                Some(CaptureFilter { nets: vec![FIRST_POD.to_ip().into()], ..CaptureFilter::default() })
            }
            Self::CapturePort => Some(CaptureFilter { port: Some(port), ..CaptureFilter::default() }),
            Self::CaptureDrops => Some(CaptureFilter { outcome: OutcomeFilter::Dropped, ..CaptureFilter::default() }),
            Self::CaptureAll => Some(CaptureFilter::default()),
            Self::None | Self::NatLog | Self::Queries => None,
        }
    }
}

#[derive(Serialize)]
struct Report {
    benchmark: &'static str,
    sessions: u32,
    #[serde(rename = "subject")]
    feature: &'static str,
    ns_per_packet: f64,
    /// Packet rate relative to the adjacent baseline round: median over the rounds.
    ratio: f64,
    captured: u64,
    missed: u64,
}

/// Measures each number of sessions.
pub(crate) fn run(options: &Options) -> Result<()> {
    for &sessions in &options.sessions {
        measure(sessions, options.rounds)?;
    }
    Ok(())
}

fn measure(sessions: u32, rounds: u32) -> Result<()> {
    let mut rig = Rig::new(sessions)?;
    let mut load = LoadGenerator::<u32>::open(&mut rig, sessions, 60, Direction::Mix, Order::Uniform)?;
    load.run_round(&mut rig, PACKETS_PER_ROUND, |_| Ok(()))?;
    let mut times = vec![Vec::new(); Feature::ALL.len()];
    let mut ratios = vec![Vec::new(); Feature::ALL.len()];
    let mut counts = [(0, 0); Feature::ALL.len()];
    for _ in 0..rounds {
        let mut baseline = f64::NAN;
        for (at, feature) in Feature::ALL.into_iter().enumerate() {
            let observer = ActiveObserver::start(feature, load.port(), &mut rig)?;
            let ns = load.run_round(&mut rig, PACKETS_PER_ROUND, |_| Ok(()))?;
            let (captured, missed) = observer.stop(&mut rig)?;
            counts[at].0 += captured;
            counts[at].1 += missed;
            if feature == Feature::None {
                baseline = ns;
            }
            times[at].push(ns);
            ratios[at].push(baseline / ns);
        }
    }
    let results = Feature::ALL.into_iter().zip(times).zip(ratios).zip(counts);
    for (((feature, times), ratios), (captured, missed)) in results {
        let report = Report {
            benchmark: "watch",
            sessions,
            feature: feature.name(),
            ns_per_packet: round2(median(times)),
            ratio: (median(ratios) * 1000.0).round() / 1000.0,
            captured,
            missed,
        };
        println!("{}", serde_json::to_string(&report)?);
    }
    Ok(())
}

/// A feature in use during one round.
struct ActiveObserver {
    stop: Arc<AtomicBool>,
    ring: Option<Arc<CaptureRing>>,
    threads: Vec<thread::JoinHandle<u64>>,
}

impl ActiveObserver {
    fn start(feature: Feature, port: u16, rig: &mut Rig) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut threads = Vec::new();
        let capture = feature.capture_filter(port).map(|filter| {
            let ring = Arc::new(CaptureRing::new(RING_CAPACITY, LENGTH));
            let capture = Capture::new(filter, ring.clone(), WorkerId(0), LENGTH, DEFAULT_RATE);
            let (reader_ring, stop) = (ring.clone(), stop.clone());
            threads.push(thread::spawn(move || read_capture(&reader_ring, &stop)));
            (ring, capture)
        });
        let (ring, capture) = capture.map_or((None, None), |(ring, capture)| (Some(ring), Some(Box::new(capture))));
        if capture.is_some() {
            rig.send_command(Command::Capture(capture))?;
        }
        if matches!(feature, Feature::NatLog | Feature::All) {
            rig.send_command(Command::LogSessions(Some(Arc::new(SessionEventQueue::new(SESSION_QUEUE_CAPACITY)))))?;
        }
        if matches!(feature, Feature::Queries | Feature::All) {
            let (commands, stop) = (rig.commands.clone(), stop.clone());
            threads.push(thread::spawn(move || query(&commands, &stop)));
        }
        for _ in 0..4 {
            rig.worker.turn(rig.now);
        }
        Ok(Self { stop, ring, threads })
    }

    /// Returns the number of packets captured, and missed.
    fn stop(self, rig: &mut Rig) -> Result<(u64, u64)> {
        self.stop.store(true, Ordering::Relaxed);
        rig.send_command(Command::Capture(None))?;
        rig.send_command(Command::LogSessions(None))?;
        let mut captured = 0;
        for thread in self.threads {
            while !thread.is_finished() {
                rig.worker.turn(rig.now);
            }
            captured += thread.join().map_err(|_| anyhow::anyhow!("an observer thread panicked"))?;
        }
        for _ in 0..8 {
            rig.worker.turn(rig.now);
        }
        Ok((captured, self.ring.map_or(0, |ring| ring.missed())))
    }
}

/// Reads captured packets like the admin server.
fn read_capture(ring: &CaptureRing, stop: &AtomicBool) -> u64 {
    let mut captured = 0;
    while !stop.load(Ordering::Relaxed) {
        while let Some(slot) = ring.pop() {
            ring.recycle(slot);
            captured += 1;
        }
        thread::sleep(Duration::from_millis(50));
    }
    captured
}

/// Queries drops and ports.
fn query(commands: &Sender<Command>, stop: &AtomicBool) -> u64 {
    let mut elapsed = QUERY_INTERVAL;
    while !stop.load(Ordering::Relaxed) {
        if elapsed >= QUERY_INTERVAL {
            elapsed = Duration::ZERO;
            let (reply, response) = bounded(1);
            let records = Vec::with_capacity(drops::MAX_RECORDS);
            let chunk = Box::new(DropChunk { now: Tick(0), last: [None; DropReason::ALL.len()], records });
            let _ = commands.send(Command::Drops { chunk, reply });
            let _ = response.recv_timeout(QUERY_INTERVAL);
            let (reply, response) = bounded(1);
            let chunk = PortChunk { only: None, cursor: Some(0), records: Vec::with_capacity(64) };
            let _ = commands.send(Command::Ports { chunk, reply });
            let _ = response.recv_timeout(QUERY_INTERVAL);
        }
        let step = Duration::from_millis(5);
        thread::sleep(step);
        elapsed += step;
    }
    0
}
