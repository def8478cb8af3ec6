//! The entries of a store, indexed: of a hundred thousand, a change concerns few.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use vipgate_policy::manifest::{Kind, Object, ObjectId, Origin};

use super::entry::Entry;

/// The order of objects: by id, then by location.
pub(super) type SortKey = (ObjectId, Arc<str>, usize, Option<usize>);

fn sort_key(object: &Object) -> SortKey {
    let Origin { source, document, item, .. } = &object.origin;
    (object.id.clone(), source.name().clone(), *document, *item)
}

/// Entries by name.
#[derive(Debug, Default)]
pub(super) struct Entries {
    all: BTreeMap<Arc<str>, Entry>,
    /// The objects of all entries, in the order of compilation.
    sorted: BTreeMap<SortKey, Arc<Object>>,
    /// The names of the irregular ones.
    irregular: BTreeSet<Arc<str>>,
}

impl Entries {
    /// The entry with this name, and the name.
    pub(super) fn get(&self, name: &str) -> Option<(&Arc<str>, &Entry)> {
        self.all.get_key_value(name)
    }

    /// All entries by name.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&Arc<str>, &Entry)> {
        self.all.iter()
    }

    /// The irregular entries by name; see [`Entry::is_regular`].
    pub(super) fn irregular(&self) -> impl Iterator<Item = (&Arc<str>, &Entry)> {
        self.irregular.iter().filter_map(|name| self.get(name))
    }

    /// The objects of all entries, in the order of compilation.
    pub(super) fn objects(&self) -> &BTreeMap<SortKey, Arc<Object>> {
        &self.sorted
    }

    /// The objects of one kind.
    pub(super) fn of_kind(&self, kind: Kind) -> impl Iterator<Item = &Arc<Object>> + Clone {
        let id = ObjectId { kind, namespace: String::new(), name: String::new() };
        let objects = self.sorted.range((id, Arc::from(""), 0, None)..);
        objects.take_while(move |(key, _)| key.0.kind == kind).map(|(_, object)| object)
    }

    /// The names of the entries with an object of this id.
    pub(super) fn with_object<'a>(&'a self, id: &'a ObjectId) -> impl Iterator<Item = &'a Arc<str>> {
        let first = (id.clone(), Arc::from(""), 0, None);
        self.sorted.range(first..).take_while(move |(key, _)| key.0 == *id).map(|(key, _)| &key.1)
    }

    /// Removes and returns an entry.
    pub(super) fn take(&mut self, name: &str) -> Option<Entry> {
        let entry = self.all.remove(name)?;
        for object in &entry.objects {
            self.sorted.remove(&sort_key(object));
        }
        self.irregular.remove(name);
        Some(entry)
    }

    /// Inserts an entry; there is none with this name.
    pub(super) fn put(&mut self, name: Arc<str>, entry: Entry) {
        self.sorted.extend(entry.objects.iter().map(|object| (sort_key(object), object.clone())));
        if !entry.is_regular() {
            self.irregular.insert(name.clone());
        }
        self.all.insert(name, entry);
    }

    /// Compares the indices with the entries.
    #[cfg(test)]
    pub(super) fn check(&self) {
        let irregular = self.all.iter().filter(|(_, entry)| !entry.is_regular()).map(|(name, _)| name);
        assert!(irregular.eq(&self.irregular));
        let objects: BTreeMap<SortKey, *const Object> =
            self.all.values().flat_map(|entry| &entry.objects).map(|it| (sort_key(it), Arc::as_ptr(it))).collect();
        assert!(self.sorted.iter().map(|(key, it)| (key, Arc::as_ptr(it))).eq(objects.iter().map(|(k, it)| (k, *it))));
    }
}
