//! `policyd.yaml`: configuration of the policy server.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use schemars::JsonSchema;
use serde::Deserialize;
use vipgate_policy::compiler::{NodeAgents, Share, Tenancy, TunnelSecret};
use vipgate_policy::manifest::{Cidr, UnclassedServices, UncoveredAction};
use vipgate_policy::schema::{FilePath, SocketAddress, URL_PATTERN};

use super::cloud::CloudConfig;
use super::gateway::{Log, Metrics};
use super::privileges::Privileges;
use super::units::{DurationText, MaxUnavailable, duration};

/// The policy server's configuration.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PolicydConfig {
    /// Listen address for gateways. Default: `127.0.0.1:18000`.
    #[serde(default = "default_listen")]
    #[schemars(with = "SocketAddress")]
    pub listen: SocketAddr,
    /// TLS files (PEM); without them the server uses plain text. Default: none.
    pub tls: Option<Tls>,
    /// Clients that may administer the server (`vipgate policy accept-empty`): names in their certificates, as DNS
    /// name, end of a URI (`../gateway/NAME`) or common name. Without `tls.ca`, only clients on the server's host.
    /// Default: every certificate signed by `tls.ca`, except those of gateways and nodes.
    #[serde(default)]
    #[schemars(extend("uniqueItems" = true, "default" = []))]
    pub admins: Vec<String>,
    /// Source of manifests: exactly one of `files`, `etcd` and `kubernetes`.
    pub source: PolicydSource,
    /// Whether a source without any manifest is an empty policy: at startup, and when all manifests were removed.
    /// Otherwise the last good policy stays in force. Default: `false`.
    #[serde(default)]
    pub allow_empty: bool,
    /// What EgressPolicies and Services of a namespace may use. Default: `strict`.
    #[serde(default)]
    pub tenancy: Tenancy,
    /// The part of each limit of the whole (VIPs, endpoints, backend ports, prefixes, lookup tables) that the objects of one
    /// namespace may have. Default: a quarter.
    #[serde(default = "default_namespace_share")]
    pub namespace_share: Share,
    /// Pod prefixes, covered by a policy or not. Traffic to them is internal and not translated.
    #[serde(default)]
    #[schemars(extend("uniqueItems" = true, "default" = []))]
    pub pod_cidrs: Vec<Cidr>,
    /// Service prefixes of the cluster. Traffic to them is not translated, either.
    #[serde(default)]
    #[schemars(extend("uniqueItems" = true, "default" = []))]
    pub service_cidrs: Vec<Cidr>,
    /// Action for packets from `pod_cidrs` to destinations outside the cluster that no policy covers. Default: `drop`
    /// if `pod_cidrs` is set, else `pass`.
    pub uncovered: Option<UncoveredAction>,
    /// Identification by tokens, for gateways in pods without certificates, whose names are those of their nodes; needs
    /// `tls.ca`. The Kubernetes API verifies them: that of the source, or else that of the cluster that the server runs in.
    /// Default: none, and gateways need certificates if `tls.ca` is there.
    pub gateway_tokens: Option<PodTokens>,
    /// The agent that runs on each Kubernetes node (`vipgate node`) and sends pods' packets to gateways in VXLAN tunnels.
    /// Every Node with an address of type InternalIP is then a node of the overlay network, and pods are always read.
    /// Default: nodes run none.
    pub node_agents: Option<NodeAgentsConfig>,
    /// Public addresses of cloud providers, for AddressPools with a `provider`. Default: none is attached.
    pub cloud: Option<CloudConfig>,
    /// With `source.files`: directory of what must outlive the process, which is the record of terms and views
    /// (`membership`), and that of addresses of AddressPools (`addresses`). Each server has its own. Default:
    /// `/var/lib/vipgate/policyd`.
    #[serde(default = "default_state")]
    #[schemars(with = "FilePath")]
    pub state: PathBuf,
    /// Limits of connections and of memory for clients.
    #[serde(default)]
    pub limits: PolicydLimits,
    /// Leases of active gateways.
    #[serde(default)]
    pub leases: Leases,
    /// Limit of gateways that are drained at once.
    #[serde(default)]
    pub membership: MembershipLimits,
    /// Privileges that the process drops.
    #[serde(default)]
    pub privileges: Privileges,
    /// HTTP server for metrics and health. Default: `127.0.0.1:9470`.
    #[serde(default = "default_metrics")]
    pub metrics: Metrics,
    /// Logging.
    #[serde(default)]
    pub log: Log,
}

