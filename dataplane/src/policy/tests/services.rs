//! Property tests of Service changes: the result of a series of changes equals a fresh build, and sessions are
//! revalidated where necessary.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use super::{ip, is_fresh, vip};
use crate::flow::address::{Address, V6};
use crate::flow::ids::FrontendId;
use crate::flow::listener::Listener;
use crate::policy::build::Builder;
use crate::policy::change::{Entries, PolicyChange};
use crate::policy::compiled::{Family, Policy};
use crate::policy::limits::MAX_PORTS_OF_SERVICE;
use crate::policy::spec::*;
use crate::policy::validation::BuildError;
use crate::policy_set::{Between, PolicySet, WithPolicy};

const NAMES: [&str; 3] = ["Service a/one", "Service a/two", "Service b/three"];
const VIPS: [&str; 3] = ["192.0.2.1", "192.0.2.2", "2001:db8::1"];
const BACKENDS: [&str; 5] = ["10.0.0.1", "10.0.10.25", "10.0.0.4", "fd00::1", "fd00::63e"];
const FRONTENDS: [(u8, u16); 3] = [(6, 80), (17, 80), (6, 81)];
const OWN_PORTS: [u16; 2] = [8080, 9090];

/// A random Service. Its backends: address, target port of the first Service port and of the others, weight, and
/// whether it is eligible for external clients.
type Shape = (u8, u8, Vec<(usize, [usize; 2], u16, bool)>, bool, Option<u16>);

fn shape() -> impl Strategy<Value = Shape> {
    let port = || 0..=OWN_PORTS.len();
    let backend = (0..BACKENDS.len(), [port(), port()], 0_u16..3, any::<bool>());
    (1_u8..8, 1_u8..8, prop::collection::vec(backend, 0..6), any::<bool>(), prop::option::of(Just(30_000)))
}

/// The Services of a policy. Each leaves out frontends that an earlier one has.
fn services(shapes: &BTreeMap<usize, Shape>) -> Vec<ServiceSpec> {
    let mut taken = BTreeSet::new();
    let bits = |set: u8, count: usize| (0..count).filter(move |at| set >> at & 1 == 1);
    shapes
        .iter()
        .map(|(&name, (vips, ports, backends, ranged, health))| {
            let vips: Vec<IpAddr> = bits(*vips, VIPS.len()).map(|at| ip(VIPS[at])).collect();
            let mut is_free = |protocol: u8, port: u16| vips.iter().all(|vip| taken.insert((*vip, protocol, port)));
            let ports: Vec<ServicePortSpec> = bits(*ports, FRONTENDS.len())
                .map(|at| FRONTENDS[at])
                .filter(|&(protocol, port)| is_free(protocol, port))
                .map(|(protocol, port)| ServicePortSpec { name: "".into(), protocol, port })
                .collect();
            let health = health.filter(|&port| is_free(6, port));
            let backend = |&(at, own, weight, takes): &(usize, [usize; 2], u16, bool)| BackendSpec {
                address: ip(BACKENDS[at]),
                name: "".into(),
                ports: (0..ports.len()).map(|n| OWN_PORTS.get(own[n.min(1)]).copied().unwrap_or(0)).collect(),
                weight,
                state: BackendState::Ready,
                external: takes,
                internal: true,
            };
            ServiceSpec {
                name: NAMES[name].into(),
                vips,
                backends: distinct(backends.iter().map(backend)),
                ports,
                source_ranges: if *ranged { vec!["198.51.100.0/24".parse().unwrap()] } else { vec![] },
                affinity: None,
                table_size: 7,
                external: Scope::Cluster,
                internal: Scope::Cluster,
                health: health.map(|port| HealthSpec { port, local_endpoints: 1 }),
            }
        })
        .collect()
}

/// The backends in order, without those that have the address and a target port of an earlier one, or only its address.
fn distinct(backends: impl Iterator<Item = BackendSpec>) -> Vec<BackendSpec> {
    let mut all: Vec<BackendSpec> = Vec::new();
    for backend in backends {
        let is_other = |it: &BackendSpec| {
            it.address != backend.address
                || it.ports != backend.ports && it.ports.iter().zip(&backend.ports).all(|(a, b)| a != b || *a == 0)
        };
        if all.iter().all(is_other) {
            all.push(backend);
        }
    }
    all.sort_by(|one, other| (one.address, &one.ports).cmp(&(other.address, &other.ports)));
    all
}

fn set(services: &[ServiceSpec]) -> PolicySet {
    let vips = VIPS.iter().map(|text| vip(ip(text))).collect();
    PolicySet { version: "1".into(), vips, services: services.into(), ..PolicySet::default() }
}

