//! Services, status included: VIPs, ports and names of others, every field at its limits, and legal changes.

use serde_json::{Value, json};
use vipgate_dataplane::policy::limits::MAX_VIPS_OF_SERVICE;
use vipgate_policy::manifest::Kind;

use super::{Act, edit, name};
use crate::source::tests::isolation::objects::{self, EGRESS, id, service};
use crate::source::tests::isolation::tenant::external_backend;
use crate::source::tests::isolation::world::{API_SERVER, GATEWAYS, GOLD, NODES, OUTSIDE, PUBLIC, Tenant, World};
use crate::source::tests::isolation::{Dice, pick};

pub(super) const ACTS: [(&str, Act); 22] = [
    ("Service: VIP of another", |world, tenant, dice| {
        let Some(vip) = world.vip_of_victim(tenant, dice) else { return false };
        put(world, tenant, dice, &[vip], 7100)
    }),
    ("Service: port of another's VIP", |world, tenant, dice| {
        let Some((_, other)) = world.of_victim(Kind::Service, tenant, dice) else { return false };
        let vips: Vec<String> = objects::vips(other).into_iter().map(str::to_owned).collect();
        let port = other["spec"]["ports"][0]["port"].as_u64().unwrap_or(8000) as u16;
        put(world, tenant, dice, &vips, port)
    }),
    ("Service: announcement and policy of a shared VIP", |world, tenant, dice| {
        let Some(vip) = world.vip_of_victim(tenant, dice) else { return false };
        let mut fields = service(&[vip], 7200);
        fields["metadata"]["annotations"]["vipgate.io/announce"] = (*pick(dice, &["BGP", "L2"])).into();
        let policy = json!({"spec": {"serviceRef": {"name": "shared"}, "gateways": {"names": ["gw-c"]}, "zoneAffinity": "Require"}});
        world.put(id(Kind::Service, tenant.namespace, "shared"), fields);
        world.put(id(Kind::EgressPolicy, tenant.namespace, "shared"), policy);
        true
    }),
    ("Service: other announce mode of another's VIP outside of pools", |world, tenant, dice| {
        let Some(vip) = world.vip_of_victim_in(&[OUTSIDE], tenant, dice) else { return false };
        let mut fields = service(&[vip], 7201);
        fields["metadata"]["annotations"]["vipgate.io/announce"] = "BGP".into();
        world.put(id(Kind::Service, tenant.namespace, "announce"), fields);
        true
    }),
    ("Service: health check port of another", |world, tenant, dice| {
        let Some((_, other)) = world.of_victim(Kind::Service, tenant, dice) else { return false };
        let Some(port) = other["spec"]["healthCheckNodePort"].as_u64() else { return false };
        let mut fields = service(&[tenant.vip(PUBLIC, 3)], 7300);
        fields["spec"]["externalTrafficPolicy"] = "Local".into();
        fields["spec"]["healthCheckNodePort"] = port.into();
        world.put(id(Kind::Service, tenant.namespace, "health"), fields);
        true
    }),
    ("Service: address of another's pod", |world, tenant, dice| {
        let Some((_, address)) = world.pod_of_victim(tenant, dice) else { return false };
        put(world, tenant, dice, &[address], 7400)
    }),
    ("Service: address of a gateway", |world, tenant, dice| {
        put(world, tenant, dice, &[GATEWAYS[0].1.to_owned()], 7401)
    }),
    ("Service: addresses of hosts", |world, tenant, _| {
        // One each: where one is refused, the others may not be.
        for (n, host) in [NODES[0].1, NODES[1].1, API_SERVER].into_iter().enumerate() {
            let fields = service(&[host.to_owned()], 7402);
            world.put(id(Kind::Service, tenant.namespace, &format!("host{n}")), fields);
        }
        true
    }),
    ("Service: address of another's external backend", |world, tenant, dice| {
        let victim = world.victim(tenant, dice);
        put(world, tenant, dice, &[external_backend(victim)], 7403)
    }),
    ("Service: address of a pool for others", |world, tenant, dice| {
        let vip = format!("{GOLD}.{}", 1 + dice.below(20));
        put(world, tenant, dice, &[vip], 7404)
    }),
    ("Service: unusable VIP", |world, tenant, dice| {
        let vip = *pick(
            dice,
            &["127.0.0.1", "0.0.0.0", "224.0.0.1", "::1", "fe80::1", "::ffff:203.0.113.1", "255.255.255.255"],
        );
        put(world, tenant, dice, &[vip.to_owned()], 7405)
    }),
    ("Service: name of another's", |world, tenant, dice| {
        let Some((other, _)) = world.of_victim(Kind::Service, tenant, dice) else { return false };
        world.put(id(Kind::Service, tenant.namespace, &other.name), service(&[tenant.vip(OUTSIDE, 4)], 7500));
        true
    }),
    ("Service: as many VIPs as possible, or one more", |world, tenant, dice| {
        let count = MAX_VIPS_OF_SERVICE + dice.below(2);
        let vips: Vec<String> = (0..count).map(|n| format!("192.0.{}.{n}", 32 + tenant.index)).collect();
        put(world, tenant, dice, &vips, 7501)
    }),
    ("Service: becomes ClusterIP", |world, tenant, dice| {
        edit(world, Kind::Service, tenant, dice, |service| {
            service["metadata"]["annotations"][EGRESS] = "true".into();
            service["spec"]["type"] = "ClusterIP".into();
        })
    }),
    ("Service: becomes another class's", |world, tenant, dice| {
        let class = *pick(dice, &["example.com/other", "", "a\u{7}b"]);
        edit(world, Kind::Service, tenant, dice, |service| {
            service["metadata"]["annotations"][EGRESS] = "true".into();
            service["spec"]["loadBalancerClass"] = class.into();
        })
    }),
    ("Service: becomes vipgate's again", |world, tenant, dice| {
        let has_class = dice.one_in(2);
        edit(world, Kind::Service, tenant, dice, |service| {
            service["spec"]["type"] = "LoadBalancer".into();
            service["spec"]["loadBalancerClass"] = if has_class { "vipgate.io/vipgate".into() } else { Value::Null };
        })
    }),
    ("Service: loses its VIPs", |world, tenant, dice| {
        let has_status = dice.one_in(2);
        edit(world, Kind::Service, tenant, dice, |service| {
            service["status"] =
                if has_status { json!({"loadBalancer": {"ingress": [{"hostname": "a.example"}]}}) } else { json!({}) };
        })
    }),
    ("Service: deleted", |world, tenant, dice| {
        let Some(id) = world.any_of(Kind::Service, tenant, dice) else { return false };
        world.remove(&id)
    }),
    ("Service: invalid field", |world, tenant, dice| {
        let (path, value) = *pick(dice, &INVALID);
        let value: Value = serde_json::from_str(value).unwrap();
        edit(world, Kind::Service, tenant, dice, |service| {
            *service.pointer_mut(path).unwrap_or(&mut Value::Null) = value;
        })
    }),
    ("Service: annotations", |world, tenant, dice| {
        let (key, value) = *pick(dice, &ANNOTATIONS);
        edit(world, Kind::Service, tenant, dice, |service| {
            service["metadata"]["annotations"][format!("vipgate.io/{key}")] = value.into();
        })
    }),
    ("Service: control characters", |world, tenant, dice| {
        let text = *pick(dice, &["a\u{7}b", "\u{0}", "a\nb", "\u{202e}txt"]);
        edit(world, Kind::Service, tenant, dice, |service| service["spec"]["ports"][0]["name"] = text.into())
    }),
    ("Service: over-long port name", |world, tenant, dice| {
        let text = "n".repeat(*pick(dice, &[63, 64, 255, 2000, 70_000]));
        edit(world, Kind::Service, tenant, dice, |service| service["spec"]["ports"][0]["name"] = text.as_str().into())
    }),
];

