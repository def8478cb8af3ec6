//! Resources to what they mean. Nothing that a server sends is believed: what can't be is refused with its field and a
//! reason, and behind here nothing checks a single resource again.

mod service;

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU32;
use std::str::FromStr;
use std::sync::Arc;

use ipnet::IpNet;
use prost::Message;
use thiserror::Error;
use vipgate_dataplane::snapshot::build::MOST_RANGES;
use vipgate_dataplane::snapshot::spec::{
    AddressSelection, Announce, BlockSet, EgressSpec, EndpointSpec, Limits, NodeSpec, OnExhaustion, ShareSpec, VipSpec,
};

use vipgate_dataplane::wire::ethernet;

use super::super::proto;
use super::{CLUSTER, Kind, SETTINGS, shown};
use crate::manifest::{Uncovered, unusable_address};
use crate::policy::{Cluster, DealtService, MOST_BACKUPS, Peer};

/// VIPs of one endpoint, prefixes of one policy, shares of one VIP: more is a mistake, or an attack.
const MOST_PARTS: usize = 4096;
/// The longest name of a resource, bytes: kind, namespace and name as Kubernetes allows them, and to spare.
const LONGEST_NAME: usize = 1024;
/// The longest text for people, bytes: a VIP that many Services share names them all.
const LONGEST_TEXT: usize = 64 << 10;

/// What a resource means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decoded {
    /// An egress policy.
    EgressPolicy(EgressSpec),
    /// A VIP.
    Vip(VipSpec),
    /// An endpoint.
    Endpoint(EndpointSpec),
    /// A Service.
    Service(DealtService),
    /// A gateway.
    Gateway(Peer),
    /// A node of the overlay network.
    OverlayNode(NodeSpec),
    /// The cluster's own addresses.
    Cluster(Cluster),
    /// The settings.
    Settings(proto::Settings),
}

/// Why a resource means nothing.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Fault {
    /// It is none of the messages that its type names.
    #[error("is no {kind}: {error}")]
    Message {
        /// The message's name.
        kind: &'static str,
        /// What is wrong.
        error: prost::DecodeError,
    },
    /// A field can't be what it is.
    #[error("{field}: {reason}")]
    Field {
        /// Which field.
        field: String,
        /// What is wrong with it.
        reason: String,
    },
}

fn fault(field: impl Into<String>, reason: impl Into<String>) -> Fault {
    Fault::Field { field: field.into(), reason: shown(&reason.into()) }
}

/// Reads a resource of a kind under its name.
///
/// # Errors
/// When it isn't one.
pub fn decode(kind: Kind, name: &str, body: &[u8]) -> Result<Decoded, Fault> {
    if name.len() > LONGEST_NAME {
        return Err(fault("name", format!("has {} bytes, at most {LONGEST_NAME} are read", name.len())));
    }
    match kind {
        Kind::EgressPolicy => egress_policy(name, &message(kind, body)?).map(Decoded::EgressPolicy),
        Kind::Vip => vip(name, &message(kind, body)?).map(Decoded::Vip),
        Kind::Endpoint => endpoint(name, &message(kind, body)?).map(Decoded::Endpoint),
        Kind::Service => service::service(name, &message(kind, body)?).map(Decoded::Service),
        Kind::Gateway => gateway(name, &message(kind, body)?).map(Decoded::Gateway),
        Kind::OverlayNode => overlay_node(name, &message(kind, body)?).map(Decoded::OverlayNode),
        Kind::Cluster => cluster(name, &message(kind, body)?).map(Decoded::Cluster),
        Kind::Settings => {
            same(SETTINGS, "name", name)?;
            let settings: proto::Settings = message(kind, body)?;
            text("version", &settings.version)?;
            Ok(Decoded::Settings(settings))
        }
    }
}

fn message<M: Message + Default>(kind: Kind, body: &[u8]) -> Result<M, Fault> {
    M::decode(body).map_err(|error| Fault::Message { kind: kind.name(), error })
}

/// A resource's name is that of what is in it.
fn same(own: &str, field: &str, name: &str) -> Result<(), Fault> {
    if own == name { Ok(()) } else { Err(fault(field, format!("is `{own}`, but the resource's name is `{name}`"))) }
}

/// The same for resources that have nothing but a name.
fn named(own: &str, name: &str) -> Result<(), Fault> {
    same(own, "name", name)?;
    if name.is_empty() { Err(fault("name", "is empty")) } else { Ok(()) }
}

fn few<T>(parts: &[T], field: &str) -> Result<(), Fault> {
    at_most(parts, field, MOST_PARTS)
}

fn at_most<T>(parts: &[T], field: &str, most: usize) -> Result<(), Fault> {
    if parts.len() <= most {
        return Ok(());
    }
    Err(fault(field, format!("has {} entries, at most {most} are read", parts.len())))
}

