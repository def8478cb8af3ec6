//! A world: what the platform team has set up, the objects of all tenants, and their changes.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use vipgate_policy::manifest::{Kind, ObjectId};

use super::objects::{id, with_identity};
use super::{Dice, pick};

/// How a source names objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    /// A file for each namespace.
    Files,
    /// A key for each object.
    Etcd,
    /// An object of the API each.
    Kubernetes,
}

/// How old the objects of the tenant are that nothing may happen to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Age {
    /// Older than all others.
    Oldest,
    /// Younger than all others.
    Youngest,
    /// Nothing has a timestamp, and its names sort first.
    Unknown,
}

/// What doesn't change in a world.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is drawn by itself")]
pub(super) struct Setting {
    pub(super) shape: Shape,
    pub(super) age: Age,
    pub(super) gateways: usize,
    /// Whether the source has pods.
    pub(super) has_pods: bool,
    /// Whether kubelets are hostile, too.
    pub(super) has_hostile_kubelets: bool,
    pub(super) has_node_agents: bool,
    /// Whether a namespace has a large share of the limits, and a tenant fills it.
    pub(super) is_big: bool,
}

/// The limits' share of a namespace in a small world: a few objects exceed it.
pub(super) const SMALL_SHARE: f64 = 0.0008;

/// The ranges of VIPs: for all, for policies of all, and for namespaces of tier gold.
pub(super) const PUBLIC: &str = "203.0.113";
pub(super) const GOLD: &str = "198.51.100";
/// VIPs outside of pools.
pub(super) const OUTSIDE: &str = "192.0.2";

pub(super) const NODES: [(&str, &str); 2] = [("node-0", "10.0.0.1"), ("node-1", "10.0.0.2")];
pub(super) const API_SERVER: &str = "10.0.0.100";
pub(super) const GATEWAYS: [(&str, &str); 3] = [("gw-a", "10.0.1.1"), ("gw-b", "10.0.1.2"), ("gw-c", "10.0.1.3")];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tenant {
    /// Part of its addresses. That of the tenant that nothing may happen to is 0.
    pub(super) index: usize,
    pub(super) namespace: &'static str,
}

/// A change of the objects.
#[derive(Clone, Debug)]
pub(super) enum Change {
    Put(ObjectId, Value),
    Remove(ObjectId),
    /// The entry with this object can't be read.
    Break(ObjectId),
    /// It can be read again.
    Mend(ObjectId),
}

impl Change {
    pub(super) fn id(&self) -> &ObjectId {
        let (Self::Put(id, _) | Self::Remove(id) | Self::Break(id) | Self::Mend(id)) = self;
        id
    }
}

/// Changes that become visible at once.
#[derive(Clone, Debug, Default)]
pub(super) struct Batch {
    /// The policy server restarts before.
    pub(super) is_restart: bool,
    pub(super) changes: Vec<Change>,
}

/// All objects as they are, whether or not they can be read.
#[derive(Debug)]
pub(super) struct World {
    pub(super) setting: Setting,
    pub(super) tenants: Vec<Tenant>,
    pub(super) objects: BTreeMap<ObjectId, Value>,
    pub(super) batch: Batch,
    clock: u32,
}

impl Setting {
    pub(super) fn random(dice: &mut Dice) -> Self {
        let shape = *pick(dice, &[Shape::Files, Shape::Etcd, Shape::Kubernetes]);
        let ages = [Age::Oldest, Age::Oldest, Age::Youngest, Age::Unknown];
        let age = match *pick(dice, &ages) {
            // The API sets timestamps.
            Age::Unknown if shape == Shape::Kubernetes => Age::Oldest,
            age => age,
        };
        Self {
            shape,
            age,
            gateways: *pick(dice, &[0, 1, 3]),
            has_pods: shape == Shape::Kubernetes || !dice.one_in(5),
            has_hostile_kubelets: dice.one_in(3),
            has_node_agents: dice.one_in(3),
            is_big: false,
        }
    }
}

impl World {
    /// A world with the platform's objects only; `others`: tenants besides the protected one, three at most.
    pub(super) fn new(setting: Setting, others: usize, dice: &mut Dice) -> Self {
        let first = if setting.age == Age::Youngest { "zulu" } else { "alpha" };
        let names = std::iter::once(first).chain(["bravo", "charlie", "delta"].into_iter().take(others));
        let tenants = names.enumerate().map(|(index, namespace)| Tenant { index, namespace }).collect();
        let mut world = Self { setting, tenants, objects: BTreeMap::new(), batch: Batch::default(), clock: 0 };
        world.add_pools(dice);
        world.add_nodes(dice);
        world
    }

