//! Validation beyond the types of the fields: dependencies between fields, duplicates and ranges.

use std::collections::HashMap;
use std::hash::Hash;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use vipgate_dataplane::policy::spec::Role;
use vipgate_policy::compiler::Tenancy;
use vipgate_policy::diagnostic::Code;
use vipgate_policy::manifest::Cidr;
use vipgate_xdp::open::FILL_RING_SIZES;

use super::Validate;
use super::gateway::{Bgp, Config, PolicyServer, PolicySource, Ports, Sessions, Timeouts, Workers};
use super::nat_log::NatLog;
use super::policyd::{Etcd, KubernetesSource, MIN_BYTES, PolicydConfig, PolicydLimits, PolicydSource};

/// Linux: `IFNAMSIZ` is 16 with the terminating zero.
pub(super) const INTERFACE_NAME_BYTES: usize = 15;
/// Linux: `sun_path` is 108 with the terminating zero.
pub(super) const SOCKET_PATH_BYTES: usize = 107;
/// Ports per SNAT port block; a range has at least one block.
const PORT_BLOCK: u32 = 64;
/// 256 Mi sessions take 40 GB of memory.
pub(super) const MAX_SESSIONS: u64 = 1 << 28;
/// From the default send MSS (RFC 9293 section 3.7.1) to that of the largest frames.
pub(super) const MSS_RANGE: std::ops::RangeInclusive<u16> = 536..=9000;
/// Longer than any use; prevents overflow of timer arithmetic.
const MAX_TIMEOUT: Duration = Duration::from_hours(720);

/// Valid TTLs of leases.
const LEASE_TTL_RANGE: std::ops::RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_mins(1);
/// Linux: `RT_TABLE_LOCAL`, routes of local addresses.
const LOCAL_TABLE: u32 = 255;

/// Workaround for etcd with TLS.
const ETCD_REMEDY: &str = "use an http:// endpoint on this host, e.g. that of `etcd grpc-proxy start \
                           --endpoints=https://.. --cacert=.. --cert=.. --key=.. --listen-addr=127.0.0.1:2379`";

/// Receives errors in a configuration: code, field and reason.
pub(super) type Report<'a> = dyn FnMut(Code, &str, String) + 'a;

impl Validate for Config {
    fn validate(&self, report: &mut Report<'_>) {
        name("name", &self.name, report);
        for (field, value) in [("node", &self.node), ("zone", &self.zone)] {
            if let Some(value) = value {
                name(field, value, report);
            }
        }
        self.validate_interfaces(report);
        self.workers.validate(report);
        if self.xdp.fill_ring.is_some_and(|packets| !FILL_RING_SIZES.contains(&packets)) {
            let [min, .., max] = FILL_RING_SIZES;
            report(Code::OutOfRange, "xdp.fill_ring", format!("must be a power of two from {min} to {max} packets"));
        }
        self.validate_policy_source(report);
        self.sessions.validate(report);
        self.ports.validate(report);
        if self.services.embryonic_per_vip == Some(0) {
            report(Code::OutOfRange, "services.embryonic_per_vip", "must be at least 1".into());
        }
        self.health.validate(self, report);
        prefixes("pod_cidrs", &self.pod_cidrs, report);
        prefixes("service_cidrs", &self.service_cidrs, report);
        self.validate_tunnels(report);
        self.bgp.validate(report);
        if let Some(log) = &self.nat_log {
            log.validate(report);
        }
        let length = self.admin.socket.as_os_str().len();
        if !(1..=SOCKET_PATH_BYTES).contains(&length) {
            let reason = format!("must have 1 to {SOCKET_PATH_BYTES} bytes, has {length}");
            report(Code::OutOfRange, "admin.socket", reason);
        }
    }
}

impl Config {
    fn validate_interfaces(&self, report: &mut Report<'_>) {
        for (i, interface) in self.interfaces.iter().enumerate() {
            interface_name(&format!("interfaces[{i}].name"), &interface.name, report);
        }
        let names: Vec<_> = self.interfaces.iter().map(|interface| interface.name.as_str()).collect();
        for_each_duplicate(&names, |i, first| {
            let reason = format!("`{}` is a duplicate of interfaces[{first}]", names[i]);
            report(Code::DuplicateValue, &format!("interfaces[{i}].name"), reason);
        });
        let roles = || self.interfaces.iter().map(|interface| Role::from(interface.role));
        let (code, reason) = match (roles().any(Role::is_inside), roles().any(Role::is_outside)) {
            (true, true) => return,
            _ if self.interfaces.is_empty() => (Code::EmptyValue, "at least one is required"),
            (false, _) => (Code::InterfaceRoles, "none has role `inside` or `both`: there is no interface to pods"),
            (_, false) => (Code::InterfaceRoles, "none has role `outside` or `both`: there is no interface to clients"),
        };
        report(code, "interfaces", reason.into());
    }

