//! Delta xDS conformance: a simulated client that follows the protocol, or violates it.

mod nodes;

use envoy_types::pb::google::rpc;
use vipgate_dataplane::policy::spec::EndpointSpec;
use vipgate_policy::compiler::{PlacedService, Placement};
use vipgate_policy::diagnostic::Diagnostic;

use super::*;
use crate::source::SourceUpdate;
use crate::source::store::ManifestStore;
use crate::xds::fixtures::large_service;
use crate::xds::resource::slices::ServiceResource;
use crate::xds::resource::{SETTINGS, encode};

/// The publication after `previous`, of Services with one pod each: `(number, last byte of the VIP)`.
fn publication(previous: &Publication, tenants: &[(u8, u8)]) -> Arc<Publication> {
    let text = |(n, vip): &(u8, u8)| {
        format!(
            "apiVersion: v1\nkind: Service\n\
             metadata: {{name: s{n}, namespace: a, annotations: {{vipgate.io/egress: \"true\"}}}}\n\
             spec: {{type: LoadBalancer, ports: [{{port: 80}}]}}\n\
             status: {{loadBalancer: {{ingress: [{{ip: 203.0.113.{vip}}}]}}}}\n---\n\
             apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
             metadata: {{name: s{n}, namespace: a, labels: {{kubernetes.io/service-name: s{n}}}}}\n\
             addressType: IPv4\nendpoints: [{{addresses: [10.0.0.{n}]}}]\n"
        )
    };
    let changed = tenants.iter().map(|it| (format!("{}.yaml", it.0).into(), Ok(text(it).into()))).collect();
    let mut store = ManifestStore::default();
    store.update(SourceUpdate { full: true, changed, ..SourceUpdate::default() });
    let outcome = store.compile();
    assert_eq!(outcome.diagnostics, Vec::<Diagnostic>::new());
    Arc::new(previous.next(outcome.placement.expect("there are manifests")).expect("something differs"))
}

/// A client with its resources, and the server's state of its stream.
#[derive(Default)]
struct Client {
    stream: DeltaStream,
    /// Versions of its resources.
    held: BTreeMap<Key, String>,
    /// Resources in the last responses: `+` added or changed, `-` removed.
    received: Vec<String>,
    /// Kinds and nonces of unacknowledged responses.
    unacked: Vec<(Kind, String)>,
}

impl Client {
    fn request(&mut self, request: DeltaDiscoveryRequest, current: &Arc<Publication>) -> Acknowledgment {
        let acknowledgment = self.stream.handle_request(request, current).unwrap();
        self.receive();
        acknowledgment
    }

    fn subscribe(&mut self, kind: Kind, names: &[&str], current: &Arc<Publication>) {
        let known = self.held.iter().filter(|(key, _)| key.kind == kind);
        let known = known.map(|(key, version)| (key.name.to_string(), version.clone())).collect();
        let request = DeltaDiscoveryRequest {
            type_url: kind.type_url().to_owned(),
            resource_names_subscribe: names.iter().map(ToString::to_string).collect(),
            initial_resource_versions: known,
            ..DeltaDiscoveryRequest::default()
        };
        self.request(request, current);
    }

    fn subscribe_all(&mut self, current: &Arc<Publication>) {
        for kind in Kind::OF_GATEWAYS {
            self.subscribe(kind, &[], current);
        }
    }

    fn publish(&mut self, new: &Arc<Publication>) {
        self.received.clear();
        if let Some(update) = self.stream.update(new).unwrap() {
            self.stream.publish(update);
        }
        self.receive();
    }

    fn receive(&mut self) {
        while let Some(Response { bytes, nonce, .. }) = self.stream.next_response() {
            let response = DeltaDiscoveryResponse::decode(bytes).unwrap();
            let kind = Kind::from_type_url(&response.type_url).unwrap();
            for resource in response.resources {
                assert_eq!(resource.resource.unwrap().type_url, response.type_url);
                self.received.push(format!("+{}", resource.name));
                self.held.insert(Key { kind, name: resource.name.into() }, resource.version);
            }
            for name in response.removed_resources {
                self.received.push(format!("-{name}"));
                self.held.remove(&Key { kind, name: name.into() });
            }
            self.unacked.push((kind, nonce));
        }
    }

