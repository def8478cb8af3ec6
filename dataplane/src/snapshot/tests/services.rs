//! Random Services that come, change and go: what is built change by change is as if it was built anew, and who must be looked
//! at again is.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use super::{ip, is_fresh, vip};
use crate::address::V6;
use crate::snapshot::build::Builder;
use crate::snapshot::change::{Gone, PolicyChange};
use crate::snapshot::check::BuildError;
use crate::snapshot::policy::{Family, Policy};
use crate::snapshot::service::{FrontendId, Listener};
use crate::snapshot::spec::*;

const NAMES: [&str; 3] = ["Service a/one", "Service a/two", "Service b/three"];
const VIPS: [&str; 3] = ["192.0.2.1", "192.0.2.2", "2001:db8::1"];
const BACKENDS: [&str; 5] = ["10.0.0.1", "10.0.10.25", "10.0.0.4", "fd00::1", "fd00::63e"];
const FRONTENDS: [(u8, u16); 3] = [(6, 80), (17, 80), (6, 81)];
const OWN_PORTS: [u16; 2] = [8080, 9090];

/// How a Service looks, as choices.
type Look = (u8, u8, Vec<(usize, usize, u16, bool)>, bool, Option<u16>);

fn look() -> impl Strategy<Value = Look> {
    let backend = (0..BACKENDS.len(), 0..=OWN_PORTS.len(), 0_u16..3, any::<bool>());
    (1_u8..8, 1_u8..8, prop::collection::vec(backend, 0..6), any::<bool>(), prop::option::of(Just(30_000)))
}

