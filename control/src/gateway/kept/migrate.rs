//! Migration of kept sessions to another number of workers or of sessions: new files are made beside the former ones, then take
//! their place. Whenever the process dies, one set of files is complete, and the next start goes on from it.
//!
//! ```text
//!   worker-*             former tables; read, never changed
//!   migrating/worker-*   new tables that aren't complete: the next start makes them again
//!   migrated/worker-*    they are complete (a rename of the folder); the former ones are removed
//!   moving/worker-*      the former ones are gone (another rename); each file moves to where the next start looks for it
//! ```

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use vipgate_dataplane::session::Sessions;
use vipgate_dataplane::session::migrate::{FormerError, Migrated, migrate, open_former};
use vipgate_dataplane::session::region::Identity;
use vipgate_dataplane::session::timeout::Timeouts;
use vipgate_dataplane::session::tuple::HashKey;
use vipgate_dataplane::time::Tick;
use vipgate_mem::{Region, RegionError, StorageError};

use super::{files, lock, path};
use crate::failure::Failure;

const MIGRATING: &str = "migrating";
const MIGRATED: &str = "migrated";
const MOVING: &str = "moving";

/// What the tables are to be.
pub(super) struct Wanted<'a> {
    pub(super) folder: &'a Path,
    pub(super) boot: [u8; 16],
    pub(super) workers: u32,
    /// Of each worker.
    pub(super) capacity: u32,
    pub(super) timeouts: Timeouts,
    /// A new key for each table.
    pub(super) keys: Vec<HashKey>,
    pub(super) now: Tick,
}

/// What is there for the workers now.
#[derive(Debug)]
pub(super) enum Prepared {
    /// Files that fit, or none.
    Files,
    /// The sessions themselves: there is no room for files.
    InProcess(Vec<Sessions>),
}

