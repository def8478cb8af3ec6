//! `gateway.yaml`: what one gateway is, has and may use.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use vipgate_xdp::open::FILL_RINGS;

use super::health::Health;
use super::nat_log::NatLog;
use super::privileges::Privileges;
use super::services::Services;
use super::units::{DurationText, PortRange, duration};
use super::verify::{INTERFACE_NAME_BYTES, MOST_SESSIONS, SEGMENT_SIZES, SOCKET_PATH_BYTES};
use crate::manifest::schema::{Address, SocketAddress, URL, WORD};
use crate::manifest::{Cidr, Uncovered};

/// A gateway's configuration.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Unique among gateways.
    #[schemars(regex(pattern = WORD))]
    pub name: String,
    /// Kubernetes node whose endpoints are local. Default: the gateway's name.
    #[schemars(regex(pattern = WORD))]
    pub(super) node: Option<String>,
    /// Zone, for policies that prefer or require one.
    #[schemars(regex(pattern = WORD))]
    pub zone: Option<String>,
    /// The interfaces that it polls, at least one inside and one outside.
    #[schemars(length(min = 1))]
    pub interfaces: Vec<Interface>,
    /// The threads that forward.
    #[serde(default)]
    pub workers: Workers,
    /// How packets are captured.
    #[serde(default)]
    pub xdp: Xdp,
    /// Where policy comes from.
    pub policy: PolicySource,
    /// Whether `policy.files` without manifests are taken at their word: at the start, and when what they had is gone. Default:
    /// false, and the last good state stays in force.
    #[serde(default)]
    pub allow_empty: bool,
    /// The session table.
    #[serde(default)]
    pub sessions: Sessions,
    /// SNAT ports.
    #[serde(default)]
    pub ports: Ports,
    /// Inbound Services.
    #[serde(default)]
    pub services: Services,
    /// Pods' addresses, covered or not. What goes there stays inside the cluster, so it isn't translated. Those that the policy server or the Gateway manifest says count, too.
    #[serde(default)]
    #[schemars(extend("uniqueItems" = true, "default" = []))]
    pub pod_cidrs: Vec<Cidr>,
    /// Services' own addresses in the cluster: what goes there isn't translated, either.
    #[serde(default)]
    #[schemars(extend("uniqueItems" = true, "default" = []))]
    pub service_cidrs: Vec<Cidr>,
    /// What becomes of packets from `pod_cidrs` that no policy covers, and that would leave the cluster. Default: as the Gateway manifest or the policy server says, else `drop` where pods' addresses are known, else `pass`.
    pub uncovered: Option<Uncovered>,
    /// When this gateway can't do what it serves for, and asks not to.
    #[serde(default)]
    pub health: Health,
    /// Where other gateways reach this one; without it this gateway takes part in no group.
    pub peer: Option<Peer>,
    /// Where the nodes of the overlay network reach this gateway. Default: nowhere, and their tunnels are the kernel's.
    pub overlay: Option<Overlay>,
    /// Routes for a BGP daemon.
    #[serde(default)]
    pub bgp: Bgp,
    /// Where the log of translations goes. Default: nowhere.
    pub nat_log: Option<NatLog>,
    /// What the process gives up.
    #[serde(default)]
    pub privileges: Privileges,
    /// The socket of the command line.
    #[serde(default)]
    pub admin: Admin,
    /// The HTTP server of monitoring.
    #[serde(default)]
    pub metrics: Metrics,
    /// What is logged and how.
    #[serde(default)]
    pub log: Log,
}

impl Config {
    /// Where tunnel packets come in.
    pub fn tunnels(&self) -> Vec<SocketAddr> {
        self.tunnel().into_iter().chain(self.overlay.map(Overlay::end)).collect()
    }

    /// Where other gateways' packets come in.
    pub fn tunnel(&self) -> Option<SocketAddr> {
        self.peer.map(|peer| SocketAddr::new(peer.address, peer.port))
    }

    /// Whether tunnel packets of other gateways must have a tag.
    pub fn peer_authentication(&self) -> PeerAuthentication {
        self.peer.map(|peer| peer.authentication).unwrap_or_default()
    }

    /// Kubernetes node whose endpoints are local. Default: the gateway's name.
    pub fn node(&self) -> &str {
        self.node.as_deref().unwrap_or(&self.name)
    }
}

/// One interface.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Interface {
    /// The kernel's name of it.
    #[schemars(length(min = 1, max = INTERFACE_NAME_BYTES), regex(pattern = r"^[^/\s]+$"))]
    pub name: String,
    /// Which side it is on.
    pub role: InterfaceRole,
}

/// Which side of the gateway an interface is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum InterfaceRole {
    /// Where pods are.
    Inside,
    /// Where the world is.
    Outside,
    /// One-armed: both.
    Both,
}