    fn validate_policy_source(&self, report: &mut Report<'_>) {
        match &self.policy {
            PolicySource::Files(files) => paths("policy.files", files, report),
            PolicySource::Server(server) => {
                server.validate_at("policy.server", report);
                if self.allow_empty {
                    let reason = "applies to policy.files only; for a policy server set it in policyd.yaml";
                    report(Code::AllowEmptyWithServer, "allow_empty", reason.into());
                }
                if self.tenancy != Tenancy::default() {
                    let reason = "applies to policy.files only; for a policy server set it in policyd.yaml";
                    report(Code::TenancyWithServer, "tenancy", reason.into());
                }
            }
        }
    }

    /// Validates `peer` and `overlay`.
    fn validate_tunnels(&self, report: &mut Report<'_>) {
        if let Some(peer) = &self.peer {
            reachable("peer", peer.address, "another gateway", report);
            port("peer.port", peer.port, report);
        }
        if let Some(overlay) = &self.overlay {
            reachable("overlay", overlay.address, "a node", report);
            port("overlay.port", overlay.port, report);
            if self.peer_tunnel_endpoint() == Some(overlay.tunnel_endpoint()) {
                let reason = format!("{} is also peer.port: the packets could not be distinguished", overlay.port);
                report(Code::SameTunnelPort, "overlay.port", reason);
            }
        }
    }
}

impl Validate for Workers {
    fn validate(&self, report: &mut Report<'_>) {
        let Some(cores) = &self.cores else { return };
        if cores.is_empty() {
            report(Code::EmptyValue, "workers.cores", "is empty; omit it for one worker per queue".into());
        }
        for_each_duplicate(cores, |i, first| {
            let reason = format!("core {} is a duplicate of workers.cores[{first}]", cores[i]);
            report(Code::DuplicateValue, &format!("workers.cores[{i}]"), reason);
        });
    }
}

impl Validate for Sessions {
    fn validate(&self, report: &mut Report<'_>) {
        if !(1..=MAX_SESSIONS).contains(&self.capacity) {
            report(Code::OutOfRange, "sessions.capacity", format!("must be from 1 to {MAX_SESSIONS}"));
        }
        if self.reserve() > self.capacity / 2 {
            let reason = "must be at most half of sessions.capacity";
            report(Code::InconsistentLimits, "sessions.reserve", reason.into());
        }
        self.timeouts.validate(report);
        if self.mss_clamp.is_some_and(|bytes| !MSS_RANGE.contains(&bytes)) {
            let reason = format!("must be from {} to {} bytes", MSS_RANGE.start(), MSS_RANGE.end());
            report(Code::OutOfRange, "sessions.mss_clamp", reason);
        }
    }
}

impl Validate for Bgp {
    fn validate(&self, report: &mut Report<'_>) {
        if matches!(self.table, 0 | LOCAL_TABLE) {
            report(Code::ReservedRoutingTable, "bgp.table", format!("{} is a reserved routing table", self.table));
        }
        if self.metric == Some(0) {
            let reason = "must be at least 1; omit it for the kernel's default";
            report(Code::OutOfRange, "bgp.metric", reason.into());
        }
    }
}

impl Validate for NatLog {
    fn validate(&self, report: &mut Report<'_>) {
        let address = self.collector.ip();
        if address.is_unspecified() || address.is_multicast() {
            let reason = format!("{address} is not a unicast address");
            report(Code::UnreachableAddress, "nat_log.collector", reason);
        }
        if self.collector.port() == 0 {
            let reason = "needs a port; the port of IPFIX is 4739";
            report(Code::OutOfRange, "nat_log.collector", reason.into());
        }
    }
}

impl PolicyServer {
    /// Validates the connection, whose fields are those of `section`.
    pub(super) fn validate_at(&self, section: &str, report: &mut Report<'_>) {
        url(&format!("{section}.url"), &self.url, report);
        let tls = self.url.starts_with("https://");
        for (index, other) in self.other_urls.iter().enumerate() {
            let field = format!("{section}.other_urls[{index}]");
            url(&field, other, report);
            if other.starts_with("https://") != tls {
                report(Code::TlsWithoutHttps, &field, "needs https:// if `url` has it, else http://".into());
            }
        }
        for (field, path) in [("ca", &self.ca), ("cert", &self.cert), ("key", &self.key)] {
            if path.is_some() && !tls {
                report(Code::TlsWithoutHttps, &format!("{section}.{field}"), "needs an https:// URL".into());
            }
        }
        if self.token.is_some() && !tls {
            let reason = "needs an https:// URL: anybody could read it";
            report(Code::TlsWithoutHttps, &format!("{section}.token"), reason.into());
        }
        match (&self.cert, &self.key) {
            (Some(_), None) => report(Code::IncompleteKeyPair, &format!("{section}.cert"), "needs `key`".into()),
            (None, Some(_)) => report(Code::IncompleteKeyPair, &format!("{section}.key"), "needs `cert`".into()),
            _ => {}
        }
    }
}

