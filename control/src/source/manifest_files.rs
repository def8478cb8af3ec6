//! Manifest files of a list of files and directories, and a cache of their content.
//!
//! In directories: `*.yaml`, `*.yml`, `*.json`, recursive, sorted. Names with a leading dot are ignored: swap files of
//! editors, and the `..data` symlinks of a mounted `ConfigMap`, whose files are next to them. A directory with a file
//! `.no-manifests` is ignored, too, unless it is listed itself.

use std::collections::{HashMap, HashSet};
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use vipgate_policy::compiler::{Compiled, compile};
use vipgate_policy::diagnostic::{Code, Diagnostic, sort_and_dedup};
use vipgate_policy::fingerprint::Fingerprint;
use vipgate_policy::manifest::{Manifests, UnsupportedKinds, read};
use vipgate_policy::yaml::Source;

use crate::text_file;
use crate::text_file::named_text;

/// Maximum nesting of directories.
const MAX_DEPTH: usize = 32;

/// Marker file of a directory that is ignored.
pub(super) const NO_MANIFESTS: &str = ".no-manifests";

/// The current files of a list of paths.
#[derive(Debug, Default)]
pub struct Walk {
    /// The files, each once, in the order of the paths and sorted within a directory.
    pub files: Vec<PathBuf>,
    /// Their metadata.
    pub(super) stamps: Vec<FileStamp>,
    /// The directories that were read.
    pub directories: Vec<PathBuf>,
    /// Those of them that are ignored, since they have the marker file.
    pub(super) ignored: Vec<PathBuf>,
    /// Whether a file may have several names: hard links, or one inode that was found twice.
    pub(super) has_aliases: bool,
    /// Symlinks among both, and all listed paths.
    pub links: Vec<PathBuf>,
    /// Unreadable paths and the errors.
    pub errors: Vec<(PathBuf, io::Error)>,
}

/// Finds the files of `paths`.
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
    fn visit(&mut self, path: &Path, is_listed: bool, depth: usize, seen: &mut HashSet<(u64, u64)>) {
        // Follows symlinks: a file with several paths is read once, and symlink loops end.
        let metadata = match path.metadata() {
            Ok(metadata) => metadata,
            // Deleted since the directory was read. A dangling symlink still exists.
            Err(error) if !is_listed && error.kind() == io::ErrorKind::NotFound => {
                if is_manifest(path) && path.is_symlink() {
                    self.errors.push((path.to_owned(), io::Error::new(error.kind(), "it is a dangling symlink")));
                }
                return;
            }
            Err(error) => return self.errors.push((path.to_owned(), error)),
        };
        let is_directory = metadata.is_dir();
        if !is_directory && !is_listed && !is_manifest(path) {
            return;
        }
        self.has_aliases |= !is_directory && metadata.nlink() > 1;
        if !seen.insert((metadata.dev(), metadata.ino())) {
            self.has_aliases = true;
            return;
        }
        if !is_directory {
            // A listed pipe is read; reading one found in a directory could block forever.
            return match text_file::require_regular(metadata.file_type()) {
                Err(error) if !is_listed => self.errors.push((path.to_owned(), error)),
                _ => {
                    self.files.push(path.to_owned());
                    self.stamps.push(FileStamp::of(&metadata));
                }
            };
        }
        self.directories.push(path.to_owned());
        if depth >= MAX_DEPTH {
            return self.errors.push((path.to_owned(), io::Error::other("directories are nested too deeply")));
        }
        match std::fs::read_dir(path).and_then(Iterator::collect::<Result<Vec<_>, _>>) {
            Ok(entries) if !is_listed && entries.iter().any(|entry| entry.file_name() == NO_MANIFESTS) => {
                self.ignored.push(path.to_owned());
            }
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
            Err(error) => self.errors.push((path.to_owned(), error)),
        }
    }
}

/// File metadata that detects a change without reading the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileStamp {
    /// Device and inode.
    pub(super) file: (u64, u64),
    length: u64,
    modified: Option<SystemTime>,
    changed: (i64, i64),
}

