//! Store of the manifests of a source, by entry (a file or an etcd key), and their compilation.
//!
//! A faulty object doesn't affect others. One that can't be read any more stays in force as it was last read; one that
//! conflicts with others, or exceeds a limit, isn't in force, whatever it was before: what is in force is what a fresh start
//! with the same objects, and the same record of addresses, would bring into force. Only changed entries are parsed again.
//!
//! Emptiness isn't trusted: an entry or directory that had objects and is now empty or missing retains them, and so
//! does a source that had objects and now has none, until it has some again or the empty source is accepted. An entry
//! that is removed while others remain is a removal. An object that moves to another entry is never retained by the old
//! one.
//!
//! At a start there is no last good version yet: a first policy waits for what can't be read at the moment.

mod cloud_objects;
mod entries;
mod entry;
mod health;
mod record;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::jiff::Timestamp;
use thiserror::Error;
use vipgate_policy::address_record::AddressRecord;
use vipgate_policy::compiler::{
    Cluster, Compiled, Compiler, NodeAgents, Options, Placement, PoolAddresses, Share, Tenancy,
};
use vipgate_policy::diagnostic::{Code, Diagnostic, ObjectLocation, sort_and_dedup};
use vipgate_policy::ipam::Snapshot;
use vipgate_policy::manifest::{CloudPool, Kind, Object, ObjectId, ReadOptions, UnclassedServices, UnsupportedKinds};

pub use self::cloud_objects::{CloudGateway, CloudObjects, ProviderPool};
use self::entries::Entries;
use self::entry::{Entry, Presence};
pub(crate) use self::record::CATCH_UP_TIME;
use self::record::Reachability;
pub use self::record::RecordMode;
use super::{SourceUpdate, UnavailablePath};

/// All manifests of a source.
#[derive(Debug, Default)]
pub struct ManifestStore {
    entries: Entries,
    /// Unavailable files and directories.
    unavailable: Vec<UnavailablePath>,
    /// Those of them that were accepted as missing.
    accepted: BTreeSet<Arc<str>>,
    /// Whether emptiness is trusted.
    allow_empty: bool,
    /// Whether there was a policy yet, even an accepted empty one.
    initialized: bool,
    /// Handling of `LoadBalancer` Services without a class.
    unclassed: UnclassedServices,
    /// Whether compilations prepare address management.
    has_ipam: bool,
    /// What the last compilation has prepared.
    ipam: Option<Arc<Snapshot>>,
    /// What cloud providers have, by pool.
    cloud: BTreeMap<String, Arc<CloudPool>>,
    record_mode: RecordMode,
    /// Who has which address of a pool.
    record: Arc<AddressRecord>,
    /// The records of pools that it was merged from.
    of_pools: Vec<Arc<AddressRecord>>,
    /// The time of compilations.
    now: Timestamp,
    /// Until when the record may be of objects that are still on their way.
    adopted_until: Option<Timestamp>,
    reachability: Reachability,
    compiler: Compiler,
    /// Of the last update.
    revision: u64,
}

/// The result of a compilation.
#[derive(Clone, Debug, Default)]
pub struct CompileOutcome {
    /// The policy of all gateways; `None` until there is a manifest, or the empty source was accepted.
    pub placement: Option<Arc<Placement>>,
    /// All diagnostics, by entry and line.
    pub diagnostics: Vec<Diagnostic>,
    /// Objects that aren't in force as written.
    pub faulty: BTreeMap<ObjectId, Faulty>,
    /// Number of objects in force, including last good versions.
    pub objects: usize,
    /// Why the source is unhealthy: parts that are empty or unreadable. Empty: it is healthy.
    pub unhealthy: Vec<String>,
    /// Whether tenancy is strict, and addresses of slices can't be checked, since no Pod is known.
    pub slices_unverified: bool,
    /// What address management works on, where it is used; the same allocation as before if it is the same.
    pub ipam: Option<Arc<Snapshot>>,
    /// What the policy server needs of cloud providers.
    pub cloud: CloudObjects,
    /// Whether policies are to have addresses of pools that aren't recorded yet.
    pub has_pending: bool,
    /// The record of addresses once what is given is recorded, for whoever stores it beside the source; `None`: it is the
    /// same, or it is elsewhere.
    pub next_record: Option<Arc<AddressRecord>>,
    /// When the quarantine of an address ends that a policy waits for: then a compilation gives it.
    pub waits_until: Option<Timestamp>,
    /// Revision of the last update in it.
    pub revision: u64,
}

