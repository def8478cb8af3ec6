//! Persistent memory region: a file that outlives the process, mapped as consecutive slabs.
//!
//! The file should be on tmpfs or hugetlbfs: the kernel then keeps all writes of a process that dies at any
//! instruction, in program order. A file lock, which the kernel releases when the process dies, ensures a single user.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use bytemuck::AnyBitPattern;
use thiserror::Error;

use crate::mapping::{HUGE_PAGE, Mapping};
use crate::slab::Slab;

/// Error of a region.
#[derive(Debug, Error)]
pub enum RegionError {
    /// The file can't be opened or created.
    #[error("cannot open {path}: {source}")]
    Open {
        /// The file.
        path: PathBuf,
        /// Error of the kernel.
        source: io::Error,
    },
    /// Another process has locked it.
    #[error("another process uses {path}")]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// The file system has no space for it.
    #[error("no space for {bytes} bytes in {path}: {source}")]
    NoSpace {
        /// The file.
        path: PathBuf,
        /// Requested size of the file.
        bytes: u64,
        /// Error of the kernel.
        source: io::Error,
    },
    /// The file can't be mapped.
    #[error("cannot map {path}: {source}")]
    Map {
        /// The file.
        path: PathBuf,
        /// Error of the kernel.
        source: io::Error,
    },
}

/// A file divided into consecutive slabs. Requesting the same slabs in the same order restores their contents.
#[derive(Debug)]
pub struct Region {
    file: File,
    path: PathBuf,
    /// Offset of the next slab.
    next: u64,
}

impl Region {
    /// Opens the region at `path`, or creates an empty one with mode 0600.
    ///
    /// # Errors
    /// When that fails, or another process has locked it.
    pub fn open(path: &Path) -> Result<Self, RegionError> {
        let failed = |source| RegionError::Open { path: path.into(), source };
        loop {
            let opened = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path);
            let file = opened.map_err(failed)?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Err(RegionError::InUse { path: path.into() }),
                Err(TryLockError::Error(source)) => return Err(failed(source)),
            }
            // The previous owner of the lock may have replaced the file meanwhile.
            if is_same_file(&file, path).map_err(failed)? {
                return Ok(Self { file, path: path.into(), next: 0 });
            }
        }
    }

    /// Truncates the file: new slabs are zeroed. Earlier slabs must have been dropped.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn clear(&mut self) -> Result<(), RegionError> {
        self.next = 0;
        self.file.set_len(0).map_err(|source| RegionError::Open { path: self.path.clone(), source })
    }

    /// Rewinds to the first slab. Earlier slabs must have been dropped.
    pub fn rewind(&mut self) {
        self.next = 0;
    }

    /// Size of a slab of `len` values in the file.
    pub const fn bytes_of<T>(len: usize) -> u64 {
        slab_bytes::<T>(len) as u64
    }

    /// Size of the file.
    pub fn len(&self) -> u64 {
        self.file.metadata().map_or(0, |metadata| metadata.len())
    }

    /// Whether the file is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Maps the next slab of `len` values: with the contents of an earlier process, otherwise zeroed.
    ///
    /// # Errors
    /// When the file system has no space, or the kernel can't map it.
    pub fn slab<T: AnyBitPattern>(&mut self, len: usize) -> Result<Slab<T>, RegionError> {
        let bytes = slab_bytes::<T>(len);
        let end = self.next.saturating_add(bytes as u64);
        let no_space = |source| RegionError::NoSpace { path: self.path.clone(), bytes: end, source };
        let (Ok(offset), Ok(length)) = (i64::try_from(self.next), i64::try_from(bytes)) else {
            return Err(no_space(io::ErrorKind::OutOfMemory.into()));
        };
        // Allocated now: a missing page later would raise SIGBUS on the packet path.
        // SAFETY: the call accesses no memory of this process; the descriptor is open.
        let failed = unsafe { libc::fallocate(self.file.as_raw_fd(), 0, offset, length) } != 0;
        if failed {
            return Err(no_space(io::Error::last_os_error()));
        }
        let mapping = Mapping::shared(&self.file, offset, bytes)
            .map_err(|source| RegionError::Map { path: self.path.clone(), source })?;
        self.next = end;
        Ok(Slab::from_mapping(mapping, len))
    }
}

/// Whether a path refers to the open file.
fn is_same_file(file: &File, path: &Path) -> io::Result<bool> {
    let opened = file.metadata()?;
    match fs::metadata(path) {
        Ok(current) => Ok((opened.dev(), opened.ino()) == (current.dev(), current.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

const fn slab_bytes<T>(len: usize) -> usize {
    let bytes = len.saturating_mul(size_of::<T>());
    if bytes == 0 { HUGE_PAGE } else { bytes.div_ceil(HUGE_PAGE).saturating_mul(HUGE_PAGE) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("vipgate-region-{}-{name}", std::process::id()))
    }

    #[test]
    fn contents_outlive_the_region() {
        let path = scratch("kept");
        {
            let mut region = Region::open(&path).unwrap();
            assert!(region.is_empty());
            let mut first = region.slab::<u64>(10).unwrap();
            let mut second = region.slab::<u32>(1_000_000).unwrap();
            first[9] = 7;
            second[999_999] = 8;
        }
        let mut region = Region::open(&path).unwrap();
        assert_eq!(region.slab::<u64>(10).unwrap()[9], 7);
        assert_eq!(region.slab::<u32>(1_000_000).unwrap()[999_999], 8);
        region.clear().unwrap();
        assert!(region.slab::<u64>(10).unwrap().iter().all(|&n| n == 0));
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_region_is_locked_and_bounded() {
        let path = scratch("locked");
        let mut region = Region::open(&path).unwrap();
        assert!(matches!(Region::open(&path), Err(RegionError::InUse { .. })));
        assert!(matches!(region.slab::<u64>(1 << 55), Err(RegionError::NoSpace { .. })));
        assert!(matches!(Region::open(Path::new("/nowhere/x")), Err(RegionError::Open { .. })));
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_replaced_or_removed_file_is_detected() {
        let path = scratch("replaced");
        let region = Region::open(&path).unwrap();
        assert!(is_same_file(&region.file, &path).unwrap());
        let next = path.with_extension("next");
        fs::write(&next, "other").unwrap();
        fs::rename(&next, &path).unwrap();
        assert!(!is_same_file(&region.file, &path).unwrap(), "replaced");
        fs::remove_file(&path).unwrap();
        assert!(!is_same_file(&region.file, &path).unwrap(), "removed");
    }
}
