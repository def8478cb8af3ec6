//! Tables of a placement: sorted by key, in chunks that successive placements share. So neither a change nor a
//! comparison of two placements touches what stays the same.

use std::iter::FlatMap;
use std::ops::Index;
use std::sync::Arc;
use std::{fmt, slice};

use vipgate_dataplane::policy::spec::Keyed;

use super::PlacedService;

/// Items of a new chunk. An edit may leave chunks of up to twice as many.
const CHUNK: usize = 128;

impl Keyed for PlacedService {
    type Key = Arc<str>;

    fn key(&self) -> &Arc<str> {
        &self.name
    }
}

/// Items sorted by key.
#[derive(Clone)]
pub struct Table<T> {
    /// None is empty.
    chunks: Vec<Arc<Vec<T>>>,
    len: usize,
}

/// The items of a table in the order of their keys.
pub type Iter<'a, T> = FlatMap<slice::Iter<'a, Arc<Vec<T>>>, &'a Vec<T>, fn(&'a Arc<Vec<T>>) -> &'a Vec<T>>;

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self { chunks: Vec::new(), len: 0 }
    }
}

impl<T> Table<T> {
    /// Number of items.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The items in the order of their keys.
    pub fn iter(&self) -> Iter<'_, T> {
        self.into_iter()
    }

    /// A copy of the items.
    pub fn to_vec(&self) -> Vec<T>
    where
        T: Clone,
    {
        self.iter().cloned().collect()
    }

    /// The chunks; tables with the same chunk have its items in common.
    pub fn chunks(&self) -> &[Arc<Vec<T>>] {
        &self.chunks
    }
}

impl<T: Keyed> Table<T> {
    /// The item with this key.
    pub fn get(&self, key: &T::Key) -> Option<&T> {
        let chunk = self.chunks.get(self.chunk_of(key))?;
        chunk.get(chunk.binary_search_by(|item| item.key().cmp(key)).ok()?)
    }

    /// The items without those at the beginning whose keys are before.
    pub fn skip_before(&self, is_before: impl Fn(&T::Key) -> bool + Clone) -> impl Iterator<Item = &T> + Clone {
        let chunk = self.chunks.partition_point(|chunk| chunk.last().is_some_and(|last| is_before(last.key())));
        let chunks = self.chunks.iter().skip(chunk);
        chunks.flat_map(|chunk| chunk.iter()).skip_while(move |item| is_before(item.key()))
    }

    /// The first chunk whose last key isn't less.
    fn chunk_of(&self, key: &T::Key) -> usize {
        self.chunks.partition_point(|chunk| chunk.last().is_some_and(|last| last.key() < key))
    }
}

impl<T: Keyed + Clone + PartialEq> Table<T> {
    /// The table without `removed`, and with `inserted` instead of or in addition to its items. Both are sorted. Chunks
    /// without a difference stay.
    pub fn edit(&self, removed: &[&T::Key], inserted: Vec<T>) -> Self {
        if inserted.len() + removed.len() > self.len / 2 {
            return self.rebuilt(removed, inserted);
        }
        let mut chunks: Vec<Arc<Vec<T>>> = Vec::with_capacity(self.chunks.len() + inserted.len() / CHUNK + 1);
        let (mut removed, mut inserted) = (removed, inserted.into_iter().peekable());
        for (i, chunk) in self.chunks.iter().enumerate() {
            let is_last = i + 1 == self.chunks.len();
            // What is beyond the last key belongs to the last chunk.
            let is_here = |key: &T::Key| is_last || chunk.last().is_some_and(|last| key <= last.key());
            let count = removed.partition_point(|key| is_here(key));
            let (removed_here, rest) = removed.split_at(count);
            removed = rest;
            let mut inserted_here = Vec::new();
            while let Some(item) = inserted.next_if(|item| is_here(item.key())) {
                inserted_here.push(item);
            }
            if removed_here.is_empty() && inserted_here.is_empty() {
                chunks.push(chunk.clone());
                continue;
            }
            match merge(chunk, removed_here, inserted_here) {
                None => chunks.push(chunk.clone()),
                Some(items) if items.len() <= 2 * CHUNK => chunks.extend((!items.is_empty()).then(|| Arc::new(items))),
                Some(items) => chunks.extend(split(items)),
            }
        }
        let len: usize = chunks.iter().map(|chunk| chunk.len()).sum();
        // Removals leave short chunks.
        if chunks.len() > 4 * len.div_ceil(CHUNK) { chunks_of(&chunks) } else { Self { chunks, len } }
    }

    /// The same, for a table that has little in common with this one.
    fn rebuilt(&self, removed: &[&T::Key], inserted: Vec<T>) -> Self {
        let all: Vec<T> = self.iter().cloned().collect();
        match merge(&all, removed, inserted) {
            Some(items) => Self::from_sorted(items),
            None => self.clone(),
        }
    }

    /// This table if it has exactly these sorted items, else one of them that shares equal chunks.
    pub fn replaced(&self, items: Vec<T>) -> Self {
        let mut keys = items.iter().map(Keyed::key).peekable();
        let mut removed = Vec::new();
        for old in self {
            while keys.next_if(|key| *key < old.key()).is_some() {}
            if keys.next_if(|key| *key == old.key()).is_none() {
                removed.push(old.key());
            }
        }
        drop(keys);
        let mut old = self.iter().peekable();
        let mut is_new = |item: &T| {
            while old.next_if(|old| old.key() < item.key()).is_some() {}
            old.next_if(|old| old.key() == item.key()).is_none_or(|old| old != item)
        };
        let inserted = items.into_iter().filter(|item| is_new(item)).collect();
        self.edit(&removed, inserted)
    }
}