    fn acknowledge(&mut self, index: usize, error: Option<&str>, current: &Arc<Publication>) -> Acknowledgment {
        let (kind, nonce) = self.unacked.remove(index);
        let error = error.map(|message| rpc::Status { code: 3, message: message.to_owned(), details: vec![] });
        let request = DeltaDiscoveryRequest {
            type_url: kind.type_url().to_owned(),
            response_nonce: nonce,
            error_detail: error,
            ..DeltaDiscoveryRequest::default()
        };
        self.request(request, current)
    }

    fn accept_all(&mut self, current: &Arc<Publication>) {
        while !self.unacked.is_empty() {
            assert_eq!(self.acknowledge(0, None, current), Acknowledgment::Ack);
        }
    }

    fn assert_holds(&self, publication: &Publication) {
        let all = Kind::OF_GATEWAYS.into_iter().flat_map(|kind| publication.of_kind(kind));
        let all: BTreeMap<Key, String> =
            all.map(|it| (it.key.clone(), Content::version_text(it.content.version))).collect();
        assert_eq!(self.held, all);
    }
}

#[test]
fn a_subscriber_gets_all_resources_then_deltas_which_are_in_force_when_all_are_acknowledged() {
    let first = publication(&Publication::default(), &[(1, 1), (2, 2)]);
    let mut client = Client::default();
    client.subscribe_all(&first);
    client.assert_holds(&first);
    assert_eq!(client.stream.in_force(), 0);
    client.acknowledge(0, None, &first);
    assert_eq!(client.stream.in_force(), 0, "other responses are unacknowledged");
    client.accept_all(&first);
    assert_eq!(client.stream.in_force(), 1);
    let second = publication(&first, &[(1, 1), (2, 3)]);
    client.publish(&second);
    client.assert_holds(&second);
    // Additions before references to them, removals after references are gone, the settings last.
    assert_eq!(client.received, ["+203.0.113.3", "+10.0.0.2", "+Service a/s2", "-203.0.113.2", "+settings"]);
    client.accept_all(&second);
    assert_eq!(client.stream.in_force(), 2);
    client.publish(&second);
    assert!(client.received.is_empty(), "a publication is sent once");
}

#[test]
fn a_reconnecting_client_gets_the_difference_and_the_settings() {
    let first = publication(&Publication::default(), &[(1, 1), (2, 2), (3, 3)]);
    let mut client = Client::default();
    client.subscribe_all(&first);
    let second = publication(&first, &[(1, 1), (3, 4), (5, 5)]);
    client.stream = DeltaStream::default();
    client.received.clear();
    client.subscribe_all(&second);
    client.assert_holds(&second);
    assert!(!client.received.contains(&"+10.0.0.1".to_owned()), "{:?}", client.received);
    client.stream = DeltaStream::default();
    client.received.clear();
    client.subscribe_all(&second);
    assert_eq!(client.received, ["+settings"]);
}

#[test]
fn rejected_resources_are_sent_again_with_the_next_publication() {
    let first = publication(&Publication::default(), &[(1, 1)]);
    let mut client = Client::default();
    client.subscribe_all(&first);
    client.accept_all(&first);
    let second = publication(&first, &[(1, 1), (2, 2)]);
    client.publish(&second);
    assert_eq!(client.acknowledge(0, Some("no"), &second), Acknowledgment::Nack { reason: "no".into(), refused: None });
    client.accept_all(&second);
    assert_eq!(client.stream.in_force(), 1, "the second is not in force");
    let third = publication(&second, &[(1, 1), (2, 2), (3, 3)]);
    client.publish(&third);
    for name in ["+Service a/s2", "+10.0.0.2", "+203.0.113.2", "+10.0.0.3"] {
        assert!(client.received.contains(&name.to_owned()), "{name} in {:?}", client.received);
    }
    client.accept_all(&third);
    assert_eq!(client.stream.in_force(), 3);
}

