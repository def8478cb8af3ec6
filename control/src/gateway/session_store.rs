//! Session store: session tables that outlive the process, one file for each worker under `sessions.state`. Created,
//! restored or migrated at startup.

mod directory;
mod migrate;

use std::fs::{File, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fs, thread};

use rustix::io::Errno;
use vipgate_dataplane::flow::time::Tick;
use vipgate_dataplane::flow::tuple::HashKey;
use vipgate_dataplane::session::Sessions;
use vipgate_dataplane::session::persistence::{Identity, RegionContents, Restored};
use vipgate_dataplane::session::timeout::Timeouts;
use vipgate_dataplane::worker::builder::SessionTableRequest;
use vipgate_mem::{Region, RegionLock, StorageError};

pub(super) use self::directory::prepare;
use self::migrate::{MigrationOutcome, MigrationTarget};
use crate::command_error::{CommandError, may_pass};
use crate::config::Config;
use crate::output;
use crate::replaced_file::Format;

/// Suffix of the file beside the session tables with the record of addresses of pools.
pub(super) const ADDRESSES: &str = ".addresses";
/// Suffix of the file beside them with the process secret.
pub(super) const SECRET: &str = ".secret";
/// Suffix of the file beside them with what the next process needs in this one's place.
pub(super) const MEMBERSHIP: &str = ".membership";
/// How long to wait for a file lock: a killed process releases its locks last.
const LOCK_TIMEOUT: Duration = Duration::from_secs(3);

/// Where and when a file beside the session tables was written. A process that has locked the directory of the tables
/// knows that all processes that wrote files of this origin have ended: the kernel holds the lock for each of them until
/// then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Origin {
    /// Boot ID of the kernel.
    pub(super) boot: [u8; 16],
    /// The directory: a copy is another one.
    pub(super) device: u64,
    pub(super) inode: u64,
}

/// The directory of the session tables, which no other process has locked.
#[derive(Debug)]
struct LockedDirectory {
    device: u64,
    inode: u64,
    _lock: File,
}

/// The session store of this gateway. Holds the file locks until it is dropped.
#[derive(Debug)]
pub(super) struct SessionStore {
    /// `None`: sessions end with the process.
    directory: Option<PathBuf>,
    /// The directory, locked; `None`: another process holds the lock, or the file system has none.
    lock: Option<LockedDirectory>,
    boot: [u8; 16],
    workers: u32,
    locks: Vec<RegionLock>,
    /// Another process holds the locks; they aren't tried again.
    in_use: bool,
    /// Migrated tables for which there is no space for files, in reverse order of workers.
    in_memory: Vec<Sessions>,
}

impl SessionStore {
    /// The store in the directory that [`prepare`] has made.
    pub(super) fn open(config: &Config, workers: usize) -> Result<Self, CommandError> {
        let (directory, locks, in_memory) = (state_dir(config), Vec::new(), Vec::new());
        let lock = directory.as_deref().map(|directory| lock_directory(directory, LOCK_TIMEOUT)).transpose();
        let refused = |error| CommandError::runtime(error).context("sessions.state: cannot lock the directory");
        let lock = lock.map_err(refused)?.flatten();
        Ok(Self { directory, lock, boot: boot_id()?, workers: workers as u32, locks, in_use: false, in_memory })
    }

