//! Sessions that outlive the process: a file for each worker under `sessions.state`, made, taken up or migrated at start.

mod migrate;

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use vipgate_dataplane::session::Sessions;
use vipgate_dataplane::session::region::{Adopt, Found, Identity, TakenUp};
use vipgate_dataplane::session::timeout::Timeouts;
use vipgate_dataplane::session::tuple::HashKey;
use vipgate_dataplane::time::Tick;
use vipgate_mem::{Region, RegionError, StorageError};

use self::migrate::{Prepared, Wanted};

use crate::config::Config;
use crate::failure::Failure;

/// A process that was killed a moment ago may still be going: its locks go last.
const PATIENCE: Duration = Duration::from_secs(3);

/// Where the sessions of this gateway are kept. Holds the locks for as long as it lives.
#[derive(Debug)]
pub(super) struct Keeper {
    /// `None`: they end with the process.
    folder: Option<PathBuf>,
    boot: [u8; 16],
    workers: u32,
    regions: Vec<Region>,
    /// Another process has them: once is enough to wait for it.
    in_use: bool,
    /// Migrated sessions that no file has room for, the last worker's first.
    in_process: Vec<Sessions>,
}

impl Keeper {
    /// Prepares the folder that the configuration names.
    pub(super) fn open(config: &Config, workers: usize) -> Result<Self, Failure> {
        let folder = folder(config);
        if let Some(folder) = &folder {
            fs::create_dir_all(folder).map_err(|error| {
                Failure::usage(format_args!("sessions.state: cannot make {}: {error}", folder.display()))
            })?;
        }
        let (regions, in_process) = (Vec::new(), Vec::new());
        Ok(Self { folder, boot: boot_id()?, workers: workers as u32, regions, in_use: false, in_process })
    }

