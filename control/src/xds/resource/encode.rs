//! Encodes a placement as resources, and the membership view as one.

mod node_policy;
mod service;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use prost::Message;
use vipgate_dataplane::policy::spec::{
    AddressSelection, Announce, EgressSpec, EndpointSpec, NodeSpec, OnExhaustion, PrivateAddressSpec, ShardMapSpec,
    ShardSpec, VipSpec,
};
use vipgate_policy::compiler::{Cluster, Peer, Placement};
use vipgate_policy::fingerprint::{Fingerprint, mix};
use vipgate_policy::manifest::UncoveredAction;

pub use self::node_policy::{References, node_policy};
pub use self::service::{backend_slice, service, service_resource, slices};
use super::super::proto;
use super::{CLUSTER, Content, Key, Kind, SETTINGS, VIEW};
use crate::membership::MembershipView;

/// All resources of a placement except Settings, sorted by key.
pub fn encode_all(placement: &Placement) -> Vec<(Key, Content)> {
    let mut all = Vec::new();
    all.extend(placement.policies.iter().map(egress_policy));
    all.extend(placement.shard_maps.iter().map(shard_map));
    all.extend(placement.vips.iter().map(vip));
    all.extend(placement.endpoints.iter().map(endpoint));
    all.extend(placement.services.iter().flat_map(slices));
    all.extend(placement.services.iter().map(service));
    all.extend(placement.peers.iter().map(gateway));
    all.extend(placement.nodes.iter().map(overlay_node));
    all.extend(placement.cluster.iter().map(cluster));
    all.sort_unstable_by(|a: &(Key, Content), b| a.0.cmp(&b.0));
    all
}

/// The Settings that complete an update, and the policy's version. `counts`: resources of the other kinds; `sum`: the
/// wrapping sum of their versions.
pub fn settings(counts: [usize; Kind::COUNTED], sum: u64) -> (Key, Content, String) {
    let version = Content::version_text(mix(sum));
    let (key, content) = settings_of(counts, &version);
    (key, content, version)
}

/// The same with a version of the policy that is given.
pub fn settings_of(counts: [usize; Kind::COUNTED], version: &str) -> (Key, Content) {
    let message = proto::Settings {
        version: version.to_owned(),
        egress_policies: counts[0] as u64,
        shard_maps: counts[1] as u64,
        vips: counts[2] as u64,
        endpoints: counts[3] as u64,
        backend_slices: counts[4] as u64,
        services: counts[5] as u64,
        gateways: counts[6] as u64,
        overlay_nodes: counts[7] as u64,
        clusters: counts[8] as u64,
    };
    resource(Kind::Settings, SETTINGS.into(), &message)
}

/// Numbers of resources of the kinds that Settings count.
pub fn counts(resources: &[(Key, Content)]) -> [usize; Kind::COUNTED] {
    let mut counts = [0; Kind::ALL.len()];
    for (key, _) in resources {
        counts[key.kind as usize] += 1;
    }
    std::array::from_fn(|i| counts[i])
}

/// The version of a placement: the same on every server, and on a gateway that compiles its own policy.
pub fn version_of(placement: &Placement) -> String {
    let all = encode_all(placement);
    let sum = all.iter().fold(0_u64, |sum, (_, content)| sum.wrapping_add(content.version));
    settings(counts(&all), sum).2
}

fn resource(kind: Kind, name: Arc<str>, message: &impl Message) -> (Key, Content) {
    let body = message.encode_to_vec();
    let mut fingerprint = Fingerprint::default();
    fingerprint.add(&[kind.number()]);
    fingerprint.add(&body);
    (Key { kind, name }, Content { version: fingerprint.finish(), body: body.into() })
}

/// Encodes an egress policy.
pub fn egress_policy(spec: &EgressSpec) -> (Key, Content) {
    resource(Kind::EgressPolicy, spec.name.clone(), &egress_policy_message(spec))
}

fn egress_policy_message(spec: &EgressSpec) -> proto::EgressPolicy {
    proto::EgressPolicy {
        name: spec.name.to_string(),
        destinations: spec.destinations.iter().map(ToString::to_string).collect(),
        excluded: spec.excluded.iter().map(ToString::to_string).collect(),
        address_selection: match spec.address_selection {
            AddressSelection::PerEndpoint => proto::AddressSelection::PerEndpoint,
            AddressSelection::PerConnection => proto::AddressSelection::PerConnection,
        }
        .into(),
        sessions: spec.limits.sessions.unwrap_or(0),
        new_sessions_per_second: spec.limits.new_sessions_per_second.unwrap_or(0),
        guaranteed_ports: spec.limits.guaranteed_ports.unwrap_or(0),
        on_exhaustion: match spec.on_exhaustion {
            OnExhaustion::Reject => proto::OnExhaustion::Reject,
            OnExhaustion::Drop => proto::OnExhaustion::Drop,
        }
        .into(),
    }
}

