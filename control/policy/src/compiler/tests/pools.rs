//! What policies get of pools: by the record of what they have, and of who had an address before.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use proptest::prelude::*;
use vipgate_coverage::{Coverage, property};

use super::isolation::of;
use super::*;
use crate::address_record::AddressRecord;
use crate::diagnostic::Code;
use crate::manifest::{Kind, ObjectId};

/// The source, the record and the time: as a store has them.
#[derive(Default)]
struct World {
    documents: BTreeMap<String, String>,
    record: Arc<AddressRecord>,
    now: Timestamp,
    unreadable: BTreeSet<ObjectId>,
    is_incomplete: bool,
}

impl World {
    fn new(pool_spec: &str) -> Self {
        let mut world = Self::default();
        for (name, document) in [
            ("pool", pool("p", pool_spec)),
            ("pod-a", pod("a", "x", "", "10.0.0.1")),
            ("pod-b", pod("b", "x", "", "10.0.0.2")),
        ] {
            world.documents.insert(name.to_owned(), document);
        }
        world
    }

    /// Adds a policy `NAMESPACE/NAME` that asks for addresses.
    fn put(&mut self, path: &str, count: u32) {
        self.put_with(path, &format!("pools: [{{name: p, count: {count}}}]"));
    }

    fn put_with(&mut self, path: &str, vips: &str) {
        let (namespace, name) = path.split_once('/').unwrap();
        let policy = policy(name, "", &format!("{{selectors: [{{podSelector: {{}}}}], {vips}}}"));
        self.documents.insert(path.to_owned(), of(namespace, &policy));
    }

    fn recorded(&self) -> Recorded {
        let is_complete = !self.is_incomplete;
        let (record, unreadable, unrecorded_pools) = (self.record.clone(), self.unreadable.clone(), BTreeSet::new());
        Recorded { record, now: self.now, unreadable, is_complete, unrecorded_pools }
    }

    fn objects(&self) -> Vec<Object> {
        let text: Vec<&str> = self.documents.values().map(String::as_str).collect();
        objects(&text.join("---\n"))
    }

    fn options(&self) -> Options {
        Options { recorded: Some(self.recorded()), ..Options::default() }
    }

    fn compile(&self) -> Compiled {
        compile_for(self.options(), &self.objects())
    }

    /// Compiles until what is given is recorded.
    fn converge(&mut self) -> Compiled {
        for _ in 0..3 {
            let compiled = self.compile();
            let Some(next) = compiled.addresses.next_record.clone() else {
                assert!(!compiled.addresses.are_pending, "{:?}", compiled.diagnostics);
                return compiled;
            };
            self.record = next;
        }
        panic!("no end: {:?}", self.compile().diagnostics);
    }

    fn wait(&mut self, seconds: u64) {
        self.now += Duration::from_secs(seconds);
    }
}

/// The VIPs of each policy, by its path.
fn vips(compiled: &Compiled) -> BTreeMap<String, Vec<IpAddr>> {
    let mut vips: BTreeMap<String, Vec<IpAddr>> = BTreeMap::new();
    for vip in &compiled.placement.vips {
        vips.entry(vip.name.rsplit(' ').next().unwrap().to_owned()).or_default().push(vip.address);
    }
    vips
}

fn codes(compiled: &Compiled) -> Vec<Code> {
    let about_pools = |code: &Code| !matches!(code, Code::PoliciesOverlap | Code::NoPodSelected);
    compiled.diagnostics.iter().map(|it| it.code).filter(about_pools).collect()
}

const SMALL: &str = "{ranges: [203.0.113.0/30], reuseAfter: 60s}";

#[test]
fn an_address_is_in_force_once_it_is_recorded() {
    let mut world = World::new(SMALL);
    world.put("a/p", 1);
    let first = world.compile();
    assert_eq!((codes(&first), vips(&first)), (vec![Code::AddressPending], BTreeMap::new()));
    assert!(first.addresses.are_pending);
    // What it covers is covered without a VIP.
    assert!(first.placement.endpoints.iter().all(|endpoint| endpoint.vips.is_empty()));
    assert_eq!(first.placement.endpoints.len(), 1);
    let converged = world.converge();
    assert_eq!((codes(&converged), vips(&converged)["a/p"].len()), (vec![], 1));
    // More are added to what it has.
    let before = vips(&converged)["a/p"].clone();
    world.put("a/p", 2);
    let growing = world.compile();
    assert_eq!((codes(&growing), &vips(&growing)["a/p"]), (vec![Code::AddressPending], &before));
    let grown = vips(&world.converge())["a/p"].clone();
    assert!(grown.len() == 2 && grown.contains(&before[0]), "{grown:?}");
}

