//! The record in a file, which is replaced whole.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::Arc;

use vipgate_common::spawn_blocking;
use vipgate_policy::address_record::AddressRecord;

use super::{RecordError, parse};
use crate::replaced_file::replace;
use crate::text_file::regular_text;

/// Whoever reads the record knows all tenants, and whoever writes it decides who has which address.
const MODE: u32 = 0o600;

/// A record in a file.
#[derive(Debug)]
pub(crate) struct RecordFile {
    path: PathBuf,
    /// What it had at the start, until that is known.
    initial: Option<AddressRecord>,
}

impl RecordFile {
    /// Reads the file; one that is missing is an empty record.
    pub(super) fn open(path: PathBuf) -> Result<Self, RecordError> {
        let text = match regular_text(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
            Err(source) => return Err(RecordError::Unreadable { path, source }),
        };
        match parse(&text) {
            Ok(record) => Ok(Self { path, initial: Some(record) }),
            Err(reason) => {
                let text = format!("{}: {reason}: mend the line, or remove the file", path.display());
                Err(RecordError::Damaged(text))
            }
        }
    }

    pub(super) fn is_loaded(&self) -> bool {
        self.initial.is_none()
    }

    /// What the file had at the start.
    pub(super) fn load(&mut self) -> Arc<AddressRecord> {
        self.initial.take().unwrap_or_default().into()
    }

    pub(super) async fn save(&self, record: Arc<AddressRecord>) -> Result<(), RecordError> {
        let path = self.path.clone();
        let written = spawn_blocking(move || replace(&path, MODE, &[record.to_string().as_bytes()])).await;
        written.map_err(|source| RecordError::Unwritable { path: self.path.clone(), source })
    }
}
