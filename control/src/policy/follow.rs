//! Follows files: says when the manifests in them have changed.
//!
//! Notifications of the kernel make it fast, looking again every few seconds makes it sure: links swapped above what is
//! watched, network file systems, lost events. What counts is content: a file that was touched or replaced by itself is
//! no change. Editors that rename over a file, directories that appear later and a `ConfigMap`'s `..data` link are all
//! the same here: something happened near, so look again.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use notify::event::{AccessKind, AccessMode};
use notify::{Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use super::fingerprint::Fingerprint;
use crate::manifest::files::{Contents, Walk, walk};
use crate::privileges;

/// After an event, this long without another one means that the writer is done.
const QUIET: Duration = Duration::from_millis(20);
/// A writer that never pauses is looked at this often all the same.
const PATIENCE: Duration = Duration::from_millis(200);
/// How often to look without any event.
const RESCAN: Duration = Duration::from_secs(5);

/// The files are not what they were.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// Names their content; the same content has the same one.
    pub fingerprint: u64,
    /// How many files there are.
    pub files: usize,
}

/// Follows files. Begin to follow, then read them: what changes in between is told.
#[derive(Debug)]
pub struct Follower {
    paths: Vec<PathBuf>,
    last: Change,
    events: Arc<Notify>,
    watcher: Option<RecommendedWatcher>,
    watched: BTreeSet<PathBuf>,
    contents: Contents,
    rescan: Duration,
}

/// The changes of files and directories from now on, as a stream that never ends. See [`Follower`].
pub fn follow(paths: Vec<PathBuf>) -> impl Stream<Item = Change> + Send {
    futures::stream::unfold(Follower::new(paths), |mut follower| async {
        let change = follower.changed().await;
        Some((change, follower))
    })
}

impl Follower {
    /// Takes the state of the files now; [`Self::changed`] tells what differs from it. Without notifications, for which
    /// the kernel may have no room, it looks every few seconds.
    pub fn new(paths: Vec<PathBuf>) -> Self {
        let events = Arc::new(Notify::new());
        let bell = events.clone();
        // It starts a thread of its own, which needs no capability.
        let watcher = privileges::without(|| {
            notify::recommended_watcher(move |event| {
                if may_change(&event) {
                    bell.notify_one();
                }
            })
        });
        let watcher = watcher.inspect_err(|error| {
            tracing::warn!(%error, "no file notifications: changes of policy are seen every {RESCAN:?} only");
        });
        let last = Change { fingerprint: 0, files: 0 };
        let mut follower = Self {
            paths,
            last,
            events,
            watcher: watcher.ok(),
            watched: BTreeSet::new(),
            contents: Contents::default(),
            rescan: RESCAN,
        };
        // Watch first, then look: a change in between rings the bell.
        follower.watch(&places(&follower.paths, &walk(&follower.paths)));
        follower.last = look(&walk(&follower.paths), &mut follower.contents);
        follower
    }

    /// The state last seen.
    pub fn last(&self) -> Change {
        self.last
    }

    /// Waits until the content of the files differs from what it was. May be dropped and called again.
    pub async fn changed(&mut self) -> Change {
        loop {
            if tokio::time::timeout(self.rescan, self.events.notified()).await.is_ok() {
                self.wait_until_quiet().await;
            }
            let (paths, mut contents) = (self.paths.clone(), std::mem::take(&mut self.contents));
            let scan = tokio::task::spawn_blocking(move || {
                let found = walk(&paths);
                let now = look(&found, &mut contents);
                (places(&paths, &found), now, contents)
            });
            // A scan that panicked or was cancelled with the runtime is made up for by the next one, which reads everything.
            let Ok((places, now, contents)) = scan.await else { continue };
            self.contents = contents;
            if self.watch(&places) || now != self.last {
                // Whatever was written to a new place before it was watched is seen by looking once more.
                self.events.notify_one();
            }
            if now != self.last {
                self.last = now;
                return now;
            }
        }
    }