#[test]
fn an_address_stays_whatever_others_do() {
    // In a pool of four addresses, hashes collide.
    for names in [["a/p", "b/p", "b/q"], ["b/q", "a/p", "b/p"], ["b/p", "b/q", "a/p"]] {
        let mut world = World::new(SMALL);
        let mut before = BTreeMap::new();
        for name in names {
            world.put(name, 1);
            let after = vips(&world.converge());
            assert!(before.iter().all(|(name, vips)| after.get(name) == Some(vips)), "{before:?} {after:?}");
            before = after;
        }
        world.documents.remove(names[0]);
        let after = vips(&world.converge());
        assert_eq!(after.len(), 2);
        assert!(after.iter().all(|(name, vips)| before.get(name) == Some(vips)), "{before:?} {after:?}");
    }
}

#[test]
fn an_address_that_became_free_is_quarantined_for_others() {
    let mut world = World::new("{ranges: [203.0.113.0/32], reuseAfter: 60s}");
    world.put("a/p", 1);
    world.converge();
    world.documents.remove("a/p");
    world.wait(100);
    world.put("b/q", 1);
    world.converge();
    let waiting = world.compile();
    assert_eq!((codes(&waiting), vips(&waiting)), (vec![Code::AddressQuarantined], BTreeMap::new()));
    assert!(waiting.accept().is_ok(), "a warning: it ends by itself");
    let end = world.now + Duration::from_mins(1);
    assert_eq!(world.compile().addresses.waits_until, Some(end));
    // Who had it gets it again at once.
    let former = world.documents.remove("b/q").unwrap();
    world.put("a/p", 1);
    assert_eq!(vips(&world.converge()).keys().collect::<Vec<_>>(), ["a/p"]);
    world.documents.remove("a/p");
    world.documents.insert("b/q".to_owned(), former);
    world.converge();
    world.wait(59);
    assert_eq!(codes(&world.converge()), [Code::AddressQuarantined]);
    world.wait(1);
    assert_eq!(vips(&world.converge()).keys().collect::<Vec<_>>(), ["b/q"]);
}

#[test]
fn who_names_a_quarantined_address_of_another_namespace_waits() {
    let mut world = World::new(SMALL);
    world.put("a/p", 1);
    let address = vips(&world.converge())["a/p"][0];
    let named = format!("addresses: [{address}]");
    // While somebody has it, nobody gets it by its name, however old.
    world.put_with("b/q", &named);
    let older = world.documents["b/q"].replace("name: q", "name: q, creationTimestamp: \"2020-01-01T00:00:00Z\"");
    world.documents.insert("b/q".to_owned(), older);
    let refused = world.converge();
    assert_eq!(
        (codes(&refused), vips(&refused).keys().map(String::as_str).collect()),
        (vec![Code::VipOfTwoPolicies], vec!["a/p"])
    );
    world.documents.remove("a/p");
    assert_eq!(codes(&world.converge()), [Code::AddressQuarantined]);
    world.wait(60);
    assert_eq!(vips(&world.converge())["b/q"], [address]);
    // In its own namespace at once.
    world.documents.remove("b/q");
    world.put_with("b/r", &named);
    assert_eq!(vips(&world.converge())["b/r"], [address]);
}

#[test]
fn a_service_takes_no_address_that_a_policy_of_another_namespace_has() {
    let mut world = World::new(SMALL);
    world.put("a/p", 1);
    let address = vips(&world.converge())["a/p"][0].to_string();
    let service = service("s", ", creationTimestamp: \"2020-01-01T00:00:00Z\"", 80, &[&address]);
    world.documents.insert("service".to_owned(), of("b", &service));
    let compiled = world.converge();
    assert_eq!(
        (codes(&compiled), vips(&compiled).keys().map(String::as_str).collect()),
        (vec![Code::VipOfOtherNamespace], vec!["a/p"])
    );
}

