//! Files as a policy source: a full update first, then the files whose content has changed.
//!
//! Only content counts: a file that was touched, or replaced by an identical one, is no change. Where an event names one
//! regular file in a directory without symlinks, that file alone is read. Anything else is a scan of everything, so
//! directories that appear later and the `..data` symlink of a `ConfigMap` need no special case.

mod layout;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::mpsc;
use vipgate_common::spawn_blocking;
use vipgate_policy::fingerprint::Fingerprint;

use self::layout::{Layout, Suspect};
use super::{EntryContent, SourceEvent, SourceUpdate, UnavailablePath};
use crate::command_error::may_pass;
use crate::source::file_watcher::{FileWatcher, Suspects, watch_directories};
use crate::source::manifest_files::{Content, ContentCache, FileStamp, Walk, walk};

/// Watches files and directories until the receiver is dropped.
pub async fn watch_paths(paths: Vec<PathBuf>, events: mpsc::Sender<SourceEvent>) {
    let mut files = WatchedFiles::new(paths);
    let mut suspects = Suspects::All;
    loop {
        if let Some(update) = files.refresh(suspects).await
            && events.send(SourceEvent::Update(update)).await.is_err()
        {
            return;
        }
        suspects = tokio::select! {
            suspects = files.suspects() => suspects,
            () = events.closed() => return,
        };
    }
}

/// Files and directories with the watcher that tells when to read them.
#[derive(Debug)]
pub struct WatchedFiles {
    reader: FileReader,
    watcher: Option<FileWatcher>,
}

impl WatchedFiles {
    /// Watches paths. They are watched before they are read, so no change in between is missed.
    pub fn new(paths: Vec<PathBuf>) -> Self {
        let mut watcher = FileWatcher::new();
        watcher.watch(&watch_directories(&paths, &walk(&paths)));
        Self { watcher: Some(watcher), ..Self::unwatched(paths) }
    }

    /// Paths that are read only on request.
    pub fn unwatched(paths: Vec<PathBuf>) -> Self {
        Self { reader: FileReader::new(paths), watcher: None }
    }

    /// Waits until files may have changed; forever if they aren't watched. Cancel safe.
    pub async fn suspects(&mut self) -> Suspects {
        match &mut self.watcher {
            Some(watcher) => watcher.next().await,
            None => std::future::pending().await,
        }
    }

    /// Reads everything; returns the differences from the previous read.
    pub async fn read(&mut self) -> SourceUpdate {
        let (update, directories) = self.on_blocking_thread(|reader| (reader.read(), reader.directories())).await;
        self.watch(&directories, !update.full && !update.is_empty());
        self.note_reads(&update, true);
        update
    }

    /// Reads what may have changed; returns the differences from the previous read, if there are any. Not cancel safe.
    pub async fn refresh(&mut self, suspects: Suspects) -> Option<SourceUpdate> {
        let is_partial = |reader: &mut FileReader| match suspects {
            Suspects::All => None,
            Suspects::Files(files) => reader.read_only(&files),
        };
        let read = self.on_blocking_thread(|reader| {
            let (before, had_failed_reads) = (reader.unavailable.clone(), reader.has_failed_reads);
            let (update, directories) = match is_partial(reader) {
                Some(update) => (update, None),
                None => (reader.read(), Some(reader.directories())),
            };
            let is_changed = !update.is_empty() || update.has_failed_reads != had_failed_reads;
            let differs = update.full || is_changed || reader.unavailable != before;
            (update, directories, differs)
        });
        let (update, directories, differs) = read.await;
        if let Some(directories) = &directories {
            self.watch(directories, !update.full && differs);
        }
        self.note_reads(&update, directories.is_some());
        differs.then_some(update)
    }

    /// Has what couldn't be read now read again soon.
    fn note_reads(&mut self, update: &SourceUpdate, is_scan: bool) {
        if let Some(watcher) = &mut self.watcher {
            watcher.note_reads(update.has_failed_reads, is_scan);
        }
    }

    /// Watches the directories that the last scan found.
    fn watch(&mut self, directories: &BTreeSet<PathBuf>, has_changed: bool) {
        let Some(watcher) = &mut self.watcher else { return };
        if watcher.watch(directories) || has_changed {
            // Another scan finds what was written to a new directory before it was watched.
            watcher.request_scan();
        }
    }

    async fn on_blocking_thread<T: Send + 'static>(
        &mut self,
        work: impl FnOnce(&mut FileReader) -> T + Send + 'static,
    ) -> T {
        let mut reader = std::mem::take(&mut self.reader);
        let task = spawn_blocking(move || {
            let output = work(&mut reader);
            (reader, output)
        });
        let (reader, output) = task.await;
        self.reader = reader;
        output
    }
}

/// Reads files and directories repeatedly; an update has the differences from the previous read.
#[derive(Debug, Default)]
pub struct FileReader {
    paths: Vec<PathBuf>,
    /// Fingerprints of reported files by path; `None`: unavailable since.
    reported: BTreeMap<Arc<str>, Option<u64>>,
    /// The unavailable paths of the last update.
    unavailable: Vec<UnavailablePath>,
    contents: ContentCache,
    /// The directories to watch.
    directories: BTreeSet<PathBuf>,
    /// Where single files are; `None`: a change needs a scan of everything.
    layout: Option<Layout>,
    has_read: bool,
    /// Whether a read has failed since the last scan began, for a reason that may pass.
    has_failed_reads: bool,
}

