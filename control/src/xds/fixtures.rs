//! Test fixtures: a sample placement, its resources and responses as a server sends them, and certificates.

pub(crate) mod pki;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryResponse, Resource};
use envoy_types::pb::google::protobuf::Any;
use vipgate_dataplane::policy::change::PolicyChange;
use vipgate_dataplane::policy::spec::{
    AddressSelection, Announce, BackendState, EgressSpec, EndpointSpec, Limits, NodeSpec, OnExhaustion, SLOTS, Scope,
    ServicePortSpec, ShardMapSpec, VipSpec,
};
use vipgate_policy::compiler::{AgentNode, Cluster, GatewayLocality, Peer, PlacedBackend, PlacedService, Placement};
use vipgate_policy::manifest::{DEFAULT_TABLE_SIZE, Hints};

use super::resource::{Content, Key, Kind, counts, encode_all, settings};
use crate::config::PolicyServer;
use crate::xds::store::StoredResource;

pub(super) fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

pub(super) fn key(kind: Kind, name: &str) -> Key {
    Key { kind, name: name.into() }
}

/// Policy servers at these URLs.
pub(crate) fn policy_server(urls: &[&str]) -> PolicyServer {
    PolicyServer {
        url: urls[0].to_owned(),
        other_urls: urls[1..].iter().map(|url| (*url).to_owned()).collect(),
        ca: None,
        cert: None,
        key: None,
        token: None,
        cache: "unused".into(),
    }
}

/// A gateway of a placement.
pub(crate) fn peer(name: &str) -> Peer {
    Peer { name: name.into(), node: "n".into(), zone: "".into(), address: None, pods: [].into(), uncovered: None }
}

/// The same with a pod on this node.
pub(crate) fn placement_with_pod(node: &str, number: u8) -> Placement {
    let tunnel = NodeSpec {
        name: node.into(),
        address: ([192, 0, 2, 101], 8473).into(),
        vni: 7,
        mac: [2; 6],
        verify_mac: false,
        sends_covered_only: true,
        prefixes: Vec::new(),
    };
    let pods = [(IpAddr::from([10, 0, 0, number]), "a/p".into())].into();
    Placement { agents: [Arc::new(AgentNode { tunnel, pods })].into(), ..sample_placement(number) }
}

/// A placement of one policy, VIP, Service, gateway and overlay node, and `endpoints` endpoints that use the VIP.
pub(crate) fn sample_placement(endpoints: u8) -> Placement {
    let (name, vip) = (Arc::<str>::from("EgressPolicy a/p"), ip("203.0.113.1"));
    let endpoint = |i| {
        let address = IpAddr::from([10, 0, 0, i]);
        EndpointSpec {
            address,
            name: "".into(),
            policy: name.clone(),
            vips: vec![vip],
            gateway: None,
            slot: None,
            remarks: vec![],
        }
    };
    let policy = EgressSpec {
        name: name.clone(),
        destinations: vec!["0.0.0.0/0".parse().unwrap()],
        excluded: vec![],
        address_selection: AddressSelection::PerEndpoint,
        limits: Limits::default(),
        on_exhaustion: OnExhaustion::Reject,
    };
    let vip = VipSpec {
        address: vip,
        name: "".into(),
        announce: Announce::L2,
        reserved_ports: vec![80],
        shards: vec![],
        shard_map: None,
        private: vec![],
    };
    Placement {
        policies: vec![policy].into(),
        shard_maps: vec![ShardMapSpec { name: "all/0".into(), orders: vec![vec!["g1".into()]], slots: vec![0; SLOTS] }]
            .into(),
        vips: vec![vip].into(),
        endpoints: (1..=endpoints).map(endpoint).collect(),
        services: vec![service(&[1, 2])].into(),
        nodes: vec![node()],
        agents: [].into(),
        peers: vec![Peer {
            name: "g1".into(),
            node: "n1".into(),
            zone: "z1".into(),
            address: None,
            pods: [].into(),
            uncovered: None,
        }],
        cluster: Some(cluster()),
    }
}

/// A gateway's policy as a change from nothing: what a placement has, without encoding and decoding it.
pub(crate) fn whole_policy(placement: &Placement, gateway: &GatewayLocality, version: &str) -> PolicyChange {
    let peer = placement.peer(&gateway.name);
    let locality = gateway.resolve_zone(peer);
    let cluster = placement.cluster.clone().unwrap_or_default().for_gateway(gateway, peer);
    PolicyChange {
        version: version.to_owned(),
        policies: placement.policies.iter().cloned().collect(),
        shard_maps: placement.shard_maps.iter().cloned().collect(),
        vips: placement.vips.iter().map(|vip| gateway.vip(vip)).collect(),
        endpoints: placement.endpoints.iter().cloned().collect(),
        services: placement.services.iter().map(|service| service.for_gateway(&locality)).collect(),
        nodes: placement.nodes.clone().into(),
        cluster: Some(cluster),
    }
}