/// Fields with values that can't be understood.
const INVALID: [(&str, &str); 6] = [
    ("/spec/ports/0/port", "0"),
    ("/spec/ports/0/port", "65536"),
    ("/spec/ports/0/port", "-1"),
    ("/spec/ports/0/targetPort", "70000"),
    ("/status/loadBalancer/ingress/0/ip", "\"300.1.1.1\""),
    ("/spec/type", "7"),
];

const ANNOTATIONS: [(&str, &str); 12] = [
    ("maglev-table-size", "131071"),
    ("maglev-table-size", "7"),
    ("maglev-table-size", "131072"),
    ("maglev-table-size", "-1"),
    ("egress", "true"),
    ("egress", "maybe"),
    ("announce", "BGP"),
    ("announce", "L3"),
    ("pool", "gold"),
    ("sharing-key", "all"),
    ("addresses", "203.0.113.1,198.51.100.1"),
    ("unknown\u{7}", "x"),
];

/// Puts a Service with VIPs, often as an egress policy.
fn put(world: &mut World, tenant: Tenant, dice: &mut Dice, vips: &[String], port: u16) -> bool {
    let mut fields = service(vips, port);
    if !dice.one_in(3) {
        fields["metadata"]["annotations"][EGRESS] = "true".into();
    }
    world.put(id(Kind::Service, tenant.namespace, &name(dice)), fields);
    true
}
