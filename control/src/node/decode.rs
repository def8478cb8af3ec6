//! Decodes and validates what the policy server sends to a node. Servers are not trusted: an invalid resource is rejected
//! with the field and the reason.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;

use ipnet::IpNet;
use vipgate_dataplane::wire::ethernet;
use vipgate_node::agent::{View, ViewMember};
use vipgate_node::policy::{Cluster, Coverage, EgressPolicy, NodePolicy, Pod, TunnelEndpoint};

use crate::membership::MembershipView;
use crate::xds::membership_message::InvalidMessage;
use crate::xds::proto;
use crate::xds::resource::{ResourceError, field_error};

/// Maximum length of names, bytes.
const MAX_NAME_BYTES: usize = 1024;
/// VXLAN network identifiers have 24 bits.
const MAX_VNI: u32 = (1 << 24) - 1;

/// Decodes the policy of the node with this name.
pub(crate) fn node_policy(name: &str, message: &proto::NodePolicy) -> Result<NodePolicy, ResourceError> {
    if message.node != name {
        return Err(field_error("node", format!("is `{}`, not `{name}`", message.node)));
    }
    let gateways = names("gateways", &message.gateways)?;
    let orders = message.orders.iter().enumerate().map(|(i, order)| {
        let gateway = |at: &u32| gateways.get(*at as usize).cloned();
        let order: Option<Vec<Arc<str>>> = order.gateways.iter().map(gateway).collect();
        order.map(Arc::from).ok_or_else(|| field_error(format!("orders[{i}]"), "there is no such gateway"))
    });
    let orders: Vec<Arc<[Arc<str>]>> = orders.collect::<Result<_, _>>()?;
    let policies = message.policies.iter().enumerate().map(|(i, policy)| egress_policy(i, policy));
    let policies: Vec<EgressPolicy> = policies.collect::<Result<_, _>>()?;
    let mut pods = BTreeMap::new();
    for (i, pod) in message.pods.iter().enumerate() {
        let field = |name: &str| format!("pods[{i}].{name}");
        let address: IpAddr = parse(&field("address"), &pod.address)?;
        let coverage = match (pod.policy as usize).checked_sub(1) {
            None => None,
            Some(policy) if policy >= policies.len() => {
                return Err(field_error(field("policy"), format!("{}: there is no such policy", pod.policy)));
            }
            Some(policy) => {
                let order = (pod.order as usize).checked_sub(1);
                if order.is_some_and(|order| order >= orders.len()) {
                    return Err(field_error(field("order"), format!("{}: there is no such order", pod.order)));
                }
                Some(Coverage { policy, order, has_vip: pod.has_vip })
            }
        };
        let name = check_name(&field("name"), &pod.name)?;
        if pods.insert(address, Pod { name, coverage }).is_some() {
            return Err(field_error(field("address"), format!("{address} is a duplicate")));
        }
    }
    let (tunnel, node) = (tunnel(message)?, check_name("node", name)?);
    Ok(NodePolicy { node, tunnel, pod_prefixes: prefixes("pod_cidrs", &message.pod_cidrs)?, policies, orders, pods })
}

fn tunnel(message: &proto::NodePolicy) -> Result<TunnelEndpoint, ResourceError> {
    let address: IpAddr = parse("address", &message.address)?;
    if address.is_unspecified() || address.is_multicast() || address.is_loopback() {
        return Err(field_error("address", format!("{address} is no address of a node")));
    }
    let port = u16::try_from(message.port).ok().filter(|port| *port > 0);
    let port = port.ok_or_else(|| field_error("port", format!("{} is no UDP port", message.port)))?;
    if message.vni > MAX_VNI {
        return Err(field_error("vni", format!("{} has more than 24 bits", message.vni)));
    }
    let mac: [u8; 6] = message.mac.as_slice().try_into().map_err(|_| field_error("mac", "has not 6 bytes"))?;
    if ethernet::is_group(mac) || mac == [0; 6] {
        return Err(field_error("mac", "is no unicast MAC address"));
    }
    Ok(TunnelEndpoint { address: SocketAddr::new(address, port), vni: message.vni, mac })
}

fn egress_policy(i: usize, message: &proto::EgressPolicy) -> Result<EgressPolicy, ResourceError> {
    let field = |name: &str| format!("policies[{i}].{name}");
    Ok(EgressPolicy {
        name: check_name(&field("name"), &message.name)?,
        destinations: prefixes(&field("destinations"), &message.destinations)?,
        excluded: prefixes(&field("excluded"), &message.excluded)?,
    })
}

/// Decodes what is inside the cluster.
pub(crate) fn cluster(message: &proto::Cluster) -> Result<Cluster, ResourceError> {
    let mut all = BTreeSet::new();
    for (field, texts) in [
        ("pod_cidrs", &message.pod_cidrs),
        ("service_cidrs", &message.service_cidrs),
        ("node_cidrs", &message.node_cidrs),
    ] {
        all.extend(prefixes(field, texts)?);
    }
    let nodes = message.node_addresses.iter().enumerate();
    let nodes = nodes.map(|(i, text)| parse(&format!("node_addresses[{i}]"), text)).collect::<Result<_, _>>()?;
    Ok(Cluster { prefixes: all.into_iter().collect(), nodes })
}

/// Decodes a membership view.
pub(crate) fn view(message: proto::View) -> Result<View, InvalidMessage> {
    let view: MembershipView = message.try_into()?;
    let member = |member: &crate::membership::Member| ViewMember {
        name: member.name.clone(),
        is_active: member.serving,
        endpoint: member.overlay,
    };
    Ok(View { number: view.number, members: view.members.iter().map(member).collect() })
}

fn prefixes(field: &str, texts: &[String]) -> Result<Vec<IpNet>, ResourceError> {
    texts.iter().enumerate().map(|(i, text)| parse(&format!("{field}[{i}]"), text)).collect()
}

fn names(field: &str, texts: &[String]) -> Result<Vec<Arc<str>>, ResourceError> {
    texts.iter().enumerate().map(|(i, text)| check_name(&format!("{field}[{i}]"), text)).collect()
}

fn check_name(field: &str, text: &str) -> Result<Arc<str>, ResourceError> {
    let has_control = text.contains(char::is_control);
    if has_control || text.len() > MAX_NAME_BYTES {
        return Err(field_error(field, format!("has control characters or more than {MAX_NAME_BYTES} bytes")));
    }
    Ok(text.into())
}

fn parse<T: FromStr<Err: std::fmt::Display>>(field: &str, text: &str) -> Result<T, ResourceError> {
    text.parse().map_err(|error| field_error(field, format!("`{text}`: {error}")))
}
