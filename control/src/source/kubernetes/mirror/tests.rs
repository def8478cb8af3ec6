use proptest::prelude::*;
use proptest::test_runner::Config;
use vipgate_coverage::{Coverage, property};

use super::super::manifest::hash;
use super::*;

const SERVICES: Collection = Collection { kind: Kind::Service, namespace: None };
const POLICIES: Collection = Collection { kind: Kind::EgressPolicy, namespace: None };
const PODS: Collection = Collection { kind: Kind::Pod, namespace: None };

fn manifest(name: &str, text: &str) -> Manifest {
    let document = text.into();
    let (hash, selects_pods) = (hash(&document), text.contains("selectors"));
    Manifest { name: name.into(), document, hash, selects_pods, observation: None }
}

fn listed(objects: &[(&str, &str)], definition: Option<&str>) -> CollectionEvent {
    let objects = objects.iter().map(|(name, text)| manifest(name, text)).collect();
    CollectionEvent::Listed(objects, definition.map(Arc::from))
}

fn missing() -> CollectionEvent {
    CollectionEvent::Unavailable { is_missing: true, reason: "no such kind".to_owned() }
}

/// A mirror of Services and policies, with one of each.
fn mirror() -> Mirror {
    let mut mirror = Mirror::default();
    mirror.add(SERVICES);
    mirror.add(POLICIES);
    mirror.apply(&SERVICES, listed(&[("Service/t/a", "1")], None));
    assert_eq!(mirror.take_update(), None, "half a cluster");
    mirror.apply(&POLICIES, listed(&[("EgressPolicy/t/p", "1")], Some("u1")));
    let update = mirror.take_update().unwrap();
    assert!(update.full);
    assert_eq!(names(&update), ["EgressPolicy/t/p", "Service/t/a"]);
    assert_eq!(mirror.take_update(), None);
    mirror
}

fn names(update: &SourceUpdate) -> Vec<&str> {
    update.changed.iter().map(|(name, _)| &**name).collect()
}

fn removed(update: &SourceUpdate) -> Vec<&str> {
    update.removed.iter().map(|name| &**name).collect()
}

fn paths(update: &SourceUpdate) -> Vec<&str> {
    update.unavailable.iter().map(|it| &*it.path).collect()
}

#[test]
fn a_list_is_one_update_with_what_differs() {
    let mut mirror = mirror();
    mirror.apply(&SERVICES, CollectionEvent::Applied(manifest("Service/t/b", "1")));
    mirror.apply(&SERVICES, listed(&[("Service/t/b", "1"), ("Service/t/c", "1")], None));
    let update = mirror.take_update().unwrap();
    assert!(!update.full);
    assert_eq!((names(&update), removed(&update)), (vec!["Service/t/b", "Service/t/c"], vec!["Service/t/a"]));
}

#[test]
fn a_change_without_meaning_is_no_update() {
    let mut mirror = mirror();
    mirror.apply(&SERVICES, CollectionEvent::Applied(manifest("Service/t/a", "1")));
    mirror.apply(&SERVICES, listed(&[("Service/t/a", "1")], None));
    mirror.apply(&SERVICES, CollectionEvent::Failed("reset".to_owned()));
    assert_eq!(mirror.take_update(), None);
}

#[test]
fn a_new_session_reports_nothing_until_everything_is_listed() {
    let mut mirror = mirror();
    mirror.list_again();
    mirror.apply(&SERVICES, listed(&[("Service/t/b", "1")], None));
    assert_eq!(mirror.take_update(), None);
    mirror.apply(&POLICIES, listed(&[("EgressPolicy/t/p", "1")], Some("u1")));
    let update = mirror.take_update().unwrap();
    assert_eq!((names(&update), removed(&update)), (vec!["Service/t/b"], vec!["Service/t/a"]));
    // Without any change there is one as well: it says that the source is there again.
    mirror.list_again();
    mirror.apply(&SERVICES, listed(&[("Service/t/b", "1")], None));
    mirror.apply(&POLICIES, listed(&[("EgressPolicy/t/p", "1")], Some("u1")));
    assert!(mirror.take_update().unwrap().is_empty());
}