    fn add_pools(&mut self, dice: &mut Dice) {
        let gold = json!({"matchLabels": {"tier": "gold"}});
        for (name, spec) in [
            ("public", json!({"ranges": [format!("{PUBLIC}.0/26")]})),
            ("drawn", json!({"ranges": [format!("{PUBLIC}.64/28"), "2001:db8:7::/124"]})),
            ("six", json!({"ranges": ["2001:db8:6::/64"], "announce": "BGP"})),
            ("gold", json!({"ranges": [format!("{GOLD}.0/26")], "announce": "BGP", "namespaces": gold})),
        ] {
            self.put(id(Kind::AddressPool, "", name), json!({"spec": spec}));
        }
        for tenant in self.tenants.clone() {
            let is_gold = tenant.index == 0 || dice.one_in(4);
            let labels = if is_gold { json!({"tier": "gold"}) } else { json!({"team": tenant.namespace}) };
            self.put(id(Kind::Namespace, "", tenant.namespace), json!({"metadata": {"labels": labels}}));
        }
    }

    fn add_nodes(&mut self, dice: &mut Dice) {
        for (at, (name, address)) in GATEWAYS.into_iter().take(self.setting.gateways).enumerate() {
            let mut spec = json!({"peerAddress": address});
            if let Some((node, _)) = NODES.get(at) {
                spec["node"] = (*node).into();
            }
            if dice.one_in(4) {
                spec["maxAddresses"] = 6.into();
            }
            if dice.one_in(2) {
                spec["zone"] = ["z1", "z2"][dice.below(2)].into();
            }
            self.put(id(Kind::Gateway, "", name), json!({"spec": spec}));
        }
        for (at, (name, address)) in NODES.into_iter().enumerate() {
            let cidr = format!("10.{}.0.0/16", 64 + at);
            let node = json!({
                "metadata": {"labels": {"topology.kubernetes.io/zone": format!("z{}", at + 1)}},
                "spec": {"podCIDR": cidr, "podCIDRs": [cidr]},
                "status": {"addresses": [{"type": "InternalIP", "address": address}]},
            });
            self.put(id(Kind::Node, "", name), node);
        }
        self.put(id(Kind::ServiceCidr, "", "kubernetes"), json!({"spec": {"cidrs": ["10.96.0.0/16"]}}));
        let service = json!({"spec": {"type": "ClusterIP", "ports": [{"name": "https", "port": 443}]}});
        self.put(id(Kind::Service, "default", "kubernetes"), service);
        let slice = super::objects::slice("kubernetes", &[super::objects::endpoint(API_SERVER, None)]);
        self.put(id(Kind::EndpointSlice, "default", "kubernetes"), slice);
        // Where there are pods, there is one always.
        let pod = super::objects::pod(&json!({}), NODES[0].0, "uid-dns", &["10.64.255.1".to_owned()]);
        self.put(id(Kind::Pod, "kube-system", "dns"), pod);
    }

    /// The tenant that nothing may happen to.
    pub(super) fn protected(&self) -> Tenant {
        self.tenants[0]
    }

    /// Adds an object, or replaces it by another one with its age.
    pub(super) fn put(&mut self, id: ObjectId, fields: Value) {
        let created = match self.objects.get(&id) {
            Some(before) => before["metadata"]["creationTimestamp"].as_str().map(str::to_owned),
            None => self.timestamp(&id.namespace),
        };
        let value = with_identity(&id, created.as_deref(), fields);
        self.set(id, value);
    }

    /// Edits an object; returns whether there is one.
    pub(super) fn edit(&mut self, id: &ObjectId, edit: impl FnOnce(&mut Value)) -> bool {
        let Some(mut value) = self.objects.get(id).cloned() else { return false };
        edit(&mut value);
        self.set(id.clone(), value);
        true
    }

    fn set(&mut self, id: ObjectId, value: Value) {
        self.objects.insert(id.clone(), value.clone());
        self.record(Change::Put(id, value));
    }

    /// Removes an object; returns whether there was one.
    pub(super) fn remove(&mut self, id: &ObjectId) -> bool {
        let is_removed = self.objects.remove(id).is_some();
        if is_removed {
            self.record(Change::Remove(id.clone()));
        }
        is_removed
    }