fn egress_policy(name: &str, message: &proto::EgressPolicy) -> Result<EgressSpec, Fault> {
    named(&message.name, name)?;
    few(&message.destinations, "destinations")?;
    few(&message.excluded, "excluded")?;
    let limits = Limits {
        sessions: limit(message.sessions),
        new_sessions_per_second: limit(message.new_sessions_per_second),
        guaranteed_ports: limit(message.guaranteed_ports),
    };
    Ok(EgressSpec {
        name: text("name", name)?,
        destinations: nets("destinations", &message.destinations)?,
        excluded: nets("excluded", &message.excluded)?,
        address_selection: match known("address_selection", message.address_selection)? {
            proto::AddressSelection::PerEndpoint => AddressSelection::PerEndpoint,
            proto::AddressSelection::PerConnection => AddressSelection::PerConnection,
        },
        limits,
        on_exhaustion: match known("on_exhaustion", message.on_exhaustion)? {
            proto::OnExhaustion::Reject => OnExhaustion::Reject,
            proto::OnExhaustion::Drop => OnExhaustion::Drop,
        },
    })
}

fn limit(number: u32) -> Option<u32> {
    NonZeroU32::new(number).map(NonZeroU32::get)
}

fn known<E: TryFrom<i32>>(field: &str, number: i32) -> Result<E, Fault> {
    E::try_from(number).map_err(|_| fault(field, format!("{number} is unknown to this version")))
}

fn nets(field: &str, texts: &[String]) -> Result<Vec<IpNet>, Fault> {
    let net = |(i, text): (usize, &String)| {
        let net =
            IpNet::from_str(text).map_err(|_| fault(format!("{field}[{i}]"), format!("`{text}` is no prefix")))?;
        if net.trunc() == net {
            return Ok(net);
        }
        Err(fault(format!("{field}[{i}]"), format!("{text} has bits set beyond its prefix length")))
    };
    texts.iter().enumerate().map(net).collect()
}

fn address(field: &str, text: &str) -> Result<IpAddr, Fault> {
    let parsed = IpAddr::from_str(text).map_err(|_| fault(field, format!("`{text}` is no address")))?;
    if parsed.to_string() != text {
        return Err(fault(field, format!("`{text}` is not in canonical form, which is `{parsed}`")));
    }
    match unusable_address(parsed) {
        Some(what) => Err(fault(field, format!("{parsed} is {what}"))),
        None => Ok(parsed),
    }
}

fn vip(name: &str, message: &proto::Vip) -> Result<VipSpec, Fault> {
    same(&message.address, "address", name)?;
    few(&message.shares, "shares")?;
    let mut reserved_ports: Vec<u16> = Vec::new();
    for (i, &number) in message.reserved_ports.iter().enumerate() {
        let field = || format!("reserved_ports[{i}]");
        let port = u16::try_from(number).ok().filter(|port| *port > 0);
        let port = port.ok_or_else(|| fault(field(), format!("{number} is no port")))?;
        if reserved_ports.last().is_some_and(|before| *before >= port) {
            return Err(fault(field(), format!("{port} is not above the one before it")));
        }
        reserved_ports.push(port);
    }
    Ok(VipSpec {
        address: address("address", &message.address)?,
        name: text("name", &message.name)?,
        announce: match known("announce", message.announce)? {
            proto::Announce::L2 => Announce::L2,
            proto::Announce::Bgp => Announce::Bgp,
        },
        reserved_ports,
        shares: shares(&message.shares)?,
    })
}

fn shares(messages: &[proto::Share]) -> Result<Vec<ShareSpec>, Fault> {
    let mut shares: Vec<ShareSpec> = Vec::with_capacity(messages.len());
    for (i, share) in messages.iter().enumerate() {
        let field = |name: &str| format!("shares[{i}].{name}");
        if share.gateway.is_empty() || shares.iter().any(|known| *known.gateway == *share.gateway) {
            return Err(fault(field("gateway"), format!("`{}` is empty or there already", share.gateway)));
        }
        let blocks = match share.blocks.len() {
            0 => None,
            length => Some(share.blocks.as_slice().try_into().map_err(|_| {
                fault(field("blocks"), format!("has {length} bytes, expected {} or none", BlockSet::BYTES))
            })?),
        };
        shares.push(ShareSpec {
            gateway: text(&field("gateway"), &share.gateway)?,
            blocks: blocks.map(|bytes| Arc::new(BlockSet::from_bytes(bytes))),
            backups: backups(share, &field("backups"))?,
        });
    }
    Ok(shares)
}

