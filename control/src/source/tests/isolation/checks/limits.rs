//! Limits: no namespace has more than its share of what gateways hold, counted from what is published; and the name of a VIP
//! doesn't grow with the Services that share it.

use std::collections::BTreeMap;

use vipgate_dataplane::policy::limits::{
    BACKEND_PORTS, EGRESS_PREFIXES, ENDPOINT_VIPS, ENDPOINTS, LOOKUP_TABLES, Limit, MAX_NAMES_OF_VIP, POLICIES,
    SERVICES, VIPS,
};
use vipgate_policy::compiler::lookup_table_bytes;

use super::{Observation, namespace_of};

/// What each namespace takes of each limit, by its name; limits of a family are counted for each.
#[derive(Default)]
struct Counts<'a>(BTreeMap<(&'a str, &'static str, bool), (usize, Option<&'static Limit>)>);

impl<'a> Counts<'a> {
    fn add(&mut self, owner: &'a str, limit: &'static Limit, is_v6: bool, count: usize) {
        // What has no namespace is the platform's.
        if let Some(namespace) = namespace_of(owner) {
            let (sum, of) = self.0.entry((namespace, limit.what, is_v6)).or_default();
            *sum += count;
            *of = Some(limit);
        }
    }
}

pub(super) fn check(observation: &Observation<'_>) {
    let placement = observation.placement();
    let mut counts = Counts::default();
    for vip in &placement.vips {
        // The oldest one has it.
        counts.add(vip.name.split(", ").next().unwrap_or_default(), &VIPS, false, 1);
        let names = vip.name.split(", ").count();
        assert!(names <= MAX_NAMES_OF_VIP, "{} has {names} names, more than {MAX_NAMES_OF_VIP}", vip.address);
    }
    for policy in &placement.policies {
        counts.add(&policy.name, &POLICIES, false, 1);
        for prefix in policy.destinations.iter().chain(&policy.excluded) {
            counts.add(&policy.name, &EGRESS_PREFIXES, prefix.addr().is_ipv6(), 1);
        }
    }
    for endpoint in &placement.endpoints {
        counts.add(&endpoint.policy, &ENDPOINTS, endpoint.address.is_ipv6(), 1);
        counts.add(&endpoint.policy, &ENDPOINT_VIPS, false, endpoint.vips.len());
    }
    for service in &placement.services {
        counts.add(&service.name, &SERVICES, false, 1);
        counts.add(&service.name, &LOOKUP_TABLES, false, lookup_table_bytes(service));
        for backend in &service.backends {
            let ports = backend.ports.iter().filter(|port| **port > 0).count();
            counts.add(&service.name, &BACKEND_PORTS, backend.address.is_ipv6(), ports);
        }
    }
    let share = observation.history.setting.share();
    for ((namespace, what, _), (count, limit)) in counts.0 {
        let max = limit.map_or(0, |limit| share.of(limit));
        assert!(count <= max, "{namespace} has {count} {what}, more than its share of {max}");
    }
}
