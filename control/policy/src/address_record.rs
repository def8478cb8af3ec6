//! What is known of the addresses of pools at one time: the record, and what namespaces have by it. It is the only history
//! that counts: what is given follows from the objects, the record and the time, on every server.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use foldhash::HashMap;
use k8s_openapi::jiff::Timestamp;

use crate::manifest::{AddressPoolSpec, Kind, ObjectId, ReuseAfter, end_of_quarantine};
pub use crate::manifest::{AddressRecord, Holding, InvalidLine};

/// Quarantined addresses of a pool with which a namespace still gets new ones. A tenant that creates and deletes objects on
/// and on fills the record no further.
pub const MAX_QUARANTINED: usize = 256;

/// The record at one time, and what is known of the source of the objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recorded {
    pub record: Arc<AddressRecord>,
    /// The time.
    pub now: Timestamp,
    /// Objects that are there but can't be read: they keep what they have.
    pub unreadable: BTreeSet<ObjectId>,
    /// Whether all objects are known: then what others have is given up.
    pub is_complete: bool,
    /// Pools that never had a record: what is given of them is in force before it is recorded.
    pub unrecorded_pools: BTreeSet<String>,
}

impl Recorded {
    /// Until when an address that is free is quarantined, and who had it; `None`: it isn't, or not any more.
    pub fn quarantine(&self, address: IpAddr, reuse_after: ReuseAfter) -> Option<(Timestamp, &ObjectId)> {
        let holding = self.record.get(address)?;
        self.quarantine_of(holding, reuse_after).map(|end| (end, &holding.owner))
    }

    /// Until when what somebody had is quarantined; `None`: it isn't, or not any more.
    pub(crate) fn quarantine_of(&self, holding: &Holding, reuse_after: ReuseAfter) -> Option<Timestamp> {
        Some(end_of_quarantine(holding.freed?, reuse_after)).filter(|end| *end > self.now)
    }

    /// Until when an address is quarantined that is given up now.
    pub(crate) fn quarantine_from_now(&self, reuse_after: ReuseAfter) -> Timestamp {
        end_of_quarantine(self.now, reuse_after)
    }

    /// When the first quarantine ends; `reuse_after`: of the pool with an address.
    pub(crate) fn first_end(&self, reuse_after: impl Fn(IpAddr) -> Option<ReuseAfter>) -> Option<Timestamp> {
        let free = self.record.iter().filter(|(_, holding)| holding.freed.is_some());
        free.filter_map(|(address, holding)| self.quarantine_of(holding, reuse_after(address)?)).min()
    }

    /// Whether something isn't known that decides about the addresses of others.
    fn is_partial(&self) -> bool {
        let decides = |id: &ObjectId| matches!(id.kind, Kind::AddressPool | Kind::Namespace);
        !self.is_complete || self.unreadable.iter().any(decides)
    }

    /// Whether an object that isn't there isn't known to have given up what it has.
    pub(crate) fn keeps(&self, owner: &ObjectId) -> bool {
        self.is_partial() || self.unreadable.contains(owner)
    }

    /// The record once objects have these addresses.
    #[must_use]
    pub fn next<'a>(
        &self,
        given: impl IntoIterator<Item = (IpAddr, &'a ObjectId)>,
        reuse_after: impl Fn(IpAddr) -> Option<ReuseAfter>,
    ) -> AddressRecord {
        self.record.next(given, |owner| self.keeps(owner), (reuse_after, self.is_partial()), self.now)
    }
}

/// The addresses that each namespace has of each pool, as far as that is limited.
#[derive(Clone, Debug, Default)]
pub(crate) struct NamespaceUse<'a> {
    /// With quarantined ones, and whether each is by the record: then nothing takes it back.
    held: HashMap<(&'a str, &'a str), HashMap<IpAddr, bool>>,
    /// Number of quarantined ones.
    quarantined: HashMap<(&'a str, &'a str), usize>,
}

