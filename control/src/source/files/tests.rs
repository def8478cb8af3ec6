use std::fs::{create_dir, create_dir_all, hard_link, remove_file, rename, write};
use std::os::unix::fs::symlink;
use std::time::{Duration, SystemTime};

use tokio::time::timeout;
use vipgate_coverage::property;

use super::*;
use crate::xds::store::tests::generators::SeededRng;

/// Far below the interval of scans: a change within it was found by an event.
const EVENT_TIMEOUT: Duration = Duration::from_secs(2);

async fn next(files: &mut WatchedFiles) -> SourceUpdate {
    let next = async {
        loop {
            let suspects = files.suspects().await;
            if let Some(update) = files.refresh(suspects).await {
                return update;
            }
        }
    };
    timeout(EVENT_TIMEOUT, next).await.expect("a change")
}

async fn watched(paths: Vec<PathBuf>) -> WatchedFiles {
    let mut files = WatchedFiles::new(paths);
    assert!(files.refresh(Suspects::All).await.is_some_and(|update| update.full));
    files
}

fn name(path: &Path) -> Arc<str> {
    path.display().to_string().into()
}

fn changed(path: &Path, text: &str) -> SourceUpdate {
    SourceUpdate { changed: vec![(name(path), Ok(text.into()))], ..SourceUpdate::default() }
}

fn removed(path: &Path) -> SourceUpdate {
    SourceUpdate { removed: vec![name(path)], ..SourceUpdate::default() }
}

#[tokio::test]
async fn a_full_update_is_sent_first_and_then_the_changes() {
    let outer = tempfile::tempdir().unwrap();
    let dir = outer.path().join("policy");
    create_dir(&dir).unwrap();
    let at = |name: &str| dir.join(name);
    write(at("a.yaml"), "1").unwrap();
    write(at("b.yaml"), "2").unwrap();
    let (sender, mut events) = mpsc::channel(4);
    let task = tokio::spawn(watch_paths(vec![dir.clone()], sender));
    let mut next = async || match timeout(EVENT_TIMEOUT, events.recv()).await {
        Ok(Some(SourceEvent::Update(update))) => update,
        other => panic!("{other:?}"),
    };
    let first = next().await;
    assert!(first.full && first.removed.is_empty());
    assert_eq!(first.changed, [(name(&at("a.yaml")), Ok("1".into())), (name(&at("b.yaml")), Ok("2".into()))]);
    write(at("b.yaml"), "3").unwrap();
    assert_eq!(next().await, changed(&at("b.yaml"), "3"));
    remove_file(at("a.yaml")).unwrap();
    assert_eq!(next().await, removed(&at("a.yaml")));
    write(at("b.yaml"), [0xff, 0xfe]).unwrap();
    let broken = next().await;
    assert!(broken.changed[0].1.as_ref().is_err_and(|error| error.contains("utf-8")), "{broken:?}");
    drop(events);
    task.await.unwrap();
}

#[tokio::test]
async fn writes_renames_and_removals_are_reported_once_each() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    write(at("a.yaml"), "1").unwrap();
    let mut files = watched(vec![dir.path().to_owned()]).await;
    write(at("a.yaml"), "2").unwrap();
    assert_eq!(next(&mut files).await, changed(&at("a.yaml"), "2"));
    write(at(".a.yaml.swp"), "3").unwrap();
    rename(at(".a.yaml.swp"), at("a.yaml")).unwrap();
    assert_eq!(next(&mut files).await, changed(&at("a.yaml"), "3"));
    create_dir(at("deep")).unwrap();
    write(at("deep/b.yaml"), "4").unwrap();
    assert_eq!(next(&mut files).await, changed(&at("deep/b.yaml"), "4"));
    write(at("deep/b.yaml"), "5").unwrap();
    assert_eq!(next(&mut files).await, changed(&at("deep/b.yaml"), "5"));
    remove_file(at("deep/b.yaml")).unwrap();
    assert_eq!(next(&mut files).await, removed(&at("deep/b.yaml")));
    // Other files and rewritten identical content are no change.
    write(at("notes.txt"), "x").unwrap();
    write(at("a.yaml"), "3").unwrap();
    let quiet = timeout(Duration::from_millis(400), async {
        let suspects = files.suspects().await;
        files.refresh(suspects).await
    });
    assert!(matches!(quiet.await, Err(_) | Ok(None)));
}

#[tokio::test]
async fn a_change_between_creation_and_the_first_wait_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let mut files = watched(vec![dir.path().to_owned()]).await;
    write(dir.path().join("a.yaml"), "1").unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(next(&mut files).await, changed(&dir.path().join("a.yaml"), "1"));
}