/// Encodes a VIP.
pub fn vip(vip: &VipSpec) -> (Key, Content) {
    let address = vip.address.to_string();
    let shard = |shard: &ShardSpec| proto::Share {
        gateway: shard.gateway.to_string(),
        blocks: shard.blocks.as_ref().map(|blocks| blocks.to_bytes().to_vec()).unwrap_or_default(),
        backups: shard.backups.iter().map(ToString::to_string).collect(),
    };
    let private = |private: &PrivateAddressSpec| proto::PrivateAddress {
        gateway: private.gateway.to_string(),
        address: private.address.to_string(),
    };
    let message = proto::Vip {
        address: address.clone(),
        name: vip.name.to_string(),
        announce: match vip.announce {
            Announce::L2 => proto::Announce::L2,
            Announce::Bgp => proto::Announce::Bgp,
        }
        .into(),
        reserved_ports: vip.reserved_ports.iter().map(|port| u32::from(*port)).collect(),
        shares: vip.shards.iter().map(shard).collect(),
        shard_map: vip.shard_map.as_ref().map(|it| it.map.to_string()).unwrap_or_default(),
        rotation: vip.shard_map.as_ref().map_or(0, |it| it.rotation.into()),
        private_addresses: vip.private.iter().map(private).collect(),
    };
    resource(Kind::Vip, address.into(), &message)
}

/// Encodes a shard map.
pub fn shard_map(map: &ShardMapSpec) -> (Key, Content) {
    let gateways: BTreeSet<&Arc<str>> = map.orders.iter().flatten().collect();
    let index: BTreeMap<&Arc<str>, u32> = gateways.iter().copied().zip(0..).collect();
    let order =
        |names: &Vec<Arc<str>>| proto::GatewayOrder { gateways: names.iter().map(|name| index[name]).collect() };
    let message = proto::ShardMap {
        name: map.name.to_string(),
        gateways: gateways.iter().map(ToString::to_string).collect(),
        orders: map.orders.iter().map(order).collect(),
        slots: map.slots.iter().map(|slot| u32::from(*slot)).collect(),
    };
    resource(Kind::ShardMap, map.name.clone(), &message)
}

/// Encodes an endpoint.
pub fn endpoint(endpoint: &EndpointSpec) -> (Key, Content) {
    let address = endpoint.address.to_string();
    let message = proto::Endpoint {
        address: address.clone(),
        name: endpoint.name.to_string(),
        policy: endpoint.policy.to_string(),
        vips: endpoint.vips.iter().map(IpAddr::to_string).collect(),
        gateway: endpoint.gateway.as_deref().unwrap_or_default().to_owned(),
        slot: endpoint.slot.as_ref().map_or(0, |it| u32::from(it.slot) + 1),
        shard_map: endpoint.slot.as_ref().and_then(|it| it.map.as_deref()).unwrap_or_default().to_owned(),
        remarks: endpoint.remarks.iter().map(ToString::to_string).collect(),
    };
    resource(Kind::Endpoint, address.into(), &message)
}

/// Encodes a gateway.
pub fn gateway(peer: &Peer) -> (Key, Content) {
    let message = proto::Gateway {
        name: peer.name.to_string(),
        node: peer.node.to_string(),
        zone: peer.zone.to_string(),
        peer_address: peer.address.map(|address| address.to_string()).unwrap_or_default(),
        pod_cidrs: peer.pods.iter().map(ToString::to_string).collect(),
        uncovered: uncovered(peer.uncovered),
    };
    resource(Kind::Gateway, peer.name.clone(), &message)
}

/// Encodes the cluster's own prefixes.
pub fn cluster(cluster: &Cluster) -> (Key, Content) {
    let texts = |nets: &BTreeSet<IpNet>| nets.iter().map(ToString::to_string).collect();
    let message = proto::Cluster {
        pod_cidrs: texts(&cluster.pods),
        service_cidrs: texts(&cluster.services),
        node_cidrs: texts(&cluster.nodes),
        uncovered: uncovered(cluster.uncovered),
        node_addresses: cluster.node_addresses.iter().map(IpAddr::to_string).collect(),
    };
    resource(Kind::Cluster, CLUSTER.into(), &message)
}

fn uncovered(uncovered: Option<UncoveredAction>) -> i32 {
    match uncovered {
        None => proto::Uncovered::Unset,
        Some(UncoveredAction::Drop) => proto::Uncovered::Drop,
        Some(UncoveredAction::Pass) => proto::Uncovered::Pass,
    }
    .into()
}

/// Encodes a node of the overlay network.
pub fn overlay_node(node: &NodeSpec) -> (Key, Content) {
    let message = proto::OverlayNode {
        name: node.name.to_string(),
        address: node.address.ip().to_string(),
        port: node.address.port().into(),
        vni: node.vni,
        mac: node.mac.to_vec(),
        prefixes: node.prefixes.iter().map(ToString::to_string).collect(),
        verify_mac: node.verify_mac,
        sends_covered_only: node.sends_covered_only,
    };
    resource(Kind::OverlayNode, node.name.clone(), &message)
}

/// Encodes the membership view. Its version is its number.
pub fn view(view: &MembershipView) -> (Key, Content) {
    let content = Content { version: view.number, body: proto::View::from(view).encode_to_vec().into() };
    (Key { kind: Kind::View, name: VIEW.into() }, content)
}