impl FileStamp {
    pub(super) fn of(metadata: &Metadata) -> Self {
        Self {
            file: (metadata.dev(), metadata.ino()),
            length: metadata.len(),
            modified: metadata.modified().ok(),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    /// Whether any further change alters the stamp. Timestamps are coarse: a file that was modified just now may be
    /// modified again with the same stamp.
    fn is_reliable(&self, now: SystemTime) -> bool {
        self.modified.is_some_and(|at| now.duration_since(at).is_ok_and(|age| age > MAX_TIMESTAMP_GRANULARITY))
    }
}

/// Above the coarsest timestamps of common file systems: FAT has 2 s.
const MAX_TIMESTAMP_GRANULARITY: Duration = Duration::from_secs(3);

/// Cache of fingerprints by file: a file with an unchanged stamp isn't read again, if its content is known.
#[derive(Debug, Default)]
pub struct ContentCache(HashMap<PathBuf, (FileStamp, u64)>);

/// Content of a file, as far as it was read.
#[derive(Debug)]
pub enum Content {
    /// The known one: its fingerprint.
    Unchanged(u64),
    /// Read: its fingerprint and bytes.
    Read(u64, Vec<u8>),
}

impl Content {
    /// Fingerprint of the content.
    pub fn fingerprint(&self) -> u64 {
        match self {
            Self::Unchanged(fingerprint) | Self::Read(fingerprint, _) => *fingerprint,
        }
    }
}

impl ContentCache {
    /// The current content of a file, whose metadata was read just before; `known`: the fingerprint of what the caller has.
    ///
    /// # Errors
    /// If it can't be read.
    pub(super) fn read(&mut self, path: &Path, stamp: FileStamp, known: Option<u64>) -> io::Result<Content> {
        match self.0.get(path) {
            Some((cached, fingerprint)) if *cached == stamp && known == Some(*fingerprint) => {
                return Ok(Content::Unchanged(*fingerprint));
            }
            _ => {}
        }
        let now = SystemTime::now();
        let bytes = text_file::read_regular(path)?;
        let fingerprint = Fingerprint::of(&bytes);
        if stamp.is_reliable(now) {
            self.0.insert(path.to_owned(), (stamp, fingerprint));
        } else {
            self.0.remove(path);
        }
        Ok(Content::Read(fingerprint, bytes))
    }

    /// Removes a file from the cache.
    pub(super) fn remove(&mut self, path: &Path) {
        self.0.remove(path);
    }

    /// Removes all other files from the cache.
    pub fn retain(&mut self, paths: &[PathBuf]) {
        if self.0.len() > paths.len() {
            let paths: HashSet<&PathBuf> = paths.iter().collect();
            self.0.retain(|path, _| paths.contains(path));
        }
    }
}

pub(super) fn is_manifest(path: &Path) -> bool {
    path.extension().is_some_and(|extension| ["yaml", "yml", "json"].iter().any(|supported| extension == *supported))
}

/// Reads files and directories; [`walk`] selects the files.
pub fn load(paths: &[PathBuf], unsupported: UnsupportedKinds) -> Manifests {
    let found = walk(paths);
    let mut manifests = Manifests::default();
    for (path, error) in found.errors {
        manifests.diagnostics.push(unreadable(&path, &error));
    }
    for path in found.files {
        match named_text(&path) {
            Ok(text) => read(&Arc::new(Source::new(&path.display().to_string(), text)), unsupported, &mut manifests),
            Err(error) => manifests.diagnostics.push(unreadable(&path, &error)),
        }
    }
    manifests
}

fn unreadable(path: &Path, error: &io::Error) -> Diagnostic {
    Diagnostic::for_file(&path.display().to_string(), Code::Unreadable, format!("can't be read: {error}"))
}

/// Reads and compiles files and directories; the diagnostics are those of both steps.
pub fn compile_files(paths: &[PathBuf], unsupported: UnsupportedKinds) -> Compiled {
    let manifests = load(paths, unsupported);
    let mut compiled = compile(&manifests.objects);
    compiled.diagnostics.extend(manifests.diagnostics);
    sort_and_dedup(&mut compiled.diagnostics);
    compiled
}

#[cfg(test)]
mod tests {
    use std::fs::{create_dir_all, write};
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn an_unreadable_file_is_an_error() {
        let got = compile_files(&["/nonexistent/policy".into()], UnsupportedKinds::Ignore);
        let error = got.accept().unwrap_err().to_string();
        assert!(error.starts_with("/nonexistent/policy: can't be read: "), "{error}");
    }

    #[test]
    fn directories_are_read_sorted_and_each_file_is_found_once() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        create_dir_all(at("b/deep")).unwrap();
        for name in ["z.yaml", "a.json", "b/deep/c.yml", "notes.txt", ".hidden.yaml"] {
            write(at(name), "").unwrap();
        }
        symlink(dir.path(), at("b/loop")).unwrap();
        symlink(at("missing"), at("dangling.yaml")).unwrap();
        create_dir_all(at("others")).unwrap();
        write(at("others/.no-manifests"), "").unwrap();
        write(at("others/rules.yaml"), "").unwrap();
        assert_eq!(walk(&[at("others")]).files, [at("others/rules.yaml")], "a listed directory is read");
        let found = walk(&[dir.path().to_owned(), at("z.yaml"), at("notes.txt")]);
        assert_eq!(found.files, [at("a.json"), at("b/deep/c.yml"), at("z.yaml"), at("notes.txt")]);
        assert_eq!(
            found.directories,
            [dir.path().to_owned(), at("b"), at("b/deep"), at("others")],
            "ignored directories are watched"
        );
        let failures: Vec<_> = found.errors.iter().map(|(path, error)| (path, error.to_string())).collect();
        assert_eq!(
            failures,
            [(&at("dangling.yaml"), "it is a dangling symlink".to_owned())],
            "it exists, but is unreadable"
        );
    }

    #[test]
    fn a_pipe_in_a_directory_is_an_error_and_never_opened() {
        let dir = tempfile::tempdir().unwrap();
        let [pipe, file] = ["pipe.yaml", "file.yaml"].map(|name| dir.path().join(name));
        write(&file, "").unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        let found = walk(&[dir.path().to_owned()]);
        assert_eq!(found.files, [file]);
        let failures: Vec<_> = found.errors.iter().map(|(path, error)| (path, error.to_string())).collect();
        assert_eq!(failures, [(&pipe, "it is a pipe, not a regular file".to_owned())]);
        assert_eq!(walk(std::slice::from_ref(&pipe)).files.len(), 1, "a listed pipe is found");
        let stamp = FileStamp::of(&pipe.metadata().unwrap());
        assert!(ContentCache::default().read(&pipe, stamp, None).is_err(), "the cache reads regular files only");
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
    fn only_changed_files_are_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.yaml");
        let mut contents = ContentCache::default();
        let read = |contents: &mut ContentCache, known| {
            contents.read(&path, FileStamp::of(&path.metadata().unwrap()), known).unwrap()
        };
        write(&path, "1").unwrap();
        let known = Some(read(&mut contents, None).fingerprint());
        assert!(matches!(read(&mut contents, known), Content::Read(..)), "modified too recently");
        let old = SystemTime::now() - Duration::from_mins(1);
        std::fs::File::options().write(true).open(&path).unwrap().set_modified(old).unwrap();
        let first = read(&mut contents, known);
        assert!(matches!(first, Content::Read(..)), "another time");
        assert!(matches!(read(&mut contents, known), Content::Unchanged(again) if again == first.fingerprint()));
        assert!(matches!(read(&mut contents, None), Content::Read(..)), "the caller doesn't have it");
        // Same length and mtime, but another ctime.
        std::thread::sleep(Duration::from_millis(20));
        write(&path, "2").unwrap();
        std::fs::File::options().write(true).open(&path).unwrap().set_modified(old).unwrap();
        let second = read(&mut contents, known);
        assert!(matches!(second, Content::Read(..)) && second.fingerprint() != first.fingerprint());
        contents.retain(&[]);
        assert!(contents.0.is_empty());
    }

    #[test]
    fn a_missing_listed_path_is_an_error() {
        let found = walk(&["/nonexistent/x".into()]);
        assert_eq!(found.errors.len(), 1);
        assert_eq!(found.errors[0].0, Path::new("/nonexistent/x"));
    }
}
