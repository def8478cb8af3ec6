//! The order of the stages: one call a line.
//!
//! Invariants of a batch: timers, commands and flushes run only between batches, so what `lookup` found is still there in
//! `rewrite` unless `recheck` ended it; packets of one session keep their order; each packet ends in one verdict.

use crate::address::V6;
use crate::batch::Batch;
use crate::counters::Counters;
use crate::ports::allocator::Allocator;
use crate::session::Sessions;
use crate::settle::Settle;
use crate::snapshot::Snapshot;
use crate::stage::{answer, classify, lookup, open, parse, recheck, rewrite};
use crate::time::Tick;

/// The tables of one worker that the stages change.
#[derive(Debug)]
pub struct Tables {
    /// Its connections.
    pub sessions: Sessions,
    /// Its ports.
    pub ports: Allocator,
}

/// Takes a batch through all stages. Afterwards every packet has a verdict.
pub fn run(
    batch: &mut Batch,
    tables: &mut Tables,
    view: &Snapshot,
    rules: open::Rules,
    flows: classify::Flows<'_>,
    counters: &Counters,
    now: Tick,
) {
    let sessions = &mut tables.sessions;
    let mut settle = Settle { policy: &view.policy, ports: &mut tables.ports, counters };

    parse::run(batch, &view.network);
    answer::run(batch, view);
    lookup::run::<u32>(batch, sessions, view);
    lookup::run::<V6>(batch, sessions, view);
    recheck::run::<u32>(batch, sessions, view, now, &mut settle);
    recheck::run::<V6>(batch, sessions, view, now, &mut settle);
    classify::run::<u32>(batch, view, rules, flows);
    classify::run::<V6>(batch, view, rules, flows);
    open::run::<u32>(batch, sessions, view, rules, now, &mut settle);
    open::run::<V6>(batch, sessions, view, rules, now, &mut settle);
    rewrite::run::<u32>(batch, sessions, &view.network, now);
    rewrite::run::<V6>(batch, sessions, &view.network, now);
}
