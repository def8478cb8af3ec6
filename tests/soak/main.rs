//! The soak (`make soak`): three gateways, a policy server, two tenants, and everything that can happen to them, at random from a seed that
//! is printed, for as long as `SOAK_MINUTES` says. The judges of the tests watch all the time.
//!
//! It fails, with exit code 1, its log and captures kept in a folder that it names, when
//! - an answer reaches somebody else, two sessions are one outside, or the far side hears lines of two in one connection;
//! - a pod's address is seen outside, or a packet travels between gateways more than three times;
//! - more than 1 in 100 connections of a set that stood is lost, whatever happened to a gateway;
//! - a new connection fails while nothing happens, or more than 2 in 100 of all do;
//! - a flow of datagrams waits for longer than 10 s;
//! - no segment has run, a capture is empty or lacks more than 1 in 100 frames, or the log of a process doesn't show that its clock jumped:
//!   without evidence there is no verdict;
//! - a process ends by itself, panics, or has grown (`resources.rs`), packet buffers are missing, or gateways that should find each
//!   other, or have one policy, don't within 20 and 10 s.
//!
//! These bounds are those of a quiet machine with two cores. Policy here comes from files, routers do what such with BGP and BFD do.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test fails by panicking, and reports")]

mod clock;
mod crowd;
mod evidence;
mod judges;
mod plan;
mod play;
mod resources;

use std::any::Any;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use vipgate_tests::cluster::{LineServer, moment, pass};

use crowd::{Crowd, Totals};
use judges::{Verdict, Watch};
use plan::{Event, Plan};
use play::Stage;

/// Connections that stand for the whole soak, and for a segment: eight times as many, over both families and three ways.
const WHOLE: u32 = 40;
const SEGMENT: u32 = 20;
/// New connections come for this long in each segment, seconds.
const NEW: u32 = 45;
/// The longest wait of a flow, seconds, and the most new connections that may fail, in a hundred.
const LONGEST: f64 = 10.0;
const UNANSWERED: usize = 2;

/// What has happened.
struct Done {
    event: Event,
    from: f64,
    to: f64,
}

/// A soak that goes on.
struct Soak {
    stage: Stage,
    began: Instant,
    first: u32,
    totals: Totals,
    judged: Verdict,
    events: Vec<Done>,
    segments: usize,
    /// Jumps of clocks that the log of their process has shown.
    jumps: usize,
    flooded: u64,
    failures: Vec<String>,
}

fn main() -> ExitCode {
    let number = |name: &str| std::env::var(name).ok().filter(|text| !text.is_empty()).map(|text| text.parse::<u64>());
    let (minutes, seed) = match (number("SOAK_MINUTES"), number("SOAK_SEED")) {
        (None, _) => {
            println!("the soak takes its time: `make soak` runs it");
            return ExitCode::SUCCESS;
        }
        (Some(Ok(minutes)), None) => (minutes, SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()),
        (Some(Ok(minutes)), Some(Ok(seed))) => (minutes, seed),
        _ => {
            eprintln!("SOAK_MINUTES and SOAK_SEED are numbers");
            return ExitCode::from(2);
        }
    };
    println!("soak of {minutes} minutes; the same again: SOAK_MINUTES={minutes} SOAK_SEED={seed} make soak");
    let mut soak = match caught(Soak::start) {
        Ok(soak) => soak,
        Err(why) => {
            println!("FAILED to start: {why}");
            return ExitCode::FAILURE;
        }
    };
    soak.run(Duration::from_secs(60 * minutes), Plan::new(seed));
    soak.report()
}

/// What a function returns, or the message of its panic.
fn caught<T>(function: impl FnOnce() -> T) -> Result<T, String> {
    let message = |panic: Box<dyn Any + Send>| match panic.downcast::<String>() {
        Ok(message) => *message,
        Err(panic) => panic.downcast::<&str>().map_or("a panic without words".to_owned(), |text| (*text).to_owned()),
    };
    catch_unwind(AssertUnwindSafe(function)).map_err(message)
}

impl Soak {
    fn start() -> Self {
        let mut stage = Stage::start();
        if stage.has_clocks() {
            clock::verify_preload(&mut stage.cluster);
        } else {
            println!("libfaketime is missing or not wanted: clocks stay as they are");
        }
        Self {
            stage,
            began: Instant::now(),
            first: 10_000_000,
            totals: Totals::default(),
            judged: Verdict::default(),
            events: Vec::new(),
            segments: 0,
            jumps: 0,
            flooded: 0,
            failures: Vec::new(),
        }
    }