/// The agent on Kubernetes nodes.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct NodeAgentsConfig {
    /// UDP port of the tunnels, at nodes and at gateways (`overlay.port`). Default: 8473, since other networks use 8472.
    #[schemars(range(min = 1))]
    pub port: u16,
    /// VXLAN network identifier of the tunnels. Default: 7.
    #[schemars(range(max = 0x00ff_ffff))]
    pub vni: u32,
    /// File with a random secret of at least 16 bytes, the same at all servers, which is read at the start. From it each
    /// node gets a MAC address in its tunnels that only it and the gateways know, so that others can't forge their packets.
    /// Default: none, and any host that can send with a node's address is taken for it.
    #[schemars(with = "Option<FilePath>")]
    pub tunnel_secret: Option<PathBuf>,
    /// Identification by tokens, as `gateway_tokens`, for agents without certificates. Default: none, and agents need
    /// certificates if `tls.ca` is there.
    pub tokens: Option<PodTokens>,
}

/// Clients that are identified by their pods' service account tokens.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PodTokens {
    /// Namespace of the service account.
    #[schemars(length(min = 1, max = 63))]
    pub namespace: String,
    /// Name of the service account.
    #[schemars(length(min = 1, max = 253))]
    pub service_account: String,
    /// Audience that tokens must have. Default: `vipgate`.
    #[serde(default = "default_audience")]
    pub audience: String,
}

fn default_audience() -> String {
    "vipgate".to_owned()
}

impl Default for NodeAgentsConfig {
    fn default() -> Self {
        Self { port: 8473, vni: 7, tunnel_secret: None, tokens: None }
    }
}

impl NodeAgentsConfig {
    /// As options of the compiler, with the content of the file of the secret.
    pub fn options(&self, secret: Option<TunnelSecret>) -> NodeAgents {
        NodeAgents { port: self.port, vni: self.vni, secret }
    }
}

fn default_listen() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 18000).into()
}

fn default_metrics() -> Metrics {
    Metrics { listen: (Ipv4Addr::LOCALHOST, 9470).into() }
}

/// Minimum memory for clients: three quarters of it are for requests, which have up to 32 MiB.
pub(super) const MIN_BYTES: usize = 64 << 20;

/// Limits of connections and of memory for clients. At the connection limit, the oldest connection without a stream is
/// closed for a new one. At the memory limit, requests are rejected and responses are delayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PolicydLimits {
    /// Connections in total; limited by the number of open files. Default: 8192.
    #[schemars(range(min = 16))]
    pub connections: usize,
    /// Connections per client address (IPv6: per /64); each gateway has two. Default: 1024.
    #[schemars(range(min = 4))]
    pub connections_per_address: usize,
    /// Memory for all clients, bytes: received requests, state of streams, unsent responses; a quarter of it is for
    /// responses. The policy itself isn't counted. Default: 1073741824 (1 GiB).
    #[schemars(range(min = MIN_BYTES))]
    pub bytes: usize,
    /// Memory per client address (IPv6: per /64), bytes. Gateways behind one NAT have one address; an update takes up
    /// to 24 bytes per changed endpoint and gateway. Default: 268435456 (256 MiB).
    #[schemars(range(min = MIN_BYTES))]
    pub bytes_per_address: usize,
}

impl Default for PolicydLimits {
    fn default() -> Self {
        Self { connections: 8192, connections_per_address: 1024, bytes: 1 << 30, bytes_per_address: 256 << 20 }
    }
}

/// Leases of active gateways.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Leases {
    /// Time to live of a lease without heartbeats; then the gateway is considered dead and its backups take over. The
    /// heartbeat interval is a quarter of it. From 100ms to 60s; longer than a few round trips. Default:
    /// `600ms`.
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

/// Limit of gateways that are drained at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct MembershipLimits {
    /// How many of the policy's gateways may be unavailable: a number, or a percentage of them, rounded up. A drain that
    /// would exceed it waits until others are active again. Gateways that are drained, dead or have a fault are
    /// unavailable; faults are never held back. Default: no limit.
    pub max_unavailable: Option<MaxUnavailable>,
}

