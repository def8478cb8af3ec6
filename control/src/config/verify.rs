//! What the shape of a field can't say: fields that need each other, names that must differ, figures that must fit.

use std::collections::HashMap;
use std::hash::Hash;
use std::path::PathBuf;
use std::time::Duration;

use vipgate_dataplane::snapshot::spec::Role;
use vipgate_xdp::open::FILL_RINGS;

use super::gateway::{Config, PeerAuthentication, PolicyServer, PolicySource, Timeouts};
use super::policyd::{PolicydConfig, PolicydSource};
use super::{Ports, Verify};
use crate::manifest::Cidr;

/// Linux: `IFNAMSIZ` is 16 with the closing zero.
pub(super) const INTERFACE_NAME_BYTES: usize = 15;
/// Linux: `sun_path` is 108 with the closing zero.
pub(super) const SOCKET_PATH_BYTES: usize = 107;
/// SNAT ports are dealt in blocks of this many; a range holds one at least.
const PORT_BLOCK: u32 = 64;
/// More sessions than this don't fit the memory of a machine: 256 Mi of them take 40 GB.
pub(super) const MOST_SESSIONS: u64 = 1 << 28;
/// What every host takes (RFC 9293 section 3.7.1), and what fits into the largest frames.
pub(super) const SEGMENT_SIZES: std::ops::RangeInclusive<u16> = 536..=9000;
/// Longer than any use; keeps timer arithmetic far from its limits.
const LONGEST: Duration = Duration::from_hours(720);

/// How long a gateway may be silent before it is taken for dead.
const LEASES: std::ops::RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_mins(1);
/// Linux: `RT_TABLE_LOCAL`, the host's own addresses.
const LOCAL_TABLE: u32 = 255;

/// What to do where etcd speaks TLS.
const ETCD_REMEDY: &str = "name an http:// endpoint on this host, such as that of `etcd grpc-proxy start --endpoints=https://.. \
                           --cacert=.. --cert=.. --key=.. --listen-addr=127.0.0.1:2379`";

pub(super) type Report<'a> = dyn FnMut(&str, String) + 'a;

