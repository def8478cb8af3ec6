//! What an ordinary tenant has and changes: Services with VIPs, policies, pods, and the slices that Kubernetes writes for them.

use serde_json::{Value, json};
use vipgate_policy::manifest::{Kind, ObjectId};

use super::objects::{self, EGRESS, app, endpoint, id, slice};
use super::world::{GOLD, NODES, OUTSIDE, PUBLIC, Tenant, World};
use super::{Dice, pick};

/// Services of a tenant, at most.
const SERVICES: usize = 3;
/// Pods of a Service, at most.
const PODS: usize = 3;
/// VIPs of a tenant in each range.
const VIPS: usize = 15;

/// A change of a world by a tenant; returns whether there was something to change.
type Act = fn(&mut World, Tenant, &mut Dice) -> bool;

/// Ordinary changes, by class.
pub(super) const CHANGES: [(&str, Act); 14] = [
    ("tenant: Service added", add_service),
    ("tenant: Service removed", |world, tenant, dice| remove(world, Kind::Service, tenant, dice)),
    ("tenant: Service edited", edit_service),
    ("tenant: policy added", add_policy),
    ("tenant: policy removed", |world, tenant, dice| remove(world, Kind::EgressPolicy, tenant, dice)),
    ("tenant: pod added", add_pod),
    ("tenant: pod removed", |world, tenant, dice| remove(world, Kind::Pod, tenant, dice)),
    ("tenant: pod replaced", replace_pod),
    ("tenant: pod terminating", end_pod),
    ("tenant: pod finished", finish_pod),
    ("tenant: pod ready or not", toggle_ready),
    ("tenant: gone endpoint with the address of a ready one", add_stale_slice),
    ("tenant: host-network pod", add_host_pod),
    ("tenant: external backend", add_external_backend),
];

impl Tenant {
    /// The `n`th VIP in a range.
    pub(super) fn vip(self, range: &str, n: usize) -> String {
        format!("{range}.{}", 1 + self.index * VIPS + n % VIPS)
    }

    fn pod_address(self, service: usize, n: usize) -> String {
        format!("10.{}.{}.{}", 64 + n % 2, self.index * 16 + service, 1 + n)
    }
}

/// Adds what a tenant begins with.
pub(super) fn set_up(world: &mut World, tenant: Tenant, dice: &mut Dice) {
    for _ in 0..=dice.below(SERVICES) {
        add_service(world, tenant, dice);
    }
    for _ in 0..dice.below(3) {
        add_policy(world, tenant, dice);
    }
    for _ in 0..dice.below(3) {
        let (_, change) = pick(dice, &CHANGES);
        change(world, tenant, dice);
    }
}

/// Adds whatever hostile acts reach for: VIPs in pools and outside of them, pods of each Service, a host-network pod, a backend
/// outside of the cluster, and an address from a pool.
pub(super) fn set_up_fully(world: &mut World, tenant: Tenant, dice: &mut Dice) {
    let is_protected = tenant == world.protected();
    for (n, range) in [PUBLIC, OUTSIDE, if is_protected { GOLD } else { PUBLIC }].into_iter().enumerate() {
        let mut service = objects::service(&[tenant.vip(range, n)], 8000 + n as u16);
        service["spec"]["externalTrafficPolicy"] = "Local".into();
        service["spec"]["healthCheckNodePort"] = (30_000 + tenant.index * 100 + n).into();
        // The pods of the third one are those of the policy below.
        if n < 2 {
            service["metadata"]["annotations"][EGRESS] = "true".into();
        }
        world.put(id(Kind::Service, tenant.namespace, &format!("web{n}")), service);
        for _ in 0..PODS {
            put_pod(world, tenant, n, dice);
        }
    }
    add_host_pod(world, tenant, dice);
    add_external_backend(world, tenant, dice);
    let policy = json!({"spec": {"selectors": [app("web2")], "pools": [{"name": "drawn"}]}});
    world.put(id(Kind::EgressPolicy, tenant.namespace, "drawn2"), policy);
    // Others keep what is left of their share of VIPs for acts.
    let policies = if is_protected { dice.below(3) } else { 0 };
    for _ in 0..policies {
        add_policy(world, tenant, dice);
    }
}