impl Validate for Timeouts {
    fn validate(&self, report: &mut Report<'_>) {
        for (field, timeout) in [
            ("tcp_established", self.tcp_established),
            ("tcp_transitory", self.tcp_transitory),
            ("udp", self.udp),
            ("icmp", self.icmp),
            ("fragment", self.fragment),
        ] {
            if timeout.is_zero() || timeout > MAX_TIMEOUT {
                let reason = "must be longer than 0s and at most 720h";
                report(Code::OutOfRange, &format!("sessions.timeouts.{field}"), reason.into());
            }
        }
    }
}

impl Validate for Ports {
    fn validate(&self, report: &mut Report<'_>) {
        if self.range.count() < PORT_BLOCK {
            let reason = format!("{} has {} ports, at least {PORT_BLOCK} are required", self.range, self.range.count());
            report(Code::PortRangeTooSmall, "ports.range", reason);
        }
        if self.quarantine > MAX_TIMEOUT {
            report(Code::OutOfRange, "ports.quarantine", "must be at most 720h".into());
        }
    }
}

impl Validate for PolicydConfig {
    fn validate(&self, report: &mut Report<'_>) {
        match &self.source {
            PolicydSource::Files(files) => paths("source.files", files, report),
            PolicydSource::Etcd(etcd) => etcd.validate(report),
            PolicydSource::Kubernetes(kubernetes) => kubernetes.validate(report),
        }
        prefixes("pod_cidrs", &self.pod_cidrs, report);
        prefixes("service_cidrs", &self.service_cidrs, report);
        for (i, admin) in self.admins.iter().enumerate() {
            name(&format!("admins[{i}]"), admin, report);
        }
        if !self.admins.is_empty() && self.tls.as_ref().is_none_or(|tls| tls.ca.is_none()) {
            let reason = "needs `tls.ca`: clients are identified by their certificates";
            report(Code::AdminsWithoutClientCertificates, "admins", reason.into());
        }
        if let Some(agents) = &self.node_agents {
            port("node_agents.port", agents.port, report);
            if agents.vni >= 1 << 24 {
                report(Code::OutOfRange, "node_agents.vni", format!("{} has more than 24 bits", agents.vni));
            }
        }
        let agent_tokens = self.node_agents.as_ref().and_then(|agents| agents.tokens.as_ref());
        for (field, tokens) in [("gateway_tokens", self.gateway_tokens.as_ref()), ("node_agents.tokens", agent_tokens)]
        {
            if tokens.is_some() && self.tls.as_ref().is_none_or(|tls| tls.ca.is_none()) {
                let reason = "needs `tls.ca`: otherwise no client is verified";
                report(Code::TokensWithoutVerification, field, reason.into());
            }
        }
        self.limits.validate(report);
        if !LEASE_TTL_RANGE.contains(&self.leases.ttl) {
            report(Code::OutOfRange, "leases.ttl", "must be from 100ms to 60s".into());
        }
    }
}

impl Validate for Etcd {
    fn validate(&self, report: &mut Report<'_>) {
        if self.endpoints.is_empty() {
            report(Code::EmptyValue, "source.etcd.endpoints", "at least one is required".into());
        }
        for (i, endpoint) in self.endpoints.iter().enumerate() {
            let field = format!("source.etcd.endpoints[{i}]");
            if endpoint.starts_with("https://") {
                let reason = format!("{endpoint}: https isn't supported for etcd by this version: {ETCD_REMEDY}");
                report(Code::EtcdOverTls, &field, reason);
            }
            url(&field, endpoint, report);
        }
    }
}

impl Validate for KubernetesSource {
    fn validate(&self, report: &mut Report<'_>) {
        if self.context.is_some() && self.kubeconfig.is_none() {
            let reason = "needs `kubeconfig`: a pod's service account has no contexts";
            report(Code::ContextWithoutKubeconfig, "source.kubernetes.context", reason.into());
        }
        for (i, _) in self.namespaces.iter().enumerate().filter(|(_, namespace)| namespace.is_empty()) {
            let reason = "is empty; omit `namespaces` for all";
            report(Code::EmptyValue, &format!("source.kubernetes.namespaces[{i}]"), reason.into());
        }
        for (field, text) in [("namespace", self.lease.namespace.as_deref()), ("name", Some(self.lease.name.as_str()))]
        {
            if text == Some("") {
                report(Code::EmptyValue, &format!("source.kubernetes.lease.{field}"), "is empty".into());
            }
        }
        for_each_duplicate(&self.namespaces, |i, _| {
            let reason = format!("{} is a duplicate", self.namespaces[i]);
            report(Code::DuplicateValue, &format!("source.kubernetes.namespaces[{i}]"), reason);
        });
    }
}