impl From<InterfaceRole> for vipgate_dataplane::snapshot::spec::Role {
    fn from(role: InterfaceRole) -> Self {
        match role {
            InterfaceRole::Inside => Self::Inside,
            InterfaceRole::Outside => Self::Outside,
            InterfaceRole::Both => Self::Both,
        }
    }
}

/// The threads that forward.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Workers {
    /// Worker i is pinned to `cores[i]` and polls queue i of every interface. Default: one worker per queue.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1), extend("uniqueItems" = true))]
    pub cores: Option<Vec<usize>>,
    /// What a worker does while there are no packets. Default: `adaptive`.
    pub idle: Idle,
}

/// What a worker does while there are no packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Idle {
    /// Sleeps in poll(2) after a while.
    #[default]
    Adaptive,
    /// Keeps polling, and its core busy.
    Spin,
}

/// How packets are captured.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Xdp {
    /// Where the program is attached. Default: `auto`.
    pub mode: XdpMode,
    /// Whether the NIC shares frames with the gateway instead of copying. Default: `auto`.
    pub zero_copy: ZeroCopy,
    /// Whether the kernel polls the NIC from the worker's own calls. Default: false.
    pub busy_poll: bool,
    /// What happens to captured traffic while no gateway process is there. Default: `drop`.
    pub on_exit: OnExit,
    /// Packets that each queue can receive while its worker is off its core, a power of two: packets per millisecond and queue,
    /// times the longest time in milliseconds. Each takes 2 KiB of locked memory. Default: 4096, or fewer where memory is scarce.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = FILL_RINGS))]
    pub fill_ring: Option<u32>,
}

/// Where the XDP program is attached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum XdpMode {
    /// In the driver where it can, else generic.
    #[default]
    Auto,
    /// In the driver, or not at all.
    Native,
    /// Behind the driver: every device can, slowly.
    Generic,
}

/// Whether the NIC shares frames with the gateway.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ZeroCopy {
    /// Where it can.
    #[default]
    Auto,
    /// Or not start at all.
    Always,
    /// Copies.
    Never,
}

/// What happens to captured traffic while no gateway process is there, after any exit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnExit {
    /// Dropped: no pod address leaves.
    #[default]
    Drop,
    /// Given to the kernel.
    Pass,
}

/// Where policy comes from: exactly one of the two.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PolicySource {
    /// Manifests: files or directories, followed for changes.
    Files(#[schemars(length(min = 1), inner(length(min = 1)))] Vec<PathBuf>),
    /// A policy server.
    Server(PolicyServer),
}

/// A policy server and how to reach it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PolicyServer {
    /// `http://host:port` or `https://host:port`.
    #[schemars(regex(pattern = URL))]
    pub url: String,
    /// Certificates (PEM) of who may sign the server's certificate. Default: the system's.
    pub ca: Option<PathBuf>,
    /// The gateway's certificate (PEM), where the server asks for one.
    pub cert: Option<PathBuf>,
    /// The key of `cert` (PEM).
    pub key: Option<PathBuf>,
    /// Where the last policy is kept, for a start without the server. Default: `/var/lib/vipgate/policy.cache`.
    #[serde(default = "default_cache")]
    pub cache: PathBuf,
}

fn default_cache() -> PathBuf {
    "/var/lib/vipgate/policy.cache".into()
}

/// The session table.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Sessions {
    /// Sessions that the gateway can hold, all workers together. Default: 1048576.
    #[schemars(range(min = 1, max = MOST_SESSIONS))]
    pub capacity: u64,
    /// Sessions of the capacity, all workers together, that nobody can take who has a fair share of it already: what a newcomer finds in
    /// a table that others have filled. 0: whoever comes first has all, and none of theirs ends for others. Default: a 32nd of `capacity`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserve: Option<u64>,
    /// Directory of the session state that outlives the process; null: none does. Default: `/dev/shm/vipgate`.
    pub state: Option<PathBuf>,
    /// How long a session without packets lives.
    pub timeouts: Timeouts,
    /// Whether a TCP segment that isn't a SYN opens no session. Default: true.
    pub require_syn: bool,
    /// The largest segment size that a SYN over IPv4 may announce, bytes; over IPv6 it is 20 less. Default: any.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = *SEGMENT_SIZES.start(), max = *SEGMENT_SIZES.end()))]
    pub mss_clamp: Option<u16>,
}