    /// Migrates the tables of a previous process with another number of workers or another capacity; `keys` are the
    /// hash keys of the new tables. Call before the first [`SessionStore::open_table`].
    pub(super) fn migrate(
        &mut self,
        capacity: u32,
        timeouts: Timeouts,
        keys: Vec<HashKey>,
        now: Tick,
    ) -> Result<(), CommandError> {
        let Some(directory) = &self.directory else { return Ok(()) };
        let (boot, workers) = (self.boot, self.workers);
        let target = MigrationTarget { directory, boot, workers, capacity, timeouts, keys, now };
        match migrate::prepare(&target, &mut || ()) {
            Ok(MigrationOutcome::Files) => remove_unused_files(directory, self.workers),
            Ok(MigrationOutcome::InMemory(sessions)) => self.in_memory = sessions.into_iter().rev().collect(),
            Err(error) if error.is_in_use() => self.give_up(&error),
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    fn give_up(&mut self, error: &dyn std::fmt::Display) {
        tracing::error!(
            event = "state_lost",
            %error,
            "sessions will end with the process: is a gateway of this name already running?"
        );
        self.in_use = true;
    }

    /// The origin of files that this process writes beside the tables; `None`: it isn't known to be alone there.
    pub(super) fn origin(&self) -> Option<Origin> {
        let LockedDirectory { device, inode, .. } = *self.lock.as_ref().filter(|_| !self.in_use)?;
        Some(Origin { boot: self.boot, device, inode })
    }

    /// Whether another process holds the files, so it is still running.
    pub(super) fn is_in_use(&self) -> bool {
        self.in_use
    }

    /// Opens the session table of a worker, and restores the sessions of the previous process if the file fits.
    pub(super) fn open_table(&mut self, mut request: SessionTableRequest<'_>) -> Result<Sessions, CommandError> {
        if let Some(mut sessions) = self.in_memory.pop() {
            restore(&mut sessions, &mut request);
            return Ok(sessions);
        }
        let Some(directory) = self.directory.as_ref().filter(|_| !self.in_use) else {
            return in_memory(&request);
        };
        let (worker, capacity) = (request.restorer.worker.0.into(), request.capacity);
        let path = worker_file(directory, worker);
        let region = match lock_region(&path) {
            Ok(region) => region,
            Err(error @ StorageError::InUse { .. }) => {
                self.give_up(&error);
                return in_memory(&request);
            }
            Err(error @ StorageError::NoSpace { .. }) => return without_space(&error, &request),
            Err(error) => return Err(CommandError::input(error).context("sessions.state")),
        };
        let lock = region.lock();
        let identity = Identity { worker, workers: self.workers, capacity, boot: self.boot };
        let (mut sessions, found) = match Sessions::in_region(region, identity, request.timeouts, request.key) {
            Ok(opened) => opened,
            Err(error @ StorageError::NoSpace { .. }) => return without_space(&error, &request),
            Err(error) => return Err(CommandError::runtime(error).context("sessions.state")),
        };
        let file = path.display();
        match found {
            RegionContents::Empty => {
                tracing::info!(event = "state_new", %file, capacity, "sessions will outlive the process");
            }
            RegionContents::Unusable(reason) => {
                tracing::warn!(event = "state_unusable", %file, %reason, "sessions in this file are discarded");
            }
            RegionContents::Tables => restore(&mut sessions, &mut request),
        }
        self.locks.push(lock);
        Ok(sessions)
    }
}

fn without_space(error: &dyn std::fmt::Display, request: &SessionTableRequest<'_>) -> Result<Sessions, CommandError> {
    tracing::error!(event = "state_lost", %error, "no space to store sessions: free memory and restart");
    in_memory(request)
}

fn in_memory(request: &SessionTableRequest<'_>) -> Result<Sessions, CommandError> {
    request.in_memory().map_err(|error| CommandError::runtime(error).context("sessions.capacity"))
}

fn restore(sessions: &mut Sessions, request: &mut SessionTableRequest<'_>) {
    let (start, worker) = (Instant::now(), request.restorer.worker.0);
    let Restored { active: sessions, standby, quarantined, torn, rejected } =
        sessions.restore(request.now, &mut request.restorer);
    let ms = start.elapsed().as_millis() as u64;
    tracing::info!(
        event = "state_restored",
        worker,
        sessions,
        standby,
        quarantined,
        torn,
        rejected,
        ms,
        "sessions restored"
    );
}

/// The stored sessions of a gateway that isn't running, to be removed by `vipgate detach`.
#[derive(Debug)]
pub(super) struct StoredSessions {
    directory: PathBuf,
    /// No running or starting gateway uses the files.
    _locks: Vec<Region>,
}

impl StoredSessions {
    /// Finds and locks the stored sessions of this gateway, if there are any. Changes nothing. What a gateway doesn't
    /// use isn't its own.
    ///
    /// # Errors
    /// When a file is in use or can't be accessed.
    pub(super) fn find(config: &Config) -> Result<Option<Self>, CommandError> {
        let Some(directory) = state_dir(config).filter(|directory| directory.exists()) else { return Ok(None) };
        match directory::check(config) {
            Ok(()) => {}
            Err(error) if error.is_fatal() => {
                return Err(CommandError::runtime(error).context("sessions.state"));
            }
            Err(error) => {
                output::print_error(format_args!("vipgate: sessions.state: {error}"));
                return Ok(None);
            }
        }
        let files = all_files(&directory).map_err(|error| cannot_remove(&directory, error))?;
        let locks = files.iter().map(|file| lock_region(file)).collect::<Result<Vec<_>, _>>().map_err(|error| {
            CommandError::runtime(format!("sessions.state: {error}: is this gateway already running?"))
        })?;
        Ok(Some(Self { directory, _locks: locks }))
    }

    /// Removes the files, and those beside them.
    ///
    /// # Errors
    /// When a file can't be removed.
    pub(super) fn remove(self, config: &Config) -> Result<(), CommandError> {
        fs::remove_dir_all(&self.directory).map_err(|error| cannot_remove(&self.directory, error))?;
        for path in [ADDRESSES, SECRET, MEMBERSHIP].into_iter().filter_map(|suffix| path_beside(config, suffix)) {
            match fs::remove_file(&path) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(cannot_remove(&path, error)),
                _ => {}
            }
        }
        Ok(())
    }
}

fn cannot_remove(directory: &Path, error: io::Error) -> CommandError {
    CommandError::runtime(error).context(format_args!("sessions.state: cannot remove {}", directory.display()))
}

/// A file of this gateway beside the directory of its session tables, which holds worker files only; `None` if sessions
/// aren't stored.
pub(super) fn path_beside(config: &Config, suffix: &str) -> Option<PathBuf> {
    let mut path = state_dir(config)?.into_os_string();
    path.push(suffix);
    Some(path.into())
}

/// The directory of this gateway's session tables; `None` if sessions aren't stored.
fn state_dir(config: &Config) -> Option<PathBuf> {
    // The name becomes exactly one path component, and never `.` or `..`.
    let name = config.name.replace(['/', '\0'], "_");
    let name = if name.starts_with('.') { format!("_{name}") } else { name };
    Some(config.sessions.state.as_ref()?.join(name))
}

fn worker_file(directory: &Path, worker: u32) -> PathBuf {
    directory.join(format!("worker-{worker}"))
}

/// All files below a directory; none if another process has removed it.
fn all_files(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(files),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            files.extend(all_files(&entry.path())?);
        } else {
            files.push(entry.path());
        }
    }
    Ok(files)
}

