//! Installs a seccomp filter on the calling thread and its future children (seccomp(2)), with
//! `SECCOMP_FILTER_FLAG_LOG`, which libraries don't support.

use std::io;

/// An instruction of classic BPF.
pub use libc::sock_filter as Instruction;

/// Installs a filter. If `logged`, the kernel logs refused system calls, subject to `kernel.seccomp.actions_logged`.
///
/// # Errors
/// When the kernel doesn't support seccomp filters, the program is invalid, or `no_new_privs` isn't set.
pub fn install(program: &[Instruction], logged: bool) -> io::Result<()> {
    let len = u16::try_from(program.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let program = libc::sock_fprog { len, filter: program.as_ptr().cast_mut() };
    let flags = if logged { libc::SECCOMP_FILTER_FLAG_LOG } else { 0 };
    // SAFETY: the kernel reads the given number of instructions of the slice, which is valid during the call.
    let result = unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