    async fn wait_until_quiet(&self) {
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end {
            let quiet = (Instant::now() + QUIET).min(end);
            if timeout_at(quiet, self.events.notified()).await.is_err() {
                return;
            }
        }
    }

    /// Watches these places and no others. Says whether there is a new one among them.
    fn watch(&mut self, places: &BTreeSet<PathBuf>) -> bool {
        let Some(watcher) = &mut self.watcher else { return false };
        for gone in self.watched.difference(places) {
            // Fails where the directory is gone, and the watch with it.
            let _ = watcher.unwatch(gone);
        }
        // All of them again: a directory that was removed and made anew has its name, but lost its watch. What can't be
        // watched is tried again at the next look.
        let watch = |place: &&PathBuf| watcher.watch(place, RecursiveMode::NonRecursive).is_ok();
        let watched: BTreeSet<PathBuf> = places.iter().filter(watch).cloned().collect();
        let more = !watched.is_subset(&self.watched);
        self.watched = watched;
        more
    }
}

/// Whether an event is about more than reading. To look is to read, too: who looked again for that would never stop.
fn may_change(event: &notify::Result<Event>) -> bool {
    let is_read = |kind| matches!(kind, EventKind::Access(kind) if kind != AccessKind::Close(AccessMode::Write));
    event.as_ref().map_or(true, |event| !is_read(event.kind))
}

/// The directories in which something can happen that concerns these paths, links followed.
fn places(paths: &[PathBuf], found: &Walk) -> BTreeSet<PathBuf> {
    let mut places = BTreeSet::new();
    // What is no link is in a directory that was looked into.
    for path in paths.iter().chain(&found.links) {
        // The directory that holds it, or that will hold it one day.
        let around = path.ancestors().skip(1).find(|around| around.is_dir());
        add(&mut places, around.filter(|around| *around != Path::new("")).unwrap_or(Path::new(".")));
        if let Ok(real) = path.canonicalize() {
            real.parent().into_iter().for_each(|around| add(&mut places, around));
        }
    }
    found.directories.iter().for_each(|directory| add(&mut places, directory));
    places
}

fn add(places: &mut BTreeSet<PathBuf>, directory: &Path) {
    places.extend(directory.canonicalize());
}

