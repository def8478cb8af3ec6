//! ENIs whose source/destination check can't be switched off, for lack of the right: so it isn't tried in each round.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::provider::NicId;

/// How long it isn't tried again.
const MAX_AGE: Duration = Duration::from_mins(10);

#[derive(Debug, Default)]
pub(super) struct Unmodifiable(Mutex<BTreeMap<NicId, Instant>>);

impl Unmodifiable {
    pub(super) fn add(&self, nic: &NicId) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(nic.clone(), Instant::now());
    }

    pub(super) fn contains(&self, nic: &NicId) -> bool {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, since| since.elapsed() < MAX_AGE);
        all.contains_key(nic)
    }
}
