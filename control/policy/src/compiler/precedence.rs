//! Precedence of policies and annotated Services over each other.

use foldhash::HashMap;

use super::inventory::{Inventory, NamespacedName, ObjectRef, age_key};
use crate::manifest::EgressPolicy;

/// What claims endpoints, as indices of the inventory, in the order of precedence, highest first. It is the same for all
/// inventories with the same policies and Services.
#[derive(Clone, Debug)]
pub(super) struct Precedence {
    /// The policies, each with its Service.
    pub(super) policies: Vec<(usize, Option<usize>)>,
    /// The annotated Services.
    pub(super) services: Vec<usize>,
}

impl Precedence {
    pub(super) fn new(inventory: &Inventory<'_>) -> Self {
        let Inventory { services, policies, .. } = inventory;
        let indices: HashMap<NamespacedName<'_>, usize> =
            services.iter().enumerate().map(|(at, service)| (service.namespaced_name(), at)).collect();
        let service = |policy| service_of(policy).and_then(|service| indices.get(&service).copied());
        let mut policies: Vec<_> = policies.iter().enumerate().map(|(at, policy)| (at, service(policy))).collect();
        policies.sort_by_key(|(at, _)| {
            let ObjectRef { id, body, .. } = &inventory.policies[*at];
            (body.spec.service_ref.is_none(), age_key(body.metadata.creation_timestamp.as_ref(), id))
        });
        let mut services: Vec<usize> = (0..services.len()).filter(|at| services[*at].body.egress).collect();
        services.sort_by_key(|at| age_key(inventory.services[*at].body.created.as_ref(), inventory.services[*at].id));
        Self { policies, services }
    }
}

/// The Service that a policy refers to. An EgressPolicy refers to one of its own namespace.
pub(super) fn service_of<'a>(policy: &ObjectRef<'a, EgressPolicy>) -> Option<NamespacedName<'a>> {
    let service = policy.body.spec.service_ref.as_ref()?;
    let namespace = service.namespace.as_ref().filter(|_| !policy.id.kind.is_namespaced());
    Some((namespace.unwrap_or(&policy.id.namespace), &service.name))
}
