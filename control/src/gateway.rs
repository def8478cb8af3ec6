//! `vipgate gateway`: puts the parts together, starts the workers, and follows policy and network until it is told to
//! stop.
//!
//! One thread does all of this; workers are started last and stopped first. Whatever fails on the way up leaves the host
//! as it was.

mod capture;
pub mod conflicts;
mod control;
mod feed;
mod figures;
pub mod group;
mod health;
mod kept;
mod start;
pub mod state;
mod wait;
mod workers;

use std::path::Path;
use std::time::SystemTime;

use tokio::runtime::Runtime;
use vipgate_dataplane::time::Tick;
use vipgate_xdp::attach;
use vipgate_xdp::nic::Nic;

use crate::cli::output;
use crate::config::Config;
use crate::failure::Failure;
use crate::{kernel, logging};

/// The moment that it is, as leases and links count it.
pub(crate) fn now() -> Tick {
    workers::now()
}

/// A time of the wall clock, in milliseconds since 1970.
pub(crate) fn unix_ms(at: SystemTime) -> u64 {
    let since = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Runs a gateway until it is told to stop.
///
/// # Errors
/// When its configuration or policy is wrong, or something it needs can't be had.
pub fn run(path: &Path) -> Result<(), Failure> {
    let config = Config::load(path).map_err(Failure::usage)?;
    logging::start(config.log);
    runtime()?.block_on(async {
        match start::start(config).await? {
            Some(gateway) => control::follow(gateway).await,
            None => Ok(()),
        }
    })
}

fn runtime() -> Result<Runtime, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().thread_name("control-io").build();
    runtime.map_err(|error| Failure::runtime(format_args!("cannot start the control thread: {error}")))
}

/// Waits until a gateway has ended in whatever way, and removes the routes that it had advertised.
///
/// # Errors
/// When the kernel refuses.
pub fn withdraw() -> Result<(), Failure> {
    // For people who look at the list of processes.
    let _ = rustix::thread::set_name(c"vipgate-routes");
    let removed = runtime()?.block_on(kernel::wait_and_withdraw()).map_err(Failure::runtime)?;
    if removed > 0 {
        output::complain(format_args!("vipgate: {removed} advertised routes withdrawn, since the gateway has ended"));
    }
    Ok(())
}

/// Removes what a stopped gateway left in place on purpose.
///
/// # Errors
/// When the configuration is wrong, or the kernel refuses.
pub fn detach(path: &Path) -> Result<(), Failure> {
    let config = Config::load(path).map_err(Failure::usage)?;
    let mut failures = Vec::new();
    for interface in &config.interfaces {
        let outcome = Nic::find(&interface.name)
            .map_err(|error| error.to_string())
            .and_then(|nic| attach::detach(&nic).map_err(|error| error.to_string()));
        match outcome {
            Ok(true) => output::print(&format!("{}: the steering program is removed\n", interface.name))?,
            Ok(false) => output::print(&format!("{}: nothing was left here\n", interface.name))?,
            Err(error) => failures.push(error),
        }
    }
    match kept::remove(&config) {
        Ok(true) => output::print("sessions: those that were kept are removed\n")?,
        Ok(false) => output::print("sessions: none were kept\n")?,
        Err(error) => failures.push(error.to_string()),
    }
    match runtime()?.block_on(kernel::withdraw_all()) {
        Ok(0) => output::print("routes: none were advertised\n")?,
        Ok(removed) => output::print(&format!("routes: {removed} advertised ones are removed\n"))?,
        Err(error) => failures.push(error.to_string()),
    }
    if failures.is_empty() { Ok(()) } else { Err(Failure::Runtime(failures.join("\n"))) }
}