/// What is in the files now. One that can't be read counts as the reason why.
fn look(found: &Walk, contents: &mut Contents) -> Change {
    let mut print = Fingerprint::default();
    for (path, error) in &found.failures {
        print.add(format!("{}\n{:?}\n", path.display(), error.kind()).as_bytes());
    }
    for path in &found.files {
        print.add(path.as_os_str().as_encoded_bytes());
        match contents.of(path) {
            Ok(content) => print.add(&content.print().to_le_bytes()),
            Err(error) => print.add(format!("\n{:?}\n", error.kind()).as_bytes()),
        }
    }
    contents.keep(&found.files);
    Change { fingerprint: print.finish(), files: found.files.len() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{create_dir, create_dir_all, remove_file, rename, write};
    use std::os::unix::fs::symlink;
    use tokio::time::timeout;

    /// Far below `RESCAN`: what is seen in this time was notified.
    const SOON: Duration = Duration::from_secs(2);

    async fn next(follower: &mut Follower) -> Change {
        timeout(SOON, follower.changed()).await.expect("a change")
    }

    #[tokio::test]
    async fn writes_renames_and_removals_are_told_once_each() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        write(at("a.yaml"), "1").unwrap();
        let mut follower = Follower::new(vec![dir.path().to_owned()]);
        write(at("a.yaml"), "2").unwrap();
        let second = next(&mut follower).await;
        write(at(".a.yaml.swp"), "3").unwrap();
        rename(at(".a.yaml.swp"), at("a.yaml")).unwrap();
        let third = next(&mut follower).await;
        assert_ne!(second.fingerprint, third.fingerprint);
        create_dir(at("deep")).unwrap();
        write(at("deep/b.yaml"), "4").unwrap();
        assert_eq!(next(&mut follower).await.files, 2);
        write(at("deep/b.yaml"), "5").unwrap();
        assert_eq!(next(&mut follower).await.files, 2);
        remove_file(at("deep/b.yaml")).unwrap();
        assert_eq!(next(&mut follower).await, third);
        // Neither other files nor the same content are a change.
        write(at("notes.txt"), "x").unwrap();
        write(at("a.yaml"), "3").unwrap();
        assert!(timeout(Duration::from_millis(400), follower.changed()).await.is_err());
    }

    #[tokio::test]
    async fn what_changes_between_following_and_waiting_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let mut follower = Follower::new(vec![dir.path().to_owned()]);
        write(dir.path().join("a.yaml"), "1").unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(next(&mut follower).await.files, 1);
    }

    #[tokio::test]
    async fn a_path_that_appears_later_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let mut follower = Follower::new(vec![at("one/two/p.yaml"), at("three")]);
        create_dir_all(at("one/two")).unwrap();
        write(at("one/two/p.yaml"), "1").unwrap();
        while next(&mut follower).await.files < 1 {}
        create_dir(at("three")).unwrap();
        write(at("three/q.yaml"), "1").unwrap();
        while next(&mut follower).await.files < 2 {}
        write(at("one/two/p.yaml"), "2").unwrap();
        next(&mut follower).await;
    }

    #[tokio::test]
    async fn a_directory_that_is_made_anew_is_still_followed() {
        let dir = tempfile::tempdir().unwrap();
        let policy = dir.path().join("policy");
        create_dir(&policy).unwrap();
        let mut follower = Follower::new(vec![policy.clone()]);
        for content in ["1", "2", "3"] {
            std::fs::remove_dir_all(&policy).unwrap();
            create_dir(&policy).unwrap();
            write(policy.join("a.yaml"), content).unwrap();
            while next(&mut follower).await.files < 1 {}
            tokio::time::sleep(Duration::from_millis(50)).await;
            write(policy.join("a.yaml"), format!("{content} again")).unwrap();
            next(&mut follower).await;
        }
    }

    #[tokio::test]
    async fn the_swapped_link_of_a_config_map_is_seen() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for (version, content) in [("..v1", "1"), ("..v2", "2")] {
            create_dir(at(version)).unwrap();
            write(at(version).join("p.yaml"), content).unwrap();
        }
        symlink("..v1", at("..data")).unwrap();
        symlink("..data/p.yaml", at("p.yaml")).unwrap();
        for paths in [vec![dir.path().to_owned()], vec![at("p.yaml")]] {
            let mut follower = Follower::new(paths);
            let before = follower.last();
            let target = if std::fs::read_link(at("..data")).unwrap() == Path::new("..v1") { "..v2" } else { "..v1" };
            symlink(target, at("..data_tmp")).unwrap();
            rename(at("..data_tmp"), at("..data")).unwrap();
            let after = next(&mut follower).await;
            assert_eq!((before.files, after.files), (1, 1));
        }
    }

    #[tokio::test]
    async fn a_writer_that_never_pauses_is_seen_all_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.yaml");
        let mut follower = Follower::new(vec![path.clone()]);
        let writer = tokio::task::spawn_blocking(move || {
            for i in 0..150 {
                write(&path, i.to_string()).unwrap();
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        next(&mut follower).await;
        assert!(!writer.is_finished(), "seen only after the writer was done");
        writer.await.unwrap();
    }

    #[tokio::test]
    async fn it_waits_until_a_writer_has_paused() {
        let dir = tempfile::tempdir().unwrap();
        let mut follower = Follower::new(vec![dir.path().to_owned()]);
        (follower.watcher, follower.events) = (None, Arc::default());
        let begun = Instant::now();
        follower.wait_until_quiet().await;
        assert!(begun.elapsed() >= QUIET, "nobody writes, but somebody may have half a file");
        // What never stops is waited for as long as patience lasts, and what pauses is seen.
        let bell = follower.events.clone();
        let ringing = tokio::spawn(async move {
            loop {
                bell.notify_one();
                tokio::task::yield_now().await;
            }
        });
        let begun = Instant::now();
        follower.wait_until_quiet().await;
        let waited = begun.elapsed();
        ringing.abort();
        assert!(waited >= PATIENCE && waited < RESCAN, "{waited:?}");
    }

    #[test]
    fn reading_is_no_change_and_writing_is() {
        let event = |kind| may_change(&Ok(Event::new(kind)));
        assert!(!event(EventKind::Access(AccessKind::Read)));
        assert!(!event(EventKind::Access(AccessKind::Open(AccessMode::Read))));
        assert!(!event(EventKind::Access(AccessKind::Close(AccessMode::Read))));
        assert!(event(EventKind::Access(AccessKind::Close(AccessMode::Write))));
        assert!(event(EventKind::Create(notify::event::CreateKind::File)));
        assert!(event(EventKind::Any));
        assert!(may_change(&Err(notify::Error::generic("events were lost"))));
    }

    #[test]
    fn what_cannot_be_read_counts_as_the_reason_why() {
        let dir = tempfile::tempdir().unwrap();
        let (missing, file) = (dir.path().join("missing"), dir.path().join("a.yaml"));
        write(&file, "1").unwrap();
        let looked = |paths: &[PathBuf]| look(&walk(paths), &mut Contents::default());
        let without = looked(std::slice::from_ref(&file));
        let with = looked(&[file.clone(), missing.clone()]);
        assert_eq!((without.files, with.files), (1, 1));
        assert_ne!(with.fingerprint, without.fingerprint);
        assert_ne!(with.fingerprint, looked(&[file, dir.path().join("absent")]).fingerprint, "which one it is");
    }

    #[test]
    fn it_follows_what_is_around_each_path_and_each_link() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().canonicalize().unwrap().join(name);
        create_dir_all(at("real/deep")).unwrap();
        create_dir(at("links")).unwrap();
        write(at("real/deep/p.yaml"), "1").unwrap();
        symlink(at("real/deep/p.yaml"), at("links/p.yaml")).unwrap();
        let followed = |path: PathBuf| -> Vec<PathBuf> {
            let paths = [path];
            places(&paths, &walk(&paths)).into_iter().collect()
        };
        assert_eq!(followed(at("links/p.yaml")), [at("links"), at("real/deep")]);
        assert_eq!(followed(at("real")), [at(""), at("real"), at("real/deep")].map(|it| it.canonicalize().unwrap()));
        // What isn't there yet appears in the last directory on its way that is.
        assert_eq!(followed(at("real/later/p.yaml")), [at("real")]);
        let here = std::env::current_dir().unwrap().canonicalize().unwrap();
        assert_eq!(followed(PathBuf::from("not-there.yaml")), [here], "a name alone is here");
    }

    #[tokio::test]
    async fn looking_is_no_reason_to_look_again() {
        // Two directories deep: what others do in /tmp is no concern of this test.
        let dir = tempfile::tempdir().unwrap();
        let policy = dir.path().join("policy");
        create_dir(&policy).unwrap();
        write(policy.join("a.yaml"), "1").unwrap();
        let mut follower = Follower::new(vec![policy.clone()]);
        write(policy.join("a.yaml"), "2").unwrap();
        next(&mut follower).await;
        // What the change itself has caused is over by then.
        assert!(timeout(Duration::from_millis(500), follower.changed()).await.is_err());
        look(&walk(&follower.paths), &mut Contents::default());
        assert!(timeout(Duration::from_millis(200), follower.events.notified()).await.is_err());
        write(policy.join("a.yaml"), "2").unwrap();
        assert!(timeout(Duration::from_millis(200), follower.events.notified()).await.is_ok());
    }

    #[tokio::test]
    async fn without_notifications_it_looks_again() {
        let dir = tempfile::tempdir().unwrap();
        let mut follower = Follower::new(vec![dir.path().to_owned()]);
        follower.watcher = None;
        follower.events = Arc::default();
        follower.rescan = Duration::from_millis(50);
        write(dir.path().join("a.yaml"), "1").unwrap();
        assert_eq!(next(&mut follower).await.files, 1);
    }
}
