//! Long operations: a state at a URL, until their time has passed.

use serde_json::{Value, json};
use tokio::time::Instant;

use super::error::Error;
use super::{FakeAzure, LOCATION, SUBSCRIPTION};
use crate::request::{RecordedRequest, Reply};

/// An operation that was accepted.
pub(super) struct Operation {
    name: String,
    /// Id of the resource, in lower case.
    resource: String,
    due: Instant,
    /// Status, code and message of its failure.
    failure: Option<(String, String, String)>,
}

impl Operation {
    fn is_done(&self) -> bool {
        self.due <= Instant::now()
    }
}

impl FakeAzure {
    /// Whether an operation on a resource is under way.
    pub(super) fn is_busy(&self, id: &str) -> bool {
        self.operations.iter().any(|it| !it.is_done() && it.resource.eq_ignore_ascii_case(id))
    }

    /// Accepts a change, and carries it out unless its operation is to fail. Returns the headers that say where its state is.
    pub(super) fn accept(
        &mut self,
        request: &RecordedRequest,
        id: &str,
        change: impl FnOnce(&mut super::state::State),
    ) -> Vec<(String, String)> {
        let failure = self.operation_errors.pop_front();
        if failure.is_none() {
            self.change(change);
        }
        let name = format!("op-{}", self.operations.len() + 1);
        let due = Instant::now() + self.operation_time;
        self.operations.push(Operation { name: name.clone(), resource: id.to_ascii_lowercase(), due, failure });
        let base = self.base(request);
        let version = request.parameter("api-version").unwrap_or_default();
        let url = |kind: &str| {
            let path =
                format!("/subscriptions/{SUBSCRIPTION}/providers/Microsoft.Network/locations/{LOCATION}/{kind}/{name}");
            format!("{base}{path}?api-version={version}")
        };
        let mut headers = vec![("location".to_owned(), url("operationResults"))];
        if !(self.has_location_only && request.method == "DELETE") {
            headers.push(("azure-asyncoperation".to_owned(), url("operations")));
        }
        headers.extend(self.retry_after.map(|seconds| ("retry-after".to_owned(), seconds.to_string())));
        headers
    }

    /// Base of URLs in responses.
    pub(super) fn base(&self, request: &RecordedRequest) -> String {
        let host = || format!("http://{}", request.header("host").unwrap_or_default());
        self.links.clone().unwrap_or_else(host)
    }

    /// The state of an operation (`operations`), or its result (`operationResults`).
    pub(super) fn operation(&self, kind: &str, name: &str) -> Result<Reply, Error> {
        let found = self.operations.iter().find(|it| it.name == name);
        let found = found.ok_or_else(|| Error::new(404, "OperationNotFound", "There is no such operation."))?;
        if kind.eq_ignore_ascii_case("operationResults") {
            let status = if found.is_done() { 204 } else { 202 };
            return Ok(Reply { status, ..Reply::default() });
        }
        let state: Value = match &found.failure {
            _ if !found.is_done() => json!({ "status": "InProgress" }),
            None => json!({ "status": "Succeeded" }),
            Some((status, code, message)) => {
                json!({ "status": status, "error": { "code": code, "message": message, "details": [] } })
            }
        };
        Ok(Reply::json(200, &state))
    }
}
