//! Persistent memory region: a file that outlives the process, mapped as consecutive slabs.
//!
//! The file should be on tmpfs or hugetlbfs: the kernel then keeps all writes of a process that dies at any
//! instruction, in program order. A file lock, which the kernel releases when the process dies, ensures a single user.

use std::fs::{self, File, Metadata, OpenOptions, TryLockError};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytemuck::{AnyBitPattern, Pod};

use crate::mapping::{HUGE_PAGE, Mapping};
use crate::slab::Slab;
use crate::storage::StorageError;

/// The user that may do everything anyway.
const ROOT: u32 = 0;

/// A locked file, no part of which is mapped.
///
/// [`Region::into_slabs`] consumes it, so a file that slabs map is neither truncated nor mapped a second time:
///
/// ```compile_fail,E0382
/// use vipgate_mem::Region;
///
/// let mut region = Region::open("/dev/shm/tables".as_ref()).unwrap();
/// let slab = region.into_slabs().slab::<u64>(1000).unwrap();
/// region.clear().unwrap(); // Reading the slab would raise SIGBUS.
/// println!("{}", slab[0]);
/// ```
///
/// Nor does another `Region` of the file exist before the last of its slabs is dropped: each holds the lock.
#[derive(Debug)]
pub struct Region {
    file: Arc<File>,
    path: PathBuf,
}

impl Region {
    /// Opens the region at `path`, or creates an empty one with mode 0600. Follows no link.
    ///
    /// # Errors
    /// When that fails, the file isn't a regular one of this user or root with a single name, or it is locked: by
    /// another process, or by a region or slab of this one.
    pub fn open(path: &Path) -> Result<Self, StorageError> {
        let failed = |source: io::Error| match source.kind() {
            // Also an empty file takes an inode.
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                StorageError::NoSpace { path: path.into(), bytes: 0, source }
            }
            _ => StorageError::Open { path: path.into(), source },
        };
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        // Opening a pipe or device doesn't wait; it is refused below.
        options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY);
        loop {
            let file = options.open(path).map_err(failed)?;
            if let Some(reason) = why_unsafe(&file.metadata().map_err(failed)?) {
                return Err(StorageError::Unsafe { path: path.into(), reason });
            }
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Err(StorageError::InUse { path: path.into() }),
                Err(TryLockError::Error(source)) => return Err(failed(source)),
            }
            // The previous owner of the lock may have replaced the file meanwhile.
            if is_same_file(&file, path).map_err(failed)? {
                return Ok(Self { file: Arc::new(file), path: path.into() });
            }
        }
    }

    /// Truncates the file: new slabs are zeroed.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn clear(&mut self) -> Result<(), StorageError> {
        self.file.set_len(0).map_err(|source| StorageError::Open { path: self.path.clone(), source })
    }

    /// Allocates space for the first `bytes` of the file, and extends it to them if it is shorter.
    ///
    /// # Errors
    /// When the file system has no space.
    pub fn allocate(&mut self, bytes: u64) -> Result<(), StorageError> {
        allocate(&self.file, 0, bytes).map_err(|source| StorageError::NoSpace {
            path: self.path.clone(),
            bytes,
            source,
        })
    }

    /// The value at the start of the file; `None` if the file is shorter.
    ///
    /// # Errors
    /// When the file can't be read.
    pub fn read_start<T: Pod>(&self) -> Result<Option<T>, StorageError> {
        let mut value = T::zeroed();
        match self.file.read_exact_at(bytemuck::bytes_of_mut(&mut value), 0) {
            Ok(()) => Ok(Some(value)),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
            Err(source) => Err(StorageError::Read { path: self.path.clone(), source }),
        }
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

    /// A share of the file's lock.
    pub fn lock(&self) -> RegionLock {
        RegionLock(self.file.clone())
    }

    /// Divides the file into consecutive slabs. Requesting the same slabs in the same order restores their contents.
    pub fn into_slabs(self) -> RegionSlabs {
        RegionSlabs { file: self.file, path: self.path, next: 0 }
    }
}

