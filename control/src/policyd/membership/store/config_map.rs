//! The record in a ConfigMap beside the Lease of the server that decides.
//!
//! A ConfigMap needs no definition that somebody could delete or downgrade together with the decisions in it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use kube::api::PostParams;
use prost::Message;

use super::{RecordStore, StoreError, StoredRecord, WriteError};
use crate::config::KubernetesSource;
use crate::membership::MembershipView;
use crate::membership::authority::Record;
use crate::policyd::leader;
use crate::source::kubernetes::{RequestError, ReusedClient, request};
use crate::xds::proto;

/// Timeout of a request: API servers respond to nearly all within it.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);
/// Field manager of writes.
const FIELD_MANAGER: &str = "vipgate-policyd";
/// Keys of the ConfigMap: the term; the view's number, for people; the view, as a protobuf message.
const TERM: &str = "term";
const NUMBER: &str = "number";
const VIEW: &str = "view";

/// The ConfigMap beside the Lease.
pub(in crate::policyd) struct ConfigMapStore {
    client: ReusedClient,
    namespace: String,
    name: String,
}

impl ConfigMapStore {
    pub(in crate::policyd) fn new(source: KubernetesSource) -> Self {
        let (namespace, name) = (leader::namespace(&source), format!("{}-membership", source.lease.name));
        Self { client: ReusedClient::new(source), namespace, name }
    }

    async fn api(&mut self) -> Result<Api<ConfigMap>, StoreError> {
        let client = self.client.get().await.map_err(|error| self.unavailable(&error.to_string()))?;
        Ok(Api::namespaced(client, &self.namespace))
    }

    fn unavailable(&self, error: &str) -> StoreError {
        StoreError(format!("ConfigMap {}/{}: {error}", self.namespace, self.name))
    }

    /// A failed request. The next one gets another client.
    fn failed(&mut self, error: &RequestError) -> StoreError {
        self.client.discard();
        self.unavailable(&error.to_string())
    }
}

impl RecordStore for ConfigMapStore {
    async fn load(&mut self) -> Result<Option<StoredRecord>, StoreError> {
        let api = self.api().await?;
        match request(REQUEST_TIMEOUT, api.get_opt(&self.name)).await {
            Ok(None) => Ok(None),
            Ok(Some(object)) => {
                let record = decode(&object).map_err(|error| self.unavailable(&error))?;
                Ok(Some(StoredRecord { version: object.metadata.resource_version.unwrap_or_default(), record }))
            }
            Err(error) => Err(self.failed(&error)),
        }
    }

    async fn compare_and_swap(&mut self, version: Option<&str>, record: &Record) -> Result<String, WriteError> {
        let api = self.api().await.map_err(WriteError::Unavailable)?;
        let object = self.encode(version, record);
        let parameters = PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() };
        let response = request(REQUEST_TIMEOUT, async {
            match version {
                Some(_) => api.replace(&self.name, &parameters, &object).await,
                None => api.create(&parameters, &object).await,
            }
        });
        match response.await {
            Ok(written) => Ok(written.metadata.resource_version.unwrap_or_default()),
            Err(error) if error.refusal().is_some_and(is_conflict) => Err(WriteError::Conflict),
            Err(error) => Err(WriteError::Unavailable(self.failed(&error))),
        }
    }
}

impl ConfigMapStore {
    fn encode(&self, version: Option<&str>, record: &Record) -> ConfigMap {
        let number = record.view.number;
        let mut object = ConfigMap::default();
        object.metadata.name = Some(self.name.clone());
        object.metadata.namespace = Some(self.namespace.clone());
        object.metadata.resource_version = version.map(str::to_owned);
        object.metadata.labels =
            Some(BTreeMap::from([("app.kubernetes.io/managed-by".to_owned(), FIELD_MANAGER.to_owned())]));
        object.data = Some(
            [(TERM, record.term), (NUMBER, number)].map(|(key, value)| (key.to_owned(), value.to_string())).into(),
        );
        let view = (number > 0).then(|| ByteString(proto::View::from(&*record.view).encode_to_vec()));
        object.binary_data = view.map(|view| BTreeMap::from([(VIEW.to_owned(), view)]));
        object
    }
}

