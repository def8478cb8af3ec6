//! `vipgate demo`: small clusters and a piece of the world in network namespaces, real gateways between them, and a report
//! of what was seen. Every line of the report is checked.
//!
//! The first act is one gateway and what it does to packets; the second is two, one of which is killed.

mod checks;
mod group;
mod leaks;
mod program;
mod report;
mod topology;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};

use crate::failure::Failure;
use crate::lab::Lab;
use group::Group;
use report::Report;
use topology::Topology;

/// A network for each act.
type Labs = [Lab; 2];

/// Builds the networks, one after the other, runs them, reports, cleans up. With `keep` both stay until the user presses
/// Enter.
///
/// # Errors
/// When something can't be set up, when a line of the report doesn't hold, or when it is interrupted.
pub fn run(keep: bool) -> Result<(), Failure> {
    let lab = |tag| Lab::new(tag).map_err(Failure::runtime);
    let labs = Arc::new([lab("demo")?, lab("group")?]);
    let interrupted = Arc::new(AtomicBool::new(false));
    clean_up_on_signals(labs.clone(), interrupted.clone())?;
    let result = play(&labs, keep);
    remove(&labs);
    if interrupted.load(Ordering::Relaxed) {
        return Err(Failure::runtime("interrupted; everything is cleaned up"));
    }
    result
}

fn play([first, second]: &Labs, keep: bool) -> Result<(), Failure> {
    let mut topology = Topology::build(first)?;
    Report::title();
    let mut report = Report::new();
    topology.start_gateway()?;
    checks::run(&topology, &mut report)?;
    if !keep {
        topology.stop_gateway(&mut report)?;
        first.remove();
    }

    let mut group = Group::build(second)?;
    Report::second_title();
    group::play(&mut group, &mut report)?;
    if keep {
        Report::keep(&topology, &group);
        let mut line = String::new();
        std::io::stdin().read_line(&mut line).map_err(Failure::runtime)?;
        topology.stop_gateway(&mut report)?;
    }
    group::stop(&mut group, &mut report)?;
    report.end()
}

fn remove(labs: &Labs) {
    labs.iter().for_each(Lab::remove);
}

/// Lets a signal end the labs, whatever the demo is waiting for: what it waits for ends with them.
fn clean_up_on_signals(labs: Arc<Labs>, interrupted: Arc<AtomicBool>) -> Result<(), Failure> {
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
        remove(&labs);
        // The demo itself notices soon that everything is gone; if it hangs, it is not worth waiting for.
        thread::sleep(Duration::from_secs(3));
        eprintln!("vipgate: interrupted; everything is cleaned up");
        std::process::exit(1);
    });
    Ok(())
}

/// Waits for something that takes moments.
fn wait_for(mut ready: impl FnMut() -> bool, what: &str) -> Result<(), Failure> {
    for _ in 0..250 {
        if ready() {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(20));
    }
    Err(Failure::runtime(format_args!("{what} did not start")))
}
