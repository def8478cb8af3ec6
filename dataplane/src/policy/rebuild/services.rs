//! Applies changes of Services.

use std::net::IpAddr;
use std::sync::Arc;

use foldhash::HashSet;

use super::Rebuild;
use crate::flow::address::V6;
use crate::flow::ids::{FrontendId, ServiceId};
use crate::flow::listener::Listener;
use crate::policy::change::Entries;
use crate::policy::compiled::Family;
use crate::policy::service::Service;
use crate::policy::spec::{ServicePortSpec, ServiceSpec};
use crate::wire::protocol;

impl Rebuild<'_> {
    /// Applies all changes of Services. A frontend may move from one Service to another, so removals go first.
    pub(super) fn change_services(&mut self, changes: &Entries<ServiceSpec>) {
        for name in changes.removed() {
            self.remove_service(name);
        }
        for spec in changes.changed() {
            let before =
                self.references.services.get(&spec.name).and_then(|id| self.policy.services[id.0 as usize].clone());
            if let Some(before) = before {
                self.remove_frontends::<u32>(&before, Some(spec));
                self.remove_frontends::<V6>(&before, Some(spec));
            }
        }
        for spec in changes.changed() {
            self.set_service(spec);
        }
    }

    fn remove_service(&mut self, name: &str) {
        let Some(id) = self.references.services.remove(name) else { return };
        let Some(service) = Arc::make_mut(&mut self.policy.services)[id.0 as usize].take() else { return };
        self.references.free_services.push(id);
        self.remove_frontends::<u32>(&service, None);
        self.remove_frontends::<V6>(&service, None);
        self.set_listeners::<u32>(Some(&service), None);
        self.set_listeners::<V6>(Some(&service), None);
    }

    fn set_service(&mut self, spec: &ServiceSpec) {
        let slots = Arc::make_mut(&mut self.policy.services);
        let known = self.references.services.get(&spec.name).copied();
        let id = known.or_else(|| self.references.free_services.pop()).unwrap_or(ServiceId(slots.len() as u32));
        if slots.len() <= id.0 as usize {
            slots.push(None);
        }
        let before = slots[id.0 as usize].take();
        let after = Arc::new(Service::new(spec, id, before.as_deref()));
        slots[id.0 as usize] = Some(after.clone());
        self.references.services.insert(spec.name.clone(), id);
        if before.as_ref().is_some_and(|before| before.spec.source_ranges != spec.source_ranges) {
            spec.vips.iter().for_each(|vip| self.touch_vip(*vip));
        }
        for family in [Self::set_family::<u32>, Self::set_family::<V6>] {
            family(self, before.as_deref(), &after);
        }
    }

    fn set_family<A: Family>(&mut self, before: Option<&Service>, after: &Service) {
        for (at, id) in after.frontends::<A>() {
            let known = self.policy.frontend(&at);
            if known != Some(id) {
                Arc::make_mut(&mut A::index_mut(&mut self.policy).frontends).insert(at, id);
            }
            if known.is_none() {
                self.freshness.touch_vip(at.address);
            }
        }
        self.set_listeners::<A>(before, Some(after));
    }

    /// Removes the frontends that a Service no longer has.
    fn remove_frontends<A: Family>(&mut self, before: &Service, after: Option<&ServiceSpec>) {
        let is_kept = |spec: &ServiceSpec, at: &Listener<A>| {
            let vip: IpAddr = at.address.to_ip();
            let listens = |it: &ServicePortSpec| (it.port, it.protocol) == (at.port, at.protocol);
            let is_health = spec.health.is_some_and(|it| (it.port, protocol::TCP) == (at.port, at.protocol));
            spec.vips.contains(&vip) && (is_health || spec.ports.iter().any(listens))
        };
        for (at, _) in before.frontends::<A>() {
            if after.is_some_and(|spec| is_kept(spec, &at)) || self.policy.frontend(&at).is_none() {
                continue;
            }
            Arc::make_mut(&mut A::index_mut(&mut self.policy).frontends).remove(&at);
            self.freshness.touch_vip(at.address);
        }
    }

    /// Updates the backends of a Service; sessions of removed backends are revalidated.
    fn set_listeners<A: Family>(&mut self, before: Option<&Service>, after: Option<&Service>) {
        let all = |service: Option<&Service>| -> Vec<(Listener<A>, FrontendId)> {
            service.map(|service| service.listeners::<A>().collect()).unwrap_or_default()
        };
        let (old, new) = (all(before), all(after));
        if old == new {
            return;
        }
        let (before, after): (HashSet<_>, HashSet<_>) = (old.iter().collect(), new.iter().collect());
        let backends = &mut A::index_mut(&mut self.policy).backends;
        for removed @ &(at, id) in &old {
            if !after.contains(removed) {
                backends.set(at, id, false);
                self.freshness.touch_endpoint(at.address);
            }
        }
        for added @ &(at, id) in &new {
            if !before.contains(added) {
                backends.set(at, id, true);
            }
        }
    }
}
