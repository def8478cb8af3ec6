//! Connection to the API server: as configured by a kubeconfig, else with the service account of the pod.

use std::time::Duration;

use kube::api::{ApiResource, DynamicObject, GroupVersionKind};
use kube::config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Api, Client, Config};
use thiserror::Error;
use vipgate_policy::manifest::Kind;

use crate::config::KubernetesSource;

/// Timeout of opening a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Why there is no client.
#[derive(Debug, Error)]
pub(crate) enum ConnectError {
    /// The kubeconfig can't be read, or it lacks something.
    #[error("source.kubernetes.kubeconfig {path}: {error}")]
    Kubeconfig { path: String, error: KubeconfigError },
    /// Without kubeconfig, and not in a pod with a service account.
    #[error("{0}: outside of a pod, set `source.kubernetes.kubeconfig`")]
    NotInCluster(#[from] InClusterError),
    /// The client can't be built, such as from an invalid certificate.
    #[error("{0}")]
    Client(#[from] kube::Error),
}

/// A client of the configured cluster. It opens connections when it needs them, and reads a service account's token and
/// CA again when they are renewed.
///
/// # Errors
/// If the configuration of the client can't be read or used.
pub(crate) async fn client(source: &KubernetesSource) -> Result<Client, ConnectError> {
    let mut config = match &source.kubeconfig {
        None => Config::incluster()?,
        Some(path) => {
            let error = |error| ConnectError::Kubeconfig { path: path.display().to_string(), error };
            let options = KubeConfigOptions { context: source.context.clone(), ..KubeConfigOptions::default() };
            let file = Kubeconfig::read_from(path).map_err(error)?;
            Config::from_custom_kubeconfig(file, &options).await.map_err(error)?
        }
    };
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    // Retries are the watches' own, with a backoff and a report.
    config.default_retry = false;
    Ok(Client::try_from(config)?)
}

/// The objects of a kind, in one namespace or in all.
pub(crate) fn objects(client: Client, kind: Kind, namespace: Option<&str>) -> Api<DynamicObject> {
    let (group, version) = kind.api_version().split_once('/').unwrap_or(("", kind.api_version()));
    let resource =
        ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind.as_str()), kind.plural());
    match namespace {
        None => Api::all_with(client, &resource),
        Some(namespace) => Api::namespaced_with(client, namespace, &resource),
    }
}
