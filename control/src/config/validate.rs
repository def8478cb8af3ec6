//! Validation beyond the types of the fields: dependencies between fields, duplicates and ranges.

use std::collections::HashMap;
use std::hash::Hash;
use std::path::PathBuf;
use std::time::Duration;

use vipgate_dataplane::policy::spec::Role;
use vipgate_policy::manifest::Cidr;
use vipgate_xdp::open::FILL_RING_SIZES;

use super::gateway::{Config, PeerAuthentication, PolicyServer, PolicySource, Timeouts};
use super::policyd::{PolicydConfig, PolicydSource};
use super::{Ports, Validate};

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

pub(super) type Report<'a> = dyn FnMut(&str, String) + 'a;

impl Validate for Config {
    fn validate(&self, report: &mut Report<'_>) {
        name("name", &self.name, report);
        for (field, value) in [("node", &self.node), ("zone", &self.zone)] {
            if let Some(value) = value {
                name(field, value, report);
            }
        }
        self.validate_interfaces(report);
        if let Some(cores) = &self.workers.cores {
            if cores.is_empty() {
                report("workers.cores", "is empty; omit it for one worker per queue".into());
            }
            for_each_duplicate(cores, |i, first| {
                report(
                    &format!("workers.cores[{i}]"),
                    format!("core {} is a duplicate of workers.cores[{first}]", cores[i]),
                );
            });
        }
        if self.xdp.fill_ring.is_some_and(|packets| !FILL_RING_SIZES.contains(&packets)) {
            let [min, .., max] = FILL_RING_SIZES;
            report("xdp.fill_ring", format!("must be a power of two from {min} to {max} packets"));
        }
        match &self.policy {
            PolicySource::Files(files) => paths("policy.files", files, report),
            PolicySource::Server(server) => {
                server.validate(report);
                if self.allow_empty {
                    report(
                        "allow_empty",
                        "applies to policy.files only; for a policy server set it in policyd.yaml".into(),
                    );
                }
            }
        }
        if !(1..=MAX_SESSIONS).contains(&self.sessions.capacity) {
            report("sessions.capacity", format!("must be from 1 to {MAX_SESSIONS}"));
        }
        if self.sessions.reserve() > self.sessions.capacity / 2 {
            report("sessions.reserve", "must be at most half of sessions.capacity".into());
        }
        self.sessions.timeouts.validate(report);
        if self.sessions.mss_clamp.is_some_and(|bytes| !MSS_RANGE.contains(&bytes)) {
            report("sessions.mss_clamp", format!("must be from {} to {} bytes", MSS_RANGE.start(), MSS_RANGE.end()));
        }
        self.ports.validate(report);
        if self.services.embryonic_per_vip == Some(0) {
            report("services.embryonic_per_vip", "must be at least 1".into());
        }
        self.health.validate(self, report);
        prefixes("pod_cidrs", &self.pod_cidrs, report);
        prefixes("service_cidrs", &self.service_cidrs, report);
        if let Some(peer) = &self.peer {
            if peer.address.is_unspecified() || peer.address.is_multicast() || peer.address.is_loopback() {
                report("peer.address", format!("{} is not reachable from another gateway", peer.address));
            }
            if peer.port == 0 {
                report("peer.port", "must be from 1 to 65535".into());
            }
            if peer.authentication == PeerAuthentication::Required && matches!(self.policy, PolicySource::Files(_)) {
                let reason = "`required` needs `policy.server`: gateways exchange their public keys through it";
                report("peer.authentication", reason.into());
            }
        }
        if let Some(overlay) = &self.overlay {
            if overlay.address.is_unspecified() || overlay.address.is_multicast() || overlay.address.is_loopback() {
                report("overlay.address", format!("{} is not reachable from a node", overlay.address));
            }
            if overlay.port == 0 {
                report("overlay.port", "must be from 1 to 65535".into());
            }
            if self.peer_tunnel_endpoint() == Some(overlay.tunnel_endpoint()) {
                report(
                    "overlay.port",
                    format!("{} is also peer.port: the packets could not be distinguished", overlay.port),
                );
            }
        }
        if matches!(self.bgp.table, 0 | LOCAL_TABLE) {
            report("bgp.table", format!("{} is a reserved routing table", self.bgp.table));
        }
        if self.bgp.metric == Some(0) {
            report("bgp.metric", "must be at least 1; omit it for the kernel's default".into());
        }
        if let Some(log) = &self.nat_log {
            let address = log.collector.ip();
            if address.is_unspecified() || address.is_multicast() {
                report("nat_log.collector", format!("{address} is not a unicast address"));
            }
            if log.collector.port() == 0 {
                report("nat_log.collector", "needs a port; the port of IPFIX is 4739".into());
            }
        }
        let length = self.admin.socket.as_os_str().len();
        if !(1..=SOCKET_PATH_BYTES).contains(&length) {
            report("admin.socket", format!("must have 1 to {SOCKET_PATH_BYTES} bytes, has {length}"));
        }
    }
}

