//! Property tests of Service changes: the result of a series of changes equals a fresh build, and sessions are
//! revalidated where necessary.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use super::{ip, is_fresh, vip};
use crate::flow::address::V6;
use crate::flow::ids::FrontendId;
use crate::flow::listener::Listener;
use crate::policy::build::Builder;
use crate::policy::change::{PolicyChange, Removed};
use crate::policy::compiled::{Family, Policy};
use crate::policy::spec::*;
use crate::policy::validation::BuildError;

const NAMES: [&str; 3] = ["Service a/one", "Service a/two", "Service b/three"];
const VIPS: [&str; 3] = ["192.0.2.1", "192.0.2.2", "2001:db8::1"];
const BACKENDS: [&str; 5] = ["10.0.0.1", "10.0.10.25", "10.0.0.4", "fd00::1", "fd00::63e"];
const FRONTENDS: [(u8, u16); 3] = [(6, 80), (17, 80), (6, 81)];
const OWN_PORTS: [u16; 2] = [8080, 9090];

/// A random Service.
type Shape = (u8, u8, Vec<(usize, usize, u16, bool)>, bool, Option<u16>);

fn shape() -> impl Strategy<Value = Shape> {
    let backend = (0..BACKENDS.len(), 0..=OWN_PORTS.len(), 0_u16..3, any::<bool>());
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
            let backend = |&(at, port, weight, takes): &(usize, usize, u16, bool)| {
                let port = OWN_PORTS.get(port).copied().unwrap_or(0);
                let spec = BackendSpec {
                    address: ip(BACKENDS[at]),
                    name: "".into(),
                    ports: vec![port; ports.len()],
                    weight,
                    state: BackendState::Ready,
                    external: takes,
                    internal: true,
                };
                (spec.address, spec)
            };
            let backends: BTreeMap<IpAddr, BackendSpec> = backends.iter().map(backend).collect();
            ServiceSpec {
                name: NAMES[name].into(),
                vips,
                ports,
                backends: backends.into_values().collect(),
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
                    (0..16).map(|n| choose(n).map(|at| frontend.backends[usize::from(at)].address)).collect::<Vec<_>>()
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
    let shape = |name| BTreeMap::from([(name, (1, 1, vec![(0, 0, 1, true)], false, None))]);
    let (one, two) = (services(&shape(0)).remove(0), services(&shape(1)).remove(0));
    let mut builder = Builder::new(NetworkSpec::default());
    builder.with_policy(&set(std::slice::from_ref(&one))).unwrap();
    let change = |services: Vec<ServiceSpec>| PolicyChange { services, ..PolicyChange::default() };
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
    let come = PolicyChange { vips: vec![vip(ip(BACKENDS[0]))], ..PolicyChange::default() };
    let error = builder.with_change(&come).unwrap_err();
    assert!(matches!(&error, BuildError::BackendIsVip { service, .. } if *service == one.name), "{error}");
    for broken in [
        ServiceSpec { table_size: 8, ..one.clone() },
        ServiceSpec { backends: vec![one.backends[0].clone(); 2], ..one.clone() },
        ServiceSpec { ports: vec![], ..one.clone() },
    ] {
        assert!(matches!(builder.with_change(&change(vec![broken])), Err(BuildError::InvalidService { .. })));
    }
    assert!(matches!(builder.with_change(&change(vec![one.clone(); 2])), Err(BuildError::DuplicateName { .. })));
    // A frontend moves from one Service to the other, in either order.
    let handed = PolicyChange {
        services: vec![two.clone()],
        removed: Removed { services: vec![one.name.clone()], ..Removed::default() },
        ..PolicyChange::default()
    };
    let policy = builder.with_change(&handed).unwrap().policy;
    let at = Listener { address: u32::from_be_bytes([192, 0, 2, 1]), port: 80, protocol: 6 };
    assert_eq!(named(&policy, policy.frontend(&at).unwrap()).0, two.name);
    let moved = ServiceSpec { vips: vec![ip(VIPS[1])], ..two.clone() };
    let policy = builder.with_change(&change(vec![one.clone(), moved])).unwrap().policy;
    assert_eq!(named(&policy, policy.frontend(&at).unwrap()).0, one.name);
}
