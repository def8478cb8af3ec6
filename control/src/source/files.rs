//! Files as a policy source: a full update first, then the files whose content has changed.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::mpsc;
use vipgate_policy::fingerprint::Fingerprint;

use super::{EntryError, SourceEvent, SourceUpdate, UnavailablePath};
use crate::source::file_watcher::FileWatcher;
use crate::source::manifest_files::{Content, ContentCache, Walk, walk};
use crate::text_file::regular_text;

/// Watches files and directories until the receiver is dropped.
pub async fn watch_paths(paths: Vec<PathBuf>, events: mpsc::Sender<SourceEvent>) {
    // Watched before they are read, so no change in between is missed.
    let mut follower = FileWatcher::new(paths.clone());
    let mut reader = FileReader::new(paths);
    loop {
        let outcome = tokio::task::spawn_blocking(move || {
            let update = reader.read();
            (reader, update)
        });
        // Fails when the runtime shuts down.
        let Ok((after, update)) = outcome.await else { return };
        reader = after;
        if events.send(SourceEvent::Update(update)).await.is_err() {
            return;
        }
        tokio::select! {
            _ = follower.changed() => {}
            () = events.closed() => return,
        }
    }
}

/// Reads files and directories repeatedly; an update has the differences from the previous read.
#[derive(Debug, Default)]
pub struct FileReader {
    paths: Vec<PathBuf>,
    /// Fingerprints of reported files by path; `None`: unavailable since.
    reported: BTreeMap<Arc<str>, Option<u64>>,
    contents: ContentCache,
    has_read: bool,
}

impl FileReader {
    /// A reader whose first read returns a full update.
    pub fn new(paths: Vec<PathBuf>) -> Self {
        Self { paths, ..Self::default() }
    }

    /// Reads everything; returns the differences from the previous read.
    pub fn read(&mut self) -> SourceUpdate {
        let found = walk(&self.paths);
        let mut now: BTreeMap<Arc<str>, Option<u64>> = BTreeMap::new();
        let mut changed = Vec::new();
        let mut report = |path: &Path, fingerprint: u64, text: &mut dyn FnMut() -> Result<String, EntryError>| {
            let name: Arc<str> = path.display().to_string().into();
            now.insert(name.clone(), Some(fingerprint));
            if self.reported.get(&name) != Some(&Some(fingerprint)) {
                changed.push((name, text()));
            }
        };
        for path in &found.files {
            match self.contents.read(path) {
                // The cache rereads a file only when its metadata has changed.
                Ok(Content::Read(fingerprint, bytes)) => {
                    let text =
                        || String::from_utf8(bytes.clone()).map_err(|error| EntryError::NotUtf8(error.utf8_error()));
                    report(path, fingerprint, &mut { text });
                }
                Ok(Content::Unchanged(fingerprint)) => {
                    report(path, fingerprint, &mut || regular_text(path).map_err(EntryError::from));
                }
                Err(error) => {
                    let error = EntryError::from(error);
                    report(path, Fingerprint::of(error.to_string().as_bytes()), &mut || Err(error.clone()));
                }
            }
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
        let whole = !std::mem::replace(&mut self.has_read, true);
        SourceUpdate { full: whole, changed, removed, unavailable }
    }

    /// The paths that could not be read.
    fn unavailable(&self, found: &Walk) -> Vec<UnavailablePath> {
        let each = found.errors.iter().map(|(path, error)| {
            let named = self.paths.contains(path);
            let missing = named && error.kind() == io::ErrorKind::NotFound;
            let reason = if missing { "is missing".to_owned() } else { format!("can't be read: {error}") };
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
mod tests {
    use std::fs::{remove_file, write};
    use std::time::Duration;

    use super::*;

    async fn next(events: &mut mpsc::Receiver<SourceEvent>) -> SourceUpdate {
        match tokio::time::timeout(Duration::from_secs(5), events.recv()).await {
            Ok(Some(SourceEvent::Update(update))) => update,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn a_full_update_is_sent_first_and_then_the_changes() {
        let outer = tempfile::tempdir().unwrap();
        let dir = outer.path().join("policy");
        std::fs::create_dir(&dir).unwrap();
        let at = |name: &str| dir.join(name);
        let name = |file: &str| -> Arc<str> { at(file).display().to_string().into() };
        write(at("a.yaml"), "1").unwrap();
        write(at("b.yaml"), "2").unwrap();
        let (sender, mut events) = mpsc::channel(4);
        let task = tokio::spawn(watch_paths(vec![dir.clone()], sender));
        let first = next(&mut events).await;
        assert!(first.full && first.removed.is_empty());
        assert_eq!(first.changed, [(name("a.yaml"), Ok("1".into())), (name("b.yaml"), Ok("2".into()))]);
        write(at("b.yaml"), "3").unwrap();
        let second = next(&mut events).await;
        assert_eq!(
            second,
            SourceUpdate { full: false, changed: vec![(name("b.yaml"), Ok("3".into()))], ..SourceUpdate::default() }
        );
        remove_file(at("a.yaml")).unwrap();
        assert_eq!(next(&mut events).await.removed, [name("a.yaml")]);
        write(at("b.yaml"), [0xff, 0xfe]).unwrap();
        let broken = next(&mut events).await;
        assert!(broken.changed[0].1.as_ref().is_err_and(|error| error.to_string().contains("utf-8")), "{broken:?}");
        drop(events);
        task.await.unwrap();
    }
}
