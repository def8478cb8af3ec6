//! Soak test (`make soak`): three gateways, a policy server and two tenants under random faults and changes,
//! reproducible by a printed seed, for `SOAK_MINUTES`. The verifiers of the tests check all traffic.
//!
//! It fails with exit code 1, and keeps logs and captures in a directory that it prints, when
//! - a reply is delivered to another client, two sessions use one tuple, or a server receives lines of two clients in
//!   one connection;
//! - a pod's address leaks, or a packet crosses the tunnel between gateways more than three times;
//! - more than 1 in 100 held connections of a set is lost, whatever fails;
//! - a new connection fails without a disruption, or more than 2 in 100 of all do;
//! - a UDP flow gets no reply for more than 10 s;
//! - no segment has run, a capture is empty or lacks more than 1 in 100 frames, or a process's log doesn't show that
//!   its clock jumped: the evidence is insufficient;
//! - a process exits on its own, panics, or grows (`resources.rs`), frames are missing, gateways don't connect to
//!   each other within 20 s, or don't have the same policy within 10 s.
//!
//! The bounds hold on an idle machine with two cores. Policy comes from files; routers react as with BGP and BFD.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test fails by panicking, and reports")]

mod captures;
mod clients;
mod clock;
mod resources;
mod runner;

use std::any::Any;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use vipgate_tests::cluster::{LineServer, sleep_ms, unix_time};
use vipgate_tests::soak::schedule::{Schedule, SoakEvent};

use crate::captures::{SegmentCaptures, Verdict};
use crate::clients::{ClientSets, Totals};
use crate::runner::SoakCluster;

/// Scale of the connections held for the whole soak, and of those for a segment: eight times as many, over both
/// families and three directions.
const SOAK_SCALE: u32 = 40;
const SEGMENT_SCALE: u32 = 20;
/// Duration of new connections in each segment, seconds.
const NEW_CONNECTION_SECONDS: u32 = 45;
/// Maximum wait of a flow in seconds, and maximum percentage of failed new connections.
const MAX_WAIT: f64 = 10.0;
const MAX_UNANSWERED_PERCENT: usize = 2;

struct CompletedEvent {
    event: SoakEvent,
    from: f64,
    to: f64,
}

/// A running soak.
struct Soak {
    stage: SoakCluster,
    started: Instant,
    next_identity: u32,
    totals: Totals,
    verdict: Verdict,
    events: Vec<CompletedEvent>,
    segments: usize,
    /// Clock jumps that a process's log has confirmed.
    clock_jumps: usize,
    flooded: u64,
    failures: Vec<String>,
}

fn main() -> ExitCode {
    let number = |name: &str| std::env::var(name).ok().filter(|text| !text.is_empty()).map(|text| text.parse::<u64>());
    let (minutes, seed) = match (number("SOAK_MINUTES"), number("SOAK_SEED")) {
        (None, _) => {
            println!("the soak runs only by `make soak`");
            return ExitCode::SUCCESS;
        }
        (Some(Ok(minutes)), None) => (minutes, SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()),
        (Some(Ok(minutes)), Some(Ok(seed))) => (minutes, seed),
        _ => {
            eprintln!("SOAK_MINUTES and SOAK_SEED must be numbers");
            return ExitCode::from(2);
        }
    };
    println!("soak of {minutes} minutes; to reproduce: SOAK_MINUTES={minutes} SOAK_SEED={seed} make soak");
    let mut soak = match catch_panic(Soak::start) {
        Ok(soak) => soak,
        Err(why) => {
            println!("FAILED to start: {why}");
            return ExitCode::FAILURE;
        }
    };
    soak.run(Duration::from_secs(60 * minutes), Schedule::new(seed));
    soak.report()
}

/// The function's result, or the message of its panic.
fn catch_panic<T>(function: impl FnOnce() -> T) -> Result<T, String> {
    let message = |panic: Box<dyn Any + Send>| match panic.downcast::<String>() {
        Ok(message) => *message,
        Err(panic) => panic.downcast::<&str>().map_or("panic without a message".to_owned(), |text| (*text).to_owned()),
    };
    catch_unwind(AssertUnwindSafe(function)).map_err(message)
}

impl Soak {
    fn start() -> Self {
        let mut stage = SoakCluster::start();
        if stage.has_clocks() {
            clock::verify_preload(&mut stage.cluster);
        } else {
            println!("libfaketime is missing or disabled: no clock jumps");
        }
        Self {
            stage,
            started: Instant::now(),
            next_identity: 10_000_000,
            totals: Totals::default(),
            verdict: Verdict::default(),
            events: Vec::new(),
            segments: 0,
            clock_jumps: 0,
            flooded: 0,
            failures: Vec::new(),
        }
    }