#[test]
fn publications_that_a_client_missed_are_coalesced() {
    let first = publication(&Publication::default(), &[(1, 1), (2, 2)]);
    let mut client = Client::default();
    client.subscribe_all(&first);
    let second = publication(&first, &[(2, 2), (3, 3)]);
    let third = publication(&second, &[(3, 3), (4, 4)]);
    client.publish(&third);
    client.assert_holds(&third);
    assert!(!client.received.iter().any(|name| name.ends_with("settings") && name.starts_with('-')));
}

#[test]
fn a_stream_with_too_many_unacknowledged_publications_is_busy_until_they_are_acknowledged() {
    let mut last = publication(&Publication::default(), &[(1, 1)]);
    let mut client = Client::default();
    client.subscribe_all(&last);
    for n in 2..5 {
        assert!(!client.stream.is_busy(), "{n}");
        last = publication(&last, &[(n, n)]);
        client.publish(&last);
    }
    assert!(client.stream.is_busy());
    client.accept_all(&last);
    assert!(!client.stream.is_busy());
    assert_eq!(client.stream.in_force(), 4);
}

#[test]
fn resources_are_subscribed_and_unsubscribed_by_name() {
    let first = publication(&Publication::default(), &[(1, 1), (2, 2)]);
    let mut client = Client::default();
    client.subscribe(Kind::Endpoint, &["10.0.0.1", "10.0.0.9"], &first);
    assert_eq!(client.received, ["+10.0.0.1", "-10.0.0.9"], "a name that doesn't exist is sent as removed");
    let second = publication(&first, &[(1, 5), (2, 6), (9, 9)]);
    client.publish(&second);
    assert_eq!(client.received, ["+10.0.0.1", "+10.0.0.9"]);
    let unsubscribe = DeltaDiscoveryRequest {
        type_url: Kind::Endpoint.type_url().to_owned(),
        resource_names_unsubscribe: vec!["10.0.0.1".into()],
        ..DeltaDiscoveryRequest::default()
    };
    client.request(unsubscribe, &second);
    let third = publication(&second, &[(1, 7)]);
    client.publish(&third);
    assert_eq!(client.received, ["-10.0.0.9"]);
}

/// A request for endpoints.
fn names(subscribe: &[&str], unsubscribe: &[&str]) -> DeltaDiscoveryRequest {
    DeltaDiscoveryRequest {
        type_url: Kind::Endpoint.type_url().to_owned(),
        resource_names_subscribe: subscribe.iter().map(ToString::to_string).collect(),
        resource_names_unsubscribe: unsubscribe.iter().map(ToString::to_string).collect(),
        ..DeltaDiscoveryRequest::default()
    }
}

/// A client of endpoints, and two publications: in the second, both endpoints differ.
fn two_endpoints() -> (Client, Arc<Publication>, Arc<Publication>) {
    let first = publication(&Publication::default(), &[(1, 1), (2, 2)]);
    let second = publication(&first, &[(1, 5), (2, 6)]);
    (Client::default(), first, second)
}

/// The resources in the responses to a request.
fn reply(client: &mut Client, request: DeltaDiscoveryRequest, current: &Arc<Publication>) -> Vec<String> {
    client.received.clear();
    client.request(request, current);
    client.received.clone()
}

