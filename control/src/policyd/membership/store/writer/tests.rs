//! The writer against a record in memory: terms, conflicts, writes without a response.

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::Config;
use vipgate_coverage::{Coverage, property};

use super::super::fake::{FakeStore, Fault};
use super::*;
use crate::membership::MembershipView;

fn view(number: u64, tag: u64) -> Arc<MembershipView> {
    Arc::new(MembershipView { number, serving_changes: tag, members: Vec::new() })
}

/// A writer that has taken over, and its term.
async fn leading(store: &FakeStore) -> (RecordWriter<FakeStore>, u64) {
    let mut writer = store.writer();
    let term = writer.take_over().await.unwrap().record.term;
    (writer, term)
}

#[tokio::test]
async fn each_view_is_one_write() {
    let store = FakeStore::default();
    let (mut writer, term) = leading(&store).await;
    for number in 1..=3 {
        writer.commit(&Record { term, view: view(number, 0) }).await.unwrap();
        assert_eq!(store.writes(), 1 + number);
    }
}

#[tokio::test]
async fn nothing_of_a_former_leader_is_written_after_the_next_one_has_taken_over() {
    let store = FakeStore::default();
    let ((mut former, term), mut next) = (leading(&store).await, store.writer());
    let committed = Record { term, view: view(1, 0) };
    former.commit(&committed).await.unwrap();
    store.fail_next_write(Fault::Delayed);
    assert!(former.commit(&Record { term, view: view(2, 1) }).await.is_err());
    let start = next.take_over().await.unwrap();
    assert_eq!((start.previous_term, &start.record), (term, &Record { term: term + 1, ..committed }));
    assert_eq!(store.deliver_delayed(), None, "it names the version before the other server's write");
    let own = Record { term: start.record.term, view: view(2, 2) };
    next.commit(&own).await.unwrap();
    assert_eq!(store.record().unwrap(), own);
}

#[tokio::test]
async fn a_leader_finds_that_another_one_has_taken_over() {
    let store = FakeStore::default();
    let (mut former, term) = leading(&store).await;
    leading(&store).await;
    // By its next write.
    assert_eq!(former.commit(&Record { term, view: view(1, 8) }).await, Err(WriteError::Conflict));
    assert!(!former.is_in_term());
    // Or by what it reads.
    former.take_over().await.unwrap();
    leading(&store).await;
    assert!(former.is_in_term());
    let read = tokio::time::timeout(Duration::from_millis(50), former.next_remote_record()).await;
    assert!(read.is_err() && !former.is_in_term(), "{read:?}");
}

#[tokio::test]
async fn others_read_each_view_once_and_never_an_older_one() {
    let store = FakeStore::default();
    let mut other = store.writer();
    let (mut leader, term) = leading(&store).await;
    for number in 1..=2 {
        leader.commit(&Record { term, view: view(number, 0) }).await.unwrap();
    }
    for number in 1..=2 {
        assert_eq!(other.next_remote_record().await.view, view(number, 0));
    }
    // It takes over: what it wrote itself is nobody else's.
    let term = other.take_over().await.unwrap().record.term;
    other.commit(&Record { term, view: view(3, 0) }).await.unwrap();
    let read = tokio::time::timeout(Duration::from_millis(50), other.next_remote_record()).await;
    assert!(read.is_err() && other.is_in_term(), "{read:?}");
}

/// Whether the writer is in its term when it has processed all readings.
async fn is_in_term_after_readings(writer: &mut RecordWriter<FakeStore>) -> bool {
    let read = tokio::time::timeout(Duration::from_millis(50), writer.next_remote_record()).await;
    assert!(read.is_err(), "{read:?}");
    writer.is_in_term()
}

#[tokio::test]
async fn a_lost_record_ends_the_term_when_two_readings_show_it() {
    let store = FakeStore::default();
    let (mut writer, term) = leading(&store).await;
    store.read_by_all();
    assert!(is_in_term_after_readings(&mut writer).await, "its own");
    store.delete();
    store.read_by_all();
    assert!(is_in_term_after_readings(&mut writer).await, "it may have been read before the last write");
    store.read_by_all();
    assert!(!is_in_term_after_readings(&mut writer).await);
    assert_eq!(writer.take_over().await.unwrap().previous_term, 0);

    // Readings that are late.
    let (mut writer, mut number) = (writer, 0);
    for _ in 0..3 {
        store.read_by_all();
        number += 1;
        writer.commit(&Record { term, view: view(number, 0) }).await.unwrap();
        assert!(is_in_term_after_readings(&mut writer).await);
    }
}

