//! `vipgate demo`: small clusters and external hosts in network namespaces, real gateways between them, and a report in
//! which every line is checked.
//!
//! The first scenario has one gateway: translation and load balancing. The second has two, one of which is killed:
//! failover.

mod checks;
mod daemon;
mod failover;
mod leaks;
mod report;
mod topology;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use report::Report;
use tokio::signal::unix::{SignalKind, signal};
use topology::Topology;

use self::failover::FailoverTopology;
use crate::command_error::CommandError;
use crate::lab::Lab;

/// One lab per scenario.
type Labs = [Lab; 2];

/// Runs both scenarios, reports, cleans up. With `keep`, both topologies stay until the user presses Enter.
///
/// # Errors
/// When the setup fails, a check of the report fails, or the demo is interrupted.
pub fn run(keep: bool) -> Result<(), CommandError> {
    let lab = |tag| Lab::new(tag).map_err(CommandError::runtime);
    let labs = Arc::new([lab("demo")?, lab("group")?]);
    let interrupted = Arc::new(AtomicBool::new(false));
    clean_up_on_signals(labs.clone(), interrupted.clone())?;
    let result = run_scenarios(&labs, keep);
    remove(&labs);
    if interrupted.load(Ordering::Relaxed) {
        return Err(CommandError::runtime("interrupted; everything is cleaned up"));
    }
    result
}

fn run_scenarios([first, second]: &Labs, keep: bool) -> Result<(), CommandError> {
    let mut topology = Topology::build(first)?;
    Report::title();
    let mut report = Report::new();
    topology.start_gateway()?;
    checks::run(&topology, &mut report)?;
    if !keep {
        topology.stop_gateway(&mut report)?;
        first.remove();
    }

    let mut group = FailoverTopology::build(second)?;
    Report::failover_title();
    failover::run(&mut group, &mut report)?;
    if keep {
        Report::print_commands(&topology, &group);
        let mut line = String::new();
        std::io::stdin().read_line(&mut line).map_err(CommandError::runtime)?;
        topology.stop_gateway(&mut report)?;
    }
    failover::stop(&mut group, &mut report)?;
    report.finish()
}

fn remove(labs: &Labs) {
    labs.iter().for_each(Lab::remove);
}

/// Removes the labs on SIGINT and SIGTERM. Whatever the demo waits for ends with them.
fn clean_up_on_signals(labs: Arc<Labs>, interrupted: Arc<AtomicBool>) -> Result<(), CommandError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(CommandError::runtime)?;
    let (mut interrupt, mut terminate) = {
        let _context = runtime.enter();
        (
            signal(SignalKind::interrupt()).map_err(CommandError::runtime)?,
            signal(SignalKind::terminate()).map_err(CommandError::runtime)?,
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
        // The main thread fails soon without its labs; if it hangs, this thread exits.
        thread::sleep(Duration::from_secs(3));
        eprintln!("vipgate: interrupted; everything is cleaned up");
        std::process::exit(1);
    });
    Ok(())
}

/// Polls a condition for up to 5 s.
fn wait_for(mut condition: impl FnMut() -> bool, what: &str) -> Result<(), CommandError> {
    for _ in 0..250 {
        if condition() {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(20));
    }
    Err(CommandError::runtime(format!("{what} did not start")))
}