/// TLS files (PEM).
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Tls {
    /// CA certificates for client certificates (mTLS). With it, clients must present a certificate, or a token where
    /// those are accepted (`gateway_tokens`, `node_agents.tokens`); a gateway's name must be in its certificate as DNS
    /// name, end of a URI (`../gateway/NAME`) or common name. Without it, names are not checked.
    #[schemars(with = "Option<FilePath>")]
    pub ca: Option<PathBuf>,
    /// Server certificate.
    #[schemars(with = "FilePath")]
    pub cert: PathBuf,
    /// Private key of `cert`.
    #[schemars(with = "FilePath")]
    pub key: PathBuf,
}

/// Source of manifests: exactly one.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PolicydSource {
    /// Files or directories, watched for changes.
    Files(#[schemars(with = "Vec<FilePath>", length(min = 1), inner(length(min = 1)))] Vec<PathBuf>),
    /// Keys in etcd.
    Etcd(Etcd),
    /// Objects of the Kubernetes API.
    Kubernetes(KubernetesSource),
}

/// Keys in etcd: prefix + kind/namespace/name; values are YAML.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Etcd {
    /// URLs of etcd members; plain http.
    #[schemars(length(min = 1), inner(regex(pattern = URL_PATTERN)))]
    pub endpoints: Vec<String>,
    /// Key prefix. Default: `/vipgate/`.
    #[serde(default = "default_prefix")]
    pub prefix: String,
}

impl Etcd {
    /// Key prefix of the membership state that servers share; separate from the manifests.
    pub fn membership_prefix(&self) -> String {
        format!("{}-members/", self.prefix.trim_end_matches('/'))
    }

    /// Key of the record of addresses of pools that servers share: beside the membership state, and no manifest.
    pub fn record_key(&self) -> String {
        format!("{}addresses", self.membership_prefix())
    }
}

fn default_state() -> PathBuf {
    "/var/lib/vipgate/policyd".into()
}

fn default_namespace_share() -> Share {
    Share::QUARTER
}

fn default_prefix() -> String {
    "/vipgate/".into()
}

/// The Kubernetes API.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct KubernetesSource {
    /// kubeconfig with the cluster's address and credentials. Default: the service account of the pod that the server
    /// runs in.
    #[schemars(with = "Option<FilePath>")]
    pub kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig. Default: its current one.
    pub context: Option<String>,
    /// Namespaces whose objects are read; cluster-scoped objects are read in any case. Default: all.
    #[schemars(extend("uniqueItems" = true, "default" = []))]
    pub namespaces: Vec<String>,
    /// Which Services are vipgate's.
    pub services: HandledServices,
    /// When pods are read. Default: `selected`; with `tenancy: strict` and with `node_agents` always.
    pub pods: PodWatch,
    /// How objects are listed. Default: `paged`.
    pub lists: ListMode,
    /// The Lease that policy servers elect their leader by, which gives Services their addresses.
    pub lease: LeaseName,
}

/// The Lease (coordination.k8s.io/v1) of policy servers.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LeaseName {
    /// Its namespace. Default: that of the pod that the server runs in, else `default`.
    #[schemars(length(min = 1))]
    pub namespace: Option<String>,
    /// Its name. Default: `vipgate-policyd`.
    #[schemars(length(min = 1))]
    pub name: String,
}

impl Default for LeaseName {
    fn default() -> Self {
        Self { namespace: None, name: "vipgate-policyd".to_owned() }
    }
}

impl KubernetesSource {
    /// What the compiler makes of Services with neither vipgate's load balancer class nor an annotation of it.
    pub fn unclassed(&self) -> UnclassedServices {
        match self.services.unclassed {
            Unclassed::Ignore => UnclassedServices::Ignore,
            Unclassed::Serve => UnclassedServices::Serve,
        }
    }
}

/// Which LoadBalancer Services are vipgate's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct HandledServices {
    /// Services with neither the load balancer class `vipgate.io/vipgate` nor an annotation of `vipgate.io`. Default:
    /// `ignore`, since another load balancer in the cluster may have them.
    pub unclassed: Unclassed,
}

/// Services with neither vipgate's load balancer class nor an annotation of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Unclassed {
    /// They are another load balancer's.
    #[default]
    Ignore,
    /// They are vipgate's.
    Serve,
}

/// When pods are read from the Kubernetes API. Endpoints of Services need no pods.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PodWatch {
    /// While a policy selects pods by labels.
    #[default]
    Selected,
    /// Always: for weights of pods (`vipgate.io/weight`).
    Always,
}

