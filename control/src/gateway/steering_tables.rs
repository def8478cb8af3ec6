//! Steering tables (BPF maps) derived from policy and local addresses: in full, or the difference that a policy change
//! makes.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use vipgate_dataplane::policy::build::Builder;
use vipgate_dataplane::policy::change::PolicyChange;
use vipgate_dataplane::policy::compiled::Policy;
use vipgate_dataplane::policy::spec::{BackendSpec, ClusterSpec, EgressSpec, ServiceSpec, VipSpec};
use vipgate_xdp::steering::{Listener, NO_POLICY, SteeringChange, SteeringTables};

/// The full tables for a policy, local addresses and local tunnel endpoints.
pub(super) fn for_policy(policy: &Policy, locals: &[IpAddr], tunnels: &[SocketAddr]) -> SteeringTables {
    SteeringTables {
        endpoints: policy.endpoints().map(|(address, endpoint)| (address, policy.egress_of(endpoint).id.0)).collect(),
        vips: policy.live_vips().map(|vip| vip.address).collect(),
        private_addresses: private_addresses(policy),
        listeners: policy.services().flat_map(|service| listeners(&service.spec)).collect(),
        local_addresses: locals.iter().copied().collect::<BTreeSet<_>>(),
        tunnels: tunnels.iter().map(|tunnel| (tunnel.ip(), tunnel.port())).collect(),
        policy_cidrs: policy.egress().flat_map(|egress| cidrs(egress.id.0, &egress.spec)).collect(),
        pod_cidrs: pods(policy.cluster()),
        cluster_cidrs: inside(policy.cluster()),
    }
}

/// Private addresses of VIPs at this gateway: outside, packets have them.
fn private_addresses(policy: &Policy) -> BTreeSet<IpAddr> {
    policy.static_nat().addresses().map(|(private, _)| private).collect()
}

/// VIPs whose private address is a tunnel endpoint of this gateway, with that address. Packets to it stay the kernel's, so these
/// VIPs can't be reached.
pub(super) fn vips_at_tunnel_endpoints(policy: &Policy, tunnels: &[SocketAddr]) -> Vec<(IpAddr, IpAddr)> {
    let is_endpoint = |(private, _): &(IpAddr, IpAddr)| tunnels.iter().any(|tunnel| tunnel.ip() == *private);
    policy.static_nat().addresses().filter(is_endpoint).map(|(private, vip)| (vip, private)).collect()
}

/// Pod CIDRs whose uncovered traffic is dropped (`uncovered: drop`).
fn pods(cluster: &ClusterSpec) -> BTreeSet<IpNet> {
    cluster.pods.iter().filter(|_| cluster.drop_uncovered).copied().collect()
}

/// CIDRs inside the cluster.
fn inside(cluster: &ClusterSpec) -> BTreeSet<IpNet> {
    cluster.pods.iter().chain(&cluster.others).copied().collect()
}

/// Addresses and ports that the backends of a Service listen on.
fn listeners(service: &ServiceSpec) -> BTreeSet<Listener> {
    let ports = &service.ports;
    let listeners = |backend: &BackendSpec| {
        let used = backend.ports.iter().zip(ports).filter(|(port, _)| **port != 0);
        used.map(|(port, it)| (backend.address, *port, it.protocol)).collect::<Vec<_>>()
    };
    service.backends.iter().flat_map(listeners).collect()
}

/// Destinations of an egress policy: `true` if translated, `false` if excluded.
fn cidrs(id: u32, policy: &EgressSpec) -> BTreeMap<(u32, IpNet), bool> {
    let mut cidrs: BTreeMap<_, _> = policy.destinations.iter().map(|net| ((id, net.trunc()), true)).collect();
    // Excluded last: a prefix in both lists is excluded.
    cidrs.extend(policy.excluded.iter().map(|net| ((id, net.trunc()), false)));
    cidrs
}

/// Entries of the objects that a change replaces or removes; recorded before it is built.
#[derive(Debug, Default)]
pub(super) struct PreviousTables {
    cidrs: BTreeMap<(u32, IpNet), bool>,
    listeners: BTreeSet<Listener>,
    private: BTreeSet<IpAddr>,
    cluster: ClusterSpec,
}