#[test]
fn a_name_that_is_unsubscribed_under_a_wildcard_is_sent_again() {
    // Wildcard by a first request without names, and by "*".
    for wildcard in [names(&[], &[]), names(&["*"], &[])] {
        let (mut client, first, second) = two_endpoints();
        assert_eq!(reply(&mut client, wildcard, &first), ["+10.0.0.1", "+10.0.0.2"]);
        assert_eq!(reply(&mut client, names(&["10.0.0.1"], &[]), &first), ["+10.0.0.1"]);
        assert_eq!(reply(&mut client, names(&[], &["10.0.0.1"]), &first), ["+10.0.0.1"]);
        assert_eq!(reply(&mut client, names(&[], &["10.0.0.9"]), &first), ["-10.0.0.9"], "there is none");
        client.publish(&second);
        assert_eq!(client.received, ["+10.0.0.1", "+10.0.0.2"], "the wildcard stays");
        client.accept_all(&second);
        assert_eq!(client.stream.in_force(), 2);
    }
}

#[test]
fn without_a_wildcard_an_unsubscribed_name_is_not_sent_any_more() {
    let (mut client, first, second) = two_endpoints();
    assert_eq!(reply(&mut client, names(&["10.0.0.1", "10.0.0.2"], &[]), &first), ["+10.0.0.1", "+10.0.0.2"]);
    assert!(reply(&mut client, names(&[], &["10.0.0.1"]), &first).is_empty());
    client.publish(&second);
    assert_eq!(client.received, ["+10.0.0.2"]);
    // An empty list of names is no wildcard once there were names.
    assert!(reply(&mut client, names(&[], &["10.0.0.2"]), &second).is_empty());
    assert!(reply(&mut client, names(&[], &[]), &second).is_empty());
    client.publish(&publication(&second, &[(1, 1)]));
    assert!(client.received.is_empty(), "{:?}", client.received);
}

#[test]
fn a_name_stays_subscribed_when_the_wildcard_is_unsubscribed() {
    let (mut client, first, second) = two_endpoints();
    reply(&mut client, names(&[], &[]), &first);
    reply(&mut client, names(&["10.0.0.1"], &[]), &first);
    assert!(reply(&mut client, names(&[], &["*"]), &first).is_empty());
    client.publish(&second);
    assert_eq!(client.received, ["+10.0.0.1"]);
    assert_eq!(
        reply(&mut client, names(&["*"], &[]), &second),
        ["+10.0.0.1", "+10.0.0.2"],
        "all resources are sent again"
    );
    assert!(reply(&mut client, names(&[], &["*", "10.0.0.1"]), &second).is_empty(), "nothing is subscribed any more");
}

#[test]
fn a_first_request_that_unsubscribes_from_the_wildcard_subscribes_to_nothing() {
    let (mut client, first, second) = two_endpoints();
    assert!(reply(&mut client, names(&[], &["*"]), &first).is_empty());
    client.publish(&second);
    assert!(client.received.is_empty(), "{:?}", client.received);
}

#[test]
fn a_name_given_twice_or_beside_a_wildcard_is_sent_once() {
    let (mut client, first, _) = two_endpoints();
    assert_eq!(reply(&mut client, names(&["10.0.0.1", "10.0.0.1"], &[]), &first), ["+10.0.0.1"]);
    // A name in both lists of a request stays subscribed.
    assert_eq!(reply(&mut client, names(&["10.0.0.1"], &["10.0.0.1"]), &first), ["+10.0.0.1"]);
    assert_eq!(
        reply(&mut client, names(&["*", "10.0.0.1", "10.0.0.9"], &[]), &first),
        ["+10.0.0.1", "+10.0.0.2", "-10.0.0.9"]
    );
}

/// The publication after `previous` with this many endpoints, all of the same policy.
fn many(endpoints: u32, policy: &str, previous: &Publication) -> Arc<Publication> {
    let endpoint = |n: u32| EndpointSpec {
        address: std::net::Ipv4Addr::from_bits(0x0a00_0000 + n).into(),
        name: "".into(),
        policy: policy.into(),
        vips: vec!["203.0.113.1".parse().unwrap()],
        gateway: None,
        slot: None,
        remarks: vec![],
    };
    let placement = Placement { endpoints: (0..endpoints).map(endpoint).collect(), ..Placement::default() };
    Arc::new(previous.next(Arc::new(placement)).unwrap())
}

