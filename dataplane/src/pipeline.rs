//! The order of the stages: one call a line.
//!
//! Invariants of a batch: timers, commands and flushes run only between batches, so what `lookup` found is still there in
//! `rewrite` unless `recheck` ended it; packets of one session keep their order; each packet ends in one verdict.

use crate::address::V6;
use crate::batch::Batch;
use crate::counters::Counters;
use crate::fragments::Fragments;
use crate::ids::Ids;
use crate::limiter::Limiter;
use crate::link::affinity::Affinity;
use crate::link::flows::Flows;
use crate::link::outbox::Outbox;
use crate::ports::allocator::Allocator;
use crate::session::Sessions;
use crate::session::embryonic::Embryonic;
use crate::session::eviction::Eviction;
use crate::settle::Settle;
use crate::snapshot::Snapshot;
use crate::stage::{
    answer, classify, errors, express, gather, health, lookup, open, parse, recheck, refuse, relay, rewrite, serve,
    stateless, takeover, unwrap, wrap,
};
use crate::time::Tick;
use crate::watch::Watch;

/// The tables of one worker that the stages change.
#[derive(Debug)]
pub struct Tables {
    /// Its connections.
    pub sessions: Sessions,
    /// Those of them that clients have opened and not confirmed.
    pub embryonic: Embryonic,
    /// What makes room in a full table.
    pub eviction: Eviction,
    /// Its ports.
    pub ports: Allocator,
    /// The fragmented datagrams that it gathers.
    pub fragments: Fragments,
    /// Its identifications.
    pub ids: Ids,
    /// How often it may speak on its own.
    pub limiter: Limiter,
    /// What other gateways are to hear of its sessions.
    pub outbox: Outbox,
    /// What people may see of its packets.
    pub watch: Watch,
}

/// What the stages read in one batch.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// Policy and network in force.
    pub view: &'a Snapshot,
    /// What opens a session.
    pub rules: open::Rules,
    /// Which worker has which flow.
    pub flows: Flows<'a>,
    /// Which backends clients were sent to.
    pub affinity: &'a Affinity,
    /// The worker's counters.
    pub counters: &'a Counters,
    /// Whether this gateway can't be sure that its ports are still its own.
    pub is_lapsed: bool,
    /// The moment.
    pub now: Tick,
}

/// Takes a batch through all stages. Afterwards every packet has a verdict.
pub fn run(batch: &mut Batch, tables: &mut Tables, context: &Context<'_>) {
    let Tables { sessions, embryonic, ports, fragments, ids, limiter, outbox, watch, .. } = tables;
    let Watch { drops, log, tap } = watch;
    let Context { view, counters, .. } = *context;
    let mut settle = Settle { policy: &view.policy, ports, counters, outbox, log };

    unwrap::run(batch, view, counters);
    parse::run(batch, &view.network);
    if let Some(tap) = tap {
        tap.begin(batch, context.now);
    }
    answer::run(batch, context);
    gather::run::<u32>(batch, fragments, ids, context);
    gather::run::<V6>(batch, fragments, ids, context);
    relay::run::<u32>(batch, sessions, context);
    relay::run::<V6>(batch, sessions, context);
    if let Some(tap) = tap {
        tap.travelling::<u32>(batch);
        tap.travelling::<V6>(batch);
    }
    lookup::fetch::<u32>(batch, sessions);
    lookup::fetch::<V6>(batch, sessions);
    express::run::<u32>(batch, sessions, tap.as_deref(), context);
    express::run::<V6>(batch, sessions, tap.as_deref(), context);
    let left = batch.open.and(batch.plain);
    lookup::find::<u32>(batch, sessions, context);
    lookup::find::<V6>(batch, sessions, context);
    if let Some(tap) = tap {
        tap.left::<u32>(batch, left, sessions);
        tap.left::<V6>(batch, left, sessions);
    }
    takeover::run::<u32>(batch, sessions, context, &mut settle);
    takeover::run::<V6>(batch, sessions, context, &mut settle);
    recheck::run::<u32>(batch, sessions, context, &mut settle);
    recheck::run::<V6>(batch, sessions, context, &mut settle);
    recheck::reopen::<u32>(batch, sessions, context.now, &mut settle);
    recheck::reopen::<V6>(batch, sessions, context.now, &mut settle);
    errors::run::<u32>(batch, sessions, context);
    errors::run::<V6>(batch, sessions, context);
    classify::run::<u32>(batch, context);
    classify::run::<V6>(batch, context);
    open::run::<u32>(batch, sessions, context, &mut settle);
    open::run::<V6>(batch, sessions, context, &mut settle);
    serve::run::<u32>(batch, sessions, embryonic, context, &mut settle);
    serve::run::<V6>(batch, sessions, embryonic, context, &mut settle);
    rewrite::run::<u32>(batch, sessions, ids, settle.outbox, context);
    rewrite::run::<V6>(batch, sessions, ids, settle.outbox, context);
    stateless::run::<u32>(batch, ids, context);
    stateless::run::<V6>(batch, ids, context);
    health::run::<u32>(batch, context);
    health::run::<V6>(batch, context);
    wrap::run(batch, view);
    refuse::run(batch, limiter, drops, context);
}
