//! Invalid responses are rejected and change nothing.

use super::*;
use crate::xds::store::tests::generators::any_placement;

/// An error injected into a response.
#[derive(Clone, Copy, Debug)]
enum Injected {
    NoBody,
    OtherType,
    InvalidBody,
    OtherName,
    UnknownType,
}

const INJECTED: [Injected; 5] =
    [Injected::NoBody, Injected::OtherType, Injected::InvalidBody, Injected::OtherName, Injected::UnknownType];

impl Injected {
    fn apply(self, response: &mut DeltaDiscoveryResponse, at: usize) {
        let Some(resource) = response.resources.get_mut(at) else { panic!("no resource") };
        match (self, &mut resource.resource) {
            (Self::NoBody, body) => *body = None,
            (Self::OtherType, Some(body)) => body.type_url = "type.googleapis.com/google.protobuf.Empty".to_owned(),
            (Self::InvalidBody, Some(body)) => body.value.push(7),
            (Self::OtherName, _) => resource.name.push('x'),
            (Self::UnknownType, _) => {
                response.type_url = "type.googleapis.com/envoy.config.cluster.v3.Cluster".to_owned();
            }
            (_, None) => panic!("no body"),
        }
    }

    fn is_reported_by(self, error: &StageError) -> bool {
        let text = error.to_string();
        match self {
            Self::NoBody => text.starts_with("resource ") && text.ends_with(": has no body"),
            Self::OtherType => text.ends_with(": has a body of type type.googleapis.com/google.protobuf.Empty"),
            Self::InvalidBody => text.contains(": is not a valid "),
            Self::OtherName => text.contains("but the resource's name is `"),
            Self::UnknownType => text.starts_with("type_url `") && text.ends_with("` is unknown to this gateway"),
        }
    }
}

proptest! {
    #[test]
    fn an_invalid_response_changes_nothing(
        (first, second, third) in (any_placement(), any_placement(), any_placement()),
        seed: u64,
        injected in prop::sample::select(INJECTED.to_vec()),
    ) {
        let mut rng = SeededRng(seed);
        let servers = [ServerPolicy::of(&first), ServerPolicy::of(&second), ServerPolicy::of(&third)];
        let mut store = store_with(&servers[0]);
        for response in servers[1].shuffled_responses(&servers[0], &[], &mut rng) {
            store.stage(response).unwrap();
        }
        let (before, update) = (format!("{store:?}"), store.update_for(&GatewayLocality::named("g1")));
        for mut response in servers[2].shuffled_responses(&servers[1], &servers, &mut rng) {
            let count = response.resources.len();
            if count == 0 {
                continue;
            }
            injected.apply(&mut response, rng.below(count));
            let error = store.stage(response).unwrap_err();
            prop_assert!(injected.is_reported_by(&error), "{:?}: {}", injected, error);
            prop_assert_eq!(&format!("{store:?}"), &before);
        }
        let again = store.update_for(&GatewayLocality::named("g1"));
        prop_assert_eq!((again.change, again.peers), (update.change, update.peers));
        // The update can still be completed.
        store.stage(servers[1].settings_response()).unwrap();
        prop_assert!(store.is_complete());
        prop_assert_eq!(store.commit(), servers[1].diff(&servers[0]));
        prop_assert_eq!(store.resources(), &servers[1].resources);
    }
}

/// A store with `free` resources less than the maximum.
fn nearly_full(free: usize) -> ResourceStore {
    let stored = StoredResource { version: String::new(), body: Bytes::new() };
    let gateways = (0..MAX_RESOURCES - free).map(|i| (key(Kind::Gateway, &format!("g{i:07}")), stored.clone()));
    ResourceStore { resources: gateways.collect(), ..ResourceStore::default() }
}

fn gateways(numbers: std::ops::Range<usize>) -> DeltaDiscoveryResponse {
    let gateway = |i| {
        let name = format!("g{i:07}");
        let body = prost::Message::encode_to_vec(&proto::Gateway { name: name.clone(), ..Default::default() });
        (key(Kind::Gateway, &name), Some(StoredResource { version: "2".to_owned(), body: body.into() }))
    };
    response(Kind::Gateway, &numbers.map(gateway).collect::<Vec<_>>())
}

#[test]
fn more_than_the_maximum_number_of_resources_is_rejected() {
    let mut store = nearly_full(1000);
    store.stage(gateways(MAX_RESOURCES - 1000..MAX_RESOURCES)).unwrap();
    assert_eq!(store.stage(gateways(MAX_RESOURCES..MAX_RESOURCES + 1)), Err(StageError::TooManyResources));
    assert_eq!(StageError::TooManyResources.to_string(), "more than 1048576 resources");
}

/// A restarted server sends everything again: known resources don't count twice.
#[test]
fn a_full_store_accepts_known_resources_again() {
    let mut store = nearly_full(1000);
    for part in 0..10 {
        store.stage(gateways(part * 700..part * 700 + 700)).unwrap();
    }
    store.discard();
    store.stage(gateways(MAX_RESOURCES - 1000..MAX_RESOURCES)).unwrap();
}

#[test]
fn an_invalid_cached_resource_is_rejected() {
    let stored = StoredResource { version: "1".to_owned(), body: b"\xff".to_vec().into() };
    let error = ResourceStore::default().stage_cached([(key(Kind::Vip, "203.0.113.1"), stored)].into()).unwrap_err();
    assert!(error.to_string().starts_with("resource Vip 203.0.113.1: is not a valid Vip: "), "{error}");
}

/// Errors are logged and sent in NACKs.
#[test]
fn an_error_is_short_and_printable() {
    let malicious = "\n\u{1b}".repeat(1 << 16);
    let mut of_type = response(Kind::Vip, &[]);
    of_type.type_url.clone_from(&malicious);
    let body = StoredResource { version: String::new(), body: Bytes::new() };
    let of_name = response(Kind::Vip, &[(key(Kind::Vip, &malicious), Some(body))]);
    let mut of_body = of_name.clone();
    of_body.resources[0].resource.as_mut().unwrap().type_url.clone_from(&malicious);
    for response in [of_type, of_name, of_body] {
        let error = ResourceStore::default().stage(response).unwrap_err().to_string();
        assert!(error.len() < 8192, "{} bytes", error.len());
        assert!(!error.contains(char::is_control), "{error:?}");
    }
}
