//! Store of the manifests of a source, by entry (a file or an etcd key), and their compilation.
//!
//! A faulty object doesn't affect others: its last good version stays in force, or, without one, it is left out
//! together with its dependents. Only changed entries are parsed again.
//!
//! Emptiness isn't trusted: an entry or directory that had objects and is now empty or missing retains them, and so
//! does a source that had objects and now has none, until it has some again or the empty source is accepted. An entry
//! that is removed while others remain is a removal. An object that moves to another entry is never retained by the old
//! one.

mod entry;
mod last_good;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use thiserror::Error;
use vipgate_policy::compiler::{Cluster, Compiled, Compiler, Placement, Tenancy};
use vipgate_policy::diagnostic::{Code, Diagnostic, sort_and_dedup};
use vipgate_policy::ipam::Snapshot;
use vipgate_policy::manifest::{Kind, Object, ObjectId, Origin, ReadOptions, UnclassedServices, UnsupportedKinds};

use self::entry::{Entry, Presence};
use self::last_good::LastGood;
use super::{SourceUpdate, UnavailablePath};

/// Maximum rounds of compilation: each replaces at least one faulty object by an older version, or leaves it out.
const MAX_ROUNDS: usize = 32;

/// All manifests of a source.
#[derive(Debug, Default)]
pub struct ManifestStore {
    entries: BTreeMap<Arc<str>, Entry>,
    /// The objects of all entries, in the order of compilation.
    sorted: BTreeMap<SortKey, Arc<Object>>,
    /// Unavailable files and directories.
    unavailable: Vec<UnavailablePath>,
    /// Those of them that were accepted as missing.
    accepted: BTreeSet<Arc<str>>,
    /// Whether emptiness is trusted.
    allow_empty: bool,
    /// Whether there was a policy yet, even an accepted empty one.
    initialized: bool,
    /// Cluster settings of the server's configuration.
    cluster: Cluster,
    /// Handling of `LoadBalancer` Services without a class.
    unclassed: UnclassedServices,
    /// Whether compilations prepare address management.
    has_ipam: bool,
    /// What the last compilation has prepared.
    ipam: Option<Arc<Snapshot>>,
    compiler: Compiler,
    /// Of the last update.
    revision: u64,
}

/// The order of objects: by id, then by location.
type SortKey = (ObjectId, Arc<str>, usize, Option<usize>);

fn sort_key(object: &Object) -> SortKey {
    let Origin { source, document, item, .. } = &object.origin;
    (object.id.clone(), source.name().clone(), *document, *item)
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
    /// What address management works on, where it is used; the same allocation as before if it is the same.
    pub ipam: Option<Arc<Snapshot>>,
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
    /// Whether its last good version is in force.
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
}

impl ManifestStore {
    /// Creates a store; `allow_empty`: emptiness is trusted.
    pub fn new(allow_empty: bool) -> Self {
        Self { allow_empty, ..Self::default() }
    }

    /// Sets the cluster settings of the server's configuration.
    #[must_use]
    pub fn with_cluster(self, cluster: Cluster) -> Self {
        Self { cluster, ..self }
    }

    /// Sets what tenants may use. Default: strict tenancy.
    #[must_use]
    pub fn with_tenancy(self, tenancy: Tenancy) -> Self {
        Self { compiler: Compiler::new(tenancy), ..self }
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
        let SourceUpdate { full, changed, removed: gone, unavailable, revision } = update;
        self.revision = revision;
        self.accepted.retain(|place| unavailable.iter().any(|it| it.path == *place));
        let named: BTreeSet<&Arc<str>> = changed.iter().map(|(name, _)| name).collect();
        let mut removed = gone;
        if full {
            removed.extend(self.entries.keys().filter(|name| !named.contains(name)).cloned());
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
            let entry = self.take(&name).unwrap_or_default().with_content(&name, content, options);
            self.put(name, entry);
        }
        self.release_moved();
        if self.allow_empty {
            let all = [Presence::Empty, Presence::Missing, Presence::Removed, Presence::NoObjects];
            self.remove_retained(&all);
        } else if self.entries.values().any(Entry::is_present) {
            self.remove_retained(&[Presence::Removed, Presence::NoObjects]);
        }
        self.entries.retain(|_, entry| entry.presence != Presence::Removed || !entry.objects.is_empty());
        let is_readable = self.unavailable.iter().all(|it| it.is_missing)
            && self.entries.values().all(|entry| entry.presence != Presence::Unreadable);
        self.initialized |= !self.sorted.is_empty() || self.allow_empty && is_readable;
    }

