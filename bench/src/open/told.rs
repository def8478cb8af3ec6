//! What it costs a worker to tell of sessions: as many end as begin, turn about with nobody who listens and with somebody.
//! What is done with the news isn't in the time.

use std::sync::Arc;

use anyhow::{Result, ensure};
use serde::Serialize;
use vipgate::natlog::SESSIONS;
use vipgate_dataplane::batch::MOST;
use vipgate_dataplane::command::Command;
use vipgate_dataplane::snapshot::members::GatewayId;
use vipgate_dataplane::watch::log::SessionQueue;

use super::{brief, open};
use crate::group::Tags;
use crate::packets::Flow;
use crate::path::{median, round2};
use crate::rig::Rig;

/// New sessions in a second of the table's time.
const RATE: u32 = 100_000;
const ROUNDS: usize = 7;

/// Who hears of sessions.
#[derive(Clone, Copy, Debug)]
pub(super) enum Listener {
    /// Another gateway, of those that it has to know.
    Gateway,
    /// A log of translations, of each that begins and ends.
    Log,
}

#[derive(Serialize)]
struct Measured {
    benchmark: &'static str,
    phase: &'static str,
    sessions_per_second: u32,
    /// A session's whole life in the worker, nobody and somebody being told of it: medians.
    ns_per_session: f64,
    ns_per_session_told: f64,
    /// Pieces of news of each session.
    news_per_session: f64,
    /// What telling takes of the worker's time at this rate.
    share_of_worker: f64,
}

/// Measures one kind of listener.
pub(super) fn measure(listener: Listener) -> Result<()> {
    let (mut alone, mut told, mut news) = (Vec::new(), Vec::new(), 0);
    for _ in 0..ROUNDS {
        alone.push(lives(listener, false)?.0);
        let (ns, pieces) = lives(listener, true)?;
        told.push(ns);
        news += pieces;
    }
    let [alone, told] = [alone, told].map(median);
    let result = Measured {
        benchmark: "open",
        phase: match listener {
            Listener::Gateway => "copies",
            Listener::Log => "log",
        },
        sessions_per_second: RATE,
        ns_per_session: round2(alone),
        ns_per_session_told: round2(told),
        news_per_session: round2(news as f64 / ROUNDS as f64 / f64::from(5 * RATE)),
        share_of_worker: ((told - alone) * f64::from(RATE) / 1e9 * 1e4).round() / 1e4,
    };
    println!("{}", serde_json::to_string(&result)?);
    Ok(())
}

/// Sessions that live as briefly as they are opened fast: nanoseconds for each, and pieces of news, if somebody `listens`.
fn lives(listener: Listener, listens: bool) -> Result<(f64, u64)> {
    // Whoever is told by the control thread is known as long as that is held.
    let (mut rig, _control) = match listener {
        Listener::Gateway => {
            Rig::in_group(RATE * 2, brief(), listens, Tags::Without).map(|(rig, control)| (rig, Some(control)))?
        }
        Listener::Log => (Rig::with(RATE * 2, brief())?, None),
    };
    let log = Arc::new(SessionQueue::new(SESSIONS));
    if listens && matches!(listener, Listener::Log) {
        rig.tell(Command::LogSessions(Some(log.clone())))?;
        rig.worker.turn(rig.now);
    }
    let begin = rig.now;
    let (mut opened, mut news) = (0, 0);
    let mut step = |rig: &mut Rig| {
        opened += MOST as u64;
        rig.now = begin.plus((opened * 1_000 / u64::from(RATE)) as u32);
        while let Some(piece) = rig.outlet.pop() {
            news += 1;
            rig.outlet.acknowledge(piece.to, piece.number);
        }
        while log.take().is_some() {
            news += 1;
        }
    };
    // Twice a life to come to rest, then the measured part.
    open(&mut rig, (0..2 * RATE).map(Flow::new), &mut step);
    let time = open(&mut rig, (2 * RATE..5 * RATE).map(Flow::new), &mut step);
    let lost = (0..=u8::MAX).any(|gateway| rig.outlet.take_lost(GatewayId(gateway))) || log.lost() > 0;
    ensure!(!lost && rig.drops().is_empty(), "news or packets were lost: {:?}", rig.drops());
    ensure!((news > 0) == listens, "{news} pieces of news, listening: {listens}");
    Ok((time.as_nanos() as f64 / f64::from(3 * RATE), news))
}
