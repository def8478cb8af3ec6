//! Installing a seccomp filter on the calling thread, and on all that it starts (seccomp(2)). Libraries make this call, too, but without
//! asking for what is refused to stand in the kernel's log.

use std::io;

/// An instruction of classic BPF.
pub use libc::sock_filter as Instruction;

/// Installs a filter. If `logged`, the kernel logs what it refuses, as `kernel.seccomp.actions_logged` says.
///
/// # Errors
/// When the kernel has no seccomp filters, the program isn't one, or the thread may still gain privileges (`no_new_privs`).
pub fn install(program: &[Instruction], logged: bool) -> io::Result<()> {
    let len = u16::try_from(program.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let program = libc::sock_fprog { len, filter: program.as_ptr().cast_mut() };
    let flags = if logged { libc::SECCOMP_FILTER_FLAG_LOG } else { 0 };
    // SAFETY: the kernel copies as many instructions as said from the slice, which outlives the call, and writes none.
    let result = unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
