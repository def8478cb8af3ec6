//! The order of the stages: one call a line.
//!
//! Invariants of a batch: timers, commands and flushes run only between batches, so what `lookup` found is still there in
//! `rewrite` unless `recheck` ended it; packets of one session keep their order; each packet ends in one verdict.

use crate::batch::Batch;
use crate::counters::Counters;
use crate::ports::allocator::Allocator;
use crate::session::Sessions;
use crate::settle::Settle;
use crate::snapshot::Snapshot;
use crate::stage::{answer, classify, lookup, open, parse, recheck, rewrite, route};
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
    lookup::run(batch, sessions, view);
    recheck::run(batch, sessions, view, now, &mut settle);
    classify::run(batch, view, rules, flows);
    open::run(batch, sessions, view, rules, now, &mut settle);
    rewrite::run(batch, sessions, &view.network, now);
    route::run(batch, &view.network);
}