#[test]
fn a_namespace_has_no_more_than_its_part_of_a_pool() {
    let mut world = World::new("{ranges: [203.0.113.0/29], maxPerNamespace: 2, reuseAfter: 60s}");
    for name in ["a/p", "a/q", "b/p"] {
        world.put(name, 1);
    }
    assert_eq!(codes(&world.converge()), []);
    world.put("a/r", 1);
    let compiled = world.converge();
    assert_eq!((codes(&compiled), vips(&compiled).len()), (vec![Code::NamespaceLimit], 3));
    let text = compiled.diagnostics.iter().find(|it| it.code == Code::NamespaceLimit).unwrap().to_string();
    assert!(text.contains("spec.pools[0]: namespace a has 2 addresses of AddressPool p"), "{text}");
    // What it gave up counts until others may have it.
    world.documents.remove("a/p");
    assert_eq!(codes(&world.converge()), [Code::NamespaceLimit]);
    world.wait(60);
    assert_eq!(codes(&world.converge()), []);
    // A lower limit takes nothing away; and without a record it is a limit, too.
    world.documents.insert("pool".to_owned(), pool("p", "{ranges: [203.0.113.0/29], maxPerNamespace: 1}"));
    let lowered = world.converge();
    assert_eq!((codes(&lowered), vips(&lowered).len()), (vec![], 3));
    let stateless = compile(&world.objects());
    assert_eq!((codes(&stateless), vips(&stateless).len()), (vec![Code::NamespaceLimit], 2));
}

#[test]
fn who_takes_the_rest_of_a_pool_takes_nothing_from_others() {
    let mut world = World::new("{ranges: [203.0.113.0/30], reuseAfter: 60s}");
    world.put("a/p", 2);
    let before = vips(&world.converge());
    // It asks for one that isn't free yet, and then another one takes the last ones.
    world.put("b/q", 2);
    world.converge();
    world.documents.remove("b/q");
    world.put("a/p", 3);
    let waiting = world.converge();
    assert_eq!((codes(&waiting), vips(&waiting)), (vec![Code::AddressQuarantined], before.clone()));
    world.put("b/q", 2);
    let exhausted = world.converge();
    assert_eq!((codes(&exhausted), &vips(&exhausted)["a/p"]), (vec![Code::PoolExhausted], &before["a/p"]));
    assert!(exhausted.accept().is_ok(), "it is in force with what it has");
}

#[test]
fn addresses_and_services_count_for_a_namespace_too() {
    let mut world = World::new("{ranges: [203.0.113.0/29], maxPerNamespace: 1}");
    world.put_with("a/p", "addresses: [203.0.113.1, 203.0.113.2]");
    assert_eq!(codes(&world.converge()), [Code::NamespaceLimit]);
    world.documents.remove("a/p");
    for (name, port, address) in [("s1", 80, "203.0.113.1"), ("s2", 81, "203.0.113.1"), ("s3", 80, "203.0.113.2")] {
        world.documents.insert(name.to_owned(), service(name, "", port, &[address]));
    }
    let compiled = world.converge();
    assert_eq!((codes(&compiled), compiled.placement.vips.len()), (vec![Code::NamespaceLimit], 1));
}

#[test]
fn nothing_is_given_up_while_the_source_is_incomplete_or_an_object_unreadable() {
    let mut world = World::new(SMALL);
    world.put("a/p", 1);
    let before = vips(&world.converge());
    let document = world.documents.remove("a/p").unwrap();
    world.is_incomplete = true;
    assert_eq!(world.compile().addresses.next_record, None);
    world.is_incomplete = false;
    world.unreadable.insert(ObjectId { kind: Kind::EgressPolicy, namespace: "a".to_owned(), name: "p".to_owned() });
    assert_eq!(world.compile().addresses.next_record, None);
    world.documents.insert("a/p".to_owned(), document);
    world.unreadable.clear();
    assert_eq!(vips(&world.converge()), before);
    // A policy that asks for fewer gives up the rest; one that is closed for an error of its own, nothing.
    world.put_with("a/p", "pools: [{name: p}, {name: none}]");
    assert_eq!((codes(&world.compile()), world.compile().addresses.next_record), (vec![Code::NoSuchPool], None));
    world.put_with("a/p", "addresses: [203.0.113.3]");
    world.converge();
    assert!(
        world.record.lines().any(|line| line.ends_with("a/p 1970-01-01T00:00:00Z"))
            || before["a/p"] == [ip("203.0.113.3")]
    );
}

/// A step of a random world: whose policy, and how many addresses it asks for; or time that passes.
#[derive(Clone, Copy, Debug)]
enum Step {
    Put(u8, u32),
    Remove(u8),
    Wait(u64),
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        5 => (0..6_u8, 1..4_u32).prop_map(|(name, count)| Step::Put(name, count)),
        3 => (0..6_u8).prop_map(Step::Remove),
        2 => (0..40_u64).prop_map(Step::Wait),
        1 => Just(Step::Restart),
    ]
}