/// The number of a Service or pod, from its name.
fn number(id: &ObjectId) -> usize {
    let digits: String = id.name.chars().skip_while(|c| !c.is_ascii_digit()).take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap_or_default()
}

fn add_service(world: &mut World, tenant: Tenant, dice: &mut Dice) -> bool {
    let n = dice.below(SERVICES);
    let id = id(Kind::Service, tenant.namespace, &format!("web{n}"));
    if world.objects.contains_key(&id) {
        return false;
    }
    let range = if tenant.index == 0 { *pick(dice, &[PUBLIC, GOLD, OUTSIDE]) } else { *pick(dice, &[PUBLIC, OUTSIDE]) };
    let mut vips = vec![tenant.vip(range, n)];
    if dice.one_in(4) {
        vips.push(tenant.vip(OUTSIDE, 8 + n));
    }
    // Two of its Services may share a VIP.
    if n == 2 && dice.one_in(2) {
        let first = objects::id(Kind::Service, tenant.namespace, "web0");
        if let Some(shared) =
            world.objects.get(&first).and_then(|it| objects::vips(it).first().map(|vip| (*vip).to_owned()))
        {
            vips = vec![shared];
        }
    }
    let mut service = objects::service(&vips, 8000 + n as u16);
    if dice.one_in(2) {
        service["metadata"]["annotations"][EGRESS] = "true".into();
    }
    if dice.one_in(3) {
        service["spec"]["externalTrafficPolicy"] = "Local".into();
        service["spec"]["healthCheckNodePort"] = (30_000 + tenant.index * 100 + n).into();
    }
    if dice.one_in(4) {
        service["metadata"]["annotations"]["vipgate.io/maglev-table-size"] = "251".into();
    }
    world.put(id, service);
    for _ in 0..=dice.below(2) {
        put_pod(world, tenant, n, dice);
    }
    true
}

fn edit_service(world: &mut World, tenant: Tenant, dice: &mut Dice) -> bool {
    let Some(id) = world.any_of(Kind::Service, tenant, dice) else { return false };
    let kind = dice.below(6);
    let n = number(&id);
    world.edit(&id, |service| match kind {
        0 => {
            let is_annotated = !service["metadata"]["annotations"][EGRESS].is_null();
            service["metadata"]["annotations"][EGRESS] = (!is_annotated).to_string().into();
        }
        1 => {
            service["spec"]["ports"] =
                json!([{"name": "main", "port": 8000 + n}, {"name": "dns", "port": 53, "protocol": "UDP"}]);
        }
        2 => service["spec"]["sessionAffinity"] = "ClientIP".into(),
        3 => service["spec"]["type"] = "ClusterIP".into(),
        4 => service["spec"]["type"] = "LoadBalancer".into(),
        _ => service["spec"]["loadBalancerSourceRanges"] = json!(["198.18.0.0/15", "2001:db8::/32"]),
    })
}

fn add_policy(world: &mut World, tenant: Tenant, dice: &mut Dice) -> bool {
    let n = dice.below(SERVICES);
    let (name, spec) = match dice.below(4) {
        0 => (format!("of-web{n}"), json!({"serviceRef": {"name": format!("web{n}")}})),
        1 => {
            let count = 1 + dice.below(2);
            let pool = *pick(dice, &["drawn", "drawn", "six"]);
            let spec = json!({"selectors": [app(&format!("web{n}"))], "pools": [{"name": pool, "count": count}]});
            (format!("drawn{n}"), spec)
        }
        2 => {
            let vip = tenant.vip(PUBLIC, 10 + n);
            (format!("listed{n}"), json!({"selectors": [app(&format!("web{n}"))], "addresses": [vip]}))
        }
        _ => {
            let spec = json!({
                "selectors": [{"podSelector": {}}],
                "addresses": [tenant.vip(PUBLIC, 13)],
                "destinationCIDRs": ["198.18.0.0/15", "2001:db8:9::/48"],
                "excludedCIDRs": ["198.18.7.0/24"],
                "limits": {"sessionsPerEndpoint": 1000},
            });
            ("rest".to_owned(), spec)
        }
    };
    let id = id(Kind::EgressPolicy, tenant.namespace, &name);
    if world.objects.contains_key(&id) {
        return false;
    }
    let mut spec = spec;
    if dice.one_in(4) && world.setting.gateways > 0 {
        spec["gateways"] = json!({"names": ["gw-a"]});
    }
    if dice.one_in(6) {
        spec["zoneAffinity"] = (*pick(dice, &["Prefer", "Require"])).into();
    }
    world.put(id, json!({"spec": spec}));
    true
}