#[test]
fn a_removed_definition_keeps_its_objects_and_so_does_its_successor() {
    let mut mirror = mirror();
    mirror.apply(&POLICIES, missing());
    let update = mirror.take_update().unwrap();
    assert_eq!((update.is_empty(), paths(&update)), (true, vec!["EgressPolicy"]));
    mirror.apply(&POLICIES, listed(&[], Some("u2")));
    let update = mirror.take_update().unwrap();
    assert_eq!((update.is_empty(), paths(&update)), (true, vec!["EgressPolicy/t/p"]));
    // Created again, even with the same text.
    mirror.apply(&POLICIES, CollectionEvent::Applied(manifest("EgressPolicy/t/p", "1")));
    let update = mirror.take_update().unwrap();
    assert_eq!((names(&update), paths(&update)), (vec!["EgressPolicy/t/p"], vec![]));
    mirror.apply(&POLICIES, CollectionEvent::Deleted("EgressPolicy/t/p".into()));
    assert_eq!(removed(&mirror.take_update().unwrap()), ["EgressPolicy/t/p"]);
}

#[test]
fn a_collection_that_is_readable_again_is_reported_whole() {
    let mut mirror = mirror();
    let reason = "forbidden".to_owned();
    mirror.apply(&POLICIES, CollectionEvent::Unavailable { is_missing: false, reason });
    assert_eq!(paths(&mirror.take_update().unwrap()), ["EgressPolicy"]);
    mirror.apply(&POLICIES, listed(&[("EgressPolicy/t/p", "1")], Some("u1")));
    let update = mirror.take_update().unwrap();
    assert_eq!((names(&update), paths(&update)), (vec!["EgressPolicy/t/p"], vec![]));
}

#[test]
fn at_first_a_missing_kind_blocks_unless_clusters_may_lack_it() {
    let mut mirror = Mirror::default();
    let cidrs = Collection { kind: Kind::ServiceCidr, namespace: None };
    mirror.add(POLICIES);
    mirror.add(cidrs.clone());
    mirror.apply(&cidrs, missing());
    mirror.apply(&POLICIES, missing());
    assert_eq!(mirror.take_update(), None);
    assert_eq!(&*mirror.blocked_by().unwrap().path, "EgressPolicy");
    mirror.apply(&POLICIES, listed(&[], Some("u1")));
    let update = mirror.take_update().unwrap();
    assert_eq!((update.full, paths(&update)), (true, vec![]));
}

#[test]
fn a_policy_that_selects_pods_waits_for_them() {
    let mut mirror = mirror();
    assert!(!mirror.selects_pods());
    mirror.apply(&POLICIES, CollectionEvent::Applied(manifest("EgressPolicy/t/q", "selectors")));
    assert!(mirror.selects_pods());
    mirror.add(PODS);
    assert_eq!(mirror.take_update(), None);
    mirror.apply(&PODS, listed(&[("Pod/t/x", "1")], None));
    assert_eq!(names(&mirror.take_update().unwrap()), ["EgressPolicy/t/q", "Pod/t/x"]);
    mirror.apply(&POLICIES, CollectionEvent::Deleted("EgressPolicy/t/q".into()));
    assert!(!mirror.selects_pods());
    mirror.remove(Kind::Pod);
    assert_eq!(removed(&mirror.take_update().unwrap()), ["EgressPolicy/t/q", "Pod/t/x"]);
    // What the aborted watch had sent is ignored.
    mirror.apply(&PODS, listed(&[("Pod/t/x", "1")], None));
    assert_eq!(mirror.take_update(), None);
}

/// What happens in the cluster, or to its watches.
#[derive(Clone, Debug)]
enum Step {
    Put(bool, u8, u8),
    Delete(bool, u8),
    /// The watch of a collection lists again.
    List(bool),
    Forbid(bool),
    /// The definition is removed with all objects, and created again.
    ReplaceDefinition,
    NewSession,
    Update,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (any::<bool>(), 0..4_u8, 0..3_u8).prop_map(|(of, name, text)| Step::Put(of, name, text)),
        4 => (any::<bool>(), 0..4_u8).prop_map(|(of, name)| Step::Delete(of, name)),
        3 => any::<bool>().prop_map(Step::List),
        1 => any::<bool>().prop_map(Step::Forbid),
        1 => Just(Step::ReplaceDefinition),
        1 => Just(Step::NewSession),
        6 => Just(Step::Update),
    ]
}

/// A cluster, a mirror of it, and what its updates make of an empty store.
#[derive(Debug, Default)]
struct World {
    mirror: Mirror,
    /// Objects of Services and policies.
    cluster: [BTreeMap<Arc<str>, String>; 2],
    /// Whether the watch of a collection goes on; otherwise it lists next.
    is_watched: [bool; 2],
    definition: u32,
    store: BTreeMap<Arc<str>, EntryContent>,
    /// Policies that were lost with their definition.
    lost: BTreeSet<Arc<str>>,
}

