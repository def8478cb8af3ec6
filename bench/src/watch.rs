//! What it costs packets to be watched: captures of one pod, of one port, of drops and of everything, a log of sessions, somebody who looks
//! at drops and ports all the time, and a capture, the log and looking together; in turns, in one run.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use crossbeam::channel::{Sender, bounded};
use serde::Serialize;
use vipgate::admin::capture::{PLACES, RATE, SNAP_LENGTH};
use vipgate::natlog::SESSIONS;
use vipgate_dataplane::address::Address;
use vipgate_dataplane::command::{Command, DropChunk, PortChunk};
use vipgate_dataplane::counters::DropReason;
use vipgate_dataplane::ports::pool::WorkerId;
use vipgate_dataplane::time::Tick;
use vipgate_dataplane::watch::drops;
use vipgate_dataplane::watch::log::SessionQueue;
use vipgate_dataplane::watch::tap::{Outcome, Tap, TapFilter, TapRing};

use crate::Direction;
use crate::load::Load;
use crate::order::Order;
use crate::packets::FIRST_POD;
use crate::path::{PACKETS, median, round2};
use crate::rig::Rig;

/// Bytes of a packet.
const LENGTH: usize = SNAP_LENGTH as usize;
/// How often `vipgate top` looks.
const LOOK: Duration = Duration::from_secs(1);

/// Measures what watching costs packets of open sessions
#[derive(Clone, Debug, Args)]
pub(crate) struct Options {
    /// Sessions that are open; several, separated by commas, are measured one after the other
    #[arg(long, value_delimiter = ',', default_values_t = [1000, 65_536, 1_048_576])]
    sessions: Vec<u32>,
    /// Measured rounds of each subject; medians are reported
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Results are JSON in any case
    #[arg(long)]
    json: bool,
}

/// Who watches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Subject {
    Nobody,
    /// `capture --filter 'host ..'`, of one pod among a thousand.
    CaptureOne,
    /// `capture --filter 'port ..'`, of one session's.
    CapturePort,
    /// `capture --filter dropped`, of which there are none.
    CaptureDrops,
    /// `capture`, of everything: as many as its rate lets through.
    CaptureAll,
    /// `nat_log` with sessions.
    Log,
    /// `top`.
    Top,
    /// A capture of one pod, the log and `top`.
    All,
}

impl Subject {
    const ALL: [Self; 8] = [
        Self::Nobody,
        Self::CaptureOne,
        Self::CapturePort,
        Self::CaptureDrops,
        Self::CaptureAll,
        Self::Log,
        Self::Top,
        Self::All,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Nobody => "nobody",
            Self::CaptureOne => "capture_one",
            Self::CapturePort => "capture_port",
            Self::CaptureDrops => "capture_drops",
            Self::CaptureAll => "capture_all",
            Self::Log => "log",
            Self::Top => "top",
            Self::All => "all",
        }
    }

    fn captures(self, port: u16) -> Option<TapFilter> {
        match self {
            Self::CaptureOne | Self::All => {
                Some(TapFilter { nets: vec![FIRST_POD.to_ip().into()], ..TapFilter::default() })
            }
            Self::CapturePort => Some(TapFilter { port: Some(port), ..TapFilter::default() }),
            Self::CaptureDrops => Some(TapFilter { outcome: Outcome::Dropped, ..TapFilter::default() }),
            Self::CaptureAll => Some(TapFilter::default()),
            Self::Nobody | Self::Log | Self::Top => None,
        }
    }
}

#[derive(Serialize)]
struct Measured {
    benchmark: &'static str,
    sessions: u32,
    subject: &'static str,
    ns_per_packet: f64,
    /// Of the speed without anybody who watches: the median over rounds, each beside the round without of the same time.
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
    let mut load = Load::<u32>::open(&mut rig, sessions, 60, Direction::Mix, Order::Uniform)?;
    load.round(&mut rig, PACKETS, |_| Ok(()))?;
    let mut times = vec![Vec::new(); Subject::ALL.len()];
    let mut ratios = vec![Vec::new(); Subject::ALL.len()];
    let mut counts = [(0, 0); Subject::ALL.len()];
    for _ in 0..rounds {
        let mut alone = f64::NAN;
        for (at, subject) in Subject::ALL.into_iter().enumerate() {
            let watcher = Watcher::begin(subject, load.port(), &mut rig)?;
            let ns = load.round(&mut rig, PACKETS, |_| Ok(()))?;
            let (captured, missed) = watcher.end(&mut rig)?;
            counts[at].0 += captured;
            counts[at].1 += missed;
            if subject == Subject::Nobody {
                alone = ns;
            }
            times[at].push(ns);
            ratios[at].push(alone / ns);
        }
    }
    let measured = Subject::ALL.into_iter().zip(times).zip(ratios).zip(counts);
    for (((subject, times), ratios), (captured, missed)) in measured {
        let result = Measured {
            benchmark: "watch",
            sessions,
            subject: subject.name(),
            ns_per_packet: round2(median(times)),
            ratio: (median(ratios) * 1000.0).round() / 1000.0,
            captured,
            missed,
        };
        println!("{}", serde_json::to_string(&result)?);
    }
    Ok(())
}