impl PreviousTables {
    pub(super) fn of(change: &PolicyChange, builder: &Builder) -> Self {
        let (policies, services) = (change.policies.keys(), change.services.keys());
        let policy = builder.snapshot().policy;
        Self {
            cidrs: policies.filter_map(|name| builder.egress(name)).flat_map(|it| cidrs(it.id.0, &it.spec)).collect(),
            listeners: services.filter_map(|name| builder.service(name)).flat_map(|it| listeners(&it.spec)).collect(),
            private: private_addresses(&policy),
            cluster: change.cluster.as_ref().map(|_| policy.cluster().clone()).unwrap_or_default(),
        }
    }

    /// What must be captured before the change is built and published. Policies of endpoints aren't in force yet, and new
    /// ones have no number, so they have no prefixes here.
    pub(super) fn to_capture(&self, change: &PolicyChange, builder: &Builder) -> SteeringChange {
        let id = |name: &str| builder.egress(name).map(|egress| egress.id.0);
        let known = change.policies.changed().filter_map(|spec| Some((id(&spec.name)?, spec)));
        let policy = builder.snapshot().policy;
        let this = policy.members().this_name();
        let private = |vip: &VipSpec| {
            let mut private = vip.private.iter();
            private.find(|private| this.is_none_or(|name| *private.gateway == *name)).map(|private| private.address)
        };
        let added = SteeringTables {
            endpoints: change.endpoints.changed().map(|it| (it.address, NO_POLICY)).collect(),
            vips: change.vips.changed().map(|vip| vip.address).collect(),
            private_addresses: change.vips.changed().filter_map(|vip| private(vip)).collect(),
            listeners: change.services.changed().flat_map(|service| listeners(service)).collect(),
            policy_cidrs: known.flat_map(|(id, spec)| cidrs(id, spec)).collect(),
            ..cluster_added(change)
        };
        let removed = SteeringTables { policy_cidrs: self.cidrs_without(&added), ..self.cluster_removed(change) };
        SteeringChange { added, removed }
    }

    /// The change of the tables; called once the change is built.
    pub(super) fn difference(self, change: &PolicyChange, builder: &Builder) -> SteeringChange {
        let private = private_addresses(&builder.snapshot().policy);
        let id = |name: &str| builder.egress(name).map(|egress| egress.id.0);
        let named = change.policies.changed().filter_map(|policy| builder.egress(&policy.name));
        let services = change.services.changed().filter_map(|it| builder.service(&it.name));
        let added = SteeringTables {
            endpoints: change.endpoints.changed().filter_map(|it| Some((it.address, id(&it.policy)?))).collect(),
            vips: change.vips.changed().map(|vip| vip.address).collect(),
            private_addresses: &private - &self.private,
            listeners: services.flat_map(|it| listeners(&it.spec)).collect(),
            policy_cidrs: named.flat_map(|it| cidrs(it.id.0, &it.spec)).collect(),
            ..cluster_added(change)
        };
        // Those of a private address that policy has given up, or never gave to this gateway.
        let mut surplus = private_named(change);
        surplus.extend(&self.private);
        let removed = SteeringTables {
            endpoints: change.endpoints.removed().map(|address| (*address, 0)).collect(),
            vips: change.vips.removed().copied().collect(),
            private_addresses: &surplus - &private,
            // Another Service may have the same backend.
            listeners: self.listeners.iter().copied().filter(|it| !builder.is_backend_port(*it)).collect(),
            policy_cidrs: self.cidrs_without(&added),
            ..self.cluster_removed(change)
        };
        SteeringChange { added, removed }
    }

    fn cidrs_without(&self, added: &SteeringTables) -> BTreeMap<(u32, IpNet), bool> {
        let gone = self.cidrs.iter().filter(|(key, _)| !added.policy_cidrs.contains_key(key));
        gone.map(|(key, translated)| (*key, *translated)).collect()
    }

    fn cluster_removed(&self, change: &PolicyChange) -> SteeringTables {
        // Without a new cluster spec the old one stays.
        let gone = |cidrs: fn(&ClusterSpec) -> BTreeSet<IpNet>| {
            change.cluster.as_ref().map(|after| &cidrs(&self.cluster) - &cidrs(after)).unwrap_or_default()
        };
        SteeringTables { pod_cidrs: gone(pods), cluster_cidrs: gone(inside), ..SteeringTables::default() }
    }
}

