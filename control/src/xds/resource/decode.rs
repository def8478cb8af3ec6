//! Decodes resources. Servers are not trusted: what isn't the type of a field is rejected with the field and the reason.
//! What the engine checks of a policy (`dataplane/src/policy/validation.rs`) isn't checked here.

mod placement;
mod service;

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU32;
use std::str::FromStr;
use std::sync::Arc;

use ipnet::IpNet;
use prost::Message;
use thiserror::Error;
use vipgate_dataplane::policy::limits::{
    MAX_ADDRESSES_OF_POLICY, MAX_CLUSTER_PREFIXES, MAX_NAME_BYTES, MAX_PREFIXES_OF_POLICY, MAX_TEXT_BYTES,
};
use vipgate_dataplane::policy::spec::{
    AddressSelection, Announce, EgressSpec, EndpointSpec, Limits, NodeSpec, OnExhaustion, ShardMapSpec, VipSpec,
};
use vipgate_policy::compiler::{Cluster, Peer};
use vipgate_policy::manifest::{UncoveredAction, unusable_address};

use super::super::proto;
use super::slices::{BackendSlice, ServiceResource};
use super::{CLUSTER, Kind, SETTINGS, printable};

/// Maximum number of entries of lists that the limits of a policy don't name: shards of a VIP, remarks of an endpoint,
/// prefixes of a node, backends of a slice, hints of a backend.
const MAX_ENTRIES: usize = 4096;

/// A decoded resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decoded {
    EgressPolicy(Arc<EgressSpec>),
    ShardMap(Arc<ShardMapSpec>),
    Vip(Arc<VipSpec>),
    Endpoint(Arc<EndpointSpec>),
    /// A part of a Service's backends.
    BackendSlice(BackendSlice),
    Service(ServiceResource),
    Gateway(Peer),
    /// A node of the overlay network.
    OverlayNode(Arc<NodeSpec>),
    /// The cluster's own prefixes.
    Cluster(Cluster),
    Settings(proto::Settings),
}

/// Why a resource is invalid.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ResourceError {
    /// The body is not a protobuf message of its type.
    #[error("is not a valid {kind}: {error}")]
    Message {
        /// The message's name.
        kind: &'static str,
        /// The protobuf error.
        #[source]
        error: prost::DecodeError,
    },
    /// A field has an invalid value.
    #[error("{field}: {reason}")]
    Field {
        /// Path of the field.
        field: String,
        reason: String,
    },
}

/// A field that has an invalid value.
pub(crate) fn field_error(field: impl Into<String>, reason: impl Into<String>) -> ResourceError {
    ResourceError::Field { field: field.into(), reason: printable(&reason.into()) }
}

/// Decodes the body of a resource with this kind and name.
///
/// # Errors
/// If it is invalid.
pub fn decode(kind: Kind, name: &str, body: &[u8]) -> Result<Decoded, ResourceError> {
    if name.len() > MAX_NAME_BYTES {
        return Err(field_error("name", format!("has {} bytes, the maximum is {MAX_NAME_BYTES}", name.len())));
    }
    match kind {
        Kind::EgressPolicy => egress_policy(name, &message(kind, body)?).map(|it| Decoded::EgressPolicy(it.into())),
        Kind::ShardMap => placement::shard_map(name, &message(kind, body)?).map(|it| Decoded::ShardMap(it.into())),
        Kind::Vip => vip(name, &message(kind, body)?).map(|it| Decoded::Vip(it.into())),
        Kind::Endpoint => endpoint(name, &message(kind, body)?).map(|it| Decoded::Endpoint(it.into())),
        Kind::BackendSlice => service::slice(name, &message(kind, body)?).map(Decoded::BackendSlice),
        Kind::Service => service::service(name, &message(kind, body)?).map(Decoded::Service),
        Kind::Gateway => gateway(name, &message(kind, body)?).map(Decoded::Gateway),
        Kind::OverlayNode => overlay_node(name, &message(kind, body)?).map(|it| Decoded::OverlayNode(it.into())),
        Kind::Cluster => cluster(name, &message(kind, body)?).map(Decoded::Cluster),
        Kind::Settings => {
            check_key(SETTINGS, "name", name)?;
            let settings: proto::Settings = message(kind, body)?;
            parse_text("version", &settings.version)?;
            Ok(Decoded::Settings(settings))
        }
        Kind::NodePolicy | Kind::View => Err(field_error("name", "is that of a resource for agents of nodes")),
    }
}

fn message<M: Message + Default>(kind: Kind, body: &[u8]) -> Result<M, ResourceError> {
    M::decode(body).map_err(|error| ResourceError::Message { kind: kind.name(), error })
}

