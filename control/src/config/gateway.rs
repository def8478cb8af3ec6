//! `gateway.yaml`: configuration of a gateway.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use vipgate_dataplane::worker::builder::SESSIONS_PER_RESERVED;
use vipgate_policy::compiler::{Cluster, GatewayLocality, Tenancy};
use vipgate_policy::manifest::{Cidr, UncoveredAction};
use vipgate_policy::schema::{Address, FilePath, NAME_PATTERN, SocketAddress, URL_PATTERN};
use vipgate_xdp::open::FILL_RING_SIZES;

use super::health::Health;
use super::nat_log::NatLog;
use super::privileges::Privileges;
use super::services::Services;
use super::units::{DurationText, PortRange, duration};
use crate::config::validate::{INTERFACE_NAME_BYTES, MAX_SESSIONS, MSS_RANGE, SOCKET_PATH_BYTES};

/// A gateway's configuration.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Name of the gateway, unique among gateways.
    #[schemars(regex(pattern = NAME_PATTERN))]
    pub name: String,
    /// Kubernetes node whose endpoints are local. Default: `name`.
    #[schemars(regex(pattern = NAME_PATTERN))]
    pub(super) node: Option<String>,
    /// Zone, for policies with zone affinity and for topology hints.
    #[schemars(regex(pattern = NAME_PATTERN))]
    pub zone: Option<String>,
    /// Interfaces; at least one inside and one outside.
    #[schemars(length(min = 1))]
    pub interfaces: Vec<Interface>,
    /// Forwarding threads.
    #[serde(default)]
    pub workers: Workers,
    /// AF_XDP sockets and the XDP program.
    #[serde(default)]
    pub xdp: Xdp,
    /// Source of policy: exactly one of `files` and `server`.
    pub policy: PolicySource,
    /// Whether `policy.files` without any manifest are an empty policy: at startup, and when all manifests were
    /// removed. Otherwise the last good policy stays in force. Default: `false`.
    #[serde(default)]
    pub allow_empty: bool,
    /// With `policy.files`: what EgressPolicies and Services of a namespace may use. Default: `strict`.
    #[serde(default)]
    pub tenancy: Tenancy,
    /// Session table.
    #[serde(default)]
    pub sessions: Sessions,
    /// SNAT ports.
    #[serde(default)]
    pub ports: Ports,
    /// Inbound Services.
    #[serde(default)]
    pub services: Services,
    /// Pod prefixes, covered by a policy or not. Traffic to them is internal and not translated. Merged with those of
    /// the policy server and of the VipGateway manifest.
    #[serde(default)]
    #[schemars(extend("uniqueItems" = true, "default" = []))]
    pub pod_cidrs: Vec<Cidr>,
    /// Service prefixes of the cluster. Traffic to them is not translated, either.
    #[serde(default)]
    #[schemars(extend("uniqueItems" = true, "default" = []))]
    pub service_cidrs: Vec<Cidr>,
    /// Action for packets from `pod_cidrs` to destinations outside the cluster that no policy covers. Default: that of
    /// the VipGateway manifest or the policy server, else `drop` if pod prefixes are configured, else `pass`.
    pub uncovered: Option<UncoveredAction>,
    /// Health checks of this gateway: when they fail, it requests to become inactive.
    #[serde(default)]
    pub health: Health,
    /// Endpoint for other gateways; without it this gateway is not a member of a group. Default: none.
    pub peer: Option<Peer>,
    /// VXLAN tunnel endpoint for overlay nodes; without it the kernel terminates their tunnels. Default: none.
    pub overlay: Option<Overlay>,
    /// Routes for a BGP daemon.
    #[serde(default)]
    pub bgp: Bgp,
    /// NAT log. Default: none.
    pub nat_log: Option<NatLog>,
    /// Privileges that the process drops.
    #[serde(default)]
    pub privileges: Privileges,
    /// Admin socket of the command line.
    #[serde(default)]
    pub admin: Admin,
    /// HTTP server for metrics and health. Default: `127.0.0.1:9469`.
    #[serde(default)]
    pub metrics: Metrics,
    /// Logging.
    #[serde(default)]
    pub log: Log,
}

impl Config {
    /// Local VXLAN tunnel endpoints.
    pub fn tunnel_endpoints(&self) -> Vec<SocketAddr> {
        self.peer_tunnel_endpoint().into_iter().chain(self.overlay.map(Overlay::tunnel_endpoint)).collect()
    }

