//! Files as a source: all of them at first, then those whose content has changed.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::mpsc;

use super::{Event, Update};
use crate::manifest::files::{Content, Contents, walk};
use crate::policy::{Fingerprint, Follower};

/// Follows files and directories until nobody listens any more.
pub async fn follow(paths: Vec<PathBuf>, events: mpsc::Sender<Event>) {
    // Followed first, read then: what changes in between is not missed.
    let mut follower = Follower::new(paths.clone());
    let mut known = Known::default();
    loop {
        let read = paths.clone();
        let outcome = tokio::task::spawn_blocking(move || {
            let update = known.read(&read);
            (known, update)
        });
        // The runtime goes down.
        let Ok((after, update)) = outcome.await else { return };
        known = after;
        if events.send(Event::Update(update)).await.is_err() {
            return;
        }
        tokio::select! {
            _ = follower.changed() => {}
            () = events.closed() => return,
        }
    }
}

/// Fingerprints of what was told, by path.
#[derive(Debug, Default)]
struct Known {
    told: BTreeMap<Arc<str>, u64>,
    contents: Contents,
    any: bool,
}

impl Known {
    /// Looks at everything; what differs from what was told before is the update.
    fn read(&mut self, paths: &[PathBuf]) -> Update {
        let found = walk(paths);
        let mut now = BTreeMap::new();
        let mut changed = Vec::new();
        let mut note = |path: &Path, print: u64, text: &mut dyn FnMut() -> Result<String, String>| {
            let name: Arc<str> = path.display().to_string().into();
            now.insert(name.clone(), print);
            if self.told.get(&name) != Some(&print) {
                changed.push((name, text()));
            }
        };
        let unreadable = |error: &dyn std::fmt::Display| format!("can't be read: {error}");
        for (path, error) in &found.failures {
            let reason = unreadable(error);
            note(path, Fingerprint::of(reason.as_bytes()), &mut || Err(reason.clone()));
        }
        for path in &found.files {
            match self.contents.of(path) {
                // What has been read is told if it differs; what hasn't is what it was, so it doesn't.
                Ok(Content::Read(print, bytes)) => {
                    let text = || String::from_utf8(bytes.clone()).map_err(|error| unreadable(&error));
                    note(path, print, &mut { text });
                }
                Ok(Content::Same(print)) => {
                    note(path, print, &mut || std::fs::read_to_string(path).map_err(|error| unreadable(&error)));
                }
                Err(error) => {
                    let reason = unreadable(&error);
                    note(path, Fingerprint::of(reason.as_bytes()), &mut || Err(reason.clone()));
                }
            }
        }
        self.contents.keep(&found.files);
        let gone = self.told.keys().filter(|name| !now.contains_key(*name)).cloned().collect();
        self.told = now;
        let whole = !std::mem::replace(&mut self.any, true);
        Update { whole, changed, gone }
    }
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
        assert_eq!(second, Update { whole: false, changed: vec![(name("b.yaml"), Ok("3".into()))], gone: vec![] });
        remove_file(at("a.yaml")).unwrap();
        assert_eq!(next(&mut events).await.gone, [name("a.yaml")]);
        write(at("b.yaml"), [0xff, 0xfe]).unwrap();
        let broken = next(&mut events).await;
        assert!(broken.changed[0].1.as_ref().is_err_and(|error| error.contains("utf-8")), "{broken:?}");
        drop(events);
        task.await.unwrap();
    }
}