impl FileReader {
    /// A reader whose first read returns a full update.
    pub fn new(paths: Vec<PathBuf>) -> Self {
        Self { paths, ..Self::default() }
    }

    /// The directories to watch for changes.
    fn directories(&self) -> BTreeSet<PathBuf> {
        self.directories.clone()
    }

    /// Reads everything; returns the differences from the previous read.
    pub fn read(&mut self) -> SourceUpdate {
        let found = walk(&self.paths);
        self.has_failed_reads = found.errors.iter().any(|(_, error)| may_pass(error));
        let mut now: BTreeMap<Arc<str>, Option<u64>> = BTreeMap::new();
        let mut changed = Vec::new();
        for (path, stamp) in found.files.iter().zip(&found.stamps) {
            let name: Arc<str> = path.display().to_string().into();
            let fingerprint = self.read_file(path, &name, *stamp, &mut changed);
            now.insert(name, Some(fingerprint));
        }
        self.contents.retain(&found.files);
        let mut unavailable = self.unavailable(&found);
        let mut removed = Vec::new();
        for name in self.reported.keys().filter(|name| !now.contains_key(*name)).cloned().collect::<Vec<_>>() {
            let is_unavailable = unavailable.iter().any(|it| it.covers(&name));
            if let Some(directory) = missing_directory(&name).filter(|_| !is_unavailable) {
                unavailable.push(directory);
            } else if !is_unavailable {
                removed.push(name);
                continue;
            }
            now.insert(name, None);
        }
        self.reported = now;
        self.unavailable.clone_from(&unavailable);
        self.directories = watch_directories(&self.paths, &found);
        self.layout = if unavailable.is_empty() { Layout::new(&self.paths, found) } else { None };
        let whole = !std::mem::replace(&mut self.has_read, true);
        let has_failed_reads = self.has_failed_reads;
        SourceUpdate { full: whole, changed, removed, unavailable, revision: 0, has_failed_reads }
    }

    /// Reads these files only; returns the differences from the previous read. `None`: more than these files may have
    /// changed.
    fn read_only(&mut self, suspects: &BTreeSet<PathBuf>) -> Option<SourceUpdate> {
        let layout = self.layout.as_ref()?;
        // All of them first: if one needs a scan, none may be taken as reported.
        let resolved = suspects.iter().map(|path| layout.resolve(path)).collect::<Option<Vec<Suspect>>>()?;
        let mut layout = self.layout.take()?;
        let mut update = SourceUpdate::default();
        for suspect in resolved {
            match suspect {
                Suspect::Irrelevant => {}
                Suspect::File(path, stamp) => {
                    let name: Arc<str> = path.display().to_string().into();
                    layout.insert(&path, stamp);
                    let fingerprint = self.read_file(&path, &name, stamp, &mut update.changed);
                    self.reported.insert(name, Some(fingerprint));
                }
                Suspect::Removed(path) => {
                    let name: Arc<str> = path.display().to_string().into();
                    layout.remove(&path);
                    self.contents.remove(&path);
                    self.reported.remove(&name);
                    update.removed.push(name);
                }
            }
        }
        self.layout = Some(layout);
        update.has_failed_reads = self.has_failed_reads;
        Some(update)
    }

    /// Reads a file, and reports it if its content has changed. Returns its fingerprint.
    fn read_file(
        &mut self,
        path: &Path,
        name: &Arc<str>,
        stamp: FileStamp,
        changed: &mut Vec<(Arc<str>, Result<EntryContent, String>)>,
    ) -> u64 {
        let reported = self.reported.get(name).copied().flatten();
        // The cache rereads a file only when its metadata has changed.
        let (fingerprint, content) = match self.contents.read(path, stamp, reported) {
            Ok(Content::Unchanged(fingerprint)) => return fingerprint,
            Ok(Content::Read(fingerprint, _)) if reported == Some(fingerprint) => return fingerprint,
            Ok(Content::Read(fingerprint, bytes)) => {
                let text = String::from_utf8(bytes).map_err(|error| unreadable(error.utf8_error()));
                (fingerprint, text.map(EntryContent::Text))
            }
            Err(error) => {
                self.has_failed_reads |= may_pass(&error);
                let reason = unreadable(error);
                (Fingerprint::of(reason.as_bytes()), Err(reason))
            }
        };
        if reported != Some(fingerprint) {
            changed.push((name.clone(), content));
        }
        fingerprint
    }

    /// The paths that could not be read.
    fn unavailable(&self, found: &Walk) -> Vec<UnavailablePath> {
        let each = found.errors.iter().map(|(path, error)| {
            let named = self.paths.contains(path);
            let missing = named && error.kind() == io::ErrorKind::NotFound;
            let reason = if missing { "is missing".to_owned() } else { unreadable(error) };
            UnavailablePath {
                path: path.display().to_string().into(),
                reason,
                is_missing: missing,
                is_configured: named,
            }
        });
        each.collect()
    }
}

/// Why there is no content of a path.
fn unreadable(error: impl Display) -> String {
    format!("can't be read: {error}")
}

/// The topmost missing directory above a file.
fn missing_directory(name: &str) -> Option<UnavailablePath> {
    let is_missing = |directory: &&Path| {
        !directory.as_os_str().is_empty()
            && directory.metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
    };
    let directory = Path::new(name).ancestors().skip(1).take_while(is_missing).last()?;
    let place = directory.display().to_string().into();
    Some(UnavailablePath { path: place, reason: "is missing".to_owned(), is_missing: true, is_configured: false })
}

#[cfg(test)]
mod tests;
