//! EndpointSlices that list what isn't the tenant's: VIPs, pods, hosts, gateways, and names that can't be shown.

use serde_json::{Value, json};
use vipgate_policy::manifest::Kind;

use super::{Act, TRAP, edit, name, trap};
use crate::source::tests::isolation::objects::{self, endpoint, id, slice};
use crate::source::tests::isolation::tenant::external_backend;
use crate::source::tests::isolation::world::{API_SERVER, GATEWAYS, NODES, Tenant, World};
use crate::source::tests::isolation::{Dice, pick};

pub(super) const ACTS: [(&str, Act); 18] = [
    ("EndpointSlice: VIPs of another", |world, tenant, dice| {
        let vips = world.vips_of_victim(tenant, dice);
        let endpoints: Vec<Value> = vips.iter().map(|vip| endpoint(vip, None)).collect();
        if endpoints.is_empty() {
            return false;
        }
        // Of a Service without VIPs: an alias of another one's load balancer.
        let alias = json!({"spec": {"type": "ClusterIP", "ports": [{"name": "main", "port": 80}]}});
        world.put(id(Kind::Service, tenant.namespace, "alias"), alias);
        world.put(id(Kind::EndpointSlice, tenant.namespace, "alias"), slice("alias", &endpoints));
        put(world, tenant, dice, endpoints)
    }),
    ("EndpointSlice: pod of another", |world, tenant, dice| {
        of_pod(world, tenant, dice, |_, _, address, _| endpoint(address, None))
    }),
    ("EndpointSlice: pod of another, with its reference", |world, tenant, dice| {
        of_pod(world, tenant, dice, |namespace, name, address, uid| endpoint(address, Some((namespace, name, uid))))
    }),
    ("EndpointSlice: pod of another, with an own reference", |world, tenant, dice| {
        let own = tenant.namespace;
        of_pod(world, tenant, dice, |_, name, address, uid| endpoint(address, Some((own, name, uid))))
    }),
    ("EndpointSlice: another's pod as gone", |world, tenant, dice| {
        of_pod(world, tenant, dice, |namespace, name, address, uid| {
            let mut endpoint = endpoint(address, Some((namespace, name, uid)));
            endpoint["conditions"] = json!({"ready": false, "serving": false});
            endpoint
        })
    }),
    ("EndpointSlice: host", |world, tenant, dice| {
        let host = *pick(dice, &[NODES[0].1, NODES[1].1]);
        put(world, tenant, dice, vec![endpoint(host, None)])
    }),
    ("EndpointSlice: API server", |world, tenant, dice| put(world, tenant, dice, vec![endpoint(API_SERVER, None)])),
    ("EndpointSlice: gateway", |world, tenant, dice| put(world, tenant, dice, vec![endpoint(GATEWAYS[0].1, None)])),
    ("EndpointSlice: unused address of the cluster", |world, tenant, dice| {
        let address = *pick(dice, &["10.64.250.1", "10.65.250.1", "10.96.0.1"]);
        put(world, tenant, dice, vec![endpoint(address, None)])
    }),
    ("EndpointSlice: external address", |world, tenant, dice| {
        let victim = world.victim(tenant, dice);
        put(world, tenant, dice, vec![endpoint(&external_backend(victim), None), endpoint("198.18.9.9", None)])
    }),
    ("EndpointSlice: unusable address", |world, tenant, dice| {
        let address = *pick(dice, &["127.0.0.1", "0.0.0.0", "224.0.0.1", "255.255.255.255", "300.0.0.1", ""]);
        put(world, tenant, dice, vec![endpoint(address, None), endpoint("198.18.9.8", None)])
    }),
    ("EndpointSlice: control characters", |world, tenant, dice| {
        let text = *pick(dice, &["a\u{7}b", "\u{0}", "a\nb", "\u{1b}[2J"]);
        named(world, tenant, dice, text)
    }),
    ("EndpointSlice: over-long names", |world, tenant, dice| {
        let text = "n".repeat(*pick(dice, &[253, 254, 1024, 2000, 70_000]));
        named(world, tenant, dice, &text)
    }),
    ("EndpointSlice: addresses of the other family", |world, tenant, dice| {
        trap(world, tenant, dice);
        let mut fields = slice(TRAP, &[endpoint("198.18.9.7", None), endpoint("2001:db8:9::1", None)]);
        fields["addressType"] = (*pick(dice, &["IPv4", "IPv6", "FQDN", "IPv5"])).into();
        world.put(id(Kind::EndpointSlice, tenant.namespace, "family"), fields);
        true
    }),
    ("EndpointSlice: many endpoints", |world, tenant, dice| {
        let count = *pick(dice, &[150, 300]);
        let address = |n: usize| format!("198.19.{}.{}", n / 250, 1 + n % 250);
        put(world, tenant, dice, (0..count).map(|n| endpoint(&address(n), None)).collect())
    }),
    ("EndpointSlice: the same endpoint many times", |world, tenant, dice| {
        let Some(own) = world.any_of(Kind::Pod, tenant, dice) else { return false };
        let pod = world.objects[&own].clone();
        let Some(address) = objects::pod_addresses(&pod).first().map(|it| (*it).to_owned()) else { return false };
        let uid = pod["metadata"]["uid"].as_str().unwrap_or_default();
        let names = (0..20).map(|n| endpoint(&address, (n % 3 > 0).then_some((tenant.namespace, &*own.name, uid))));
        let endpoints = names.collect();
        put(world, tenant, dice, endpoints)
    }),
    ("EndpointSlice: ports", |world, tenant, dice| {
        let ports = [
            json!([{"name": "main", "port": 0}]),
            json!([{"name": "main", "port": 65535}, {"name": "main", "port": 1}]),
            Value::Null,
        ];
        let ports = pick(dice, &ports).clone();
        edit(world, Kind::EndpointSlice, tenant, dice, |slice| slice["ports"] = ports)
    }),
    ("EndpointSlice: deleted", |world, tenant, dice| {
        let Some(id) = world.any_of(Kind::EndpointSlice, tenant, dice) else { return false };
        world.remove(&id)
    }),
];

