//! Directory of `sessions.state`. By default it is in `/dev/shm`, where every user of the host may create files: what
//! is found there is used only if nobody but this user and root can have made or changed it.
//!
//! ```text
//!   /dev/shm            writable for all, sticky: nobody renames or removes what others own
//!     vipgate           `sessions.state`, created with mode 0700
//!       gw-a            session tables of the gateway gw-a, mode 0700
//!       gw-a.secret     and its other files
//! ```
//! Anything else there is renamed, and neither followed, changed nor removed. Where that fails, or where only the
//! operator can have made it, sessions end with the process.

use std::fs::{self, DirBuilder, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, RenameFlags, fchmod, openat, renameat_with};
use thiserror::Error;

use super::{ADDRESSES, MEMBERSHIP, SECRET, path_beside, state_dir};
use crate::command_error::CommandError;
use crate::config::Config;

/// Mode of the directories.
const MODE: u32 = 0o700;
/// Any permission of group and others, and that to write.
const OTHERS: u32 = 0o077;
const OTHERS_WRITE: u32 = 0o022;
const STICKY: u32 = 0o1000;
const ROOT: u32 = 0;
/// How often a path is tried that others change meanwhile.
const MAX_ATTEMPTS: u32 = 8;

/// What an entry has to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    /// A directory in which nobody else replaces what is this user's: closed to others, or sticky.
    Parent,
    /// A directory to which nobody else writes.
    Own,
    /// A directory in one of these.
    Inner,
    /// A regular file with one name, to which nobody else writes.
    File,
}

/// Why an entry isn't used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(super) enum Flaw {
    #[error("it is a symbolic link")]
    Link,
    #[error("it is not a directory")]
    NotADirectory,
    #[error("it is not a regular file")]
    NotAFile,
    #[error("it belongs to user {0}")]
    Owner(u32),
    #[error("others may write to it, its mode is {0:04o}")]
    Writable(u32),
    #[error("it has {0} names (hard links)")]
    HardLinks(u64),
}

/// Why sessions can't be stored.
#[derive(Debug, Error)]
pub(super) enum DirectoryError {
    #[error("{} is not used: {flaw}", .path.display())]
    Unsafe { path: PathBuf, flaw: Flaw },
    #[error("{} is not used: {flaw}; it cannot be renamed: {source}", .path.display())]
    InTheWay { path: PathBuf, flaw: Flaw, source: io::Error },
    #[error("{} is not used: somebody keeps creating it", .0.display())]
    Contended(PathBuf),
    #[error("cannot create or examine {}: {source}", .path.display())]
    Io { path: PathBuf, source: io::Error },
}

impl DirectoryError {
    /// Whether the gateway ends: the configuration is wrong, or the kernel refuses. Other users of this host can't have
    /// caused it.
    pub(super) fn is_fatal(&self) -> bool {
        matches!(self, Self::Io { source, .. } if !is_full(source))
    }
}

/// Whether the file system has no space, or no inode.
pub(super) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
}

/// Creates the directories of this gateway, and renames what is in their place and isn't safe to use. Where that is
/// impossible, sessions aren't stored: the configuration then is as with `sessions.state: null`.
///
/// # Errors
/// When a directory can't be created.
pub(in crate::gateway) fn prepare(config: &mut Config) -> Result<(), CommandError> {
    let (Some(state), Some(own)) = (config.sessions.state.clone(), state_dir(config)) else { return Ok(()) };
    let files = [ADDRESSES, SECRET, MEMBERSHIP].into_iter().filter_map(|suffix| path_beside(config, suffix));
    match prepare_in(&state, &own, files, user()) {
        Ok(()) => Ok(()),
        Err(error) if error.is_fatal() => Err(CommandError::input(error).context("sessions.state")),
        Err(error) => {
            tracing::error!(event = "state_lost", %error, "sessions will end with the process");
            config.sessions.state = None;
            Ok(())
        }
    }
}

/// Checks the directories of a gateway that isn't running; changes nothing.
pub(super) fn check(config: &Config) -> Result<(), DirectoryError> {
    let (Some(state), Some(own)) = (&config.sessions.state, state_dir(config)) else { return Ok(()) };
    for (path, rule) in [(without_slash(state), Rule::Parent), (own, Rule::Own)] {
        if let Some((_, found)) = examine(&path)?
            && let Some(flaw) = flaw(&found, rule, user())
        {
            return Err(DirectoryError::Unsafe { path, flaw });
        }
    }
    Ok(())
}

fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// A slash at the end of a path follows a link.
fn without_slash(path: &Path) -> PathBuf {
    path.components().collect()
}

fn prepare_in(state: &Path, own: &Path, files: impl Iterator<Item = PathBuf>, user: u32) -> Result<(), DirectoryError> {
    let state = without_slash(state);
    let parent = state.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let failed = |source| DirectoryError::Io { path: parent.into(), source };
    fs::create_dir_all(parent).map_err(failed)?;
    let parent = parent.metadata().map_err(failed)?;
    // Elsewhere only an operator can have made it.
    let is_shared = parent.mode() & STICKY != 0;
    let (directory, found) = open_or_create(&state, Rule::Parent, is_shared, user)?;
    // Not where the operator shares it, or has mounted it: it may be a directory with another purpose.
    if is_shared && found.dev() == parent.dev() && found.mode() & OTHERS_WRITE == 0 {
        tighten(&state, &directory, &found, user)?;
    }
    let (directory, found) = open_or_create(own, Rule::Own, true, user)?;
    tighten(own, &directory, &found, user)?;
    if let Some((file, flaw)) = flaw_below(own, user)? {
        set_aside(own, &file, flaw)?;
        open_or_create(own, Rule::Own, true, user)?;
    }
    for file in files {
        if let Some((_, found)) = examine(&file)?
            && let Some(flaw) = flaw(&found, Rule::File, user)
        {
            set_aside(&file, &file, flaw)?;
        }
    }
    Ok(())
}

