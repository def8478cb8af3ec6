//! Runs against Secrets in memory: alone, several at once in any order, and killed between any two requests.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use proptest::prelude::*;

use super::super::fixtures::{DAY, names, now};
use super::*;

/// Secrets by name.
#[derive(Default)]
struct Contents {
    secrets: BTreeMap<String, Secret>,
    /// The last resource version.
    version: u64,
}

/// A store of Secrets, as one of its clients has it: each request waits once, and is done at once then.
#[derive(Clone, Default)]
struct FakeStore(Rc<RefCell<Contents>>);

impl SecretStore for FakeStore {
    async fn owner(&mut self, name: &str) -> Result<OwnerReference, CertificatesError> {
        tokio::task::yield_now().await;
        Ok(OwnerReference { kind: "ServiceAccount".to_owned(), name: name.to_owned(), ..OwnerReference::default() })
    }

    async fn read(&mut self, name: &str) -> Result<Option<Secret>, CertificatesError> {
        tokio::task::yield_now().await;
        Ok(self.0.borrow().secrets.get(name).cloned())
    }

    async fn write(&mut self, secret: &Secret) -> Result<(), WriteError> {
        tokio::task::yield_now().await;
        let mut contents = self.0.borrow_mut();
        let name = contents.expect(secret)?;
        contents.version += 1;
        let mut secret = secret.clone();
        secret.metadata.resource_version = Some(contents.version.to_string());
        contents.secrets.insert(name, secret);
        Ok(())
    }
}

impl Contents {
    /// The name of a Secret, if that version of it is there.
    fn expect(&self, secret: &Secret) -> Result<String, WriteError> {
        let name = secret.metadata.name.clone().unwrap();
        let version = |secret: &Secret| secret.metadata.resource_version.clone();
        let is_current = self.secrets.get(&name).and_then(version) == version(secret);
        if is_current { Ok(name) } else { Err(WriteError::Conflict) }
    }
}

impl FakeStore {
    fn version(&self) -> u64 {
        self.0.borrow().version
    }

    fn lose(&self, name: &str) {
        self.0.borrow_mut().secrets.remove(name);
    }

    /// The CA bundle in a Secret.
    fn bundle(&self, name: &str) -> Vec<u8> {
        self.0.borrow().secrets[name].data.as_ref().unwrap()["ca.crt"].0.clone()
    }
}

fn specification() -> Specification {
    Specification {
        server: "server".to_owned(),
        server_names: names(&["policyd"]),
        clients: "clients".to_owned(),
        tunnels: Some("tunnels".to_owned()),
        validity: 90 * DAY,
        renew_before: 30 * DAY,
        owner: Some("certificates".to_owned()),
    }
}

/// A run that goes on step by step, and ends with the lines that it reports.
type Running = Pin<Box<dyn Future<Output = Result<Vec<String>, CertificatesError>>>>;

fn start(store: &FakeStore) -> Running {
    let mut store = store.clone();
    Box::pin(async move {
        let mut lines = Vec::new();
        run(&mut store, &specification(), now(), &mut |line: &str| lines.push(line.to_owned())).await?;
        Ok(lines)
    })
}

/// Goes on up to the next request; the lines at the end.
fn go_on(run: &mut Option<Running>) -> Option<Vec<String>> {
    let Poll::Ready(done) = run.as_mut()?.as_mut().poll(&mut Context::from_waker(Waker::noop())) else { return None };
    *run = None;
    Some(done.unwrap())
}

fn run_alone(store: &FakeStore) -> Vec<String> {
    let mut running = Some(start(store));
    loop {
        if let Some(lines) = go_on(&mut running) {
            return lines;
        }
    }
}

#[test]
fn a_second_run_writes_nothing() {
    let store = FakeStore::default();
    let first = run_alone(&store);
    assert_eq!(first.iter().filter(|line| line.starts_with("made ")).count(), 2, "{first:?}");
    assert_eq!(store.version(), 3);
    let second = run_alone(&store);
    assert_eq!(second.iter().filter(|line| line.starts_with("kept ")).count(), 2, "{second:?}");
    assert_eq!(store.version(), 3);
    for secret in store.0.borrow().secrets.values() {
        let owners = secret.metadata.owner_references.iter().flatten();
        let owners: Vec<String> = owners.map(|it| format!("{} {}", it.kind, it.name)).collect();
        assert_eq!(owners, ["ServiceAccount certificates"]);
    }
}