fn backups(share: &proto::Share, field: &str) -> Result<Vec<Arc<str>>, Fault> {
    at_most(&share.backups, field, MOST_BACKUPS)?;
    let mut backups: Vec<Arc<str>> = Vec::with_capacity(share.backups.len());
    for (i, name) in share.backups.iter().enumerate() {
        let field = format!("{field}[{i}]");
        if name.is_empty() || *name == share.gateway || backups.iter().any(|known| **known == **name) {
            return Err(fault(field, format!("`{name}` is empty, the share's own gateway, or there already")));
        }
        backups.push(text(&field, name)?);
    }
    Ok(backups)
}

fn endpoint(name: &str, message: &proto::Endpoint) -> Result<EndpointSpec, Fault> {
    same(&message.address, "address", name)?;
    few(&message.vips, "vips")?;
    let own = address("address", &message.address)?;
    let mut vips = Vec::with_capacity(message.vips.len());
    for (i, vip) in message.vips.iter().enumerate() {
        let field = format!("vips[{i}]");
        let vip = address(&field, vip)?;
        if vip.is_ipv4() != own.is_ipv4() {
            return Err(fault(field, format!("{vip} is of another address family than {own}")));
        }
        if vips.contains(&vip) {
            return Err(fault(field, format!("{vip} is in the list already")));
        }
        vips.push(vip);
    }
    let policy = text("policy", &message.policy)?;
    let gateway = (!message.gateway.is_empty()).then(|| text("gateway", &message.gateway)).transpose()?;
    few(&message.remarks, "remarks")?;
    let remarks = message.remarks.iter().enumerate().map(|(i, remark)| text(&format!("remarks[{i}]"), remark));
    let remarks = remarks.collect::<Result<_, _>>()?;
    Ok(EndpointSpec { address: own, name: text("name", &message.name)?, policy, vips, gateway, remarks })
}

fn gateway(name: &str, message: &proto::Gateway) -> Result<Peer, Fault> {
    named(&message.name, name)?;
    let peer_address = match message.peer_address.as_str() {
        "" => None,
        text => Some(address("peer_address", text)?),
    };
    Ok(Peer {
        name: text("name", name)?,
        node: text("node", &message.node)?,
        zone: text("zone", &message.zone)?,
        address: peer_address,
        pods: ranges("pod_cidrs", &message.pod_cidrs)?.into_iter().collect(),
        uncovered: uncovered(message.uncovered)?,
    })
}

fn cluster(name: &str, message: &proto::Cluster) -> Result<Cluster, Fault> {
    same(CLUSTER, "name", name)?;
    Ok(Cluster {
        pods: ranges("pod_cidrs", &message.pod_cidrs)?,
        services: ranges("service_cidrs", &message.service_cidrs)?,
        nodes: ranges("node_cidrs", &message.node_cidrs)?,
        uncovered: uncovered(message.uncovered)?,
    })
}

/// Prefixes of the cluster's own addresses.
fn ranges(field: &str, texts: &[String]) -> Result<BTreeSet<IpNet>, Fault> {
    at_most(texts, field, MOST_RANGES)?;
    let mut ranges = BTreeSet::new();
    for (i, net) in nets(field, texts)?.into_iter().enumerate() {
        let field = || format!("{field}[{i}]");
        if net.prefix_len() == 0 {
            return Err(fault(field(), format!("{net} holds every address: nothing would be outside")));
        }
        if !ranges.insert(net) {
            return Err(fault(field(), format!("{net} is in the list already")));
        }
    }
    Ok(ranges)
}

fn uncovered(number: i32) -> Result<Option<Uncovered>, Fault> {
    Ok(match known("uncovered", number)? {
        proto::Uncovered::Unset => None,
        proto::Uncovered::Drop => Some(Uncovered::Drop),
        proto::Uncovered::Pass => Some(Uncovered::Pass),
    })
}

fn overlay_node(name: &str, message: &proto::OverlayNode) -> Result<NodeSpec, Fault> {
    named(&message.name, name)?;
    few(&message.prefixes, "prefixes")?;
    let port = u16::try_from(message.port).ok().filter(|port| *port > 0);
    let port = port.ok_or_else(|| fault("port", format!("{} is no port", message.port)))?;
    if message.vni >= 1 << 24 {
        return Err(fault("vni", format!("{} is more than 24 bits", message.vni)));
    }
    let mac = <[u8; 6]>::try_from(&*message.mac).ok().filter(|mac| !ethernet::is_group(*mac));
    Ok(NodeSpec {
        name: text("name", name)?,
        address: SocketAddr::new(address("address", &message.address)?, port),
        vni: message.vni,
        mac: mac.ok_or_else(|| fault("mac", "is no link address of one interface"))?,
        prefixes: nets("prefixes", &message.prefixes)?,
    })
}

/// Names are printed, and stand in labels of metrics.
fn text(field: &str, text: &str) -> Result<Arc<str>, Fault> {
    if text.len() > LONGEST_TEXT || text.contains(char::is_control) {
        return Err(fault(field, format!("is longer than {LONGEST_TEXT} bytes, or not printable")));
    }
    Ok(text.into())
}
