//! What a process and its threads may still do: capabilities that are given up, and a filter of system calls.
//!
//! | thread | capabilities | system calls |
//! |---|---|---|
//! | a gateway's control thread | [`Capabilities::control`] | all of the gateway's |
//! | workers | none | those of a worker |
//! | the blocking pool, those who answer (`gateway/services.rs`) | [`Capabilities::maps`]: none, but on older kernels | all of the gateway's |
//! | whatever follows files | none | all of the gateway's |
//! | the process that withdraws routes | `NET_ADMIN` | all of the gateway's |
//! | all threads of a policy server | none, but for `NET_BIND_SERVICE` until its ports are open | the server's: no process is started, no program loaded |
//!
//! What a gateway never needs goes before anything but its configuration is read, so a file that it could read at its start can be read later, too. Nothing here is
//! fatal: a process that can't give something up says so and goes on.

mod capabilities;
mod seccomp;

use std::thread;

use rustix::thread::set_no_new_privs;

pub use self::capabilities::Capabilities;
use self::capabilities::keep;
use self::seccomp::Calls;
use crate::config::{Privileges, Seccomp};

/// A gateway begins: gives up what it never needs, for good, on all threads that it will have.
pub fn begin_gateway(privileges: Privileges) {
    no_new_privileges();
    said("capabilities", keep(Capabilities::START));
    filter(privileges, Calls::Gateway);
}

/// A policy server begins. Called before it has any other thread.
pub fn begin_server(privileges: Privileges) {
    no_new_privileges();
    said("capabilities", keep(Capabilities::BINDS));
    filter(privileges, Calls::Server);
}

/// A gateway stands: its control thread keeps what it needs to follow the network.
pub fn settle_gateway() {
    said("capabilities", keep(Capabilities::control()));
    tracing::info!(event = "privileges", capabilities = %Capabilities::current(), "the gateway needs no more than this");
}

/// A process that only changes routes.
pub fn begin_withdrawal() {
    no_new_privileges();
    // What it inherits may be less already; and nobody reads its log.
    let _ = keep(Capabilities::ROUTES);
}

/// A worker begins, with all that it needs in its hands.
pub fn begin_worker(privileges: Privileges) {
    drop_capabilities();
    filter(privileges, Calls::Worker);
}

/// A thread beside the control thread begins: it captures what policy covers, or asks the steering program.
pub fn begin_helper() {
    said("capabilities", keep(Capabilities::maps()));
}

/// The calling thread, and what it starts, has no capability any more.
pub fn drop_capabilities() {
    said("capabilities", keep(Capabilities::NONE));
}

/// Runs something on a thread without capabilities, so that threads which it starts have none.
pub fn without<T: Send>(run: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let dropped = || {
            drop_capabilities();
            run()
        };
        match scope.spawn(dropped).join() {
            Ok(value) => value,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// A program that is executed, this one too, gets no more than this process has.
fn no_new_privileges() {
    said("no_new_privs", set_no_new_privs(true));
}

fn filter(privileges: Privileges, calls: Calls) {
    if privileges.seccomp != Seccomp::Off {
        said("seccomp", seccomp::install(calls, privileges.seccomp));
    }
}

fn said<E: std::fmt::Display>(what: &str, result: Result<(), E>) {
    if let Err(error) = result {
        tracing::warn!(event = "privileges_kept", what, %error, "this thread keeps more privileges than it needs");
    }
}