/// Puts a slice of a Service that is a trap.
#[expect(clippy::needless_pass_by_value, reason = "its many callers make the value for it")]
fn put(world: &mut World, tenant: Tenant, dice: &mut Dice, endpoints: Vec<Value>) -> bool {
    trap(world, tenant, dice);
    let id = id(Kind::EndpointSlice, tenant.namespace, &name(dice));
    world.put(id, slice(TRAP, &endpoints));
    true
}

/// Puts a slice with the pod of another tenant. Without Pod objects nobody can say whose an address is.
fn of_pod(
    world: &mut World,
    tenant: Tenant,
    dice: &mut Dice,
    endpoint: impl Fn(&str, &str, &str, &str) -> Value,
) -> bool {
    let Some((other, address)) = world.pod_of_victim(tenant, dice).filter(|_| world.setting.has_pods) else {
        return false;
    };
    let uid = world.objects[&other]["metadata"]["uid"].as_str().unwrap_or_default().to_owned();
    put(world, tenant, dice, vec![endpoint(&other.namespace, &other.name, &address, &uid)])
}

/// Puts slices with a text in place of a name, one for each name: the error of one would hide that another one is accepted.
fn named(world: &mut World, tenant: Tenant, dice: &mut Dice, text: &str) -> bool {
    trap(world, tenant, dice);
    for n in 0..6 {
        let mut endpoint = endpoint(&format!("198.18.9.{}", 10 + n), Some((tenant.namespace, "pod", "uid")));
        match n {
            0 => endpoint["targetRef"]["name"] = text.into(),
            1 => endpoint["targetRef"]["namespace"] = text.into(),
            2 => endpoint["targetRef"]["uid"] = text.into(),
            3 => endpoint["nodeName"] = text.into(),
            4 => endpoint["zone"] = text.into(),
            _ => endpoint["hints"] = json!({"forZones": [{"name": text}]}),
        }
        world.put(id(Kind::EndpointSlice, tenant.namespace, &format!("named{n}")), slice(TRAP, &[endpoint]));
    }
    true
}
