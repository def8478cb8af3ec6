//! Which files a list of files and directories stands for.
//!
//! In directories: `*.yaml`, `*.yml`, `*.json`, recursive, sorted; names that begin with a dot are left out, which also
//! keeps editors' swap files away, and the `..data` links of a mounted `ConfigMap`, whose files are found beside them.

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};

/// Directories inside directories, at most.
const DEPTH: usize = 32;

/// What a list of paths stands for at this moment.
#[derive(Debug, Default)]
pub struct Walk {
    /// The files, each once, in the order of the paths and sorted within a directory.
    pub files: Vec<PathBuf>,
    /// The directories that were looked into.
    pub directories: Vec<PathBuf>,
    /// Paths that could not be looked into, and why.
    pub failures: Vec<(PathBuf, io::Error)>,
}

/// Looks up what `paths` stand for.
pub fn walk(paths: &[PathBuf]) -> Walk {
    let mut walk = Walk::default();
    let mut seen = HashSet::new();
    for path in paths {
        walk.visit(path, true, 0, &mut seen);
    }
    walk
}

impl Walk {
    fn visit(&mut self, path: &Path, named: bool, depth: usize, seen: &mut HashSet<PathBuf>) {
        // Through links, so that one file is read once whatever the ways to it, and a circle of links ends.
        let (real, is_directory) = match path.canonicalize().and_then(|real| Ok((path.metadata()?.is_dir(), real))) {
            Ok((is_directory, real)) => (real, is_directory),
            // Gone between listing and looking: as if it had never been there.
            Err(error) if !named && error.kind() == io::ErrorKind::NotFound => return,
            Err(error) => return self.failures.push((path.to_owned(), error)),
        };
        if !is_directory && !named && !is_manifest(path) || !seen.insert(real) {
            return;
        }
        if !is_directory {
            return self.files.push(path.to_owned());
        }
        self.directories.push(path.to_owned());
        if depth >= DEPTH {
            return self.failures.push((path.to_owned(), io::Error::other("too many directories inside each other")));
        }
        match std::fs::read_dir(path).and_then(Iterator::collect::<Result<Vec<_>, _>>) {
            Ok(entries) => {
                let mut names: Vec<_> = entries.into_iter().map(|entry| entry.file_name()).collect();
                names.retain(|name| !name.as_encoded_bytes().starts_with(b"."));
                names.sort();
                for name in names {
                    self.visit(&path.join(name), false, depth + 1, seen);
                }
            }
            Err(error) => self.failures.push((path.to_owned(), error)),
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
        let found = walk(&[dir.path().to_owned(), at("z.yaml"), at("notes.txt")]);
        assert_eq!(found.files, [at("a.json"), at("b/deep/c.yml"), at("z.yaml"), at("notes.txt")]);
        assert_eq!(found.directories, [dir.path().to_owned(), at("b"), at("b/deep")]);
        assert!(found.failures.is_empty());
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
    fn a_path_that_is_not_there_is_a_failure() {
        let found = walk(&["/nonexistent/x".into()]);
        assert_eq!(found.failures.len(), 1);
        assert_eq!(found.failures[0].0, Path::new("/nonexistent/x"));
    }
}
