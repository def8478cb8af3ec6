//! Attaches, queries and detaches XDP programs by netlink.
//!
//! A program attached by netlink belongs to the interface and outlives the process, which keeps captured traffic
//! blocked while no gateway runs. (So would a pinned BPF link, but pins need a bpffs mount, and processes started by
//! `ip netns exec` have their own /sys without one: such a pin is removed with the process.)

use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Once;
use std::{io, mem};

/// Name of the steering program; the kernel truncates names to 15 characters.
pub(crate) const PROGRAM_NAME: &str = "vipgate_steer";

/// XDP mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// In the driver, before an skb is allocated.
    Native,
    /// In the network stack, after the driver.
    Generic,
}

impl Mode {
    /// Name in logs and status.
    pub fn name(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Generic => "generic",
        }
    }

    fn flags(self) -> u32 {
        const SKB_MODE: u32 = 1 << 1;
        const DRIVER_MODE: u32 = 1 << 2;
        match self {
            Self::Native => DRIVER_MODE,
            Self::Generic => SKB_MODE,
        }
    }
}

/// What is attached where a program of this process belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramStatus {
    /// That of this process.
    Attached,
    /// None.
    Missing,
    /// Another program.
    Replaced {
        /// ID of the program; its name requires a capability that the gateway drops after its start.
        id: u32,
    },
}

impl ProgramStatus {
    /// Compares the ID of the program that was found with that of this process.
    pub(crate) fn of(found: Option<u32>, own: u32) -> Self {
        match found {
            None => Self::Missing,
            Some(id) if id == own => Self::Attached,
            Some(id) => Self::Replaced { id },
        }
    }
}

/// `XDP_FLAGS_UPDATE_IF_NOEXIST`: fail if a program is attached.
const IF_NONE: u32 = 1 << 0;
/// `XDP_FLAGS_REPLACE`: fail if the attached program isn't the expected one.
const REPLACE: u32 = 1 << 4;

/// A program attached to an interface.
#[derive(Debug)]
pub(crate) struct AttachedProgram {
    pub(crate) id: u32,
    pub(crate) name: String,
    pub(crate) mode: Mode,
    program: OwnedFd,
}

impl AttachedProgram {
    /// Whether it is a steering program.
    pub(crate) fn is_ours(&self) -> bool {
        self.name == PROGRAM_NAME
    }
}

/// Disables libbpf's messages to stderr; its errors are returned.
pub(crate) fn silence_libbpf() {
    static ONCE: Once = Once::new();
    // SAFETY: the call sets a function pointer; None is a documented value.
    ONCE.call_once(|| unsafe {
        libbpf_sys::libbpf_set_print(None);
    });
}

/// ID and mode of the program on an interface, if any.
pub(crate) fn query(ifindex: u32) -> io::Result<Option<(u32, Mode)>> {
    // SAFETY: all zeros are valid for the struct; its first field is its size.
    let mut options: libxdp_sys::bpf_xdp_query_opts = unsafe { mem::zeroed() };
    options.sz = size_of::<libxdp_sys::bpf_xdp_query_opts>();
    // SAFETY: libbpf writes at most `sz` bytes to the struct, which is valid during the call.
    check_result(unsafe { libxdp_sys::bpf_xdp_query(ifindex.cast_signed(), 0, &raw mut options) })?;
    Ok(match (options.drv_prog_id, options.skb_prog_id) {
        (0, 0) => None,
        (0, generic) => Some((generic, Mode::Generic)),
        (native, _) => Some((native, Mode::Native)),
    })
}

/// The program on an interface, if any.
pub(crate) fn find(ifindex: u32) -> io::Result<Option<AttachedProgram>> {
    let Some((id, mode)) = query(ifindex)? else { return Ok(None) };
    let program = open(id)?;
    let (_, name) = describe(program.as_fd())?;
    Ok(Some(AttachedProgram { id, name, mode, program }))
}