#[tokio::test]
async fn a_path_created_later_is_watched() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let mut files = watched(vec![at("one/two/p.yaml"), at("three")]).await;
    create_dir_all(at("one/two")).unwrap();
    write(at("one/two/p.yaml"), "1").unwrap();
    while next(&mut files).await.changed.is_empty() {}
    create_dir(at("three")).unwrap();
    write(at("three/q.yaml"), "1").unwrap();
    while next(&mut files).await.changed.is_empty() {}
    write(at("one/two/p.yaml"), "2").unwrap();
    assert_eq!(next(&mut files).await.changed.len(), 1);
}

#[tokio::test]
async fn a_directory_deleted_and_created_again_is_still_watched() {
    let dir = tempfile::tempdir().unwrap();
    let policy = dir.path().join("policy");
    create_dir(&policy).unwrap();
    let mut files = watched(vec![policy.clone()]).await;
    for content in ["1", "2", "3"] {
        std::fs::remove_dir_all(&policy).unwrap();
        create_dir(&policy).unwrap();
        write(policy.join("a.yaml"), content).unwrap();
        while next(&mut files).await.changed.is_empty() {}
        tokio::time::sleep(Duration::from_millis(50)).await;
        write(policy.join("a.yaml"), format!("{content} again")).unwrap();
        next(&mut files).await;
    }
}

#[tokio::test]
async fn a_swapped_symlink_of_a_config_map_is_a_change() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    for (version, content) in [("..v1", "..v1"), ("..v2", "..v2")] {
        create_dir(at(version)).unwrap();
        write(at(version).join("p.yaml"), content).unwrap();
    }
    symlink("..v1", at("..data")).unwrap();
    symlink("..data/p.yaml", at("p.yaml")).unwrap();
    for paths in [vec![dir.path().to_owned()], vec![at("p.yaml")]] {
        let mut files = watched(paths).await;
        let target = if std::fs::read_link(at("..data")).unwrap() == Path::new("..v1") { "..v2" } else { "..v1" };
        symlink(target, at("..data_tmp")).unwrap();
        rename(at("..data_tmp"), at("..data")).unwrap();
        assert_eq!(next(&mut files).await, changed(&at("p.yaml"), target));
    }
}

#[tokio::test]
async fn changes_of_a_writer_that_never_pauses_are_reported() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.yaml");
    let mut files = watched(vec![path.clone()]).await;
    let writer = tokio::task::spawn_blocking(move || {
        for i in 0..150 {
            write(&path, i.to_string()).unwrap();
            std::thread::sleep(Duration::from_millis(5));
        }
    });
    next(&mut files).await;
    assert!(!writer.is_finished(), "reported only after the writer was done");
    writer.await.unwrap();
}

#[tokio::test]
async fn a_scan_does_not_trigger_another_scan() {
    // Two directories deep, so that other processes in /tmp don't disturb the test.
    let dir = tempfile::tempdir().unwrap();
    let policy = dir.path().join("policy");
    create_dir(&policy).unwrap();
    write(policy.join("a.yaml"), "1").unwrap();
    let mut files = watched(vec![policy.clone()]).await;
    write(policy.join("a.yaml"), "2").unwrap();
    next(&mut files).await;
    // Events of the change itself are over by then.
    let _ = timeout(Duration::from_millis(500), files.suspects()).await;
    files.read().await;
    assert!(timeout(Duration::from_millis(200), files.suspects()).await.is_err());
    write(policy.join("a.yaml"), "2").unwrap();
    assert!(timeout(Duration::from_millis(200), files.suspects()).await.is_ok());
}

/// A file of this process that is there, and gives EIO.
const FAILING_FILE: &str = "/proc/self/mem";

fn failed_reads(update: &SourceUpdate) -> (bool, Vec<&str>) {
    let failed = update.changed.iter().filter(|(_, content)| content.is_err());
    (update.has_failed_reads, failed.map(|(name, _)| name.rsplit('/').next().unwrap()).collect())
}

#[test]
fn a_read_that_may_succeed_soon_has_failed_until_it_succeeds() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    write(at("a.yaml"), "1").unwrap();
    symlink(FAILING_FILE, at("b.yaml")).unwrap();
    let mut reader = FileReader::new(vec![dir.path().to_owned()]);
    let first = reader.read();
    assert!(first.full && failed_reads(&first) == (true, vec!["b.yaml"]), "{first:?}");
    // Not reported again, but still so.
    assert_eq!(reader.read(), SourceUpdate { has_failed_reads: true, ..SourceUpdate::default() });
    remove_file(at("b.yaml")).unwrap();
    write(at("b.yaml"), "2").unwrap();
    assert_eq!(reader.read(), changed(&at("b.yaml"), "2"));
}

#[test]
fn what_nobody_can_read_is_no_failed_read() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    write(at("text.yaml"), [0xff, 0xfe]).unwrap();
    symlink("nowhere", at("dangling.yaml")).unwrap();
    symlink("loop.yaml", at("loop.yaml")).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, at("pipe.yaml"), rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let update = FileReader::new(vec![dir.path().to_owned(), at("missing.yaml")]).read();
    assert_eq!((failed_reads(&update), update.unavailable.len()), ((false, vec!["text.yaml"]), 4), "{update:?}");
}

