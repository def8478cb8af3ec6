//! What is in a journal comes back, or nothing does.

mod damaged;
mod kept;
mod shared;

use proptest::prelude::*;
use prost::bytes::Bytes;
use tempfile::TempDir;

use super::*;
use crate::xds::fixtures::key;

type State = BTreeMap<Key, Held>;
type Changes = Vec<(Key, Option<Held>)>;

fn held(text: &str) -> Held {
    Held { version: text.to_owned(), body: text.as_bytes().to_vec().into() }
}

fn endpoint(name: &str) -> Key {
    key(Kind::Endpoint, name)
}

/// A directory of its own, and a journal's place in it.
fn place() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("policy.cache");
    (folder, path)
}

fn open(path: &Path) -> (Cache, Found) {
    Cache::open(path).unwrap()
}

/// What a journal at this place comes to.
fn found(path: &Path) -> Found {
    open(path).1
}

/// The policy at this place.
fn state(path: &Path) -> State {
    match found(path) {
        Found::Policy(held, _) => held,
        other => panic!("no policy: {other:?}"),
    }
}

fn damage(found: &Found) -> &str {
    match found {
        Found::Damaged(reason) => reason,
        other => panic!("not damaged: {other:?}"),
    }
}

/// Makes changes to a state, and tells the journal.
fn update(cache: &mut Cache, state: &mut State, changes: Changes) {
    for (key, held) in changes.clone() {
        match held {
            Some(held) => drop(state.insert(key, held)),
            None => drop(state.remove(&key)),
        }
    }
    cache.append(changes, state).unwrap();
}

/// A journal of three updates: the states after each, and how long it was then.
fn three_updates(path: &Path) -> Vec<(State, usize)> {
    let (mut cache, mut state) = (open(path).0, State::new());
    let updates = [
        vec![
            (endpoint("a"), Some(held("1"))),
            (endpoint("b"), Some(held("2"))),
            (key(Kind::Settings, "settings"), Some(held("one"))),
        ],
        vec![
            (endpoint("a"), None),
            (endpoint("c"), Some(held("3"))),
            (key(Kind::Settings, "settings"), Some(held("two"))),
        ],
        vec![(endpoint("b"), Some(held("4"))), (key(Kind::Settings, "settings"), Some(held("three")))],
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
