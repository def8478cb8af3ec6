//! The protocol's promises, by playing a client that keeps to it, or doesn't.

use envoy_types::pb::google::rpc;

use vipgate_dataplane::snapshot::spec::EndpointSpec;

use super::*;
use crate::complaint::Complaint;
use crate::policy::Deal;
use crate::source::Update;
use crate::source::store::Store;
use crate::xds::resource::SETTINGS;

/// The publication after `before`, of Services with one pod each: `(number, last byte of the VIP)`.
fn publication(before: &Publication, tenants: &[(u8, u8)]) -> Arc<Publication> {
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
    let changed = tenants.iter().map(|it| (format!("{}.yaml", it.0).into(), Ok(text(it)))).collect();
    let mut store = Store::default();
    store.update(Update { whole: true, changed, ..Update::default() });
    let outcome = store.compile();
    assert_eq!(outcome.complaints, Vec::<Complaint>::new());
    Arc::new(before.next(outcome.deal.expect("there are manifests")).expect("something differs"))
}

/// A client: what it holds, and its stream's other end.
#[derive(Default)]
struct Client {
    stream: Stream,
    held: BTreeMap<Key, String>,
    /// Names that the last responses brought or took.
    told: Vec<String>,
    unanswered: Vec<(Kind, String)>,
}

impl Client {
    fn request(&mut self, request: DeltaDiscoveryRequest, current: &Arc<Publication>) -> Heard {
        let heard = self.stream.request(request, current).unwrap();
        self.take();
        heard
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
        for kind in Kind::ALL {
            self.subscribe(kind, &[], current);
        }
    }

    fn publish(&mut self, new: &Arc<Publication>) {
        self.told.clear();
        if let Some(update) = self.stream.update(new).unwrap() {
            self.stream.publish(update);
        }
        self.take();
    }

    fn take(&mut self) {
        while let Some(Response { bytes, nonce, .. }) = self.stream.next_response() {
            let response = DeltaDiscoveryResponse::decode(bytes).unwrap();
            let kind = Kind::of_url(&response.type_url).unwrap();
            for resource in response.resources {
                assert_eq!(resource.resource.unwrap().type_url, response.type_url);
                self.told.push(format!("+{}", resource.name));
                self.held.insert(Key { kind, name: resource.name.into() }, resource.version);
            }
            for name in response.removed_resources {
                self.told.push(format!("-{name}"));
                self.held.remove(&Key { kind, name: name.into() });
            }
            self.unanswered.push((kind, nonce));
        }
    }

    fn answer(&mut self, at: usize, error: Option<&str>, current: &Arc<Publication>) -> Heard {
        let (kind, nonce) = self.unanswered.remove(at);
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
        while !self.unanswered.is_empty() {
            assert_eq!(self.answer(0, None, current), Heard::Accepted);
        }
    }

    fn holds(&self, publication: &Publication) {
        let all = Kind::ALL.into_iter().flat_map(|kind| publication.of(kind));
        let all: BTreeMap<Key, String> =
            all.map(|it| (it.key.clone(), Content::version_text(it.content.version))).collect();
        assert_eq!(self.held, all);
    }
}

#[test]
fn a_subscriber_gets_everything_then_what_differs_and_is_in_force_when_it_has_answered_all() {
    let first = publication(&Publication::default(), &[(1, 1), (2, 2)]);
    let mut client = Client::default();
    client.subscribe_all(&first);
    client.holds(&first);
    assert_eq!(client.stream.in_force(), 0);
    client.answer(0, None, &first);
    assert_eq!(client.stream.in_force(), 0, "not all of it");
    client.accept_all(&first);
    assert_eq!(client.stream.in_force(), 1);
    let second = publication(&first, &[(1, 1), (2, 3)]);
    client.publish(&second);
    client.holds(&second);
    // What comes before what names it, what goes after all that named it, the settings last.
    assert_eq!(client.told, ["+203.0.113.3", "+10.0.0.2", "+Service a/s2", "-203.0.113.2", "+settings"]);
    client.accept_all(&second);
    assert_eq!(client.stream.in_force(), 2);
    client.publish(&second);
    assert!(client.told.is_empty(), "nothing is told twice");
}