/// Checks that the key field of a message equals the resource's name.
fn check_key(value: &str, field: &str, name: &str) -> Result<(), ResourceError> {
    if value == name {
        Ok(())
    } else {
        Err(field_error(field, format!("is `{value}`, but the resource's name is `{name}`")))
    }
}

/// Checks the key field `name`: equal to the resource's name, and not empty.
fn check_name(value: &str, name: &str) -> Result<(), ResourceError> {
    check_key(value, "name", name)?;
    if name.is_empty() { Err(field_error("name", "is empty")) } else { Ok(()) }
}

fn check_len<T>(entries: &[T], field: &str, max: usize) -> Result<(), ResourceError> {
    if entries.len() <= max {
        return Ok(());
    }
    Err(field_error(field, format!("has {} entries, the maximum is {max}", entries.len())))
}

fn egress_policy(name: &str, message: &proto::EgressPolicy) -> Result<EgressSpec, ResourceError> {
    check_name(&message.name, name)?;
    check_len(&message.destinations, "destinations", MAX_PREFIXES_OF_POLICY)?;
    check_len(&message.excluded, "excluded", MAX_PREFIXES_OF_POLICY)?;
    let limits = Limits {
        sessions: parse_limit(message.sessions),
        new_sessions_per_second: parse_limit(message.new_sessions_per_second),
        guaranteed_ports: parse_limit(message.guaranteed_ports),
    };
    Ok(EgressSpec {
        name: parse_text("name", name)?,
        destinations: parse_prefixes("destinations", &message.destinations)?,
        excluded: parse_prefixes("excluded", &message.excluded)?,
        address_selection: match parse_enum("address_selection", message.address_selection)? {
            proto::AddressSelection::PerEndpoint => AddressSelection::PerEndpoint,
            proto::AddressSelection::PerConnection => AddressSelection::PerConnection,
        },
        limits,
        on_exhaustion: match parse_enum("on_exhaustion", message.on_exhaustion)? {
            proto::OnExhaustion::Reject => OnExhaustion::Reject,
            proto::OnExhaustion::Drop => OnExhaustion::Drop,
        },
    })
}

/// 0: no limit.
fn parse_limit(number: u32) -> Option<u32> {
    NonZeroU32::new(number).map(NonZeroU32::get)
}

/// Decodes a protobuf enum.
fn parse_enum<E: TryFrom<i32>>(field: &str, number: i32) -> Result<E, ResourceError> {
    E::try_from(number).map_err(|_| field_error(field, format!("{number} is unknown to this version")))
}

fn parse_prefixes(field: &str, texts: &[String]) -> Result<Vec<IpNet>, ResourceError> {
    let net = |(i, text): (usize, &String)| {
        let net = IpNet::from_str(text)
            .map_err(|_| field_error(format!("{field}[{i}]"), format!("`{text}` is not a prefix")))?;
        if net.trunc() == net {
            return Ok(net);
        }
        Err(field_error(format!("{field}[{i}]"), format!("{text} has bits set beyond its prefix length")))
    };
    texts.iter().enumerate().map(net).collect()
}

fn parse_address(field: &str, text: &str) -> Result<IpAddr, ResourceError> {
    let parsed = IpAddr::from_str(text).map_err(|_| field_error(field, format!("`{text}` is not an address")))?;
    if parsed.to_string() != text {
        return Err(field_error(field, format!("`{text}` is not in canonical form, which is `{parsed}`")));
    }
    match unusable_address(parsed) {
        Some(reason) => Err(field_error(field, format!("{parsed} is {reason}"))),
        None => Ok(parsed),
    }
}

fn vip(name: &str, message: &proto::Vip) -> Result<VipSpec, ResourceError> {
    check_key(&message.address, "address", name)?;
    check_len(&message.shares, "shares", MAX_ENTRIES)?;
    let mut reserved_ports: Vec<u16> = Vec::new();
    for (i, &number) in message.reserved_ports.iter().enumerate() {
        let field = || format!("reserved_ports[{i}]");
        let port = u16::try_from(number).ok().filter(|port| *port > 0);
        let port = port.ok_or_else(|| field_error(field(), format!("{number} is not a port")))?;
        if reserved_ports.last().is_some_and(|previous| *previous >= port) {
            return Err(field_error(field(), format!("{port} is not in ascending order")));
        }
        reserved_ports.push(port);
    }
    Ok(VipSpec {
        address: parse_address("address", &message.address)?,
        name: parse_text("name", &message.name)?,
        announce: match parse_enum("announce", message.announce)? {
            proto::Announce::L2 => Announce::L2,
            proto::Announce::Bgp => Announce::Bgp,
        },
        reserved_ports,
        shards: placement::shards(&message.shares)?,
        shard_map: placement::shard_map_ref(message)?,
        private: placement::private_addresses(message)?,
    })
}