#[tokio::test]
async fn failed_reads_are_tried_again_soon_without_an_event() {
    let dir = tempfile::tempdir().unwrap();
    // The directory above is watched, too: in /tmp, others have events.
    let manifests = dir.path().join("manifests");
    create_dir(&manifests).unwrap();
    symlink(FAILING_FILE, manifests.join("a.yaml")).unwrap();
    let mut files = watched(vec![manifests]).await;
    for _ in 0..2 {
        assert_eq!(timeout(EVENT_TIMEOUT, files.suspects()).await, Ok(Suspects::All));
        assert_eq!(files.refresh(Suspects::All).await, None);
    }
}

/// A file, changed at random, in a directory of a few.
fn change(dir: &Path, dice: &mut SeededRng) -> (&'static str, BTreeSet<PathBuf>) {
    let file = |dice: &mut SeededRng| dir.join(["a.yaml", "b.yml", "sub/c.yaml", "n.txt", ".h.yaml"][dice.below(5)]);
    let (one, other) = (file(dice), file(dice));
    let text = dice.below(3).to_string();
    let class = match dice.below(12) {
        0..4 => write(&one, text).map(|()| "written"),
        4..6 => remove_file(&one).map(|()| "removed"),
        6 => write(dir.join(".draft"), text).and_then(|()| rename(dir.join(".draft"), &one)).map(|()| "replaced"),
        7 => rename(&one, &other).map(|()| "renamed"),
        8 => hard_link(&one, &other).map(|()| "hard link"),
        9 => symlink(&one, &other).map(|()| "symlink"),
        10 => create_dir(&one).or_else(|_| std::fs::remove_dir(&one)).map(|()| "directory"),
        _ => write(dir.join("sub/.no-manifests"), "")
            .or(Ok(()))
            .and_then(|()| match dice.below(2) {
                0 => remove_file(dir.join("sub/.no-manifests")),
                _ => Ok(()),
            })
            .map(|()| "marker"),
    };
    let mut paths = match class {
        Ok("marker") => vec![dir.join("sub/.no-manifests")],
        _ => vec![one.clone(), other, dir.join(".draft")],
    };
    // The event of a write through a symlink names the file that was written.
    paths.extend(one.canonicalize());
    (class.unwrap_or("no effect"), paths.into_iter().collect())
}

/// What events name suffices: the files that a reader of single files has reported are those of a scan.
#[test]
fn single_files_read_on_events_equal_a_scan() {
    let classes =
        ["written", "removed", "replaced", "renamed", "hard link", "symlink", "directory", "marker", "partial", "scan"];
    property(
        proptest::prelude::ProptestConfig::with_cases(96),
        &proptest::prelude::any::<u32>(),
        &classes,
        |seed, coverage| {
            let dir = tempfile::tempdir().unwrap();
            let root = dir.path().canonicalize().unwrap();
            create_dir(root.join("sub")).unwrap();
            write(root.join("a.yaml"), "0").unwrap();
            let mut dice = SeededRng(u64::from(seed));
            let mut reader = FileReader::new(vec![root.clone()]);
            let mut reported = BTreeMap::new();
            let mut apply = |update: SourceUpdate| {
                for (name, content) in update.changed {
                    reported.insert(name, content);
                }
                for name in update.removed {
                    reported.remove(&name);
                }
                reported.clone()
            };
            apply(reader.read());
            for _ in 0..20 {
                let (class, suspects) = change(&root, &mut dice);
                coverage.count(class);
                let update = reader.read_only(&suspects);
                coverage.count(if update.is_some() { "partial" } else { "scan" });
                let now = apply(update.unwrap_or_else(|| reader.read()));
                let mut fresh = FileReader::new(vec![root.clone()]);
                let expected: BTreeMap<_, _> = fresh.read().changed.into_iter().collect();
                let is_there = |(name, _): &(&Arc<str>, &Result<EntryContent, String>)| {
                    expected.contains_key(*name) || reader.unavailable.is_empty()
                };
                let now: BTreeMap<_, _> =
                    now.iter().filter(is_there).map(|(name, text)| (name.clone(), text.clone())).collect();
                assert_eq!(now, expected, "{class}");
            }
            Ok(())
        },
    );
}

#[test]
fn a_file_with_an_old_time_is_read_when_an_event_names_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().canonicalize().unwrap().join("a.yaml");
    write(&path, "1").unwrap();
    let mut reader = FileReader::new(vec![path.parent().unwrap().to_owned()]);
    reader.read();
    let old = SystemTime::now() - Duration::from_mins(1);
    write(&path, "2").unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_modified(old).unwrap();
    assert_eq!(reader.read_only(&[path.clone()].into()), Some(changed(&path, "2")));
    assert_eq!(reader.read_only(&[path].into()), Some(SourceUpdate::default()));
}