impl CompileOutcome {
    /// Number of objects by state: in force as written, in force in their last good version, not in force.
    pub fn states(&self) -> [(&'static str, u64); 3] {
        let last_good = self.faulty.values().filter(|faulty| faulty.has_last_good).count();
        let rejected = self.faulty.len() - last_good;
        let accepted = self.objects.saturating_sub(last_good);
        [("accepted", accepted as u64), ("last_good", last_good as u64), ("rejected", rejected as u64)]
    }
}

/// An object that isn't in force as written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Faulty {
    /// Whether it is in force as it was last read.
    pub has_last_good: bool,
    /// Why.
    pub reasons: Vec<String>,
}

/// The objects removed by accepting that a source, or a part of it, is empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AcceptedEmpty {
    /// Entries and the number of objects of each.
    pub entries: Vec<(Arc<str>, usize)>,
}

/// Why a source isn't accepted as empty.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum AcceptEmptyError {
    /// It has no empty part.
    #[error("no part of the source that had manifests is empty")]
    NothingEmpty,
    /// An entry or path of it is unreadable, so its content is unknown.
    #[error("the source isn't empty: {0} can't be read: fix or remove it")]
    Unreadable(Arc<str>),
    /// The task that watches it has ended.
    #[error("the gateway is stopping")]
    Stopping,
}

impl ManifestStore {
    /// Creates a store; `allow_empty`: emptiness is trusted.
    pub fn new(allow_empty: bool) -> Self {
        Self { allow_empty, ..Self::default() }
    }

    /// Sets the cluster settings of the server's configuration.
    #[must_use]
    pub fn with_cluster(self, cluster: Cluster) -> Self {
        self.with_options(|options| options.cluster = cluster)
    }

    /// Sets what tenants may use. Default: strict tenancy.
    #[must_use]
    pub fn with_tenancy(self, tenancy: Tenancy) -> Self {
        self.with_options(|options| options.tenancy = tenancy)
    }

    /// Sets the part of each limit of the whole that a namespace may have. Default: the whole.
    #[must_use]
    pub fn with_namespace_share(self, share: Share) -> Self {
        self.with_options(|options| options.namespace_share = share)
    }

    /// Sets the agents that nodes run. Default: none.
    #[must_use]
    pub fn with_node_agents(self, node_agents: Option<NodeAgents>) -> Self {
        self.with_options(|options| options.node_agents = node_agents)
    }

    fn with_options(self, change: impl FnOnce(&mut Options)) -> Self {
        let mut options = self.compiler.options().clone();
        change(&mut options);
        Self { compiler: Compiler::new(options), ..self }
    }

    /// Sets the handling of `LoadBalancer` Services without a class. Default: they are served.
    #[must_use]
    pub fn with_unclassed(self, unclassed: UnclassedServices) -> Self {
        Self { unclassed, ..self }
    }

    /// Prepares address management at each compilation.
    #[must_use]
    pub fn with_ipam(self, has_ipam: bool) -> Self {
        Self { has_ipam, ..self }
    }

    /// Applies an update.
    pub fn update(&mut self, update: SourceUpdate) {
        let SourceUpdate { full, changed, removed: gone, unavailable, revision, has_failed_reads } = update;
        self.revision = revision;
        self.accepted.retain(|place| unavailable.iter().any(|it| it.path == *place));
        let named: BTreeSet<&Arc<str>> = changed.iter().map(|(name, _)| name).collect();
        let mut removed = gone;
        if full {
            removed.extend(self.entries.iter().map(|(name, _)| name).filter(|name| !named.contains(name)).cloned());
        }
        for name in removed {
            self.retain(&name, Presence::Removed);
        }
        for it in &unavailable {
            // An entry that was removed earlier isn't missing with its directory.
            let is_below = |(name, entry): &(&Arc<str>, &Entry)| it.covers(name) && entry.presence != Presence::Removed;
            let below: Vec<Arc<str>> = self.entries.iter().filter(is_below).map(|(name, _)| name.clone()).collect();
            let presence = if it.is_missing { Presence::Missing } else { Presence::Unreadable };
            for name in &below {
                self.retain(name, presence);
            }
        }
        self.unavailable = unavailable;
        let options = ReadOptions { unsupported: UnsupportedKinds::Ignore, unclassed: self.unclassed };
        for (name, content) in changed {
            let mut entry = self.entries.take(&name).unwrap_or_default().with_content(&name, content, options);
            entry.set_cloud(&self.cloud);
            self.entries.put(name, entry);
        }
        self.release_moved();
        if self.allow_empty {
            let all = [Presence::Empty, Presence::Missing, Presence::Removed, Presence::NoObjects];
            self.remove_retained(&all);
        } else if self.entries.iter().any(|(_, entry)| entry.is_present()) {
            self.remove_retained(&[Presence::Removed, Presence::NoObjects]);
        }
        self.remove_gone();
        let is_readable = self.unavailable.iter().all(|it| it.is_missing)
            && self.entries.irregular().all(|(_, entry)| entry.presence != Presence::Unreadable);
        let has_policy = !self.entries.objects().is_empty() || self.allow_empty && is_readable;
        // What was never read has no last good version: a first policy without it would take its objects from gateways.
        self.initialized |= has_policy && !has_failed_reads;
    }

