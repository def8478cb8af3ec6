//! EgressPolicies: pods, addresses, pools and Services of others, and every number and list at its limits.

use serde_json::{Value, json};
use vipgate_dataplane::policy::limits::{
    MAX_ADDRESSES_OF_POLICY, MAX_GUARANTEED_PORTS, MAX_POOLS_OF_POLICY, MAX_SELECTOR_TERMS, MAX_SELECTORS_OF_POLICY,
    MAX_SESSIONS_PER_ENDPOINT,
};
use vipgate_policy::manifest::Kind;

use super::{Act, name};
use crate::source::tests::isolation::objects::{app, id};
use crate::source::tests::isolation::world::{GATEWAYS, GOLD, NODES, PUBLIC, Tenant, World};
use crate::source::tests::isolation::{Dice, pick};

pub(super) const ACTS: [(&str, Act); 18] = [
    ("EgressPolicy: pods of all namespaces", |world, tenant, dice| {
        let namespaces =
            [json!({}), json!({"matchLabels": {"kubernetes.io/metadata.name": world.protected().namespace}})];
        let selectors = json!([{"namespaceSelector": pick(dice, &namespaces), "podSelector": {}}]);
        put(world, tenant, dice, json!({"selectors": selectors, "addresses": [tenant.vip(PUBLIC, 14)]}))
    }),
    ("EgressPolicy: another's VIP", |world, tenant, dice| {
        let Some(vip) = world.vip_of_victim(tenant, dice) else { return false };
        put(world, tenant, dice, of_own_pods(json!([vip])))
    }),
    ("EgressPolicy: addresses of others", |world, tenant, dice| {
        let pod = world.pod_of_victim(tenant, dice).map(|(_, address)| address);
        let others = [GATEWAYS[0].1.to_owned(), NODES[0].1.to_owned(), format!("{GOLD}.9"), "192.0.2.250".to_owned()];
        let address = pod.filter(|_| dice.one_in(2)).unwrap_or_else(|| pick(dice, &others).clone());
        put(world, tenant, dice, of_own_pods(json!([address])))
    }),
    ("EgressPolicy: unusable address", |world, tenant, dice| {
        let address = *pick(dice, &["127.0.0.1", "0.0.0.0", "224.0.0.1", "::", "fe80::1", "255.255.255.255"]);
        put(world, tenant, dice, of_own_pods(json!([address])))
    }),
    ("EgressPolicy: a pool of others", |world, tenant, dice| {
        let pool = *pick(dice, &["gold", "none"]);
        put(world, tenant, dice, from_pool(pool, 1))
    }),
    ("EgressPolicy: as many addresses as possible, or one more", |world, tenant, dice| {
        let count = MAX_ADDRESSES_OF_POLICY + dice.below(2);
        if dice.one_in(2) {
            let pool = *pick(dice, &["six", "drawn"]);
            return put(world, tenant, dice, from_pool(pool, count as u64));
        }
        let addresses: Vec<String> = (0..count).map(|n| format!("203.0.{}.{}", 114 + n / 250, n % 250)).collect();
        put(world, tenant, dice, of_own_pods(json!(addresses)))
    }),
    ("EgressPolicy: billions of addresses", |world, tenant, dice| {
        put(world, tenant, dice, from_pool("six", 4_294_967_295))
    }),
    ("EgressPolicy: as many pools as possible, or one more", |world, tenant, dice| {
        let count = MAX_POOLS_OF_POLICY + dice.below(2);
        let pools = vec![json!({"name": "six"}); count];
        put(world, tenant, dice, json!({"selectors": [app("web0")], "pools": pools}))
    }),
    ("EgressPolicy: as many selectors as possible, or one more", |world, tenant, dice| {
        let count = MAX_SELECTORS_OF_POLICY + dice.below(2);
        let selectors: Vec<Value> = (0..count).map(|n| app(&format!("web{}", n % 4))).collect();
        put(world, tenant, dice, json!({"selectors": selectors, "pools": [{"name": "six"}]}))
    }),
    ("EgressPolicy: as many terms as possible, or one more", |world, tenant, dice| {
        let count = MAX_SELECTOR_TERMS + dice.below(2);
        let values: Vec<String> = (0..count).map(|n| format!("web{n}")).collect();
        let selector = json!({"matchExpressions": [{"key": "app", "operator": "In", "values": values}]});
        put(world, tenant, dice, json!({"selectors": [{"podSelector": selector}], "pools": [{"name": "six"}]}))
    }),
    ("EgressPolicy: numbers at their limits", |world, tenant, dice| {
        let (field, max) = *pick(
            dice,
            &[
                ("sessionsPerEndpoint", MAX_SESSIONS_PER_ENDPOINT),
                ("newSessionsPerSecond", MAX_SESSIONS_PER_ENDPOINT),
                ("guaranteedPortsPerEndpoint", MAX_GUARANTEED_PORTS),
            ],
        );
        let number = *pick(dice, &[0, 1, max, max + 1, u32::MAX as usize, u32::MAX as usize + 1]);
        let mut spec = from_pool("six", 1);
        spec["limits"] = json!({field: number});
        put(world, tenant, dice, spec)
    }),
    ("EgressPolicy: Service of another", |world, tenant, dice| {
        let Some((other, _)) = world.of_victim(Kind::Service, tenant, dice) else { return false };
        let mut reference = json!({"name": other.name});
        if dice.one_in(2) {
            reference["namespace"] = other.namespace.as_str().into();
        }
        put(world, tenant, dice, json!({"serviceRef": reference}))
    }),
    ("EgressPolicy: gateways", |world, tenant, dice| {
        let gateways = [
            json!({"names": ["gw-a", "gw-b", "gw-c"]}),
            json!({"names": ["none", "a\u{7}b"]}),
            json!({"selector": {"matchLabels": {"x": "y"}}}),
            json!({"selector": {}}),
        ];
        let mut spec = from_pool("six", 2);
        spec["gateways"] = pick(dice, &gateways).clone();
        put(world, tenant, dice, spec)
    }),
    ("EgressPolicy: addresses that a pool may have given", |world, tenant, _| {
        // All that it has, in two policies: one of them fits into a namespace's share.
        for at in 0..2 {
            let addresses: Vec<String> = (0..8).map(|n| format!("{PUBLIC}.{}", 64 + n * 2 + at)).collect();
            let policy = json!({"spec": of_own_pods(json!(addresses))});
            world.put(id(Kind::EgressPolicy, tenant.namespace, &format!("given{at}")), policy);
        }
        true
    }),
    ("EgressPolicy: whatever a pool has left", |world, tenant, dice| put(world, tenant, dice, from_pool("drawn", 16))),
    ("EgressPolicy: unknown field", |world, tenant, dice| {
        let mut spec = from_pool("six", 1);
        spec[*pick(dice, &["adresses", "a\u{7}b"])] = json!(["203.0.113.1"]);
        put(world, tenant, dice, spec)
    }),
    ("EgressPolicy: neither pods nor VIPs", |world, tenant, dice| {
        let specs = [json!({}), json!({"selectors": []}), json!({"selectors": [app("web0")]}), Value::Null];
        let spec = pick(dice, &specs).clone();
        put(world, tenant, dice, spec)
    }),
    ("EgressPolicy: deleted", |world, tenant, dice| {
        let Some(id) = world.any_of(Kind::EgressPolicy, tenant, dice) else { return false };
        world.remove(&id)
    }),
];

#[expect(clippy::needless_pass_by_value, reason = "its many callers make the value for it")]
fn of_own_pods(addresses: Value) -> Value {
    json!({"selectors": [{"podSelector": {}}], "addresses": addresses})
}

pub(super) fn from_pool(pool: &str, count: u64) -> Value {
    json!({"selectors": [{"podSelector": {}}], "pools": [{"name": pool, "count": count}]})
}

#[expect(clippy::needless_pass_by_value, reason = "its many callers make the value for it")]
fn put(world: &mut World, tenant: Tenant, dice: &mut Dice, spec: Value) -> bool {
    world.put(id(Kind::EgressPolicy, tenant.namespace, &name(dice)), json!({"spec": spec}));
    true
}
