//! What the steering program must capture, from policy and network: all of it, or what a change makes more and less.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use vipgate_dataplane::snapshot::build::Builder;
use vipgate_dataplane::snapshot::change::PolicyChange;
use vipgate_dataplane::snapshot::policy::{Egress, Policy};
use vipgate_dataplane::snapshot::service::Service;
use vipgate_dataplane::snapshot::spec::{BackendSpec, ClusterSpec};
use vipgate_xdp::steering::{Listener, SteeringTables};

/// The tables for this policy on a node with these addresses of its own, at some of which tunnels may end.
pub(super) fn tables(policy: &Policy, locals: &[IpAddr], tunnels: &[SocketAddr]) -> SteeringTables {
    SteeringTables {
        endpoints: policy.endpoints().map(|(address, endpoint)| (address, policy.egress_of(endpoint).id.0)).collect(),
        vips: policy.live_vips().map(|vip| vip.address).collect(),
        listeners: policy.services().flat_map(listeners).collect(),
        locals: locals.iter().copied().collect::<BTreeSet<_>>(),
        tunnels: tunnels.iter().map(|tunnel| (tunnel.ip(), tunnel.port())).collect(),
        cidrs: policy.egress().flat_map(cidrs).collect(),
        pods: pods(policy.cluster()),
        inside: inside(policy.cluster()),
    }
}

/// The pods' addresses that nothing leaves the cluster from uncovered.
fn pods(cluster: &ClusterSpec) -> BTreeSet<IpNet> {
    cluster.pods.iter().filter(|_| cluster.drop_uncovered).copied().collect()
}

/// The cluster's own addresses.
fn inside(cluster: &ClusterSpec) -> BTreeSet<IpNet> {
    cluster.pods.iter().chain(&cluster.others).copied().collect()
}

/// Where the backends of a Service listen.
fn listeners(service: &Service) -> BTreeSet<Listener> {
    let ports = &service.spec.ports;
    let of = |backend: &BackendSpec| {
        let own = backend.ports.iter().zip(ports).filter(|(port, _)| **port != 0);
        own.map(|(port, it)| (backend.address, *port, it.protocol)).collect::<Vec<_>>()
    };
    service.spec.backends.iter().flat_map(of).collect()
}

/// For each destination that a policy names whether it is translated.
fn cidrs(egress: &Egress) -> BTreeMap<(u32, IpNet), bool> {
    let number = egress.id.0;
    let mut cidrs: BTreeMap<_, _> = egress.spec.destinations.iter().map(|net| ((number, net.trunc()), true)).collect();
    // Excluded last: where both lists name a prefix, it is excluded.
    cidrs.extend(egress.spec.excluded.iter().map(|net| ((number, net.trunc()), false)));
    cidrs
}

/// What a change lets go of, to be asked before it is built.
#[derive(Debug, Default)]
pub(super) struct Before {
    cidrs: BTreeMap<(u32, IpNet), bool>,
    listeners: BTreeSet<Listener>,
    cluster: ClusterSpec,
}

impl Before {
    /// What of the policy the change replaces or takes away.
    pub(super) fn of(change: &PolicyChange, builder: &Builder) -> Self {
        let changed = change.policies.iter().map(|policy| &policy.name);
        let names = changed.chain(&change.gone.policies);
        let services = change.services.iter().map(|service| &service.name).chain(&change.gone.services);
        Self {
            cidrs: names.filter_map(|name| builder.egress(name)).flat_map(cidrs).collect(),
            listeners: services.filter_map(|name| builder.service(name)).flat_map(listeners).collect(),
            cluster: match change.cluster {
                Some(_) => builder.snapshot().policy.cluster().clone(),
                None => ClusterSpec::default(),
            },
        }
    }

    /// What the change captures that wasn't before, and what it lets go, once it is built.
    pub(super) fn difference(self, change: &PolicyChange, builder: &Builder) -> (SteeringTables, SteeringTables) {
        let number = |name: &str| builder.egress(name).map(|egress| egress.id.0);
        let named = change.policies.iter().filter_map(|policy| builder.egress(&policy.name));
        let more = SteeringTables {
            endpoints: change.endpoints.iter().filter_map(|it| Some((it.address, number(&it.policy)?))).collect(),
            vips: change.vips.iter().map(|vip| vip.address).collect(),
            listeners: change.services.iter().filter_map(|it| builder.service(&it.name)).flat_map(listeners).collect(),
            locals: BTreeSet::new(),
            tunnels: BTreeSet::new(),
            cidrs: named.flat_map(cidrs).collect(),
            pods: change.cluster.iter().flat_map(pods).collect(),
            inside: change.cluster.iter().flat_map(inside).collect(),
        };
        // What isn't said anew stays.
        let gone = |of: fn(&ClusterSpec) -> BTreeSet<IpNet>| {
            change.cluster.as_ref().map(|after| &of(&self.cluster) - &of(after)).unwrap_or_default()
        };
        let (pods, inside) = (gone(pods), gone(inside));
        let less = SteeringTables {
            endpoints: change.gone.endpoints.iter().map(|address| (*address, 0)).collect(),
            vips: change.gone.vips.iter().copied().collect(),
            // Another Service may have the same backend.
            listeners: self.listeners.into_iter().filter(|it| !builder.is_listener(*it)).collect(),
            locals: BTreeSet::new(),
            tunnels: BTreeSet::new(),
            cidrs: self.cidrs.into_iter().filter(|(key, _)| !more.cidrs.contains_key(key)).collect(),
            pods,
            inside,
        };
        (more, less)
    }
}