    /// Runs segments until the time is over or a check fails.
    fn run(&mut self, time: Duration, mut plan: Schedule) {
        let setup = catch_panic(|| {
            let (cluster, folder) = (&self.stage.cluster, self.stage.cluster.folder.path());
            let server = LineServer::start(folder, &cluster.server);
            let backends =
                [&cluster.pods[0], &cluster.pods[1], &cluster.bulk_pods].map(|host| LineServer::start(folder, host));
            let mut whole = ClientSets::held(cluster, "whole", &mut self.next_identity, SOAK_SCALE);
            whole.wait_established();
            (server, backends, whole)
        });
        let (server, backends, whole) = match setup {
            Ok(setup) => setup,
            Err(why) => return self.failures.push(format!("clients are not established: {why}")),
        };
        self.stage.sample_resources();
        while self.started.elapsed() < time && self.failures.is_empty() {
            self.segments += 1;
            let (segment, steps) = (self.segments, plan.segment());
            if let Err(why) = catch_panic(|| self.segment(segment, steps)) {
                self.failures.push(format!("segment {segment}: {why}"));
            }
        }
        let teardown = catch_panic(|| {
            let disturbed = self.disturbed();
            let mut failures = whole.end(&mut self.totals, &disturbed);
            let records = [vec![server.end()], backends.map(LineServer::end).into()].concat();
            let faults: u64 = records.iter().flatten().map(|record| record.errors).sum();
            self.totals.misdelivered += faults;
            failures.extend(
                (faults > 0).then(|| format!("servers received {faults} lines of another client or out of order")),
            );
            failures
        });
        match teardown {
            Ok(failures) => self.failures.extend(failures),
            Err(why) => self.failures.push(format!("teardown: {why}")),
        }
    }

    fn segment(&mut self, number: usize, steps: Vec<(u64, SoakEvent)>) {
        let tag = format!("s{number}");
        let watch = SegmentCaptures::start(&self.stage.cluster, number);
        let mut standing = ClientSets::held(&self.stage.cluster, &tag, &mut self.next_identity, SEGMENT_SCALE);
        standing.wait_established();
        let mut passing =
            ClientSets::probes_and_new(&self.stage.cluster, &tag, &mut self.next_identity, NEW_CONNECTION_SECONDS);
        passing.wait_established();
        let mut error = None;
        for (pause, event) in steps {
            sleep_ms(pause);
            let from = unix_time();
            println!("{:>6.1} s  {event}", self.started.elapsed().as_secs_f64());
            let result = catch_panic(|| self.stage.run_event(event));
            self.events.push(CompletedEvent { event, from, to: unix_time() });
            let exited = self.stage.exited_processes();
            error = result.err().or_else(|| (!exited.is_empty()).then(|| format!("{exited:?} exited")));
            error = error.or_else(|| catch_panic(|| self.check_clock(event)).unwrap_or_else(Some));
            if let Some(why) = &error {
                error = Some(format!("{event}: {why}"));
                break;
            }
        }
        self.flooded += self.stage.end_floods();
        let disturbed = self.disturbed();
        let mut failures: Vec<String> = error.into_iter().collect();
        for clients in [standing, passing] {
            failures.extend(clients.end(&mut self.totals, &disturbed));
        }
        let mut verdict = watch.end(&self.stage.cluster);
        failures.append(&mut verdict.failures);
        if failures.is_empty() {
            verdict.remove_captures(&self.stage.cluster);
        } else {
            self.stage.dump_state();
        }
        self.verdict.frames += verdict.frames;
        self.verdict.missed += verdict.missed;
        self.verdict.leaked += verdict.leaked;
        self.verdict.misdelivered += verdict.misdelivered;
        self.failures.extend(failures.into_iter().map(|failure| format!("segment {number}: {failure}")));
        self.stage.sample_resources();
        self.stage.cluster.check_frames();
        self.stage.check_policy();
    }

    /// Why a process doesn't see a clock jump, if so.
    fn check_clock(&mut self, event: SoakEvent) -> Option<String> {
        let SoakEvent::Clock { process, seconds } = event else { return None };
        if !self.stage.has_clocks() {
            return None;
        }
        let error = clock::verify_jump(&self.stage.cluster, process, seconds);
        self.clock_jumps += usize::from(error.is_none());
        error
    }