/// Message limits: 64 MiB in gateways, 4 MiB by default in gRPC clients.
#[test]
fn a_large_policy_is_sent_in_small_responses() {
    let all = many(20_000, "Service a/s", &Publication::default()).full(Kind::Endpoint);
    let bytes: Vec<usize> = all.iter().map(|response| response.bytes.len()).collect();
    assert!(bytes.iter().sum::<usize>() > 1 << 20 && bytes.iter().all(|it| *it < 1 << 17), "{bytes:?}");
}

/// Budget for 64 gateways behind one address with 100 000 endpoints: 192 MiB.
#[test]
fn keys_shared_with_the_publication_are_cheap_and_released_with_the_last_acknowledgment() {
    const ENDPOINTS: u32 = 10_000;
    let publication = many(ENDPOINTS, "Service a/s", &Publication::default());
    let first = publication.of_kind(Kind::Endpoint).next().unwrap();
    // It knows one endpoint; all others are sent by key.
    let known = [(first.key.name.to_string(), Content::version_text(first.content.version))];
    let mut stream = DeltaStream::default();
    let request = DeltaDiscoveryRequest { initial_resource_versions: known.into(), ..names(&[], &[]) };
    stream.handle_request(request, &publication).unwrap();
    let (keys, held) = (ENDPOINTS as usize - 1, stream.held_bytes());
    assert!((keys * SHARED_KEY_BYTES..keys * 30).contains(&held), "{held}");
    let mut nonces = Vec::new();
    while let Some(Response { bytes, nonce, .. }) = stream.next_response() {
        assert!(bytes.len() < 1 << 17, "{}", bytes.len());
        nonces.push(nonce);
    }
    assert!(nonces.len() > 10, "{}", nonces.len());
    assert_eq!(stream.held_bytes(), held, "sent, but unacknowledged");
    let mut acknowledge = |nonce: String| {
        let request = DeltaDiscoveryRequest { response_nonce: nonce, ..names(&[], &[]) };
        assert_eq!(stream.handle_request(request, &publication).unwrap(), Acknowledgment::Ack);
        stream.held_bytes()
    };
    let last = nonces.pop().unwrap();
    for nonce in nonces {
        assert!(acknowledge(nonce) >= keys * SHARED_KEY_BYTES);
    }
    assert_eq!(acknowledge(last), 0);
}

#[test]
fn unacknowledged_responses_keep_no_old_publication_alive() {
    let first = many(100, "Service a/s", &Publication::default());
    let second = many(101, "Service a/s", &first);
    let weak_first = Arc::downgrade(&first);
    let mut client = Client::default();
    client.subscribe_all(&first);
    assert_eq!(client.stream.old_publication_bytes(1), 0);
    assert_eq!(client.stream.old_publication_bytes(2), 101 * OLD_RESOURCE_BYTES / 2, "the test holds a reference, too");
    drop(first);
    client.publish(&second);
    assert!(weak_first.upgrade().is_none());
    assert_eq!(client.stream.in_flight.len(), client.unacked.len());
    // A rejected response with all resources of a kind is sent again.
    let endpoints = client.unacked.iter().position(|(kind, _)| *kind == Kind::Endpoint).unwrap();
    client.acknowledge(endpoints, Some("no"), &second);
    let third = many(102, "Service a/s", &second);
    client.publish(&third);
    assert_eq!(client.received.len(), 102 + 1);
    client.accept_all(&third);
    assert_eq!(client.stream.in_force(), 3);
    assert_eq!(client.stream.held_bytes(), 0);
}

#[test]
fn a_nack_reason_is_truncated_at_a_character_boundary() {
    let (mut client, first, _) = two_endpoints();
    client.subscribe_all(&first);
    assert_eq!(client.acknowledge(0, Some("no"), &first), Acknowledgment::Nack { reason: "no".into(), refused: None });
    // One byte, then characters of two bytes.
    let reason = format!("x{}", "ä".repeat(1 << 20));
    let outcome = client.acknowledge(0, Some(reason.as_str()), &first);
    let Acknowledgment::Nack { reason: stored, .. } = outcome else { panic!("a NACK") };
    assert!(stored.starts_with("xää") && stored.ends_with("ä…"));
    assert_eq!(stored.chars().count(), 513);
}

