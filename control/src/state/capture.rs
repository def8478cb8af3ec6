//! Whether the steering program captures all that policy covers.

use std::sync::Arc;

/// Status of the updates of the steering program's maps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CaptureStatus {
    /// Why the maps don't hold what they should; `None`: they do. Updates are retried until then.
    pub error: Option<Arc<str>>,
    /// Updates that failed since start, retries included.
    pub failures: u64,
}
