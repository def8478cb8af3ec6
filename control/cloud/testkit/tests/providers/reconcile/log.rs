//! Events, requests and violations of a world.

use std::sync::{Arc, Mutex};

use tokio::time::Instant;

use crate::reconcile::checked::lock;

#[derive(Clone, Debug)]
pub(crate) struct Log {
    started: Instant,
    lines: Arc<Mutex<Vec<String>>>,
    violations: Arc<Mutex<Vec<String>>>,
}

impl Log {
    pub(crate) fn new() -> Self {
        Self { started: Instant::now(), lines: Arc::default(), violations: Arc::default() }
    }

    pub(crate) fn note(&self, text: &str) {
        lock(&self.lines).push(format!("{:8.3} {text}", self.started.elapsed().as_secs_f64()));
    }

    pub(crate) fn violation(&self, text: &str) {
        self.note(&format!("VIOLATION {text}"));
        lock(&self.violations).push(text.to_owned());
    }

    pub(crate) fn violations(&self) -> Vec<String> {
        lock(&self.violations).clone()
    }

    pub(crate) fn text(&self) -> String {
        lock(&self.lines).join("\n")
    }
}
