//! What other users of the host leave at the place of stored sessions.

use std::fs::Permissions;
use std::os::unix::fs::{PermissionsExt as _, chown, symlink};

use tempfile::TempDir;

use super::*;

/// Neither root nor a user of these tests.
const NOBODY: u32 = 65_534;

/// A directory like `/dev/shm`, and the paths of a gateway in it.
struct SharedMemory {
    shared: TempDir,
    state: PathBuf,
    own: PathBuf,
}

impl SharedMemory {
    fn new() -> Self {
        let shared = tempfile::tempdir().unwrap();
        set_mode(shared.path(), 0o1777);
        let state = shared.path().join("vipgate");
        Self { own: state.join("gw-a"), state, shared }
    }

    fn file(&self, suffix: &str) -> PathBuf {
        self.state.join(format!("gw-a{suffix}"))
    }

    fn prepare(&self) -> Result<(), DirectoryError> {
        let files = [ADDRESSES, SECRET].map(|suffix| self.file(suffix));
        prepare_in(&self.state, &self.own, files.into_iter(), user())
    }

    /// Prepares the directories, of which one entry is renamed; returns its new path.
    #[track_caller]
    fn prepare_setting_aside(&self, entry: &Path) -> PathBuf {
        self.prepare().unwrap();
        let name = entry.file_name().unwrap().to_string_lossy().into_owned();
        let mut aside = names(entry.parent().unwrap());
        aside.retain(|other| other.starts_with(&format!("{name}.set-aside-")));
        assert_eq!(aside.len(), 1, "{aside:?}");
        assert_eq!((mode(&self.state), mode(&self.own)), (0o700, 0o700));
        entry.with_file_name(&aside[0])
    }
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Gives a path away, which only root can.
fn give_away(path: &Path) -> bool {
    chown(path, Some(NOBODY), None).is_ok()
}

#[test]
fn directories_are_created_for_this_user_only() {
    let place = SharedMemory::new();
    place.prepare().unwrap();
    assert_eq!((mode(&place.state), mode(&place.own)), (0o700, 0o700));
    fs::write(place.own.join("worker-0"), "sessions").unwrap();
    fs::write(place.file(SECRET), "secret").unwrap();
    place.prepare().unwrap();
    assert_eq!(names(&place.state), ["gw-a", "gw-a.secret"]);
    assert_eq!(names(&place.own), ["worker-0"]);
}

#[test]
fn directories_of_an_earlier_version_are_kept_and_closed_to_others() {
    let place = SharedMemory::new();
    fs::create_dir_all(place.own.join("migrated")).unwrap();
    set_mode(&place.state, 0o755);
    set_mode(&place.own, 0o755);
    fs::write(place.own.join("worker-0"), "sessions").unwrap();
    place.prepare().unwrap();
    assert_eq!((mode(&place.state), mode(&place.own)), (0o700, 0o700));
    assert_eq!(names(&place.own), ["migrated", "worker-0"]);
    assert_eq!(names(place.shared.path()), ["vipgate"]);
}

#[test]
fn a_link_in_place_of_the_directory_is_not_followed() {
    let place = SharedMemory::new();
    let target = tempfile::tempdir().unwrap();
    set_mode(target.path(), 0o755);
    symlink(target.path(), &place.state).unwrap();
    let aside = place.prepare_setting_aside(&place.state);
    assert_eq!(fs::read_link(aside).unwrap(), target.path());
    assert_eq!((names(target.path()), mode(target.path())), (vec![], 0o755), "its target is as it was");
}

#[test]
fn a_slash_at_the_end_of_the_path_follows_no_link_either() {
    let place = SharedMemory::new();
    let target = tempfile::tempdir().unwrap();
    symlink(target.path(), &place.state).unwrap();
    let slash = format!("{}/", place.state.display());
    prepare_in(Path::new(&slash), &place.own, std::iter::empty(), user()).unwrap();
    assert_eq!(names(target.path()), [""; 0]);
    assert_eq!(mode(&place.state), 0o700);
}

#[test]
fn files_and_foreign_directories_in_place_of_the_directory_are_set_aside() {
    let place = SharedMemory::new();
    fs::write(&place.state, "in the way").unwrap();
    let aside = place.prepare_setting_aside(&place.state);
    assert_eq!(fs::read_to_string(aside).unwrap(), "in the way");

    let place = SharedMemory::new();
    fs::create_dir_all(&place.own).unwrap();
    set_mode(&place.state, 0o775);
    let aside = place.prepare_setting_aside(&place.state);
    assert_eq!(mode(&aside), 0o775, "others may write to it");

    let place = SharedMemory::new();
    fs::create_dir_all(&place.own).unwrap();
    if give_away(&place.state) {
        let aside = place.prepare_setting_aside(&place.state);
        assert_eq!(names(&aside), ["gw-a"]);
    }
}

#[test]
fn a_gateways_own_directory_is_set_aside_with_any_entry_that_is_not_safe() {
    let target = tempfile::tempdir().unwrap();
    let precious = target.path().join("precious");
    fs::write(&precious, "of root").unwrap();
    let flaws: [&dyn Fn(&Path); 4] = [
        &|own: &Path| symlink(&precious, own.join("worker-0")).unwrap(),
        &|own: &Path| fs::hard_link(&precious, own.join("worker-0")).unwrap(),
        &|own: &Path| {
            fs::create_dir(own.join("migrated")).unwrap();
            symlink(&precious, own.join("migrated/worker-1")).unwrap();
        },
        &|own: &Path| {
            fs::write(own.join("worker-0"), "sessions").unwrap();
            set_mode(&own.join("worker-0"), 0o666);
        },
    ];
    for make in flaws {
        let place = SharedMemory::new();
        fs::create_dir_all(&place.own).unwrap();
        make(&place.own);
        place.prepare_setting_aside(&place.own);
        assert_eq!(names(&place.own), [""; 0]);
        assert_eq!(fs::read_to_string(&precious).unwrap(), "of root");
    }
    let place = SharedMemory::new();
    fs::create_dir_all(&place.own).unwrap();
    fs::write(place.own.join("worker-0"), "sessions").unwrap();
    if give_away(&place.own.join("worker-0")) {
        place.prepare_setting_aside(&place.own);
    }
}

#[test]
fn files_beside_it_are_set_aside_alone() {
    for suffix in [ADDRESSES, SECRET] {
        let place = SharedMemory::new();
        fs::create_dir_all(&place.own).unwrap();
        fs::write(place.own.join("worker-0"), "sessions").unwrap();
        symlink("/etc/hostname", place.file(suffix)).unwrap();
        place.prepare_setting_aside(&place.file(suffix));
        assert!(!place.file(suffix).exists());
        assert_eq!(names(&place.own), ["worker-0"], "the sessions stay");
    }
}

#[test]
fn what_an_operator_gave_is_not_renamed_and_its_mode_stays() {
    let place = SharedMemory::new();
    set_mode(place.shared.path(), 0o755);
    fs::create_dir(&place.state).unwrap();
    set_mode(&place.state, 0o755);
    place.prepare().unwrap();
    assert_eq!((mode(&place.state), mode(&place.own)), (0o755, 0o700), "it may have other purposes");
    // Like the root of a tmpfs.
    set_mode(&place.state, 0o1777);
    place.prepare().unwrap();
    assert_eq!((mode(&place.state), mode(&place.own)), (0o1777, 0o700));
    set_mode(&place.state, 0o777);
    let error = place.prepare().unwrap_err();
    assert!(matches!(error, DirectoryError::Unsafe { flaw: Flaw::Writable(0o777), .. }), "{error}");
    assert!(!error.is_fatal(), "the gateway serves without stored sessions");
    assert_eq!(names(place.shared.path()), ["vipgate"]);
}

#[test]
fn another_user_than_root_uses_what_is_its_own_or_of_root() {
    let place = SharedMemory::new();
    place.prepare().unwrap();
    let flaw = |path: &Path, rule, user| flaw(&fs::symlink_metadata(path).unwrap(), rule, user);
    if !give_away(&place.own) {
        return;
    }
    assert_eq!(flaw(&place.own, Rule::Own, NOBODY), None, "its own");
    assert_eq!(flaw(&place.own, Rule::Own, ROOT), Some(Flaw::Owner(NOBODY)));
    assert_eq!(flaw(&place.own, Rule::Own, NOBODY - 1), Some(Flaw::Owner(NOBODY)));
    assert_eq!(flaw(&place.state, Rule::Parent, NOBODY), None, "of root");
}

#[test]
fn a_directory_that_cannot_be_created_is_an_error_of_the_configuration() {
    let place = SharedMemory::new();
    let file = place.shared.path().join("file");
    fs::write(&file, "").unwrap();
    let state = file.join("vipgate");
    let error = prepare_in(&state, &state.join("gw-a"), std::iter::empty(), user()).unwrap_err();
    assert!(error.is_fatal(), "{error}");
    let full = DirectoryError::Io { path: state, source: ErrorKind::StorageFull.into() };
    assert!(!full.is_fatal(), "others may have filled it");
}

#[test]
fn without_a_safe_place_the_configuration_is_as_without_state() {
    let place = SharedMemory::new();
    fs::create_dir(&place.state).unwrap();
    set_mode(place.shared.path(), 0o755);
    set_mode(&place.state, 0o777);
    let text = format!(
        "name: gw-a\ninterfaces: [{{name: lan0, role: both}}]\npolicy: {{files: [policy]}}\n\
         sessions: {{state: {}}}\n",
        place.state.display()
    );
    let mut config = Config::parse("gateway.yaml", &text).unwrap();
    prepare(&mut config).unwrap();
    assert_eq!(config.sessions.state, None);
    assert_eq!(names(&place.state), [""; 0]);
}