impl Config {
    fn validate_interfaces(&self, report: &mut Report<'_>) {
        for (i, interface) in self.interfaces.iter().enumerate() {
            let name = interface.name.as_str();
            let is_valid = !matches!(name, "" | "." | "..") && !name.contains(|c: char| c == '/' || c.is_whitespace());
            if !is_valid || name.len() > INTERFACE_NAME_BYTES {
                report(
                    &format!("interfaces[{i}].name"),
                    format!(
                        "`{name}` is not an interface name: 1 to {INTERFACE_NAME_BYTES} bytes without slash and \
                         whitespace"
                    ),
                );
            }
        }
        let names: Vec<_> = self.interfaces.iter().map(|interface| interface.name.as_str()).collect();
        for_each_duplicate(&names, |i, first| {
            report(&format!("interfaces[{i}].name"), format!("`{}` is a duplicate of interfaces[{first}]", names[i]));
        });
        let roles = || self.interfaces.iter().map(|interface| Role::from(interface.role));
        match (roles().any(Role::is_inside), roles().any(Role::is_outside)) {
            (true, true) => {}
            _ if self.interfaces.is_empty() => report("interfaces", "at least one is required".into()),
            (false, _) => {
                report("interfaces", "none has role `inside` or `both`: there is no interface to pods".into());
            }
            (_, false) => {
                report("interfaces", "none has role `outside` or `both`: there is no interface to clients".into());
            }
        }
    }
}

impl Validate for PolicyServer {
    fn validate(&self, report: &mut Report<'_>) {
        url("policy.server.url", &self.url, report);
        let tls = self.url.starts_with("https://");
        for (field, path) in [("ca", &self.ca), ("cert", &self.cert), ("key", &self.key)] {
            if path.is_some() && !tls {
                report(&format!("policy.server.{field}"), "needs an https:// URL".into());
            }
        }
        match (&self.cert, &self.key) {
            (Some(_), None) => report("policy.server.cert", "needs `key`".into()),
            (None, Some(_)) => report("policy.server.key", "needs `cert`".into()),
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
                report(&format!("sessions.timeouts.{field}"), "must be longer than 0s and at most 720h".into());
            }
        }
    }
}

impl Validate for Ports {
    fn validate(&self, report: &mut Report<'_>) {
        if self.range.count() < PORT_BLOCK {
            report(
                "ports.range",
                format!("{} has {} ports, at least {PORT_BLOCK} are required", self.range, self.range.count()),
            );
        }
        if self.quarantine > MAX_TIMEOUT {
            report("ports.quarantine", "must be at most 720h".into());
        }
    }
}

impl Validate for PolicydConfig {
    fn validate(&self, report: &mut Report<'_>) {
        match &self.source {
            PolicydSource::Files(files) => paths("source.files", files, report),
            PolicydSource::Etcd(etcd) => {
                if etcd.endpoints.is_empty() {
                    report("source.etcd.endpoints", "at least one is required".into());
                }
                for (i, endpoint) in etcd.endpoints.iter().enumerate() {
                    let field = format!("source.etcd.endpoints[{i}]");
                    if endpoint.starts_with("https://") {
                        report(
                            &field,
                            format!("{endpoint}: https isn't supported for etcd by this version: {ETCD_REMEDY}"),
                        );
                    }
                    url(&field, endpoint, report);
                }
            }
            PolicydSource::Kubernetes(_) => {}
        }
        prefixes("pod_cidrs", &self.pod_cidrs, report);
        prefixes("service_cidrs", &self.service_cidrs, report);
        for (i, admin) in self.admins.iter().enumerate() {
            name(&format!("admins[{i}]"), admin, report);
        }
        if !self.admins.is_empty() && self.tls.as_ref().is_none_or(|tls| tls.ca.is_none()) {
            report("admins", "needs `tls.ca`: clients are identified by their certificates".into());
        }
        if self.limits.connections < 16 {
            report("limits.connections", "must be at least 16".into());
        }
        if self.limits.connections_per_address < 4 {
            report("limits.connections_per_address", "must be at least 4: each gateway has two".into());
        }
        if !LEASE_TTL_RANGE.contains(&self.leases.ttl) {
            report("leases.ttl", "must be from 100ms to 60s".into());
        }
    }
}

/// Validates prefixes inside the cluster.
fn prefixes(field: &str, cidrs: &[Cidr], report: &mut Report<'_>) {
    for_each_duplicate(cidrs, |i, first| {
        report(&format!("{field}[{i}]"), format!("{} is a duplicate of {field}[{first}]", cidrs[i].0));
    });
    for (i, cidr) in cidrs.iter().enumerate().filter(|(_, cidr)| cidr.0.prefix_len() == 0) {
        let reason = format!("{} covers every address: no destination would be outside the cluster", cidr.0);
        report(&format!("{field}[{i}]"), reason);
    }
}

fn name(field: &str, value: &str, report: &mut Report<'_>) {
    if value.is_empty() || value.contains(|c: char| c.is_whitespace() || c.is_control()) {
        report(field, "must not be empty or contain whitespace".into());
    }
}

fn url(field: &str, value: &str, report: &mut Report<'_>) {
    let rest = value.strip_prefix("http://").or_else(|| value.strip_prefix("https://"));
    let authority = rest.map(|rest| rest.split('/').next().unwrap_or(rest));
    if authority.is_none_or(|authority| authority.is_empty() || authority.contains(char::is_whitespace)) {
        report(field, format!("`{value}` is not a server URL: write http://host:port or https://host:port"));
    }
}

fn paths(field: &str, paths: &[PathBuf], report: &mut Report<'_>) {
    if paths.is_empty() {
        report(field, "at least one file or directory is required".into());
    }
    for (i, path) in paths.iter().enumerate() {
        if path.as_os_str().is_empty() {
            report(&format!("{field}[{i}]"), "is empty".into());
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
