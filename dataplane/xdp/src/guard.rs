//! tc guard: a classifier at tc ingress that drops packets that the steering program would have captured.
//!
//! Any process with `CAP_NET_ADMIN` can detach or replace an XDP program, after which the kernel would forward pods'
//! packets untranslated. The guard uses the same maps as the steering program, so it needs no synchronization; while
//! the steering program is attached, no packet to be dropped reaches it. Like the steering program with `on_exit:
//! drop`, it outlives the process until the next gateway replaces it or `vipgate detach` removes it. Its `clsact` qdisc
//! is not removed, since other programs may use it. Other processes can remove the guard, too: the gateway queries it and
//! installs it again.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::{io, mem};

use crate::nic::Nic;
use crate::program::{ProgramStatus, check_result, describe, program_name};
use crate::steering::{Steering, SteeringError, error_chain};

/// Name of the BPF program.
pub(crate) const GUARD_NAME: &str = "vipgate_guard";
/// Filter priority: the highest.
const PRIORITY: u32 = 1;
/// Filter handle; unlikely to collide with the small handles that tc assigns.
const HANDLE: u32 = 0x76_6970;

/// Loads the guard, so that it can be installed at any time: loading takes more capabilities.
///
/// # Errors
/// When the kernel refuses.
pub fn load(steering: &mut Steering) -> Result<(), SteeringError> {
    steering.guard_fd().map(|_| ())
}

/// Installs the guard on an interface, or replaces that of an earlier gateway.
///
/// # Errors
/// When the kernel refuses, for example without `clsact` and `cls_bpf`.
pub fn install(steering: &mut Steering, nic: &Nic) -> io::Result<()> {
    attach(nic.ifindex, program(steering)?)
}

/// Queries the filter at the guard's place on an interface.
///
/// # Errors
/// When the query fails, or the interface no longer exists.
pub fn status(steering: &mut Steering, ifindex: u32) -> io::Result<ProgramStatus> {
    let (own, _) = describe(program(steering)?)?;
    Ok(ProgramStatus::of(query(ifindex)?, own))
}

fn program(steering: &mut Steering) -> io::Result<BorrowedFd<'_>> {
    steering.guard_fd().map_err(|error| io::Error::other(error_chain(&error)))
}

fn attach(ifindex: u32, program: BorrowedFd<'_>) -> io::Result<()> {
    let mut hook = hook(ifindex);
    // SAFETY: libbpf reads `sz` bytes of the struct, which is valid during the call.
    match check_result(unsafe { libbpf_sys::bpf_tc_hook_create(&raw mut hook) }) {
        Err(error) if error.raw_os_error() != Some(libc::EEXIST) => return Err(error),
        Ok(()) | Err(_) => {}
    }
    let mut options = options();
    options.prog_fd = program.as_raw_fd();
    options.flags = libbpf_sys::BPF_TC_F_REPLACE;
    // SAFETY: libbpf accesses at most `sz` bytes of both structs, which are valid during the call.
    check_result(unsafe { libbpf_sys::bpf_tc_attach(&raw const hook, &raw mut options) })
}

/// Removes the guard from an interface; returns whether it was installed.
///
/// # Errors
/// When the kernel refuses.
pub fn remove(nic: &Nic) -> io::Result<bool> {
    let Some(id) = query(nic.ifindex)? else { return Ok(false) };
    if program_name(id) != GUARD_NAME {
        return Ok(false);
    }
    let (hook, options) = (hook(nic.ifindex), options());
    // SAFETY: as in `attach`.
    check_result(unsafe { libbpf_sys::bpf_tc_detach(&raw const hook, &raw const options) })?;
    Ok(true)
}

/// Program ID of the filter at the guard's place, if there is one.
fn query(ifindex: u32) -> io::Result<Option<u32>> {
    let (hook, mut found) = (hook(ifindex), options());
    // SAFETY: as in `attach`.
    match check_result(unsafe { libbpf_sys::bpf_tc_query(&raw const hook, &raw mut found) }) {
        // ENOENT: no such filter; EINVAL: no such qdisc.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EINVAL)) => Ok(None),
        Err(error) => Err(error),
        Ok(()) => Ok(Some(found.prog_id)),
    }
}

fn hook(ifindex: u32) -> libbpf_sys::bpf_tc_hook {
    // SAFETY: all zeros are valid for the struct; its first field is its size.
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
