//! Budget: the limits of the whole (`vipgate_dataplane::policy::limits`), given out by age.
//!
//! The oldest object is served first, and no namespace gets more than its share of a limit. So an object that doesn't fit is
//! a newcomer, and is set aside alone. Counts are steps and bytes, never seconds: every server decides alike.

use std::ops::{AddAssign, SubAssign};

use foldhash::HashMap;
use vipgate_dataplane::policy::limits::{
    BACKEND_PORTS, EGRESS_PREFIXES, ENDPOINT_VIPS, ENDPOINTS, LOOKUP_TABLES, Limit, POLICIES, SELECTOR_STEPS, SERVICES,
    VIPS,
};

use super::options::Share;

/// The limits, in the order of [`Usage`]; one of each address family is there twice.
const LIMITS: [Limit; 12] = [
    VIPS,
    SERVICES,
    POLICIES,
    EGRESS_PREFIXES,
    EGRESS_PREFIXES,
    SELECTOR_STEPS,
    ENDPOINTS,
    ENDPOINTS,
    ENDPOINT_VIPS,
    BACKEND_PORTS,
    BACKEND_PORTS,
    LOOKUP_TABLES,
];

/// What an object takes of each limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Usage {
    pub(super) vips: usize,
    pub(super) services: usize,
    pub(super) policies: usize,
    /// By family.
    pub(super) prefixes: [usize; 2],
    pub(super) selector_steps: usize,
    /// By family.
    pub(super) endpoints: [usize; 2],
    pub(super) endpoint_vips: usize,
    /// By family.
    pub(super) backend_ports: [usize; 2],
    pub(super) lookup_tables: usize,
}

impl Usage {
    fn counts(&self) -> [usize; LIMITS.len()] {
        let Self { vips, services, policies, prefixes, selector_steps, endpoints, .. } = *self;
        let Self { endpoint_vips, backend_ports, lookup_tables, .. } = *self;
        [
            vips,
            services,
            policies,
            prefixes[0],
            prefixes[1],
            selector_steps,
            endpoints[0],
            endpoints[1],
            endpoint_vips,
            backend_ports[0],
            backend_ports[1],
            lookup_tables,
        ]
    }
}

impl AddAssign<&Self> for Usage {
    fn add_assign(&mut self, other: &Self) {
        let add = |a: [usize; 2], b: [usize; 2]| [a[0] + b[0], a[1] + b[1]];
        *self = Self {
            vips: self.vips + other.vips,
            services: self.services + other.services,
            policies: self.policies + other.policies,
            prefixes: add(self.prefixes, other.prefixes),
            selector_steps: self.selector_steps + other.selector_steps,
            endpoints: add(self.endpoints, other.endpoints),
            endpoint_vips: self.endpoint_vips + other.endpoint_vips,
            backend_ports: add(self.backend_ports, other.backend_ports),
            lookup_tables: self.lookup_tables + other.lookup_tables,
        };
    }
}

/// Sums of usage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sum([usize; LIMITS.len()]);

impl AddAssign<&Usage> for Sum {
    fn add_assign(&mut self, usage: &Usage) {
        self.0.iter_mut().zip(usage.counts()).for_each(|(sum, count)| *sum = sum.saturating_add(count));
    }
}

impl SubAssign<&Usage> for Sum {
    fn sub_assign(&mut self, usage: &Usage) {
        self.0.iter_mut().zip(usage.counts()).for_each(|(sum, count)| *sum = sum.saturating_sub(count));
    }
}

/// What is taken, in all and by namespace. Objects without a namespace are the platform's: only the whole limits them.
#[derive(Clone, Debug, Default)]
pub(super) struct Totals {
    total: Sum,
    namespaces: HashMap<Box<str>, Sum>,
}

impl Totals {
    pub(super) fn add(&mut self, namespace: &str, usage: &Usage) {
        self.total += usage;
        if namespace.is_empty() {
            return;
        }
        match self.namespaces.get_mut(namespace) {
            Some(sum) => *sum += usage,
            None => *self.namespaces.entry(namespace.into()).or_default() += usage,
        }
    }

    pub(super) fn remove(&mut self, namespace: &str, usage: &Usage) {
        self.total -= usage;
        if let Some(sum) = self.namespaces.get_mut(namespace) {
            *sum -= usage;
            if *sum == Sum::default() {
                self.namespaces.remove(namespace);
            }
        }
    }

    /// Whether everything fits.
    pub(super) fn fits(&self, share: Share) -> bool {
        let max = LIMITS.map(|limit| limit.max);
        let shares = LIMITS.map(|limit| share.of(&limit));
        let is_within = |sum: &Sum, max: &[usize]| sum.0.iter().zip(max).all(|(count, max)| count <= max);
        is_within(&self.total, &max) && self.namespaces.values().all(|sum| is_within(sum, &shares))
    }
}

/// What has been granted so far. Who is older asks first.
pub(super) struct Grants {
    granted: Totals,
    share: Share,
}

impl Grants {
    pub(super) fn new(share: Share) -> Self {
        Self { granted: Totals::default(), share }
    }

    /// Grants an object what it takes, all of it or nothing.
    ///
    /// # Errors
    /// The limit that it would exceed.
    pub(super) fn grant(&mut self, namespace: &str, usage: &Usage) -> Result<(), String> {
        let (none, share) = (Sum::default(), self.share);
        let own = self.granted.namespaces.get(namespace).unwrap_or(&none);
        let counts = usage.counts().into_iter().zip(own.0).zip(self.granted.total.0).zip(LIMITS);
        for (((count, own), total), limit) in counts.filter(|(((count, _), _), _)| *count > 0) {
            let (what, part) = (limit.what, share.of(&limit));
            if !namespace.is_empty() && own + count > part {
                return Err(format!(
                    "needs {count} {what}, and older objects of namespace {namespace} have {own}: one namespace may \
                     have {part} (`namespace_share` of {})",
                    limit.max
                ));
            }
            if total + count > limit.max {
                return Err(format!(
                    "needs {count} {what}, and older objects have {total}: the maximum is {}",
                    limit.max
                ));
            }
        }
        self.granted.add(namespace, usage);
        Ok(())
    }
}