#[test]
fn a_lost_secret_is_made_again_with_the_same_bundle() {
    let store = FakeStore::default();
    run_alone(&store);
    store.lose("clients");
    let lines = run_alone(&store);
    let changes: Vec<&String> = lines.iter().filter(|line| !line.starts_with("kept ")).collect();
    assert_eq!(changes, ["stored `ca.crt` in Secret clients"]);
    assert_eq!(store.bundle("clients"), store.bundle("server"));
}

#[test]
fn nothing_is_written_beside_a_secret_of_somebody_else() {
    let store = FakeStore::default();
    let mut foreign = Secret::default();
    foreign.metadata.resource_version = Some("x".to_owned());
    store.0.borrow_mut().secrets.insert("clients".to_owned(), foreign);
    let mut running = start(&store);
    let error = loop {
        if let Poll::Ready(done) = running.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            break done.unwrap_err();
        }
    };
    assert!(error.to_string().starts_with("Secret clients isn't managed by vipgate"), "{error}");
    assert_eq!(store.version(), 0);
}

/// What happens next.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// A run goes on, up to its next request.
    Continue(usize),
    /// A run is killed.
    Kill(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step =
        (0..3_usize, 0..12_u8).prop_map(|(run, dice)| if dice == 0 { Step::Kill(run) } else { Step::Continue(run) });
    prop::collection::vec(step, 0..80)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]

    /// Three runs at once, of which some are killed: those that end have made one certificate. After them nothing is
    /// left to do, unless one was killed; then the next run completes it.
    #[test]
    fn runs_at_once_agree(steps in steps(), is_server_lost in any::<bool>()) {
        let store = FakeStore::default();
        if is_server_lost {
            // By somebody who replaces the key.
            run_alone(&store);
            store.lose("server");
        }
        let mut runs: Vec<Option<Running>> = (0..3).map(|_| Some(start(&store))).collect();
        let mut reported = Vec::new();
        let mut killed = 0;
        for step in steps {
            match step {
                Step::Continue(run) => reported.extend(go_on(&mut runs[run]).into_iter().flatten()),
                Step::Kill(run) => killed += usize::from(runs[run].take().is_some()),
            }
        }
        while runs.iter().any(Option::is_some) {
            for run in &mut runs {
                reported.extend(go_on(run).into_iter().flatten());
            }
        }
        if killed == 0 {
            let made = reported.iter().filter(|line| line.starts_with("made certificate")).count();
            prop_assert_eq!(made, 1);
        }
        let version = store.version();
        let lines = run_alone(&store);
        if killed < 3 {
            prop_assert_eq!(store.version(), version, "{:?}", lines);
        }
        let version = store.version();
        run_alone(&store);
        prop_assert_eq!(store.version(), version);
    }

    /// The server's Secret is deleted, with the clients' or without, while a run goes on. A run that begins after that
    /// ends with the new certificate in both, whatever the first one still writes.
    #[test]
    fn a_run_from_before_does_not_bring_a_deleted_certificate_back(
        before in 0..20_usize,
        order in prop::collection::vec(any::<bool>(), 0..60),
        are_clients_lost in any::<bool>(),
        is_all_new in any::<bool>(),
    ) {
        let store = FakeStore::default();
        if !is_all_new {
            run_alone(&store);
            // So that there is something to write.
            store.lose("clients");
        }
        let mut first = Some(start(&store));
        (0..before).for_each(|_| drop(go_on(&mut first)));
        store.lose("server");
        if are_clients_lost {
            store.lose("clients");
        }
        let mut second = Some(start(&store));
        for is_first in order {
            go_on(if is_first { &mut first } else { &mut second });
        }
        while first.is_some() || second.is_some() {
            go_on(&mut first);
            go_on(&mut second);
        }
        prop_assert_eq!(store.bundle("clients"), store.bundle("server"));
        let version = store.version();
        let lines = run_alone(&store);
        prop_assert_eq!(store.version(), version, "{:?}", lines);
    }
}
