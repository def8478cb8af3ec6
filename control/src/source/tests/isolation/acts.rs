//! Hostile acts: what a tenant may write in its own namespace, whatever it says of others. Each is a class of its own.

mod bursts;
mod limits;
mod pods;
mod policies;
mod services;
mod slices;

use serde_json::Value;
use vipgate_policy::manifest::{Kind, ObjectId};

use super::Dice;
use super::objects::{EGRESS, id, service};
use super::world::{OUTSIDE, Tenant, World};

/// An act; returns whether the world has what it needs.
pub(super) type Act = fn(&mut World, Tenant, &mut Dice) -> bool;

/// The acts of tenants in small worlds.
pub(super) fn of_tenants() -> Vec<(&'static str, Act)> {
    [&services::ACTS[..], &slices::ACTS, &policies::ACTS, &pods::ACTS, &bursts::SMALL].concat()
}

/// What only the kubelet of a node may write: the status of pods and nodes.
pub(super) fn of_kubelets() -> Vec<(&'static str, Act)> {
    pods::OF_KUBELETS.to_vec()
}

/// The acts in big worlds.
pub(super) fn of_big_worlds() -> Vec<(&'static str, Act)> {
    bursts::BIG.to_vec()
}

/// The acts at limits of one object, in big worlds, too.
pub(super) fn at_limits() -> Vec<(&'static str, Act)> {
    limits::ACTS.to_vec()
}

/// All acts.
pub(super) fn all() -> Vec<(&'static str, Act)> {
    [of_tenants(), of_kubelets(), of_big_worlds(), at_limits()].concat()
}

/// Names with which a tenant's slices and policies reach for others.
const TRAP: &str = "trap";

/// A Service of the tenant's own that makes whatever its slices list an endpoint of its egress policy.
fn trap(world: &mut World, tenant: Tenant, dice: &mut Dice) -> ObjectId {
    let trap = id(Kind::Service, tenant.namespace, TRAP);
    if !world.objects.contains_key(&trap) {
        let mut fields = service(&[tenant.vip(OUTSIDE, 7)], 7000);
        fields["metadata"]["annotations"][EGRESS] = "true".into();
        world.put(trap.clone(), fields);
    }
    if dice.one_in(2) {
        let policy = serde_json::json!({"spec": {"serviceRef": {"name": TRAP}}});
        world.put(id(Kind::EgressPolicy, tenant.namespace, TRAP), policy);
    }
    trap
}

/// One of few names, so that acts change what others have made.
fn name(dice: &mut Dice) -> String {
    format!("x{}", dice.below(4))
}

/// Edits a random object of a kind of the tenant.
fn edit(world: &mut World, kind: Kind, tenant: Tenant, dice: &mut Dice, edit: impl FnOnce(&mut Value)) -> bool {
    let Some(id) = world.any_of(kind, tenant, dice) else { return false };
    world.edit(&id, edit)
}
