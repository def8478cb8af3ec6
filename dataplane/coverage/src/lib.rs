//! Coverage counters of a property test: how often its cases reached each class. A property that never reaches a class
//! fails.
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::panic::Location;

use proptest::strategy::Strategy;
use proptest::test_runner::{Config, RngSeed, TestCaseResult, TestRunner};

/// How often each class was reached.
#[derive(Debug, Default)]
pub struct Coverage(RefCell<BTreeMap<String, u64>>);

impl Coverage {
    /// Counts one occurrence of a class.
    pub fn count(&self, class: impl Into<String>) {
        self.add(class, 1);
    }

    /// Counts several occurrences of a class.
    pub fn add(&self, class: impl Into<String>, count: u64) {
        if count > 0 {
            *self.0.borrow_mut().entry(class.into()).or_default() += count;
        }
    }

    /// Asserts that each of these classes was reached.
    pub fn assert_reached(&self, classes: &[&str]) {
        let missed = self.missed(classes);
        assert!(missed.is_empty(), "classes never reached: {missed:?}, reached: {:?}", self.0.borrow());
    }

    fn missed<'a>(&self, classes: &[&'a str]) -> Vec<&'a str> {
        let counts = self.0.borrow();
        classes.iter().filter(|class| !counts.contains_key(**class)).copied().collect()
    }
}

/// Rounds of cases until each class was reached: one round misses a rare class by chance now and then.
const MAX_ROUNDS: usize = 8;

/// Runs a property over its cases, which must reach all of these classes; up to eight times as many cases if they don't.
/// Seeds of failures are stored beside the caller's file, unless the configuration names another place.
#[track_caller]
pub fn property<S: Strategy>(
    config: Config,
    strategy: &S,
    classes: &[&str],
    test: impl Fn(S::Value, &Coverage) -> TestCaseResult,
) {
    let coverage = Coverage::default();
    let config = Config { source_file: config.source_file.or(Some(Location::caller().file())), ..config };
    let rounds = if config.rng_seed == RngSeed::Random { MAX_ROUNDS } else { 1 };
    for _ in 0..rounds {
        if let Err(error) = TestRunner::new(config.clone()).run(strategy, |value| test(value, &coverage)) {
            panic!("{error}");
        }
        if coverage.missed(classes).is_empty() {
            break;
        }
    }
    println!("{coverage:?}");
    coverage.assert_reached(classes);
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use proptest::prelude::*;

    use super::*;

    fn config() -> Config {
        Config { cases: 4, failure_persistence: None, ..Config::default() }
    }

    #[test]
    fn cases_go_on_until_each_class_was_reached() {
        let count = Cell::new(0);
        property(config(), &Just(()), &["rare"], |(), coverage| {
            count.set(count.get() + 1);
            if count.get() == 10 {
                coverage.count("rare");
            }
            Ok(())
        });
        assert_eq!(count.get(), 12, "three rounds");
    }

    #[test]
    #[should_panic(expected = "classes never reached: [\"never\"]")]
    fn a_class_that_is_never_reached_is_a_failure() {
        property(config(), &Just(()), &["never"], |(), _| Ok(()));
    }
}
