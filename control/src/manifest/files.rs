//! Which files a list of files and directories stands for.
//!
//! In directories: `*.yaml`, `*.yml`, `*.json`, recursive, sorted; names that begin with a dot are left out, which also
//! keeps editors' swap files away, and the `..data` links of a mounted `ConfigMap`, whose files are found beside them. A
//! directory with a file `.no-manifests` holds what is for other programs, and isn't looked into unless it is named itself.

use std::collections::{HashMap, HashSet};
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::policy::Fingerprint;
use crate::text_file;

/// Directories inside directories, at most.
const DEPTH: usize = 32;

/// The file that keeps a directory from being looked into.
const NO_MANIFESTS: &str = ".no-manifests";

/// What a list of paths stands for at this moment.
#[derive(Debug, Default)]
pub struct Walk {
    /// The files, each once, in the order of the paths and sorted within a directory.
    pub files: Vec<PathBuf>,
    /// The directories that were looked into.
    pub directories: Vec<PathBuf>,
    /// What of both is a link, or is reached by one that was named.
    pub links: Vec<PathBuf>,
    /// Paths that could not be looked into, and why.
    pub failures: Vec<(PathBuf, io::Error)>,
}

/// Looks up what `paths` stand for.
pub fn walk(paths: &[PathBuf]) -> Walk {
    let mut walk = Walk::default();
    let mut seen = HashSet::new();
    for path in paths {
        walk.links.push(path.clone());
        walk.visit(path, true, 0, &mut seen);
    }
    walk
}

impl Walk {
    fn visit(&mut self, path: &Path, named: bool, depth: usize, seen: &mut HashSet<(u64, u64)>) {
        // Through links, so that one file is read once whatever the ways to it, and a circle of links ends.
        let metadata = match path.metadata() {
            Ok(metadata) => metadata,
            // Gone between listing and looking: as if it had never been there. A link to nothing is still there.
            Err(error) if !named && error.kind() == io::ErrorKind::NotFound => {
                if is_manifest(path) && path.is_symlink() {
                    self.failures.push((path.to_owned(), io::Error::new(error.kind(), "it is a link to nothing")));
                }
                return;
            }
            Err(error) => return self.failures.push((path.to_owned(), error)),
        };
        let is_directory = metadata.is_dir();
        if !is_directory && !named && !is_manifest(path) || !seen.insert((metadata.dev(), metadata.ino())) {
            return;
        }
        if !is_directory {
            // Who names a pipe means it; one that lies in a directory could be waited for without end.
            return match text_file::require_regular(metadata.file_type()) {
                Err(error) if !named => self.failures.push((path.to_owned(), error)),
                _ => self.files.push(path.to_owned()),
            };
        }
        self.directories.push(path.to_owned());
        if depth >= DEPTH {
            return self.failures.push((path.to_owned(), io::Error::other("too many directories inside each other")));
        }
        match std::fs::read_dir(path).and_then(Iterator::collect::<Result<Vec<_>, _>>) {
            Ok(entries) if !named && entries.iter().any(|entry| entry.file_name() == NO_MANIFESTS) => {}
            Ok(mut entries) => {
                entries.retain(|entry| !entry.file_name().as_encoded_bytes().starts_with(b"."));
                entries.sort_by_key(std::fs::DirEntry::file_name);
                for entry in entries {
                    let path = entry.path();
                    if entry.file_type().is_ok_and(|kind| kind.is_symlink()) {
                        self.links.push(path.clone());
                    }
                    self.visit(&path, false, depth + 1, seen);
                }
            }
            Err(error) => self.failures.push((path.to_owned(), error)),
        }
    }
}

/// What tells, without reading it, that a file is still what it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    file: (u64, u64),
    length: u64,
    modified: Option<SystemTime>,
    changed: (i64, i64),
}