/// Opens a program by its ID. Requires `CAP_SYS_ADMIN`.
fn open(id: u32) -> io::Result<OwnedFd> {
    // SAFETY: the call takes no pointers.
    let fd = unsafe { libxdp_sys::bpf_prog_get_fd_by_id(id) };
    check_result(fd)?;
    // SAFETY: the file descriptor is new and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Name of a program by its ID; empty without the required capability.
pub(crate) fn program_name(id: u32) -> String {
    open(id).and_then(|program| describe(program.as_fd())).map(|(_, name)| name).unwrap_or_default()
}

/// ID and name of a program.
pub(crate) fn describe(program: BorrowedFd<'_>) -> io::Result<(u32, String)> {
    // SAFETY: all zeros are valid for the struct.
    let mut info: libxdp_sys::bpf_prog_info = unsafe { mem::zeroed() };
    let mut length = size_of::<libxdp_sys::bpf_prog_info>() as u32;
    // SAFETY: the kernel writes at most `length` bytes to `info`; its zeroed pointers request no further output.
    check_result(unsafe { libxdp_sys::bpf_prog_get_info_by_fd(program.as_raw_fd(), &raw mut info, &raw mut length) })?;
    let name: Vec<u8> = info.name.iter().map(|&character| character.cast_unsigned()).chain([0]).collect();
    let name = CStr::from_bytes_until_nul(&name).map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    Ok((info.id, name))
}

/// Attaches a program to an interface without one, or atomically replaces `old`.
pub(crate) fn attach(
    ifindex: u32,
    program: BorrowedFd<'_>,
    mode: Mode,
    old: Option<&AttachedProgram>,
) -> io::Result<()> {
    let options = options(old);
    let condition = if old.is_some() { REPLACE } else { IF_NONE };
    // SAFETY: libbpf reads `sz` bytes of the struct, which is valid during the call.
    check_result(unsafe {
        libxdp_sys::bpf_xdp_attach(
            ifindex.cast_signed(),
            program.as_raw_fd(),
            mode.flags() | condition,
            &raw const options,
        )
    })
}

/// Attaches a program to an interface; replaces any program of the same mode.
pub(crate) fn overwrite(ifindex: u32, program: BorrowedFd<'_>, mode: Mode) -> io::Result<()> {
    let options = options(None);
    // SAFETY: as in `attach`.
    check_result(unsafe {
        libxdp_sys::bpf_xdp_attach(ifindex.cast_signed(), program.as_raw_fd(), mode.flags(), &raw const options)
    })
}

/// Detaches any program of a mode from an interface.
pub(crate) fn detach_any(ifindex: u32, mode: Mode) -> io::Result<()> {
    let options = options(None);
    // SAFETY: as in `attach`.
    check_result(unsafe { libxdp_sys::bpf_xdp_detach(ifindex.cast_signed(), mode.flags(), &raw const options) })
}

/// Replaces the current program by a previous one.
pub(crate) fn restore(
    ifindex: u32,
    previous: &AttachedProgram,
    mode: Mode,
    current: &AttachedProgram,
) -> io::Result<()> {
    attach(ifindex, previous.program.as_fd(), mode, Some(current))
}

/// Attaches a previous program to an interface that has none.
pub(crate) fn reattach(ifindex: u32, previous: &AttachedProgram) -> io::Result<()> {
    attach(ifindex, previous.program.as_fd(), previous.mode, None)
}

/// Detaches a program from an interface, if it is still attached.
pub(crate) fn detach(ifindex: u32, attached: &AttachedProgram) -> io::Result<()> {
    let options = options(Some(attached));
    // SAFETY: as in `attach`.
    check_result(unsafe {
        libxdp_sys::bpf_xdp_detach(ifindex.cast_signed(), attached.mode.flags() | REPLACE, &raw const options)
    })
}

fn options(old: Option<&AttachedProgram>) -> libxdp_sys::bpf_xdp_attach_opts {
    // SAFETY: all zeros are valid for the struct.
    let mut options: libxdp_sys::bpf_xdp_attach_opts = unsafe { mem::zeroed() };
    // Without the padding after the last field: libbpf requires bytes beyond known fields to be zero, which isn't
    // guaranteed for padding.
    options.sz = mem::offset_of!(libxdp_sys::bpf_xdp_attach_opts, old_prog_fd) + size_of::<i32>();
    options.old_prog_fd = old.map_or(0, |old| old.program.as_raw_fd());
    options
}

/// Converts a result of libbpf: negative values are error numbers.
pub(crate) fn check_result(result: i32) -> io::Result<()> {
    if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(()) }
}
