//! `vipgate gateway`: puts the parts together, starts the workers, and follows policy and network until it is told to
//! stop.
//!
//! One thread does all of this; workers are started last and stopped first. Whatever fails on the way up leaves the host
//! as it was.

mod capture;
mod control;
mod feed;
mod figures;
mod health;
mod kept;
mod start;
pub mod state;
mod wait;
mod workers;

use std::path::Path;

use vipgate_xdp::attach;
use vipgate_xdp::nic::Nic;

use crate::cli::output;
use crate::config::Config;
use crate::failure::Failure;
use crate::logging;

/// Runs a gateway until it is told to stop.
///
/// # Errors
/// When its configuration or policy is wrong, or something it needs can't be had.
pub fn run(path: &Path) -> Result<(), Failure> {
    let config = Config::load(path).map_err(Failure::usage)?;
    logging::start(config.log);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .thread_name("control-io")
        .build()
        .map_err(|error| Failure::runtime(format_args!("cannot start the control thread: {error}")))?;
    runtime.block_on(async {
        match start::start(config).await? {
            Some(gateway) => control::follow(gateway).await,
            None => Ok(()),
        }
    })
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
    if failures.is_empty() { Ok(()) } else { Err(Failure::Runtime(failures.join("\n"))) }
}
