//! What comes out of a book is the policy that the server has, whatever came in which order.

mod follow;
mod refused;
mod services;
mod unsettled;
mod whole;
mod world;

use envoy_types::pb::envoy::service::discovery::v3::ResourceName;
use proptest::prelude::*;
use vipgate_dataplane::snapshot::build::Builder;
use vipgate_dataplane::snapshot::policy::{Policy, Vip};
use vipgate_dataplane::snapshot::spec::{
    AddressSelection, Announce, BackendSpec, EgressSpec, EndpointSpec, Limits, NetworkSpec, OnExhaustion, PolicySet,
    Scope, ServiceSpec, VipSpec,
};

use self::world::Dice;
use super::*;
use crate::policy::{Blocks, Deal, DealtEndpoint, DealtService, Share, Viewer};
use crate::xds::fixtures::{Told, ip, key, resource, response, responses, service};

/// What a policy says to packets, in an order that is the same for all that say the same.
#[derive(Debug, PartialEq)]
struct Seen {
    version: String,
    policies: Vec<EgressSpec>,
    /// With the ports that are guaranteed of each.
    vips: Vec<(VipSpec, u32)>,
    endpoints: Vec<EndpointSpec>,
}

fn seen(policy: &Policy) -> Seen {
    let mut policies: Vec<_> = policy.egress().map(|egress| egress.spec.clone()).collect();
    policies.sort_by_key(|policy| policy.name.clone());
    let vip = |vip: &Vip| {
        let (address, name, reserved_ports) = (vip.address, vip.name.clone(), vip.reserved.to_vec());
        (VipSpec { address, name, announce: vip.announce, reserved_ports }, vip.guaranteed)
    };
    let mut vips: Vec<_> = policy.live_vips().map(vip).collect();
    vips.sort_by_key(|(vip, _)| vip.address);
    let endpoints = policy.endpoints().map(|(address, endpoint)| {
        let vips = policy.vips_of(endpoint).map(|vip| vip.address).collect();
        let policy = policy.egress_of(endpoint).spec.name.clone();
        EndpointSpec { address, name: endpoint.name.clone(), policy, vips }
    });
    let mut endpoints: Vec<_> = endpoints.collect();
    endpoints.sort_by_key(|endpoint| endpoint.address);
    Seen { version: policy.version().to_owned(), policies, vips, endpoints }
}

fn builder() -> Builder {
    Builder::new(NetworkSpec::default())
}

/// What a policy comes to that is built as a whole.
fn built(set: &PolicySet) -> Seen {
    seen(&builder().with_policy(set).unwrap().policy)
}

/// The Services that changes come to, by name.
#[derive(Debug, Default)]
struct Services(BTreeMap<Arc<str>, ServiceSpec>);

impl Services {
    fn change(&mut self, change: &PolicyChange) -> Vec<ServiceSpec> {
        let coming: BTreeSet<_> = change.services.iter().map(|service| &service.name).collect();
        assert_eq!(coming.len(), change.services.len(), "nothing is named twice");
        for name in &change.gone.services {
            assert!(self.0.remove(name).is_some() && !coming.contains(name), "{name} goes");
        }
        for service in &change.services {
            let before = self.0.insert(service.name.clone(), service.clone());
            assert_ne!(before.as_ref(), Some(service), "what stays is not told");
        }
        self.0.values().cloned().collect()
    }
}

/// A book of a gateway that holds all that the server has.
fn book_of(server: &Told, gateway: &str) -> Book {
    let mut book = Book::default();
    book.stage_held(server.held.clone()).unwrap();
    assert!(book.is_whole());
    book.commit(gateway);
    book
}
