//! New sessions: each packet is the first one of its flow.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde::Serialize;
use vipgate_dataplane::batch::MOST;

use crate::packets::{Flow, write_forward};
use crate::path::round2;
use crate::rig::{INSIDE, Rig};

#[derive(Serialize)]
struct Opened {
    benchmark: &'static str,
    sessions: u32,
    sessions_per_second: f64,
    ns_per_session: f64,
    bytes_per_session: f64,
}

/// Measures each number of sessions.
pub(crate) fn run(sessions: &[u32]) -> Result<()> {
    for &sessions in sessions {
        println!("{}", serde_json::to_string(&measure(sessions)?)?);
    }
    Ok(())
}

fn measure(sessions: u32) -> Result<Opened> {
    ensure!(sessions > 0, "--sessions must be at least 1");
    let mut rig = Rig::new(sessions)?;
    let mut time = Duration::ZERO;
    let mut number = 0;
    while number < sessions {
        for _ in 0..MOST.min((sessions - number) as usize) {
            rig.worker.io().offer(INSIDE, 60, |frame| write_forward(frame, Flow::new(number)));
            number += 1;
        }
        let start = Instant::now();
        rig.worker.turn(rig.now);
        time += start.elapsed();
        rig.worker.io().collect(|_| ());
    }
    let open = rig.worker.tables().sessions.open_count();
    ensure!(open == sessions, "{open} of {sessions} sessions were opened");
    let each = time.as_nanos() as f64 / f64::from(sessions);
    Ok(Opened {
        benchmark: "open",
        sessions,
        sessions_per_second: (1e9 / each).round(),
        ns_per_session: round2(each),
        bytes_per_session: round2(rig.bytes_per_session(sessions)),
    })
}