/// Who had which address, and until when.
#[derive(Default)]
struct Past {
    has: BTreeMap<IpAddr, String>,
    freed: BTreeMap<IpAddr, (String, Timestamp)>,
}

impl Past {
    /// Checks what policies have now against what was.
    fn check(
        &mut self,
        now: &BTreeMap<String, Vec<IpAddr>>,
        wanted: &BTreeMap<String, u32>,
        time: Timestamp,
        coverage: &Coverage,
    ) {
        let mut has = BTreeMap::new();
        for (name, address) in now.iter().flat_map(|(name, vips)| vips.iter().map(move |vip| (name, *vip))) {
            assert_eq!(has.insert(address, name.clone()), None, "{address} is given twice");
            if let Some((former, freed)) = self.freed.remove(&address).filter(|(former, _)| former != name) {
                assert!(time >= freed + Duration::from_secs(30), "{address} of {former} is given to {name}");
                coverage.count("given again");
            }
        }
        for (address, name) in &self.has {
            if has.get(address) == Some(name) {
                coverage.count("stays");
                continue;
            }
            let left = has.values().filter(|other| *other == name).count();
            let is_fewer = wanted.get(name).is_none_or(|count| left >= *count as usize);
            assert!(is_fewer, "{name} loses {address} and has {left}");
            if !has.contains_key(address) {
                self.freed.insert(*address, (name.clone(), time));
            }
        }
        for (name, count) in wanted {
            let got = now.get(name).map_or(0, Vec::len);
            assert!(got <= *count as usize, "{name} has {got}");
            coverage.add("too few", u64::from(got < *count as usize));
        }
        self.has = has;
    }
}

#[test]
fn what_a_policy_has_is_its_own_until_it_gives_it_up() {
    let classes = ["given again", "stays", "too few", "restarted", "quarantined"];
    let strategy = prop::collection::vec(step(), 1..30);
    property(ProptestConfig::with_cases(200), &strategy, &classes, |steps, coverage| {
        let mut world = World::new("{ranges: [203.0.113.0/29], reuseAfter: 30s}");
        let (mut past, mut wanted) = (Past::default(), BTreeMap::new());
        let mut compiler = Compiler::new(Options::default());
        for step in steps {
            match step {
                Step::Put(name, count) => {
                    let path = format!("{}/p{name}", if name % 2 == 0 { "a" } else { "b" });
                    world.put(&path, count);
                    wanted.insert(path, count);
                }
                Step::Remove(name) => {
                    let path = format!("{}/p{name}", if name % 2 == 0 { "a" } else { "b" });
                    world.documents.remove(&path);
                    wanted.remove(&path);
                }
                Step::Wait(seconds) => world.wait(seconds),
                Step::Restart => {
                    compiler = Compiler::new(Options::default());
                    coverage.count("restarted");
                }
            }
            let converged = world.converge();
            coverage.add("quarantined", u64::from(codes(&converged).contains(&Code::AddressQuarantined)));
            past.check(&vips(&converged), &wanted, world.now, coverage);
            // With a memory it is the same.
            compiler.set_recorded(world.recorded());
            let objects: Vec<Arc<Object>> = world.objects().into_iter().map(Arc::new).collect();
            let (compiled, new) =
                (compiler.compile(&objects), compile_for(world.options(), objects.iter().map(Arc::as_ref)));
            prop_assert_eq!((&compiled.placement, &compiled.diagnostics), (&new.placement, &new.diagnostics));
            prop_assert_eq!(compiled.addresses.next_record, None);
        }
        Ok(())
    });
}

#[test]
fn what_a_policy_gives_up_while_it_goes_on_is_quarantined_too() {
    let mut world = World::new(SMALL);
    world.put("a/p", 2);
    let both = vips(&world.converge())["a/p"].clone();
    world.put_with("b/q", &format!("addresses: [{}]", both[1]));
    assert_eq!(codes(&world.converge()), [Code::VipOfTwoPolicies]);
    world.put("a/p", 1);
    // Not even in the compilation in which it is given up.
    for compiled in [world.compile(), world.converge()] {
        assert_eq!((codes(&compiled), vips(&compiled).get("b/q")), (vec![Code::AddressQuarantined], None));
    }
    world.wait(60);
    assert_eq!(vips(&world.converge())["b/q"], [both[1]]);
}