impl Verify for Config {
    fn verify(&self, report: &mut Report<'_>) {
        name("name", &self.name, report);
        for (field, value) in [("node", &self.node), ("zone", &self.zone)] {
            if let Some(value) = value {
                name(field, value, report);
            }
        }
        self.verify_interfaces(report);
        if let Some(cores) = &self.workers.cores {
            if cores.is_empty() {
                report("workers.cores", "names no core; leave it out for one worker per queue".into());
            }
            twice(cores, |i, first| {
                report(&format!("workers.cores[{i}]"), format!("core {} is workers.cores[{first}] already", cores[i]));
            });
        }
        if self.xdp.fill_ring.is_some_and(|packets| !FILL_RINGS.contains(&packets)) {
            let [least, .., most] = FILL_RINGS;
            report("xdp.fill_ring", format!("must be a power of two from {least} to {most} packets"));
        }
        match &self.policy {
            PolicySource::Files(files) => paths("policy.files", files, report),
            PolicySource::Server(server) => {
                server.verify(report);
                if self.allow_empty {
                    report("allow_empty", "is for policy.files; of a policy server it is said in policyd.yaml".into());
                }
            }
        }
        if !(1..=MOST_SESSIONS).contains(&self.sessions.capacity) {
            report("sessions.capacity", format!("must be from 1 to {MOST_SESSIONS}"));
        }
        if self.sessions.reserve() > self.sessions.capacity / 2 {
            report("sessions.reserve", "must be at most half of sessions.capacity".into());
        }
        self.sessions.timeouts.verify(report);
        if self.sessions.mss_clamp.is_some_and(|bytes| !SEGMENT_SIZES.contains(&bytes)) {
            report(
                "sessions.mss_clamp",
                format!("must be from {} to {} bytes", SEGMENT_SIZES.start(), SEGMENT_SIZES.end()),
            );
        }
        self.ports.verify(report);
        if self.services.embryonic_per_vip == Some(0) {
            report("services.embryonic_per_vip", "must be at least 1".into());
        }
        self.health.verify(self, report);
        ranges("pod_cidrs", &self.pod_cidrs, report);
        ranges("service_cidrs", &self.service_cidrs, report);
        if let Some(peer) = &self.peer {
            if peer.address.is_unspecified() || peer.address.is_multicast() || peer.address.is_loopback() {
                report("peer.address", format!("{} can't be reached from another gateway", peer.address));
            }
            if peer.port == 0 {
                report("peer.port", "must be from 1 to 65535".into());
            }
            if peer.authentication == PeerAuthentication::Required && matches!(self.policy, PolicySource::Files(_)) {
                let why = "`required` needs `policy.server`: gateways show each other their keys through it";
                report("peer.authentication", why.into());
            }
        }
        if let Some(overlay) = &self.overlay {
            if overlay.address.is_unspecified() || overlay.address.is_multicast() || overlay.address.is_loopback() {
                report("overlay.address", format!("{} can't be reached from a node", overlay.address));
            }
            if overlay.port == 0 {
                report("overlay.port", "must be from 1 to 65535".into());
            }
            if self.tunnel() == Some(overlay.end()) {
                report(
                    "overlay.port",
                    format!("{} is peer.port, too: nobody could tell their packets apart", overlay.port),
                );
            }
        }
        if matches!(self.bgp.table, 0 | LOCAL_TABLE) {
            report("bgp.table", format!("{} is no table that routes can be put in for others", self.bgp.table));
        }
        if self.bgp.metric == Some(0) {
            report("bgp.metric", "must be at least 1; leave it out for the kernel's".into());
        }
        if let Some(log) = &self.nat_log {
            let address = log.collector.ip();
            if address.is_unspecified() || address.is_multicast() {
                report("nat_log.collector", format!("{address} is nobody's address"));
            }
            if log.collector.port() == 0 {
                report("nat_log.collector", "needs a port: 4739 is that of IPFIX".into());
            }
        }
        let length = self.admin.socket.as_os_str().len();
        if !(1..=SOCKET_PATH_BYTES).contains(&length) {
            report("admin.socket", format!("must have 1 to {SOCKET_PATH_BYTES} bytes, has {length}"));
        }
    }
}

impl Config {
    fn verify_interfaces(&self, report: &mut Report<'_>) {
        for (i, interface) in self.interfaces.iter().enumerate() {
            let name = interface.name.as_str();
            let usable = !matches!(name, "" | "." | "..") && !name.contains(|c: char| c == '/' || c.is_whitespace());
            if !usable || name.len() > INTERFACE_NAME_BYTES {
                report(
                    &format!("interfaces[{i}].name"),
                    format!("`{name}` is no interface name: 1 to {INTERFACE_NAME_BYTES} bytes, no slash, no blank"),
                );
            }
        }
        let names: Vec<_> = self.interfaces.iter().map(|interface| interface.name.as_str()).collect();
        twice(&names, |i, first| {
            report(&format!("interfaces[{i}].name"), format!("`{}` is interfaces[{first}] already", names[i]));
        });
        let roles = || self.interfaces.iter().map(|interface| Role::from(interface.role));
        match (roles().any(Role::is_inside), roles().any(Role::is_outside)) {
            (true, true) => {}
            _ if self.interfaces.is_empty() => report("interfaces", "at least one is needed".into()),
            (false, _) => report("interfaces", "none is `inside` or `both`: no pod's packet could come in".into()),
            (_, false) => report("interfaces", "none is `outside` or `both`: no packet could leave".into()),
        }
    }
}

impl Verify for PolicyServer {
    fn verify(&self, report: &mut Report<'_>) {
        url("policy.server.url", &self.url, report);
        let tls = self.url.starts_with("https://");
        for (field, path) in [("ca", &self.ca), ("cert", &self.cert), ("key", &self.key)] {
            if path.is_some() && !tls {
                report(&format!("policy.server.{field}"), "needs an https:// url".into());
            }
        }
        match (&self.cert, &self.key) {
            (Some(_), None) => report("policy.server.cert", "needs `key` beside it".into()),
            (None, Some(_)) => report("policy.server.key", "needs `cert` beside it".into()),
            _ => {}
        }
    }
}