impl Validate for PolicydLimits {
    fn validate(&self, report: &mut Report<'_>) {
        if self.connections < 16 {
            report(Code::OutOfRange, "limits.connections", "must be at least 16".into());
        }
        if self.connections_per_address < 4 {
            let reason = "must be at least 4: each gateway has two";
            report(Code::OutOfRange, "limits.connections_per_address", reason.into());
        }
        for (field, bytes) in [("bytes", self.bytes), ("bytes_per_address", self.bytes_per_address)] {
            if bytes < MIN_BYTES {
                let reason = format!("must be at least {MIN_BYTES}: a request may have 32 MiB");
                report(Code::OutOfRange, &format!("limits.{field}"), reason);
            }
        }
    }
}

/// Validates prefixes inside the cluster.
pub(super) fn prefixes(field: &str, cidrs: &[Cidr], report: &mut Report<'_>) {
    for_each_duplicate(cidrs, |i, first| {
        let reason = format!("{} is a duplicate of {field}[{first}]", cidrs[i].0);
        report(Code::DuplicateValue, &format!("{field}[{i}]"), reason);
    });
    for (i, cidr) in cidrs.iter().enumerate().filter(|(_, cidr)| cidr.0.prefix_len() == 0) {
        let reason = format!("{} covers every address: no destination would be outside the cluster", cidr.0);
        report(Code::PrefixOfEverything, &format!("{field}[{i}]"), reason);
    }
}

pub(super) fn name(field: &str, value: &str, report: &mut Report<'_>) {
    if value.is_empty() || value.contains(|c: char| c.is_whitespace() || c.is_control()) {
        report(Code::InvalidName, field, "must not be empty or contain whitespace".into());
    }
}

pub(super) fn interface_name(field: &str, name: &str, report: &mut Report<'_>) {
    let is_valid = !matches!(name, "" | "." | "..") && !name.contains(|c: char| c == '/' || c.is_whitespace());
    if !is_valid || name.len() > INTERFACE_NAME_BYTES {
        let reason = format!(
            "`{name}` is not an interface name: 1 to {INTERFACE_NAME_BYTES} bytes without slash and whitespace"
        );
        report(Code::InvalidName, field, reason);
    }
}

/// Validates the local address of a tunnel; `from` names those who must reach it.
fn reachable(section: &str, address: IpAddr, from: &str, report: &mut Report<'_>) {
    if address.is_unspecified() || address.is_multicast() || address.is_loopback() {
        let reason = format!("{address} is not reachable from {from}");
        report(Code::UnreachableAddress, &format!("{section}.address"), reason);
    }
}

fn port(field: &str, port: u16, report: &mut Report<'_>) {
    if port == 0 {
        report(Code::OutOfRange, field, "must be from 1 to 65535".into());
    }
}

fn url(field: &str, value: &str, report: &mut Report<'_>) {
    let rest = value.strip_prefix("http://").or_else(|| value.strip_prefix("https://"));
    let authority = rest.map(|rest| rest.split('/').next().unwrap_or(rest));
    if authority.is_none_or(|authority| authority.is_empty() || authority.contains(char::is_whitespace)) {
        let reason = format!("`{value}` is not a server URL: write http://host:port or https://host:port");
        report(Code::MalformedValue, field, reason);
    }
}

fn paths(field: &str, paths: &[PathBuf], report: &mut Report<'_>) {
    if paths.is_empty() {
        report(Code::EmptyValue, field, "at least one file or directory is required".into());
    }
    for (i, path) in paths.iter().enumerate() {
        if path.as_os_str().is_empty() {
            report(Code::EmptyValue, &format!("{field}[{i}]"), "is empty".into());
        }
    }
}

/// Calls `report` for each duplicate value, with its index and that of the first occurrence.
pub(super) fn for_each_duplicate<T: Eq + Hash>(values: &[T], mut report: impl FnMut(usize, usize)) {
    let mut first_index = HashMap::new();
    for (i, value) in values.iter().enumerate() {
        match first_index.get(value) {
            Some(&first) => report(i, first),
            None => {
                first_index.insert(value, i);
            }
        }
    }
}