/// Removes an ordinary object, and what Kubernetes removes with it.
fn remove(world: &mut World, kind: Kind, tenant: Tenant, dice: &mut Dice) -> bool {
    let Some(id) = world.any_of(kind, tenant, dice) else { return false };
    world.remove(&id);
    write_slices(world, tenant);
    true
}

fn add_pod(world: &mut World, tenant: Tenant, dice: &mut Dice) -> bool {
    let n = dice.below(SERVICES);
    put_pod(world, tenant, n, dice)
}

/// Adds a pod of a Service, if there are few.
fn put_pod(world: &mut World, tenant: Tenant, service: usize, dice: &mut Dice) -> bool {
    let n = dice.below(PODS);
    let id = id(Kind::Pod, tenant.namespace, &format!("web{service}-{n}"));
    if world.objects.contains_key(&id) {
        return false;
    }
    let mut addresses = vec![tenant.pod_address(service, n)];
    if dice.one_in(4) {
        addresses.push(format!("fd00:{}:{service}::{}", tenant.index + 1, n + 1));
    }
    let uid = format!("uid-{}", world.unique());
    let labels = json!({"app": format!("web{service}")});
    let mut pod = objects::pod(&labels, NODES[n % 2].0, &uid, &addresses);
    if dice.one_in(5) {
        pod["metadata"]["annotations"]["vipgate.io/weight"] = "3".into();
    }
    world.put(id, pod);
    write_slices(world, tenant);
    true
}

/// A pod is deleted, and another one with its name has its address at once.
fn replace_pod(world: &mut World, tenant: Tenant, dice: &mut Dice) -> bool {
    let Some(id) = world.any_of(Kind::Pod, tenant, dice) else { return false };
    let pod = world.objects[&id].clone();
    world.remove(&id);
    let uid = format!("uid-{}", world.unique());
    let mut next = json!({"metadata": {"labels": pod["metadata"]["labels"], "uid": uid}, "spec": pod["spec"], "status": pod["status"]});
    next["status"]["conditions"] = json!([{"type": "Ready", "status": "True"}]);
    world.put(id, next);
    write_slices(world, tenant);
    true
}

pub(super) fn end_pod(world: &mut World, tenant: Tenant, dice: &mut Dice) -> bool {
    let Some(id) = world.any_of(Kind::Pod, tenant, dice) else { return false };
    world.edit(&id, |pod| pod["metadata"]["deletionTimestamp"] = "2035-01-01T00:00:00Z".into());
    write_slices(world, tenant);
    true
}

fn finish_pod(world: &mut World, tenant: Tenant, dice: &mut Dice) -> bool {
    let Some(id) = world.any_of(Kind::Pod, tenant, dice) else { return false };
    world.edit(&id, |pod| pod["status"]["phase"] = "Succeeded".into());
    write_slices(world, tenant);
    true
}

fn toggle_ready(world: &mut World, tenant: Tenant, dice: &mut Dice) -> bool {
    let Some(id) = world.any_of(Kind::Pod, tenant, dice) else { return false };
    world.edit(&id, |pod| {
        let is_ready = pod["status"]["conditions"][0]["status"] == "True";
        pod["status"]["conditions"] = json!([{"type": "Ready", "status": if is_ready { "False" } else { "True" }}]);
    });
    write_slices(world, tenant);
    true
}

