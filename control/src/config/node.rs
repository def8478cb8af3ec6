//! `node.yaml`: configuration of a node agent.

use std::path::PathBuf;
use std::time::Duration;

use schemars::JsonSchema;
use serde::Deserialize;
use vipgate_node::marks::{DEFAULT_MASK, MarkMask};
use vipgate_policy::diagnostic::Code;
use vipgate_policy::manifest::Cidr;
use vipgate_policy::schema::{FilePath, URL_PATTERN};

use super::Validate;
use super::gateway::{Admin, Log, Metrics, PolicyServer};
use super::units::{DurationText, duration};
use super::validate::{INTERFACE_NAME_BYTES, Report, SOCKET_PATH_BYTES, name, prefixes};

/// Priorities of `local`, and of `main` (ip-rule(8)): rules are between them.
const RULE_PRIORITIES: std::ops::RangeInclusive<u32> = 1..=32_000;
/// Numbers of routing tables without a meaning of their own.
const TABLES: std::ops::RangeInclusive<u32> = 256..=0x7fff_0000;
/// From the smallest MTU of IPv6 (RFC 8200 section 5) to that of the largest frames, less the headers.
const MTU_RANGE: std::ops::RangeInclusive<u32> = 1280..=8950;
const ECHO_INTERVALS: std::ops::RangeInclusive<Duration> = Duration::from_millis(10)..=Duration::from_secs(10);

/// The node agent's configuration.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NodeConfig {
    /// The node's name, as in its Node object.
    pub name: String,
    /// The policy server; it must have `node_agents` in its policyd.yaml.
    pub server: NodePolicyServer,
    /// Pod prefixes: packets from there are held back until policy says whether it covers the pod, also before the first
    /// policy. The prefixes of this node, or of all nodes. Default: those in the node's policy, when it is there.
    #[serde(default)]
    #[schemars(extend("uniqueItems" = true, "default" = []))]
    pub pod_cidrs: Vec<Cidr>,
    /// The tunnels.
    #[serde(default)]
    pub tunnel: NodeTunnel,
    /// Bits of packet marks and connection marks that vipgate uses, adjacent, at least three. Each gateway has a value;
    /// three values have other meanings. Default: 7936 (0x1f00), for 29 gateways.
    #[serde(default = "default_mask")]
    pub mark_mask: u32,
    /// Where routing rules and tables are.
    #[serde(default)]
    pub routing: NodeRouting,
    /// Interval of echo requests to each gateway, from 10ms to 10s; one that doesn't answer three of them is unreachable.
    /// Default: `100ms`.
    #[serde(default = "default_echo_interval", with = "duration")]
    #[schemars(with = "DurationText")]
    pub echo_interval: Duration,
    /// File with the numbers of gateways in marks, for the next process; gone with a reboot, like the marks. Default:
    /// `/run/vipgate/node.marks`.
    #[serde(default = "default_state")]
    #[schemars(with = "FilePath")]
    pub state: PathBuf,
    /// The program `nft`. Default: `nft`, found by `PATH`.
    #[serde(default = "default_nft")]
    #[schemars(with = "FilePath")]
    pub nft: PathBuf,
    /// Directory of the kernel's settings for devices. In a container `/proc/sys` is usually read-only: mount the host's
    /// elsewhere. Default: `/proc/sys/net`.
    #[serde(default = "default_sysctls")]
    #[schemars(with = "FilePath")]
    pub sysctls: PathBuf,
    /// Admin socket. Default: `/run/vipgate/node.sock`.
    #[serde(default = "default_admin")]
    pub admin: Admin,
    /// HTTP server for metrics and health. Default: `127.0.0.1:9471`.
    #[serde(default = "default_metrics")]
    pub metrics: Metrics,
    /// Logging.
    #[serde(default)]
    pub log: Log,
}

/// Connection to a policy server.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NodePolicyServer {
    /// `http://host:port` or `https://host:port`.
    #[schemars(regex(pattern = URL_PATTERN))]
    pub url: String,
    /// URLs of further policy servers with the same source. Default: none.
    #[serde(default)]
    #[schemars(inner(regex(pattern = URL_PATTERN)))]
    pub other_urls: Vec<String>,
    /// CA certificates (PEM) for the server's certificate. Default: the system's.
    #[schemars(with = "Option<FilePath>")]
    pub ca: Option<PathBuf>,
    /// Client certificate (PEM) with the node's name, if the server requires one.
    #[schemars(with = "Option<FilePath>")]
    pub cert: Option<PathBuf>,
    /// Private key of `cert` (PEM).
    #[schemars(with = "Option<FilePath>")]
    pub key: Option<PathBuf>,
    /// File with the token of the pod's service account, in place of a certificate, read at each connection; the server
    /// must accept it (`node_agents.tokens`). Default: none.
    #[schemars(with = "Option<FilePath>")]
    pub token: Option<PathBuf>,
    /// Cache file of the last policy and view, for a start while the server is unreachable. Default:
    /// `/var/lib/vipgate/node.cache`.
    #[serde(default = "default_cache")]
    #[schemars(with = "FilePath")]
    pub cache: PathBuf,
}