impl Sessions {
    /// Sessions that only holders below their fair share may have.
    pub fn reserve(&self) -> u64 {
        self.reserve.unwrap_or(self.capacity / RESERVE_SHARE)
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

/// Of so many sessions, one is in the reserve.
const RESERVE_SHARE: u64 = 32;

/// How long a session without packets lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Timeouts {
    /// An open TCP connection. Default: 7440s (RFC 5382 REQ-5).
    #[serde(with = "duration")]
    #[schemars(with = "DurationText")]
    pub tcp_established: Duration,
    /// A TCP connection that is opening or closing. Default: 240s (RFC 5382 REQ-5).
    #[serde(with = "duration")]
    #[schemars(with = "DurationText")]
    pub tcp_transitory: Duration,
    /// UDP. Default: 300s (RFC 4787 REQ-5).
    #[serde(with = "duration")]
    #[schemars(with = "DurationText")]
    pub udp: Duration,
    /// ICMP echo. Default: 60s (RFC 5508 REQ-2).
    #[serde(with = "duration")]
    #[schemars(with = "DurationText")]
    pub icmp: Duration,
    /// Fragments that wait for the rest of their packet. Default: 2s.
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
    /// SNAT ports of every VIP. Default: 1024-65535.
    pub range: PortRange,
    /// How long a port rests after its session ended. Default: 2s.
    #[serde(with = "duration")]
    #[schemars(with = "DurationText")]
    pub quarantine: Duration,
}

impl Default for Ports {
    fn default() -> Self {
        Self { range: PortRange { first: 1024, last: 65535 }, quarantine: Duration::from_secs(2) }
    }
}

/// Where other gateways reach this one: VXLAN between gateways on UDP, session state on TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Peer {
    /// Its address.
    #[schemars(with = "Address")]
    pub address: IpAddr,
    /// Its port, UDP and TCP. Default: 4790.
    #[serde(default = "default_peer_port")]
    #[schemars(range(min = 1))]
    pub port: u16,
    /// How often gateways hear of each other; one that is silent for four times as long is taken for gone. Default: 100ms.
    #[serde(default = "default_heartbeat", with = "duration")]
    #[schemars(with = "DurationText")]
    pub heartbeat: Duration,
    /// Sessions younger than this are not copied to another gateway. Default: 50ms.
    #[serde(default = "default_copy_after", with = "duration")]
    #[schemars(with = "DurationText")]
    pub copy_after: Duration,
    /// Whether tunnel packets of other gateways must have a tag made with a key that only that gateway and this one know. Keys come by
    /// way of the policy server, from gateways of this version on. Default: `offered`.
    #[serde(default)]
    pub authentication: PeerAuthentication,
}

/// Whether tunnel packets of other gateways must have a tag.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PeerAuthentication {
    /// Those of gateways that show a key. Others, of an older version, are known by their address and the interface that leads there.
    #[default]
    Offered,
    /// All. A gateway that shows no key isn't heard. Needs `policy.server`.
    Required,
}

/// Where the nodes of the overlay network reach this gateway: VXLAN with the pods' packets. Nodes are those of `OverlayNode` manifests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Overlay {
    /// Its address, one of an inside interface.
    #[schemars(with = "Address")]
    pub address: IpAddr,
    /// UDP port. Default: 8472, as Linux has it.
    #[serde(default = "default_overlay_port")]
    #[schemars(range(min = 1))]
    pub port: u16,
}

impl Overlay {
    /// Address and port.
    pub fn end(self) -> SocketAddr {
        SocketAddr::new(self.address, self.port)
    }
}

fn default_overlay_port() -> u16 {
    8472
}

fn default_heartbeat() -> Duration {
    Duration::from_millis(100)
}

fn default_copy_after() -> Duration {
    Duration::from_millis(50)
}

fn default_peer_port() -> u16 {
    4790
}

/// Routes for a BGP daemon: one for each VIP that BGP announces, while this gateway serves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Bgp {
    /// The kernel's table that they stand in: one of their own, or the main table (254). Default: 179.
    #[schemars(range(min = 1))]
    pub table: u32,
    /// Their metric. Default: the kernel's, 0 for IPv4 and 1024 for IPv6.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub metric: Option<u32>,
}

impl Default for Bgp {
    fn default() -> Self {
        Self { table: 179, metric: None }
    }
}

/// The socket of the command line.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Admin {
    /// Unix socket. Default: `/run/vipgate/gateway.sock`.
    #[schemars(length(min = 1, max = SOCKET_PATH_BYTES))]
    pub socket: PathBuf,
}

impl Default for Admin {
    fn default() -> Self {
        Self { socket: "/run/vipgate/gateway.sock".into() }
    }
}

/// The HTTP server of monitoring: `/metrics`, `/healthz`, `/readyz`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Metrics {
    /// Address and port. Default: `127.0.0.1:9469`; the policy server's is `127.0.0.1:9470`.
    #[schemars(with = "SocketAddress")]
    pub listen: SocketAddr,
}

impl Default for Metrics {
    fn default() -> Self {
        Self { listen: (Ipv4Addr::LOCALHOST, 9469).into() }
    }
}

/// What is logged and how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Log {
    /// Default: `text`.
    pub format: LogFormat,
    /// Default: `info`.
    pub level: LogLevel,
}

/// The form of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// The least important events that are logged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// What failed.
    Error,
    /// And what looks wrong.
    Warn,
    /// And what changed.
    #[default]
    Info,
    /// And why.
    Debug,
    /// And each step.
    Trace,
}

impl LogLevel {
    /// As `tracing` filters spell it.
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