/// Whether the object isn't the one that was read. That its namespace doesn't exist is no conflict.
fn is_conflict(status: &kube::core::Status) -> bool {
    let is_about_object = |kind: &str| kind == "configmaps" || kind.is_empty();
    matches!(status.code, 404 | 409) && status.details.as_ref().is_none_or(|details| is_about_object(&details.kind))
}

fn decode(object: &ConfigMap) -> Result<Record, String> {
    let hint = "delete the ConfigMap";
    let term = object.data.as_ref().and_then(|data| data.get(TERM)).map_or(Ok(0), |term| term.parse());
    let term = term.map_err(|error| format!("{TERM}: {error}: {hint}"))?;
    let view = object.binary_data.as_ref().and_then(|data| data.get(VIEW));
    let view = view.map(|bytes| {
        let view = proto::View::decode(&*bytes.0).map_err(|error| format!("{VIEW}: {error}: {hint}"))?;
        MembershipView::try_from(view).map_err(|error| format!("{VIEW}: {error}: {hint}"))
    });
    Ok(Record { term, view: Arc::new(view.transpose()?.unwrap_or_default()) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::membership::Member;

    fn object() -> ConfigMapStore {
        ConfigMapStore::new(serde_json::from_str("{\"lease\": {\"namespace\": \"n\"}}").unwrap())
    }

    #[test]
    fn a_record_is_encoded_and_decoded() {
        let mut member = Member::new("a".into(), 6);
        (member.serving, member.incarnation, member.fingerprint) = (true, 9, Some([3; 32]));
        let view = MembershipView { number: 7, serving_changes: 2, members: vec![member] };
        for record in [Record { term: 3, view: Arc::new(view) }, Record { term: 1, ..Record::default() }] {
            let encoded = object().encode(Some("12"), &record);
            assert_eq!(encoded.metadata.name.as_deref(), Some("vipgate-policyd-membership"));
            assert_eq!(encoded.metadata.resource_version.as_deref(), Some("12"));
            assert_eq!(decode(&encoded).unwrap(), record);
        }
    }

    #[test]
    fn what_somebody_has_broken_is_named() {
        let mut broken = object().encode(None, &Record::default());
        broken.data = Some(BTreeMap::from([(TERM.to_owned(), "x".to_owned())]));
        assert!(decode(&broken).unwrap_err().contains("term: invalid digit"));
        broken.data = None;
        broken.binary_data = Some(BTreeMap::from([(VIEW.to_owned(), ByteString(vec![255]))]));
        assert!(decode(&broken).unwrap_err().ends_with("delete the ConfigMap"));
    }

    /// The largest view fits into a ConfigMap, which may have 1 MiB.
    #[test]
    fn the_largest_view_fits() {
        let member = |n: usize| Member {
            serving: true,
            incarnation: u64::MAX,
            commitment: Some([7; 32]),
            fingerprint: Some([7; 32]),
            tunnel_key: Some([7; 32]),
            peer: Some("[2001:db8:1234:5678:9abc:def0:1234:5678]:65535".parse().unwrap()),
            overlay: Some("[2001:db8:1234:5678:9abc:def0:1234:5679]:65535".parse().unwrap()),
            unable: Some("x".repeat(200).into()),
            ..Member::new(format!("gateway-{n:04}.{}", "x".repeat(50)).into(), u64::MAX)
        };
        let members = (0..crate::membership::view::MAX_MEMBERS).map(member).collect();
        let view = Arc::new(MembershipView { number: u64::MAX, serving_changes: u64::MAX, members });
        let encoded = object().encode(None, &Record { term: u64::MAX, view });
        let size = encoded.binary_data.unwrap()[VIEW].0.len();
        assert!(size < 900_000, "{size}");
    }
}
