//! The record in a file, which is replaced whole.

use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::sync::Arc;

use vipgate_common::spawn_blocking;
use vipgate_policy::address_record::AddressRecord;

use super::{FaultyLine, parse};
use crate::replaced_file::replace;
use crate::text_file::regular_text;

/// Whoever reads the record knows all tenants, and whoever writes it decides who has which address.
const MODE: u32 = 0o600;

/// Why the file can't be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecordFileError {
    /// It can't be read.
    #[error("{path}: can't be read: {source}: make it readable, or remove it and begin a new record")]
    Unreadable { path: PathBuf, source: io::Error },
    /// It isn't a record.
    #[error("{path}: {source}: mend the line, or remove the file and begin a new record")]
    Invalid { path: PathBuf, source: FaultyLine },
    /// It can't be written.
    #[error("{path}: can't be written: {source}: check the directory, and the space there")]
    Unwritable { path: PathBuf, source: io::Error },
}

/// A record in a file.
#[derive(Debug)]
pub(crate) struct RecordFile {
    path: PathBuf,
    /// What it had at the start, until that is known.
    initial: Option<AddressRecord>,
}

impl RecordFile {
    /// Reads the file; one that is missing is an empty record.
    pub(super) fn open(path: PathBuf) -> Result<Self, RecordFileError> {
        let text = match regular_text(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
            Err(source) => return Err(RecordFileError::Unreadable { path, source }),
        };
        match parse(&text) {
            Ok(record) => Ok(Self { path, initial: Some(record) }),
            Err(source) => Err(RecordFileError::Invalid { path, source }),
        }
    }

    pub(super) fn is_loaded(&self) -> bool {
        self.initial.is_none()
    }

    /// What the file had at the start.
    pub(super) fn load(&mut self) -> Arc<AddressRecord> {
        self.initial.take().unwrap_or_default().into()
    }

    pub(super) async fn save(&self, record: Arc<AddressRecord>) -> Result<(), RecordFileError> {
        let path = self.path.clone();
        let written = spawn_blocking(move || replace(&path, MODE, &[record.to_string().as_bytes()])).await;
        written.map_err(|source| RecordFileError::Unwritable { path: self.path.clone(), source })
    }
}
