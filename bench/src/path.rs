//! Packets of open sessions in random order. A round offers a batch, times one turn of the worker, and looks at what it
//! sent: writing packets and checking them is outside of the time.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use hdrhistogram::Histogram;
use serde::Serialize;
use vipgate_dataplane::batch::MOST;
use vipgate_dataplane::session::tuple::HashKey;

use crate::Direction;
use crate::packets::{Flow, is_right, write_forward, write_reply};
use crate::rig::{INSIDE, OUTSIDE, Rig};

/// Packets of one measured round.
const PACKETS: u64 = 1 << 20;

#[derive(Serialize)]
struct Measured {
    benchmark: &'static str,
    sessions: u32,
    direction: String,
    size: u16,
    ns_per_packet: f64,
    mpps: f64,
    bytes_per_session: f64,
    batch_p50_ns: u64,
    batch_p999_ns: u64,
    rounds_ns: Vec<f64>,
}

/// Measures each number of sessions.
pub(crate) fn run(sessions: &[u32], direction: Direction, size: u16, rounds: u32) -> Result<()> {
    for &sessions in sessions {
        let result = measure(sessions, direction, size, rounds)?;
        println!("{}", serde_json::to_string(&result)?);
    }
    Ok(())
}

fn measure(sessions: u32, direction: Direction, size: u16, rounds: u32) -> Result<Measured> {
    ensure!(sessions > 0, "--sessions must be at least 1");
    let mut rig = Rig::new(sessions)?;
    let ports = open_all(&mut rig, sessions, size)?;
    let order = HashKey::fixed();
    let mut drawn = 0;
    let mut batches = Histogram::<u64>::new(3)?;
    let mut results = Vec::new();
    // The first round warms up.
    for round in 0..=rounds {
        let mut time = Duration::ZERO;
        let mut packets = 0;
        while packets < PACKETS {
            for _ in 0..MOST {
                drawn += 1;
                let random = order.draw(drawn);
                let number = ((random & 0xffff_ffff) * u64::from(sessions)) >> 32;
                let flow = Flow::new(number as u32);
                let forward = match direction {
                    Direction::Forward => true,
                    Direction::Reply => false,
                    Direction::Mix => random >> 63 == 0,
                };
                let io = rig.worker.io();
                if forward {
                    io.offer(INSIDE, size, |frame| write_forward(frame, flow));
                } else {
                    io.offer(OUTSIDE, size, |frame| write_reply(frame, flow, ports[number as usize]));
                }
            }
            let start = Instant::now();
            packets += rig.worker.turn(rig.now) as u64;
            let turn = start.elapsed();
            time += turn;
            if round > 0 {
                batches.record(turn.as_nanos() as u64)?;
            }
            let mut right = 0;
            rig.worker.io().collect(|frame| right += usize::from(is_right(frame.bytes())));
            ensure!(right == MOST, "{right} of {MOST} packets came out right");
            // A batch takes microseconds; a clock that the sweep sees moves once in a while.
            if packets % (1 << 17) == 0 {
                rig.now = rig.now.plus(1);
            }
        }
        if round > 0 {
            results.push(time.as_nanos() as f64 / packets as f64);
        }
    }
    results.sort_by(f64::total_cmp);
    let median = results[results.len() / 2];
    Ok(Measured {
        benchmark: "path",
        sessions,
        direction: format!("{direction:?}").to_lowercase(),
        size,
        ns_per_packet: round2(median),
        mpps: round2(1_000.0 / median),
        bytes_per_session: round2(rig.bytes_per_session(sessions)),
        batch_p50_ns: batches.value_at_quantile(0.5),
        batch_p999_ns: batches.value_at_quantile(0.999),
        rounds_ns: results.into_iter().map(round2).collect(),
    })
}

/// Opens every session with its first packet; the port that each one left with.
fn open_all(rig: &mut Rig, sessions: u32, size: u16) -> Result<Vec<u16>> {
    let mut ports = Vec::with_capacity(sessions as usize);
    for number in 0..sessions {
        rig.worker.io().offer(INSIDE, size, |frame| write_forward(frame, Flow::new(number)));
        rig.worker.turn(rig.now);
        rig.worker.io().collect(|frame| {
            let bytes = frame.bytes();
            ports.push(u16::from_be_bytes([bytes[34], bytes[35]]));
        });
        ensure!(ports.len() == number as usize + 1, "session {number} was refused");
    }
    Ok(ports)
}

pub(crate) fn round2(number: f64) -> f64 {
    (number * 100.0).round() / 100.0
}
