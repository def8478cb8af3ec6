//! Fault injection: makes one write to the maps fail.

use aya::maps::MapError;
use aya::sys::SyscallError;

use crate::steering::SteeringError;

/// The write to fail, counted from the next one, which is 0; `None`: all succeed.
#[derive(Debug, Default)]
pub(in crate::steering) struct Faults(Option<u32>);

impl Faults {
    /// Fails the write after `count` others.
    pub(super) fn fail_after(&mut self, count: u32) {
        self.0 = Some(count);
    }

    /// Ends the injection; returns whether a write has failed.
    pub(super) fn end(&mut self) -> bool {
        self.0.take().is_none()
    }

    pub(in crate::steering) fn check(&mut self, table: &'static str) -> Result<(), SteeringError> {
        match &mut self.0 {
            None => return Ok(()),
            Some(0) => self.0 = None,
            Some(left) => {
                *left -= 1;
                return Ok(());
            }
        }
        let io_error = std::io::Error::from_raw_os_error(libc::ENOMEM);
        let source = MapError::SyscallError(SyscallError { call: "bpf_map_update_elem", io_error });
        Err(SteeringError::Table { table, source })
    }
}
