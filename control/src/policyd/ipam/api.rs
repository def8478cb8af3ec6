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
use crate::source::kubernetes::{client, cluster_uid, describe};

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
    client: Option<Client>,
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
        Self { source, client: None, cluster_uid: None }
    }

    /// Reads all Services that have addresses or may have some.
    pub(super) async fn list(&mut self) -> Result<Vec<ListedService>, String> {
        let listed = match timeout(LIST_TIMEOUT, self.try_list()).await {
            Ok(listed) => listed,
            Err(_) => Err(format!("no response within {} s", LIST_TIMEOUT.as_secs())),
        };
        if listed.is_err() {
            // Its credentials may be others by now.
            self.client = None;
        }
        listed
    }

    async fn try_list(&mut self) -> Result<Vec<ListedService>, String> {
        let client = match &self.client {
            Some(client) => client.clone(),
            None => client(&self.source).await.map_err(|error| error.to_string())?,
        };
        let uid = cluster_uid(&client).await?;
        if self.cluster_uid.is_some() && uid != self.cluster_uid {
            return Err("it is another cluster than before: restart the policy server if that is intended".to_owned());
        }
        self.cluster_uid = uid;
        self.client = Some(client.clone());
        let unclassed = self.source.unclassed();
        let mut listed = Vec::new();
        for api in self.apis(&client) {
            let mut page = ListParams::default().limit(PAGE_SIZE);
            loop {
                let list = api.list(&page).await.map_err(|error| describe(&error))?;
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
        let Some(client) = self.client.clone() else {
            return Err(WriteError::Refused("not connected".to_owned()));
        };
        let services: Api<Service> = Api::namespaced(client, &service.request.namespace);
        let parameters = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
        let patch = Patch::Merge(patch(&service.version, addresses));
        let response = timeout(WRITE_TIMEOUT, services.patch_status(&service.request.name, &parameters, &patch)).await;
        match response {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => Err(WriteError::Conflict),
            Ok(Err(kube::Error::Api(status))) if (400..500).contains(&status.code) => {
                Err(WriteError::Refused(status.message.clone()))
            }
            Ok(Err(error)) => Err(WriteError::Unknown(describe(&error))),
            Err(_) => Err(WriteError::Unknown(format!("no response within {} s", WRITE_TIMEOUT.as_secs()))),
        }
    }
}

/// A merge patch of the status; with the resource version it fails if the Service is another one by now.
fn patch(version: &str, addresses: &[IpAddr]) -> Value {
    let ingress: Vec<Value> = addresses.iter().map(|address| json!({"ip": address})).collect();
    let ingress = if ingress.is_empty() { Value::Null } else { ingress.into() };
    json!({"metadata": {"resourceVersion": version}, "status": {"loadBalancer": {"ingress": ingress}}})
}
