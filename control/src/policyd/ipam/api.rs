//! Services and AddressPools in the API: read with a quorum, and their status written if they are still what was read.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::net::IpAddr;
use std::time::Duration;

use k8s_openapi::api::core::v1::Service;
use kube::api::{DynamicObject, ListParams, Patch, PatchParams};
use kube::{Api, Client};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::time::timeout;
use vipgate_policy::address_record::AddressRecord;
use vipgate_policy::manifest::{FIELD_MANAGER, Kind, ServiceRequest};

use crate::config::KubernetesSource;
use crate::source::kubernetes::{RequestError, ReusedClient, cluster_uid, objects, request};

/// Timeout of a write: the leader's Lease must be valid for longer.
pub(super) const WRITE_TIMEOUT: Duration = Duration::from_secs(1);
/// Timeout of reading all Services and pools.
const LIST_TIMEOUT: Duration = Duration::from_secs(20);
/// Objects per page of a list, which are of one resource version together.
const PAGE_SIZE: u32 = 500;

/// What was read.
#[derive(Debug, Default)]
pub(super) struct Listed {
    pub(super) services: Vec<ListedService>,
    /// By name.
    pub(super) pools: BTreeMap<String, ListedPool>,
}

/// A Service as it was read.
#[derive(Debug)]
pub(super) struct ListedService {
    pub(super) request: ServiceRequest,
    version: String,
}

/// A pool as it was read.
#[derive(Debug)]
pub(super) struct ListedPool {
    pub(super) record: AddressRecord,
    /// Whether its status has one, even if it is empty.
    pub(super) has_record: bool,
    pub(super) version: String,
}

/// Why a write has failed.
#[derive(Debug)]
pub(super) enum WriteError {
    /// The object has changed, or is gone.
    Conflict,
    /// The API server refuses it.
    Refused(String),
    /// There was no response: it may have been done.
    Unknown(String),
}

/// A client of the cluster that was connected first.
pub(super) struct AddressApi {
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

impl AddressApi {
    pub(super) fn new(source: KubernetesSource) -> Self {
        Self { client: ReusedClient::new(source.clone()), source, cluster_uid: None }
    }

    /// Reads all Services that have addresses or may have some, and all pools.
    pub(super) async fn list(&mut self) -> Result<Listed, String> {
        let listed = match timeout(LIST_TIMEOUT, self.try_list()).await {
            Ok(listed) => listed,
            Err(_) => Err(RequestError::NoResponse(LIST_TIMEOUT).to_string()),
        };
        if listed.is_err() {
            self.client.discard();
        }
        listed
    }

    async fn try_list(&mut self) -> Result<Listed, String> {
        let client = self.client.get().await.map_err(|error| error.to_string())?;
        let uid = cluster_uid(&client).await?;
        if self.cluster_uid.is_some() && uid != self.cluster_uid {
            return Err("it is another cluster than before: restart the policy server if that is intended".to_owned());
        }
        self.cluster_uid = uid;
        let (unclassed, mut listed) = (self.source.unclassed(), Listed::default());
        for api in self.services(&client) {
            let read = |service: Service| {
                let request = ServiceRequest::read(&service, unclassed)?;
                Some(ListedService { request, version: service.metadata.resource_version.unwrap_or_default() })
            };
            listed.services.extend(list(&api, read).await?);
        }
        listed.pools.extend(list(&objects(client, Kind::AddressPool, None), read_pool).await?);
        Ok(listed)
    }

    /// All Services, or those of each configured namespace.
    fn services(&self, client: &Client) -> Vec<Api<Service>> {
        if self.source.namespaces.is_empty() {
            return vec![Api::all(client.clone())];
        }
        self.source.namespaces.iter().map(|namespace| Api::namespaced(client.clone(), namespace)).collect()
    }

