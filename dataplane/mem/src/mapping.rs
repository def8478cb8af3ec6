//! Anonymous memory, on huge pages where the machine has them: a random read of a large table costs a page walk less.

use std::io;
use std::ptr::NonNull;

use thiserror::Error;

/// The size of a huge page on the machines that we run on.
const HUGE: usize = 2 << 20;

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
        let large = bytes >= HUGE;
        let rounded = bytes.max(1).next_multiple_of(if large { HUGE } else { 4096 });
        if large && let Ok(base) = map(rounded, libc::MAP_HUGETLB) {
            return Ok(Self { base, bytes: rounded, pages: Pages::Huge });
        }
        let base = map(rounded, libc::MAP_NORESERVE).map_err(|source| MemoryError { bytes, source })?;
        let mut mapping = Self { base, bytes: rounded, pages: Pages::Small };
        // SAFETY: the range was mapped just now and is ours; the advice changes how it is backed, not what it holds.
        if large && unsafe { libc::madvise(base.as_ptr().cast(), rounded, libc::MADV_HUGEPAGE) } == 0 {
            mapping.pages = Pages::Transparent;
        }
        Ok(mapping)
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
    if address == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(address.cast()).ok_or_else(|| io::Error::other("mapped at address zero"))
}
