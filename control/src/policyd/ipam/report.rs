//! What address management reports: log events, Events of Services, and the values of its metrics.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use vipgate_policy::ipam::{AllocationPlan, PoolUsage, Reason};
use vipgate_policy::manifest::ServiceRequest;

use crate::policyd::events::ObjectEvent;
use crate::policyd::object_state::ObjectState;

/// The state of the last plan, for metrics.
#[derive(Debug, Default)]
pub(super) struct Report {
    /// The pools.
    pub(super) usage: Vec<PoolUsage>,
    /// Services that don't get what they ask for, by reason.
    pub(super) refused: BTreeMap<Reason, u64>,
}

/// What was reported, so that it is reported once.
#[derive(Debug)]
pub(super) struct Reporter {
    objects: Arc<ObjectState>,
    /// Why a Service gets no address, by path.
    refused: BTreeMap<String, String>,
    /// Addresses outside of pools, by path.
    outside: BTreeMap<String, String>,
    /// Addresses of vipgate's Services, by path.
    known: BTreeMap<String, Vec<IpAddr>>,
}

impl Reporter {
    pub(super) fn new(objects: Arc<ObjectState>) -> Self {
        let (refused, outside, known) = Default::default();
        Self { objects, refused, outside, known }
    }

    /// Reports what is new in a plan.
    pub(super) fn report(&mut self, services: &[ServiceRequest], plan: &AllocationPlan) -> Report {
        let (mut refused, mut outside) = (BTreeMap::new(), BTreeMap::new());
        let mut report = Report { usage: plan.usage.clone(), refused: BTreeMap::new() };
        for decision in &plan.decisions {
            let path = services[decision.service].path();
            if let Some(refusal) = &decision.refusal {
                *report.refused.entry(refusal.reason).or_default() += 1;
                if self.refused.get(&path) != Some(&refusal.text) {
                    let (reason, why) = (refusal.reason.as_str(), &refusal.text);
                    tracing::warn!(event = "address_refused", service = path, reason, "{path} gets no address: {why}");
                    self.objects
                        .record_for_service(&path, |service| ObjectEvent::warning(service, "AddressRefused", why));
                }
                refused.insert(path.clone(), refusal.text.clone());
            }
            if !decision.outside.is_empty() {
                let addresses = text(&decision.outside);
                if self.outside.get(&path) != Some(&addresses) {
                    tracing::warn!(
                        event = "address_outside_pools",
                        service = path,
                        addresses,
                        "{path} keeps {addresses}, which no AddressPool would give to it any more: add the address to \
                         a pool for this Service, or name another one with `vipgate.io/addresses`"
                    );
                }
                outside.insert(path, addresses);
            }
        }
        (self.refused, self.outside) = (refused, outside);
        let has_own = |service: &&ServiceRequest| service.is_managed && !service.current.is_empty();
        let known: BTreeMap<String, Vec<IpAddr>> =
            services.iter().filter(has_own).map(|service| (service.path(), service.current.clone())).collect();
        let mut gone = std::mem::replace(&mut self.known, known);
        gone.retain(|path, _| !self.known.contains_key(path));
        if !gone.is_empty() {
            // What is written to a Service that remains is reported then.
            for service in services {
                gone.remove(&service.path());
            }
        }
        for (path, addresses) in gone {
            self.report_released(&path, &addresses);
        }
        report
    }

    /// Forgets everything: another server leads.
    pub(super) fn clear(&mut self) {
        *self = Self::new(self.objects.clone());
    }

    /// Reports what a write has changed.
    pub(super) fn report_write(&self, path: &str, before: &[IpAddr], after: &[IpAddr]) {
        let without = |all: &[IpAddr], others: &[IpAddr]| -> Vec<IpAddr> {
            all.iter().filter(|address| !others.contains(address)).copied().collect()
        };
        let (given, released) = (without(after, before), without(before, after));
        if !given.is_empty() {
            let addresses = text(&given);
            tracing::info!(event = "address_assigned", service = path, addresses, "{path} gets {addresses}");
            let message = format!("gets {addresses}");
            self.objects.record_for_service(path, |service| ObjectEvent::normal(service, "AddressAssigned", &message));
        }
        if !released.is_empty() {
            self.report_released(path, &released);
        }
    }

    fn report_released(&self, path: &str, addresses: &[IpAddr]) {
        let addresses = text(addresses);
        tracing::info!(
            event = "address_released",
            service = path,
            addresses,
            "{path} gives up {addresses}: for others it is free after `reuseAfter` of its AddressPool"
        );
        let message = format!("gives up {addresses}: for others it is free after `reuseAfter` of its AddressPool");
        self.objects.record_for_service(path, |service| ObjectEvent::normal(service, "AddressReleased", &message));
    }
}

fn text(addresses: &[IpAddr]) -> String {
    addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
