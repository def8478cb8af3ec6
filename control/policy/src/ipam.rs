//! Address management (LB IPAM): which addresses of AddressPools the Services of vipgate's class get.
//!
//! Pure: what a Service has is in its status, and who had an address before is in the record. A Service keeps its addresses
//! as long as it asks for nothing else; a pool that shrinks takes none away. What is given up in one plan is free in the
//! next, when the status says so, and quarantined for others: two writes in any order never give one address to two Services.

mod history;
mod planner;
mod pools;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::Timestamp;

use self::planner::Planner;
use self::pools::Pools;
use crate::address_record::{AddressRecord, Recorded};
use crate::compiler::{Tenancy, namespace_labels};
use crate::manifest::{Body, Family, Object, ObjectId, ServiceRequest};
use crate::shortage::Shortage;

/// What Services get addresses from, and what they have, at one time.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// What namespaces may use.
    pub tenancy: Tenancy,
    /// The objects in force: pools, namespaces and Services; others are ignored.
    pub objects: Vec<Arc<Object>>,
    /// Addresses that policies have of their own, or are to have, with their owners; by address.
    pub policy_addresses: Vec<(IpAddr, ObjectId)>,
    /// Objects that are there but can't be read.
    pub unreadable: BTreeSet<ObjectId>,
    /// Whether all objects are known.
    pub is_complete: bool,
}

/// Why a Service doesn't get an address, by kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// No pool is for it.
    NoPool,
    /// The pools for it have no free address.
    Exhausted,
    /// The address that it names is in use.
    InUse,
    /// The address that it names is in no pool for it.
    NotInPool,
    /// The address that it names is of a family that it doesn't have.
    Family,
    /// The addresses that it names can't be read.
    Invalid,
    /// The addresses that nobody has are quarantined.
    Quarantined,
    /// Its namespace may have no more addresses of the pool.
    NamespaceLimit,
}

impl Reason {
    /// All reasons.
    pub const ALL: [Self; 8] = [
        Self::NoPool,
        Self::Exhausted,
        Self::InUse,
        Self::NotInPool,
        Self::Family,
        Self::Invalid,
        Self::Quarantined,
        Self::NamespaceLimit,
    ];

    /// Its name in metrics and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NoPool => "no_pool",
            Self::Exhausted => "exhausted",
            Self::InUse => "in_use",
            Self::NotInPool => "not_in_pool",
            Self::Family => "family",
            Self::Invalid => "invalid",
            Self::Quarantined => "quarantined",
            Self::NamespaceLimit => "namespace_limit",
        }
    }
}

/// Why a Service doesn't get an address that it asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The kind of reason.
    pub reason: Reason,
    /// The reason as text.
    pub text: String,
}

/// What a Service gets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decision {
    /// Index of the Service.
    pub service: usize,
    /// The addresses that it is to have.
    pub addresses: Vec<IpAddr>,
    /// Whether its status is to be written.
    pub is_change: bool,
    /// Why it has fewer than it asks for.
    pub refusal: Option<Refusal>,
    /// Addresses that it keeps although no pool would give them to it any more.
    pub outside: Vec<IpAddr>,
}

/// How many addresses of a pool are in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolUsage {
    /// The pool's name.
    pub name: String,
    /// Addresses of Services.
    pub services: u64,
    /// Addresses of policies.
    pub policies: u64,
    /// Addresses that nobody has, and nobody but their former owner gets yet.
    pub quarantined: u64,
    /// Free addresses, at most `u64::MAX`.
    pub free: u64,
    /// The families of its ranges without a free address.
    pub exhausted: Vec<Family>,
    /// Addresses of Services by namespace, by its name.
    pub namespaces: Vec<(String, u64)>,
}

/// What all Services get.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllocationPlan {
    /// A decision on each Service that may have addresses of vipgate's, oldest Service first.
    pub decisions: Vec<Decision>,
    /// The pools, by name.
    pub usage: Vec<PoolUsage>,
    /// What Services lack, and providers of pools can allocate; oldest Service first.
    pub shortages: Vec<Shortage>,
    /// The record of each pool, by its name, with what Services and policies are to have. It is written first: then a
    /// restart gives it to nobody else.
    pub records: BTreeMap<String, AddressRecord>,
    /// When the quarantine of an address ends that a Service waits for.
    pub waits_until: Option<Timestamp>,
}

impl AllocationPlan {
    /// The decisions that change the status of a Service; what is given up is first.
    pub fn changes(&self) -> Vec<&Decision> {
        let mut changes: Vec<&Decision> = self.decisions.iter().filter(|decision| decision.is_change).collect();
        changes.sort_by_key(|decision| !decision.addresses.is_empty());
        changes
    }
}

impl Snapshot {
    /// Whether it has these objects, and says else the same as another one. An object that is the same is the same allocation.
    pub fn is_of<'a>(&self, of: impl Iterator<Item = &'a Arc<Object>>, other: &Self) -> bool {
        let Self { tenancy, objects, policy_addresses, unreadable, is_complete } = self;
        (tenancy, policy_addresses, unreadable, is_complete)
            == (&other.tenancy, &other.policy_addresses, &other.unreadable, &other.is_complete)
            && objects.iter().map(Arc::as_ptr).eq(of.map(Arc::as_ptr))
    }

    /// What the pools among the objects have recorded.
    pub fn record(&self) -> AddressRecord {
        let mut record = AddressRecord::default();
        for object in &self.objects {
            if let Body::AddressPool(pool) = &object.body
                && let Some(recorded) = &pool.recorded
            {
                record.extend(recorded);
            }
        }
        record
    }

    /// The Services among the objects.
    pub fn services(&self) -> Vec<ServiceRequest> {
        let request = |object: &Arc<Object>| match &object.body {
            Body::Service(service) => service.request.as_deref().cloned(),
            _ => None,
        };
        self.objects.iter().filter_map(request).collect()
    }

    /// Decides on each of these Services, by this record at this time.
    pub fn plan(&self, services: &[ServiceRequest], record: AddressRecord, now: Timestamp) -> AllocationPlan {
        let mut namespaces: BTreeMap<String, BTreeMap<String, String>> = BTreeMap::new();
        for object in &self.objects {
            if let Body::Namespace(namespace) = &object.body {
                let name = &object.id.name;
                namespaces.insert(name.clone(), namespace_labels(&namespace.metadata, name));
            }
        }
        for service in services {
            let name = &service.namespace;
            // One that was not read has at least the label of its name.
            namespaces.entry(name.clone()).or_insert_with(|| namespace_labels(&ObjectMeta::default(), name));
        }
        let manifests = self.objects.iter().filter_map(|object| match &object.body {
            Body::AddressPool(pool) => Some((object.id.name.as_str(), &**pool)),
            _ => None,
        });
        let pools = Pools::new(manifests, self.tenancy, &namespaces);
        let (record, unreadable) = (Arc::new(record), self.unreadable.clone());
        let (is_complete, unrecorded_pools) = (self.is_complete, BTreeSet::new());
        let recorded = Recorded { record, now, unreadable, is_complete, unrecorded_pools };
        Planner::new(services, pools, &self.policy_addresses, &recorded).plan()
    }
}

#[cfg(test)]
mod tests;