/// Opens a directory that satisfies the rule. Creates it if nothing is there; renames anything else, if permitted.
fn open_or_create(path: &Path, rule: Rule, may_rename: bool, user: u32) -> Result<(File, Metadata), DirectoryError> {
    for _ in 0..MAX_ATTEMPTS {
        let Some((entry, found)) = examine(path)? else {
            match DirBuilder::new().mode(MODE).create(path) {
                Err(source) if source.kind() != ErrorKind::AlreadyExists => {
                    return Err(DirectoryError::Io { path: path.into(), source });
                }
                // Examined in any case: somebody else may have created it.
                _ => continue,
            }
        };
        match flaw(&found, rule, user) {
            None => return Ok((entry, found)),
            Some(flaw) if may_rename => set_aside(path, path, flaw)?,
            Some(flaw) => return Err(DirectoryError::Unsafe { path: path.into(), flaw }),
        }
    }
    Err(DirectoryError::Contended(path.into()))
}

/// What is at a path, without following or opening it; `None`: nothing.
fn examine(path: &Path) -> Result<Option<(File, Metadata)>, DirectoryError> {
    let flags = (OFlags::PATH | OFlags::NOFOLLOW).bits().cast_signed();
    let opened = OpenOptions::new().read(true).custom_flags(flags).open(path);
    match opened.and_then(|entry| Ok((entry.metadata()?, entry))) {
        Ok((found, entry)) => Ok(Some((entry, found))),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(source) => Err(DirectoryError::Io { path: path.into(), source }),
    }
}

/// The first flaw of an entry.
fn flaw(found: &Metadata, rule: Rule, user: u32) -> Option<Flaw> {
    let mode = found.mode() & 0o7777;
    let is_writable = match rule {
        Rule::Parent => mode & OTHERS_WRITE != 0 && mode & STICKY == 0,
        Rule::Own | Rule::File => mode & OTHERS_WRITE != 0,
        Rule::Inner => false,
    };
    match rule {
        _ if found.is_symlink() => Some(Flaw::Link),
        Rule::File if !found.is_file() => Some(Flaw::NotAFile),
        Rule::Parent | Rule::Own | Rule::Inner if !found.is_dir() => Some(Flaw::NotADirectory),
        _ if found.uid() != user && found.uid() != ROOT => Some(Flaw::Owner(found.uid())),
        _ if is_writable => Some(Flaw::Writable(mode)),
        Rule::File if found.nlink() > 1 => Some(Flaw::HardLinks(found.nlink())),
        _ => None,
    }
}

/// The first entry below a directory with a flaw.
fn flaw_below(directory: &Path, user: u32) -> Result<Option<(PathBuf, Flaw)>, DirectoryError> {
    let failed = |source| DirectoryError::Io { path: directory.into(), source };
    for entry in fs::read_dir(directory).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        // It may be removed meanwhile, by a process of the same name.
        let Some((_, found)) = examine(&path)? else { continue };
        let rule = if found.is_dir() { Rule::Inner } else { Rule::File };
        if let Some(flaw) = flaw(&found, rule, user) {
            return Ok(Some((path, flaw)));
        }
        if found.is_dir()
            && let Some(below) = flaw_below(&path, user)?
        {
            return Ok(Some(below));
        }
    }
    Ok(None)
}

/// Takes the permissions from others that the directory's creator has given them.
fn tighten(path: &Path, directory: &File, found: &Metadata, user: u32) -> Result<(), DirectoryError> {
    if found.uid() != user || found.mode() & OTHERS == 0 {
        return Ok(());
    }
    // Opened anew: `directory` is open for examination only.
    openat(directory, c".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .and_then(|directory| fchmod(directory, Mode::RWXU))
        .map_err(|error| DirectoryError::Io { path: path.into(), source: error.into() })
}

/// Renames an entry because of a flaw that `file`, itself or an entry below it, has.
fn set_aside(path: &Path, file: &Path, flaw: Flaw) -> Result<(), DirectoryError> {
    let renamed = unused_name(path).and_then(|aside| {
        renameat_with(CWD, path, CWD, aside.as_path(), RenameFlags::NOREPLACE)?;
        Ok(aside)
    });
    match renamed {
        Ok(aside) => {
            let (file, aside) = (file.display(), aside.display());
            tracing::warn!(
                event = "state_set_aside",
                %file,
                reason = %flaw,
                %aside,
                "others may have made or changed it: it was renamed, and nothing in it is used"
            );
            Ok(())
        }
        // Its creator has removed it.
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(source) => Err(DirectoryError::InTheWay { path: path.into(), flaw, source }),
    }
}

/// A name beside a path that nobody can have foreseen.
fn unused_name(path: &Path) -> io::Result<PathBuf> {
    let mut random = [0; 8];
    getrandom::fill(&mut random)?;
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".set-aside-{:016x}", u64::from_ne_bytes(random)));
    Ok(name.into())
}

#[cfg(test)]
mod tests;