/// A slice that still lists a pod whose address another one has now.
fn add_stale_slice(world: &mut World, tenant: Tenant, dice: &mut Dice) -> bool {
    let Some(pod) = world.any_of(Kind::Pod, tenant, dice) else { return false };
    let Some(address) = objects::pod_addresses(&world.objects[&pod]).first().map(|it| (*it).to_owned()) else {
        return false;
    };
    let service = format!("web{}", number(&pod));
    let mut gone = endpoint(&address, (!dice.one_in(3)).then_some((tenant.namespace, "gone", "uid-gone")));
    gone["conditions"] = json!({"ready": false, "serving": false, "terminating": true});
    gone["nodeName"] = pick(dice, &NODES).0.into();
    let name = pick(dice, &["a-stale", "z-stale"]);
    world.put(id(Kind::EndpointSlice, tenant.namespace, name), slice(&service, &[gone]));
    true
}

/// A pod on the host network, which is a backend of a Service.
fn add_host_pod(world: &mut World, tenant: Tenant, dice: &mut Dice) -> bool {
    let (node, address) = *pick(dice, &NODES);
    let uid = format!("uid-{}", world.unique());
    let mut pod = objects::pod(&json!({"app": "agent"}), node, &uid, &[address.to_owned()]);
    pod["spec"]["hostNetwork"] = true.into();
    world.put(id(Kind::Pod, tenant.namespace, "agent"), pod);
    let endpoint = endpoint(address, Some((tenant.namespace, "agent", &uid)));
    world.put(id(Kind::EndpointSlice, tenant.namespace, "agent"), slice("web0", &[endpoint]));
    true
}

/// A backend outside of the cluster.
fn add_external_backend(world: &mut World, tenant: Tenant, _: &mut Dice) -> bool {
    let external = slice("web1", &[endpoint(&external_backend(tenant), None)]);
    world.put(id(Kind::EndpointSlice, tenant.namespace, "external"), external);
    true
}

/// The address of the backend outside of the cluster.
pub(super) fn external_backend(tenant: Tenant) -> String {
    format!("198.18.{}.1", tenant.index)
}

/// Writes the slices of a tenant's Services, as Kubernetes does: one for each family.
pub(super) fn write_slices(world: &mut World, tenant: Tenant) {
    let pods = world.of(Kind::Pod, tenant.namespace);
    for service in (0..SERVICES).map(|n| format!("web{n}")) {
        for (suffix, is_v6) in [("v4", false), ("v6", true)] {
            let of_pod = |id: &ObjectId| endpoint_of(id, &world.objects[id], &service, is_v6);
            let endpoints: Vec<Value> = pods.iter().filter_map(of_pod).collect();
            let id = id(Kind::EndpointSlice, tenant.namespace, &format!("{service}-{suffix}"));
            let next = slice(&service, &endpoints);
            let before = world.objects.get(&id);
            if endpoints.is_empty() {
                world.remove(&id);
            } else if before.is_none_or(|before| before["endpoints"] != next["endpoints"]) {
                world.put(id, next);
            }
        }
    }
}

/// The endpoint of a pod in the slices of a Service of its own.
fn endpoint_of(id: &ObjectId, pod: &Value, service: &str, is_v6: bool) -> Option<Value> {
    let metadata = &pod["metadata"];
    let is_finished = matches!(pod["status"]["phase"].as_str(), Some("Succeeded" | "Failed"));
    if metadata["labels"]["app"] != service || is_finished || pod["spec"]["hostNetwork"] == true {
        return None;
    }
    let addresses = objects::pod_addresses(pod);
    let address = addresses.into_iter().find(|address| address.contains(':') == is_v6)?;
    let mut endpoint = endpoint(address, Some((&id.namespace, &id.name, metadata["uid"].as_str()?)));
    let (is_ready, is_ending) =
        (pod["status"]["conditions"][0]["status"] == "True", !metadata["deletionTimestamp"].is_null());
    endpoint["conditions"] = json!({"ready": is_ready && !is_ending, "serving": is_ready, "terminating": is_ending});
    endpoint["nodeName"] = pod["spec"]["nodeName"].clone();
    Some(endpoint)
}