    /// Local tunnel endpoint for other gateways.
    pub fn peer_tunnel_endpoint(&self) -> Option<SocketAddr> {
        self.peer.map(|peer| SocketAddr::new(peer.address, peer.port))
    }

    /// Kubernetes node whose endpoints are local. Default: the gateway's name.
    pub fn node(&self) -> &str {
        self.node.as_deref().unwrap_or(&self.name)
    }

    /// What tenants may use, with `policy.files`.
    pub fn files_tenancy(&self) -> Option<Tenancy> {
        matches!(self.policy, PolicySource::Files(_)).then_some(self.tenancy)
    }

    /// Its locality, and the cluster settings of its own.
    pub fn locality(&self) -> GatewayLocality {
        GatewayLocality {
            name: self.name.as_str().into(),
            node: self.node().into(),
            zone: self.zone.as_deref().unwrap_or_default().into(),
            cluster: Cluster::from_config(&self.pod_cidrs, &self.service_cidrs, self.uncovered),
        }
    }
}

/// A network interface.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Interface {
    /// Interface name, at most 15 bytes.
    #[schemars(length(min = 1, max = INTERFACE_NAME_BYTES), regex(pattern = r"^[^/\s]+$"))]
    pub name: String,
    /// Side of the gateway that it is on.
    pub role: InterfaceRole,
}

/// Side of the gateway that an interface is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum InterfaceRole {
    /// Toward pods.
    Inside,
    /// Toward external networks.
    Outside,
    /// In both directions (one-armed).
    Both,
}

impl From<InterfaceRole> for vipgate_dataplane::policy::spec::Role {
    fn from(role: InterfaceRole) -> Self {
        match role {
            InterfaceRole::Inside => Self::Inside,
            InterfaceRole::Outside => Self::Outside,
            InterfaceRole::Both => Self::Both,
        }
    }
}

/// Forwarding threads.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Workers {
    /// Worker i is pinned to `cores[i]` and polls queue i of every interface. Default: one worker per queue.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1), extend("uniqueItems" = true))]
    pub cores: Option<Vec<usize>>,
    /// Behavior of an idle worker. Default: `adaptive`.
    pub idle: Idle,
}

/// Behavior of an idle worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Idle {
    /// Sleeps in poll(2) after a while without packets.
    #[default]
    Adaptive,
    /// Busy-polls; uses all of its core.
    Spin,
}

/// AF_XDP sockets and the XDP program.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Xdp {
    /// Attach mode of the XDP program. Default: `auto`.
    pub mode: XdpMode,
    /// AF_XDP zero-copy mode. Default: `auto`.
    pub zero_copy: ZeroCopy,
    /// Busy polling: the NIC is polled from the worker's system calls. Default: `false`.
    pub busy_poll: bool,
    /// Action for captured traffic while no gateway process runs. Default: `drop`.
    pub on_exit: OnExit,
    /// Size of each queue's fill ring, packets, a power of two: packets per millisecond, times the longest time in
    /// milliseconds that the worker is not scheduled. Each takes 2 KiB of locked memory. Default: 4096, or fewer if
    /// memory is scarce.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = FILL_RING_SIZES))]
    pub fill_ring: Option<u32>,
}

/// Attach mode of the XDP program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum XdpMode {
    /// Native if the driver supports it, else generic.
    #[default]
    Auto,
    /// In the driver; startup fails if the driver doesn't support it.
    Native,
    /// After the driver: works on every device, slower.
    Generic,
}

/// AF_XDP zero-copy mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ZeroCopy {
    /// If the driver supports it.
    #[default]
    Auto,
    /// Startup fails if the driver doesn't support it.
    Always,
    /// Copy mode.
    Never,
}

/// Action for captured traffic while no gateway process runs, after any exit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnExit {
    /// No packet leaves untranslated.
    #[default]
    Drop,
    /// Pass to the kernel.
    Pass,
}

/// Source of policy: exactly one of the two.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PolicySource {
    /// Manifests: files or directories, watched for changes.
    Files(#[schemars(with = "Vec<FilePath>", length(min = 1), inner(length(min = 1)))] Vec<PathBuf>),
    /// A policy server.
    Server(PolicyServer),
}

