//! Every call may fail: the n-th call of a kind (`vipgate_tests::failing_calls`) fails or is late while a gateway
//! starts, changes its policy, loses what it has on an interface, or stops.
//!
//! - Nothing leaves with a pod's address, or with another tenant's VIP.
//! - Nothing is acknowledged that isn't in force.
//! - A process that ends does so with an error, as systemd restarts it, or in time when it is stopped.
//! - Once calls succeed, all is within 10 s as if they always had: traffic, readiness, status, frames.
//!
//! Which call, how and how often is random: `VIPGATE_FAULTS_SEED` repeats a run. The long form, with
//! `VIPGATE_FAULTS_SECONDS`, tries every number of each kind until the time is over, also those of a policy server with
//! files and with etcd, and those of a failover. Clock jumps are in the soak test: no system call tells the time.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod draws;
mod ends;
mod failover;
mod world;

use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tempfile::TempDir;
use vipgate_tests::failing_calls::{Effect, Fault, Injector, Report, kinds};
use vipgate_tests::flood::Random;

use crate::draws::Draws;
use crate::world::{Setup, World};

/// The program that traces, see `vipgate_tests::failing_calls`.
const TRACER: &str = env!("CARGO_BIN_EXE_call-tracer");
/// Duration of the short form in seconds, besides the network's: with it, a minute.
const SECONDS: u64 = 35;

/// The variable as a number.
fn variable(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is `{text}`, expected a number")))
}

/// Duration of the long form.
fn long_form() -> Option<Duration> {
    variable("VIPGATE_FAULTS_SECONDS").map(Duration::from_secs)
}

/// Random numbers of a run, which it prints how to repeat.
fn random() -> Random {
    let clock = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let seed = variable("VIPGATE_FAULTS_SEED").unwrap_or_else(clock);
    println!("VIPGATE_FAULTS_SEED={seed}");
    Random(seed)
}

/// Tries faults until the time is over, or all have been.
fn try_faults(setup: Setup, mut random: Random, end: Instant) {
    let drops_uncovered = random.next_u64() % 2 == 1;
    println!("{setup:?}, pods that no policy covers {}", if drops_uncovered { "are dropped" } else { "pass" });
    let (mut world, mut draws) = (World::new(setup, drops_uncovered), Draws::new(random));
    for scenario in setup.scenarios() {
        draws.add(*scenario, &world.perform(*scenario, None));
    }
    while Instant::now() < end
        && let Some(trial) = draws.draw()
    {
        println!("{trial}");
        let report = world.perform(trial.scenario, Some(&trial.fault));
        draws.record(&trial, &report);
    }
    println!("{}{} restarts", draws.coverage(), world.restarts);
}

/// Runs a traced command to its end.
fn run_traced(injector: &mut Injector, command: &[&str]) -> (Output, Report) {
    let wrapper = injector.wrapper();
    let mut traced = Command::new(&wrapper[0]);
    traced.args(&wrapper[1..]).args(command).env("LC_ALL", "C").stdout(Stdio::null()).stderr(Stdio::piped());
    let process = traced.spawn().unwrap();
    injector.attach(process.id());
    let output = process.wait_with_output().unwrap();
    (output, injector.report())
}

#[test]
fn a_call_fails_or_is_late_as_requested() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("made");
    let command = ["mkdir", &path.display().to_string()];
    let mut injector = Injector::start(TRACER);
    injector.count();
    let (output, report) = run_traced(&mut injector, &command);
    assert!(output.status.success() && path.is_dir() && report.affected.is_empty(), "{output:?}");
    // Which of its system calls the C library uses.
    let (name, count) = report.counts.iter().find(|(name, _)| name.starts_with("mkdir")).unwrap();
    assert_eq!(*count, 1);
    std::fs::remove_dir(&path).unwrap();

    let kind = kinds::find(name).unwrap();
    injector.arm(&Fault { kind, first: 1, repeats: false, effect: Effect::Error(28) });
    let (output, report) = run_traced(&mut injector, &command);
    assert!(!output.status.success() && !path.exists(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("No space left on device"), "{output:?}");
    assert!(report.affected.len() == 1 && report.affected[0].contains(command[1]), "{report:?}");

    let delay = Duration::from_millis(300);
    injector.arm(&Fault { kind, first: 1, repeats: false, effect: Effect::Delay(delay) });
    let started = Instant::now();
    let (output, _) = run_traced(&mut injector, &command);
    assert!(output.status.success() && path.is_dir() && started.elapsed() >= delay, "{output:?}");
}

#[test]
fn every_call_may_fail() {
    let mut random = random();
    let (setups, duration) = match long_form() {
        // One fifth is for the failover.
        Some(duration) => (Setup::ALL.to_vec(), duration / 5),
        // From files or from a server.
        None => (vec![Setup::ALL[(random.next_u64() % 2) as usize]], Duration::from_secs(SECONDS)),
    };
    for setup in setups {
        try_faults(setup, Random(random.next_u64()), Instant::now() + duration);
    }
}

#[test]
fn every_call_may_fail_in_a_failover() {
    if let Some(duration) = long_form() {
        failover::try_faults(random(), Instant::now() + duration / 5);
    }
}
