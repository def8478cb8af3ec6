//! Memory that outlives the process: one file, mapped piece by piece.
//!
//! The file should lie in memory itself (tmpfs, hugetlbfs): the kernel then keeps what a process wrote when that process
//! dies, at whatever instruction, in the order in which it wrote. One process at a time has it, by a lock that the kernel
//! takes back at a process's death.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use bytemuck::AnyBitPattern;
use thiserror::Error;

use crate::mapping::{HUGE, Mapping};
use crate::slab::Slab;

/// Why a region can't be had.
#[derive(Debug, Error)]
pub enum RegionError {
    /// The file can't be opened or made.
    #[error("cannot open {path}: {source}")]
    Open {
        /// The file.
        path: PathBuf,
        /// What the kernel says.
        source: io::Error,
    },
    /// Another process has it.
    #[error("another process uses {path}")]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// There is no room for it.
    #[error("no room for {bytes} bytes in {path}: {source}")]
    NoRoom {
        /// The file.
        path: PathBuf,
        /// How large it was to become.
        bytes: u64,
        /// What the kernel says.
        source: io::Error,
    },
    /// The kernel doesn't map it.
    #[error("cannot map {path}: {source}")]
    Map {
        /// The file.
        path: PathBuf,
        /// What the kernel says.
        source: io::Error,
    },
}

/// A file that slabs are cut from, one behind the other: the same cuts in the same order find what was there before.
#[derive(Debug)]
pub struct Region {
    file: File,
    path: PathBuf,
    /// Where the next slab begins.
    next: u64,
}

impl Region {
    /// Opens the region in `path`, or makes an empty one that only its owner can read.
    ///
    /// # Errors
    /// When that fails, or another process has it.
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
            // Whoever had the lock may have put another file in its place meanwhile.
            if is_still_at(&file, path).map_err(failed)? {
                return Ok(Self { file, path: path.into(), next: 0 });
            }
        }
    }

    /// Forgets everything in it: slabs that are cut from now on are zero. Slabs that were cut before must be gone.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn clear(&mut self) -> Result<(), RegionError> {
        self.next = 0;
        self.file.set_len(0).map_err(|source| RegionError::Open { path: self.path.clone(), source })
    }

    /// Begins anew at the first slab. Slabs that were cut before must be gone.
    pub fn rewind(&mut self) {
        self.next = 0;
    }

    /// Bytes that a slab of `len` values takes.
    pub const fn bytes_of<T>(len: usize) -> u64 {
        slab_bytes::<T>(len) as u64
    }

    /// Bytes that are in the file now.
    pub fn len(&self) -> u64 {
        self.file.metadata().map_or(0, |facts| facts.len())
    }

    /// Whether there is nothing in it.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Cuts the next slab, of `len` values: what a former process left there, else zeros.
    ///
    /// # Errors
    /// When there is no room, or the kernel doesn't map it.
    pub fn slab<T: AnyBitPattern>(&mut self, len: usize) -> Result<Slab<T>, RegionError> {
        let bytes = slab_bytes::<T>(len);
        let end = self.next.saturating_add(bytes as u64);
        let no_room = |source| RegionError::NoRoom { path: self.path.clone(), bytes: end, source };
        let (Ok(offset), Ok(length)) = (i64::try_from(self.next), i64::try_from(bytes)) else {
            return Err(no_room(io::ErrorKind::OutOfMemory.into()));
        };
        // Taken now: a page that is missing later is a signal in the middle of a packet.
        // SAFETY: the call touches no memory of this process; the descriptor is open.
        let refused = unsafe { libc::fallocate(self.file.as_raw_fd(), 0, offset, length) } != 0;
        if refused {
            return Err(no_room(io::Error::last_os_error()));
        }
        let mapping = Mapping::shared(&self.file, offset, bytes)
            .map_err(|source| RegionError::Map { path: self.path.clone(), source })?;
        self.next = end;
        Ok(Slab::over(mapping, len))
    }
}

/// Whether a path still names the file.
fn is_still_at(file: &File, path: &Path) -> io::Result<bool> {
    let own = file.metadata()?;
    match fs::metadata(path) {
        Ok(there) => Ok((own.dev(), own.ino()) == (there.dev(), there.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

const fn slab_bytes<T>(len: usize) -> usize {
    let bytes = len.saturating_mul(size_of::<T>());
    if bytes == 0 { HUGE } else { bytes.div_ceil(HUGE).saturating_mul(HUGE) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("vipgate-region-{}-{name}", std::process::id()))
    }

    #[test]
    fn what_was_written_is_there_for_the_next_one() {
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
    fn one_at_a_time_and_nothing_impossible() {
        let path = scratch("locked");
        let mut region = Region::open(&path).unwrap();
        assert!(matches!(Region::open(&path), Err(RegionError::InUse { .. })));
        assert!(matches!(region.slab::<u64>(1 << 55), Err(RegionError::NoRoom { .. })));
        assert!(matches!(Region::open(Path::new("/nowhere/x")), Err(RegionError::Open { .. })));
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_file_whose_place_another_one_has_taken_is_known() {
        let path = scratch("replaced");
        let region = Region::open(&path).unwrap();
        assert!(is_still_at(&region.file, &path).unwrap());
        let next = path.with_extension("next");
        fs::write(&next, "other").unwrap();
        fs::rename(&next, &path).unwrap();
        assert!(!is_still_at(&region.file, &path).unwrap(), "another one");
        fs::remove_file(&path).unwrap();
        assert!(!is_still_at(&region.file, &path).unwrap(), "none");
    }
}