    /// Whether the first policy waits for what couldn't be read, although there are objects.
    pub fn awaits_failed_reads(&self) -> bool {
        !self.initialized && !self.entries.objects().is_empty()
    }

    /// Takes what could be read as the first policy.
    pub fn accept_failed_reads(&mut self) {
        self.initialized |= !self.entries.objects().is_empty();
    }

    /// Sets what cloud providers have, by pool. A pool that isn't named keeps what it has: its provider may not be reachable.
    pub fn set_cloud(&mut self, cloud: BTreeMap<String, Arc<CloudPool>>) {
        self.cloud.extend(cloud);
        let entries_of = |object: &Arc<Object>| self.entries.with_object(&object.id).cloned().collect::<Vec<_>>();
        let names: BTreeSet<Arc<str>> = self.entries.of_kind(Kind::AddressPool).flat_map(entries_of).collect();
        for name in names {
            if let Some(mut entry) = self.entries.take(&name) {
                entry.set_cloud(&self.cloud);
                self.entries.put(name, entry);
            }
        }
    }

    /// Accepts that the source, or parts of it, are empty: removes the objects retained for that reason.
    ///
    /// # Errors
    /// If no part of it is empty, or what it holds is unknown.
    pub fn accept_empty(&mut self) -> Result<AcceptedEmpty, AcceptEmptyError> {
        let all = [Presence::Empty, Presence::Missing, Presence::Removed, Presence::NoObjects];
        let withheld = self.entries.irregular().map(|(name, entry)| (name.clone(), entry.withheld()));
        let texts: Vec<(Arc<str>, usize)> = withheld.filter(|(_, objects)| *objects > 0).collect();
        let missing = || self.unavailable.iter().filter(|it| it.is_missing);
        let has_new_missing = missing().any(|it| it.is_configured && !self.accepted.contains(&it.path));
        if texts.is_empty() && self.initialized && !has_new_missing {
            return Err(AcceptEmptyError::NothingEmpty);
        }
        if !self.initialized {
            let entries = self.entries.irregular().filter(|(_, entry)| entry.presence == Presence::Unreadable);
            let paths = self.unavailable.iter().filter(|it| !it.is_missing).map(|it| &it.path);
            if let Some(name) = paths.chain(entries.map(|(name, _)| name)).next() {
                return Err(AcceptEmptyError::Unreadable(name.clone()));
            }
        }
        self.initialized = true;
        self.accepted.extend(self.unavailable.iter().filter(|it| it.is_missing).map(|it| it.path.clone()));
        self.remove_retained(&all);
        Ok(AcceptedEmpty { entries: texts })
    }

    /// Retains all objects of an entry that doesn't have them now.
    fn retain(&mut self, name: &Arc<str>, presence: Presence) {
        if let Some(entry) = self.entries.take(name) {
            self.entries.put(name.clone(), entry.with_all_retained(presence));
        }
    }

    /// Removes the retained objects of entries in these states.
    fn remove_retained(&mut self, presences: &[Presence]) {
        let matching = self.entries.irregular().filter(|(_, entry)| presences.contains(&entry.presence));
        let names: Vec<Arc<str>> = matching.map(|(name, _)| name.clone()).collect();
        for name in names {
            let Some(entry) = self.entries.take(&name) else { continue };
            if matches!(entry.presence, Presence::Empty | Presence::NoObjects) {
                // It still exists, and so do its diagnostics.
                let Entry { presence, rejected, diagnostics, .. } = entry;
                self.entries.put(name, Entry { presence, rejected, diagnostics, ..Entry::default() });
            }
        }
    }

    /// Removes the removed entries that retain nothing.
    fn remove_gone(&mut self) {
        let is_gone = |entry: &Entry| entry.presence == Presence::Removed && entry.objects.is_empty();
        let gone = self.entries.irregular().filter(|(_, entry)| is_gone(entry));
        let names: Vec<Arc<str>> = gone.map(|(name, _)| name.clone()).collect();
        for name in names {
            self.entries.take(&name);
        }
    }

    /// Removes retained objects that another entry has readably.
    fn release_moved(&mut self) {
        let mut moved: Vec<(Arc<str>, ObjectId)> = Vec::new();
        for (name, entry) in self.entries.irregular().filter(|(_, entry)| !entry.retained.is_empty()) {
            let is_elsewhere = |id: &&ObjectId| {
                let others = self.entries.with_object(id).filter(|other| *other != name);
                others.filter_map(|other| self.entries.get(other)).any(|(_, other)| !other.retained.contains(*id))
            };
            moved.extend(entry.retained.iter().filter(is_elsewhere).map(|id| (name.clone(), id.clone())));
        }
        for (name, id) in moved {
            let Some(mut entry) = self.entries.take(&name) else { continue };
            entry.objects.retain(|object| object.id != id);
            entry.retained.remove(&id);
            if entry.presence == Presence::Read {
                // It still has an invalid version of the object.
                entry.rejected.insert(id);
            }
            self.entries.put(name, entry);
        }
    }