impl<T> Table<T> {
    fn from_sorted(items: Vec<T>) -> Self {
        let len = items.len();
        Self { chunks: split(items).collect(), len }
    }
}

fn split<T>(items: Vec<T>) -> impl Iterator<Item = Arc<Vec<T>>> {
    let mut items = items.into_iter();
    std::iter::from_fn(move || {
        let chunk: Vec<T> = items.by_ref().take(CHUNK).collect();
        (!chunk.is_empty()).then(|| Arc::new(chunk))
    })
}

fn chunks_of<T: Clone>(chunks: &[Arc<Vec<T>>]) -> Table<T> {
    Table::from_sorted(chunks.iter().flat_map(|chunk| chunk.iter().cloned()).collect())
}

/// Sorted items without `removed`, and with `inserted`; `None`: nothing differs.
fn merge<T: Keyed + Clone + PartialEq>(items: &[T], removed: &[&T::Key], inserted: Vec<T>) -> Option<Vec<T>> {
    let mut merged = Vec::with_capacity(items.len() + inserted.len());
    let mut differs = false;
    let (mut removed, mut inserted) = (removed.iter().peekable(), inserted.into_iter().peekable());
    for item in items {
        while let Some(new) = inserted.next_if(|new| new.key() < item.key()) {
            differs = true;
            merged.push(new);
        }
        while removed.next_if(|key| ***key < *item.key()).is_some() {}
        let is_removed = removed.next_if(|key| ***key == *item.key()).is_some();
        match inserted.next_if(|new| new.key() == item.key()) {
            Some(new) => {
                differs |= new != *item;
                merged.push(new);
            }
            None if is_removed => differs = true,
            None => merged.push(item.clone()),
        }
    }
    for new in inserted {
        differs = true;
        merged.push(new);
    }
    differs.then_some(merged)
}

/// Sorted by key; of items with the same key the first one.
impl<T: Keyed> FromIterator<T> for Table<T> {
    fn from_iter<I: IntoIterator<Item = T>>(items: I) -> Self {
        let mut items: Vec<T> = items.into_iter().collect();
        items.sort_by(|a, b| a.key().cmp(b.key()));
        items.dedup_by(|a, b| a.key() == b.key());
        Self::from_sorted(items)
    }
}

impl<T: Keyed> From<Vec<T>> for Table<T> {
    fn from(items: Vec<T>) -> Self {
        items.into_iter().collect()
    }
}

impl<T: PartialEq> PartialEq for Table<T> {
    fn eq(&self, other: &Self) -> bool {
        let is_shared = self.chunks.len() == other.chunks.len()
            && self.chunks.iter().zip(&other.chunks).all(|(a, b)| Arc::ptr_eq(a, b));
        is_shared || self.len == other.len && self.iter().eq(other.iter())
    }
}

impl<T: Eq> Eq for Table<T> {}

/// By position. Panics if there are fewer items.
impl<T> Index<usize> for Table<T> {
    type Output = T;

    fn index(&self, mut at: usize) -> &T {
        for chunk in &self.chunks {
            match at.checked_sub(chunk.len()) {
                None => return &chunk[at],
                Some(rest) => at = rest,
            }
        }
        panic!("the table has {} items", self.len)
    }
}

impl<T: fmt::Debug> fmt::Debug for Table<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl<'a, T> IntoIterator for &'a Table<T> {
    type Item = &'a T;
    type IntoIter = Iter<'a, T>;

    fn into_iter(self) -> Iter<'a, T> {
        self.chunks.iter().flat_map(|chunk| &**chunk)
    }
}

/// Calls `visit` for each key whose item differs, in the order of keys, with the new item; `None`: it is gone. Chunks
/// that both tables have aren't looked at.
pub fn differences<'a, T: Keyed + PartialEq>(
    old: &'a Table<T>,
    new: &'a Table<T>,
    mut visit: impl FnMut(&'a T::Key, Option<&'a T>),
) {
    let mut cursor = Cursor { chunks: &old.chunks, chunk: 0, at: 0 };
    for items in &new.chunks {
        for (at, item) in items.iter().enumerate() {
            while let Some(before) = cursor.item().filter(|before| before.key() < item.key()) {
                visit(before.key(), None);
                cursor.advance();
            }
            if at == 0 && cursor.at == 0 && cursor.chunks.get(cursor.chunk).is_some_and(|it| Arc::ptr_eq(it, items)) {
                cursor.chunk += 1;
                break;
            }
            let before = cursor.item().filter(|before| before.key() == item.key());
            if before != Some(item) {
                visit(item.key(), Some(item));
            }
            if before.is_some() {
                cursor.advance();
            }
        }
    }
    while let Some(before) = cursor.item() {
        visit(before.key(), None);
        cursor.advance();
    }
}

/// A place in a table.
struct Cursor<'a, T> {
    chunks: &'a [Arc<Vec<T>>],
    chunk: usize,
    at: usize,
}

impl<'a, T> Cursor<'a, T> {
    fn item(&self) -> Option<&'a T> {
        self.chunks.get(self.chunk)?.get(self.at)
    }

    /// Moves to the next item.
    fn advance(&mut self) {
        self.at += 1;
        if self.chunks.get(self.chunk).is_some_and(|items| self.at == items.len()) {
            (self.chunk, self.at) = (self.chunk + 1, 0);
        }
    }
}

#[cfg(test)]
mod tests;
