//! The packet pipeline: the order of the stages, one call per line.
//!
//! Invariants: expiry, commands and flushes run only between batches, so a session found by `lookup` still exists in
//! `rewrite` unless `revalidate` has ended it; packets of one session stay in order; each packet gets one verdict.

use crate::flow::address::V6;
use crate::io::batch::Batch;
use crate::observe::Observer;
use crate::replication::accounting::SessionAccounting;
use crate::stage::context::{Context, Tables};
use crate::stage::{
    arp_nd, classify, complete_checksum, decap, encap, failover, fast_path, forward_to_owner, health_check, icmp_error,
    load_balance, lookup, parse, reject, revalidate, rewrite, snat, stateless_reply, tunnel_echo, virtual_reassembly,
};

/// Runs a stage for the packets of both address families.
macro_rules! both {
    ($stage:ident :: $function:ident ($($argument:expr),*)) => {
        $stage::$function::<u32>($($argument),*);
        $stage::$function::<V6>($($argument),*);
    };
    ($observer:ident . $method:ident ($($argument:expr),*)) => {
        $observer.$method::<u32>($($argument),*);
        $observer.$method::<V6>($($argument),*);
    };
}

/// Runs a batch through all stages. Afterwards every packet has a verdict.
pub fn run(batch: &mut Batch, tables: &mut Tables, context: &Context<'_>) {
    let Tables { sessions, embryonic, ports, reassembly, ip_ids, reply_limiter, replication_queue, observer, .. } =
        tables;
    let Observer { drops, session_log, capture } = observer;
    let Context { snapshot, counters, .. } = *context;
    let mut accounting =
        SessionAccounting { policy: &snapshot.policy, ports, counters, replication_queue, session_log };

    let decapsulated = decap::run(batch, snapshot, counters);
    complete_checksum::decapsulated(batch, decapsulated, &snapshot.network, counters);
    parse::run(batch, &snapshot.network, sessions);
    if let Some(capture) = capture {
        capture.begin_batch(batch, context.now);
    }
    arp_nd::run(batch, context);
    tunnel_echo::run(batch, snapshot);
    both!(virtual_reassembly::run(batch, reassembly, ip_ids, context));
    both!(forward_to_owner::run(batch, context));
    if let Some(capture) = capture {
        both!(capture.tunneled(batch));
    }
    both!(lookup::prefetch(batch, sessions));
    both!(fast_path::run(batch, sessions, capture.as_deref(), context));
    let slow_path = batch.undecided.and(batch.plain);
    both!(lookup::find(batch, sessions, context));
    if let Some(capture) = capture {
        both!(capture.slow_path(batch, slow_path, sessions));
    }
    both!(failover::run(batch, sessions, context, &mut accounting));
    both!(revalidate::run(batch, sessions, context, &mut accounting));
    both!(revalidate::reopen(batch, sessions, context.now, &mut accounting));
    both!(icmp_error::run(batch, sessions, context));
    both!(classify::run(batch, context));
    both!(snat::run(batch, sessions, context, &mut accounting));
    both!(load_balance::run(batch, sessions, embryonic, context, &mut accounting));
    both!(rewrite::run(batch, sessions, ip_ids, accounting.replication_queue, context));
    both!(stateless_reply::run(batch, ip_ids, context));
    both!(health_check::run(batch, reply_limiter, context));
    encap::run(batch, snapshot);
    reject::run(batch, reply_limiter, drops, context);
}
