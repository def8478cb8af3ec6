//! `vipgate gateway`: puts the parts together, starts the workers, and follows policy and network until it is told to
//! stop.
//!
//! One thread does all of this, and lends what takes long to others; workers are started last and stopped first. Whatever fails on the way up leaves the host
//! as it was.

mod capture;
pub mod conflicts;
mod control;
mod exhaustion;
pub mod feed;
mod figures;
mod following;
pub mod group;
mod health;
mod identity;
mod kept;
mod services;
pub mod stalls;
mod start;
pub mod state;
pub mod tracking;
mod wait;
mod workers;

use std::path::Path;
use std::time::SystemTime;

use tokio::runtime::Runtime;
use vipgate_dataplane::time::Tick;
use vipgate_xdp::nic::{Nic, NicError};
use vipgate_xdp::{attach, guard};

use self::kept::Leftovers;
use crate::cli::output;
use crate::config::Config;
use crate::failure::Failure;
use crate::listener::raise_descriptors;
use crate::{kernel, logging, privileges};

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
    raise_descriptors();
    privileges::begin_gateway(config.privileges);
    let runtime = runtime()?;
    let outcome = runtime.block_on(async {
        match start::start(config).await? {
            Some(gateway) => control::follow(gateway).await,
            None => Ok(()),
        }
    });
    // All that has to be waited for has ended; a server's name may still be being resolved, for ten seconds and more.
    runtime.shutdown_background();
    outcome
}

fn runtime() -> Result<Runtime, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .thread_name("control-io")
        .on_thread_start(privileges::begin_helper)
        .build();
    runtime.map_err(|error| Failure::runtime(format_args!("cannot start the control thread: {error}")))
}

/// Waits until a gateway has ended in whatever way, and removes the routes that it had advertised.
///
/// # Errors
/// When the kernel refuses.
pub fn withdraw() -> Result<(), Failure> {
    privileges::begin_withdrawal();
    // For people who look at the list of processes.
    let _ = rustix::thread::set_name(c"vipgate-routes");
    let removed = runtime()?.block_on(kernel::wait_and_withdraw()).map_err(Failure::runtime)?;
    if removed > 0 {
        output::complain(format_args!("vipgate: {removed} advertised routes withdrawn, since the gateway has ended"));
    }
    Ok(())
}

/// Removes what a stopped gateway left in place on purpose: all of it, or nothing when any of it can't be found or is in use.
///
/// # Errors
/// When the configuration is wrong, an interface isn't in this network namespace, or the kernel refuses.
pub fn detach(path: &Path) -> Result<(), Failure> {
    let config = Config::load(path).map_err(Failure::usage)?;
    let (mut nics, mut failures, mut is_elsewhere) = (Vec::new(), Vec::new(), false);
    for interface in &config.interfaces {
        match Nic::find(&interface.name) {
            Ok(nic) => match attach::is_attached(&nic) {
                Ok(_) => nics.push(nic),
                Err(error) => failures.push(error.to_string()),
            },
            Err(error) => {
                is_elsewhere |= matches!(error, NicError::Missing { .. });
                failures.push(error.to_string());
            }
        }
    }
    let sessions = Leftovers::find(&config).map_err(|error| failures.push(error.to_string())).ok().flatten();
    if !failures.is_empty() {
        if is_elsewhere {
            failures.push(
                "does the gateway run in another network namespace? then there: ip netns exec NAME vipgate detach .., or \
                 nsenter --net=/proc/PID/ns/net vipgate detach .."
                    .to_owned(),
            );
        }
        failures.push("nothing was removed".to_owned());
        return Err(Failure::Runtime(failures.join("\n")));
    }
    // What can't be made again goes last.
    for nic in &nics {
        let guarded = guard::remove(nic).map_err(|error| {
            Failure::runtime(format_args!("interface {}: cannot remove the second line: {error}", nic.name))
        })?;
        let what = if attach::detach(nic).map_err(Failure::runtime)? || guarded {
            "the steering program is removed"
        } else {
            "nothing was left here"
        };
        output::print(&format!("{}: {what}\n", nic.name))?;
    }
    match runtime()?.block_on(kernel::withdraw_all()).map_err(Failure::runtime)? {
        0 => output::print("routes: none were advertised\n")?,
        removed => output::print(&format!("routes: {removed} advertised ones are removed\n"))?,
    }
    match sessions {
        None => output::print("sessions: none were kept\n"),
        Some(sessions) => {
            sessions.remove()?;
            identity::forget(&config).map_err(Failure::runtime)?;
            output::print("sessions: those that were kept are removed\n")
        }
    }
}
