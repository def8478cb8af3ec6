//! `policyd.yaml`: where the policy server listens and where its manifests come from.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use schemars::JsonSchema;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};

use super::gateway::{Log, Metrics};
use super::privileges::Privileges;
use super::units::{DurationText, duration};
use crate::manifest::schema::{SocketAddress, URL};
use crate::manifest::{Cidr, Uncovered};

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
    /// Who may give the server orders (`vipgate policy accept-empty`): names in certificates of clients, as DNS name, end of a URI
    /// (`../gateway/NAME`) or common name. Default: every certificate that `tls.ca` has signed, except those of gateways. Without
    /// `tls.ca`, orders come from the server's own host only.
    #[serde(default)]
    #[schemars(extend("uniqueItems" = true, "default" = []))]
    pub admins: Vec<String>,
    /// Where manifests come from.
    pub source: PolicydSource,
    /// Whether a source without manifests is taken at its word: at the start, and when what it had is gone. Default: false, and
    /// the last good state stays in force.
    #[serde(default)]
    pub allow_empty: bool,
    /// Pods' addresses, covered or not. What goes there stays inside the cluster, so it isn't translated.
    #[serde(default)]
    #[schemars(extend("uniqueItems" = true, "default" = []))]
    pub pod_cidrs: Vec<Cidr>,
    /// Services' own addresses in the cluster: what goes there isn't translated, either.
    #[serde(default)]
    #[schemars(extend("uniqueItems" = true, "default" = []))]
    pub service_cidrs: Vec<Cidr>,
    /// What becomes of packets from `pod_cidrs` that no policy covers, and that would leave the cluster. Default: `drop` where `pod_cidrs` is set, else `pass`.
    pub uncovered: Option<Uncovered>,
    /// How many connections there may be, and how much memory clients may take.
    #[serde(default)]
    pub limits: PolicydLimits,
    /// How gateways are watched.
    #[serde(default)]
    pub leases: Leases,
    /// What the process gives up.
    #[serde(default)]
    pub privileges: Privileges,
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

/// The least memory for clients: three quarters of it are for requests, of which the longest has 32 MiB.
const LEAST_BYTES: usize = 64 << 20;

/// Connections of gateways and people. When there are too many, the oldest without a stream is closed for a new one. And memory that
/// they make the server hold: whoever would have more is refused, and responses beyond wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PolicydLimits {
    /// In all; fewer where the system allows fewer open files. Default: 8192.
    #[schemars(range(min = 16))]
    pub connections: usize,
    /// Of one address (of IPv6: of one network of 64 bits); each gateway has two. Default: 1024.
    #[schemars(range(min = 4))]
    pub connections_per_address: usize,
    /// Memory for all clients together, bytes: requests as they come, what is remembered of each stream, responses that aren't sent; a
    /// quarter of it is for responses. The policy itself isn't counted. Default: 1073741824 (1 GiB).
    #[serde(deserialize_with = "memory")]
    #[schemars(range(min = LEAST_BYTES))]
    pub bytes: usize,
    /// The same for one address. Gateways behind one NAT, or in one network of 64 bits, are one address: when many of them are told of
    /// many changes at once, each takes up to 24 bytes for each endpoint that changes. Default: 268435456 (256 MiB).
    #[serde(deserialize_with = "memory")]
    #[schemars(range(min = LEAST_BYTES))]
    pub bytes_per_address: usize,
}

impl Default for PolicydLimits {
    fn default() -> Self {
        Self { connections: 8192, connections_per_address: 1024, bytes: 1 << 30, bytes_per_address: 256 << 20 }
    }
}

fn memory<'de, D: Deserializer<'de>>(deserializer: D) -> Result<usize, D::Error> {
    let bytes = usize::deserialize(deserializer)?;
    if bytes < LEAST_BYTES {
        return Err(D::Error::custom(format_args!("must be {LEAST_BYTES} or more: a request may have 32 MiB")));
    }
    Ok(bytes)
}

/// Leases of gateways that serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Leases {
    /// A gateway that is silent for longer is taken for dead, and another one serves in its place; each beats four times in it.
    /// From 100ms to 60s; it must be longer than a few round trips, and with etcd than what etcd takes for a few writes.
    /// Default: `600ms`.
    #[serde(default = "default_ttl", with = "duration")]
    #[schemars(with = "DurationText")]
    pub ttl: Duration,
}

impl Default for Leases {
    fn default() -> Self {
        Self { ttl: default_ttl() }
    }
}

fn default_ttl() -> Duration {
    Duration::from_millis(600)
}

/// Files (PEM) of TLS.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Tls {
    /// Who may sign clients' certificates; with it, clients must present one, and a gateway may only have a name that its
    /// certificate has: as DNS name, as the end of a URI (`../gateway/NAME`) or as common name. Without it, no name is checked.
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

impl Etcd {
    /// What the keys begin with in which servers keep who serves: they are beside the manifests.
    pub fn members_prefix(&self) -> String {
        format!("{}-members/", self.prefix.trim_end_matches('/'))
    }
}

fn default_prefix() -> String {
    "/vipgate/".into()
}

/// The API server of the cluster; nothing to set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct KubernetesSource {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::schema::{Published, tests::admits};
    use crate::yaml::Source;

    #[test]
    fn memory_has_a_default_and_can_be_set_but_not_below_what_a_request_takes() {
        let text = |limits: &str| format!("source: {{kubernetes: {{}}}}\nlimits: {{{limits}}}");
        let admitted =
            |text: &str| admits(Published::PolicydYaml, &Source::new("d.yaml", text.to_owned()).documents().0[0]);
        for (limits, memory) in [
            ("connections: 64", (1 << 30, 256 << 20)),
            ("bytes_per_address: 1073741824", (1 << 30, 1 << 30)),
            ("bytes: 67108864, bytes_per_address: 67108864", (64 << 20, 64 << 20)),
        ] {
            let text = text(limits);
            let limits = PolicydConfig::parse("d.yaml", &text).unwrap().limits;
            assert_eq!((limits.bytes, limits.bytes_per_address), memory);
            assert!(admitted(&text), "{text}");
        }
        for (limits, said) in [
            ("bytes: 67108863", "d.yaml:2: limits.bytes: must be 67108864 or more: a request may have 32 MiB"),
            ("bytes_per_address: 0", "d.yaml:2: limits.bytes_per_address: must be 67108864 or more"),
            ("bytes: 1GiB", "d.yaml:2: limits.bytes: "),
            ("bytes_per_adress: 1073741824", "unknown field, did you mean `bytes_per_address`?"),
        ] {
            let text = text(limits);
            let complaints = PolicydConfig::parse("d.yaml", &text).expect_err(&text).to_string();
            assert!(complaints.contains(said), "{text}\nsaid: {complaints}");
            assert!(!admitted(&text), "{text}");
        }
    }
}