/// Connection to a policy server.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PolicyServer {
    /// `http://host:port` or `https://host:port`.
    #[schemars(regex(pattern = URL_PATTERN))]
    pub url: String,
    /// URLs of further policy servers with the same source. A gateway tries all servers in turn, and all addresses of
    /// each. Default: none.
    #[serde(default)]
    #[schemars(inner(regex(pattern = URL_PATTERN)))]
    pub other_urls: Vec<String>,
    /// CA certificates (PEM) for the server's certificate. Default: the system's.
    #[schemars(with = "Option<FilePath>")]
    pub ca: Option<PathBuf>,
    /// Client certificate (PEM), if the server requires one.
    #[schemars(with = "Option<FilePath>")]
    pub cert: Option<PathBuf>,
    /// Private key of `cert` (PEM).
    #[schemars(with = "Option<FilePath>")]
    pub key: Option<PathBuf>,
    /// File with the token of the pod's service account, in place of a certificate, read at each connection; the server
    /// must accept it (`gateway_tokens`). Default: none.
    #[schemars(with = "Option<FilePath>")]
    pub token: Option<PathBuf>,
    /// Cache file of the last policy, for a start while the server is unreachable. Default:
    /// `/var/lib/vipgate/policy.cache`.
    #[serde(default = "default_cache")]
    #[schemars(with = "FilePath")]
    pub cache: PathBuf,
}

fn default_cache() -> PathBuf {
    "/var/lib/vipgate/policy.cache".into()
}

/// Session table.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Sessions {
    /// Maximum number of sessions of all workers. Default: 1048576.
    #[schemars(range(min = 1, max = MAX_SESSIONS))]
    pub capacity: u64,
    /// Part of the capacity, sessions of all workers, reserved for endpoints and VIPs below their max-min fair share,
    /// so that a full table doesn't lock them out. 0: first come, first served, without eviction in favor of others.
    /// Default: 1/32 of `capacity`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserve: Option<u64>,
    /// Directory for session state that survives a restart, and with `policy.files` and no other gateway for the record of
    /// addresses of AddressPools; `null`: none. It is no link, and others can't write to it. Default: `/dev/shm/vipgate`.
    #[schemars(with = "Option<FilePath>")]
    pub state: Option<PathBuf>,
    /// Idle timeouts of sessions.
    pub timeouts: Timeouts,
    /// Whether only a SYN opens a TCP session. Default: `true`.
    pub require_syn: bool,
    /// MSS clamping: maximum MSS option in a SYN over IPv4, bytes; over IPv6 it is 20 less. Default: unlimited.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = *MSS_RANGE.start(), max = *MSS_RANGE.end()))]
    pub mss_clamp: Option<u16>,
}

impl Sessions {
    /// Sessions reserved for endpoints and VIPs below their fair share.
    pub fn reserve(&self) -> u64 {
        self.reserve.unwrap_or(self.capacity / u64::from(SESSIONS_PER_RESERVED))
    }
}

impl Default for Sessions {
    fn default() -> Self {
        Self {
            capacity: 1 << 20,
            reserve: None,
            state: Some("/dev/shm/vipgate".into()),
            timeouts: Timeouts::default(),
            require_syn: true,
            mss_clamp: None,
        }
    }
}

/// Idle timeouts of sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Timeouts {
    /// Established TCP connections. Default: 7440s (RFC 5382 REQ-5).
    #[serde(with = "duration")]
    #[schemars(with = "DurationText")]
    pub tcp_established: Duration,
    /// TCP connections that are opening or closing. Default: 240s (RFC 5382 REQ-5).
    #[serde(with = "duration")]
    #[schemars(with = "DurationText")]
    pub tcp_transitory: Duration,
    /// UDP sessions. Default: 300s (RFC 4787 REQ-5).
    #[serde(with = "duration")]
    #[schemars(with = "DurationText")]
    pub udp: Duration,
    /// ICMP echo sessions. Default: 60s (RFC 5508 REQ-2).
    #[serde(with = "duration")]
    #[schemars(with = "DurationText")]
    pub icmp: Duration,
    /// Reassembly timeout: fragments of incomplete datagrams. Default: 2s.
    #[serde(with = "duration")]
    #[schemars(with = "DurationText")]
    pub fragment: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            tcp_established: Duration::from_mins(124),
            tcp_transitory: Duration::from_mins(4),
            udp: Duration::from_mins(5),
            icmp: Duration::from_mins(1),
            fragment: Duration::from_secs(2),
        }
    }
}

