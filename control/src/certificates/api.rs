//! Secrets in the Kubernetes API, and the object that owns them.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Secret, ServiceAccount};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::PostParams;
use kube::{Api, Client};

use super::Location;
use super::error::CertificatesError;
use super::pass::{SecretStore, WriteError};
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

    fn failed(&self, verb: &str, object: &str, error: RequestError) -> CertificatesError {
        CertificatesError::Request { action: format!("{verb} {object} in namespace {}", self.namespace), error }
    }
}

impl SecretStore for SecretApi {
    async fn owner(&mut self, name: &str) -> Result<OwnerReference, CertificatesError> {
        let title = format!("ServiceAccount {name}");
        let api: Api<ServiceAccount> = Api::namespaced(self.client.clone(), &self.namespace);
        let found = request(REQUEST_TIMEOUT, api.get_opt(name)).await;
        let found = found.map_err(|error| self.failed("get", &title, error))?;
        let uid = found.and_then(|it| it.metadata.uid).ok_or(CertificatesError::NoOwner(title))?;
        let [api_version, kind] = ["v1", "ServiceAccount"].map(str::to_owned);
        Ok(OwnerReference { api_version, kind, name: name.to_owned(), uid, ..OwnerReference::default() })
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
