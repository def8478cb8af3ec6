//! Sessions that outlive the process: a file for each worker under `sessions.state`, made or taken up at start.

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
}

impl Keeper {
    /// Prepares the folder that the configuration names.
    pub(super) fn open(config: &Config, workers: usize) -> Result<Self, Failure> {
        let folder = folder(config);
        if let Some(folder) = &folder {
            fs::create_dir_all(folder).map_err(|error| {
                Failure::usage(format_args!("sessions.state: cannot make {}: {error}", folder.display()))
            })?;
            forget_others(folder, workers);
        }
        Ok(Self { folder, boot: boot_id()?, workers: workers as u32, regions: Vec::new(), in_use: false })
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
        let in_process = || {
            Sessions::new(capacity, timeouts, key)
                .map_err(|error| Failure::runtime(format_args!("sessions.capacity: {error}")))
        };
        let Some(folder) = self.folder.as_ref().filter(|_| !self.in_use) else { return in_process() };
        let path = path(folder, worker);
        let mut region = match lock(&path) {
            Ok(region) => region,
            Err(error @ RegionError::InUse { .. }) => {
                tracing::error!(event = "state_lost", %error, "sessions will end with the process: does a gateway of this name run already?");
                self.in_use = true;
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
            Found::Tables => {
                let begun = Instant::now();
                let TakenUp { sessions, copies, resting, torn, refused } = sessions.take_up(now, adopt);
                let ms = begun.elapsed().as_millis() as u64;
                tracing::info!(
                    event = "state_taken_up",
                    worker,
                    sessions,
                    copies,
                    resting,
                    torn,
                    refused,
                    ms,
                    "sessions taken up"
                );
            }
        }
        self.regions.push(region);
        Ok(sessions)
    }
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
        let failed = |error| refused(&folder, &error);
        let files: Vec<_> = fs::read_dir(&folder).map_err(failed)?.filter_map(|file| Some(file.ok()?.path())).collect();
        let locks = files.iter().map(|file| lock(file)).collect::<Result<Vec<_>, _>>().map_err(|error| {
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

fn folder(config: &Config) -> Option<PathBuf> {
    // A name is one component of a path, whatever it is, and never one that means another folder.
    let name = config.name.replace(['/', '\0'], "_");
    let name = if name.starts_with('.') { format!("_{name}") } else { name };
    Some(config.sessions.state.as_ref()?.join(name))
}

fn path(folder: &Path, worker: u32) -> PathBuf {
    folder.join(format!("worker-{worker}"))
}

/// Removes the files of workers that there are no more; one that is in use stays.
fn forget_others(folder: &Path, workers: usize) {
    let own: Vec<_> = (0..workers as u32).map(|worker| path(folder, worker)).collect();
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
