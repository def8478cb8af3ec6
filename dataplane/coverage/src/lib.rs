//! Coverage counters of a property test: how often its cases reached each class. A property that never reaches a class
//! fails.
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::panic::Location;

use proptest::strategy::Strategy;
use proptest::test_runner::{Config, TestCaseResult, TestRunner};

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
        let counts = self.0.borrow();
        let missed: Vec<_> = classes.iter().filter(|class| !counts.contains_key(**class)).collect();
        assert!(missed.is_empty(), "classes never reached: {missed:?}, reached: {counts:?}");
    }
}

/// Runs a property over its cases, which must reach all of these classes. Seeds of failures are stored beside the
/// caller's file, unless the configuration names another place.
#[track_caller]
pub fn property<S: Strategy>(
    config: Config,
    strategy: &S,
    classes: &[&str],
    test: impl Fn(S::Value, &Coverage) -> TestCaseResult,
) {
    let coverage = Coverage::default();
    let config = Config { source_file: config.source_file.or(Some(Location::caller().file())), ..config };
    if let Err(error) = TestRunner::new(config).run(strategy, |value| test(value, &coverage)) {
        panic!("{error}");
    }
    println!("{coverage:?}");
    coverage.assert_reached(classes);
}
