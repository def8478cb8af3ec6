//! `vipgate gateway`: the gateway process. Starts the workers, then applies policy and network changes until a signal
//! stops it.
//!
//! The control thread does this; long jobs run on background threads. Workers start last and stop first. A failed
//! startup leaves the host unchanged.

pub mod address_conflicts;
mod background;
mod control;
mod device_stats;
pub mod group;
mod health_checks;
mod interface_lock;
mod neighbors;
pub mod policy_source;
mod port_exhaustion;
mod process_secret;
mod reconciler;
mod servers;
mod session_store;
mod startup;
mod steering_tables;
mod succession;
pub mod tracking;
mod workers;

use std::fmt::Display;
use std::path::Path;

use tokio::runtime::Runtime;
use vipgate_xdp::nic::{Nic, NicError};
use vipgate_xdp::{attach, guard};

use self::interface_lock::InterfaceLocks;
use self::session_store::StoredSessions;
use crate::command_error::CommandError;
use crate::config::Config;
use crate::listener::raise_descriptor_limit;
use crate::{blocking_threads, kernel, logging, output, privileges};

/// Runs a gateway until SIGTERM or SIGINT.
///
/// # Errors
/// When the configuration or policy is invalid, or a resource can't be acquired.
pub fn run(path: &Path) -> Result<(), CommandError> {
    let config = Config::load(path).map_err(CommandError::input)?;
    logging::start(config.log);
    raise_descriptor_limit();
    privileges::restrict_gateway(config.privileges);
    let runtime = runtime()?;
    let outcome = runtime.block_on(async {
        match startup::start(config).await? {
            Some(control) => control.run().await,
            None => Ok(()),
        }
    });
    // Everything that matters has ended; a DNS lookup may still block for ten seconds and more.
    runtime.shutdown_background();
    outcome
}

fn runtime() -> Result<Runtime, CommandError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .thread_name("control-io")
        .thread_keep_alive(blocking_threads::KEEP_ALIVE)
        .on_thread_start(privileges::restrict_helper)
        .build();
    runtime.map_err(|error| CommandError::runtime(error).context("cannot start the control thread"))
}

/// Waits until the gateway process has exited, however that happens, and withdraws the routes that it had advertised.
///
/// # Errors
/// When the kernel rejects a request.
pub fn withdraw() -> Result<(), CommandError> {
    privileges::restrict_withdrawal();
    // Shown by `ps` and `top`.
    let _ = rustix::thread::set_name(c"vipgate-routes");
    let removed = runtime()?.block_on(kernel::wait_and_withdraw()).map_err(CommandError::runtime)?;
    if removed > 0 {
        output::print_error(format_args!("vipgate: the gateway has exited; {removed} advertised routes withdrawn"));
    }
    Ok(())
}

/// Removes what a stopped gateway leaves in place on purpose: XDP programs, advertised routes, stored sessions. Removes
/// nothing when any of them is missing or in use.
///
/// # Errors
/// When the configuration is invalid, an interface isn't in this network namespace, a gateway runs, or the kernel
/// rejects a request.
pub fn detach(path: &Path) -> Result<(), CommandError> {
    let config = Config::load(path).map_err(CommandError::input)?;
    let nics = detachable_interfaces(&config)?;
    // Until the end: a gateway that is started meanwhile waits.
    let _locks = InterfaceLocks::acquire(&nics).map_err(|error| nothing_removed(&error))?;
    let sessions = StoredSessions::find(&config).map_err(|error| nothing_removed(&error))?;
    // Sessions can't be recreated, so they are removed last.
    for nic in &nics {
        let guarded = guard::remove(nic).map_err(|error| {
            CommandError::runtime(error).context(format_args!("interface {}: cannot remove the tc guard", nic.name))
        })?;
        let outcome = if attach::detach(nic).map_err(CommandError::runtime)? || guarded {
            "steering program removed"
        } else {
            "nothing to remove"
        };
        output::print(&format!("{}: {outcome}\n", nic.name))?;
    }
    match runtime()?.block_on(kernel::withdraw_all()).map_err(CommandError::runtime)? {
        0 => output::print("routes: none advertised\n")?,
        removed => output::print(&format!("routes: {removed} withdrawn\n"))?,
    }
    match sessions {
        None => output::print("sessions: none stored\n"),
        Some(sessions) => {
            sessions.remove(&config)?;
            output::print("sessions: stored sessions removed\n")
        }
    }
}

/// The configured interfaces, if all are in this network namespace, without an XDP program of somebody else.
fn detachable_interfaces(config: &Config) -> Result<Vec<Nic>, CommandError> {
    let (mut nics, mut errors, mut is_missing) = (Vec::new(), Vec::new(), false);
    for interface in &config.interfaces {
        match Nic::find(&interface.name) {
            Ok(nic) => match attach::is_attached(&nic) {
                Ok(_) => nics.push(nic),
                Err(error) => errors.push(error.to_string()),
            },
            Err(error) => {
                is_missing |= matches!(error, NicError::Missing { .. });
                errors.push(error.to_string());
            }
        }
    }
    if errors.is_empty() {
        return Ok(nics);
    }
    if is_missing {
        errors.push(
            "if the gateway runs in another network namespace, use: ip netns exec NAME vipgate detach .., or \
             nsenter --net=/proc/PID/ns/net vipgate detach .."
                .to_owned(),
        );
    }
    Err(nothing_removed(&errors.join("\n")))
}

fn nothing_removed(error: &dyn Display) -> CommandError {
    CommandError::runtime(format!("{error}\nnothing was removed"))
}
