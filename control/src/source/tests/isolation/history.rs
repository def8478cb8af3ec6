//! Histories: sequences of ordinary changes and hostile acts, in batches. Random ones, and those of focused worlds.

use vipgate_coverage::Coverage;
use vipgate_policy::manifest::{Kind, ObjectId};

use super::focus::Focus;
use super::world::{Age, Batch, Change, Setting, Shape, Tenant, World};
use super::{Dice, acts, pick, tenant};

/// Batches of a history after the first one.
const BATCHES: usize = 6;
/// Changes of a batch, at most.
const CHANGES: usize = 6;

/// Changes of the objects of a world, from none.
#[derive(Clone, Debug)]
pub(super) struct History {
    pub(super) setting: Setting,
    /// The namespace of the tenant that nothing may happen to.
    pub(super) protected: &'static str,
    /// The namespaces of the others.
    pub(super) others: Vec<&'static str>,
    pub(super) batches: Vec<Batch>,
}

impl History {
    /// The history of the world with a number; counts what happens in it. `shape`: a random one, through the product's source.
    pub(super) fn of_world(number: u64, shape: Option<Shape>, coverage: &Coverage) -> Self {
        let dice = &mut Dice::new(number);
        let random = random_setting(shape, dice);
        let focus = Focus::of_world(number).filter(|_| shape.is_none());
        let mut world = match &focus {
            Some(focus) => World::new(focus.setting(random), 1, dice),
            None => World::new(random, 1 + dice.below(3), dice),
        };
        let tenants = world.tenants.clone();
        for tenant in &tenants {
            let set_up = if focus.is_some() { tenant::set_up_fully } else { tenant::set_up };
            set_up(&mut world, *tenant, dice);
        }
        let mut batches = vec![std::mem::take(&mut world.batch)];
        batches.extend(match &focus {
            Some(focus) => focus.batches(&mut world, dice, coverage),
            None => random_batches(&mut world, &tenants, dice, coverage),
        });
        let others = tenants[1..].iter().map(|tenant| tenant.namespace).collect();
        Self { setting: world.setting, protected: tenants[0].namespace, others, batches }
    }

    /// A change without what other tenants and hostile kubelets write; `None`: nothing is left.
    pub(super) fn without_others(&self, change: &Change) -> Option<Change> {
        let id = change.id();
        let namespace = if id.kind == Kind::Namespace { &id.name } else { &id.namespace };
        if self.others.contains(&namespace.as_str()) {
            return None;
        }
        let mut change = change.clone();
        if let Change::Put(ObjectId { kind: Kind::Node, .. }, node) = &mut change
            && let Some(addresses) = node["status"]["addresses"].as_array_mut()
        {
            // The first one is the node's own.
            addresses.truncate(1);
        }
        Some(change)
    }
}

fn random_setting(shape: Option<Shape>, dice: &mut Dice) -> Setting {
    let mut setting = Setting::random(dice);
    if let Some(shape) = shape {
        setting.shape = shape;
        setting.has_pods |= shape == Shape::Kubernetes;
        if shape == Shape::Kubernetes && setting.age == Age::Unknown {
            setting.age = Age::Oldest;
        }
    }
    // Big worlds take long.
    setting.is_big = shape.is_none() && dice.one_in(80);
    setting
}

fn random_batches(world: &mut World, tenants: &[Tenant], dice: &mut Dice, coverage: &Coverage) -> Vec<Batch> {
    let (mut batches, mut broken) = (Vec::with_capacity(BATCHES), Vec::new());
    for at in 0..BATCHES {
        if world.setting.is_big && at == 0 {
            act(world, tenants[1], &acts::of_big_worlds(), dice, coverage);
        }
        for _ in 0..=dice.below(CHANGES) {
            change(world, tenants, &mut broken, dice, coverage);
        }
        batches.push(take_batch(world, dice, coverage));
    }
    batches
}

/// Ends a batch of changes.
pub(super) fn take_batch(world: &mut World, dice: &mut Dice, coverage: &Coverage) -> Batch {
    let is_restart = dice.one_in(8);
    if is_restart {
        coverage.count("restart");
    }
    Batch { is_restart, ..std::mem::take(&mut world.batch) }
}

/// One change of a random tenant.
fn change(world: &mut World, tenants: &[Tenant], broken: &mut Vec<Change>, dice: &mut Dice, coverage: &Coverage) {
    if dice.one_in(12) {
        return break_or_mend(world, tenants, broken, dice, coverage);
    }
    if dice.one_in(4) {
        let (class, change) = pick(dice, &tenant::CHANGES);
        if change(world, *pick(dice, tenants), dice) {
            coverage.count(*class);
        }
        return;
    }
    let hostile = *pick(dice, &tenants[1..]);
    let of_kubelets = world.setting.has_hostile_kubelets && world.setting.has_pods && dice.one_in(4);
    let all = if of_kubelets { acts::of_kubelets() } else { acts::of_tenants() };
    act(world, hostile, &all, dice, coverage);
}

fn act(world: &mut World, tenant: Tenant, all: &[(&'static str, acts::Act)], dice: &mut Dice, coverage: &Coverage) {
    let (class, act) = *pick(dice, all);
    if act(world, tenant, dice) {
        coverage.count(class);
    }
}

/// An entry becomes unreadable, or can be read again. An API server has no such objects.
fn break_or_mend(
    world: &mut World,
    tenants: &[Tenant],
    broken: &mut Vec<Change>,
    dice: &mut Dice,
    coverage: &Coverage,
) {
    if world.setting.shape == Shape::Kubernetes {
        return;
    }
    if let Some(change) = broken.pop() {
        coverage.count("entry: readable again");
        world.record(change);
        return;
    }
    let kind = *pick(dice, &[Kind::Service, Kind::EgressPolicy, Kind::EndpointSlice]);
    let tenant = *pick(dice, tenants);
    if let Some(id) = world.any_of(kind, tenant, dice) {
        coverage.count("entry: unreadable");
        world.record(Change::Break(id.clone()));
        broken.push(Change::Mend(id));
    }
}
