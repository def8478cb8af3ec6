//! Files as a source: all of them at first, then those whose content has changed.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::mpsc;

use super::{Event, Hidden, Update};
use crate::manifest::files::{Content, Contents, Walk, walk};
use crate::policy::{Fingerprint, Follower};
use crate::text_file::regular_text;

/// Follows files and directories until nobody listens any more.
pub async fn follow(paths: Vec<PathBuf>, events: mpsc::Sender<Event>) {
    // Followed first, read then: what changes in between is not missed.
    let mut follower = Follower::new(paths.clone());
    let mut reader = Reader::new(paths);
    loop {
        let outcome = tokio::task::spawn_blocking(move || {
            let update = reader.read();
            (reader, update)
        });
        // The runtime goes down.
        let Ok((after, update)) = outcome.await else { return };
        reader = after;
        if events.send(Event::Update(update)).await.is_err() {
            return;
        }
        tokio::select! {
            _ = follower.changed() => {}
            () = events.closed() => return,
        }
    }
}

/// Reads files and directories, again and again: what differs from the reading before is the update.
#[derive(Debug, Default)]
pub struct Reader {
    paths: Vec<PathBuf>,
    /// Fingerprints of what was told, by path; none of what was hidden since.
    told: BTreeMap<Arc<str>, Option<u64>>,
    contents: Contents,
    any: bool,
}

impl Reader {
    /// A reader that has read nothing yet.
    pub fn new(paths: Vec<PathBuf>) -> Self {
        Self { paths, ..Self::default() }
    }

    /// Looks at everything; what differs from what was told before is the update.
    pub fn read(&mut self) -> Update {
        let found = walk(&self.paths);
        let mut now: BTreeMap<Arc<str>, Option<u64>> = BTreeMap::new();
        let mut changed = Vec::new();
        let mut note = |path: &Path, print: u64, text: &mut dyn FnMut() -> Result<String, String>| {
            let name: Arc<str> = path.display().to_string().into();
            now.insert(name.clone(), Some(print));
            if self.told.get(&name) != Some(&Some(print)) {
                changed.push((name, text()));
            }
        };
        for path in &found.files {
            match self.contents.of(path) {
                // What has been read is told if it differs; what hasn't is what it was, so it doesn't.
                Ok(Content::Read(print, bytes)) => {
                    let text = || String::from_utf8(bytes.clone()).map_err(|error| unreadable(&error));
                    note(path, print, &mut { text });
                }
                Ok(Content::Same(print)) => {
                    note(path, print, &mut || regular_text(path).map_err(|error| unreadable(&error)));
                }
                Err(error) => {
                    let reason = unreadable(&error);
                    note(path, Fingerprint::of(reason.as_bytes()), &mut || Err(reason.clone()));
                }
            }
        }
        self.contents.keep(&found.files);
        let mut hidden = self.hidden(&found);
        let mut gone = Vec::new();
        for name in self.told.keys().filter(|name| !now.contains_key(*name)).cloned().collect::<Vec<_>>() {
            let is_hidden = hidden.iter().any(|it| it.hides(&name));
            if let Some(folder) = missing_folder(&name).filter(|_| !is_hidden) {
                hidden.push(folder);
            } else if !is_hidden {
                gone.push(name);
                continue;
            }
            now.insert(name, None);
        }
        self.told = now;
        let whole = !std::mem::replace(&mut self.any, true);
        Update { whole, changed, gone, hidden }
    }

    /// What could not be looked into.
    fn hidden(&self, found: &Walk) -> Vec<Hidden> {
        let each = found.failures.iter().map(|(path, error)| {
            let named = self.paths.contains(path);
            let missing = named && error.kind() == io::ErrorKind::NotFound;
            let reason = if missing { "is missing".to_owned() } else { unreadable(error) };
            Hidden { place: path.display().to_string().into(), reason, missing, named }
        });
        each.collect()
    }
}

fn unreadable(error: &dyn std::fmt::Display) -> String {
    format!("can't be read: {error}")
}

/// The folder that a file was in, as far up as it isn't there any more.
fn missing_folder(name: &str) -> Option<Hidden> {
    let is_missing = |folder: &&Path| {
        !folder.as_os_str().is_empty() && folder.metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
    };
    let folder = Path::new(name).ancestors().skip(1).take_while(is_missing).last()?;
    let place = folder.display().to_string().into();
    Some(Hidden { place, reason: "is missing".to_owned(), missing: true, named: false })
}

#[cfg(test)]
mod tests {
    use std::fs::{remove_file, write};
    use std::time::Duration;

    use super::*;

    async fn next(events: &mut mpsc::Receiver<Event>) -> Update {
        match tokio::time::timeout(Duration::from_secs(5), events.recv()).await {
            Ok(Some(Event::Update(update))) => update,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn all_is_told_first_and_then_what_differs() {
        let outer = tempfile::tempdir().unwrap();
        let dir = outer.path().join("policy");
        std::fs::create_dir(&dir).unwrap();
        let at = |name: &str| dir.join(name);
        let name = |file: &str| -> Arc<str> { at(file).display().to_string().into() };
        write(at("a.yaml"), "1").unwrap();
        write(at("b.yaml"), "2").unwrap();
        let (sender, mut events) = mpsc::channel(4);
        let task = tokio::spawn(follow(vec![dir.clone()], sender));
        let first = next(&mut events).await;
        assert!(first.whole && first.gone.is_empty());
        assert_eq!(first.changed, [(name("a.yaml"), Ok("1".into())), (name("b.yaml"), Ok("2".into()))]);
        write(at("b.yaml"), "3").unwrap();
        let second = next(&mut events).await;
        assert_eq!(
            second,
            Update { whole: false, changed: vec![(name("b.yaml"), Ok("3".into()))], ..Update::default() }
        );
        remove_file(at("a.yaml")).unwrap();
        assert_eq!(next(&mut events).await.gone, [name("a.yaml")]);
        write(at("b.yaml"), [0xff, 0xfe]).unwrap();
        let broken = next(&mut events).await;
        assert!(broken.changed[0].1.as_ref().is_err_and(|error| error.contains("utf-8")), "{broken:?}");
        drop(events);
        task.await.unwrap();
    }
}