    /// Intervals of disruptive events, in which new connections may fail.
    fn disturbed(&self) -> Vec<(f64, f64)> {
        self.events.iter().filter(|done| done.event.is_disruptive()).map(|done| (done.from, done.to)).collect()
    }

    /// Prints the report; logs are kept after a failure.
    fn report(mut self) -> ExitCode {
        let Totals { held, opened, unanswered, unanswered_undisturbed, .. } = self.totals;
        if self.segments == 0 || held == 0 || opened == 0 {
            let segments = self.segments;
            self.failures
                .push(format!("{segments} segments, {held} held and {opened} new connections are no evidence"));
        }
        let failed = unanswered + unanswered_undisturbed;
        if failed * 100 > opened * MAX_UNANSWERED_PERCENT {
            self.failures.push(format!("{failed} of {opened} new connections got no reply"));
        }
        self.totals.longest_waits.sort_by(|one, other| other.0.total_cmp(&one.0));
        self.failures.extend(
            self.totals
                .longest_waits
                .first()
                .filter(|longest| longest.0 > MAX_WAIT)
                .map(|(wait, ..)| format!("a flow waited for {wait:.1} s")),
        );
        self.failures.extend(self.stage.resources.leaks());
        self.failures.extend(self.panics());
        // Counters of running processes are recorded as they stop.
        for gateway in &mut self.stage.cluster.gateways {
            if gateway.is_alive()
                && let Err(why) = catch_panic(|| gateway.stop("TERM"))
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
        println!("logs, captures and results: {}", cluster.folder.path().display());
        ExitCode::FAILURE
    }

    fn print(&self) {
        let Totals {
            held,
            survived,
            opened,
            unanswered,
            unanswered_undisturbed,
            misdelivered: by_identity,
            longest_waits,
        } = &self.totals;
        let Verdict { frames, missed, leaked, misdelivered, .. } = &self.verdict;
        println!("\nafter {:.0} s, {} events", self.started.elapsed().as_secs_f64(), self.events.len());
        println!("sessions kept      {survived} of {held}");
        println!("misdelivered       {}", by_identity + *misdelivered as u64);
        println!("leaked             {leaked}");
        println!(
            "unanswered         {unanswered} of {opened} new connections during disruptions, \
             {unanswered_undisturbed} at other times"
        );
        println!("captured           {frames} frames, {missed} missed");
        let jumps = self.events.iter().filter(|done| matches!(done.event, SoakEvent::Clock { .. })).count();
        let clocks = if self.stage.has_clocks() { "confirmed by a log" } else { "confirmed: libfaketime is missing" };
        println!("clocks             {} of {jumps} jumps {clocks}", self.clock_jumps);
        println!("flooded            {} packets", self.flooded);
        println!("longest gaps of flows");
        for (wait, at, set) in longest_waits.iter().take(5) {
            let during = self.events.iter().rev().find(|done| (done.from..done.to + 5.0).contains(at));
            let during = during.map_or("no event".to_owned(), |done| done.event.to_string());
            println!("  {wait:>6.3} s  {set}, at {:.1} s, during or after: {during}", at - self.start_time());
        }
        println!("processes\n{}", self.stage.resources);
        println!("drops and errors");
        for (reason, count) in self.stage.cluster.accounting.totals() {
            println!("  {count:>9} {reason}");
        }
        println!("events");
        for done in &self.events {
            let from = done.from - self.start_time();
            println!("  {from:>7.1} s, {:>5.1} s long: {}", done.to - done.from, done.event);
        }
    }

    /// Start time in seconds since the epoch.
    fn start_time(&self) -> f64 {
        unix_time() - self.started.elapsed().as_secs_f64()
    }

    /// Logs of processes that panicked.
    fn panics(&self) -> Vec<String> {
        let folder = self.stage.cluster.folder.path();
        let folders =
            [vec![folder.to_owned()], self.stage.cluster.gateways.iter().map(|it| folder.join(&it.name)).collect()];
        let files = folders.concat().into_iter().flat_map(|folder| fs::read_dir(folder).unwrap());
        let logs = files
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| path.extension().is_some_and(|it| it == "log"));
        let has_panic =
            |path: &std::path::PathBuf| fs::read_to_string(path).is_ok_and(|log| log.contains("panicked at"));
        logs.filter(has_panic).map(|path| format!("a panic in {}", path.display())).collect()
    }
}