/// Keeps a region locked, whether or not slabs of it are left.
#[derive(Clone, Debug)]
pub struct RegionLock(#[expect(dead_code, reason = "held for its lock")] Arc<File>);

/// A region that is being divided into slabs.
#[derive(Debug)]
pub struct RegionSlabs {
    file: Arc<File>,
    path: PathBuf,
    /// Offset of the next slab: everything before it belongs to earlier ones.
    next: u64,
}

impl RegionSlabs {
    /// Maps the next slab of `len` values: with the contents of an earlier process, otherwise zeroed.
    ///
    /// # Errors
    /// When the file system has no space, or the kernel can't map it.
    pub fn slab<T: AnyBitPattern>(&mut self, len: usize) -> Result<Slab<T>, StorageError> {
        let bytes = slab_bytes::<T>(len);
        let end = self.next.saturating_add(bytes as u64);
        // Allocated now: a missing page later would raise SIGBUS on the packet path.
        allocate(&self.file, self.next, bytes as u64).map_err(|source| StorageError::NoSpace {
            path: self.path.clone(),
            bytes: end,
            source,
        })?;
        let mapping = Mapping::shared(&self.file, self.next, bytes)
            .map_err(|source| StorageError::Map { path: self.path.clone(), source })?;
        self.next = end;
        Ok(Slab::from_mapping(mapping, len))
    }
}

/// Allocates space in a file, which grows if it ends before.
fn allocate(file: &File, offset: u64, bytes: u64) -> io::Result<()> {
    let (Ok(offset), Ok(bytes)) = (i64::try_from(offset), i64::try_from(bytes)) else {
        return Err(io::ErrorKind::OutOfMemory.into());
    };
    // SAFETY: the call accesses no memory of this process; the descriptor is open.
    let failed = unsafe { libc::fallocate(file.as_raw_fd(), 0, offset, bytes) } != 0;
    if failed { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Why somebody else may have put a file there, or may change it.
fn why_unsafe(file: &Metadata) -> Option<&'static str> {
    // SAFETY: the call has no arguments and can't fail.
    let user = unsafe { libc::geteuid() };
    match file {
        _ if !file.is_file() => Some("it is not a regular file"),
        _ if file.uid() != user && file.uid() != ROOT => Some("it belongs to another user"),
        // None, if it was removed meanwhile.
        _ if file.nlink() > 1 => Some("it has several names (hard links)"),
        _ => None,
    }
}

/// Whether a path refers to the open file.
fn is_same_file(file: &File, path: &Path) -> io::Result<bool> {
    let opened = file.metadata()?;
    match fs::symlink_metadata(path) {
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
    use std::os::unix::fs::{chown, symlink};
    use std::os::unix::net::UnixListener;

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
            assert_eq!(region.read_start::<u64>().unwrap(), None);
            region.allocate(Region::bytes_of::<u64>(10)).unwrap();
            let mut slabs = region.into_slabs();
            let (mut first, mut second) = (slabs.slab::<u64>(10).unwrap(), slabs.slab::<u32>(1_000_000).unwrap());
            (first[0], first[9]) = (6, 7);
            second[999_999] = 8;
        }
        let region = Region::open(&path).unwrap();
        assert_eq!(region.read_start::<u64>().unwrap(), Some(6));
        let mut slabs = region.into_slabs();
        assert_eq!(slabs.slab::<u64>(10).unwrap()[9], 7);
        assert_eq!(slabs.slab::<u32>(1_000_000).unwrap()[999_999], 8);
        drop(slabs);
        let mut region = Region::open(&path).unwrap();
        region.clear().unwrap();
        assert!(region.into_slabs().slab::<u64>(10).unwrap().iter().all(|&n| n == 0));
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_region_is_locked_and_bounded() {
        let path = scratch("locked");
        let mut region = Region::open(&path).unwrap();
        assert!(matches!(Region::open(&path), Err(StorageError::InUse { .. })));
        assert!(matches!(region.allocate(1 << 60), Err(StorageError::NoSpace { .. })));
        assert!(matches!(region.into_slabs().slab::<u64>(1 << 55), Err(StorageError::NoSpace { .. })));
        assert!(matches!(Region::open(Path::new("/nowhere/x")), Err(StorageError::Open { .. })));
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_file_is_locked_until_its_last_slab_is_dropped() {
        let path = scratch("shared");
        let is_locked = || matches!(Region::open(&path), Err(StorageError::InUse { .. }));
        let region = Region::open(&path).unwrap();
        let lock = region.lock();
        let mut slabs = region.into_slabs();
        let (first, second) = (slabs.slab::<u64>(10).unwrap(), slabs.slab::<u64>(10).unwrap());
        drop((slabs, first, lock));
        assert!(is_locked(), "a slab is left");
        drop(second);
        let lock = Region::open(&path).unwrap().lock();
        assert!(is_locked(), "a lock is left");
        drop(lock);
        assert!(!is_locked());
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn what_somebody_else_may_have_put_there_is_neither_followed_nor_changed() {
        let directory = scratch("unsafe");
        fs::create_dir(&directory).unwrap();
        let [path, target, missing] = ["region", "target", "missing"].map(|name| directory.join(name));
        let is_unsafe = |expected: &str| match Region::open(&path) {
            Err(StorageError::Unsafe { reason, .. }) => reason.contains(expected),
            _ => false,
        };
        let cannot_open = || matches!(Region::open(&path), Err(StorageError::Open { .. }));
        fs::write(&target, "of root").unwrap();
        symlink(&target, &path).unwrap();
        assert!(cannot_open(), "a link");
        fs::remove_file(&path).unwrap();
        symlink(&missing, &path).unwrap();
        assert!(cannot_open() && !missing.exists(), "nothing is created through a link");
        fs::remove_file(&path).unwrap();
        fs::hard_link(&target, &path).unwrap();
        assert!(is_unsafe("several names"));
        fs::remove_file(&path).unwrap();
        let _socket = UnixListener::bind(&path).unwrap();
        assert!(cannot_open(), "a socket");
        fs::remove_file(&path).unwrap();
        fs::write(&path, "of nobody").unwrap();
        // Only root can give a file away.
        if chown(&path, Some(65_534), None).is_ok() {
            assert!(is_unsafe("another user"));
        }
        assert_eq!(fs::read_to_string(&target).unwrap(), "of root");
        fs::remove_dir_all(&directory).unwrap();
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