/// The Services of a world. What another one has already, the later one lacks.
fn services(looks: &BTreeMap<usize, Look>) -> Vec<ServiceSpec> {
    let mut taken = BTreeSet::new();
    let bits = |set: u8, count: usize| (0..count).filter(move |at| set >> at & 1 == 1);
    looks
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

/// A frontend as its name and port, whatever its number.
fn named(policy: &Policy, id: FrontendId) -> (Arc<str>, u16) {
    (policy.service(id.service).unwrap().spec.name.clone(), id.port)
}

/// All that the stages can see of Services.
fn seen<A: Family>(policy: &Policy) -> String {
    let frontends = listeners::<A>(&VIPS, &[80, 81, 30_000]).into_iter();
    let frontends: Vec<_> = frontends.map(|at| policy.frontend(&at).map(|id| named(policy, id))).collect();
    let backends = listeners::<A>(&BACKENDS, &OWN_PORTS).into_iter();
    let backends: Vec<BTreeSet<_>> =
        backends.map(|at| policy.frontends_of(&at).iter().map(|id| named(policy, *id)).collect()).collect();
    let mut services: Vec<_> = policy
        .services()
        .map(|service| {
            let half = A::half(service);
            let choices = half.frontends.iter().map(|frontend| {
                let of = |external| {
                    let choose = |n: u64| frontend.table(external).choose(n << 60, 0);
                    (0..16).map(|n| choose(n).map(|at| frontend.targets[usize::from(at)].address)).collect::<Vec<_>>()
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

/// Whether a client's session is what policy wants, for all that there could be.
fn wanted<A: Family>(policy: &Policy) -> Vec<([IpAddr; 3], bool)> {
    let client = if A::BITS == 32 { ip("198.51.100.1") } else { ip("2001:db8:51::1") };
    let frontends = listeners::<A>(&VIPS, &[80, 81]);
    let backends = listeners::<A>(&BACKENDS, &OWN_PORTS);
    let all = frontends.iter().flat_map(|frontend| backends.iter().map(move |backend| (frontend, backend)));
    let same = all.filter(|(frontend, backend)| frontend.protocol == backend.protocol);
    same.map(|(frontend, backend)| {
        let target = policy.target(frontend, backend);
        let is_wanted = target.is_some_and(|(service, _)| A::half(service).admits(A::from_ip(client).unwrap()));
        ([backend.address.to_ip(), client, frontend.address.to_ip()], is_wanted)
    })
    .collect()
}

fn run(steps: &[(usize, Option<Look>, bool)]) -> Result<(), TestCaseError> {
    let mut builder = Builder::new(NetworkSpec::default());
    builder.with_policy(&set(&[])).unwrap();
    let (mut looks, mut old) = (BTreeMap::new(), set(&[]));
    for (name, look, whole) in steps {
        match look {
            Some(look) => drop(looks.insert(*name, look.clone())),
            None => drop(looks.remove(name)),
        }
        let new = set(&services(&looks));
        let before = builder.snapshot();
        let after =
            if *whole { builder.with_policy(&new) } else { builder.with_change(&PolicyChange::between(&old, &new)) };
        let after = after.map_err(|error| TestCaseError::fail(error.to_string()))?;
        let mut anew = Builder::new(NetworkSpec::default());
        let fresh = anew.with_policy(&new).unwrap().policy;
        prop_assert_eq!(seen::<u32>(&after.policy), seen::<u32>(&fresh));
        prop_assert_eq!(seen::<V6>(&after.policy), seen::<V6>(&fresh));
        let (was, is) = (&before.policy, &after.policy);
        let pairs = wanted::<u32>(was).into_iter().zip(wanted::<u32>(is));
        for ((parties, was), (_, is)) in pairs.chain(wanted::<V6>(was).into_iter().zip(wanted::<V6>(is))) {
            let holds = is_fresh(&after, before.generation, parties);
            prop_assert!(!was || is || !holds, "{:?} isn't wanted any more, and nobody looks", parties);
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
    fn services_that_have_changed_often_are_as_those_built_anew(
        steps in prop::collection::vec((0..NAMES.len(), prop::option::weighted(0.8, look()), any::<bool>()), 1..25)
    ) {
        run(&steps)?;
    }
}

#[test]
fn what_cannot_be_is_refused_by_name_and_the_older_one_keeps_what_it_has() {
    let look = |name| BTreeMap::from([(name, (1, 1, vec![(0, 0, 1, true)], false, None))]);
    let (one, two) = (services(&look(0)).remove(0), services(&look(1)).remove(0));
    let mut builder = Builder::new(NetworkSpec::default());
    builder.with_policy(&set(std::slice::from_ref(&one))).unwrap();
    let change = |services: Vec<ServiceSpec>| PolicyChange { services, ..PolicyChange::default() };
    let twice = builder.with_change(&change(vec![two.clone()])).unwrap_err();
    assert!(
        matches!(&twice, BuildError::FrontendTwice { service, other, .. } if *service == two.name && *other == one.name),
        "{twice}"
    );
    let health = ServiceSpec {
        ports: vec![],
        backends: vec![],
        health: Some(HealthSpec { port: 80, local_endpoints: 0 }),
        ..two.clone()
    };
    assert!(matches!(builder.with_change(&change(vec![health])), Err(BuildError::FrontendTwice { .. })));
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
        assert!(matches!(builder.with_change(&change(vec![broken])), Err(BuildError::Service { .. })));
    }
    assert!(matches!(builder.with_change(&change(vec![one.clone(); 2])), Err(BuildError::PolicyTwice { .. })));
    // One gives it up while the other takes it, in either order.
    let handed = PolicyChange {
        services: vec![two.clone()],
        gone: Gone { services: vec![one.name.clone()], ..Gone::default() },
        ..PolicyChange::default()
    };
    let policy = builder.with_change(&handed).unwrap().policy;
    let at = Listener { address: u32::from_be_bytes([192, 0, 2, 1]), port: 80, protocol: 6 };
    assert_eq!(named(&policy, policy.frontend(&at).unwrap()).0, two.name);
    let moved = ServiceSpec { vips: vec![ip(VIPS[1])], ..two.clone() };
    let policy = builder.with_change(&change(vec![one.clone(), moved])).unwrap().policy;
    assert_eq!(named(&policy, policy.frontend(&at).unwrap()).0, one.name);
}