    /// Segment after segment, until time is up or something breaks.
    fn run(&mut self, time: Duration, mut plan: Plan) {
        let begun = caught(|| {
            let (cluster, folder) = (&self.stage.cluster, self.stage.cluster.folder.path());
            let server = LineServer::start(folder, &cluster.server);
            let backends =
                [&cluster.pods[0], &cluster.pods[1], &cluster.crowd].map(|host| LineServer::start(folder, host));
            let mut whole = Crowd::standing(cluster, "whole", &mut self.first, WHOLE);
            whole.wait_open();
            (server, backends, whole)
        });
        let (server, backends, whole) = match begun {
            Ok(begun) => begun,
            Err(why) => return self.failures.push(format!("the clients don't stand: {why}")),
        };
        self.stage.observe();
        while self.began.elapsed() < time && self.failures.is_empty() {
            self.segments += 1;
            let (segment, steps) = (self.segments, plan.segment());
            if let Err(why) = caught(|| self.segment(segment, steps)) {
                self.failures.push(format!("segment {segment}: {why}"));
            }
        }
        let ended = caught(|| {
            let disturbed = self.disturbed();
            let mut failures = whole.end(&mut self.totals, &disturbed);
            let records = [vec![server.end()], backends.map(LineServer::end).into()].concat();
            let faults: u64 = records.iter().flatten().map(|record| record.faults).sum();
            self.totals.wrong += faults;
            failures.extend(
                (faults > 0).then(|| format!("servers heard {faults} lines that weren't of one client in order")),
            );
            failures
        });
        match ended {
            Ok(failures) => self.failures.extend(failures),
            Err(why) => self.failures.push(format!("the end: {why}")),
        }
    }

    fn segment(&mut self, number: usize, steps: Vec<(u64, Event)>) {
        let tag = format!("s{number}");
        let watch = Watch::begin(&self.stage.cluster, number);
        let mut standing = Crowd::standing(&self.stage.cluster, &tag, &mut self.first, SEGMENT);
        standing.wait_open();
        let mut passing = Crowd::passing(&self.stage.cluster, &tag, &mut self.first, NEW);
        passing.wait_open();
        let mut broken = None;
        for (pause, event) in steps {
            pass(pause);
            let from = moment();
            println!("{:>6.1} s  {event}", self.began.elapsed().as_secs_f64());
            let result = caught(|| self.stage.perform(event));
            self.events.push(Done { event, from, to: moment() });
            let dead = self.stage.dead();
            broken = result.err().or_else(|| (!dead.is_empty()).then(|| format!("{dead:?} ended")));
            broken = broken.or_else(|| caught(|| self.check_clock(event)).unwrap_or_else(Some));
            if let Some(why) = &broken {
                broken = Some(format!("{event}: {why}"));
                break;
            }
        }
        self.flooded += self.stage.end_floods();
        let disturbed = self.disturbed();
        let mut failures: Vec<String> = broken.into_iter().collect();
        for crowd in [standing, passing] {
            failures.extend(crowd.end(&mut self.totals, &disturbed));
        }
        let mut verdict = watch.end(&self.stage.cluster);
        failures.append(&mut verdict.failures);
        if failures.is_empty() {
            verdict.forget(&self.stage.cluster);
        } else {
            self.stage.write_tables();
        }
        self.judged.frames += verdict.frames;
        self.judged.missed += verdict.missed;
        self.judged.leaked += verdict.leaked;
        self.judged.misdelivered += verdict.misdelivered;
        self.failures.extend(failures.into_iter().map(|failure| format!("segment {number}: {failure}")));
        self.stage.observe();
        self.stage.cluster.check_frames();
        self.stage.check_policy();
    }

    /// Why a jump of a clock hasn't reached its process, if so.
    fn check_clock(&mut self, event: Event) -> Option<String> {
        let Event::Clock { process, seconds } = event else { return None };
        if !self.stage.has_clocks() {
            return None;
        }
        let error = clock::verify_jump(&self.stage.cluster, process, seconds);
        self.jumps += usize::from(error.is_none());
        error
    }

    /// When something happened that new connections may notice.
    fn disturbed(&self) -> Vec<(f64, f64)> {
        self.events.iter().filter(|done| done.event.disturbs()).map(|done| (done.from, done.to)).collect()
    }

