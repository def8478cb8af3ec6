//! Many objects at once: more than a namespace's share of a limit, and more than gateways hold.

use serde_json::{Value, json};
use vipgate_dataplane::policy::limits::MAX_PORTS_OF_SERVICE;
use vipgate_policy::manifest::{Kind, ObjectId};

use super::policies::from_pool;
use super::{Act, EGRESS};
use crate::source::tests::isolation::objects::{endpoint, id, pod, service, slice};
use crate::source::tests::isolation::world::{OUTSIDE, Tenant, World};

pub(super) const SMALL: [(&str, Act); 8] = [
    ("burst: policies", |world, tenant, _| {
        (0..60).for_each(|n| put_policy(world, tenant, n, from_pool("six", 1)));
        true
    }),
    ("burst: prefixes", |world, tenant, _| {
        for n in 0..5 {
            let mut spec = from_pool("six", 1);
            spec["destinationCIDRs"] = (0..100).map(|at| format!("198.{}.{at}.0/24", 64 + n)).collect();
            put_policy(world, tenant, n, spec);
        }
        true
    }),
    ("burst: Services of one VIP", |world, tenant, dice| {
        let (vip, count) = (tenant.vip(OUTSIDE, 9), 40 + dice.below(30));
        put_services(world, tenant, count, &vip, 60);
        true
    }),
    ("burst: VIPs of two Services", |world, tenant, _| {
        // More than a namespace's share: those of a Service that is set aside aren't free for another one.
        let vips: Vec<String> = (0..20).map(|n| format!("192.0.{}.{n}", 40 + tenant.index)).collect();
        for n in 0..2 {
            world.put(id(Kind::Service, tenant.namespace, &format!("burst-vips{n}")), service(&vips, 7600 + n));
        }
        true
    }),
    ("burst: pods", |world, tenant, _| {
        put_pods(world, tenant, 220);
        put_policy(world, tenant, 0, from_pool("six", 1));
        true
    }),
    ("burst: backend ports", |world, tenant, dice| {
        put_pods(world, tenant, 4);
        put_wide(world, tenant, 1 + dice.below(4), 40, 4);
        true
    }),
    ("burst: lookup tables", |world, tenant, _| {
        put_pods(world, tenant, 6);
        put_tables(world, tenant, 40);
        true
    }),
    ("burst: undone", |world, tenant, _| {
        let is_of_burst = |id: &ObjectId| id.namespace == tenant.namespace && id.name.starts_with("burst");
        let ids: Vec<ObjectId> = world.objects.keys().filter(|id| is_of_burst(id)).cloned().collect();
        ids.iter().filter(|id| world.remove(id)).count() > 0
    }),
];

pub(super) const BIG: [(&str, Act); 4] = [
    ("big: names of 540 Services", |world, tenant, _| {
        let vip = tenant.vip(OUTSIDE, 9);
        put_services(world, tenant, 540, &vip, 200);
        true
    }),
    ("big: backend ports", |world, tenant, _| {
        put_pods(world, tenant, 20);
        put_wide(world, tenant, 7, MAX_PORTS_OF_SERVICE, 20);
        true
    }),
    ("big: lookup tables", |world, tenant, _| {
        put_pods(world, tenant, 13);
        put_tables(world, tenant, MAX_PORTS_OF_SERVICE);
        true
    }),
    ("big: prefixes", |world, tenant, _| {
        for n in 0..40 {
            let mut spec = from_pool("six", 1);
            let prefixes = (0..4096).map(|at| format!("{}.{}.{}.0/24", 101 + n, at / 256, at % 256));
            spec["destinationCIDRs"] = prefixes.collect();
            put_policy(world, tenant, n, spec);
        }
        true
    }),
];

#[expect(clippy::needless_pass_by_value, reason = "its many callers make the value for it")]
fn put_policy(world: &mut World, tenant: Tenant, n: usize, spec: Value) {
    world.put(id(Kind::EgressPolicy, tenant.namespace, &format!("burst{n}")), json!({"spec": spec}));
}

/// Services with long names that share a VIP.
fn put_services(world: &mut World, tenant: Tenant, count: usize, vip: &str, length: usize) {
    for n in 0..count {
        let name = format!("burst{n}-{}", "n".repeat(length));
        let mut fields = service(&[vip.to_owned()], 10_000 + n as u16);
        if n == 0 {
            fields["metadata"]["annotations"][EGRESS] = "true".into();
        }
        world.put(id(Kind::Service, tenant.namespace, &name), fields);
    }
}

fn address(tenant: Tenant, n: usize) -> String {
    format!("10.65.{}.{}", tenant.index * 16 + 10 + n / 200, 1 + n % 200)
}

fn put_pods(world: &mut World, tenant: Tenant, count: usize) {
    for n in 0..count {
        let fields = pod(&json!({"app": "burst"}), "node-1", &format!("uid-burst{n}"), &[address(tenant, n)]);
        world.put(id(Kind::Pod, tenant.namespace, &format!("burst{n}")), fields);
    }
}

fn endpoints(tenant: Tenant, pods: usize) -> Vec<Value> {
    let endpoint = |n: usize| {
        endpoint(&address(tenant, n), Some((tenant.namespace, &format!("burst{n}"), &format!("uid-burst{n}"))))
    };
    (0..pods).map(endpoint).collect()
}

/// Services with many ports, each with the same pods.
fn put_wide(world: &mut World, tenant: Tenant, services: usize, ports: usize, pods: usize) {
    for n in 0..services {
        let name = format!("burst-wide{n}");
        let mut fields = service(&[tenant.vip(OUTSIDE, n)], 1);
        fields["spec"]["ports"] =
            (0..ports).map(|port| json!({"name": format!("p{port}"), "port": 20_000 + port})).collect();
        world.put(id(Kind::Service, tenant.namespace, &name), fields);
        let mut fields = slice(&name, &endpoints(tenant, pods));
        fields["ports"] = (0..ports).map(|port| json!({"name": format!("p{port}"), "port": 20_000 + port})).collect();
        world.put(id(Kind::EndpointSlice, tenant.namespace, &name), fields);
    }
}

/// A Service with a different subset of pods behind each port, so that each port has a lookup table of its own.
fn put_tables(world: &mut World, tenant: Tenant, ports: usize) {
    let name = "burst-tables";
    let pods = endpoints(tenant, 13.min(if ports > 64 { 13 } else { 6 }));
    let mut fields = service(&[tenant.vip(OUTSIDE, 6)], 1);
    let port = |port: usize| json!({"name": format!("p{port}"), "port": 1 + port, "targetPort": format!("p{port}")});
    fields["spec"]["ports"] = (0..ports).map(port).collect();
    fields["metadata"]["annotations"]["vipgate.io/maglev-table-size"] = "131071".into();
    world.put(id(Kind::Service, tenant.namespace, name), fields);
    for (at, pod) in pods.iter().enumerate() {
        let mut fields = slice(name, std::slice::from_ref(pod));
        let has_port = |port: &usize| (port + 1) >> at & 1 == 1;
        fields["ports"] =
            (0..ports).filter(has_port).map(|port| json!({"name": format!("p{port}"), "port": 9000})).collect();
        world.put(id(Kind::EndpointSlice, tenant.namespace, &format!("burst-tables{at}")), fields);
    }
}
