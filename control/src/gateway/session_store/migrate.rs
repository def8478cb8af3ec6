//! Migration of stored sessions to another number of workers or another table capacity: new files are written beside
//! the old ones, then replace them. Crash-safe: at each moment one set of files is complete, and the next start resumes
//! from it.
//!
//! ```text
//!   worker-*             old tables; read only
//!   migrating/worker-*   incomplete new tables: the next start writes them again
//!   migrated/worker-*    complete new tables (directory renamed); the old ones are removed
//!   moving/worker-*      the old tables are removed (directory renamed again); each file moves to its final path
//! ```

use std::path::{Path, PathBuf};
use std::time::Instant;
use std::{fs, io};

use vipgate_dataplane::flow::time::Tick;
use vipgate_dataplane::flow::tuple::HashKey;
use vipgate_dataplane::session::Sessions;
use vipgate_dataplane::session::migrate::{Migrated, migrate};
use vipgate_dataplane::session::persistence::{FormerError, Identity, open_former};
use vipgate_dataplane::session::timeout::Timeouts;
use vipgate_mem::{Region, RegionLock, StorageError};

use super::directory::is_full;
use super::{all_files, lock_region, worker_file};
use crate::command_error::CommandError;

const MIGRATING: &str = "migrating";
const MIGRATED: &str = "migrated";
const MOVING: &str = "moving";

/// The layout to migrate to.
pub(super) struct MigrationTarget<'a> {
    pub(super) directory: &'a Path,
    pub(super) boot: [u8; 16],
    pub(super) workers: u32,
    /// Capacity of each worker's table, sessions.
    pub(super) capacity: u32,
    pub(super) timeouts: Timeouts,
    /// A new hash key for each table.
    pub(super) keys: Vec<HashKey>,
    pub(super) now: Tick,
}

/// Where the tables are after [`prepare`].
#[derive(Debug)]
pub(super) enum MigrationOutcome {
    /// In files of the target layout, or there are none.
    Files,
    /// In memory: there is no space for files.
    InMemory(Vec<Sessions>),
}