    /// Says what came of it; logs stay where it has failed.
    fn report(mut self) -> ExitCode {
        let Totals { stood, begun, unanswered, unanswered_in_peace, .. } = self.totals;
        if self.segments == 0 || stood == 0 || begun == 0 {
            let segments = self.segments;
            self.failures
                .push(format!("{segments} segments, {stood} connections and {begun} new ones are nothing to judge"));
        }
        let failed = unanswered + unanswered_in_peace;
        if failed * 100 > begun * UNANSWERED {
            self.failures.push(format!("{failed} of {begun} new connections were not answered"));
        }
        self.totals.longest.sort_by(|one, other| other.0.total_cmp(&one.0));
        self.failures.extend(
            self.totals
                .longest
                .first()
                .filter(|longest| longest.0 > LONGEST)
                .map(|(wait, ..)| format!("a flow waited {wait:.1} s")),
        );
        self.failures.extend(self.stage.resources.grown());
        self.failures.extend(self.panics());
        // Counters of processes that live are entered as they end.
        for gateway in &mut self.stage.cluster.gateways {
            if gateway.is_alive()
                && let Err(why) = caught(|| gateway.end("TERM"))
            {
                self.failures.push(format!("{}: {why}", gateway.name));
            }
        }
        self.print();
        let cluster = &mut self.stage.cluster;
        if self.failures.is_empty() {
            println!("\npassed");
            return ExitCode::SUCCESS;
        }
        println!("\nFAILED");
        for failure in &self.failures {
            println!("- {failure}");
        }
        cluster.folder.disable_cleanup(true);
        println!("logs, captures, clients' results: {}", cluster.folder.path().display());
        ExitCode::FAILURE
    }

    fn print(&self) {
        let Totals { stood, kept, begun, unanswered, unanswered_in_peace, wrong, longest } = &self.totals;
        let Verdict { frames, missed, leaked, misdelivered, .. } = &self.judged;
        println!("\nafter {:.0} s, {} events", self.began.elapsed().as_secs_f64(), self.events.len());
        println!("sessions kept      {kept} of {stood}");
        println!("misdelivered       {}", wrong + *misdelivered as u64);
        println!("leaked             {leaked}");
        println!(
            "unanswered         {unanswered} of {begun} new connections while something happened, {unanswered_in_peace} else"
        );
        println!("judged             {frames} frames, {missed} were not captured");
        let jumps = self.events.iter().filter(|done| matches!(done.event, Event::Clock { .. })).count();
        let clocks = if self.stage.has_clocks() { "seen in the log of their process" } else { "seen: none was played" };
        println!("clocks             {} of {jumps} jumps were {clocks}", self.jumps);
        println!("flooded            {} packets", self.flooded);
        println!("longest gaps of flows");
        for (wait, at, who) in longest.iter().take(5) {
            let during = self.events.iter().rev().find(|done| (done.from..done.to + 5.0).contains(at));
            let during = during.map_or("nothing".to_owned(), |done| done.event.to_string());
            println!("  {wait:>6.3} s  {who}, at {:.1} s, during or after: {during}", at - self.wall_begin());
        }
        println!("processes\n{}", self.stage.resources);
        println!("drops and errors");
        for (reason, count) in self.stage.cluster.ledger.counted() {
            println!("  {count:>9} {reason}");
        }
        println!("events");
        for done in &self.events {
            let from = done.from - self.wall_begin();
            println!("  {from:>7.1} s, {:>5.1} s long: {}", done.to - done.from, done.event);
        }
    }

    /// When it began, by the clock that clients tell.
    fn wall_begin(&self) -> f64 {
        moment() - self.began.elapsed().as_secs_f64()
    }

    /// Logs in which a process says that it panicked.
    fn panics(&self) -> Vec<String> {
        let folder = self.stage.cluster.folder.path();
        let folders =
            [vec![folder.to_owned()], self.stage.cluster.gateways.iter().map(|it| folder.join(&it.name)).collect()];
        let files = folders.concat().into_iter().flat_map(|folder| fs::read_dir(folder).unwrap());
        let logs = files
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| path.extension().is_some_and(|it| it == "log"));
        let says = |path: &std::path::PathBuf| fs::read_to_string(path).is_ok_and(|log| log.contains("panicked at"));
        logs.filter(says).map(|path| format!("a panic in {}", path.display())).collect()
    }
}
