//! What is drawn: a scenario, a kind of call, the number of the call in the scenario, and what happens to it.

use std::fmt::{self, Write as _};
use std::time::Duration;

use vipgate_tests::failing_calls::kinds::{self, Kind};
use vipgate_tests::failing_calls::{Effect, Fault, Report};
use vipgate_tests::flood::Random;

/// Of a kind with more calls, only so many are tried: those of an event loop don't differ.
const MAX_NUMBER: u64 = 2000;
/// Delays of one call, and of each one, milliseconds.
const DELAYS: [u64; 4] = [200, 500, 1000, 1500];
const REPEATED_DELAY: u64 = 20;

/// When calls fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scenario {
    /// After a process has stopped or was killed.
    Start,
    /// An endpoint is added or removed.
    Policy,
    /// The XDP program is detached, the carrier is lost, or an address changes.
    Interface,
    /// SIGTERM.
    Stop,
    /// Another gateway is killed.
    Failover,
}

/// A scenario and its fault.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Trial {
    pub(crate) scenario: Scenario,
    pub(crate) fault: Fault,
}

impl fmt::Display for Trial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.scenario, self.fault)
    }
}

/// The calls of a kind in a scenario.
#[derive(Debug)]
struct Calls {
    scenario: Scenario,
    kind: &'static Kind,
    /// How many there were without a fault.
    count: u64,
    untried: Vec<u64>,
    /// Trials in which a call was affected.
    affected: u64,
}

/// Draws trials, none twice: each kind of each scenario is as likely as the others.
#[derive(Debug)]
pub(crate) struct Draws {
    random: Random,
    calls: Vec<Calls>,
}

impl Draws {
    pub(crate) fn new(random: Random) -> Self {
        Self { random, calls: Vec::new() }
    }

    /// Adds the calls that a scenario has without a fault.
    pub(crate) fn add(&mut self, scenario: Scenario, report: &Report) {
        for (name, count) in &report.counts {
            let (kind, count) = (kinds::find(name).unwrap(), *count);
            let untried = (1..=count.min(MAX_NUMBER)).collect();
            self.calls.push(Calls { scenario, kind, count, untried, affected: 0 });
        }
    }

    /// A number below a limit.
    fn below(&mut self, limit: usize) -> usize {
        (self.random.next_u64() % limit as u64) as usize
    }

    /// The next trial; `None`: all were tried.
    pub(crate) fn draw(&mut self) -> Option<Trial> {
        let untried = |calls: &(usize, &Calls)| !calls.1.untried.is_empty();
        let candidates: Vec<usize> = self.calls.iter().enumerate().filter(untried).map(|(at, _)| at).collect();
        if candidates.is_empty() {
            return None;
        }
        let calls = candidates[self.below(candidates.len())];
        let number = self.below(self.calls[calls].untried.len());
        let Calls { scenario, kind, untried, .. } = &mut self.calls[calls];
        let (scenario, kind, first) = (*scenario, *kind, untried.swap_remove(number));
        let repeats = self.below(2) == 1;
        let effect = match self.below(4) {
            0 if repeats => Effect::Delay(Duration::from_millis(REPEATED_DELAY)),
            0 => Effect::Delay(Duration::from_millis(DELAYS[self.below(DELAYS.len())])),
            _ => Effect::Error(kind.errors[self.below(kind.errors.len())]),
        };
        Some(Trial { scenario, fault: Fault { kind, first, repeats, effect } })
    }

    /// Records whether a trial has affected a call.
    pub(crate) fn record(&mut self, trial: &Trial, report: &Report) {
        let is_same = |calls: &&mut Calls| calls.scenario == trial.scenario && calls.kind.name == trial.fault.kind.name;
        if let Some(calls) = self.calls.iter_mut().find(is_same) {
            calls.affected += u64::from(!report.affected.is_empty());
        }
    }

    /// What was tried, a line for each kind of each scenario.
    pub(crate) fn coverage(&self) -> String {
        let mut text = String::new();
        for Calls { scenario, kind, count, untried, affected } in &self.calls {
            let tried = (*count).min(MAX_NUMBER) - untried.len() as u64;
            let name = kind.name;
            let _ = writeln!(text, "{scenario:?} {name}: {count} calls, {tried} tried, {affected} affected");
        }
        text
    }
}