#[test]
fn whoever_comes_back_is_told_what_differs_and_the_settings() {
    let first = publication(&Publication::default(), &[(1, 1), (2, 2), (3, 3)]);
    let mut client = Client::default();
    client.subscribe_all(&first);
    let second = publication(&first, &[(1, 1), (3, 4), (5, 5)]);
    client.stream = Stream::default();
    client.told.clear();
    client.subscribe_all(&second);
    client.holds(&second);
    assert!(!client.told.contains(&"+10.0.0.1".to_owned()), "{:?}", client.told);
    client.stream = Stream::default();
    client.told.clear();
    client.subscribe_all(&second);
    assert_eq!(client.told, ["+settings"]);
}

#[test]
fn what_was_refused_is_told_again_with_the_next_change() {
    let first = publication(&Publication::default(), &[(1, 1)]);
    let mut client = Client::default();
    client.subscribe_all(&first);
    client.accept_all(&first);
    let second = publication(&first, &[(1, 1), (2, 2)]);
    client.publish(&second);
    let held = client.held.clone();
    assert_eq!(client.answer(0, Some("no"), &second), Heard::Refused("no".into()));
    client.accept_all(&second);
    assert_eq!(client.stream.in_force(), 1, "the second is not in force");
    // The client holds what it held, whatever it was sent.
    drop(held);
    let third = publication(&second, &[(1, 1), (2, 2), (3, 3)]);
    client.publish(&third);
    for name in ["+Service a/s2", "+10.0.0.2", "+203.0.113.2", "+10.0.0.3"] {
        assert!(client.told.contains(&name.to_owned()), "{name} in {:?}", client.told);
    }
    client.accept_all(&third);
    assert_eq!(client.stream.in_force(), 3);
}

#[test]
fn a_slow_client_is_told_the_sum_of_what_it_missed() {
    let first = publication(&Publication::default(), &[(1, 1), (2, 2)]);
    let mut client = Client::default();
    client.subscribe_all(&first);
    let second = publication(&first, &[(2, 2), (3, 3)]);
    let third = publication(&second, &[(3, 3), (4, 4)]);
    client.publish(&third);
    client.holds(&third);
    assert!(!client.told.iter().any(|name| name.ends_with("settings") && name.starts_with('-')));
}

