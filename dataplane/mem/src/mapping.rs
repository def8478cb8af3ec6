//! Memory mappings, on huge pages if available: they save a page walk for random reads of large tables.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::Arc;

use thiserror::Error;

/// Size of a huge page.
pub(crate) const HUGE_PAGE: usize = 2 << 20;

/// Page type of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// Reserved huge pages (`vm.nr_hugepages`).
    Huge,
    /// Normal pages with `MADV_HUGEPAGE` (transparent huge pages).
    Transparent,
    /// Normal pages; the mapping is smaller than a huge page.
    Small,
}

impl Pages {
    /// Name in logs and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Huge => "huge",
            Self::Transparent => "transparent",
            Self::Small => "small",
        }
    }
}

/// Failed allocation of memory.
#[derive(Debug, Error)]
#[error("cannot map {bytes} bytes of memory: {source}")]
pub struct MemoryError {
    /// Requested size.
    pub bytes: usize,
    /// Error of the kernel.
    pub source: io::Error,
}

/// A readable and writable mapping, page-aligned.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    /// Mapped bytes: the requested size rounded up to whole pages.
    bytes: usize,
    pages: Pages,
    /// The mapped file: it stays locked, so nothing truncates it or maps it again.
    _file: Option<Arc<File>>,
}

// SAFETY: a mapping belongs to the process, not to a thread; its owners control access.
unsafe impl Send for Mapping {}
// SAFETY: as above; a shared reference gives access to address and length only.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps at least `bytes` of zeroed anonymous memory.
    pub(crate) fn anonymous(bytes: usize) -> Result<Self, MemoryError> {
        // Miri supports neither huge pages nor madvise(2).
        let large = bytes >= HUGE_PAGE && !cfg!(miri);
        let rounded = bytes.max(1).next_multiple_of(if large { HUGE_PAGE } else { 4096 });
        if large && let Ok(base) = map(rounded, libc::MAP_HUGETLB) {
            return Ok(Self { base, bytes: rounded, pages: Pages::Huge, _file: None });
        }
        let lazy = if cfg!(miri) { 0 } else { libc::MAP_NORESERVE };
        let base = map(rounded, lazy).map_err(|source| MemoryError { bytes, source })?;
        let mut mapping = Self { base, bytes: rounded, pages: Pages::Small, _file: None };
        // SAFETY: the range is the new mapping; the advice doesn't change its contents.
        if large && unsafe { libc::madvise(base.as_ptr().cast(), rounded, libc::MADV_HUGEPAGE) } == 0 {
            mapping.pages = Pages::Transparent;
        }
        Ok(mapping)
    }

    /// Maps `bytes` of a locked file with `MAP_SHARED`; the range must be within the file, and in no other mapping.
    pub(crate) fn shared(file: &Arc<File>, offset: u64, bytes: usize) -> io::Result<Self> {
        let offset = i64::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: a new mapping at an address chosen by the kernel overlaps no memory in use. Nothing else in this
        // process maps the range (see `RegionSlabs`); the file's lock, which the mapping shares, and its permissions
        // keep other processes from changing it by accident.
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
        // SAFETY: the range is the new mapping; the advice doesn't change its contents. File systems without huge pages
        // ignore it.
        unsafe { libc::madvise(base.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
        Ok(Self { base, bytes, pages: pages_of(file), _file: Some(file.clone()) })
    }

    /// Mapped bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The first byte.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Page type.
    pub(crate) fn pages(&self) -> Pages {
        self.pages
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `mmap` returned exactly this range, and no reference into it remains: references borrow from the
        // mapping's owner, and owners of longer-lived references leak the mapping (see arena.rs).
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

fn map(bytes: usize, extra_flags: libc::c_int) -> io::Result<NonNull<u8>> {
    // SAFETY: a new anonymous mapping at an address chosen by the kernel overlaps no memory in use.
    let address = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | extra_flags,
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

/// Page type of a file's mappings: huge on hugetlbfs, otherwise normal, or transparent huge pages on tmpfs mounted with
/// `huge=advise`.
fn pages_of(file: &File) -> Pages {
    const HUGETLBFS: i64 = 0x9584_58f6;
    // SAFETY: statfs consists of integers, for which all zeros are valid.
    let mut info: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open, and `info` is a statfs that the kernel may write.
    let result = unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut info) };
    if result == 0 && info.f_type == HUGETLBFS { Pages::Huge } else { Pages::Small }
}