/// Removes the files of workers that no longer exist, except those in use.
fn remove_unused_files(directory: &Path, workers: u32) {
    let own: Vec<_> = (0..workers).map(|worker| worker_file(directory, worker)).collect();
    // They take space only: the next start removes what this one doesn't find.
    let files = migrate::worker_files(directory).unwrap_or_default();
    for file in files.into_iter().filter(|file| !own.contains(file)) {
        let removed = Region::open(&file)
            .map_err(|error| error.to_string())
            .and_then(|_lock| fs::remove_file(&file).map_err(|error| error.to_string()));
        match removed {
            Ok(()) => {
                let file = file.display();
                tracing::warn!(event = "state_unusable", %file, "file removed: the worker no longer exists");
            }
            Err(error) => {
                let file = file.display();
                tracing::warn!(event = "state_unusable", %file, error, "cannot remove the file");
            }
        }
    }
}

/// Opens and locks a region; waits for a process that is exiting.
fn lock_region(path: &Path) -> Result<Region, StorageError> {
    let start = Instant::now();
    loop {
        match Region::open(path) {
            Err(StorageError::InUse { .. }) if start.elapsed() < LOCK_TIMEOUT => {
                thread::sleep(Duration::from_millis(5));
            }
            outcome => return outcome,
        }
    }
}

/// Opens and locks a directory; waits for a process that is exiting. `None`: another one holds the lock, or this file
/// system has none.
///
/// # Errors
/// When the kernel refuses.
fn lock_directory(path: &Path, timeout: Duration) -> io::Result<Option<LockedDirectory>> {
    let start = Instant::now();
    let directory = File::open(path)?;
    let found = directory.metadata()?;
    loop {
        match directory.try_lock() {
            Ok(()) => {
                return Ok(Some(LockedDirectory { device: found.dev(), inode: found.ino(), _lock: directory }));
            }
            Err(TryLockError::WouldBlock) if start.elapsed() < timeout => thread::sleep(Duration::from_millis(5)),
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) if has_no_locks(&error) => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
}

/// Whether a file system locks no directories. That of NFS needs write access, which a directory has for nobody.
fn has_no_locks(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::BADF | Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP))
}

/// Reads a file that the previous process has left beside its session tables; `None`: there is none, or it is refused.
/// One that can't be read for the moment must not be taken for that, since it would be overwritten.
///
/// # Errors
/// When it can't be read, and that may pass.
pub(super) fn read_left(path: &Path, format: &Format) -> Result<Option<Vec<u8>>, CommandError> {
    match format.read(path) {
        Ok(Ok(content)) => Ok(Some(content)),
        Ok(Err(reason)) => {
            let file = path.display();
            tracing::warn!(event = "state_unusable", %file, %reason, "this file of the previous process is not used");
            Ok(None)
        }
        Err(error) if may_pass(&error) => {
            Err(CommandError::runtime(error).context(format_args!("sessions.state: cannot read {}", path.display())))
        }
        Err(_) => Ok(None),
    }
}

/// The boot ID of the kernel.
fn boot_id() -> Result<[u8; 16], CommandError> {
    const FILE: &str = "/proc/sys/kernel/random/boot_id";
    let unreadable = |error| CommandError::runtime(error).context(format_args!("cannot read {FILE}"));
    let text = fs::read_to_string(FILE).map_err(unreadable)?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let id = u128::from_str_radix(&digits, 16);
    id.map(u128::to_be_bytes).map_err(|_| unreadable(ErrorKind::InvalidData.into()))
}

#[cfg(test)]
mod tests;