/// Private addresses that a change may have captured, of whichever gateway.
fn private_named(change: &PolicyChange) -> BTreeSet<IpAddr> {
    change.vips.changed().flat_map(|vip| &vip.private).map(|private| private.address).collect()
}

fn cluster_added(change: &PolicyChange) -> SteeringTables {
    SteeringTables {
        pod_cidrs: change.cluster.iter().flat_map(pods).collect(),
        cluster_cidrs: change.cluster.iter().flat_map(inside).collect(),
        ..SteeringTables::default()
    }
}

#[cfg(test)]
mod tests {
    use vipgate_dataplane::policy::change::Entries;
    use vipgate_dataplane::policy::spec::{Announce, NetworkSpec, PrivateAddressSpec};

    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// The change to VIPs with these private addresses.
    fn change(before: &[(&str, Option<&str>)], after: &[(&str, Option<&str>)]) -> PolicyChange {
        let vip = |(address, private): &(&str, Option<&str>)| VipSpec {
            address: ip(address),
            name: "Service t/s".into(),
            announce: Announce::L2,
            reserved_ports: vec![],
            shards: vec![],
            shard_map: None,
            private: private.iter().map(|it| PrivateAddressSpec { gateway: "a".into(), address: ip(it) }).collect(),
        };
        let is_gone = |vip: &&str| !after.iter().any(|(other, _)| other == vip);
        let gone = before.iter().map(|(vip, _)| *vip).filter(is_gone).map(ip);
        PolicyChange { vips: after.iter().map(vip).collect::<Entries<_>>().without(gone), ..PolicyChange::default() }
    }

    #[test]
    fn a_vip_at_the_address_of_peers_is_found() {
        let mut builder = Builder::new(NetworkSpec::default());
        let vips = [("203.0.113.1", Some("10.0.0.5")), ("203.0.113.2", Some("10.0.0.6"))];
        builder.with_change(&change(&[], &vips)).unwrap();
        let at =
            |tunnel: &str| vips_at_tunnel_endpoints(&builder.snapshot().policy, &[SocketAddr::new(ip(tunnel), 4790)]);
        assert_eq!(at("10.0.0.6"), [(ip("203.0.113.2"), ip("10.0.0.6"))]);
        assert_eq!(at("10.0.0.7"), []);
    }

    #[test]
    fn private_addresses_are_captured_as_long_as_a_vip_has_them() {
        let steps: [&[(&str, Option<&str>)]; 7] = [
            &[("203.0.113.1", None)],
            &[("203.0.113.1", Some("10.0.0.5")), ("203.0.113.2", Some("10.0.0.6"))],
            &[("203.0.113.1", Some("10.0.0.6")), ("203.0.113.2", None)],
            // A private address becomes a VIP, and a VIP a private address.
            &[("10.0.0.6", None), ("203.0.113.1", Some("203.0.113.2"))],
            &[("10.0.0.6", Some("10.0.0.9")), ("203.0.113.2", None)],
            &[("203.0.113.2", Some("10.0.0.6"))],
            &[],
        ];
        let mut builder = Builder::new(NetworkSpec::default());
        let (mut vips, mut private, mut last): (BTreeSet<IpAddr>, BTreeSet<IpAddr>, &[_]) = Default::default();
        for step in steps {
            let change = change(last, step);
            last = step;
            let before = PreviousTables::of(&change, &builder);
            let first = before.to_capture(&change, &builder);
            builder.with_change(&change).unwrap();
            let SteeringChange { added, removed } = before.difference(&change, &builder);
            assert!(first.added.private_addresses.is_superset(&added.private_addresses), "{step:?}");
            vips = &(&vips | &added.vips) - &removed.vips;
            private = &(&private | &added.private_addresses) - &removed.private_addresses;
            assert_eq!(vips, step.iter().map(|(vip, _)| ip(vip)).collect(), "{step:?}");
            assert_eq!(private, step.iter().filter_map(|(_, private)| private.map(ip)).collect(), "{step:?}");
            let full = for_policy(&builder.snapshot().policy, &[], &[]);
            assert_eq!((&vips, &private), (&full.vips, &full.private_addresses), "{step:?}");
        }
    }
}
