//! A property's tally: what it has exercised, by class, over all its cases. One that never reaches a class says nothing about it, so
//! it fails, however green each case was.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::panic::Location;

use proptest::strategy::Strategy;
use proptest::test_runner::{Config, TestCaseResult, TestRunner};

/// How often each class was reached.
#[derive(Debug, Default)]
pub(crate) struct Tally(RefCell<BTreeMap<String, u64>>);

impl Tally {
    /// One more of a class.
    pub(crate) fn count(&self, class: impl Into<String>) {
        self.add(class, 1);
    }

    /// So many more.
    pub(crate) fn add(&self, class: impl Into<String>, count: u64) {
        if count > 0 {
            *self.0.borrow_mut().entry(class.into()).or_default() += count;
        }
    }

    /// Each of these classes was reached.
    pub(crate) fn assert_reached(&self, classes: &[&str]) {
        let counts = self.0.borrow();
        let missed: Vec<_> = classes.iter().filter(|class| !counts.contains_key(**class)).collect();
        assert!(missed.is_empty(), "never reached: {missed:?}, of {counts:?}");
    }
}

/// Runs a property over its cases, which must reach all of these classes. Seeds that fail are kept beside the caller's file, unless the
/// configuration names another place.
#[track_caller]
pub(crate) fn property<S: Strategy>(
    config: Config,
    strategy: &S,
    classes: &[&str],
    test: impl Fn(S::Value, &Tally) -> TestCaseResult,
) {
    let tally = Tally::default();
    let config = Config { source_file: config.source_file.or(Some(Location::caller().file())), ..config };
    if let Err(error) = TestRunner::new(config).run(strategy, |value| test(value, &tally)) {
        panic!("{error}");
    }
    println!("{tally:?}");
    tally.assert_reached(classes);
}
