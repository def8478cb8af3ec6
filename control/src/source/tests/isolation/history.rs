//! Histories: random sequences of ordinary changes and hostile acts, in batches.

use vipgate_coverage::Coverage;
use vipgate_policy::manifest::Kind;

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
    /// A random history; counts what happens in it.
    pub(super) fn random(seed: u64, shape: Option<Shape>, coverage: &Coverage) -> Self {
        let mut dice = Dice::new(seed);
        let mut setting = Setting::random(&mut dice);
        if let Some(shape) = shape {
            setting.shape = shape;
            setting.has_pods |= shape == Shape::Kubernetes;
            if shape == Shape::Kubernetes && setting.age == Age::Unknown {
                setting.age = Age::Oldest;
            }
        }
        // Big worlds take long.
        setting.is_big = shape.is_none() && dice.one_in(40);
        let mut world = World::new(setting, &mut dice);
        let tenants = world.tenants.clone();
        for tenant in &tenants {
            tenant::set_up(&mut world, *tenant, &mut dice);
        }
        let mut batches = vec![std::mem::take(&mut world.batch)];
        let mut broken = Vec::new();
        for at in 0..BATCHES {
            if setting.is_big && at == 0 {
                act(&mut world, tenants[1], &acts::of_big_worlds(), &mut dice, coverage);
            }
            for _ in 0..=dice.below(CHANGES) {
                change(&mut world, &tenants, &mut broken, &mut dice, coverage);
            }
            let is_restart = dice.one_in(8);
            if is_restart {
                coverage.count("restart");
            }
            batches.push(Batch { is_restart, ..std::mem::take(&mut world.batch) });
        }
        let others = tenants[1..].iter().map(|tenant| tenant.namespace).collect();
        Self { setting, protected: tenants[0].namespace, others, batches }
    }

    /// Whether an object is a tenant's other than the protected one.
    pub(super) fn is_of_others(&self, change: &Change) -> bool {
        let id = change.id();
        let namespace = if id.kind == Kind::Namespace { &id.name } else { &id.namespace };
        self.others.contains(&namespace.as_str())
    }
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