fn listeners<A: Family>(addresses: &[&str], ports: &[u16]) -> Vec<Listener<A>> {
    let addresses = addresses.iter().filter_map(|text| A::from_ip(ip(text)));
    addresses
        .flat_map(|address| {
            let all = ports.iter().flat_map(|port| [6, 17].map(|protocol| (*port, protocol)));
            all.map(move |(port, protocol)| Listener { address, port, protocol })
        })
        .collect()
}

/// A frontend by Service name and port, independent of its number.
fn named(policy: &Policy, id: FrontendId) -> (Arc<str>, u16) {
    (policy.service(id.service).unwrap().spec.name.clone(), id.port)
}

/// Everything about Services that the stages can observe.
fn observable_state<A: Family>(policy: &Policy) -> String {
    let frontends = listeners::<A>(&VIPS, &[80, 81, 30_000]).into_iter();
    let frontends: Vec<_> = frontends.map(|at| policy.frontend(&at).map(|id| named(policy, id))).collect();
    let backends = listeners::<A>(&BACKENDS, &OWN_PORTS).into_iter();
    let backends: Vec<BTreeSet<_>> =
        backends.map(|at| policy.frontends_of(&at).iter().map(|id| named(policy, *id)).collect()).collect();
    let mut services: Vec<_> = policy
        .services()
        .map(|service| {
            let half = A::part(service);
            let choices = half.frontends.iter().map(|frontend| {
                let of = |external| {
                    let choose = |n: u64| frontend.table(external).select(n << 60, 0);
                    let target = |at: u16| &frontend.backends[usize::from(at)];
                    (0..16).map(|n| choose(n).map(target).map(|it| (it.address, it.port))).collect::<Vec<_>>()
                };
                (of(true), of(false))
            });
            (service.spec.name.clone(), choices.collect::<Vec<_>>())
        })
        .collect();
    services.sort_by(|(a, _), (b, _)| a.cmp(b));
    let known: BTreeSet<_> = policy.backends::<A>().copied().collect();
    format!("{frontends:?} {backends:?} {services:?} {known:?}")
}

/// Whether policy permits a client's session, for every combination of frontend and backend.
fn permitted<A: Family>(policy: &Policy) -> Vec<([IpAddr; 3], bool)> {
    let client = if A::BITS == 32 { ip("198.51.100.1") } else { ip("2001:db8:51::1") };
    let frontends = listeners::<A>(&VIPS, &[80, 81]);
    let backends = listeners::<A>(&BACKENDS, &OWN_PORTS);
    let all = frontends.iter().flat_map(|frontend| backends.iter().map(move |backend| (frontend, backend)));
    let same = all.filter(|(frontend, backend)| frontend.protocol == backend.protocol);
    same.map(|(frontend, backend)| {
        let target = policy.permitted_backend(frontend, backend);
        let is_permitted = target.is_some_and(|(service, _)| A::part(service).admits(A::from_ip(client).unwrap()));
        ([backend.address.to_ip(), client, frontend.address.to_ip()], is_permitted)
    })
    .collect()
}