#[test]
fn a_client_that_owes_answers_is_busy_until_it_answers() {
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
fn names_are_subscribed_one_by_one() {
    let first = publication(&Publication::default(), &[(1, 1), (2, 2)]);
    let mut client = Client::default();
    client.subscribe(Kind::Endpoint, &["10.0.0.1", "10.0.0.9"], &first);
    assert_eq!(client.told, ["+10.0.0.1", "-10.0.0.9"], "what isn't there is said to be gone");
    let second = publication(&first, &[(1, 5), (2, 6), (9, 9)]);
    client.publish(&second);
    assert_eq!(client.told, ["+10.0.0.1", "+10.0.0.9"]);
    let unsubscribe = DeltaDiscoveryRequest {
        type_url: Kind::Endpoint.type_url().to_owned(),
        resource_names_unsubscribe: vec!["10.0.0.1".into()],
        ..DeltaDiscoveryRequest::default()
    };
    client.request(unsubscribe, &second);
    let third = publication(&second, &[(1, 7)]);
    client.publish(&third);
    assert_eq!(client.told, ["-10.0.0.9"]);
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

/// What the client is told in answer to a request.
fn told(client: &mut Client, request: DeltaDiscoveryRequest, current: &Arc<Publication>) -> Vec<String> {
    client.told.clear();
    client.request(request, current);
    client.told.clone()
}

#[test]
fn a_name_that_is_left_under_a_wildcard_is_told_again() {
    // By the first request without names, and by name.
    for wildcard in [names(&[], &[]), names(&["*"], &[])] {
        let (mut client, first, second) = two_endpoints();
        assert_eq!(told(&mut client, wildcard, &first), ["+10.0.0.1", "+10.0.0.2"]);
        assert_eq!(told(&mut client, names(&["10.0.0.1"], &[]), &first), ["+10.0.0.1"]);
        assert_eq!(told(&mut client, names(&[], &["10.0.0.1"]), &first), ["+10.0.0.1"]);
        assert_eq!(told(&mut client, names(&[], &["10.0.0.9"]), &first), ["-10.0.0.9"], "there is none");
        client.publish(&second);
        assert_eq!(client.told, ["+10.0.0.1", "+10.0.0.2"], "the wildcard stays");
        client.accept_all(&second);
        assert_eq!(client.stream.in_force(), 2);
    }
}

#[test]
fn without_a_wildcard_a_name_that_is_left_is_told_no_more() {
    let (mut client, first, second) = two_endpoints();
    assert_eq!(told(&mut client, names(&["10.0.0.1", "10.0.0.2"], &[]), &first), ["+10.0.0.1", "+10.0.0.2"]);
    assert!(told(&mut client, names(&[], &["10.0.0.1"]), &first).is_empty());
    client.publish(&second);
    assert_eq!(client.told, ["+10.0.0.2"]);
    // An empty list of names is no wildcard once there were names.
    assert!(told(&mut client, names(&[], &["10.0.0.2"]), &second).is_empty());
    assert!(told(&mut client, names(&[], &[]), &second).is_empty());
    client.publish(&publication(&second, &[(1, 1)]));
    assert!(client.told.is_empty(), "{:?}", client.told);
}

#[test]
fn a_name_stays_when_the_wildcard_goes() {
    let (mut client, first, second) = two_endpoints();
    told(&mut client, names(&[], &[]), &first);
    told(&mut client, names(&["10.0.0.1"], &[]), &first);
    assert!(told(&mut client, names(&[], &["*"]), &first).is_empty());
    client.publish(&second);
    assert_eq!(client.told, ["+10.0.0.1"]);
    assert_eq!(told(&mut client, names(&["*"], &[]), &second), ["+10.0.0.1", "+10.0.0.2"], "all of it again");
    assert!(told(&mut client, names(&[], &["*", "10.0.0.1"]), &second).is_empty(), "nothing is wanted any more");
}

#[test]
fn a_first_request_that_leaves_the_wildcard_wants_nothing() {
    let (mut client, first, second) = two_endpoints();
    assert!(told(&mut client, names(&[], &["*"]), &first).is_empty());
    client.publish(&second);
    assert!(client.told.is_empty(), "{:?}", client.told);
}

#[test]
fn what_is_named_twice_or_beside_a_wildcard_is_answered_once() {
    let (mut client, first, _) = two_endpoints();
    assert_eq!(told(&mut client, names(&["10.0.0.1", "10.0.0.1"], &[]), &first), ["+10.0.0.1"]);
    // The name comes again in the request that leaves it: it is wanted.
    assert_eq!(told(&mut client, names(&["10.0.0.1"], &["10.0.0.1"]), &first), ["+10.0.0.1"]);
    assert_eq!(
        told(&mut client, names(&["*", "10.0.0.1", "10.0.0.9"], &[]), &first),
        ["+10.0.0.1", "+10.0.0.2", "-10.0.0.9"]
    );
}

/// A publication of so many endpoints, all of the same policy.
fn many(endpoints: u32, policy: &str, before: &Publication) -> Arc<Publication> {
    let endpoint = |n: u32| EndpointSpec {
        address: std::net::Ipv4Addr::from_bits(0x0a00_0000 + n).into(),
        name: "".into(),
        policy: policy.into(),
        vips: vec!["203.0.113.1".parse().unwrap()],
        gateway: None,
        remarks: vec![],
    };
    let deal = Deal { endpoints: (0..endpoints).map(endpoint).collect(), ..Deal::default() };
    Arc::new(before.next(Arc::new(deal)).unwrap())
}

/// A gateway takes 64 MiB, other clients of gRPC 4 MiB.
#[test]
fn a_large_policy_comes_in_small_responses() {
    let all = many(20_000, "Service a/s", &Publication::default()).whole(Kind::Endpoint);
    let bytes: Vec<usize> = all.iter().map(|chunk| chunk.bytes.len()).collect();
    assert!(bytes.iter().sum::<usize>() > 1 << 20 && bytes.iter().all(|it| *it < 1 << 17), "{bytes:?}");
}

/// A group of 64 gateways behind one address with 100 000 endpoints has 192 MiB for this.
#[test]
fn a_key_that_the_publication_has_costs_little_and_that_until_the_last_answer() {
    const ENDPOINTS: u32 = 10_000;
    let publication = many(ENDPOINTS, "Service a/s", &Publication::default());
    let first = &publication.of(Kind::Endpoint)[0];
    // All others are new to it.
    let known = [(first.key.name.to_string(), Content::version_text(first.content.version))];
    let mut stream = Stream::default();
    let request = DeltaDiscoveryRequest { initial_resource_versions: known.into(), ..names(&[], &[]) };
    stream.request(request, &publication).unwrap();
    let (keys, held) = (ENDPOINTS as usize - 1, stream.held());
    assert!((keys * SHARED..keys * 30).contains(&held), "{held}");
    let mut nonces = Vec::new();
    while let Some(Response { bytes, nonce, .. }) = stream.next_response() {
        assert!(bytes.len() < 1 << 17, "{}", bytes.len());
        nonces.push(nonce);
    }
    assert!(nonces.len() > 10, "{}", nonces.len());
    assert_eq!(stream.held(), held, "sent, and not answered");
    let mut answer = |nonce: String| {
        let request = DeltaDiscoveryRequest { response_nonce: nonce, ..names(&[], &[]) };
        assert_eq!(stream.request(request, &publication).unwrap(), Heard::Accepted);
        stream.held()
    };
    let last = nonces.pop().unwrap();
    for nonce in nonces {
        assert!(answer(nonce) >= keys * SHARED);
    }
    assert_eq!(answer(last), 0);
}

#[test]
fn a_client_that_does_not_answer_holds_no_publication_that_is_past() {
    let first = many(100, "Service a/s", &Publication::default());
    let second = many(101, "Service a/s", &first);
    let past = Arc::downgrade(&first);
    let mut client = Client::default();
    client.subscribe_all(&first);
    assert_eq!(client.stream.lag(1), 0);
    assert_eq!(client.stream.lag(2), 101 * RESOURCE / 2, "the test holds it, too");
    drop(first);
    client.publish(&second);
    assert!(past.upgrade().is_none());
    assert_eq!(client.stream.in_flight.len(), client.unanswered.len());
    // All of a kind that was refused is told again.
    let endpoints = client.unanswered.iter().position(|(kind, _)| *kind == Kind::Endpoint).unwrap();
    client.answer(endpoints, Some("no"), &second);
    let third = many(102, "Service a/s", &second);
    client.publish(&third);
    assert_eq!(client.told.len(), 102 + 1);
    client.accept_all(&third);
    assert_eq!(client.stream.in_force(), 3);
    assert_eq!(client.stream.held(), 0);
}

#[test]
fn a_reason_is_cut_where_people_stop_reading() {
    let (mut client, first, _) = two_endpoints();
    client.subscribe_all(&first);
    assert_eq!(client.answer(0, Some("no"), &first), Heard::Refused("no".into()));
    // Two bytes each, behind one.
    let reason = format!("x{}", "ä".repeat(1 << 20));
    let Heard::Refused(kept) = client.answer(0, Some(reason.as_str()), &first) else { panic!("it was refused") };
    assert!(kept.starts_with("xää") && kept.ends_with("ä…"));
    assert_eq!(kept.chars().count(), 513);
}

#[test]
fn unknown_types_are_empty_and_unknown_nonces_are_nothing() {
    let first = publication(&Publication::default(), &[(1, 1)]);
    let mut stream = Stream::default();
    let request = |names: Vec<String>| DeltaDiscoveryRequest {
        type_url: "type.googleapis.com/envoy.config.cluster.v3.Cluster".into(),
        resource_names_subscribe: names,
        ..DeltaDiscoveryRequest::default()
    };
    assert_eq!(stream.request(request(vec!["c".into()]), &first).unwrap(), Heard::Nothing);
    assert!(stream.held() > 0, "it isn't sent");
    let response = stream.next_response().unwrap();
    let response = DeltaDiscoveryResponse::decode(response.bytes).unwrap();
    assert_eq!((response.resources.len(), response.removed_resources), (0, vec!["c".into()]));
    assert_eq!(stream.held(), 0);
    // Of many names, and of long ones, little is said.
    for names in [vec!["x".repeat(200); 100_000], vec!["x".repeat(1 << 20); 8]] {
        stream.request(request(names), &first).unwrap();
        let response = stream.next_response().unwrap();
        assert!(response.bytes.len() < 4096, "{}", response.bytes.len());
    }
    let long = DeltaDiscoveryRequest { type_url: "x".repeat(1 << 20), ..DeltaDiscoveryRequest::default() };
    assert_eq!(stream.request(long, &first).unwrap_err().code(), tonic::Code::InvalidArgument);
    let stray = DeltaDiscoveryRequest {
        type_url: Kind::Vip.type_url().to_owned(),
        response_nonce: "77".into(),
        ..DeltaDiscoveryRequest::default()
    };
    assert_eq!(stream.request(stray, &first).unwrap(), Heard::Nothing);
    assert_eq!(stream.in_force(), 0);
    assert!(first.get(&Key { kind: Kind::Settings, name: SETTINGS.into() }).is_some());
}