impl NodePolicyServer {
    /// As a gateway's connection.
    pub fn connection(&self) -> PolicyServer {
        let Self { url, other_urls, ca, cert, key, token, cache } = self.clone();
        PolicyServer { url, other_urls, ca, cert, key, token, cache }
    }
}

fn default_cache() -> PathBuf {
    "/var/lib/vipgate/node.cache".into()
}

/// The tunnels to gateways.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct NodeTunnel {
    /// Name of the VXLAN device. Default: `vipgate0`.
    #[schemars(length(min = 1, max = INTERFACE_NAME_BYTES))]
    pub device: String,
    /// Name of the TUN device that held packets are routed to. Default: `vipgate-hold`.
    #[schemars(length(min = 1, max = INTERFACE_NAME_BYTES))]
    pub hold_device: String,
    /// MTU inside the tunnels. Default: that of the interface toward the gateways, less 50 bytes, or 70 for IPv6.
    #[schemars(range(min = 1280, max = 8950))]
    pub mtu: Option<u32>,
}

impl Default for NodeTunnel {
    fn default() -> Self {
        Self { device: "vipgate0".into(), hold_device: "vipgate-hold".into(), mtu: None }
    }
}

/// Where routing rules and tables are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct NodeRouting {
    /// Priority of the first routing rule; the next four are used, too. Default: 190.
    #[schemars(range(min = 1, max = 32_000))]
    pub rule_priority: u32,
    /// Number of the routing table of held packets; those of gateways follow. Default: 7680.
    #[schemars(range(min = 256, max = 0x7fff_0000))]
    pub first_table: u32,
}

impl Default for NodeRouting {
    fn default() -> Self {
        Self { rule_priority: 190, first_table: 7680 }
    }
}

fn default_mask() -> u32 {
    DEFAULT_MASK
}

fn default_echo_interval() -> Duration {
    Duration::from_millis(100)
}

fn default_state() -> PathBuf {
    "/run/vipgate/node.marks".into()
}

fn default_nft() -> PathBuf {
    "nft".into()
}

fn default_sysctls() -> PathBuf {
    "/proc/sys/net".into()
}

fn default_admin() -> Admin {
    Admin { socket: "/run/vipgate/node.sock".into() }
}

fn default_metrics() -> Metrics {
    Metrics { listen: (std::net::Ipv4Addr::LOCALHOST, 9471).into() }
}

impl Validate for NodeConfig {
    fn validate(&self, report: &mut Report<'_>) {
        name("name", &self.name, report);
        self.server.connection().validate_at("server", report);
        prefixes("pod_cidrs", &self.pod_cidrs, report);
        let NodeTunnel { device, hold_device, mtu } = &self.tunnel;
        for (field, text) in [("tunnel.device", device), ("tunnel.hold_device", hold_device)] {
            super::validate::interface_name(field, text, report);
        }
        if device == hold_device {
            report(Code::DuplicateValue, "tunnel.hold_device", "is also `tunnel.device`".into());
        }
        if mtu.is_some_and(|mtu| !MTU_RANGE.contains(&mtu)) {
            let reason = format!("must be from {} to {}", MTU_RANGE.start(), MTU_RANGE.end());
            report(Code::OutOfRange, "tunnel.mtu", reason);
        }
        if let Err(error) = MarkMask::new(self.mark_mask) {
            report(Code::OutOfRange, "mark_mask", format!("{:#x}: {error}", self.mark_mask));
        }
        for (field, number, range) in [
            ("routing.rule_priority", self.routing.rule_priority, RULE_PRIORITIES),
            ("routing.first_table", self.routing.first_table, TABLES),
        ] {
            if !range.contains(&number) {
                report(Code::OutOfRange, field, format!("must be from {} to {}", range.start(), range.end()));
            }
        }
        if !ECHO_INTERVALS.contains(&self.echo_interval) {
            report(Code::OutOfRange, "echo_interval", "must be from 10ms to 10s".into());
        }
        let length = self.admin.socket.as_os_str().len();
        if !(1..=SOCKET_PATH_BYTES).contains(&length) {
            let reason = format!("must have 1 to {SOCKET_PATH_BYTES} bytes, has {length}");
            report(Code::OutOfRange, "admin.socket", reason);
        }
    }
}
