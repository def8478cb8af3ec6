//! Services and AddressPools in the API: read with a quorum, and what is written to their status if they are still what was
//! read.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Service;
use kube::api::{DynamicObject, ListParams};
use kube::{Api, Client};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::time::timeout;
use vipgate_policy::address_record::AddressRecord;
use vipgate_policy::manifest::{Kind, ServiceRequest};

use crate::config::KubernetesSource;
use crate::policyd::kubernetes::writer::{ObjectReference, Purpose, Write};
use crate::source::kubernetes::{RequestError, ReusedClient, cluster_uid, objects, request};

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
    uid: Arc<str>,
    version: String,
}

/// A pool as it was read.
#[derive(Debug)]
pub(super) struct ListedPool {
    pub(super) record: AddressRecord,
    /// Whether its status has one, even if it is empty.
    pub(super) has_record: bool,
    pub(super) uid: Arc<str>,
    pub(super) version: String,
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

    /// The write of its addresses.
    pub(super) fn write(&self, addresses: &[IpAddr]) -> Write {
        let ServiceRequest { namespace, name, .. } = &self.request;
        let (kind, uid) = (Kind::Service, self.uid.clone());
        let object = ObjectReference { kind, namespace: namespace.clone(), name: name.clone(), uid };
        let ingress: Vec<Value> = addresses.iter().map(|address| json!({"ip": address})).collect();
        // Without addresses it manages no field, so that others may give it some.
        let status = (!ingress.is_empty()).then(|| json!({"loadBalancer": {"ingress": ingress}}));
        Write::status(Purpose::Addresses, object, Some(&self.version), status)
    }
}

impl ListedPool {
    /// The write of its record.
    pub(super) fn write(&self, name: &str, record: &AddressRecord) -> Write {
        let (kind, uid) = (Kind::AddressPool, self.uid.clone());
        let object = ObjectReference { kind, namespace: String::new(), name: name.to_owned(), uid };
        let status = json!({"addresses": record.lines().collect::<Vec<String>>()});
        Write::status(Purpose::Addresses, object, Some(&self.version), Some(status))
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
                let uid = service.metadata.uid.unwrap_or_default().into();
                Some(ListedService { request, uid, version: service.metadata.resource_version.unwrap_or_default() })
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
    let pool = ListedPool {
        record: read_record(&object.data),
        has_record: has_record(&object.data),
        uid: object.metadata.uid.unwrap_or_default().into(),
        version: object.metadata.resource_version.unwrap_or_default(),
    };
    Some((object.metadata.name?, pool))
}

/// Whether a pool has a record as it was written: one that it lacks would be given to others.
pub(super) fn keeps(pool: &DynamicObject, record: &AddressRecord) -> bool {
    has_record(&pool.data) && read_record(&pool.data) == *record
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

#[cfg(test)]
mod tests;
