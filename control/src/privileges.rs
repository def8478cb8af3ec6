//! Privilege dropping of processes and threads: capabilities and seccomp filters.
//!
//! | thread | capabilities | system calls |
//! |---|---|---|
//! | control thread of a gateway | [`Capabilities::control`] | gateway |
//! | workers | none | worker |
//! | blocking pool, request handlers of a gateway | [`Capabilities::maps`]: none, except on older kernels | gateway |
//! | file watchers | none | gateway |
//! | the process that withdraws BGP routes | `NET_ADMIN` | gateway |
//! | all threads of a policy server | `NET_BIND_SERVICE` until its ports are bound | server: no exec, no BPF |
//!
//! Privileges that a gateway never needs are dropped after its configuration is read and before any other file is, so
//! files that are readable at start stay readable. Failures aren't fatal: they are logged, and the process continues.

mod capabilities;
mod seccomp;

use std::collections::BTreeSet;
use std::{io, thread};

use rustix::thread::set_no_new_privs;

pub use self::capabilities::Capabilities;
use self::capabilities::limit;
use self::seccomp::Profile;
use crate::config::{Privileges, Seccomp};

/// System calls that the filters allow to some thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllowedCalls {
    /// Their numbers.
    pub calls: BTreeSet<i64>,
    /// Families of socket(2).
    pub families: BTreeSet<i32>,
}

/// The system calls that the filters allow to some thread, of a gateway or a policy server.
///
/// # Errors
/// When a filter is invalid.
pub fn allowed_calls() -> io::Result<AllowedCalls> {
    seccomp::allowed()
}

/// Start of a gateway: drops what it never needs, for all threads started later.
pub fn restrict_gateway(privileges: Privileges) {
    no_new_privileges();
    log_failure("capabilities", limit(Capabilities::GATEWAY_START));
    filter(privileges, Profile::Gateway);
}

/// Start of a policy server. To be called before any other thread exists.
pub fn restrict_server(privileges: Privileges) {
    no_new_privileges();
    log_failure("capabilities", limit(Capabilities::POLICY_SERVER));
    filter(privileges, Profile::Server);
}

/// A gateway is ready: its control thread keeps only what it needs while running.
pub fn restrict_control_thread() {
    log_failure("capabilities", limit(Capabilities::control()));
    let capabilities = Capabilities::current();
    tracing::info!(event = "privileges", %capabilities, "dropped the privileges that only the start needs");
}

/// Start of the process that withdraws BGP routes.
pub fn restrict_withdrawal() {
    no_new_privileges();
    // Not logged: it may have inherited less already, and it has no log.
    let _ = limit(Capabilities::ROUTES);
}

/// Start of a worker, after all its resources are open.
pub fn restrict_worker(privileges: Privileges) {
    drop_capabilities();
    filter(privileges, Profile::Worker);
}

/// Start of a helper thread of a gateway, which reads and updates BPF maps.
pub fn restrict_helper() {
    log_failure("capabilities", limit(Capabilities::maps()));
}

/// Drops all capabilities of the calling thread and of threads that it starts later.
pub fn drop_capabilities() {
    log_failure("capabilities", limit(Capabilities::NONE));
}

/// Runs a closure on a thread without capabilities, so that threads started by it have none.
///
/// # Errors
/// Those of the closure, or when the kernel refuses the thread.
pub fn run_unprivileged<T: Send, E: From<io::Error> + Send>(run: impl FnOnce() -> Result<T, E> + Send) -> Result<T, E> {
    run_unprivileged_on(thread::Builder::new(), run)
}

fn run_unprivileged_on<T: Send, E: From<io::Error> + Send>(
    thread: thread::Builder,
    run: impl FnOnce() -> Result<T, E> + Send,
) -> Result<T, E> {
    thread::scope(|scope| {
        let unprivileged = || {
            drop_capabilities();
            run()
        };
        match thread.spawn_scoped(scope, unprivileged)?.join() {
            Ok(outcome) => outcome,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// Executed programs gain no privileges (`PR_SET_NO_NEW_PRIVS`).
fn no_new_privileges() {
    log_failure("no_new_privs", set_no_new_privs(true));
}

fn filter(privileges: Privileges, calls: Profile) {
    if privileges.seccomp != Seccomp::Off {
        log_failure("seccomp", seccomp::install(calls, privileges.seccomp));
    }
}

fn log_failure<E: std::fmt::Display>(what: &str, result: Result<(), E>) {
    if let Err(error) = result {
        tracing::warn!(event = "privileges_kept", what, %error, "this thread keeps more privileges than it needs");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_thread_is_an_error() {
        let run = |stack_size| {
            let thread = thread::Builder::new().stack_size(stack_size);
            run_unprivileged_on(thread, || io::Result::Ok(Capabilities::current().to_string()))
        };
        assert_eq!(run(1 << 20).unwrap(), Capabilities::NONE.to_string());
        // More than the address space has.
        run(1 << 60).unwrap_err();
        run_unprivileged(|| io::Result::<()>::Err(io::ErrorKind::Other.into())).unwrap_err();
    }
}