fn cluster() -> Cluster {
    Cluster::from_config(&["10.0.0.0/16".parse().unwrap()], &["10.96.0.0/12".parse().unwrap()], None)
}

fn node() -> NodeSpec {
    let prefixes = vec!["10.0.0.0/24".parse().unwrap()];
    NodeSpec {
        name: "node-1".into(),
        address: "10.9.0.1:8472".parse().unwrap(),
        vni: 1,
        mac: [2; 6],
        verify_mac: false,
        sends_covered_only: false,
        prefixes,
    }
}

/// A Service with backends `10.0.0.N` on nodes `nN` in zones `zN`, for each N of `backends`.
pub(super) fn service(backends: &[u8]) -> PlacedService {
    let backend = |n: &u8| {
        let zone = Arc::<str>::from(format!("z{n}"));
        PlacedBackend {
            address: IpAddr::from([10, 0, 0, *n]),
            name: "".into(),
            ports: [8080].into(),
            weight: 1,
            state: BackendState::Ready,
            node: Some(format!("n{n}").into()),
            zone: Some(zone.clone()),
            hints: Some(Arc::new(Hints { nodes: vec![], zones: vec![zone] })),
        }
    };
    PlacedService {
        name: "Service a/s".into(),
        vips: vec![ip("203.0.113.1")],
        ports: vec![ServicePortSpec { name: "".into(), protocol: 6, port: 80 }],
        backends: backends.iter().map(backend).collect(),
        source_ranges: vec![],
        affinity: None,
        table_size: DEFAULT_TABLE_SIZE,
        external: Scope::Local,
        internal: Scope::Cluster,
        health_port: Some(30_000),
    }
}

/// A Service with this many backends, two per zone.
pub(crate) fn large_service(backends: u32) -> PlacedService {
    let template = service(&[1]);
    let backend = |n: u32| {
        let address = IpAddr::from(std::net::Ipv4Addr::from_bits(0x0a01_0000 + n));
        let (name, zone) = (format!("a/pod-{n}").into(), Some(format!("z{}", n / 2).into()));
        PlacedBackend { address, name, zone, hints: None, ..template.backends[0].clone() }
    };
    PlacedService { backends: (0..backends).map(backend).collect(), ..template.clone() }
}

pub(super) fn resource(key: &Key, stored: &StoredResource) -> Resource {
    let body = Any { type_url: key.kind.type_url().to_owned(), value: stored.body.to_vec() };
    let name = key.name.to_string();
    Resource { name, version: stored.version.clone(), resource: Some(body), ..Resource::default() }
}

/// A response with these resources; `None`: a removal.
pub(crate) fn response(kind: Kind, changes: &[(Key, Option<StoredResource>)]) -> DeltaDiscoveryResponse {
    let mut response = DeltaDiscoveryResponse { type_url: kind.type_url().to_owned(), ..Default::default() };
    for (key, stored) in changes {
        match stored {
            Some(stored) => response.resources.push(resource(key, stored)),
            None => response.removed_resources.push(key.name.to_string()),
        }
    }
    response
}

/// One response for each kind.
pub(crate) fn responses(changes: &[(Key, Option<StoredResource>)]) -> Vec<DeltaDiscoveryResponse> {
    changes.chunk_by(|a, b| a.0.kind == b.0.kind).map(|changes| response(changes[0].0.kind, changes)).collect()
}

/// The resources of a server and the version of its policy.
#[derive(Clone, Debug, Default)]
pub(crate) struct ServerPolicy {
    pub(super) resources: BTreeMap<Key, StoredResource>,
    pub(super) version: String,
}

impl ServerPolicy {
    pub(crate) fn of(placement: &Placement) -> Self {
        let encoded = encode_all(placement);
        let sum = encoded.iter().fold(0_u64, |sum, (_, content)| sum.wrapping_add(content.version));
        let (key, content, version) = settings(counts(&encoded), sum);
        let stored =
            |content: Content| StoredResource { version: Content::version_text(content.version), body: content.body };
        let encoded = encoded.into_iter().chain([(key, content)]);
        let resources = encoded.map(|(key, content)| (key, stored(content))).collect();
        Self { resources, version }
    }

    /// The same resources without Settings, as of a server that doesn't send them.
    pub(crate) fn without_settings(mut self) -> Self {
        self.resources.retain(|key, _| key.kind != Kind::Settings);
        self
    }

    /// The changes since `before`, in sending order.
    pub(crate) fn diff(&self, before: &Self) -> Vec<(Key, Option<StoredResource>)> {
        let keys: BTreeSet<_> = self.resources.keys().chain(before.resources.keys()).cloned().collect();
        let changed = keys.into_iter().filter(|key| self.resources.get(key) != before.resources.get(key));
        changed.map(|key| (key.clone(), self.resources.get(&key).cloned())).collect()
    }

    /// The response with the Settings, which completes an update.
    pub(crate) fn settings_response(&self) -> DeltaDiscoveryResponse {
        let settings = key(Kind::Settings, "settings");
        response(Kind::Settings, &[(settings.clone(), self.resources.get(&settings).cloned())])
    }
}