    /// Accepts that the source, or parts of it, are empty: removes the objects retained for that reason.
    ///
    /// # Errors
    /// If no part of it is empty, or what it holds is unknown.
    pub fn accept_empty(&mut self) -> Result<AcceptedEmpty, AcceptEmptyError> {
        let all = [Presence::Empty, Presence::Missing, Presence::Removed, Presence::NoObjects];
        let withheld = self.entries.iter().map(|(name, entry)| (name.clone(), entry.withheld()));
        let texts: Vec<(Arc<str>, usize)> = withheld.filter(|(_, objects)| *objects > 0).collect();
        let missing = || self.unavailable.iter().filter(|it| it.is_missing);
        let has_new_missing = missing().any(|it| it.is_configured && !self.accepted.contains(&it.path));
        if texts.is_empty() && self.initialized && !has_new_missing {
            return Err(AcceptEmptyError::NothingEmpty);
        }
        if !self.initialized {
            let entries = self.entries.iter().filter(|(_, entry)| entry.presence == Presence::Unreadable);
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

    /// Removes and returns an entry.
    fn take(&mut self, name: &str) -> Option<Entry> {
        let entry = self.entries.remove(name)?;
        for object in &entry.objects {
            self.sorted.remove(&sort_key(object));
        }
        Some(entry)
    }

    /// Inserts an entry.
    fn put(&mut self, name: Arc<str>, entry: Entry) {
        self.sorted.extend(entry.objects.iter().map(|object| (sort_key(object), object.clone())));
        self.entries.insert(name, entry);
    }

    /// Retains all objects of an entry that doesn't have them now.
    fn retain(&mut self, name: &Arc<str>, presence: Presence) {
        if let Some(entry) = self.take(name) {
            self.put(name.clone(), entry.with_all_retained(presence));
        }
    }

    /// Removes the retained objects of entries in these states.
    fn remove_retained(&mut self, presences: &[Presence]) {
        let matching = self.entries.iter().filter(|(_, entry)| presences.contains(&entry.presence));
        let names: Vec<Arc<str>> = matching.map(|(name, _)| name.clone()).collect();
        for name in names {
            let Some(entry) = self.take(&name) else { continue };
            if matches!(entry.presence, Presence::Empty | Presence::NoObjects) {
                // It still exists, and so do its diagnostics.
                let Entry { presence, rejected, diagnostics, .. } = entry;
                self.entries.insert(
                    name,
                    Entry { presence, rejected, diagnostics, in_force_differs: true, ..Entry::default() },
                );
            }
        }
    }

    /// Removes retained objects that another entry has readably.
    fn release_moved(&mut self) {
        let mut moved: Vec<(Arc<str>, ObjectId)> = Vec::new();
        for (name, entry) in self.entries.iter().filter(|(_, entry)| !entry.retained.is_empty()) {
            let is_elsewhere = |id: &&ObjectId| {
                let first = ((*id).clone(), Arc::from(""), 0, None);
                let same = self.sorted.range(first..).take_while(|(rank, _)| rank.0 == **id);
                let others = same.map(|(rank, _)| &rank.1).filter(|other| *other != name);
                others.filter_map(|other| self.entries.get(other)).any(|other| !other.retained.contains(*id))
            };
            moved.extend(entry.retained.iter().filter(is_elsewhere).map(|id| (name.clone(), id.clone())));
        }
        for (name, id) in moved {
            let Some(mut entry) = self.take(&name) else { continue };
            entry.objects.retain(|object| object.id != id);
            entry.retained.remove(&id);
            if entry.presence == Presence::Read {
                // It still has an invalid version of the object.
                entry.rejected.insert(id);
            }
            entry.in_force_differs = true;
            self.put(name, entry);
        }
    }

    /// Compiles everything. Faulty objects are replaced by their last good version, or left out, until no error
    /// remains.
    pub fn compile(&mut self) -> CompileOutcome {
        let unhealthy = self.unhealthy();
        let mut diagnostics: Vec<Diagnostic> =
            self.entries.values().flat_map(|entry| entry.diagnostics.iter().cloned()).collect();
        let unreported = unhealthy.iter().filter(|it| !it.has_diagnostic);
        diagnostics.extend(unreported.map(|it| Diagnostic::for_file(&it.name, Code::SourceUnavailable, &*it.reason)));
        let mut faulty = self.unreadable();
        let mut last_good = LastGood::default();
        let mut compiled = self.compile_objects(&last_good);
        for round in 1..=MAX_ROUNDS {
            let errors: Vec<Diagnostic> = compiled.diagnostics.iter().filter(|it| it.is_error()).cloned().collect();
            if errors.is_empty() {
                break;
            }
            // In the second half faulty objects are left out, without trying older versions.
            last_good.substitute_faulty(&errors, &self.entries, &mut faulty, round < MAX_ROUNDS / 2);
            diagnostics.extend(errors);
            compiled = self.compile_objects(&last_good);
        }
        diagnostics.extend(compiled.diagnostics);
        sort_and_dedup(&mut diagnostics);
        if self.has_ipam && self.initialized {
            self.prepare_ipam(&last_good, std::mem::take(&mut compiled.policy_addresses));
        }
        let mut objects = 0;
        for entry in self.entries.values_mut() {
            let is_affected = last_good.affects(entry);
            if entry.in_force_differs || is_affected {
                entry.in_force = last_good.entry_objects(entry).cloned().collect();
                entry.in_force_differs = is_affected;
            }
            objects += entry.in_force.len();
        }
        let cluster = self.cluster.clone().merged_with(&compiled.placement.cluster.take().unwrap_or_default());
        compiled.placement.cluster = cluster.non_empty();
        let placement = self.initialized.then(|| Arc::new(compiled.placement));
        let unhealthy = unhealthy.iter().map(|it| format!("{}: {}", it.name, it.reason)).collect();
        CompileOutcome {
            placement,
            diagnostics,
            faulty,
            objects,
            unhealthy,
            ipam: self.ipam.clone(),
            revision: self.revision,
        }
    }

    fn prepare_ipam(&mut self, last_good: &LastGood, policy_addresses: Vec<IpAddr>) {
        let is_used = |object: &&Arc<Object>| matches!(object.id.kind, Kind::AddressPool | Kind::Namespace);
        let of_pools = last_good.objects(&self.sorted).filter(is_used);
        // Services as they are written: one of another type by now has no claim to its address, be it faulty.
        let services = self.sorted.values().filter(|object| object.id.kind == Kind::Service);
        let objects = of_pools.chain(services).cloned().collect();
        let snapshot = Snapshot { tenancy: self.compiler.tenancy(), objects, policy_addresses };
        if self.ipam.as_ref().is_none_or(|last| !last.is_same(&snapshot)) {
            self.ipam = Some(Arc::new(snapshot));
        }
    }

    fn compile_objects(&mut self, last_good: &LastGood) -> Compiled {
        let compiled = self.compiler.compile(last_good.objects(&self.sorted));
        #[cfg(test)]
        {
            let objects = last_good.objects(&self.sorted).map(Arc::as_ref);
            let new = vipgate_policy::compiler::compile_for(self.compiler.tenancy(), objects);
            assert_eq!((&compiled.placement, &compiled.diagnostics), (&new.placement, &new.diagnostics));
        }
        compiled
    }

    /// Objects that are unreadable in their entries.
    fn unreadable(&self) -> BTreeMap<ObjectId, Faulty> {
        let mut faulty: BTreeMap<ObjectId, Faulty> = BTreeMap::new();
        for (name, entry) in self.entries.iter().filter(|(_, entry)| !entry.retained.is_empty()) {
            let reasons = entry.reasons(name);
            let retained = |id: &ObjectId| (id.clone(), Faulty { has_last_good: true, reasons: reasons.clone() });
            faulty.extend(entry.retained.iter().map(retained));
        }
        // The last good version of an invalid object may be from another entry.
        for (name, entry) in self.entries.iter().filter(|(_, entry)| !entry.rejected.is_empty()) {
            let reasons = entry.reasons(name);
            for id in &entry.rejected {
                let rejected = || Faulty { has_last_good: false, reasons: Vec::new() };
                faulty.entry(id.clone()).or_insert_with(rejected).reasons.extend(reasons.iter().cloned());
            }
        }
        faulty
    }

    /// The parts of the source that are empty or unreadable, and the number of objects retained for each.
    fn unhealthy(&self) -> Vec<Unhealthy> {
        let retained = |objects: usize| match objects {
            0 => String::new(),
            1 => ": the object that it had stays in force".to_owned(),
            objects => format!(": the {objects} objects that it had stay in force"),
        };
        let mut all = Vec::new();
        let is_accepted =
            |it: &&UnavailablePath| it.is_missing && (self.allow_empty || self.accepted.contains(&it.path));
        for it in self.unavailable.iter().filter(|it| !is_accepted(it)) {
            let below = self.entries.iter().filter(|(name, _)| it.covers(name));
            let objects = below.map(|(_, entry)| entry.objects.len()).sum();
            if objects == 0 && !it.is_configured {
                continue;
            }
            all.push(Unhealthy::new(&it.path, format!("{}{}", it.reason, retained(objects))));
        }
        let is_unavailable = |name: &str| self.unavailable.iter().any(|it| it.covers(name));
        let mut withheld = 0;
        for (name, entry) in &self.entries {
            match entry.presence {
                Presence::Unreadable if !is_unavailable(name) => {
                    let errors = entry.diagnostics.iter().filter(|diagnostic| diagnostic.is_error());
                    let first = errors.min().map_or_else(String::new, |it| it.reason.clone());
                    let reason = format!("{first}{}", retained(entry.retained.len()));
                    all.push(Unhealthy { has_diagnostic: true, ..Unhealthy::new(name, reason) });
                }
                Presence::Empty if !entry.objects.is_empty() => {
                    all.push(Unhealthy::new(name, format!("is empty{}", retained(entry.objects.len()))));
                }
                Presence::Removed | Presence::NoObjects => withheld += entry.objects.len(),
                Presence::Read | Presence::Unreadable | Presence::Empty | Presence::Missing => {}
            }
        }
        if withheld > 0 {
            all.push(Unhealthy::new("source", format!("has no manifests any more{}", retained(withheld))));
        } else if !self.initialized && all.is_empty() {
            all.push(Unhealthy::new("source", "has no manifests".to_owned()));
        }
        all
    }
}

/// A part of the source that is empty or unreadable.
#[derive(Debug)]
struct Unhealthy {
    name: Arc<str>,
    reason: String,
    /// Whether a diagnostic reports it already.
    has_diagnostic: bool,
}

impl Unhealthy {
    fn new(name: &str, reason: String) -> Self {
        Self { name: name.into(), reason, has_diagnostic: false }
    }
}
