//! The second line: a classifier at the kernel's ingress (tc) that drops what the steering program would have captured.
//!
//! Anybody with `CAP_NET_ADMIN` can take an XDP program off an interface, or put another one in its place, and from then on the kernel would
//! forward pods' packets untranslated. The classifier decides by the same tables as the steering program, so it needs no keeping in step, and
//! while that one works nothing that it would drop comes this far. Like the steering program with `on_exit: drop`, it outlives the process,
//! until the next gateway replaces it or `vipgate detach` removes it. The qdisc `clsact` that it hangs on stays: others may use it, too.

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::nic::Nic;
use crate::program::{check, name_of};
use crate::steering::{Steering, chain};

/// What it is called in the kernel.
pub(crate) const GUARD: &str = "vipgate_guard";
/// Its place among the filters of an interface: before all others, unless they want to be the first, too.
const PRIORITY: u32 = 1;
/// Its number among the filters of that priority; others give themselves small ones.
const HANDLE: u32 = 0x76_6970;

/// Installs the second line on an interface, in place of an earlier gateway's.
///
/// # Errors
/// When the kernel refuses; one without `clsact` and `cls_bpf` does.
pub fn install(steering: &mut Steering, nic: &Nic) -> io::Result<()> {
    let program = steering.guard_fd().map_err(|error| io::Error::other(chain(&error)))?;
    attach(nic.ifindex, program)
}

fn attach(ifindex: u32, program: BorrowedFd<'_>) -> io::Result<()> {
    let mut hook = hook(ifindex);
    // SAFETY: libbpf reads `sz` bytes of the record, which lives until the call returns.
    match check(unsafe { libbpf_sys::bpf_tc_hook_create(&raw mut hook) }) {
        Err(error) if error.raw_os_error() != Some(libc::EEXIST) => return Err(error),
        Ok(()) | Err(_) => {}
    }
    let mut options = options();
    options.prog_fd = program.as_raw_fd();
    options.flags = libbpf_sys::BPF_TC_F_REPLACE;
    // SAFETY: libbpf reads and writes no more than `sz` bytes of both records, which live until the call returns.
    check(unsafe { libbpf_sys::bpf_tc_attach(&raw const hook, &raw mut options) })
}

/// Removes the second line from an interface; says whether it was there.
///
/// # Errors
/// When the kernel refuses.
pub fn remove(nic: &Nic) -> io::Result<bool> {
    let (hook, mut found) = (hook(nic.ifindex), options());
    // SAFETY: as in `attach`.
    match check(unsafe { libbpf_sys::bpf_tc_query(&raw const hook, &raw mut found) }) {
        // No such filter; no such qdisc.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EINVAL)) => return Ok(false),
        Err(error) => return Err(error),
        Ok(()) => {}
    }
    if name_of(found.prog_id) != GUARD {
        return Ok(false);
    }
    let options = options();
    // SAFETY: as in `attach`.
    check(unsafe { libbpf_sys::bpf_tc_detach(&raw const hook, &raw const options) })?;
    Ok(true)
}

fn hook(ifindex: u32) -> libbpf_sys::bpf_tc_hook {
    // SAFETY: all-zero bytes are a valid record; its first field says how long it is.
    let mut hook: libbpf_sys::bpf_tc_hook = unsafe { mem::zeroed() };
    hook.sz = size_of::<libbpf_sys::bpf_tc_hook>() as _;
    hook.ifindex = ifindex.cast_signed();
    hook.attach_point = libbpf_sys::BPF_TC_INGRESS;
    hook
}

fn options() -> libbpf_sys::bpf_tc_opts {
    // SAFETY: as in `hook`.
    let mut options: libbpf_sys::bpf_tc_opts = unsafe { mem::zeroed() };
    options.sz = size_of::<libbpf_sys::bpf_tc_opts>() as _;
    (options.handle, options.priority) = (HANDLE, PRIORITY);
    options
}
