//! Shrinks a history that fails: leaves out changes for as long as it still fails.

use super::history::History;
use super::world::Batch;

/// Attempts, at most: each runs the history.
const ATTEMPTS: usize = 1500;

/// The smallest history that was found for which `fails`.
pub(super) fn shrink(history: History, fails: impl Fn(&History) -> bool) -> History {
    let mut smallest = history;
    let mut attempts = 0;
    let mut length = count(&smallest).div_ceil(2);
    while length > 0 {
        let (mut at, mut has_shrunk) = (0, false);
        while at < count(&smallest) && attempts < ATTEMPTS {
            attempts += 1;
            let candidate = without(&smallest, at, length);
            if fails(&candidate) {
                smallest = candidate;
                has_shrunk = true;
            } else {
                at += length;
            }
        }
        length = if length == 1 && has_shrunk && attempts < ATTEMPTS { 1 } else { length / 2 };
    }
    smallest.batches.retain(|batch| batch.is_restart || !batch.changes.is_empty());
    smallest
}

fn count(history: &History) -> usize {
    history.batches.iter().map(|batch| batch.changes.len()).sum()
}

/// The history without `length` changes from the `at`th one on.
fn without(history: &History, at: usize, length: usize) -> History {
    let mut n = 0;
    let mut keep = |_: &super::world::Change| {
        n += 1;
        !(at..at + length).contains(&(n - 1))
    };
    let batches = history.batches.iter().map(|Batch { is_restart, changes }| {
        let changes = changes.iter().filter(|change| keep(change)).cloned().collect();
        Batch { is_restart: *is_restart, changes }
    });
    let batches = batches.collect();
    History { batches, others: history.others.clone(), ..*history }
}
