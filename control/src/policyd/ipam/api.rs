//! Services in the API: read with a quorum, and their status written if it is still the one that was read.

use std::net::IpAddr;
use std::time::Duration;

use k8s_openapi::api::core::v1::Service;
use kube::api::{ListParams, Patch, PatchParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::time::timeout;
use vipgate_policy::manifest::{FIELD_MANAGER, ServiceRequest};

use crate::config::KubernetesSource;
use crate::source::kubernetes::{RequestError, ReusedClient, cluster_uid, request};

/// Timeout of a write: the leader's Lease must be valid for longer.
pub(super) const WRITE_TIMEOUT: Duration = Duration::from_secs(1);
/// Timeout of reading all Services.
const LIST_TIMEOUT: Duration = Duration::from_secs(20);
/// Services per page of a list, which are of one resource version together.
const PAGE_SIZE: u32 = 500;

/// A Service as it was read.
#[derive(Debug)]
pub(super) struct ListedService {
    pub(super) request: ServiceRequest,
    version: String,
}

/// Why a write has failed.
#[derive(Debug)]
pub(super) enum WriteError {
    /// The Service has changed, or is gone.
    Conflict,
    /// The API server refuses it.
    Refused(String),
    /// There was no response: it may have been done.
    Unknown(String),
}

/// A client of the cluster that was connected first.
pub(super) struct ServiceApi {
    source: KubernetesSource,
    client: ReusedClient,
    cluster_uid: Option<String>,
}

impl ListedService {
    /// Uniquely identifies the Service in this version.
    pub(super) fn version(&self) -> &str {
        &self.version
    }
}

impl ServiceApi {
    pub(super) fn new(source: KubernetesSource) -> Self {
        Self { client: ReusedClient::new(source.clone()), source, cluster_uid: None }
    }

    /// Reads all Services that have addresses or may have some.
    pub(super) async fn list(&mut self) -> Result<Vec<ListedService>, String> {
        let listed = match timeout(LIST_TIMEOUT, self.try_list()).await {
            Ok(listed) => listed,
            Err(_) => Err(RequestError::NoResponse(LIST_TIMEOUT).to_string()),
        };
        if listed.is_err() {
            self.client.discard();
        }
        listed
    }

    async fn try_list(&mut self) -> Result<Vec<ListedService>, String> {
        let client = self.client.get().await.map_err(|error| error.to_string())?;
        let uid = cluster_uid(&client).await?;
        if self.cluster_uid.is_some() && uid != self.cluster_uid {
            return Err("it is another cluster than before: restart the policy server if that is intended".to_owned());
        }
        self.cluster_uid = uid;
        let unclassed = self.source.unclassed();
        let mut listed = Vec::new();
        for api in self.apis(&client) {
            let mut page = ListParams::default().limit(PAGE_SIZE);
            loop {
                let list = request(LIST_TIMEOUT, api.list(&page)).await.map_err(|error| error.to_string())?;
                listed.extend(list.items.into_iter().filter_map(|service| {
                    let request = ServiceRequest::read(&service, unclassed)?;
                    Some(ListedService { request, version: service.metadata.resource_version.unwrap_or_default() })
                }));
                match list.metadata.continue_.filter(|token| !token.is_empty()) {
                    Some(token) => page = page.continue_token(&token),
                    None => break,
                }
            }
        }
        Ok(listed)
    }

    /// All Services, or those of each configured namespace.
    fn apis(&self, client: &Client) -> Vec<Api<Service>> {
        if self.source.namespaces.is_empty() {
            return vec![Api::all(client.clone())];
        }
        self.source.namespaces.iter().map(|namespace| Api::namespaced(client.clone(), namespace)).collect()
    }

    /// Writes the addresses of a Service, if nobody has changed it since it was read.
    pub(super) async fn write(&self, service: &ListedService, addresses: &[IpAddr]) -> Result<(), WriteError> {
        let Some(client) = self.client.current() else {
            return Err(WriteError::Refused("not connected".to_owned()));
        };
        let services: Api<Service> = Api::namespaced(client, &service.request.namespace);
        let parameters = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
        let patch = Patch::Merge(patch(&service.version, addresses));
        let patched = services.patch_status(&service.request.name, &parameters, &patch);
        let Err(error) = request(WRITE_TIMEOUT, patched).await else { return Ok(()) };
        Err(match error.code() {
            Some(404 | 409) => WriteError::Conflict,
            Some(400..=499) => WriteError::Refused(error.to_string()),
            _ => WriteError::Unknown(error.to_string()),
        })
    }
}

/// A merge patch of the status; with the resource version it fails if the Service is another one by now.
fn patch(version: &str, addresses: &[IpAddr]) -> Value {
    let ingress: Vec<Value> = addresses.iter().map(|address| json!({"ip": address})).collect();
    let ingress = if ingress.is_empty() { Value::Null } else { ingress.into() };
    json!({"metadata": {"resourceVersion": version}, "status": {"loadBalancer": {"ingress": ingress}}})
}
