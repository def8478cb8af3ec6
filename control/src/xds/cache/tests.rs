//! Cache tests: what is read is exactly what was written last, or nothing.

mod damage;
mod locking;
mod persistence;

use proptest::prelude::*;
use prost::bytes::Bytes;
use tempfile::TempDir;

use super::*;
use crate::xds::fixtures::key;

type State = BTreeMap<Key, StoredResource>;

/// When the states of the tests were confirmed.
const CONFIRMED_AT: SystemTime = SystemTime::UNIX_EPOCH;

fn resource(text: &str) -> StoredResource {
    StoredResource { version: text.to_owned(), body: text.as_bytes().to_vec().into() }
}

fn endpoint(name: &str) -> Key {
    key(Kind::Endpoint, name)
}

/// A temporary directory, and the path of a cache in it.
fn temp_path() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("policy.cache");
    (dir, path)
}

fn open(path: &Path) -> (Cache, CacheContents) {
    Cache::open(path).unwrap()
}

/// The content of the cache at a path.
fn load(path: &Path) -> CacheContents {
    open(path).1
}

/// The resources of the cache at a path.
fn load_policy(path: &Path) -> State {
    match load(path) {
        CacheContents::Policy(resources, _) => resources,
        other => panic!("no policy: {other:?}"),
    }
}

fn store(cache: &Cache, state: &State) {
    cache.store(Some(&encode(state)), CONFIRMED_AT).unwrap();
}

/// A policy, and one that came after it.
fn two_states() -> [State; 2] {
    let settings = key(Kind::Settings, "settings");
    let first = [(endpoint("a"), resource("1")), (endpoint("b"), resource("2")), (settings.clone(), resource("one"))];
    let second = [(endpoint("b"), resource("3")), (endpoint("c"), resource("")), (settings, resource("two"))];
    [first.into(), second.into()]
}

/// The resources in the bytes of a file.
fn decode_file(bytes: &[u8]) -> Result<State, Damage> {
    decode(FORMAT.content(bytes)?)
}

/// Writes two policies, one after the other; returns the bytes of the last one.
fn two_writes(path: &Path) -> Vec<u8> {
    let cache = open(path).0;
    for state in &two_states() {
        store(&cache, state);
    }
    fs::read(path).unwrap()
}
