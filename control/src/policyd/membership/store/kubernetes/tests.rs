//! The store against an API server in memory: terms, conflicts, writes without a response.

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::test_runner::Config;
use vipgate_coverage::{Coverage, property};

use super::fake::{FakeApi, Fault};
use super::*;

fn view(number: u64, tag: u64) -> MembershipView {
    MembershipView { number, serving_changes: tag, members: Vec::new() }
}

fn with_view(view: &MembershipView) -> Transaction<'_> {
    Transaction { heartbeats: &[], view: Some(view), unchanged: &[], removed: &[] }
}

const HEARTBEATS: Transaction<'static> = Transaction { heartbeats: &[], view: None, unchanged: &[], removed: &[] };

fn conflict(outcome: Result<CommitOutcome, StoreError>) -> Option<Arc<MembershipView>> {
    match outcome {
        Ok(CommitOutcome::Conflict(contents)) => contents.view,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn heartbeats_write_nothing_and_each_view_writes_once() {
    let api = FakeApi::default();
    let mut store = api.store();
    assert!(store.take_over().await.unwrap().view.is_none());
    for number in 1..=3 {
        let next = view(number, 0);
        assert!(matches!(store.commit(with_view(&next)).await, Ok(CommitOutcome::Committed)));
        for _ in 0..10 {
            assert!(matches!(store.commit(HEARTBEATS).await, Ok(CommitOutcome::Committed)));
        }
        assert_eq!(api.writes(), 1 + number);
    }
}

#[tokio::test]
async fn nothing_of_a_former_leader_is_written_after_the_next_one_has_taken_over() {
    let api = FakeApi::default();
    let (mut former, mut next) = (api.store(), api.store());
    former.take_over().await.unwrap();
    let committed = view(1, 0);
    former.commit(with_view(&committed)).await.unwrap();
    api.fail_next_write(Fault::Delayed);
    assert!(former.commit(with_view(&view(2, 1))).await.is_err());
    assert_eq!(*next.take_over().await.unwrap().view.unwrap(), committed);
    assert_eq!(api.deliver_delayed(), None, "it names the version before the other server's write");
    let own = view(2, 2);
    assert!(matches!(next.commit(with_view(&own)).await, Ok(CommitOutcome::Committed)));
    assert_eq!(*api.record().unwrap().view.unwrap(), own);
}

#[tokio::test]
async fn a_leader_finds_that_another_one_has_taken_over() {
    let api = FakeApi::default();
    let (mut former, mut next) = (api.store(), api.store());
    former.take_over().await.unwrap();
    next.take_over().await.unwrap();
    next.commit(with_view(&view(1, 7))).await.unwrap();
    // By its next write.
    assert_eq!(*conflict(former.commit(with_view(&view(1, 8))).await).unwrap(), view(1, 7));
    // Or by what it reads: then not even heartbeats are acknowledged before it has taken over again.
    next.take_over().await.unwrap();
    former.take_over().await.unwrap();
    next.take_over().await.unwrap();
    let read = tokio::time::timeout(Duration::from_millis(50), former.next_remote_write()).await;
    assert!(read.is_err(), "it knows the view: {read:?}");
    assert_eq!(*conflict(former.commit(HEARTBEATS).await).unwrap(), view(1, 7));
}

#[tokio::test]
async fn others_read_each_view_once_and_never_an_older_one() {
    let api = FakeApi::default();
    let (mut leader, mut other) = (api.store(), api.store());
    leader.take_over().await.unwrap();
    for number in 1..=2 {
        leader.commit(with_view(&view(number, 0))).await.unwrap();
    }
    for number in 1..=2 {
        let RemoteWrite::View(read) = other.next_remote_write().await else { panic!("no view") };
        assert_eq!(*read, view(number, 0));
    }
    // It takes over: what it wrote itself is nobody else's.
    other.take_over().await.unwrap();
    other.commit(with_view(&view(3, 0))).await.unwrap();
    let read = tokio::time::timeout(Duration::from_millis(50), other.next_remote_write()).await;
    assert!(read.is_err(), "{read:?}");
}

#[tokio::test]
async fn a_deleted_object_is_written_again() {
    let api = FakeApi::default();
    let mut store = api.store();
    store.take_over().await.unwrap();
    store.commit(with_view(&view(5, 0))).await.unwrap();
    api.delete();
    assert!(conflict(store.commit(with_view(&view(6, 0))).await).is_none());
    assert!(conflict(store.commit(with_view(&view(6, 0))).await).is_none(), "it takes over");
    assert!(matches!(store.commit(with_view(&view(6, 0))).await, Ok(CommitOutcome::Committed)));
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

/// A server as the coordinator is one: it adopts what a conflict shows, and counts on from there.
struct Server {
    store: ViewStore<FakeApi>,
    known: u64,
}

impl Server {
    fn adopt(&mut self, view: Option<&MembershipView>) {
        self.known = self.known.max(view.map_or(0, |view| view.number));
    }
}

async fn run(steps: &[Step], coverage: &Coverage) {
    let api = FakeApi::default();
    let mut servers = [0; 3].map(|_| Server { store: api.store(), known: 0 });
    // The committed views, of which gateways learn, by number.
    let mut announced: BTreeMap<u64, u64> = BTreeMap::new();
    for (tag, step) in (1..).zip(steps) {
        match *step {
            Step::TakeOver(at, fault) => {
                api.fail_next_write(fault);
                let server = &mut servers[at];
                if let Ok(contents) = server.store.take_over().await {
                    server.adopt(contents.view.as_deref());
                    let last = announced.last_key_value().map_or(0, |(number, _)| *number);
                    assert!(server.known >= last, "it leads without view {last}, which gateways know");
                    coverage.count("taken over");
                }
            }
            Step::Commit(at, fault) => {
                let server = &mut servers[at];
                let next = view(server.known + 1, tag);
                api.fail_next_write(fault);
                match server.store.commit(with_view(&next)).await {
                    Ok(CommitOutcome::Committed) => {
                        let last = announced.last_key_value().map_or(0, |(number, _)| *number);
                        assert!(next.number > last, "view {} after {last}", next.number);
                        announced.insert(next.number, tag);
                        server.adopt(Some(&next));
                        coverage.count("committed");
                    }
                    Ok(CommitOutcome::Conflict(contents)) => {
                        server.adopt(contents.view.as_deref());
                        coverage.count("conflict");
                    }
                    Err(_) => coverage.count("unknown outcome"),
                }
                api.fail_next_write(Fault::None);
            }
            Step::Deliver => {
                if api.deliver_delayed().is_some_and(|record| record.view.is_some()) {
                    coverage.count("delayed write done");
                }
            }
        }
        // Whatever happens, the stored view is not behind what gateways know, and is the one that they know.
        let stored = api.record().and_then(|record| record.view);
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