    /// Writes the addresses of a Service, if nobody has changed it since it was read.
    pub(super) async fn write(&self, service: &ListedService, addresses: &[IpAddr]) -> Result<(), WriteError> {
        let services: Api<Service> = Api::namespaced(self.connected()?, &service.request.namespace);
        let patch = Patch::Merge(service_patch(&service.version, addresses));
        let parameters = parameters();
        let patched = services.patch_status(&service.request.name, &parameters, &patch);
        request(WRITE_TIMEOUT, patched).await.map(drop).map_err(|error| write_error(&error))
    }

    /// Writes the record of a pool, if nobody has changed the pool since it was read.
    pub(super) async fn write_record(
        &self,
        name: &str,
        pool: &ListedPool,
        record: &AddressRecord,
    ) -> Result<(), WriteError> {
        let pools = objects(self.connected()?, Kind::AddressPool, None);
        let patch = Patch::Merge(record_patch(&pool.version, record));
        let parameters = parameters();
        let patched = pools.patch_status(name, &parameters, &patch);
        let written = request(WRITE_TIMEOUT, patched).await.map_err(|error| write_error(&error))?;
        if has_record(&written.data) && read_record(&written.data) == *record {
            return Ok(());
        }
        let kept = "the cluster doesn't keep `status.addresses`: apply this version's CustomResourceDefinitions";
        Err(WriteError::Refused(format!("AddressPool {name}: {kept}")))
    }

    fn connected(&self) -> Result<Client, WriteError> {
        self.client.current().ok_or_else(|| WriteError::Refused("not connected".to_owned()))
    }
}

/// Reads all objects, page by page.
async fn list<K, T>(api: &Api<K>, read: impl Fn(K) -> Option<T>) -> Result<Vec<T>, String>
where
    K: Clone + DeserializeOwned + Debug,
{
    let (mut page, mut all) = (ListParams::default().limit(PAGE_SIZE), Vec::new());
    loop {
        let list = request(LIST_TIMEOUT, api.list(&page)).await.map_err(|error| error.to_string())?;
        all.extend(list.items.into_iter().filter_map(&read));
        match list.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page = page.continue_token(&token),
            None => return Ok(all),
        }
    }
}

fn read_pool(object: DynamicObject) -> Option<(String, ListedPool)> {
    let version = object.metadata.resource_version.unwrap_or_default();
    Some((
        object.metadata.name?,
        ListedPool { record: read_record(&object.data), has_record: has_record(&object.data), version },
    ))
}

fn has_record(pool: &Value) -> bool {
    pool.pointer("/status/addresses").is_some_and(Value::is_array)
}

/// What a pool has recorded; lines that can't be read are left out.
fn read_record(pool: &Value) -> AddressRecord {
    let lines = pool.pointer("/status/addresses").and_then(Value::as_array);
    let mut record = AddressRecord::default();
    for line in lines.into_iter().flatten().filter_map(Value::as_str) {
        if let Ok(one) = AddressRecord::from_lines([line]) {
            record.extend(&one);
        }
    }
    record
}

fn parameters() -> PatchParams {
    PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() }
}

fn write_error(error: &RequestError) -> WriteError {
    match error.code() {
        Some(404 | 409) => WriteError::Conflict,
        Some(400..=499) => WriteError::Refused(error.to_string()),
        _ => WriteError::Unknown(error.to_string()),
    }
}

/// A merge patch of a Service's status; with the resource version it fails if the Service is another one by now.
fn service_patch(version: &str, addresses: &[IpAddr]) -> Value {
    let ingress: Vec<Value> = addresses.iter().map(|address| json!({"ip": address})).collect();
    let ingress = if ingress.is_empty() { Value::Null } else { ingress.into() };
    json!({"metadata": {"resourceVersion": version}, "status": {"loadBalancer": {"ingress": ingress}}})
}

/// The same of a pool's status. What the writer of status applies to it has no record, so it leaves this one.
fn record_patch(version: &str, record: &AddressRecord) -> Value {
    let lines: Vec<String> = record.lines().collect();
    json!({"metadata": {"resourceVersion": version}, "status": {"addresses": lines}})
}

#[cfg(test)]
mod tests;