#[test]
fn an_address_that_is_being_recorded_is_nobody_elses_and_counts_for_the_share() {
    let mut world = World::new(SMALL);
    world.put("a/p", 1);
    let pending = world.compile().addresses.of_policies[0].0;
    world.put_with("b/q", &format!("addresses: [{pending}]"));
    assert_eq!(codes(&world.compile()), [Code::AddressPending, Code::VipOfTwoPolicies]);
    // Two VIPs for a namespace: four pending ones are too many, and none is recorded.
    let mut world = World::new(SMALL);
    world.put("a/p", 4);
    let share = Share::new(2.5 / 16_384.0).unwrap();
    let compiled = compile_for(Options { namespace_share: share, ..world.options() }, &world.objects());
    assert!(codes(&compiled).contains(&Code::LimitExceeded), "{:?}", compiled.diagnostics);
    assert_eq!((compiled.addresses.are_pending, compiled.addresses.next_record), (false, None));
}

#[test]
fn who_gives_back_a_former_address_gets_no_other_one_for_it() {
    let mut world = World::new("{ranges: [203.0.113.0/29], maxPerNamespace: 2, reuseAfter: 60s}");
    world.put("a/p", 2);
    world.converge();
    world.documents.remove("a/p");
    world.converge();
    // Its former two, and a third one that it may not have; the younger one may have none.
    world.put("a/p", 3);
    world.put("a/q", 2);
    let compiled = world.converge();
    assert_eq!((codes(&compiled), vips(&compiled)), (vec![Code::NamespaceLimit; 2], BTreeMap::new()));
}

#[test]
fn without_its_pool_or_namespace_nothing_is_forgotten_while_these_are_unreadable() {
    let mut world = World::new(SMALL);
    world.put("a/p", 1);
    world.put("b/q", 1);
    let before = vips(&world.converge());
    world.documents.remove("b/q");
    world.converge();
    let record = world.record.clone();
    let pool = world.documents.remove("pool").unwrap();
    world.unreadable.insert(ObjectId { kind: Kind::AddressPool, namespace: String::new(), name: "p".to_owned() });
    assert_eq!((codes(&world.compile()), world.compile().addresses.next_record), (vec![Code::NoSuchPool], None));
    world.documents.insert("pool".to_owned(), pool);
    world.unreadable.clear();
    assert_eq!((vips(&world.converge())["a/p"].clone(), &world.record), (before["a/p"].clone(), &record));
}

#[test]
fn what_an_unreadable_policy_has_is_nobody_elses() {
    let mut world = World::new(SMALL);
    world.put("a/p", 1);
    let address = vips(&world.converge())["a/p"][0].to_string();
    let policy = world.documents.remove("a/p").unwrap();
    world.unreadable.insert(ObjectId { kind: Kind::EgressPolicy, namespace: "a".to_owned(), name: "p".to_owned() });
    world.documents.insert("service".to_owned(), of("b", &service("s", "", 80, &[&address])));
    assert_eq!(codes(&world.converge()), [Code::VipOfOtherNamespace]);
    world.documents.insert("a/p".to_owned(), policy);
    world.unreadable.clear();
    assert_eq!(vips(&world.converge())["a/p"], [ip(&address)]);
}

#[test]
fn a_service_beyond_the_limit_takes_no_address() {
    let mut world = World::new("{ranges: [203.0.113.0/30], maxPerNamespace: 2}");
    let all = ["203.0.113.0", "203.0.113.1", "203.0.113.2", "203.0.113.3"];
    world.documents.insert("service".to_owned(), of("b", &service("s", "", 80, &all)));
    world.put("a/p", 1);
    let compiled = world.converge();
    assert_eq!((codes(&compiled), vips(&compiled).len()), (vec![Code::VipOfOtherNamespace], 1));
}

#[test]
fn of_a_pool_that_never_had_a_record_addresses_are_in_force_at_once() {
    let mut world = World::new(SMALL);
    world.put("a/p", 1);
    let without = vips(&compile(&world.objects()));
    let mut options = world.options();
    options.recorded.as_mut().unwrap().unrecorded_pools.insert("p".to_owned());
    let compiled = compile_for(options, &world.objects());
    assert_eq!((codes(&compiled), vips(&compiled)), (vec![], without));
    assert!(compiled.addresses.next_record.is_some());
}