#[tokio::test]
async fn a_deleted_record_is_written_again() {
    let store = FakeStore::default();
    let (mut writer, term) = leading(&store).await;
    writer.commit(&Record { term, view: view(5, 0) }).await.unwrap();
    store.delete();
    let next = Record { term, view: view(6, 0) };
    assert_eq!(writer.commit(&next).await, Err(WriteError::Conflict));
    assert_eq!(writer.take_over().await.unwrap().previous_term, 0);
    writer.commit(&next).await.unwrap();
    assert_eq!(store.record().unwrap(), next);
}

#[derive(Clone, Copy, Debug)]
enum Step {
    TakeOver(usize, Fault),
    Commit(usize, Fault),
    Deliver,
}

fn step() -> impl Strategy<Value = Step> {
    let fault = || {
        prop_oneof![
            4 => Just(Fault::None),
            1 => Just(Fault::RequestLost),
            1 => Just(Fault::ResponseLost),
            1 => Just(Fault::Delayed),
        ]
    };
    prop_oneof![
        2 => (0..3_usize, fault()).prop_map(|(server, fault)| Step::TakeOver(server, fault)),
        6 => (0..3_usize, fault()).prop_map(|(server, fault)| Step::Commit(server, fault)),
        2 => Just(Step::Deliver),
    ]
}

/// A server as the coordinator is one: it adopts the record when it takes over, and counts on from there.
struct Server {
    writer: RecordWriter<FakeStore>,
    term: u64,
    known: u64,
}

impl Server {
    fn adopt(&mut self, record: &Record) {
        self.term = record.term;
        self.known = self.known.max(record.view.number);
    }
}

async fn run(steps: &[Step], coverage: &Coverage) {
    let store = FakeStore::default();
    let mut servers = [0; 3].map(|_| Server { writer: store.writer(), term: 0, known: 0 });
    // The committed views, of which gateways learn, by number.
    let mut announced: BTreeMap<u64, u64> = BTreeMap::new();
    for (tag, step) in (1..).zip(steps) {
        let last = announced.last_key_value().map_or(0, |(number, _)| *number);
        match *step {
            Step::TakeOver(at, fault) => {
                store.fail_next_write(fault);
                let server = &mut servers[at];
                if let Ok(start) = server.writer.take_over().await {
                    server.adopt(&start.record);
                    assert!(start.record.term > start.previous_term);
                    assert!(server.known >= last, "it leads without view {last}, which gateways know");
                    coverage.count("taken over");
                }
                store.fail_next_write(Fault::None);
            }
            Step::Commit(at, fault) => {
                let server = &mut servers[at];
                let next = Record { term: server.term, view: view(server.known + 1, tag) };
                store.fail_next_write(fault);
                match server.writer.commit(&next).await {
                    Ok(()) => {
                        assert!(next.view.number > last, "view {} after {last}", next.view.number);
                        announced.insert(next.view.number, tag);
                        server.adopt(&next);
                        coverage.count("committed");
                    }
                    Err(WriteError::Conflict) => coverage.count("conflict"),
                    Err(WriteError::Unavailable(_)) => coverage.count("unknown outcome"),
                }
                store.fail_next_write(Fault::None);
            }
            Step::Deliver => {
                if store.deliver_delayed().is_some_and(|record| record.view.number > 0) {
                    coverage.count("delayed write done");
                }
            }
        }
        // Whatever happens, the stored view is not behind what gateways know, and is the one that they know.
        let stored = store.record().map(|record| record.view);
        if let Some((number, tag)) = announced.last_key_value() {
            let stored = stored.expect("a view is stored");
            assert!(stored.number > *number || stored.number == *number && stored.serving_changes == *tag);
        }
    }
}

#[test]
fn no_two_views_of_one_number_are_committed_and_the_stored_one_never_goes_back() {
    let classes = ["taken over", "committed", "conflict", "unknown outcome", "delayed write done"];
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let steps = prop::collection::vec(step(), 1..60);
    property(Config { cases: 2000, ..Config::default() }, &steps, &classes, |steps, coverage| {
        runtime.block_on(run(&steps, coverage));
        Ok(())
    });
}
