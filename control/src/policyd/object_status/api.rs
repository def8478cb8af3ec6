//! Status in the API, by server-side apply: fields that others have written stay theirs.

use std::time::Duration;

use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use super::planner::StatusWrite;
use crate::config::KubernetesSource;
use crate::source::kubernetes::{ReusedClient, objects, request};

/// Name of the field manager.
const FIELD_MANAGER: &str = "vipgate-status";
/// Timeout of a write: the leader's Lease must be valid for longer.
pub(super) const WRITE_TIMEOUT: Duration = Duration::from_secs(1);

/// Why a write has failed.
#[derive(Debug)]
pub(super) enum WriteError {
    /// The object is gone, or another one has its name.
    Gone,
    /// The account may not.
    Denied(String),
    /// The API server refuses this status.
    Refused(String),
    /// There was no response: it may have been done.
    Unknown(String),
}

pub(super) struct StatusApi {
    client: ReusedClient,
}

impl StatusApi {
    pub(super) fn new(source: KubernetesSource) -> Self {
        Self { client: ReusedClient::new(source) }
    }

    /// Writes the status of an object.
    pub(super) async fn write(&mut self, write: &StatusWrite) -> Result<(), WriteError> {
        let client = self.client.get().await.map_err(|error| WriteError::Unknown(error.to_string()))?;
        let parameters = PatchParams::apply(FIELD_MANAGER).force();
        let namespace = Some(write.object.namespace.as_str()).filter(|namespace| !namespace.is_empty());
        let api = objects(client, write.object.kind, namespace);
        let patch = Patch::Apply(document(write));
        let patched = api.patch_status(&write.object.name, &parameters, &patch);
        let Err(error) = request(WRITE_TIMEOUT, patched).await else { return Ok(()) };
        let text = error.to_string();
        let error = match error.code() {
            Some(404 | 409) => WriteError::Gone,
            Some(401 | 403) => WriteError::Denied(text),
            Some(code @ 400..=499) if code != 429 => WriteError::Refused(text),
            _ => WriteError::Unknown(text),
        };
        if matches!(error, WriteError::Denied(_) | WriteError::Unknown(_)) {
            self.client.discard();
        }
        Err(error)
    }
}

/// What is applied; with the uid it is refused for an object that was created again with the same name.
fn document(write: &StatusWrite) -> Value {
    let object = &write.object;
    let mut metadata = json!({"name": object.name, "uid": *object.uid});
    if !object.namespace.is_empty() {
        metadata["namespace"] = object.namespace.as_str().into();
    }
    json!({
        "apiVersion": object.kind.api_version(),
        "kind": object.kind.as_str(),
        "metadata": metadata,
        "status": write.status,
    })
}
