//! What comes out of a book is the policy that the server has, whatever came in which order.

mod cluster;
mod follow;
mod refused;
mod services;
mod unsettled;
mod whole;
pub(crate) mod world;

use std::collections::BTreeSet;
use std::fmt;

use envoy_types::pb::envoy::service::discovery::v3::ResourceName;
use proptest::prelude::*;
use vipgate_dataplane::snapshot::build::Builder;
use vipgate_dataplane::snapshot::policy::{Policy, Vip};
use vipgate_dataplane::snapshot::spec::{
    AddressSelection, Announce, BackendSpec, BlockSet, ClusterSpec, EgressSpec, EndpointSpec, Limits, NetworkSpec,
    OnExhaustion, PolicySet, Scope, ServiceSpec, ShareSpec, VipSpec,
};

use self::world::Dice;
use super::*;
use crate::policy::{Deal, DealtService, Viewer};
use crate::xds::fixtures::{Told, ip, key, resource, response, responses, service};

/// What a policy says to packets, in an order that is the same for all that say the same.
#[derive(Debug, PartialEq)]
pub(crate) struct Seen {
    version: String,
    policies: Vec<EgressSpec>,
    /// With the ports that are guaranteed of each.
    vips: Vec<(VipSpec, u32)>,
    endpoints: Vec<EndpointSpec>,
    cluster: ClusterSpec,
}

pub(crate) fn seen(policy: &Policy) -> Seen {
    let mut policies: Vec<_> = policy.egress().map(|egress| egress.spec.clone()).collect();
    policies.sort_by_key(|policy| policy.name.clone());
    let vip = |vip: &Vip| {
        let (address, name, reserved_ports) = (vip.address, vip.name.clone(), vip.reserved.to_vec());
        (VipSpec { address, name, announce: vip.announce, reserved_ports, shares: vec![] }, vip.guaranteed)
    };
    let mut vips: Vec<_> = policy.live_vips().map(vip).collect();
    vips.sort_by_key(|(vip, _)| vip.address);
    let endpoints = policy.endpoints().map(|(address, endpoint)| {
        let vips = policy.vips_of(endpoint).map(|vip| vip.address).collect();
        let policy = policy.egress_of(endpoint).spec.name.clone();
        EndpointSpec { address, name: endpoint.name.clone(), policy, vips, gateway: None, remarks: vec![] }
    });
    let mut endpoints: Vec<_> = endpoints.collect();
    endpoints.sort_by_key(|endpoint| endpoint.address);
    Seen { version: policy.version().to_owned(), policies, vips, endpoints, cluster: policy.cluster().clone() }
}

pub(crate) fn builder() -> Builder {
    Builder::new(NetworkSpec::default())
}

/// What a policy comes to that is built as a whole.
fn built(set: &PolicySet) -> Seen {
    seen(&builder().with_policy(set).unwrap().policy)
}

/// What changes come to, by key, whatever an engine makes of it.
#[derive(Debug, Default)]
struct Sum {
    vips: BTreeMap<IpAddr, VipSpec>,
    endpoints: BTreeMap<IpAddr, EndpointSpec>,
    services: BTreeMap<Arc<str>, ServiceSpec>,
}

impl Sum {
    /// All VIPs, endpoints and Services after a change.
    fn change(&mut self, change: &PolicyChange) -> (Vec<VipSpec>, Vec<EndpointSpec>, Vec<ServiceSpec>) {
        let gone = &change.gone;
        let vips = add(&mut self.vips, &change.vips, &gone.vips, |vip| vip.address);
        let endpoints = add(&mut self.endpoints, &change.endpoints, &gone.endpoints, |endpoint| endpoint.address);
        (vips, endpoints, add(&mut self.services, &change.services, &gone.services, |service| service.name.clone()))
    }
}

fn add<K, T>(all: &mut BTreeMap<K, T>, different: &[T], gone: &[K], key: impl Fn(&T) -> K) -> Vec<T>
where
    K: Ord + fmt::Debug,
    T: Clone + PartialEq + fmt::Debug,
{
    let coming: BTreeSet<K> = different.iter().map(&key).collect();
    assert_eq!(coming.len(), different.len(), "nothing is named twice");
    for key in gone {
        assert!(all.remove(key).is_some() && !coming.contains(key), "{key:?} goes");
    }
    for it in different {
        let before = all.insert(key(it), it.clone());
        assert_ne!(before.as_ref(), Some(it), "what stays is not told");
    }
    all.values().cloned().collect()
}

/// A book of a gateway that holds all that the server has.
fn book_of(server: &Told) -> Book {
    let mut book = Book::default();
    book.stage_held(server.held.clone()).unwrap();
    assert!(book.is_whole());
    book.commit();
    book
}