/// SNAT ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Ports {
    /// SNAT ports of every VIP, at least 64. Default: `1024-65535`.
    pub range: PortRange,
    /// Quarantine of a port after its session ended. Default: 2s.
    #[serde(with = "duration")]
    #[schemars(with = "DurationText")]
    pub quarantine: Duration,
}

impl Default for Ports {
    fn default() -> Self {
        Self { range: PortRange { first: 1024, last: 65535 }, quarantine: Duration::from_secs(2) }
    }
}

/// Endpoint for other gateways: VXLAN on UDP, session replication on TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Peer {
    /// Local address, which other gateways reach.
    #[schemars(with = "Address")]
    pub address: IpAddr,
    /// Port, UDP and TCP; the same on all gateways. Default: 4790.
    #[serde(default = "default_peer_port")]
    #[schemars(range(min = 1))]
    pub port: u16,
    /// Heartbeat interval between gateways; a peer is considered down after four intervals without one. Default: 100ms.
    #[serde(default = "default_heartbeat", with = "duration")]
    #[schemars(with = "DurationText")]
    pub heartbeat: Duration,
    /// Minimum age of a session for replication to another gateway. `0ms`: with its first reply, in the moment that the
    /// reply is forwarded; a session without one after 50ms. Default: 50ms.
    #[serde(rename = "copy_after", default = "default_replicate_after", with = "duration")]
    #[schemars(with = "DurationText")]
    pub replicate_after: Duration,
}

/// VXLAN tunnel endpoint for the nodes in `OverlayNode` manifests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Overlay {
    /// Local address, of an inside interface.
    #[schemars(with = "Address")]
    pub address: IpAddr,
    /// UDP port. Default: 8472, Linux' default.
    #[serde(default = "default_overlay_port")]
    #[schemars(range(min = 1))]
    pub port: u16,
}

impl Overlay {
    /// Address and port.
    pub fn tunnel_endpoint(self) -> SocketAddr {
        SocketAddr::new(self.address, self.port)
    }
}

fn default_overlay_port() -> u16 {
    8472
}

fn default_heartbeat() -> Duration {
    Duration::from_millis(100)
}

fn default_replicate_after() -> Duration {
    Duration::from_millis(50)
}

fn default_peer_port() -> u16 {
    4790
}

/// Routes for a BGP daemon: one per VIP with announce mode BGP, while this gateway is active for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Bgp {
    /// Kernel routing table: a dedicated one, or main (254). Default: 179.
    #[schemars(range(min = 1))]
    pub table: u32,
    /// Route metric. Default: the kernel's, 0 for IPv4 and 1024 for IPv6.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub metric: Option<u32>,
}

impl Default for Bgp {
    fn default() -> Self {
        Self { table: 179, metric: None }
    }
}

/// Admin socket of the command line.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Admin {
    /// Path of the Unix socket. Default: `/run/vipgate/gateway.sock`.
    #[schemars(with = "FilePath", length(min = 1, max = SOCKET_PATH_BYTES))]
    pub socket: PathBuf,
}

impl Default for Admin {
    fn default() -> Self {
        Self { socket: "/run/vipgate/gateway.sock".into() }
    }
}

/// HTTP server for `/metrics`, `/healthz` and `/readyz`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Metrics {
    /// Address and port of `/metrics`, `/healthz` and `/readyz`.
    #[schemars(with = "SocketAddress")]
    pub listen: SocketAddr,
}

impl Default for Metrics {
    fn default() -> Self {
        Self { listen: (Ipv4Addr::LOCALHOST, 9469).into() }
    }
}

/// Logging.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Log {
    /// Format of log lines. Default: `text`.
    pub format: LogFormat,
    /// Minimum level; the environment variable `RUST_LOG` overrides it. Default: `info`.
    pub level: LogLevel,
}

/// Format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Human-readable text.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

/// Minimum level of logged events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// Failures.
    Error,
    /// Suspicious conditions.
    Warn,
    /// State changes.
    #[default]
    Info,
    /// Details of changes.
    Debug,
    /// Every step.
    Trace,
}

impl LogLevel {
    /// Name in `tracing` filters.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Trace => "trace",
        }
    }
}
