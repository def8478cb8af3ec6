//! Handle of the file source, for requests to read the files again.

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};

use crate::source::ingest::SourceStatus;
use crate::source::store::{AcceptEmptyError, AcceptedEmpty};

/// Handle of the file source.
#[derive(Clone, Debug)]
pub struct FileSourceHandle {
    /// Status of the files.
    pub status: Arc<SourceStatus>,
    pub(crate) commands: mpsc::Sender<FileCommand>,
}

/// A command to the task that watches files.
#[derive(Debug)]
pub(crate) enum FileCommand {
    /// Read the files again; replies when their policy is applied or rejected.
    Reload(oneshot::Sender<()>),
    /// Accept that files are empty.
    AcceptEmpty(oneshot::Sender<Result<AcceptedEmpty, AcceptEmptyError>>),
}

impl FileSourceHandle {
    /// Reads the files again; returns when their policy is applied or rejected.
    pub(crate) async fn reload(&self) {
        let (reply, replied) = oneshot::channel();
        if self.commands.send(FileCommand::Reload(reply)).await.is_ok() {
            // Fails when the gateway stops.
            let _ = replied.await;
        }
    }

    /// Accepts that files are empty; returns when the resulting policy is applied.
    ///
    /// # Errors
    /// When no file is empty, or the gateway stops.
    pub async fn accept_empty(&self) -> Result<AcceptedEmpty, AcceptEmptyError> {
        let (reply, replied) = oneshot::channel();
        self.commands.send(FileCommand::AcceptEmpty(reply)).await.map_err(|_| AcceptEmptyError::Stopping)?;
        replied.await.map_err(|_| AcceptEmptyError::Stopping)?
    }
}