impl Stamp {
    fn of(metadata: &Metadata) -> Self {
        Self {
            file: (metadata.dev(), metadata.ino()),
            length: metadata.len(),
            modified: metadata.modified().ok(),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    /// Whether a change from now on is sure to show: clocks of file systems are coarse, so one that was changed a moment ago may
    /// be changed again without another stamp.
    fn is_settled(&self, now: SystemTime) -> bool {
        self.modified.is_some_and(|at| now.duration_since(at).is_ok_and(|age| age > COARSEST))
    }
}

/// The slowest clock of a file system that people have: FAT counts in twos.
const COARSEST: Duration = Duration::from_secs(3);

/// Content of files by fingerprint: a file whose stamp is as it was isn't read again.
#[derive(Debug, Default)]
pub struct Contents(HashMap<PathBuf, (Stamp, u64)>);

/// What is known of a file's content.
#[derive(Debug)]
pub enum Content {
    /// It is what it was.
    Same(u64),
    /// Its fingerprint and itself.
    Read(u64, Vec<u8>),
}

impl Content {
    /// The content's fingerprint.
    pub fn print(&self) -> u64 {
        match self {
            Self::Same(print) | Self::Read(print, _) => *print,
        }
    }
}

impl Contents {
    /// What is in a file now.
    ///
    /// # Errors
    /// When it can't be read.
    pub fn of(&mut self, path: &Path) -> io::Result<Content> {
        let stamp = Stamp::of(&path.metadata()?);
        match self.0.get(path) {
            Some((known, print)) if *known == stamp => return Ok(Content::Same(*print)),
            _ => {}
        }
        let now = SystemTime::now();
        let bytes = text_file::read_regular(path)?;
        let print = Fingerprint::of(&bytes);
        if stamp.is_settled(now) {
            self.0.insert(path.to_owned(), (stamp, print));
        } else {
            self.0.remove(path);
        }
        Ok(Content::Read(print, bytes))
    }

    /// Forgets files that aren't among these.
    pub fn keep(&mut self, paths: &[PathBuf]) {
        if self.0.len() > paths.len() {
            let paths: HashSet<&PathBuf> = paths.iter().collect();
            self.0.retain(|path, _| paths.contains(path));
        }
    }
}

fn is_manifest(path: &Path) -> bool {
    path.extension().is_some_and(|extension| ["yaml", "yml", "json"].iter().any(|known| extension == *known))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{create_dir_all, write};
    use std::os::unix::fs::symlink;

    #[test]
    fn directories_are_searched_sorted_and_each_file_counts_once() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        create_dir_all(at("b/deep")).unwrap();
        for name in ["z.yaml", "a.json", "b/deep/c.yml", "notes.txt", ".hidden.yaml"] {
            write(at(name), "").unwrap();
        }
        symlink(dir.path(), at("b/circle")).unwrap();
        symlink(at("gone"), at("dangling.yaml")).unwrap();
        create_dir_all(at("others")).unwrap();
        write(at("others/.no-manifests"), "").unwrap();
        write(at("others/rules.yaml"), "").unwrap();
        assert_eq!(walk(&[at("others")]).files, [at("others/rules.yaml")], "whoever names it means it");
        let found = walk(&[dir.path().to_owned(), at("z.yaml"), at("notes.txt")]);
        assert_eq!(found.files, [at("a.json"), at("b/deep/c.yml"), at("z.yaml"), at("notes.txt")]);
        assert_eq!(
            found.directories,
            [dir.path().to_owned(), at("b"), at("b/deep"), at("others")],
            "followed all the same"
        );
        let failures: Vec<_> = found.failures.iter().map(|(path, error)| (path, error.to_string())).collect();
        assert_eq!(
            failures,
            [(&at("dangling.yaml"), "it is a link to nothing".to_owned())],
            "it is there, but unreadable"
        );
    }

    #[test]
    fn a_pipe_among_the_files_is_named_and_never_opened() {
        let dir = tempfile::tempdir().unwrap();
        let [pipe, file] = ["pipe.yaml", "file.yaml"].map(|name| dir.path().join(name));
        write(&file, "").unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        let found = walk(&[dir.path().to_owned()]);
        assert_eq!(found.files, [file]);
        let failures: Vec<_> = found.failures.iter().map(|(path, error)| (path, error.to_string())).collect();
        assert_eq!(failures, [(&pipe, "it is a pipe, not a regular file".to_owned())]);
        assert_eq!(walk(std::slice::from_ref(&pipe)).files.len(), 1, "a command may read it");
        assert!(Contents::default().of(&pipe).is_err(), "who follows files doesn't");
    }

    #[test]
    fn a_mounted_config_map_is_read_once() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        create_dir_all(at("..2024_01_01")).unwrap();
        write(at("..2024_01_01/p.yaml"), "").unwrap();
        symlink("..2024_01_01", at("..data")).unwrap();
        symlink("..data/p.yaml", at("p.yaml")).unwrap();
        assert_eq!(walk(&[dir.path().to_owned()]).files, [at("p.yaml")]);
    }

    #[test]
    fn what_has_not_changed_is_not_read_again_and_what_has_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.yaml");
        let mut contents = Contents::default();
        write(&path, "1").unwrap();
        assert!(matches!(contents.of(&path).unwrap(), Content::Read(..)));
        assert!(matches!(contents.of(&path).unwrap(), Content::Read(..)), "too young to be sure of");
        let old = SystemTime::now() - Duration::from_mins(1);
        std::fs::File::options().write(true).open(&path).unwrap().set_modified(old).unwrap();
        let first = contents.of(&path).unwrap();
        assert!(matches!(contents.of(&path).unwrap(), Content::Same(print) if print == first.print()));
        // As long and as old as before, but the kernel knows when it was changed.
        std::thread::sleep(Duration::from_millis(20));
        write(&path, "2").unwrap();
        std::fs::File::options().write(true).open(&path).unwrap().set_modified(old).unwrap();
        let second = contents.of(&path).unwrap();
        assert!(matches!(second, Content::Read(..)) && second.print() != first.print());
        contents.keep(&[]);
        assert!(contents.0.is_empty());
    }

    #[test]
    fn a_path_that_is_not_there_is_a_failure() {
        let found = walk(&["/nonexistent/x".into()]);
        assert_eq!(found.failures.len(), 1);
        assert_eq!(found.failures[0].0, Path::new("/nonexistent/x"));
    }
}
