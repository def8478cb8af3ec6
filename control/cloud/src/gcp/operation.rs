//! Operations: the API accepts a change, and carries it out later; the caller waits for the operation.

use std::time::Duration;

use hyper::Method;
use tokio::time::{sleep, timeout};
use vipgate_common::Backoff;

use super::client::Client;
use super::error::of_operation;
use super::resource;
use crate::api::{self, decode};
use crate::error::{CloudError, ErrorKind};

const WAIT_ZONE: api::Operation = api::Operation::read("zoneOperations.wait");
const WAIT_REGION: api::Operation = api::Operation::read("regionOperations.wait");

/// Pause before the next wait when one ends early, which the API may do at any time.
const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));

/// Where an operation is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Location<'a> {
    /// In the region of the addresses.
    Region,
    /// In a zone.
    Zone(&'a str),
}

impl Client {
    /// Waits until an operation is done. A wait of the API takes up to two minutes, longer than a request may here: then it is
    /// sent again, since it changes nothing.
    pub(super) async fn finish(
        &self,
        name: &'static str,
        location: Location<'_>,
        accepted: resource::Operation,
    ) -> Result<(), CloudError> {
        let wait = async {
            let (mut operation, mut pauses, mut pause) = (accepted, Backoff::new(PAUSE), Duration::ZERO);
            while operation.status != "DONE" {
                sleep(pause).await;
                pause = pauses.next_delay();
                operation = self.wait(location, &operation.name).await.map_err(CloudError::of_accepted_change)?;
            }
            of_operation(name, &operation).map_or(Ok(()), Err)
        };
        let late = || CloudError::new(ErrorKind::Unknown, name, "OperationTimeout", "accepted, but not done in time");
        timeout(self.timeout, wait).await.unwrap_or_else(|_| Err(late()))
    }

    async fn wait(&self, location: Location<'_>, operation: &str) -> Result<resource::Operation, CloudError> {
        let (call, place) = match location {
            Location::Region => (WAIT_REGION, format!("regions/{}", self.region)),
            Location::Zone(zone) => (WAIT_ZONE, format!("zones/{zone}")),
        };
        let request = self.request(&Method::POST, &format!("{place}/operations/{operation}/wait"), &[], None)?;
        decode(call.name, &self.api.call(call, &request).await?)
    }
}
