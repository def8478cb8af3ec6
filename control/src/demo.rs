//! `vipgate demo`: a small cluster and a piece of the world in network namespaces, with a real gateway between them, and
//! a report of what was seen. Every line of the report is checked.

mod checks;
mod report;
mod topology;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use tokio::signal::unix::{SignalKind, signal};

use crate::failure::Failure;
use crate::lab::Lab;
use report::Report;
use topology::Topology;

/// Builds the topology, runs it, reports, cleans up. With `keep` it stays until the user presses Enter.
///
/// # Errors
/// When something can't be set up, when a line of the report doesn't hold, or when it is interrupted.
pub fn run(keep: bool) -> Result<(), Failure> {
    let lab = Arc::new(Lab::new("demo").map_err(Failure::runtime)?);
    let interrupted = Arc::new(AtomicBool::new(false));
    clean_up_on_signals(lab.clone(), interrupted.clone())?;
    let result = play(&lab, keep);
    lab.remove();
    if interrupted.load(Ordering::Relaxed) {
        return Err(Failure::runtime("interrupted; everything is cleaned up"));
    }
    result
}

fn play(lab: &Lab, keep: bool) -> Result<(), Failure> {
    let mut topology = Topology::build(lab)?;
    Report::title();
    let mut report = Report::new();
    topology.start_gateway()?;
    checks::run(&topology, &mut report)?;
    if keep {
        Report::keep(&topology);
        let mut line = String::new();
        std::io::stdin().read_line(&mut line).map_err(Failure::runtime)?;
    }
    topology.stop_gateway(&mut report)?;
    report.end()
}

/// Lets a signal end the lab, whatever the demo is waiting for: what it waits for ends with the lab.
fn clean_up_on_signals(lab: Arc<Lab>, interrupted: Arc<AtomicBool>) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Failure::runtime)?;
    let (mut interrupt, mut terminate) = {
        let _context = runtime.enter();
        (
            signal(SignalKind::interrupt()).map_err(Failure::runtime)?,
            signal(SignalKind::terminate()).map_err(Failure::runtime)?,
        )
    };
    thread::spawn(move || {
        runtime.block_on(async {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        });
        interrupted.store(true, Ordering::Relaxed);
        lab.remove();
        // The demo itself notices soon that everything is gone; if it hangs, it is not worth waiting for.
        thread::sleep(std::time::Duration::from_secs(3));
        eprintln!("vipgate: interrupted; everything is cleaned up");
        std::process::exit(1);
    });
    Ok(())
}