impl<'a> NamespaceUse<'a> {
    /// What is recorded; `pool`: the name and the spec of the pool with an address.
    pub(crate) fn recorded(
        recorded: &'a Recorded,
        pool: impl Fn(IpAddr) -> Option<(&'a str, &'a AddressPoolSpec)>,
    ) -> Self {
        let mut used = Self::default();
        for (address, holding) in recorded.record.iter() {
            let Some((name, spec)) = pool(address) else { continue };
            let namespace = holding.owner.namespace.as_str();
            let is_quarantined = recorded.quarantine_of(holding, spec.reuse_after).is_some();
            if is_quarantined {
                *used.quarantined.entry((name, namespace)).or_default() += 1;
            }
            if is_quarantined || holding.freed.is_none() {
                used.insert((name, namespace), address, true);
            }
        }
        used
    }

    /// Adds an address, whatever the limit is.
    pub(crate) fn add(&mut self, pool: &'a str, namespace: &'a str, address: IpAddr) {
        self.insert((pool, namespace), address, false);
    }

    fn insert(&mut self, key: (&'a str, &'a str), address: IpAddr, is_recorded: bool) {
        if !key.1.is_empty() {
            self.held.entry(key).or_default().entry(address).or_insert(is_recorded);
        }
    }

    /// Adds an address if the namespace has it, or may have one more; returns whether it is one more, else why not.
    pub(crate) fn grant(
        &mut self,
        (pool, spec): (&'a str, &AddressPoolSpec),
        namespace: &'a str,
        address: IpAddr,
    ) -> Result<bool, String> {
        let is_new = !self.has(pool, namespace, address);
        if let Some(why) = self.why_full((pool, spec), namespace).filter(|_| is_new) {
            return Err(why);
        }
        self.add(pool, namespace, address);
        Ok(is_new)
    }

    fn has(&self, pool: &'a str, namespace: &'a str, address: IpAddr) -> bool {
        self.held.get(&(pool, namespace)).is_some_and(|held| held.contains_key(&address))
    }

    /// Grants a Service all of its addresses, or none; returns the field of the one that it may not have, and why.
    pub(crate) fn grant_all(
        &mut self,
        (namespace, vips): (&'a str, &'a [(Arc<str>, IpAddr)]),
        pool: impl Fn(IpAddr) -> Option<(&'a str, &'a AddressPoolSpec)>,
    ) -> Result<(), (&'a str, String)> {
        let mut granted = Vec::new();
        for (field, address) in vips {
            let Some(pool) = pool(*address) else { continue };
            match self.grant(pool, namespace, *address) {
                Ok(is_new) => granted.extend(is_new.then_some((pool.0, *address))),
                Err(why) => {
                    for (pool, address) in granted {
                        self.remove(pool, namespace, address);
                    }
                    return Err((field, why));
                }
            }
        }
        Ok(())
    }

    /// Whether a namespace has an address, or may have one more.
    pub(crate) fn may_have(&self, pool: (&'a str, &AddressPoolSpec), namespace: &'a str, address: IpAddr) -> bool {
        self.has(pool.0, namespace, address) || self.why_full(pool, namespace).is_none()
    }

    /// Why a namespace may have no more addresses of a pool.
    pub(crate) fn why_full(&self, (pool, spec): (&'a str, &AddressPoolSpec), namespace: &'a str) -> Option<String> {
        let held = self.held.get(&(pool, namespace)).map_or(0, HashMap::len);
        if let Some(max) = spec.max_per_namespace.filter(|max| held >= max.get() as usize) {
            return Some(format!(
                "namespace {namespace} has {max} addresses of AddressPool {pool}, with those that it gave up and nobody \
                 else gets yet: that is its `maxPerNamespace`"
            ));
        }
        let quarantined = self.quarantined.get(&(pool, namespace)).copied().unwrap_or_default();
        (quarantined >= MAX_QUARANTINED).then(|| {
            format!(
                "namespace {namespace} gave up {quarantined} addresses of AddressPool {pool} that nobody else gets yet: it \
                 gets no new ones before"
            )
        })
    }

    /// Takes back an address that was granted.
    pub(crate) fn remove(&mut self, pool: &'a str, namespace: &'a str, address: IpAddr) {
        if let Some(held) = self.held.get_mut(&(pool, namespace))
            && held.get(&address) == Some(&false)
        {
            held.remove(&address);
        }
    }
}