/// Whoever watches, while a round lasts.
struct Watcher {
    stop: Arc<AtomicBool>,
    ring: Option<Arc<TapRing>>,
    threads: Vec<thread::JoinHandle<u64>>,
}

impl Watcher {
    fn begin(subject: Subject, port: u16, rig: &mut Rig) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut threads = Vec::new();
        let ring = subject.captures(port).map(|filter| {
            let ring = Arc::new(TapRing::new(PLACES, LENGTH));
            let tap = Tap::new(filter, ring.clone(), WorkerId(0), LENGTH, RATE);
            let (taken, stop) = (ring.clone(), stop.clone());
            threads.push(thread::spawn(move || take(&taken, &stop)));
            (ring, tap)
        });
        let (ring, tap) = ring.map_or((None, None), |(ring, tap)| (Some(ring), Some(Box::new(tap))));
        if tap.is_some() {
            rig.tell(Command::Capture(tap))?;
        }
        if matches!(subject, Subject::Log | Subject::All) {
            rig.tell(Command::LogSessions(Some(Arc::new(SessionQueue::new(SESSIONS)))))?;
        }
        if matches!(subject, Subject::Top | Subject::All) {
            let (commands, stop) = (rig.commands.clone(), stop.clone());
            threads.push(thread::spawn(move || look(&commands, &stop)));
        }
        for _ in 0..4 {
            rig.worker.turn(rig.now);
        }
        Ok(Self { stop, ring, threads })
    }

    /// Packets that were taken, and missed.
    fn end(self, rig: &mut Rig) -> Result<(u64, u64)> {
        self.stop.store(true, Ordering::Relaxed);
        rig.tell(Command::Capture(None))?;
        rig.tell(Command::LogSessions(None))?;
        let mut taken = 0;
        for thread in self.threads {
            while !thread.is_finished() {
                rig.worker.turn(rig.now);
            }
            taken += thread.join().map_err(|_| anyhow::anyhow!("a watcher panicked"))?;
        }
        for _ in 0..8 {
            rig.worker.turn(rig.now);
        }
        Ok((taken, self.ring.map_or(0, |ring| ring.missed())))
    }
}

/// Takes what is captured, as the admin socket does.
fn take(ring: &TapRing, stop: &AtomicBool) -> u64 {
    let mut taken = 0;
    while !stop.load(Ordering::Relaxed) {
        while let Some(place) = ring.take() {
            ring.give(place);
            taken += 1;
        }
        thread::sleep(Duration::from_millis(50));
    }
    taken
}

/// Looks at drops and ports, as `top` does; counters it reads without asking.
fn look(commands: &Sender<Command>, stop: &AtomicBool) -> u64 {
    let mut passed = LOOK;
    while !stop.load(Ordering::Relaxed) {
        if passed >= LOOK {
            passed = Duration::ZERO;
            let (reply, answer) = bounded(1);
            let records = Vec::with_capacity(drops::MOST);
            let chunk = Box::new(DropChunk { now: Tick(0), last: [None; DropReason::ALL.len()], records });
            let _ = commands.send(Command::Drops { chunk, reply });
            let _ = answer.recv_timeout(LOOK);
            let (reply, answer) = bounded(1);
            let chunk = PortChunk { only: None, cursor: Some(0), records: Vec::with_capacity(64) };
            let _ = commands.send(Command::Ports { chunk, reply });
            let _ = answer.recv_timeout(LOOK);
        }
        let step = Duration::from_millis(5);
        thread::sleep(step);
        passed += step;
    }
    0
}
