//! Anonymous memory, on huge pages where the machine has them: a random read of a large table costs a page walk less.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

use thiserror::Error;

/// The size of a huge page on the machines that we run on.
pub(crate) const HUGE: usize = 2 << 20;

/// What kind of pages a mapping got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// Reserved huge pages (`vm.nr_hugepages`).
    Huge,
    /// Normal pages that the kernel was asked to make huge when it can.
    Transparent,
    /// Normal pages: too little memory for a huge one.
    Small,
}

impl Pages {
    /// Its word in logs and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Huge => "huge",
            Self::Transparent => "transparent",
            Self::Small => "small",
        }
    }
}

/// The kernel gave no memory.
#[derive(Debug, Error)]
#[error("cannot map {bytes} bytes of memory: {source}")]
pub struct MemoryError {
    /// How much was asked for.
    pub bytes: usize,
    /// What the kernel says.
    pub source: io::Error,
}

/// Zeroed memory of this process, readable and writable, aligned to a page at least.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    /// Bytes that are mapped: what was asked for, rounded up to whole pages.
    bytes: usize,
    pages: Pages,
}

// SAFETY: a mapping belongs to the process, not to a thread; who may access it is the business of its owners.
unsafe impl Send for Mapping {}
// SAFETY: as above; through a shared reference nothing but the address and the length can be read.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps at least `bytes`.
    pub(crate) fn anonymous(bytes: usize) -> Result<Self, MemoryError> {
        // Miri knows neither huge pages nor advice.
        let large = bytes >= HUGE && !cfg!(miri);
        let rounded = bytes.max(1).next_multiple_of(if large { HUGE } else { 4096 });
        if large && let Ok(base) = map(rounded, libc::MAP_HUGETLB) {
            return Ok(Self { base, bytes: rounded, pages: Pages::Huge });
        }
        let lazy = if cfg!(miri) { 0 } else { libc::MAP_NORESERVE };
        let base = map(rounded, lazy).map_err(|source| MemoryError { bytes, source })?;
        let mut mapping = Self { base, bytes: rounded, pages: Pages::Small };
        // SAFETY: the range was mapped just now and is ours; the advice changes how it is backed, not what it holds.
        if large && unsafe { libc::madvise(base.as_ptr().cast(), rounded, libc::MADV_HUGEPAGE) } == 0 {
            mapping.pages = Pages::Transparent;
        }
        Ok(mapping)
    }

    /// Maps `bytes` of a file, shared with whoever maps it later; they must be in the file.
    pub(crate) fn shared(file: &File, offset: i64, bytes: usize) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory that anybody uses. Other processes
        // could write to the file; its lock and its permissions (see region.rs) keep out all but those who mean it.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                offset,
            )
        };
        let base = checked(address)?;
        // SAFETY: the range was mapped just now and is ours; the advice changes how it is backed, not what it holds. A file
        // system without huge pages ignores it.
        unsafe { libc::madvise(base.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
        Ok(Self { base, bytes, pages: pages_of(file) })
    }

    /// Bytes that are mapped.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The first byte.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// What kind of pages it got.
    pub(crate) fn pages(&self) -> Pages {
        self.pages
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `map` returned exactly this range, and nobody can reach it any more: references into it borrow from the
        // mapping's owner, and owners that hand out longer-lived ones leak the mapping (see arena.rs).
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

fn map(bytes: usize, extra: libc::c_int) -> io::Result<NonNull<u8>> {
    // SAFETY: a new anonymous mapping at an address of the kernel's choice touches no memory that anybody uses.
    let address = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | extra,
            -1,
            0,
        )
    };
    checked(address)
}

fn checked(address: *mut libc::c_void) -> io::Result<NonNull<u8>> {
    if address == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(address.cast()).ok_or_else(|| io::Error::other("mapped at address zero"))
}

/// The pages that a file system gives its files: huge ones on hugetlbfs; elsewhere normal ones, which a tmpfs mounted with
/// `huge=advise` makes huge when it can.
fn pages_of(file: &File) -> Pages {
    const HUGETLBFS: i64 = 0x9584_58f6;
    // SAFETY: all zeros are a valid statfs, plain numbers.
    let mut facts: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open, and `facts` is a statfs that the kernel may fill in.
    let asked = unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut facts) };
    if asked == 0 && facts.f_type == HUGETLBFS { Pages::Huge } else { Pages::Small }
}