    /// Brings the sessions of a former process with other workers, or tables of another capacity, into tables of these; `keys` are for
    /// those. Before the first [`Keeper::sessions`].
    pub(super) fn migrate(
        &mut self,
        capacity: u32,
        timeouts: Timeouts,
        keys: Vec<HashKey>,
        now: Tick,
    ) -> Result<(), Failure> {
        let Some(folder) = &self.folder else { return Ok(()) };
        let wanted = Wanted { folder, boot: self.boot, workers: self.workers, capacity, timeouts, keys, now };
        match migrate::prepare(&wanted, &mut || ()) {
            Ok(Prepared::Files) => forget_others(folder, self.workers),
            Ok(Prepared::InProcess(sessions)) => self.in_process = sessions.into_iter().rev().collect(),
            Err(error) if error.is_in_use() => self.lose_to_another(&error),
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    fn lose_to_another(&mut self, error: &dyn std::fmt::Display) {
        tracing::error!(event = "state_lost", %error, "sessions will end with the process: does a gateway of this name run already?");
        self.in_use = true;
    }

    /// Whether another process has the sessions, and so lives.
    pub(super) fn is_in_use(&self) -> bool {
        self.in_use
    }

    /// The sessions of a worker: those of a former process, if there are any that fit.
    pub(super) fn sessions(
        &mut self,
        worker: u32,
        capacity: u32,
        timeouts: Timeouts,
        key: HashKey,
        now: Tick,
        adopt: &mut impl Adopt,
    ) -> Result<Sessions, Failure> {
        if let Some(mut sessions) = self.in_process.pop() {
            take_up(worker, &mut sessions, now, adopt);
            return Ok(sessions);
        }
        let in_process = || {
            Sessions::new(capacity, timeouts, key)
                .map_err(|error| Failure::runtime(format_args!("sessions.capacity: {error}")))
        };
        let Some(folder) = self.folder.as_ref().filter(|_| !self.in_use) else { return in_process() };
        let path = path(folder, worker);
        let mut region = match lock(&path) {
            Ok(region) => region,
            Err(error @ RegionError::InUse { .. }) => {
                self.lose_to_another(&error);
                return in_process();
            }
            Err(error) => return Err(Failure::usage(format_args!("sessions.state: {error}"))),
        };
        let identity = Identity { worker, workers: self.workers, capacity, boot: self.boot };
        let (mut sessions, found) = match Sessions::in_region(&mut region, identity, timeouts, key) {
            Ok(opened) => opened,
            Err(error @ StorageError::Region(RegionError::NoRoom { .. })) => {
                tracing::error!(event = "state_lost", %error, "sessions will end with the process: make room and restart");
                // What was taken before the room ran out is of no use to anybody.
                let _ = region.clear();
                return in_process();
            }
            Err(error) => return Err(Failure::runtime(format_args!("sessions.state: {error}"))),
        };
        let file = path.display();
        match found {
            Found::Nothing => tracing::info!(event = "state_new", %file, capacity, "sessions will outlive the process"),
            Found::Unusable(reason) => {
                tracing::warn!(event = "state_unusable", %file, %reason, "the former process's sessions are forgotten");
            }
            Found::Tables => take_up(worker, &mut sessions, now, adopt),
        }
        self.regions.push(region);
        Ok(sessions)
    }
}

fn take_up(worker: u32, sessions: &mut Sessions, now: Tick, adopt: &mut impl Adopt) {
    let begun = Instant::now();
    let TakenUp { sessions, copies, resting, torn, refused } = sessions.take_up(now, adopt);
    let ms = begun.elapsed().as_millis() as u64;
    tracing::info!(event = "state_taken_up", worker, sessions, copies, resting, torn, refused, ms, "sessions taken up");
}

/// The kept sessions of a gateway that doesn't run, about to be removed.
#[derive(Debug)]
pub(super) struct Leftovers {
    folder: PathBuf,
    /// Nothing is taken from under a gateway that runs or starts.
    _locks: Vec<Region>,
}

impl Leftovers {
    /// Those of this gateway, if there are any. Nothing is changed.
    ///
    /// # Errors
    /// When one is in use, or the kernel refuses.
    pub(super) fn find(config: &Config) -> Result<Option<Self>, Failure> {
        let Some(folder) = folder(config).filter(|folder| folder.exists()) else { return Ok(None) };
        fs::read_dir(&folder).map_err(|error| refused(&folder, &error))?;
        let locks = files(&folder).iter().map(|file| lock(file)).collect::<Result<Vec<_>, _>>().map_err(|error| {
            Failure::runtime(format_args!("sessions.state: {error}: does this gateway run already?"))
        })?;
        Ok(Some(Self { folder, _locks: locks }))
    }

    /// Removes them.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(super) fn remove(self) -> Result<(), Failure> {
        fs::remove_dir_all(&self.folder).map_err(|error| refused(&self.folder, &error))
    }
}

fn refused(folder: &Path, error: &std::io::Error) -> Failure {
    Failure::runtime(format_args!("sessions.state: cannot remove {}: {error}", folder.display()))
}

pub(super) fn folder(config: &Config) -> Option<PathBuf> {
    // A name is one component of a path, whatever it is, and never one that means another folder.
    let name = config.name.replace(['/', '\0'], "_");
    let name = if name.starts_with('.') { format!("_{name}") } else { name };
    Some(config.sessions.state.as_ref()?.join(name))
}

fn path(folder: &Path, worker: u32) -> PathBuf {
    folder.join(format!("worker-{worker}"))
}

/// The files in a folder and those in it.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

/// Removes the files of workers that there are no more; one that is in use stays.
fn forget_others(folder: &Path, workers: u32) {
    let own: Vec<_> = (0..workers).map(|worker| path(folder, worker)).collect();
    let Ok(files) = fs::read_dir(folder) else { return };
    for file in files.flatten().map(|file| file.path()).filter(|file| !own.contains(file)) {
        let removed = Region::open(&file)
            .map_err(|error| error.to_string())
            .and_then(|_lock| fs::remove_file(&file).map_err(|error| error.to_string()));
        match removed {
            Ok(()) => {
                tracing::warn!(event = "state_unusable", file = %file.display(), "a worker that is no more; forgotten");
            }
            Err(error) => tracing::warn!(event = "state_unusable", file = %file.display(), error, "cannot remove it"),
        }
    }
}

/// Opens a region, patient with a process that is just ending.
fn lock(path: &Path) -> Result<Region, RegionError> {
    let begun = Instant::now();
    loop {
        match Region::open(path) {
            Err(RegionError::InUse { .. }) if begun.elapsed() < PATIENCE => thread::sleep(Duration::from_millis(5)),
            outcome => return outcome,
        }
    }
}

/// The number of this run of the kernel.
fn boot_id() -> Result<[u8; 16], Failure> {
    const FILE: &str = "/proc/sys/kernel/random/boot_id";
    let unreadable = |error| Failure::runtime(format_args!("cannot read {FILE}: {error}"));
    let text = fs::read_to_string(FILE).map_err(unreadable)?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let number = u128::from_str_radix(&digits, 16);
    number.map(u128::to_be_bytes).map_err(|_| unreadable(ErrorKind::InvalidData.into()))
}

#[cfg(test)]
mod tests;