fn run(steps: &[(usize, Option<Shape>, bool)]) -> Result<(), TestCaseError> {
    let mut builder = Builder::new(NetworkSpec::default());
    builder.with_policy(&set(&[])).unwrap();
    let (mut shapes, mut old) = (BTreeMap::new(), set(&[]));
    for (name, shape, whole) in steps {
        match shape {
            Some(shape) => drop(shapes.insert(*name, shape.clone())),
            None => drop(shapes.remove(name)),
        }
        let new = set(&services(&shapes));
        let before = builder.snapshot();
        let after =
            if *whole { builder.with_policy(&new) } else { builder.with_change(&PolicyChange::between(&old, &new)) };
        let after = after.map_err(|error| TestCaseError::fail(error.to_string()))?;
        let mut anew = Builder::new(NetworkSpec::default());
        let fresh = anew.with_policy(&new).unwrap().policy;
        prop_assert_eq!(observable_state::<u32>(&after.policy), observable_state::<u32>(&fresh));
        prop_assert_eq!(observable_state::<V6>(&after.policy), observable_state::<V6>(&fresh));
        let (was, is) = (&before.policy, &after.policy);
        let pairs = permitted::<u32>(was).into_iter().zip(permitted::<u32>(is));
        for ((addresses, was), (_, is)) in pairs.chain(permitted::<V6>(was).into_iter().zip(permitted::<V6>(is))) {
            let holds = is_fresh(&after, before.generation, addresses);
            prop_assert!(!was || is || !holds, "{:?} isn't permitted any more, but not revalidated", addresses);
        }
        for service in before.policy.services() {
            let now = after.policy.services().find(|it| it.spec.name == service.spec.name);
            prop_assert!(now.is_none_or(|now| now.id == service.id), "a number has changed its meaning");
        }
        old = new;
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn changed_services_equal_a_fresh_build(
        steps in prop::collection::vec((0..NAMES.len(), prop::option::weighted(0.8, shape()), any::<bool>()), 1..25)
    ) {
        run(&steps)?;
    }
}

#[test]
fn an_inconsistent_service_is_rejected_and_the_existing_one_keeps_its_frontend() {
    let shape = |name| BTreeMap::from([(name, (1, 1, vec![(0, [0, 0], 1, true)], false, None))]);
    let (one, two) = (services(&shape(0)).remove(0), services(&shape(1)).remove(0));
    let mut builder = Builder::new(NetworkSpec::default());
    builder.with_policy(&set(std::slice::from_ref(&one))).unwrap();
    let change = |services: Vec<ServiceSpec>| PolicyChange { services: services.into(), ..PolicyChange::default() };
    let error = builder.with_change(&change(vec![two.clone()])).unwrap_err();
    let BuildError::DuplicateFrontend { service, other, .. } = &error else { panic!("{error}") };
    assert_eq!((service, other), (&two.name, &one.name));
    let health = ServiceSpec {
        ports: vec![],
        backends: vec![],
        health: Some(HealthSpec { port: 80, local_endpoints: 0 }),
        ..two.clone()
    };
    assert!(matches!(builder.with_change(&change(vec![health])), Err(BuildError::DuplicateFrontend { .. })));
    let at_vip = BackendSpec { address: ip(VIPS[1]), ..one.backends[0].clone() };
    let error = builder.with_change(&change(vec![ServiceSpec { backends: vec![at_vip], ..one.clone() }])).unwrap_err();
    assert!(matches!(error, BuildError::BackendIsVip { .. }), "{error}");
    let come = PolicyChange { vips: vec![vip(ip(BACKENDS[0]))].into(), ..PolicyChange::default() };
    let error = builder.with_change(&come).unwrap_err();
    assert!(matches!(&error, BuildError::BackendIsVip { service, .. } if *service == one.name), "{error}");
    let two_ports = [one.ports[0].clone(), ServicePortSpec { port: 81, ..one.ports[0].clone() }].to_vec();
    let with_ports = |ports: [[u16; 2]; 2]| {
        ports.map(|ports| BackendSpec { ports: ports.into(), ..one.backends[0].clone() }).to_vec()
    };
    for broken in [
        ServiceSpec { table_size: 8, ..one.clone() },
        ServiceSpec { backends: vec![one.backends[0].clone(); 2], ..one.clone() },
        ServiceSpec { ports: two_ports.clone(), backends: with_ports([[8081, 0], [8080, 0]]), ..one.clone() },
        ServiceSpec { ports: two_ports.clone(), backends: with_ports([[8080, 1], [8080, 2]]), ..one.clone() },
        ServiceSpec { ports: two_ports.clone(), backends: with_ports([[8080, 2], [8081, 2]]), ..one.clone() },
        ServiceSpec { ports: two_ports, backends: with_ports([[0, 0], [0, 0]]), ..one.clone() },
        ServiceSpec { ports: vec![], ..one.clone() },
        ServiceSpec { ports: vec![one.ports[0].clone(); MAX_PORTS_OF_SERVICE + 1], backends: vec![], ..one.clone() },
    ] {
        assert!(matches!(builder.with_change(&change(vec![broken])), Err(BuildError::InvalidService { .. })));
    }
    let port_twice = ServiceSpec { ports: vec![one.ports[0].clone(); 2], backends: vec![], ..one.clone() };
    assert!(matches!(builder.with_change(&change(vec![port_twice])), Err(BuildError::DuplicateFrontend { .. })));
    // A frontend moves from one Service to the other, in either order.
    let handed = PolicyChange {
        services: Entries::from(vec![two.clone()]).without([one.name.clone()]),
        ..PolicyChange::default()
    };
    let policy = builder.with_change(&handed).unwrap().policy;
    let at = Listener { address: u32::from_be_bytes([192, 0, 2, 1]), port: 80, protocol: 6 };
    assert_eq!(named(&policy, policy.frontend(&at).unwrap()).0, two.name);
    let moved = ServiceSpec { vips: vec![ip(VIPS[1])], ..two.clone() };
    let policy = builder.with_change(&change(vec![one.clone(), moved])).unwrap().policy;
    assert_eq!(named(&policy, policy.frontend(&at).unwrap()).0, one.name);
}

/// A Service of one port, `table_size` slots, and these backends.
fn with_backends(backends: &[(&str, u16)]) -> ServiceSpec {
    let one = services(&BTreeMap::from([(0, (1, 1, vec![(0, [0, 0], 1, true)], false, None))])).remove(0);
    let backend = |&(address, port)| BackendSpec { address: ip(address), ports: vec![port], ..one.backends[0].clone() };
    ServiceSpec { backends: distinct(backends.iter().map(backend)), table_size: 2039, ..one.clone() }
}

#[test]
fn lookup_table_bytes_count_each_distinct_table_once() {
    let bytes = |spec: ServiceSpec| {
        let policy = Builder::new(NetworkSpec::default()).with_policy(&set(&[spec])).unwrap().policy;
        policy.services().next().unwrap().lookup_table_bytes()
    };
    let targets = [("10.0.0.1", 8080), ("10.0.0.2", 8080), ("fd00::1", 8080)];
    assert_eq!(bytes(with_backends(&[])), 0);
    // A table of one backend has one slot.
    assert_eq!(bytes(with_backends(&targets[..1])), 2);
    assert_eq!(bytes(with_backends(&targets)), 2 * (2039 + 1));
    let one = with_backends(&targets[..2]);
    assert_eq!(bytes(one.clone()), 2 * 2039);
    let ports = [80, 81].map(|port| ServicePortSpec { port, ..one.ports[0].clone() });
    let with_ports = |targets: [[u16; 2]; 2]| {
        let backends = one.backends.iter().zip(targets);
        let backends = backends.map(|(it, ports)| BackendSpec { ports: ports.into(), ..it.clone() });
        ServiceSpec { ports: ports.to_vec(), backends: backends.collect(), ..one.clone() }
    };
    assert_eq!(bytes(with_ports([[8080, 9090], [8080, 9090]])), 2 * 2039);
    assert_eq!(bytes(with_ports([[8080, 9090], [8080, 0]])), 2 * (2039 + 1));
    // Pods reach both backends, external clients one of them.
    let mut local = one.clone();
    local.backends[1].external = false;
    assert_eq!(bytes(local), 2 * (2039 + 1));
}

/// The backend of each slot of the Service's table.
fn slots(backends: &[(&str, u16)]) -> Vec<(IpAddr, u16)> {
    let mut builder = Builder::new(NetworkSpec::default());
    let policy = builder.with_policy(&set(&[with_backends(backends)])).unwrap().policy;
    let frontend = &policy.services().next().unwrap().v4.frontends[0];
    let of_slot = |slot: u64| frontend.table(true).select((slot << 32).div_ceil(2039) << 32, 0).unwrap();
    let target = |slot| &frontend.backends[usize::from(of_slot(slot))];
    (0..2039).map(|slot| (target(slot).address.to_ip(), target(slot).port)).collect()
}

/// Gateways of all versions, and restarted ones, select the same backends.
#[test]
fn a_table_of_unique_addresses_depends_on_no_port_and_never_changes() {
    let all = slots(&[("10.0.0.1", 8080), ("10.0.0.2", 8080), ("10.0.0.3", 8081)]);
    let last = |slot: &(IpAddr, u16)| slot.0.to_string().pop().unwrap();
    assert_eq!(all[..48].iter().map(last).collect::<String>(), "223222212133131323311312232211331311112232223231");
    let other_ports = slots(&[("10.0.0.1", 1), ("10.0.0.2", 9090), ("10.0.0.3", 65_535)]);
    assert!(all.iter().zip(&other_ports).all(|(one, other)| one.0 == other.0));
}

#[test]
fn one_more_backend_of_an_address_moves_few_slots() {
    let others: Vec<String> = (1..8).map(|n| format!("10.0.0.{n}")).collect();
    let others = others.iter().map(|address| (&**address, 8080));
    let with = |ports: &[u16]| -> Vec<(&str, u16)> {
        others.clone().chain(ports.iter().map(|port| ("10.0.1.1", *port))).collect()
    };
    let moved = |before: &[u16], after: &[u16]| {
        let (before, after) = (slots(&with(before)), slots(&with(after)));
        before.iter().zip(&after).filter(|(one, other)| one != other).count()
    };
    let count = |ports: &[u16], port: u16| slots(&with(ports)).iter().filter(|slot| slot.1 == port).count();
    for (fewer, more, newcomer) in [(&[8001][..], &[8001, 8002][..], 8002), (&[8001, 8002], &[8001, 8002, 8003], 8003)]
    {
        let necessary = count(more, newcomer);
        assert!((2039 / (7 + more.len())).abs_diff(necessary) < 3, "each has its part: {necessary}");
        assert!(2 * moved(fewer, more) <= 3 * necessary, "{} moved, {necessary} necessary", moved(fewer, more));
    }
    // A new first one takes the address's permutation over, which moves the former first one.
    let necessary = count(&[8001, 8002], 8001);
    assert!(2 * moved(&[8002], &[8001, 8002]) <= 2 * 3 * necessary);
}