/// How objects are listed from the Kubernetes API.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ListMode {
    /// In pages, which every version supports.
    #[default]
    Paged,
    /// As the beginning of the watch, from the server's memory: Kubernetes 1.32 or later.
    Streamed,
}

#[cfg(test)]
mod tests {
    use vipgate_policy::yaml::Source;

    use super::*;
    use crate::membership::authority::UnavailableLimit;
    use crate::schema::Published;
    use crate::schema::tests::accepts;

    #[test]
    fn the_limit_of_unavailable_gateways_is_a_number_or_a_percentage() {
        let text = |limit: &str| format!("source: {{kubernetes: {{}}}}\nmembership: {{max_unavailable: {limit}}}");
        let accepted =
            |text: &str| accepts(Published::PolicydYaml, &Source::new("d.yaml", text.to_owned()).documents().0[0]);
        for (limit, expected) in [
            ("1", UnavailableLimit::Count(1)),
            ("0", UnavailableLimit::Count(0)),
            ("25%", UnavailableLimit::Percent(25)),
            ("\"100%\"", UnavailableLimit::Percent(100)),
        ] {
            let text = text(limit);
            assert_eq!(
                PolicydConfig::parse("d.yaml", &text).unwrap().membership.max_unavailable,
                Some(MaxUnavailable(expected))
            );
            assert!(accepted(&text), "{text}");
        }
        for limit in ["-1", "101%", "\"25\"", "1.5", "half", "\"%\""] {
            let text = text(limit);
            let errors = PolicydConfig::parse("d.yaml", &text).expect_err(&text).to_string();
            assert!(errors.contains("d.yaml:2: membership.max_unavailable: "), "{text}\ngot: {errors}");
            assert!(!accepted(&text), "{text}");
        }
    }

    #[test]
    fn tokens_need_a_ca_of_client_certificates_whatever_the_source_is() {
        let account = "{namespace: vipgate, service_account: gateway}";
        for (field, tokens) in [
            ("gateway_tokens", format!("gateway_tokens: {account}")),
            ("node_agents.tokens", format!("node_agents: {{tokens: {account}}}")),
        ] {
            for source in ["kubernetes: {}", "files: [policy]"] {
                let text = |tls: &str| format!("source: {{{source}}}\n{tokens}\ntls: {{{tls}cert: b, key: c}}");
                let config = PolicydConfig::parse("d.yaml", &text("ca: a, ")).unwrap();
                let tokens = config.gateway_tokens.or(config.node_agents.and_then(|agents| agents.tokens)).unwrap();
                assert_eq!((tokens.service_account.as_str(), tokens.audience.as_str()), ("gateway", "vipgate"));
                let errors = PolicydConfig::parse("d.yaml", &text("")).unwrap_err().to_string();
                assert!(errors.contains(&format!("d.yaml:2: {field}: needs `tls.ca`")), "{errors}");
            }
        }
    }

    #[test]
    fn memory_limits_have_defaults_and_a_minimum() {
        let text = |limits: &str| format!("source: {{kubernetes: {{}}}}\nlimits: {{{limits}}}");
        let accepted =
            |text: &str| accepts(Published::PolicydYaml, &Source::new("d.yaml", text.to_owned()).documents().0[0]);
        for (limits, memory) in [
            ("connections: 64", (1 << 30, 256 << 20)),
            ("bytes_per_address: 1073741824", (1 << 30, 1 << 30)),
            ("bytes: 67108864, bytes_per_address: 67108864", (64 << 20, 64 << 20)),
        ] {
            let text = text(limits);
            let limits = PolicydConfig::parse("d.yaml", &text).unwrap().limits;
            assert_eq!((limits.bytes, limits.bytes_per_address), memory);
            assert!(accepted(&text), "{text}");
        }
        for (limits, expected) in [
            ("bytes: 67108863", "d.yaml:2: limits.bytes: must be at least 67108864: a request may have 32 MiB"),
            ("bytes_per_address: 0", "d.yaml:2: limits.bytes_per_address: must be at least 67108864"),
            ("bytes: 1GiB", "d.yaml:2: limits.bytes: "),
            ("bytes_per_adress: 1073741824", "unknown field, did you mean `bytes_per_address`?"),
        ] {
            let text = text(limits);
            let errors = PolicydConfig::parse("d.yaml", &text).expect_err(&text).to_string();
            assert!(errors.contains(expected), "{text}\ngot: {errors}");
            assert!(!accepted(&text), "{text}");
        }
    }
}
