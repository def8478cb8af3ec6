//! Files that survive a crash. They are replaced whole: a concurrent reader, and the next process, sees the old or the
//! new content. Those in a `Format` also say what they have, and prove that they are whole:
//!
//! ```text
//!   "vipgate NAME VERSION\n"   u64 fingerprint of the content (little endian)   content
//! ```
//! A file of another name or version, or that isn't as it was written, is refused, never read in part. What people read
//! and mend is text without that, and refused with the line that is wrong (`source/address_record.rs`).

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use thiserror::Error;
use vipgate_policy::fingerprint::Fingerprint;

use crate::text_file::{MAX_FILE_BYTES, read_regular};

/// What a file has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Format {
    /// In its first line, and in messages.
    pub(crate) name: &'static str,
    /// The only one that is read.
    pub(crate) version: u32,
    pub(crate) mode: u32,
}

/// Why a file is refused.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Damage {
    /// It doesn't begin with the first line of its format.
    #[error("has no {0} header of this version")]
    NoHeader(&'static str),
    /// It ends before its content.
    #[error("is truncated")]
    Truncated,
    /// Its content isn't the one that was written.
    #[error("is truncated or corrupt: wrong fingerprint")]
    WrongFingerprint,
    /// It can't be decoded; what of it.
    #[error("{0}")]
    Content(String),
}

impl Format {
    fn header(&self) -> String {
        format!("vipgate {} {}\n", self.name, self.version)
    }

    /// Replaces a file, or creates it.
    ///
    /// # Errors
    /// If it can't be written, or would be too long to be read; the file is as it was then.
    pub(crate) fn write(&self, path: &Path, content: &[u8]) -> io::Result<()> {
        let header = self.header();
        if (header.len() + size_of::<u64>() + content.len()) as u64 > MAX_FILE_BYTES {
            let reason = format!("the {} would be longer than {} MiB", self.name, MAX_FILE_BYTES >> 20);
            return Err(io::Error::other(reason));
        }
        replace(path, self.mode, &[header.as_bytes(), &Fingerprint::of(content).to_le_bytes(), content])
    }

    /// The content of a file.
    ///
    /// # Errors
    /// If it can't be read. The inner error: it can, and is refused.
    pub(crate) fn read(&self, path: &Path) -> io::Result<Result<Vec<u8>, Damage>> {
        let mut bytes = read_regular(path)?;
        Ok(self.content(&bytes).map(<[u8]>::len).map(|length| {
            bytes.drain(..bytes.len() - length);
            bytes
        }))
    }

    /// The content in the bytes of a file.
    ///
    /// # Errors
    /// If they aren't those of a whole file.
    pub(crate) fn content<'a>(&self, bytes: &'a [u8]) -> Result<&'a [u8], Damage> {
        let rest = bytes.strip_prefix(self.header().as_bytes()).ok_or(Damage::NoHeader(self.name))?;
        let (fingerprint, content) = rest.split_first_chunk().ok_or(Damage::Truncated)?;
        let is_whole = Fingerprint::of(content) == u64::from_le_bytes(*fingerprint);
        is_whole.then_some(content).ok_or(Damage::WrongFingerprint)
    }

    /// The bytes of a file with this content.
    #[cfg(test)]
    pub(crate) fn file(&self, content: &[u8]) -> Vec<u8> {
        [self.header().as_bytes(), &Fingerprint::of(content).to_le_bytes(), content].concat()
    }
}

/// Replaces a file by these parts, one after the other; its directory is created. The draft beside it, which a crash may
/// leave, has the file's whole name, so that files in one directory have different ones.
///
/// # Errors
/// If it can't be written; the file is as it was then.
pub(crate) fn replace(path: &Path, mode: u32, parts: &[&[u8]]) -> io::Result<()> {
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory)?;
    }
    let mut draft = path.as_os_str().to_owned();
    draft.push(".draft");
    // Not opened: it may have another mode, or be a link to somewhere else.
    match fs::remove_file(&draft) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    write_synced(Path::new(&draft), mode, parts).and_then(|()| fs::rename(&draft, path)).inspect_err(|_| {
        // It may be what has filled the disk.
        let _ = fs::remove_file(&draft);
    })?;
    // After a power failure the name refers to the new file. A file system that can't do that has it a little later.
    let directory = path.parent().filter(|directory| !directory.as_os_str().is_empty());
    let _ = File::open(directory.unwrap_or(Path::new("."))).and_then(|directory| directory.sync_all());
    Ok(())
}

fn write_synced(path: &Path, mode: u32, parts: &[&[u8]]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
    parts.iter().try_for_each(|part| file.write_all(part))?;
    // After a power failure the name must not refer to an incomplete file.
    file.sync_all()
}

#[cfg(test)]
mod tests;