fn endpoint(name: &str, message: &proto::Endpoint) -> Result<EndpointSpec, ResourceError> {
    check_key(&message.address, "address", name)?;
    check_len(&message.vips, "vips", MAX_ADDRESSES_OF_POLICY)?;
    let own = parse_address("address", &message.address)?;
    let mut vips = Vec::with_capacity(message.vips.len());
    for (i, vip) in message.vips.iter().enumerate() {
        let field = format!("vips[{i}]");
        let vip = parse_address(&field, vip)?;
        if vip.is_ipv4() != own.is_ipv4() {
            return Err(field_error(field, format!("{vip} is of another address family than {own}")));
        }
        if vips.contains(&vip) {
            return Err(field_error(field, format!("{vip} is a duplicate")));
        }
        vips.push(vip);
    }
    let policy = parse_text("policy", &message.policy)?;
    let gateway = (!message.gateway.is_empty()).then(|| parse_text("gateway", &message.gateway)).transpose()?;
    check_len(&message.remarks, "remarks", MAX_ENTRIES)?;
    let remarks = message.remarks.iter().enumerate().map(|(i, remark)| parse_text(&format!("remarks[{i}]"), remark));
    let remarks = remarks.collect::<Result<_, _>>()?;
    let slot = placement::slot(message)?;
    Ok(EndpointSpec { address: own, name: parse_text("name", &message.name)?, policy, vips, gateway, slot, remarks })
}

fn gateway(name: &str, message: &proto::Gateway) -> Result<Peer, ResourceError> {
    check_name(&message.name, name)?;
    let peer_address = match message.peer_address.as_str() {
        "" => None,
        text => Some(parse_address("peer_address", text)?),
    };
    Ok(Peer {
        name: parse_text("name", name)?,
        node: parse_text("node", &message.node)?,
        zone: parse_text("zone", &message.zone)?,
        address: peer_address,
        pods: ranges("pod_cidrs", &message.pod_cidrs)?.into_iter().collect(),
        uncovered: uncovered(message.uncovered)?,
    })
}

fn cluster(name: &str, message: &proto::Cluster) -> Result<Cluster, ResourceError> {
    check_key(CLUSTER, "name", name)?;
    Ok(Cluster {
        pods: ranges("pod_cidrs", &message.pod_cidrs)?,
        services: ranges("service_cidrs", &message.service_cidrs)?,
        nodes: ranges("node_cidrs", &message.node_cidrs)?,
        uncovered: uncovered(message.uncovered)?,
        // For agents.
        node_addresses: BTreeSet::new(),
    })
}

/// The cluster's own prefixes.
fn ranges(field: &str, texts: &[String]) -> Result<BTreeSet<IpNet>, ResourceError> {
    check_len(texts, field, MAX_CLUSTER_PREFIXES)?;
    let mut ranges = BTreeSet::new();
    for (i, net) in parse_prefixes(field, texts)?.into_iter().enumerate() {
        let field = || format!("{field}[{i}]");
        if net.prefix_len() == 0 {
            return Err(field_error(field(), format!("{net} covers every address: nothing would be outside")));
        }
        if !ranges.insert(net) {
            return Err(field_error(field(), format!("{net} is a duplicate")));
        }
    }
    Ok(ranges)
}

fn uncovered(number: i32) -> Result<Option<UncoveredAction>, ResourceError> {
    Ok(match parse_enum("uncovered", number)? {
        proto::Uncovered::Unset => None,
        proto::Uncovered::Drop => Some(UncoveredAction::Drop),
        proto::Uncovered::Pass => Some(UncoveredAction::Pass),
    })
}

fn overlay_node(name: &str, message: &proto::OverlayNode) -> Result<NodeSpec, ResourceError> {
    check_name(&message.name, name)?;
    check_len(&message.prefixes, "prefixes", MAX_ENTRIES)?;
    let port = u16::try_from(message.port).ok().filter(|port| *port > 0);
    let port = port.ok_or_else(|| field_error("port", format!("{} is not a port", message.port)))?;
    let mac = <[u8; 6]>::try_from(&*message.mac);
    Ok(NodeSpec {
        name: parse_text("name", name)?,
        address: SocketAddr::new(parse_address("address", &message.address)?, port),
        vni: message.vni,
        mac: mac.map_err(|_| field_error("mac", "is not a MAC address"))?,
        verify_mac: message.verify_mac,
        sends_covered_only: message.sends_covered_only,
        prefixes: parse_prefixes("prefixes", &message.prefixes)?,
    })
}

/// A text for output and metric labels: limited length, no control characters.
fn parse_text(field: &str, text: &str) -> Result<Arc<str>, ResourceError> {
    if text.len() > MAX_TEXT_BYTES || text.contains(char::is_control) {
        return Err(field_error(field, format!("is longer than {MAX_TEXT_BYTES} bytes, or not printable")));
    }
    Ok(text.into())
}