impl World {
    fn collection(of: bool) -> &'static Collection {
        if of { &POLICIES } else { &SERVICES }
    }

    fn list(&mut self, of: bool) {
        let objects = self.cluster[usize::from(of)].iter().map(|(name, text)| manifest(name, text)).collect();
        let definition = of.then(|| self.definition.to_string().into());
        self.mirror.apply(Self::collection(of), CollectionEvent::Listed(objects, definition));
        self.is_watched[usize::from(of)] = true;
    }

    fn step(&mut self, step: &Step, coverage: &Coverage) {
        match *step {
            Step::Put(of, name, text) => {
                let name: Arc<str> = format!("{}/t/{name}", Self::collection(of)).into();
                self.cluster[usize::from(of)].insert(name.clone(), text.to_string());
                if self.lost.remove(&name) {
                    coverage.count("created again");
                }
                if self.is_watched[usize::from(of)] {
                    let event = CollectionEvent::Applied(manifest(&name, &text.to_string()));
                    self.mirror.apply(Self::collection(of), event);
                } else {
                    coverage.count("missed change");
                }
            }
            Step::Delete(of, name) => {
                let name: Arc<str> = format!("{}/t/{name}", Self::collection(of)).into();
                if self.cluster[usize::from(of)].remove(&name).is_some() {
                    if self.is_watched[usize::from(of)] {
                        self.mirror.apply(Self::collection(of), CollectionEvent::Deleted(name));
                    } else {
                        coverage.count("missed deletion");
                        // To the mirror it went with an earlier definition.
                        let objects = &self.mirror.collections[Self::collection(of)];
                        let definition = self.definition.to_string();
                        let is_earlier = objects.definition.as_deref().is_some_and(|before| *before != definition);
                        if of && objects.hashes.contains_key(&name) && (is_earlier || objects.orphaned.contains(&name))
                        {
                            self.lost.insert(name);
                        }
                    }
                }
            }
            Step::List(of) => self.list(of),
            Step::Forbid(of) => {
                let event = CollectionEvent::Unavailable { is_missing: false, reason: "forbidden".to_owned() };
                self.mirror.apply(Self::collection(of), event);
                self.is_watched[usize::from(of)] = false;
            }
            Step::ReplaceDefinition => {
                self.cluster[1].clear();
                self.lost.extend(self.mirror.collections[&POLICIES].hashes.keys().cloned());
                self.definition += 1;
                if self.is_watched[1] {
                    self.mirror.apply(&POLICIES, missing());
                    self.is_watched[1] = false;
                }
                coverage.count("replaced definition");
            }
            Step::NewSession => {
                self.mirror.list_again();
                self.is_watched = [false; 2];
            }
            Step::Update => self.update(coverage),
        }
    }

    fn update(&mut self, coverage: &Coverage) {
        let Some(update) = self.mirror.take_update() else { return };
        if update.full {
            self.store.clear();
        }
        for name in update.removed {
            let is_there = self.cluster.iter().any(|objects| objects.contains_key(&name));
            assert!(!is_there || self.is_watched != [true; 2], "{name} exists, and was removed");
            assert!(!self.lost.contains(&name), "{name} was lost with its definition, and removed");
            self.store.remove(&name);
            coverage.count("removed");
        }
        self.store.extend(update.changed.into_iter().map(|(name, text)| (name, text.unwrap())));
        if update.unavailable.iter().any(|it| it.path.starts_with("EgressPolicy/")) {
            coverage.count("orphaned");
        }
    }
}

#[test]
fn the_store_ends_up_with_the_cluster() {
    let classes =
        ["created again", "missed change", "missed deletion", "replaced definition", "removed", "orphaned", "compared"];
    let steps = prop::collection::vec(step(), 1..60);
    property(Config { cases: 2000, ..Config::default() }, &steps, &classes, |steps, coverage| {
        let mut world = World::default();
        world.mirror.add(SERVICES);
        world.mirror.add(POLICIES);
        for step in &steps {
            world.step(step, coverage);
        }
        world.list(false);
        world.list(true);
        world.update(coverage);
        let mut expected = world.lost.clone();
        expected.extend(world.cluster.iter().flatten().map(|(name, _)| name.clone()));
        prop_assert_eq!(world.store.keys().cloned().collect::<BTreeSet<_>>(), expected);
        for (name, text) in world.cluster.iter().flatten() {
            prop_assert_eq!(&world.store[name], &EntryContent::Object(text.as_str().into()));
        }
        coverage.count("compared");
        Ok(())
    });
}
