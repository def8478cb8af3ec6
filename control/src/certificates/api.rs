//! Secrets in the Kubernetes API, and the object that owns them.

use std::fmt::Debug;
use std::time::Duration;

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::PostParams;
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;

use super::error::CertificatesError;
use super::pass::{SecretStore, WriteError};
use super::{Location, Owner};
use crate::config::KubernetesSource;
use crate::source::kubernetes::{RequestError, client, request};

/// Timeout of a request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Field manager of writes.
const FIELD_MANAGER: &str = "vipgate-certificates";

/// The Secrets of a namespace.
pub(super) struct SecretApi {
    client: Client,
    namespace: String,
}

impl SecretApi {
    pub(super) async fn connect(location: &Location) -> Result<Self, CertificatesError> {
        let source = KubernetesSource { kubeconfig: location.kubeconfig.clone(), ..KubernetesSource::default() };
        let client = client(&source).await?;
        let namespace = location.namespace.clone().unwrap_or_else(|| client.default_namespace().to_owned());
        Ok(Self { client, namespace })
    }

    fn secrets(&self) -> Api<Secret> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// A reference to an object that exists.
    async fn reference<K>(&self, name: &str) -> Result<OwnerReference, CertificatesError>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug,
    {
        let kind = K::kind(&()).into_owned();
        let title = format!("{kind} {name}");
        let api: Api<K> = Api::namespaced(self.client.clone(), &self.namespace);
        let found = request(REQUEST_TIMEOUT, api.get_opt(name)).await;
        let found = found.map_err(|error| self.failed("get", &title, error))?;
        let uid = found.and_then(|it| it.meta().uid.clone()).ok_or(CertificatesError::NoOwner(title))?;
        let (api_version, name) = (K::api_version(&()).into_owned(), name.to_owned());
        Ok(OwnerReference { api_version, kind, name, uid, ..OwnerReference::default() })
    }

    fn failed(&self, verb: &str, object: &str, error: RequestError) -> CertificatesError {
        CertificatesError::Request { action: format!("{verb} {object} in namespace {}", self.namespace), error }
    }
}

impl SecretStore for SecretApi {
    async fn owner(&mut self, owner: &Owner) -> Result<OwnerReference, CertificatesError> {
        match owner {
            Owner::ConfigMap(name) => self.reference::<ConfigMap>(name).await,
            Owner::DaemonSet(name) => self.reference::<DaemonSet>(name).await,
        }
    }

    async fn read(&mut self, name: &str) -> Result<Option<Secret>, CertificatesError> {
        let found = request(REQUEST_TIMEOUT, self.secrets().get_opt(name)).await;
        found.map_err(|error| self.failed("get", &super::secret::title(name), error))
    }

    async fn write(&mut self, secret: &Secret) -> Result<(), WriteError> {
        let name = secret.metadata.name.as_deref().unwrap_or_default();
        let parameters = PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() };
        let is_new = secret.metadata.resource_version.is_none();
        let response = request(REQUEST_TIMEOUT, async {
            let api = self.secrets();
            if is_new { api.create(&parameters, secret).await } else { api.replace(name, &parameters, secret).await }
        });
        let Err(error) = response.await else { return Ok(()) };
        Err(match error.code() {
            // Created, changed or deleted by somebody else.
            Some(409) => WriteError::Conflict,
            Some(404) if !is_new => WriteError::Conflict,
            _ => {
                let verb = if is_new { "create" } else { "update" };
                WriteError::Failed(self.failed(verb, &super::secret::title(name), error))
            }
        })
    }
}