    /// Compiles everything.
    pub fn compile(&mut self) -> CompileOutcome {
        let unhealthy = self.unhealthy();
        let mut diagnostics: Vec<Diagnostic> =
            self.entries.irregular().flat_map(|(_, entry)| entry.diagnostics.iter().cloned()).collect();
        let unreported = unhealthy.iter().filter(|it| !it.has_diagnostic);
        diagnostics.extend(unreported.map(|it| Diagnostic::for_file(&it.name, Code::SourceUnavailable, &*it.reason)));
        let mut faulty = self.unreadable();
        let unreadable: BTreeSet<ObjectId> = faulty.keys().cloned().collect();
        let adoption_ends = self.adoption_ends();
        let is_complete =
            self.is_complete(&unhealthy) && adoption_ends.is_none() && self.reachability == Reachability::Reachable;
        self.update_recorded(&unreadable, is_complete);
        let mut compiled = self.compile_objects();
        let refused = self.add_refused(&compiled.diagnostics, &mut faulty);
        diagnostics.append(&mut compiled.diagnostics);
        sort_and_dedup(&mut diagnostics);
        let is_in_force = |object: &&Arc<Object>| faulty.get(&object.id).is_none_or(|faulty| faulty.has_last_good);
        let PoolAddresses { of_policies, are_pending, next_record, waits_until } =
            std::mem::take(&mut compiled.addresses);
        if self.has_ipam && self.initialized {
            let of_pools = [Kind::AddressPool, Kind::Namespace].map(|kind| self.entries.of_kind(kind));
            let objects = of_pools.into_iter().flatten().filter(is_in_force).chain(self.entries.of_kind(Kind::Service));
            let (tenancy, policy_addresses) = (self.compiler.options().tenancy, of_policies);
            let rest = Snapshot { tenancy, objects: Vec::new(), policy_addresses, unreadable, is_complete };
            if self.ipam.as_ref().is_none_or(|last| !last.is_of(objects.clone(), &rest)) {
                self.ipam = Some(Arc::new(Snapshot { objects: objects.cloned().collect(), ..rest }));
            }
        }
        let of_kind = |kind| self.entries.of_kind(kind).filter(is_in_force);
        let cloud = CloudObjects::of(of_kind, std::mem::take(&mut compiled.shortages));
        let placement = self.initialized.then(|| Arc::new(compiled.placement));
        let unhealthy = unhealthy.iter().map(|it| format!("{}: {}", it.name, it.reason)).collect();
        CompileOutcome {
            placement,
            diagnostics,
            objects: self.entries.objects().len() - refused,
            faulty,
            unhealthy,
            slices_unverified: compiled.slices_unverified,
            ipam: self.ipam.clone(),
            cloud,
            has_pending: are_pending,
            next_record: self.note_next(next_record),
            waits_until: waits_until.into_iter().chain(adoption_ends).min(),
            revision: self.revision,
        }
    }

    /// Adds the objects that the compiler has refused; returns their number.
    fn add_refused(&self, diagnostics: &[Diagnostic], faulty: &mut BTreeMap<ObjectId, Faulty>) -> usize {
        let mut reasons: BTreeMap<(&str, ObjectLocation), Vec<String>> = BTreeMap::new();
        for error in diagnostics.iter().filter(|it| it.is_error()) {
            if let Some(location) = error.object {
                reasons.entry((&error.file, location)).or_default().push(error.to_string());
            }
        }
        let mut refused = 0;
        for ((name, location), reasons) in reasons {
            let objects = self.entries.get(name).map(|(_, entry)| entry.objects.as_slice()).unwrap_or_default();
            let Some(object) = objects.iter().find(|object| object.origin.location() == location) else { continue };
            let none = || Faulty { has_last_good: false, reasons: Vec::new() };
            let fault = faulty.entry(object.id.clone()).or_insert_with(none);
            fault.has_last_good = false;
            fault.reasons.extend(reasons);
            refused += 1;
        }
        refused
    }

    fn compile_objects(&mut self) -> Compiled {
        let compiled = self.compiler.compile(self.entries.objects().values());
        #[cfg(test)]
        {
            self.entries.check();
            let objects = self.entries.objects().values().map(Arc::as_ref);
            let new = vipgate_policy::compiler::compile_for(self.compiler.options().clone(), objects);
            assert_eq!((&compiled.placement, &compiled.diagnostics), (&new.placement, &new.diagnostics));
        }
        compiled
    }
}
