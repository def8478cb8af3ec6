//! Records in files and in etcd, as the ingester has them stored.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use tokio::time::timeout;

use super::*;
use crate::source::etcd::tests::server::{EtcdServer, TEST_TIMEOUT};
use crate::source::ingest::SourceIngester;
use crate::source::store::{ManifestStore, RecordMode};
use crate::source::{SourceEvent, SourceUpdate};

/// Key of the record in etcd.
const KEY: &str = "/vipgate-members/addresses";

fn ingester(storage: RecordStorage) -> SourceIngester {
    let store = ManifestStore::default().with_record(RecordMode::Kept);
    SourceIngester::new("a test".to_owned(), store).with_storage(Some(storage))
}

/// Replaces the objects by a pool of two addresses, and policies `NAMESPACE/p` that ask for one.
async fn put(intake: &mut SourceIngester, namespaces: &[&str]) {
    let pool = "apiVersion: vipgate.io/v1alpha1\nkind: AddressPool\nmetadata: {name: p}\n\
                spec: {ranges: [203.0.113.0/31]}\n";
    let policy = |namespace: &&str| {
        let text = format!(
            "apiVersion: vipgate.io/v1alpha1\nkind: EgressPolicy\nmetadata: {{name: p, namespace: {namespace}}}\n\
             spec: {{selectors: [{{podSelector: {{}}}}], pools: [{{name: p, count: 1}}]}}\n"
        );
        (format!("{namespace}.yaml").into(), Ok(text.into()))
    };
    let pool = ("pool.yaml".into(), Ok(pool.into()));
    let changed = std::iter::once(pool).chain(namespaces.iter().map(policy)).collect();
    let update = SourceUpdate { full: true, changed, ..SourceUpdate::default() };
    intake.ingest([SourceEvent::Update(update)]).await;
}

/// Compiles when that is due, until every address is recorded.
async fn recorded(intake: &mut SourceIngester) {
    let rounds = async {
        while intake.status().compiled.load().has_pending {
            intake.due().await;
            intake.recompile().await;
        }
    };
    timeout(TEST_TIMEOUT, rounds).await.expect("a record in time");
}

/// The VIPs in force, as lines of a record.
fn vips(intake: &SourceIngester) -> String {
    let compiled = intake.status().compiled.load_full();
    let lines = compiled.placement.as_ref().unwrap().vips.iter().map(|vip| format!("{} {}\n", vip.address, vip.name));
    lines.collect::<Vec<String>>().concat()
}

#[tokio::test]
async fn what_is_in_force_is_in_the_file_and_the_next_process_goes_on_with_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("new/addresses");
    let mut intake = ingester(RecordStorage::file(path.clone()).unwrap());
    put(&mut intake, &["a"]).await;
    let of_a = vips(&intake);
    assert!(!of_a.is_empty() && fs::read_to_string(&path).unwrap() == of_a, "{of_a}");
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let mut intake = ingester(RecordStorage::file(path.clone()).unwrap());
    put(&mut intake, &["a", "b"]).await;
    assert!(vips(&intake).contains(&of_a) && vips(&intake) == fs::read_to_string(&path).unwrap(), "{}", vips(&intake));
    put(&mut intake, &["b"]).await;
    let freed = fs::read_to_string(&path).unwrap();
    assert!(freed.contains(&format!("{} 20", of_a.trim_end())), "since when it is free: {freed}");
}

#[test]
fn a_file_that_is_no_record_is_an_error_with_its_line_and_what_to_do() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("addresses");
    fs::write(&path, "203.0.113.1 EgressPolicy a/p\nnonsense\n").unwrap();
    let error = RecordStorage::file(path.clone()).unwrap_err().to_string();
    let expected = format!("{}: line 2: `nonsense` is not an address with its owner", path.display());
    assert!(error.starts_with(&expected) && error.ends_with("remove the file and begin a new record"), "{error}");
    let error = RecordStorage::file(directory.path().to_owned()).unwrap_err().to_string();
    assert!(error.contains(": can't be read: it is a directory"), "{error}");
}

#[tokio::test]
async fn what_cannot_be_written_is_pending_until_it_is_written() {
    let directory = tempfile::tempdir().unwrap();
    let state = directory.path().join("state");
    let mut intake = ingester(RecordStorage::file(state.join("addresses")).unwrap());
    fs::write(&state, "not a directory").unwrap();
    put(&mut intake, &["a"]).await;
    intake.due().await;
    intake.recompile().await;
    assert!(intake.status().compiled.load().has_pending && vips(&intake).is_empty());
    // Others' changes go on.
    put(&mut intake, &["a", "b"]).await;
    fs::remove_file(&state).unwrap();
    recorded(&mut intake).await;
    assert_eq!(vips(&intake), fs::read_to_string(state.join("addresses")).unwrap());
    assert_eq!(vips(&intake).lines().count(), 2);
}

async fn value(server: &EtcdServer) -> String {
    let response = server.client().await.get(KEY, None).await.unwrap();
    response.kvs().first().map(|pair| pair.value_str().unwrap().to_owned()).unwrap_or_default()
}

fn etcd(server: &EtcdServer) -> SourceIngester {
    let config = Etcd { endpoints: vec![server.endpoint()], prefix: "/vipgate/".into() };
    ingester(RecordStorage::etcd(&config))
}

#[tokio::test]
async fn servers_that_share_etcd_give_the_same_addresses() {
    let server = EtcdServer::running().await;
    let (mut one, mut other) = (etcd(&server), etcd(&server));
    // Both know that there is no record.
    put(&mut one, &[]).await;
    put(&mut other, &[]).await;
    put(&mut one, &["a"]).await;
    let of_a = vips(&one);
    assert_eq!(value(&server).await, of_a);
    // Each write of one conflicts with that of the other before it.
    put(&mut other, &["b"]).await;
    put(&mut one, &["a", "b"]).await;
    put(&mut other, &["a", "b"]).await;
    let both = vips(&one);
    assert!(both.contains(&of_a) && both.lines().count() == 2, "{both}");
    assert_eq!((vips(&other), value(&server).await), (both.clone(), both.clone()));
    let mut third = etcd(&server);
    put(&mut third, &["a", "b"]).await;
    assert_eq!(vips(&third), both);
}

#[tokio::test]
async fn a_value_that_is_no_record_is_not_overwritten() {
    let server = EtcdServer::running().await;
    server.put(KEY, "nonsense").await;
    let mut intake = etcd(&server);
    put(&mut intake, &["a"]).await;
    intake.due().await;
    intake.recompile().await;
    assert!(intake.status().compiled.load().has_pending && vips(&intake).is_empty());
    assert_eq!(value(&server).await, "nonsense");
    server.put(KEY, "203.0.113.1 EgressPolicy a/p\n").await;
    recorded(&mut intake).await;
    assert_eq!(vips(&intake), "203.0.113.1 EgressPolicy a/p\n");
}

#[tokio::test]
async fn addresses_are_pending_while_etcd_is_unreachable() {
    let mut server = EtcdServer::running().await;
    let mut intake = etcd(&server);
    put(&mut intake, &[]).await;
    server.kill();
    put(&mut intake, &["a"]).await;
    assert!(intake.status().compiled.load().has_pending);
    server.start().await;
    recorded(&mut intake).await;
    assert_eq!(vips(&intake), value(&server).await);
}
