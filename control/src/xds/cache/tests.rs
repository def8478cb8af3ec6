//! Journal tests: replay restores exactly what was appended, or nothing.

mod corruption;
mod locking;
mod persistence;

use proptest::prelude::*;
use prost::bytes::Bytes;
use tempfile::TempDir;

use super::*;
use crate::xds::fixtures::key;

type State = BTreeMap<Key, StoredResource>;
type Changes = Vec<(Key, Option<StoredResource>)>;

fn resource(text: &str) -> StoredResource {
    StoredResource { version: text.to_owned(), body: text.as_bytes().to_vec().into() }
}

fn endpoint(name: &str) -> Key {
    key(Kind::Endpoint, name)
}

/// A temporary directory, and the path of a journal in it.
fn temp_path() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("policy.cache");
    (dir, path)
}

fn open(path: &Path) -> (Cache, CacheContents) {
    Cache::open(path).unwrap()
}

/// The contents of the journal at a path.
fn load(path: &Path) -> CacheContents {
    open(path).1
}

/// The resources of the journal at a path.
fn load_policy(path: &Path) -> State {
    match load(path) {
        CacheContents::Policy(resources, _) => resources,
        other => panic!("no policy: {other:?}"),
    }
}

fn damage_reason(contents: &CacheContents) -> String {
    match contents {
        CacheContents::Damaged(error) => error.to_string(),
        other => panic!("not damaged: {other:?}"),
    }
}

/// Applies changes to a state and appends them to the journal.
fn update(cache: &mut Cache, state: &mut State, changes: Changes) {
    for (key, resource) in changes.clone() {
        match resource {
            Some(resource) => drop(state.insert(key, resource)),
            None => drop(state.remove(&key)),
        }
    }
    cache.append(changes, state).unwrap();
}

/// Writes a journal of three updates; returns the state and the length of the journal after each.
fn three_updates(path: &Path) -> Vec<(State, usize)> {
    let (mut cache, mut state) = (open(path).0, State::new());
    let updates = [
        vec![
            (endpoint("a"), Some(resource("1"))),
            (endpoint("b"), Some(resource("2"))),
            (key(Kind::Settings, "settings"), Some(resource("one"))),
        ],
        vec![
            (endpoint("a"), None),
            (endpoint("c"), Some(resource("3"))),
            (key(Kind::Settings, "settings"), Some(resource("two"))),
        ],
        vec![(endpoint("b"), Some(resource("4"))), (key(Kind::Settings, "settings"), Some(resource("three")))],
    ];
    let mut states = Vec::new();
    for changes in updates {
        update(&mut cache, &mut state, changes);
        states.push((state.clone(), length(path) as usize));
    }
    states
}

fn length(path: &Path) -> u64 {
    fs::metadata(path).unwrap().len()
}
