//! Limits of one object: as many as possible, and one more. Only where a namespace has a large share of the limits of the whole
//! is it the object's own limit that decides.

use serde_json::{Value, json};
use vipgate_dataplane::policy::limits::{
    MAX_ADDRESSES_OF_POLICY, MAX_PORTS_OF_SERVICE, MAX_PREFIXES_OF_POLICY, MAX_VIPS_OF_SERVICE,
};
use vipgate_policy::manifest::Kind;

use super::Act;
use super::policies::from_pool;
use crate::source::tests::isolation::objects::{id, service};
use crate::source::tests::isolation::world::{OUTSIDE, Tenant, World};

pub(super) const ACTS: [(&str, Act); 5] = [
    ("limit: destinationCIDRs", |world, tenant, _| put_prefixes(world, tenant, "destinationCIDRs")),
    ("limit: excludedCIDRs", |world, tenant, _| put_prefixes(world, tenant, "excludedCIDRs")),
    ("limit: addresses of a policy", |world, tenant, _| {
        let policy = |count: usize| json!({"spec": from_pool("six", count as u64)});
        put(world, tenant, Kind::EgressPolicy, MAX_ADDRESSES_OF_POLICY, policy)
    }),
    ("limit: VIPs of a Service", |world, tenant, _| {
        let with_vips = |count: usize| {
            let vips: Vec<String> = (0..count).map(|n| format!("192.0.{}.{n}", 32 + tenant.index)).collect();
            service(&vips, 7000 + count as u16)
        };
        put(world, tenant, Kind::Service, MAX_VIPS_OF_SERVICE, with_vips)
    }),
    ("limit: ports of a Service", |world, tenant, _| {
        let with_ports = |count: usize| {
            // Each has a VIP of its own.
            let mut fields = service(&[tenant.vip(OUTSIDE, count)], 1);
            fields["spec"]["ports"] = (0..count).map(|n| json!({"name": format!("p{n}"), "port": 1 + n})).collect();
            fields
        };
        put(world, tenant, Kind::Service, MAX_PORTS_OF_SERVICE, with_ports)
    }),
];

fn put_prefixes(world: &mut World, tenant: Tenant, field: &str) -> bool {
    let with_prefixes = |count: usize| {
        let prefixes = (0..count).map(|n| format!("198.{}.{}.0/24", 32 + n / 256, n % 256));
        let mut spec = from_pool("six", 1);
        spec[field] = prefixes.collect();
        json!({"spec": spec})
    };
    put(world, tenant, Kind::EgressPolicy, MAX_PREFIXES_OF_POLICY, with_prefixes)
}

/// Puts an object above a limit, and one at it. The first one is older: if it were accepted, it would give way to nobody.
fn put(world: &mut World, tenant: Tenant, kind: Kind, max: usize, fields: impl Fn(usize) -> Value) -> bool {
    for (name, count) in [("above-limit", max + 1), ("at-limit", max)] {
        world.put(id(kind, tenant.namespace, name), fields(count));
    }
    true
}