#[test]
fn unknown_types_have_no_resources_and_unknown_nonces_are_ignored() {
    let first = publication(&Publication::default(), &[(1, 1)]);
    let mut stream = DeltaStream::default();
    let request = |names: Vec<String>| DeltaDiscoveryRequest {
        type_url: "type.googleapis.com/envoy.config.cluster.v3.Cluster".into(),
        resource_names_subscribe: names,
        ..DeltaDiscoveryRequest::default()
    };
    assert_eq!(stream.handle_request(request(vec!["c".into()]), &first).unwrap(), Acknowledgment::None);
    assert!(stream.held_bytes() > 0, "the reply is pending");
    let response = stream.next_response().unwrap();
    let response = DeltaDiscoveryResponse::decode(response.bytes).unwrap();
    assert_eq!((response.resources.len(), response.removed_resources), (0, vec!["c".into()]));
    assert_eq!(stream.held_bytes(), 0);
    // With many names or long ones, the reply stays short.
    for names in [vec!["x".repeat(200); 100_000], vec!["x".repeat(1 << 20); 8]] {
        stream.handle_request(request(names), &first).unwrap();
        let response = stream.next_response().unwrap();
        assert!(response.bytes.len() < 4096, "{}", response.bytes.len());
    }
    let long = DeltaDiscoveryRequest { type_url: "x".repeat(1 << 20), ..DeltaDiscoveryRequest::default() };
    assert_eq!(stream.handle_request(long, &first).unwrap_err().code(), tonic::Code::InvalidArgument);
    let stray = DeltaDiscoveryRequest {
        type_url: Kind::Vip.type_url().to_owned(),
        response_nonce: "77".into(),
        ..DeltaDiscoveryRequest::default()
    };
    assert_eq!(stream.handle_request(stray, &first).unwrap(), Acknowledgment::None);
    assert_eq!(stream.in_force(), 0);
    assert!(first.get(&Key { kind: Kind::Settings, name: SETTINGS.into() }).is_some());
}

/// A publication of one Service.
fn of_service(previous: &Publication, service: PlacedService) -> Arc<Publication> {
    let placement = Placement { services: vec![service].into(), ..Placement::default() };
    Arc::new(previous.next(Arc::new(placement)).expect("something differs"))
}

#[test]
fn a_changed_backend_sends_one_slice_of_its_service() {
    let first = of_service(&Publication::default(), large_service(5000));
    let mut client = Client::default();
    client.subscribe_all(&first);
    client.assert_holds(&first);
    assert_eq!((first.count(Kind::BackendSlice), first.count(Kind::Service)), (79, 1));
    client.accept_all(&first);
    let mut changed = large_service(5000);
    changed.backends[1234].weight = 7;
    let second = of_service(&first, changed);
    let slices = second.changed_keys.iter().filter(|key| key.kind == Kind::BackendSlice).count();
    assert_eq!((slices, second.changed_keys.len()), (1, 2), "a slice and the Settings");
    let whole = encode::service_resource(&ServiceResource { service: large_service(5000), slices: 0 }).1.body.len();
    let update: usize = second.delta().iter().map(|response| response.bytes.len()).sum();
    assert!(whole > 200_000 && update < 10_000, "{whole} bytes, {update} bytes for the change");
    client.publish(&second);
    client.assert_holds(&second);
    client.accept_all(&second);
    // The Service is gone, and its slices.
    let none = Arc::new(second.next(Arc::default()).expect("something differs"));
    client.publish(&none);
    client.assert_holds(&none);
    assert_eq!((none.count(Kind::BackendSlice), client.held.len()), (0, 1));
}