impl Verify for Timeouts {
    fn verify(&self, report: &mut Report<'_>) {
        for (field, timeout) in [
            ("tcp_established", self.tcp_established),
            ("tcp_transitory", self.tcp_transitory),
            ("udp", self.udp),
            ("icmp", self.icmp),
            ("fragment", self.fragment),
        ] {
            if timeout.is_zero() || timeout > LONGEST {
                report(&format!("sessions.timeouts.{field}"), "must be longer than 0s and at most 720h".into());
            }
        }
    }
}

impl Verify for Ports {
    fn verify(&self, report: &mut Report<'_>) {
        if self.range.count() < PORT_BLOCK {
            report(
                "ports.range",
                format!("{} holds {} ports, at least {PORT_BLOCK} are needed", self.range, self.range.count()),
            );
        }
        if self.quarantine > LONGEST {
            report("ports.quarantine", "must be at most 720h".into());
        }
    }
}

impl Verify for PolicydConfig {
    fn verify(&self, report: &mut Report<'_>) {
        match &self.source {
            PolicydSource::Files(files) => paths("source.files", files, report),
            PolicydSource::Etcd(etcd) => {
                if etcd.endpoints.is_empty() {
                    report("source.etcd.endpoints", "at least one is needed".into());
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
        ranges("pod_cidrs", &self.pod_cidrs, report);
        ranges("service_cidrs", &self.service_cidrs, report);
        for (i, admin) in self.admins.iter().enumerate() {
            name(&format!("admins[{i}]"), admin, report);
        }
        if !self.admins.is_empty() && self.tls.as_ref().is_none_or(|tls| tls.ca.is_none()) {
            report("admins", "needs `tls.ca`: without certificates of clients, nobody has a name".into());
        }
        if self.limits.connections < 16 {
            report("limits.connections", "must be 16 or more".into());
        }
        if self.limits.connections_per_address < 4 {
            report("limits.connections_per_address", "must be 4 or more: each gateway has two".into());
        }
        if !LEASES.contains(&self.leases.ttl) {
            report("leases.ttl", "must be from 100ms to 60s".into());
        }
    }
}

/// The cluster's own addresses.
fn ranges(field: &str, cidrs: &[Cidr], report: &mut Report<'_>) {
    twice(cidrs, |i, first| report(&format!("{field}[{i}]"), format!("{} is {field}[{first}] already", cidrs[i].0)));
    for (i, cidr) in cidrs.iter().enumerate().filter(|(_, cidr)| cidr.0.prefix_len() == 0) {
        report(&format!("{field}[{i}]"), format!("{} holds every address: nothing would be outside", cidr.0));
    }
}

fn name(field: &str, value: &str, report: &mut Report<'_>) {
    if value.is_empty() || value.contains(|c: char| c.is_whitespace() || c.is_control()) {
        report(field, "must not be empty and holds no blanks".into());
    }
}

fn url(field: &str, value: &str, report: &mut Report<'_>) {
    let rest = value.strip_prefix("http://").or_else(|| value.strip_prefix("https://"));
    let authority = rest.map(|rest| rest.split('/').next().unwrap_or(rest));
    if authority.is_none_or(|authority| authority.is_empty() || authority.contains(char::is_whitespace)) {
        report(field, format!("`{value}` is no address of a server: write http://host:port or https://host:port"));
    }
}

fn paths(field: &str, paths: &[PathBuf], report: &mut Report<'_>) {
    if paths.is_empty() {
        report(field, "at least one file or directory is needed".into());
    }
    for (i, path) in paths.iter().enumerate() {
        if path.as_os_str().is_empty() {
            report(&format!("{field}[{i}]"), "is empty".into());
        }
    }
}

/// Calls `found` with the place of each value that came before, and with the place where it came first.
pub(super) fn twice<T: Eq + Hash>(values: &[T], mut found: impl FnMut(usize, usize)) {
    let mut first = HashMap::new();
    for (i, value) in values.iter().enumerate() {
        match first.get(value) {
            Some(&at) => found(i, at),
            None => {
                first.insert(value, i);
            }
        }
    }
}
