//! Locks of interfaces: a gateway process holds them from before it opens its sockets until its end, `vipgate detach`
//! while it removes what a stopped gateway has left.
//!
//! A lock is an abstract Unix socket name with the interface's index. The kernel releases it with the process, however
//! that ends. Abstract names are per network namespace, as interface indices are, and need no file that processes in
//! other mount namespaces (containers) would have to see. Nothing else shows whether a process runs: sessions may not
//! be stored, the admin socket may be in another mount namespace, and the steering program outlives the process.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::thread::sleep;
use std::time::{Duration, Instant};

use vipgate_xdp::nic::Nic;

use crate::command_error::CommandError;

/// How long to wait for all locks: a killed process releases its own last.
const LOCK_TIMEOUT: Duration = Duration::from_secs(3);
const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(5);

/// Locks of interfaces. Dropping it releases them.
#[derive(Debug)]
pub(super) struct InterfaceLocks {
    _names: Vec<UnixDatagram>,
}

impl InterfaceLocks {
    /// Locks all interfaces; waits for a process that is exiting.
    ///
    /// # Errors
    /// When another process holds one of the locks.
    pub(super) fn acquire(nics: &[Nic]) -> Result<Self, CommandError> {
        let deadline = Instant::now() + LOCK_TIMEOUT;
        let names = nics.iter().map(|nic| {
            lock(nic.ifindex, deadline).map_err(|error| {
                CommandError::runtime(match error.kind() {
                    io::ErrorKind::AddrInUse => {
                        format!("interface {}: another process uses it: is this gateway already running?", nic.name)
                    }
                    _ => format!("interface {}: cannot lock it: {error}", nic.name),
                })
            })
        });
        Ok(Self { _names: names.collect::<Result<_, _>>()? })
    }
}

fn lock(ifindex: u32, deadline: Instant) -> io::Result<UnixDatagram> {
    let name = SocketAddr::from_abstract_name(format!("vipgate/interface/{ifindex}"))?;
    loop {
        match UnixDatagram::bind_addr(&name) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < deadline => {
                sleep(LOCK_RETRY_INTERVAL);
            }
            outcome => return outcome,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// An index that no interface and no other test has.
    fn unused(number: u32) -> u32 {
        u32::MAX - 2 * std::process::id() - number
    }

    #[test]
    fn a_lock_is_held_until_it_is_dropped() {
        let try_lock = || lock(unused(0), Instant::now());
        let held = try_lock().unwrap();
        assert_eq!(try_lock().unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop(held);
        try_lock().unwrap();
    }

    #[test]
    fn a_process_that_is_exiting_is_waited_for() {
        let held = lock(unused(1), Instant::now()).unwrap();
        let exiting = thread::spawn(move || {
            sleep(Duration::from_millis(50));
            drop(held);
        });
        let nic = Nic { name: "gw-in".to_owned(), ifindex: unused(1), queues: 1, native_xdp: false, zero_copy: false };
        let locks = InterfaceLocks::acquire(&[nic]).unwrap();
        exiting.join().unwrap();
        drop(locks);
    }
}
