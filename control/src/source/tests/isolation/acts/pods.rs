//! Pods with others' labels and addresses, and what only a kubelet writes: the status of pods and nodes.

use serde_json::{Value, json};
use vipgate_policy::manifest::{Kind, ObjectId};

use super::{Act, name};
use crate::source::tests::isolation::objects::{self, id, pod};
use crate::source::tests::isolation::tenant::{end_pod, write_slices};
use crate::source::tests::isolation::world::{GATEWAYS, GOLD, NODES, OUTSIDE, PUBLIC, Tenant, World};
use crate::source::tests::isolation::{Dice, pick};

pub(super) const ACTS: [(&str, Act); 7] = [
    ("Pod: labels of another's", |world, tenant, dice| {
        let Some((_, other)) = world.of_victim(Kind::Pod, tenant, dice) else { return false };
        let labels = other["metadata"]["labels"].clone();
        let address = format!("10.64.{}.{}", tenant.index * 16 + 9, 1 + dice.below(200));
        put(world, tenant, dice, &labels, &[address])
    }),
    ("Pod: has the address of a terminating one of another", |world, tenant, dice| {
        let victim = world.victim(tenant, dice);
        reuse(world, tenant, victim, dice)
    }),
    ("Pod: terminating, and another has its address", |world, tenant, dice| {
        let victim = world.victim(tenant, dice);
        reuse(world, victim, tenant, dice)
    }),
    ("Pod: finished, with the address of another", |world, tenant, dice| {
        let Some((_, address)) = world.pod_of_victim(tenant, dice) else { return false };
        let id = id(Kind::Pod, tenant.namespace, &name(dice));
        let uid = format!("uid-{}", world.unique());
        let mut fields = pod(&json!({"app": "web0"}), NODES[0].0, &uid, &[address]);
        fields["status"]["phase"] = (*pick(dice, &["Succeeded", "Failed"])).into();
        world.put(id, fields);
        true
    }),
    ("Pod: weights", |world, tenant, dice| {
        let weight = *pick(dice, &["0", "1", "256", "257", "-1", "a\u{7}b"]);
        let Some(id) = world.any_of(Kind::Pod, tenant, dice) else { return false };
        world.edit(&id, |pod| pod["metadata"]["annotations"]["vipgate.io/weight"] = weight.into())
    }),
    ("Pod: deleted", |world, tenant, dice| {
        let Some(id) = world.any_of(Kind::Pod, tenant, dice) else { return false };
        world.remove(&id);
        write_slices(world, tenant);
        true
    }),
    ("Pod: host network", |world, tenant, dice| {
        let id = id(Kind::Pod, tenant.namespace, "on-host");
        let uid = format!("uid-{}", world.unique());
        let (node, address) = *pick(dice, &NODES);
        let mut fields = pod(&json!({"app": "web0"}), node, &uid, &[address.to_owned()]);
        fields["spec"]["hostNetwork"] = true.into();
        world.put(id, fields);
        true
    }),
];

pub(super) const OF_KUBELETS: [(&str, Act); 9] = [
    ("kubelet: pod with the address of another's", |world, tenant, dice| {
        let Some((_, address)) = world.pod_of_victim(tenant, dice) else { return false };
        put(world, tenant, dice, &json!({"app": "web0"}), &[address])
    }),
    ("kubelet: pod that isn't ready with the address of another's", |world, tenant, dice| {
        let Some((_, address)) = world.pod_of_victim(tenant, dice) else { return false };
        let id = id(Kind::Pod, tenant.namespace, &name(dice));
        let uid = format!("uid-{}", world.unique());
        let mut fields = pod(&json!({"app": "web0"}), NODES[0].0, &uid, &[address]);
        fields["status"]["conditions"] = json!([{"type": "Ready", "status": "False"}]);
        world.put(id, fields);
        true
    }),
    ("kubelet: pod with another's VIP in a pool", |world, tenant, dice| {
        let Some(vip) = world.vip_of_victim_in(&[PUBLIC, GOLD], tenant, dice) else { return false };
        put(world, tenant, dice, &json!({"app": "web0"}), &[vip])
    }),
    ("kubelet: pod with another's VIP outside of pools", |world, tenant, dice| {
        let Some(vip) = world.vip_of_victim_in(&[OUTSIDE], tenant, dice) else { return false };
        put(world, tenant, dice, &json!({"app": "web0"}), &[vip])
    }),
    ("kubelet: pod with a host's address", |world, tenant, dice| {
        let host = *pick(dice, &[NODES[0].1, NODES[1].1, GATEWAYS[0].1]);
        put(world, tenant, dice, &json!({"app": "web0"}), &[host.to_owned()])
    }),
    ("kubelet: pod with unusable addresses", |world, tenant, dice| {
        let address = *pick(dice, &["127.0.0.1", "0.0.0.0", "300.0.0.1", "", "a\u{7}b"]);
        put(world, tenant, dice, &json!({"app": "web0"}), &[address.to_owned()])
    }),
    ("kubelet: node with another's VIPs", |world, tenant, dice| {
        let vips = world.vips_of_victim(tenant, dice);
        !vips.is_empty() && add_addresses(world, &vips)
    }),
    ("kubelet: node with a pod's address", |world, tenant, dice| {
        let Some((_, address)) = world.pod_of_victim(tenant, dice).filter(|_| world.setting.has_pods) else {
            return false;
        };
        add_addresses(world, &[address])
    }),
    ("kubelet: node with texts", |world, _, dice| {
        let text = *pick(dice, &["a\u{7}b", "node.example", "", "127.0.0.1"]);
        add_addresses(world, &[text.to_owned()])
    }),
];

fn put(world: &mut World, tenant: Tenant, dice: &mut Dice, labels: &Value, addresses: &[String]) -> bool {
    let id = id(Kind::Pod, tenant.namespace, &name(dice));
    let uid = format!("uid-{}", world.unique());
    world.put(id, pod(labels, pick(dice, &NODES).0, &uid, addresses));
    true
}

/// A pod of one tenant terminates, and one of another tenant gets its address, as a CNI plugin gives it.
fn reuse(world: &mut World, next: Tenant, before: Tenant, dice: &mut Dice) -> bool {
    let is_ending = |world: &World, id: &ObjectId| !world.objects[id]["metadata"]["deletionTimestamp"].is_null();
    let ending = |world: &World| world.of(Kind::Pod, before.namespace).into_iter().find(|id| is_ending(world, id));
    if ending(world).is_none() && !end_pod(world, before, dice) {
        return false;
    }
    let Some(old) = ending(world) else { return false };
    let addresses = objects::pod_addresses(&world.objects[&old]).into_iter().map(str::to_owned).collect::<Vec<_>>();
    let id = id(Kind::Pod, next.namespace, "web0-next");
    let uid = format!("uid-{}", world.unique());
    let fields = pod(&json!({"app": "web0"}), NODES[0].0, &uid, &addresses);
    world.put(id, fields);
    write_slices(world, next);
    true
}

/// Adds addresses to a node's status, in place of what was added before.
fn add_addresses(world: &mut World, addresses: &[String]) -> bool {
    world.edit(&id(Kind::Node, "", NODES[1].0), |node| {
        let own = node["status"]["addresses"][0].clone();
        let added = addresses.iter().map(|address| json!({"type": "ExternalIP", "address": address}));
        node["status"]["addresses"] = std::iter::once(own).chain(added).collect();
    })
}