/// An error of the migration.
#[derive(Debug, thiserror::Error)]
pub(super) enum MigrateError {
    #[error(transparent)]
    Storage(#[from] StorageError),
    #[error("cannot read or change {path}: {source}")]
    Directory { path: PathBuf, source: io::Error },
}

impl MigrateError {
    /// Whether another process holds a file lock.
    pub(super) fn is_in_use(&self) -> bool {
        matches!(self, Self::Storage(StorageError::InUse { .. }))
    }
}

impl From<MigrateError> for CommandError {
    fn from(error: MigrateError) -> Self {
        Self::input(error).context("sessions.state")
    }
}

/// Finishes an interrupted migration, then migrates tables of another layout. `step` is called at each crash point:
/// after each change from which a restart would resume differently.
pub(super) fn prepare(target: &MigrationTarget<'_>, step: &mut dyn FnMut()) -> Result<MigrationOutcome, MigrateError> {
    let directory = target.directory;
    // Locked against another process that migrates.
    let unfinished = lock_all(&all_files(directory).map_err(|source| failed(directory, source))?)?;
    remove_directory(&directory.join(MIGRATING))?;
    finish(directory, step)?;
    drop(unfinished);
    let FormerTables { readable, unusable, locks } = read(target, lock_all(&worker_files(directory)?)?);
    let fits = |identity: &Identity| {
        identity.worker < target.workers && (identity.workers, identity.capacity) == (target.workers, target.capacity)
    };
    if readable.iter().all(|(_, identity)| fits(identity)) {
        return Ok(MigrationOutcome::Files);
    }
    report_unusable(&unusable);
    let start = Instant::now();
    let (readable, identities): (Vec<_>, Vec<_>) = readable.into_iter().unzip();
    let (prepared, migrated) = match write_files(target, &readable, step) {
        Ok(migrated) => (MigrationOutcome::Files, migrated),
        Err(error) if is_no_space(&error) => migrate_in_memory(target, readable, locks, &error, step)?,
        Err(error) => return Err(error),
    };
    if matches!(prepared, MigrationOutcome::Files) {
        finish(directory, step)?;
    }
    log(target, &identities, migrated, start);
    Ok(prepared)
}

/// The tables of a previous process. Those of a worker that had none yet are neither readable nor unusable.
struct FormerTables {
    readable: Vec<(Sessions, Identity)>,
    /// Files that can't be read, and why.
    unusable: Vec<(PathBuf, FormerError)>,
    locks: Vec<RegionLock>,
}

fn read(target: &MigrationTarget<'_>, regions: Vec<Region>) -> FormerTables {
    let mut found = FormerTables { readable: Vec::new(), unusable: Vec::new(), locks: Vec::new() };
    for region in regions {
        found.locks.push(region.lock());
        if region.is_empty() {
            continue;
        }
        let path = region.path().to_owned();
        match open_former(region, target.boot) {
            Ok(tables) => found.readable.push(tables),
            Err(error) => found.unusable.push((path, error)),
        }
    }
    found
}

/// Logs the files that can't be read and are discarded.
fn report_unusable(files: &[(PathBuf, FormerError)]) {
    for (file, reason) in files {
        let file = file.display();
        tracing::warn!(event = "state_unusable", %file, %reason, "sessions in this file are discarded");
    }
}

/// Writes complete new files from the old tables, up to the `migrated` directory.
fn write_files(
    target: &MigrationTarget<'_>,
    old: &[Sessions],
    step: &mut dyn FnMut(),
) -> Result<Migrated, MigrateError> {
    let building = target.directory.join(MIGRATING);
    let result = fill(target, &building, old, step);
    if result.is_err() {
        // Free the space allocated so far.
        remove_directory(&building)?;
    }
    let migrated = result?;
    rename(&building, &target.directory.join(MIGRATED))?;
    step();
    Ok(migrated)
}

fn fill(
    target: &MigrationTarget<'_>,
    building: &Path,
    old: &[Sessions],
    step: &mut dyn FnMut(),
) -> Result<Migrated, MigrateError> {
    fs::create_dir_all(building).map_err(|source| failed(building, source))?;
    step();
    let mut tables = Vec::new();
    for (worker, key) in (0..target.workers).zip(&target.keys) {
        let region = Region::open(&worker_file(building, worker))?;
        let identity = Identity { worker, workers: target.workers, capacity: target.capacity, boot: target.boot };
        tables.push(Sessions::in_region(region, identity, target.timeouts, *key)?.0);
        step();
    }
    let migrated = migrate(old, &mut tables, target.now);
    step();
    Ok(migrated)
}

/// Migrates where there is space for one set of files only: the sessions are in memory while the old files are
/// replaced.
fn migrate_in_memory(
    target: &MigrationTarget<'_>,
    old: Vec<Sessions>,
    locks: Vec<RegionLock>,
    error: &MigrateError,
    step: &mut dyn FnMut(),
) -> Result<(MigrationOutcome, Migrated), MigrateError> {
    tracing::warn!(
        event = "state_no_room",
        %error,
        "no space for new files beside the old ones, which are removed first: a crash now would lose the sessions"
    );
    let tables = target.keys.iter().map(|key| Sessions::new(target.capacity, target.timeouts, *key));
    let mut in_memory = tables.collect::<Result<Vec<_>, _>>()?;
    let migrated = migrate(&old, &mut in_memory, target.now);
    remove_files(&worker_files(target.directory)?)?;
    // Their space is free once they are closed.
    drop((old, locks));
    match write_files(target, &in_memory, step) {
        Ok(_) => Ok((MigrationOutcome::Files, migrated)),
        Err(error) if is_no_space(&error) => {
            tracing::error!(event = "state_lost", %error, "no space to store sessions: free memory and restart");
            Ok((MigrationOutcome::InMemory(in_memory), migrated))
        }
        Err(error) => Err(error),
    }
}

/// Replaces the old files by complete new ones; resumes where a previous process stopped.
fn finish(directory: &Path, step: &mut dyn FnMut()) -> Result<(), MigrateError> {
    let (migrated, moving) = (directory.join(MIGRATED), directory.join(MOVING));
    if exists(&migrated)? {
        for file in worker_files(directory)? {
            remove_files(&[file])?;
            step();
        }
        rename(&migrated, &moving)?;
        step();
    }
    if exists(&moving)? {
        for file in worker_files(&moving)? {
            let to = file.file_name().map_or_else(|| directory.to_owned(), |name| directory.join(name));
            rename(&file, &to)?;
            step();
        }
        remove_directory(&moving)?;
        step();
    }
    Ok(())
}

fn log(target: &MigrationTarget<'_>, old: &[Identity], migrated: Migrated, start: Instant) {
    let Migrated { active, standby, quarantined, dropped, torn } = migrated;
    // Each file records the number of workers; an interrupted migration may have left files of another number.
    let from_workers = old.iter().map(|identity| identity.workers).max().unwrap_or_default();
    let from_capacity: u64 = old.iter().map(|identity| u64::from(identity.capacity)).sum();
    let (workers, capacity) = (target.workers, u64::from(target.workers) * u64::from(target.capacity));
    let ms = start.elapsed().as_millis() as u64;
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
        "sessions migrated to new tables"
    );
    if dropped > 0 {
        tracing::warn!(
            event = "state_dropped",
            sessions = dropped,
            capacity,
            "not all sessions fit into the new tables; the least recently used are dropped"
        );
    }
}

fn is_no_space(error: &MigrateError) -> bool {
    match error {
        MigrateError::Storage(error) => matches!(error, StorageError::NoSpace { .. }),
        MigrateError::Directory { source, .. } => is_full(source),
    }
}

/// The worker files in a directory, sorted. A directory that can't be read isn't an empty one: its sessions would be
/// lost.
pub(super) fn worker_files(directory: &Path) -> Result<Vec<PathBuf>, MigrateError> {
    let failed = |source| failed(directory, source);
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let is_file = entry.file_type().map_err(failed)?.is_file();
        if is_file && entry.file_name().to_string_lossy().starts_with("worker-") {
            files.push(entry.path());
        }
    }
    files.sort();
    Ok(files)
}

fn exists(path: &Path) -> Result<bool, MigrateError> {
    path.try_exists().map_err(|source| failed(path, source))
}

fn lock_all(files: &[PathBuf]) -> Result<Vec<Region>, MigrateError> {
    Ok(files.iter().map(|file| lock_region(file)).collect::<Result<_, _>>()?)
}

fn failed(path: &Path, source: io::Error) -> MigrateError {
    MigrateError::Directory { path: path.into(), source }
}

fn remove_files(files: &[PathBuf]) -> Result<(), MigrateError> {
    files.iter().try_for_each(|file| fs::remove_file(file).map_err(|source| failed(file, source)))
}

fn remove_directory(directory: &Path) -> Result<(), MigrateError> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(directory, error)),
        _ => Ok(()),
    }
}

fn rename(from: &Path, to: &Path) -> Result<(), MigrateError> {
    fs::rename(from, to).map_err(|source| failed(from, source))
}
