//! Where single files are: relates the paths of events to manifest files, as long as a change of a file can't concern
//! another one. Symlinks, several names of a file and unreadable paths make that uncertain; then everything is scanned.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::source::manifest_files::{FileStamp, NO_MANIFESTS, Walk, is_manifest};

/// The files of a walk without symlinks and errors.
#[derive(Debug)]
pub(super) struct Layout {
    /// The directories that were read, by canonical path: the path of their files.
    directories: HashMap<PathBuf, PathBuf>,
    /// The files by device and inode, and the reverse.
    by_id: HashMap<(u64, u64), PathBuf>,
    ids: HashMap<PathBuf, (u64, u64)>,
    /// The configured paths: events about them may be more than a change of content.
    configured: HashSet<PathBuf>,
    /// The same as events name them.
    outer: HashSet<PathBuf>,
}

/// What an event's path means.
#[derive(Debug)]
pub(super) enum Suspect {
    /// No manifest file, before or now.
    Irrelevant,
    /// A regular file.
    File(PathBuf, FileStamp),
    /// A file that is gone.
    Removed(PathBuf),
}

impl Layout {
    /// The layout that a walk has found; `None`: files can't be read one by one.
    pub(super) fn new(paths: &[PathBuf], found: Walk) -> Option<Self> {
        // The configured paths are always among the links.
        let has_symlinks = found.links.len() != paths.len() || paths.iter().any(|path| path.is_symlink());
        if !found.errors.is_empty() || found.has_aliases || has_symlinks {
            return None;
        }
        let read = found.directories.into_iter().filter(|directory| !found.ignored.contains(directory));
        let directories = read.map(|directory| Some((directory.canonicalize().ok()?, directory)));
        let mut layout = Self {
            directories: directories.collect::<Option<_>>()?,
            by_id: HashMap::with_capacity(found.files.len()),
            ids: HashMap::with_capacity(found.files.len()),
            configured: paths.iter().cloned().collect(),
            outer: paths.iter().map(|path| path.canonicalize().ok()).collect::<Option<_>>()?,
        };
        for (path, stamp) in found.files.iter().zip(found.stamps) {
            layout.insert(path, stamp);
        }
        Some(layout)
    }

    /// What a path in a watched directory means now; `None`: that can't be said without a scan.
    pub(super) fn resolve(&self, event: &Path) -> Option<Suspect> {
        let name = event.file_name()?;
        let Some(directory) = self.directories.get(event.parent()?) else {
            // A directory above a configured path, or an ignored one.
            let is_relevant =
                name == NO_MANIFESTS || self.outer.contains(event) || self.directories.contains_key(event);
            return (!is_relevant).then_some(Suspect::Irrelevant);
        };
        let path = directory.join(name);
        if name == NO_MANIFESTS || self.configured.contains(&path) || self.directories.contains_key(event) {
            return None;
        }
        if name.as_encoded_bytes().starts_with(b".") {
            // No symlink refers to it.
            return Some(Suspect::Irrelevant);
        }
        let is_known = self.ids.contains_key(&path);
        let metadata = match path.symlink_metadata() {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                // With its directory, it isn't removed but missing.
                return match (is_known, directory.metadata()) {
                    (false, Ok(_)) => Some(Suspect::Irrelevant),
                    (true, Ok(_)) => Some(Suspect::Removed(path)),
                    (_, Err(_)) => None,
                };
            }
            Err(_) => return None,
        };
        if !metadata.is_file() || metadata.nlink() != 1 {
            return None;
        }
        let stamp = FileStamp::of(&metadata);
        match self.by_id.get(&stamp.file) {
            Some(other) if *other != path => None,
            _ if is_known || is_manifest(&path) => Some(Suspect::File(path, stamp)),
            _ => Some(Suspect::Irrelevant),
        }
    }

    /// A file that was read.
    pub(super) fn insert(&mut self, path: &Path, stamp: FileStamp) {
        self.remove(path);
        self.by_id.insert(stamp.file, path.to_owned());
        self.ids.insert(path.to_owned(), stamp.file);
    }

    /// A file that is gone.
    pub(super) fn remove(&mut self, path: &Path) {
        if let Some(id) = self.ids.remove(path) {
            self.by_id.remove(&id);
        }
    }
}