/// Why there is nothing for the workers.
#[derive(Debug, thiserror::Error)]
pub(super) enum MigrateError {
    #[error(transparent)]
    Region(#[from] RegionError),
    #[error(transparent)]
    Storage(#[from] StorageError),
    #[error("cannot change {path}: {source}")]
    Folder { path: PathBuf, source: io::Error },
}

impl MigrateError {
    /// Whether another process has the files.
    pub(super) fn is_in_use(&self) -> bool {
        matches!(self, Self::Region(RegionError::InUse { .. }))
    }
}

impl From<MigrateError> for Failure {
    fn from(error: MigrateError) -> Self {
        Self::usage(format_args!("sessions.state: {error}"))
    }
}

/// Finishes what a former process has begun, and migrates the sessions of files that don't fit. `step` is called at each moment from
/// which the next start would go on in another way.
pub(super) fn prepare(wanted: &Wanted<'_>, step: &mut dyn FnMut()) -> Result<Prepared, MigrateError> {
    let folder = wanted.folder;
    // Nothing is taken from under a process that does the same.
    let unfinished = lock_all(&files(folder))?;
    remove_folder(&folder.join(MIGRATING))?;
    finish(folder, step)?;
    drop(unfinished);
    let mut locks = lock_all(&worker_files(folder))?;
    let former = read(wanted, &mut locks);
    let fits = |identity: &Identity| {
        identity.worker < wanted.workers && (identity.workers, identity.capacity) == (wanted.workers, wanted.capacity)
    };
    if former.iter().all(|(_, identity)| fits(identity)) {
        return Ok(Prepared::Files);
    }
    report_unusable(wanted, &mut locks);
    let begun = Instant::now();
    let (former, identities): (Vec<_>, Vec<_>) = former.into_iter().unzip();
    let (prepared, migrated) = match make_files(wanted, &former, step) {
        Ok(migrated) => (Prepared::Files, migrated),
        Err(error) if is_no_room(&error) => without_room(wanted, former, locks, &error, step)?,
        Err(error) => return Err(error),
    };
    if matches!(prepared, Prepared::Files) {
        finish(folder, step)?;
    }
    log(wanted, &identities, migrated, begun);
    Ok(prepared)
}

/// The tables in files, where they can be read, and whose they are.
fn read(wanted: &Wanted<'_>, locks: &mut [Region]) -> Vec<(Sessions, Identity)> {
    locks
        .iter_mut()
        .filter(|region| !region.is_empty())
        .filter_map(|region| open_former(region, wanted.boot).ok())
        .collect()
}

/// Names the files that can't be read, and are left out.
fn report_unusable(wanted: &Wanted<'_>, locks: &mut [Region]) {
    for region in locks.iter_mut().filter(|region| !region.is_empty()) {
        if let Err(reason) = open_former(region, wanted.boot) {
            let reason = match &reason {
                FormerError::Unusable(reason) => reason.to_string(),
                FormerError::Storage(reason) => reason.to_string(),
            };
            let file = region.path().display();
            tracing::warn!(event = "state_unusable", %file, %reason, "its sessions are forgotten");
        }
    }
}

/// Makes new files of former tables, up to where they count.
fn make_files(wanted: &Wanted<'_>, former: &[Sessions], step: &mut dyn FnMut()) -> Result<Migrated, MigrateError> {
    let building = wanted.folder.join(MIGRATING);
    let made = fill(wanted, &building, former, step);
    if made.is_err() {
        // What was taken before the room ran out is of no use to anybody.
        remove_folder(&building)?;
    }
    let migrated = made?;
    rename(&building, &wanted.folder.join(MIGRATED))?;
    step();
    Ok(migrated)
}

fn fill(
    wanted: &Wanted<'_>,
    building: &Path,
    former: &[Sessions],
    step: &mut dyn FnMut(),
) -> Result<Migrated, MigrateError> {
    fs::create_dir_all(building).map_err(|source| failed(building, source))?;
    step();
    let (mut locks, mut tables) = (Vec::new(), Vec::new());
    for (worker, key) in (0..wanted.workers).zip(&wanted.keys) {
        let mut region = Region::open(&path(building, worker))?;
        let identity = Identity { worker, workers: wanted.workers, capacity: wanted.capacity, boot: wanted.boot };
        tables.push(Sessions::in_region(&mut region, identity, wanted.timeouts, *key)?.0);
        locks.push(region);
        step();
    }
    let migrated = migrate(former, &mut tables, wanted.now);
    step();
    Ok(migrated)
}

/// There is room for one set of files only: the sessions are in memory while the former ones make room for the new ones.
fn without_room(
    wanted: &Wanted<'_>,
    former: Vec<Sessions>,
    locks: Vec<Region>,
    error: &MigrateError,
    step: &mut dyn FnMut(),
) -> Result<(Prepared, Migrated), MigrateError> {
    let why = "no room for new files beside the former ones, which are removed first: until the sessions are in the new ones, a crash would lose them";
    tracing::warn!(event = "state_no_room", %error, "{why}");
    let tables = wanted.keys.iter().map(|key| Sessions::new(wanted.capacity, wanted.timeouts, *key));
    let mut in_process = tables.collect::<Result<Vec<_>, _>>()?;
    let migrated = migrate(&former, &mut in_process, wanted.now);
    remove_files(&worker_files(wanted.folder))?;
    // There is room when nobody has them open any more.
    drop((former, locks));
    match make_files(wanted, &in_process, step) {
        Ok(_) => Ok((Prepared::Files, migrated)),
        Err(error) if is_no_room(&error) => {
            tracing::error!(event = "state_lost", %error, "sessions will end with the process: make room and restart");
            Ok((Prepared::InProcess(in_process), migrated))
        }
        Err(error) => Err(error),
    }
}

/// Puts complete files in the place of former ones, from wherever a process stopped to do so.
fn finish(folder: &Path, step: &mut dyn FnMut()) -> Result<(), MigrateError> {
    let (migrated, moving) = (folder.join(MIGRATED), folder.join(MOVING));
    if migrated.exists() {
        for file in worker_files(folder) {
            remove_files(&[file])?;
            step();
        }
        rename(&migrated, &moving)?;
        step();
    }
    if moving.exists() {
        for file in worker_files(&moving) {
            let to = file.file_name().map_or_else(|| folder.to_owned(), |name| folder.join(name));
            rename(&file, &to)?;
            step();
        }
        remove_folder(&moving)?;
        step();
    }
    Ok(())
}

fn log(wanted: &Wanted<'_>, former: &[Identity], migrated: Migrated, begun: Instant) {
    let Migrated { active, standby, quarantined, dropped, torn } = migrated;
    // Each file says how many there were; a former change that stopped half-way may have left others.
    let from_workers = former.iter().map(|identity| identity.workers).max().unwrap_or_default();
    let from_capacity: u64 = former.iter().map(|identity| u64::from(identity.capacity)).sum();
    let (workers, capacity) = (wanted.workers, u64::from(wanted.workers) * u64::from(wanted.capacity));
    let ms = begun.elapsed().as_millis() as u64;
    tracing::info!(
        event = "state_migrated",
        from_workers,
        workers,
        from_capacity,
        capacity,
        sessions = active,
        standby,
        quarantined,
        dropped,
        torn,
        ms,
        "sessions migrated to other tables"
    );
    if dropped > 0 {
        let why = "sessions have no place in the new tables; those seen last were taken first";
        tracing::warn!(event = "state_dropped", sessions = dropped, capacity, "{why}");
    }
}

fn is_no_room(error: &MigrateError) -> bool {
    match error {
        MigrateError::Region(error) | MigrateError::Storage(StorageError::Region(error)) => {
            matches!(error, RegionError::NoRoom { .. })
        }
        MigrateError::Storage(StorageError::Memory(_)) | MigrateError::Folder { .. } => false,
    }
}

/// The files of workers in a folder, if it is there.
fn worker_files(folder: &Path) -> Vec<PathBuf> {
    let is_worker = |path: &PathBuf| {
        path.is_file() && path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("worker-"))
    };
    let files = fs::read_dir(folder).into_iter().flatten().flatten().map(|file| file.path());
    let mut files: Vec<_> = files.filter(is_worker).collect();
    files.sort();
    files
}

fn lock_all(files: &[PathBuf]) -> Result<Vec<Region>, MigrateError> {
    Ok(files.iter().map(|file| lock(file)).collect::<Result<_, _>>()?)
}

fn failed(path: &Path, source: io::Error) -> MigrateError {
    MigrateError::Folder { path: path.into(), source }
}

fn remove_files(files: &[PathBuf]) -> Result<(), MigrateError> {
    files.iter().try_for_each(|file| fs::remove_file(file).map_err(|source| failed(file, source)))
}

fn remove_folder(folder: &Path) -> Result<(), MigrateError> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(folder, error)),
        _ => Ok(()),
    }
}

fn rename(from: &Path, to: &Path) -> Result<(), MigrateError> {
    fs::rename(from, to).map_err(|source| failed(from, source))
}
