//! XDP programs on interfaces, by netlink: which one is there, putting ours there, taking it away.
//!
//! A program that is attached by netlink belongs to the interface and outlives the process, which is what keeps traffic
//! closed while no gateway runs. (A pinned BPF link would do the same, but pins live in a mount of bpffs, and processes
//! that `ip netns exec` starts have a /sys of their own without one: such a pin dies with the process.)

use std::ffi::CStr;
use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Once;

/// What ours is called in the kernel, which cuts names at 15 letters.
pub(crate) const NAME: &str = "vipgate_steer";

/// How a program is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// By the driver, before a socket buffer is made.
    Native,
    /// By the kernel's stack, behind the driver.
    Generic,
}

impl Mode {
    /// Its word in logs and status.
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

/// Fail if there is a program already.
const IF_NONE: u32 = 1 << 0;
/// Fail if the program isn't the one that is named.
const REPLACE: u32 = 1 << 4;

/// A program that is attached to an interface.
#[derive(Debug)]
pub(crate) struct Attached {
    pub(crate) id: u32,
    pub(crate) name: String,
    pub(crate) mode: Mode,
    program: OwnedFd,
}

impl Attached {
    /// Whether an earlier gateway left it there.
    pub(crate) fn is_ours(&self) -> bool {
        self.name == NAME
    }
}

/// Keeps libbpf from writing to stderr by itself: what it says comes back as errors.
pub(crate) fn silence_libbpf() {
    static ONCE: Once = Once::new();
    // SAFETY: the call sets a function pointer; None is a documented value of it.
    ONCE.call_once(|| unsafe {
        libbpf_sys::libbpf_set_print(None);
    });
}

/// The kernel's number of the program on an interface, and how it is run, if there is one.
pub(crate) fn query(ifindex: u32) -> io::Result<Option<(u32, Mode)>> {
    // SAFETY: all-zero bytes are a valid options record; its first field says how long it is.
    let mut options: libxdp_sys::bpf_xdp_query_opts = unsafe { mem::zeroed() };
    options.sz = size_of::<libxdp_sys::bpf_xdp_query_opts>();
    // SAFETY: libbpf writes no more than `sz` bytes into the record, which lives until the call returns.
    check(unsafe { libxdp_sys::bpf_xdp_query(ifindex.cast_signed(), 0, &raw mut options) })?;
    Ok(match (options.drv_prog_id, options.skb_prog_id) {
        (0, 0) => None,
        (0, generic) => Some((generic, Mode::Generic)),
        (native, _) => Some((native, Mode::Native)),
    })
}

/// The program on an interface, if there is one.
pub(crate) fn find(ifindex: u32) -> io::Result<Option<Attached>> {
    let Some((id, mode)) = query(ifindex)? else { return Ok(None) };
    let program = open(id)?;
    let (_, name) = describe(program.as_fd())?;
    Ok(Some(Attached { id, name, mode, program }))
}

/// A program, by the kernel's number of it. Takes `CAP_SYS_ADMIN`.
fn open(id: u32) -> io::Result<OwnedFd> {
    // SAFETY: the call takes no pointers.
    let fd = unsafe { libxdp_sys::bpf_prog_get_fd_by_id(id) };
    check(fd)?;
    // SAFETY: the descriptor was made just now and belongs to nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// What a program is called, by the kernel's number of it; empty when this process may not ask.
pub(crate) fn name_of(id: u32) -> String {
    open(id).and_then(|program| describe(program.as_fd())).map(|(_, name)| name).unwrap_or_default()
}

/// The kernel's number of a program, and what it is called.
pub(crate) fn describe(program: BorrowedFd<'_>) -> io::Result<(u32, String)> {
    // SAFETY: all-zero bytes are a valid record.
    let mut info: libxdp_sys::bpf_prog_info = unsafe { mem::zeroed() };
    let mut length = size_of::<libxdp_sys::bpf_prog_info>() as u32;
    // SAFETY: the kernel writes at most `length` bytes into `info`; the zeroed pointers in it ask for no more.
    check(unsafe { libxdp_sys::bpf_prog_get_info_by_fd(program.as_raw_fd(), &raw mut info, &raw mut length) })?;
    let name: Vec<u8> = info.name.iter().map(|&letter| letter.cast_unsigned()).chain([0]).collect();
    let name = CStr::from_bytes_until_nul(&name).map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    Ok((info.id, name))
}

/// Puts a program on an interface: in place of `old` in one step, or where there was none.
pub(crate) fn attach(ifindex: u32, program: BorrowedFd<'_>, mode: Mode, old: Option<&Attached>) -> io::Result<()> {
    let options = options(old);
    let condition = if old.is_some() { REPLACE } else { IF_NONE };
    // SAFETY: libbpf reads `sz` bytes from the record, which lives until the call returns.
    check(unsafe {
        libxdp_sys::bpf_xdp_attach(
            ifindex.cast_signed(),
            program.as_raw_fd(),
            mode.flags() | condition,
            &raw const options,
        )
    })
}

/// Puts a program on an interface, whatever is there in the same mode.
pub(crate) fn overwrite(ifindex: u32, program: BorrowedFd<'_>, mode: Mode) -> io::Result<()> {
    let options = options(None);
    // SAFETY: as in `attach`.
    check(unsafe {
        libxdp_sys::bpf_xdp_attach(ifindex.cast_signed(), program.as_raw_fd(), mode.flags(), &raw const options)
    })
}

/// Takes whatever program there is in one mode away from an interface.
pub(crate) fn clear(ifindex: u32, mode: Mode) -> io::Result<()> {
    let options = options(None);
    // SAFETY: as in `attach`.
    check(unsafe { libxdp_sys::bpf_xdp_detach(ifindex.cast_signed(), mode.flags(), &raw const options) })
}

/// Puts a program that was there before back in place of the one that is there now.
pub(crate) fn restore(ifindex: u32, before: &Attached, mode: Mode, now: &Attached) -> io::Result<()> {
    attach(ifindex, before.program.as_fd(), mode, Some(now))
}

/// Puts a program that was there before on the interface again, where there is none now.
pub(crate) fn put_back(ifindex: u32, before: &Attached) -> io::Result<()> {
    attach(ifindex, before.program.as_fd(), before.mode, None)
}

/// Takes a program away from an interface, if it is still there.
pub(crate) fn detach(ifindex: u32, attached: &Attached) -> io::Result<()> {
    let options = options(Some(attached));
    // SAFETY: as in `attach`.
    check(unsafe {
        libxdp_sys::bpf_xdp_detach(ifindex.cast_signed(), attached.mode.flags() | REPLACE, &raw const options)
    })
}

fn options(old: Option<&Attached>) -> libxdp_sys::bpf_xdp_attach_opts {
    // SAFETY: all-zero bytes are a valid options record.
    let mut options: libxdp_sys::bpf_xdp_attach_opts = unsafe { mem::zeroed() };
    // Up to its last field: libbpf wants everything behind that to be zero, which nobody promises for padding.
    options.sz = mem::offset_of!(libxdp_sys::bpf_xdp_attach_opts, old_prog_fd) + size_of::<i32>();
    options.old_prog_fd = old.map_or(0, |old| old.program.as_raw_fd());
    options
}

/// libbpf's results: negative is an error number.
pub(crate) fn check(result: i32) -> io::Result<()> {
    if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(()) }
}
