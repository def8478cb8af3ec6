//! The lease as a Lease of the Kubernetes API.

use std::fs;
use std::path::Path;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::PostParams;

use super::LeaseStore;
use super::election::{LEASE_DURATION, LeaseState};
use crate::config::KubernetesSource;
use crate::source::kubernetes::{RequestError, ReusedClient, request};

/// Timeout of a request about the Lease.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);
/// The namespace of the pod that the server runs in.
const NAMESPACE_FILE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";

/// Namespace of the Lease, and of what else servers share.
pub(in crate::policyd) fn namespace(source: &KubernetesSource) -> String {
    let own_namespace = || fs::read_to_string(Path::new(NAMESPACE_FILE)).ok().map(|text| text.trim().to_owned());
    let namespace = source.lease.namespace.clone().or_else(own_namespace).filter(|name| !name.is_empty());
    namespace.unwrap_or_else(|| "default".to_owned())
}

/// A Lease.
pub(in crate::policyd) struct KubernetesLease {
    client: ReusedClient,
    namespace: String,
    name: String,
    /// As it was read or written last.
    last: Option<Lease>,
}

impl KubernetesLease {
    pub(in crate::policyd) fn new(source: &KubernetesSource) -> Self {
        let (namespace, name) = (namespace(source), source.lease.name.clone());
        Self { client: ReusedClient::new(source.clone()), namespace, name, last: None }
    }

    async fn api(&mut self) -> Result<Api<Lease>, String> {
        let client = self.client.get().await.map_err(|error| error.to_string())?;
        Ok(Api::namespaced(client, &self.namespace))
    }

    /// A failed request. The next one gets another client: credentials may be others by then.
    fn failed(&mut self, error: &RequestError) -> String {
        self.client.discard();
        self.last = None;
        error.to_string()
    }

    /// The Lease as this holder writes it.
    fn next(&self, holder: &str) -> Lease {
        let mut lease = self.last.clone().unwrap_or_default();
        lease.metadata.name = Some(self.name.clone());
        lease.metadata.namespace = Some(self.namespace.clone());
        // They are the server's to write.
        lease.metadata.managed_fields = None;
        let spec = lease.spec.get_or_insert_with(LeaseSpec::default);
        let is_new = spec.holder_identity.as_deref() != Some(holder);
        spec.holder_identity = Some(holder.to_owned());
        if holder.is_empty() {
            return lease;
        }
        let now = MicroTime(Timestamp::now());
        if is_new {
            spec.acquire_time = Some(now.clone());
            spec.lease_transitions = Some(spec.lease_transitions.map_or(0, |count| count.saturating_add(1)));
        }
        spec.lease_duration_seconds = i32::try_from(LEASE_DURATION.as_secs()).ok();
        spec.renew_time = Some(now);
        lease
    }
}

impl LeaseStore for KubernetesLease {
    fn name(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    fn hint(&self) -> &'static str {
        "check the account's rights (`get`, `create` and `update` of leases)"
    }

    async fn read(&mut self) -> Result<Option<LeaseState>, String> {
        let api = self.api().await?;
        let read = request(REQUEST_TIMEOUT, api.get_opt(&self.name)).await;
        self.last = read.map_err(|error| self.failed(&error))?;
        Ok(self.last.as_ref().map(state))
    }

    async fn write(&mut self, holder: &str) -> Result<Option<LeaseState>, String> {
        let (api, next) = (self.api().await?, self.next(holder));
        let parameters = PostParams::default();
        let response = request(REQUEST_TIMEOUT, async {
            match self.last {
                Some(_) => api.replace(&self.name, &parameters, &next).await,
                None => api.create(&parameters, &next).await,
            }
        });
        match response.await {
            Ok(written) => {
                let written = self.last.insert(written);
                Ok(Some(state(written)))
            }
            // Another candidate was faster.
            Err(error) if error.code() == Some(409) => {
                self.last = None;
                Ok(None)
            }
            Err(error) => Err(self.failed(&error)),
        }
    }
}

fn state(lease: &Lease) -> LeaseState {
    let spec = lease.spec.as_ref();
    let seconds = spec.and_then(|spec| spec.lease_duration_seconds).and_then(|seconds| u64::try_from(seconds).ok());
    LeaseState {
        holder: spec.and_then(|spec| spec.holder_identity.clone()).unwrap_or_default(),
        version: lease.metadata.resource_version.clone().unwrap_or_default(),
        duration: seconds.map_or(LEASE_DURATION, Duration::from_secs),
    }
}
