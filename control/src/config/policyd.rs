//! `policyd.yaml`: where the policy server listens and where its manifests come from.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use schemars::JsonSchema;
use serde::Deserialize;

use super::gateway::{Log, Metrics};
use crate::manifest::schema::{SocketAddress, URL};

/// The policy server's configuration.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PolicydConfig {
    /// Where gateways reach it. Default: `127.0.0.1:18000`.
    #[serde(default = "default_listen")]
    #[schemars(with = "SocketAddress")]
    pub listen: SocketAddr,
    /// Its certificate; without it the server speaks plain text.
    pub tls: Option<Tls>,
    /// Where manifests come from.
    pub source: PolicydSource,
    /// The HTTP server of monitoring. Default: `127.0.0.1:9470`.
    #[serde(default = "default_metrics")]
    pub metrics: Metrics,
    /// What is logged and how.
    #[serde(default)]
    pub log: Log,
}

fn default_listen() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 18000).into()
}

fn default_metrics() -> Metrics {
    Metrics { listen: (Ipv4Addr::LOCALHOST, 9470).into() }
}

/// Files (PEM) of TLS.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Tls {
    /// Who may sign clients' certificates; with it, clients must present one.
    pub ca: Option<PathBuf>,
    /// The server's certificate.
    pub cert: PathBuf,
    /// The key of `cert`.
    pub key: PathBuf,
}

/// Where manifests come from: exactly one.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PolicydSource {
    /// Files or directories, followed for changes.
    Files(#[schemars(length(min = 1), inner(length(min = 1)))] Vec<PathBuf>),
    /// Keys of etcd.
    Etcd(Etcd),
    /// The API server of the cluster that the server runs in.
    Kubernetes(KubernetesSource),
}

/// Keys of etcd: prefix + kind/namespace/name, values are YAML.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Etcd {
    /// URLs of its members.
    #[schemars(length(min = 1), inner(regex(pattern = URL)))]
    pub endpoints: Vec<String>,
    /// What the keys begin with. Default: `/vipgate/`.
    #[serde(default = "default_prefix")]
    pub prefix: String,
}

fn default_prefix() -> String {
    "/vipgate/".into()
}

/// The API server of the cluster; nothing to set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct KubernetesSource {}
