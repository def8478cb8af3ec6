//! Runs against Secrets in memory: alone, several at once in any order, and killed between any two requests.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use proptest::prelude::*;

use super::super::Gateways;
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
    async fn owner(&mut self, owner: &Owner) -> Result<OwnerReference, CertificatesError> {
        tokio::task::yield_now().await;
        let (kind, name) = match owner {
            Owner::ConfigMap(name) => ("ConfigMap", name),
            Owner::DaemonSet(name) => ("DaemonSet", name),
        };
        Ok(OwnerReference { kind: kind.to_owned(), name: name.clone(), ..OwnerReference::default() })
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
}

fn specification() -> Specification {
    Specification {
        ca: "ca".to_owned(),
        server: Some(("server".to_owned(), names(&["policyd"]))),
        gateways: Some(Gateways {
            secrets: "gateway-{name}".parse().unwrap(),
            owners: Some("certificate-{name}".parse().unwrap()),
            names: names(&["node-1", "node-2"]),
        }),
        nodes: None,
        tunnels: None,
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
    assert_eq!(first.iter().filter(|line| line.starts_with("made ")).count(), 4, "{first:?}");
    assert_eq!(store.version(), 4);
    let second = run_alone(&store);
    assert_eq!(second.iter().filter(|line| line.starts_with("kept ")).count(), 4, "{second:?}");
    assert_eq!(store.version(), 4);
}

#[test]
fn a_gateways_secret_has_an_owner_of_its_own() {
    let store = FakeStore::default();
    run_alone(&store);
    let contents = store.0.borrow();
    let owner = |name: &str| {
        let owners = contents.secrets[name].metadata.owner_references.clone().unwrap();
        owners.into_iter().map(|it| format!("{} {}", it.kind, it.name)).collect::<Vec<_>>()
    };
    assert_eq!(owner("ca"), ["ConfigMap certificates"]);
    assert_eq!(owner("server"), ["ConfigMap certificates"]);
    assert_eq!(owner("gateway-node-1"), ["DaemonSet certificate-node-1"]);
    assert_eq!(owner("gateway-node-2"), ["DaemonSet certificate-node-2"]);
}

#[test]
fn a_lost_secret_is_made_again_of_the_same_ca() {
    let store = FakeStore::default();
    run_alone(&store);
    store.lose("server");
    let lines = run_alone(&store);
    let changes: Vec<&String> = lines.iter().filter(|line| !line.starts_with("kept ")).collect();
    assert_eq!(changes, ["made certificate of the policy server until 2027-02-25: there was none"]);
}

#[test]
fn nothing_is_written_beside_a_secret_of_somebody_else() {
    let store = FakeStore::default();
    let mut foreign = Secret::default();
    foreign.metadata.resource_version = Some("x".to_owned());
    store.0.borrow_mut().secrets.insert("gateway-node-1".to_owned(), foreign);
    let mut running = start(&store);
    let error = loop {
        if let Poll::Ready(done) = running.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            break done.unwrap_err();
        }
    };
    assert!(error.to_string().starts_with("Secret gateway-node-1 isn't managed by vipgate"), "{error}");
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

    /// Three runs at once, of which some are killed: those that end have made one CA and what it signs. After them
    /// nothing is left to do, unless one was killed; then the next run completes it.
    #[test]
    fn runs_at_once_agree(steps in steps(), is_ca_lost in any::<bool>()) {
        let store = FakeStore::default();
        if is_ca_lost {
            // By somebody who replaces everything.
            run_alone(&store);
            store.lose("ca");
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
            let made = reported.iter().filter(|line| line.starts_with("made CA")).count();
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

    /// The CA is deleted, with what it signed or without, while a run goes on. A run that begins after that ends with
    /// certificates of the new one, whatever the first one still writes.
    #[test]
    fn a_run_from_before_does_not_bring_a_deleted_ca_back(
        before in 0..20_usize,
        order in prop::collection::vec(any::<bool>(), 0..60),
        are_others_lost in any::<bool>(),
        is_all_new in any::<bool>(),
    ) {
        let store = FakeStore::default();
        if !is_all_new {
            run_alone(&store);
            // So that there is something to write.
            store.lose("gateway-node-1");
        }
        let mut first = Some(start(&store));
        (0..before).for_each(|_| drop(go_on(&mut first)));
        store.lose("ca");
        if are_others_lost {
            store.lose("server");
            store.lose("gateway-node-1");
            store.lose("gateway-node-2");
        }
        let mut second = Some(start(&store));
        for is_first in order {
            go_on(if is_first { &mut first } else { &mut second });
        }
        while first.is_some() || second.is_some() {
            go_on(&mut first);
            go_on(&mut second);
        }
        let version = store.version();
        let lines = run_alone(&store);
        prop_assert_eq!(store.version(), version, "{:?}", lines);
    }
}
