//! What tests of this protocol share: a server's resources as it tells them, and certificates.

pub(crate) mod pki;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryResponse, Resource};
use envoy_types::pb::google::protobuf::Any;
use vipgate_dataplane::snapshot::spec::{
    AddressSelection, Announce, BackendState, EgressSpec, EndpointSpec, Limits, NodeSpec, OnExhaustion, Scope,
    ServicePortSpec, VipSpec,
};

use super::book::Held;
use super::resource::{Content, Key, Kind, encode_all, settings};
use crate::manifest::{DEFAULT_TABLE_SIZE, Hints};
use crate::policy::{Cluster, Deal, DealtBackend, DealtService, Peer};

pub(super) fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

pub(super) fn key(kind: Kind, name: &str) -> Key {
    Key { kind, name: name.into() }
}

/// One policy, one VIP, one Service, one gateway, and endpoints that leave with the VIP.
pub(crate) fn deal(endpoints: u8) -> Deal {
    let (name, vip) = (Arc::<str>::from("EgressPolicy a/p"), ip("203.0.113.1"));
    let endpoint = |i| {
        let address = IpAddr::from([10, 0, 0, i]);
        EndpointSpec { address, name: "".into(), policy: name.clone(), vips: vec![vip], gateway: None, remarks: vec![] }
    };
    let policy = EgressSpec {
        name: name.clone(),
        destinations: vec!["0.0.0.0/0".parse().unwrap()],
        excluded: vec![],
        address_selection: AddressSelection::PerEndpoint,
        limits: Limits::default(),
        on_exhaustion: OnExhaustion::Reject,
    };
    let vip =
        VipSpec { address: vip, name: "".into(), announce: Announce::L2, reserved_ports: vec![80], shares: vec![] };
    Deal {
        policies: vec![policy],
        vips: vec![vip],
        endpoints: (1..=endpoints).map(endpoint).collect(),
        services: vec![service(&[1, 2])],
        nodes: vec![node()],
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

fn cluster() -> Cluster {
    Cluster::of(&["10.0.0.0/16".parse().unwrap()], &["10.96.0.0/12".parse().unwrap()], None)
}

fn node() -> NodeSpec {
    let prefixes = vec!["10.0.0.0/24".parse().unwrap()];
    NodeSpec { name: "node-1".into(), address: "10.9.0.1:8472".parse().unwrap(), vni: 1, mac: [2; 6], prefixes }
}

/// A Service whose backends are `10.0.0.{each}`, on nodes and in zones of that number.
pub(super) fn service(backends: &[u8]) -> DealtService {
    let backend = |it: &u8| {
        let zone = Arc::<str>::from(format!("z{it}"));
        DealtBackend {
            address: IpAddr::from([10, 0, 0, *it]),
            name: "".into(),
            ports: [8080].into(),
            weight: 1,
            state: BackendState::Ready,
            node: Some(format!("n{it}").into()),
            zone: Some(zone.clone()),
            hints: Some(Arc::new(Hints { nodes: vec![], zones: vec![zone] })),
        }
    };
    DealtService {
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

pub(super) fn resource(key: &Key, held: &Held) -> Resource {
    let body = Any { type_url: key.kind.type_url().to_owned(), value: held.body.to_vec() };
    let name = key.name.to_string();
    Resource { name, version: held.version.clone(), resource: Some(body), ..Resource::default() }
}

/// One response that says what each of these is now.
pub(crate) fn response(kind: Kind, items: &[(Key, Option<Held>)]) -> DeltaDiscoveryResponse {
    let mut response = DeltaDiscoveryResponse { type_url: kind.type_url().to_owned(), ..Default::default() };
    for (key, held) in items {
        match held {
            Some(held) => response.resources.push(resource(key, held)),
            None => response.removed_resources.push(key.name.to_string()),
        }
    }
    response
}

/// One response for all resources of a kind.
pub(crate) fn responses(items: &[(Key, Option<Held>)]) -> Vec<DeltaDiscoveryResponse> {
    items.chunk_by(|a, b| a.0.kind == b.0.kind).map(|items| response(items[0].0.kind, items)).collect()
}

/// What a server has, and calls it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Told {
    pub(super) held: BTreeMap<Key, Held>,
    pub(super) version: String,
}

impl Told {
    pub(crate) fn of(deal: &Deal) -> Self {
        let resources = encode_all(deal);
        let sum = resources.iter().fold(0_u64, |sum, (_, content)| sum.wrapping_add(content.version));
        let (key, content, version) = settings(deal.counts(), sum);
        let held = |content: Content| Held { version: Content::version_text(content.version), body: content.body };
        let held = resources.into_iter().chain([(key, content)]).map(|(key, content)| (key, held(content))).collect();
        Self { held, version }
    }

    /// The same from a server that knows no settings.
    pub(crate) fn unsettled(mut self) -> Self {
        self.held.retain(|key, _| key.kind != Kind::Settings);
        self
    }

    /// What is different from before, in the order in which it is sent.
    pub(crate) fn differences(&self, before: &Self) -> Vec<(Key, Option<Held>)> {
        let keys: BTreeSet<_> = self.held.keys().chain(before.held.keys()).cloned().collect();
        let different = keys.into_iter().filter(|key| self.held.get(key) != before.held.get(key));
        different.map(|key| (key.clone(), self.held.get(&key).cloned())).collect()
    }

    /// The settings, which make it whole.
    pub(crate) fn settle(&self) -> DeltaDiscoveryResponse {
        let settings = key(Kind::Settings, "settings");
        response(Kind::Settings, &[(settings.clone(), self.held.get(&settings).cloned())])
    }
}