    /// Changes all objects back to what they were.
    pub(super) fn restore(&mut self, before: &BTreeMap<ObjectId, Value>) {
        let added: Vec<ObjectId> = self.objects.keys().filter(|id| !before.contains_key(*id)).cloned().collect();
        for id in &added {
            self.remove(id);
        }
        for (id, value) in before {
            if self.objects.get(id) != Some(value) {
                self.set(id.clone(), value.clone());
            }
        }
    }

    /// Records a change, unless the source doesn't have this kind.
    pub(super) fn record(&mut self, change: Change) {
        if self.setting.has_pods || change.id().kind != Kind::Pod {
            self.batch.changes.push(change);
        }
    }

    /// The timestamp of a new object of a namespace.
    fn timestamp(&mut self, namespace: &str) -> Option<String> {
        self.clock += 1;
        let year = match (self.setting.age, self.tenants.iter().find(|tenant| tenant.namespace == namespace)) {
            (Age::Unknown, _) => return None,
            (_, None) => 2010,
            (Age::Youngest, Some(Tenant { index: 0, .. })) => 2029,
            (_, Some(tenant)) => 2020 + tenant.index,
        };
        let seconds = self.clock;
        Some(format!("{year}-01-{:02}T{:02}:{:02}:00Z", 1 + seconds / 1440 % 28, seconds / 60 % 24, seconds % 60))
    }

    /// A number that no other object has.
    pub(super) fn unique(&mut self) -> u32 {
        self.clock += 1;
        self.clock
    }

    /// The objects of a kind of a namespace.
    pub(super) fn of(&self, kind: Kind, namespace: &str) -> Vec<ObjectId> {
        let is_its = |id: &&ObjectId| id.kind == kind && id.namespace == namespace;
        self.objects.keys().filter(is_its).cloned().collect()
    }

    /// A random object of a kind of a tenant.
    pub(super) fn any_of(&self, kind: Kind, tenant: Tenant, dice: &mut Dice) -> Option<ObjectId> {
        let all = self.of(kind, tenant.namespace);
        (!all.is_empty()).then(|| pick(dice, &all).clone())
    }

    /// A random other tenant, mostly the one that nothing may happen to.
    pub(super) fn victim(&self, tenant: Tenant, dice: &mut Dice) -> Tenant {
        let others: Vec<Tenant> = self.tenants.iter().copied().filter(|other| *other != tenant).collect();
        if tenant.index > 0 && !dice.one_in(4) { self.protected() } else { *pick(dice, &others) }
    }

    /// A random object of a kind of another tenant.
    pub(super) fn of_victim(&self, kind: Kind, tenant: Tenant, dice: &mut Dice) -> Option<(ObjectId, &Value)> {
        let victim = self.victim(tenant, dice);
        let id = self.any_of(kind, victim, dice)?;
        let value = self.objects.get(&id)?;
        Some((id, value))
    }

    /// A random VIP of another tenant's Services.
    pub(super) fn vip_of_victim(&self, tenant: Tenant, dice: &mut Dice) -> Option<String> {
        let (_, service) = self.of_victim(Kind::Service, tenant, dice)?;
        super::objects::vips(service).first().map(|vip| (*vip).to_owned())
    }

    /// The IPv4 VIPs of another tenant's Services.
    pub(super) fn vips_of_victim(&self, tenant: Tenant, dice: &mut Dice) -> Vec<String> {
        let victim = self.victim(tenant, dice);
        let services =
            self.objects.iter().filter(|(id, _)| id.kind == Kind::Service && id.namespace == victim.namespace);
        let vips = services.flat_map(|(_, service)| super::objects::vips(service));
        vips.filter(|vip| !vip.contains(':')).map(str::to_owned).collect()
    }

    /// A random VIP of another tenant's Services in one of these ranges.
    pub(super) fn vip_of_victim_in(&self, ranges: &[&str], tenant: Tenant, dice: &mut Dice) -> Option<String> {
        let mut vips = self.vips_of_victim(tenant, dice);
        vips.retain(|vip| ranges.iter().any(|range| vip.starts_with(*range)));
        (!vips.is_empty()).then(|| pick(dice, &vips).clone())
    }

    /// A random pod of another tenant, with its first address.
    pub(super) fn pod_of_victim(&self, tenant: Tenant, dice: &mut Dice) -> Option<(ObjectId, String)> {
        let (id, pod) = self.of_victim(Kind::Pod, tenant, dice)?;
        let address = super::objects::pod_addresses(pod).first().map(|address| (*address).to_owned())?;
        Some((id, address))
    }
}
