//! An independent xDS client at `vipgate policyd`.

use std::fmt::Write as _;
use std::slice::from_ref;
use std::time::Duration;

use serde_json::{Value, json};
use vipgate_tests::xds_peer::{TYPE_URL_PREFIX, XdsPeer};
use vipgate_tests::{Testbed, wait_for};

const ADDRESS: &str = "127.0.0.1:18000";
/// Resource types in the order of the server's responses.
const KINDS: [&str; 6] = ["EgressPolicy", "Vip", "Endpoint", "Service", "Gateway", "Settings"];
/// Duration without events after which none is expected.
const SILENCE: Duration = Duration::from_millis(700);

/// An EndpointSlice of tenant B.
fn slice(name: &str, addresses: &str) -> String {
    format!(
        "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
         metadata: {{name: {name}, namespace: tenant-b, labels: {{kubernetes.io/service-name: web}}}}\n\
         addressType: IPv4\nports: [{{name: https, port: 8443}}]\nendpoints: [{addresses}]\n---\n"
    )
}

fn one_endpoint(address: &str) -> String {
    slice("more", &format!("{{addresses: [{address}]}}"))
}

/// A testbed with a policy server, and a client with an open stream.
fn client(tag: &str) -> (Testbed, XdsPeer) {
    let mut testbed = Testbed::new(tag);
    testbed.start_policyd("");
    let mut peer = XdsPeer::client(&testbed, &testbed.gateway, ADDRESS);
    peer.send_command(&json!({"open": true}));
    (testbed, peer)
}

/// A request for a resource type, with more fields.
fn request(kind: &str, fields: &Value) -> Value {
    let mut request = json!({"node": {"id": "foreign"}, "type_url": format!("{TYPE_URL_PREFIX}{kind}")});
    request.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    json!({"send": request})
}

fn ack(peer: &mut XdsPeer, responses: &[Value]) {
    for response in responses {
        let request = json!({"type_url": response["type_url"], "response_nonce": response["nonce"]});
        peer.send_command(&json!({"send": request}));
    }
}

fn nack(peer: &mut XdsPeer, responses: &[Value], reason: &str) {
    let error = json!({"code": 3, "message": reason});
    for response in responses {
        let request =
            json!({"type_url": response["type_url"], "response_nonce": response["nonce"], "error_detail": error});
        peer.send_command(&json!({"send": request}));
    }
}

/// Content of a response: resource type, names of changed resources, names of removed ones.
fn content(response: &Value) -> (String, Vec<String>, Vec<String>) {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let changed = response["resources"].as_array().unwrap().iter().map(|it| text(&it["name"])).collect();
    let removed = response["removed"].as_array().unwrap().iter().map(text).collect();
    (text(&response["type"]), changed, removed)
}

/// Expected [`content`].
fn expected(kind: &str, changed: &[&str], removed: &[&str]) -> (String, Vec<String>, Vec<String>) {
    let all = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    (kind.to_owned(), all(changed), all(removed))
}

/// Names and versions of a response's resources.
fn versions(response: &Value) -> Value {
    let resources = response["resources"].as_array().unwrap().iter();
    resources.map(|it| (it["name"].as_str().unwrap().to_owned(), it["version"].clone())).collect()
}

fn status(testbed: &Testbed) -> Value {
    serde_json::from_str(&testbed.policy_status(&["-o", "json"]).1).unwrap()
}

/// The responses to a change of an endpoint: the endpoint, its Service, and the settings.
fn update(peer: &XdsPeer) -> [Value; 3] {
    std::array::from_fn(|_| peer.next_event_of("response"))
}

/// The server's status of the client.
fn gateway(testbed: &Testbed) -> Value {
    status(testbed)["gateways"][0].clone()
}

#[test]
#[expect(clippy::too_many_lines, reason = "one sequence of states, in which each step needs those before it")]
fn a_client_gets_the_full_state_then_deltas() {
    let (testbed, mut peer) = client("client");
    let initial: Vec<Value> = KINDS
        .iter()
        .map(|kind| {
            peer.send_command(&request(kind, &json!({})));
            peer.next_event_of("response")
        })
        .collect();
    let names = |n: usize| content(&initial[n]);
    assert_eq!(names(0), expected("EgressPolicy", &["EgressPolicy tenant-b/web", "Service tenant-a/api"], &[]));
    let vips = ["2001:db8:113::10", "2001:db8:113::20", "203.0.113.10", "203.0.113.20"];
    assert_eq!(names(1), expected("Vip", &vips, &[]));
    let endpoints = ["10.1.0.11", "10.1.0.12", "10.1.0.21", "fd00:1::11", "fd00:1::12", "fd00:1::21"];
    assert_eq!(names(2), expected("Endpoint", &endpoints, &[]));
    assert_eq!(names(3), expected("Service", &["Service tenant-a/api", "Service tenant-b/web"], &[]));
    assert_eq!(names(4), expected("Gateway", &[], &[]));
    assert_eq!(names(5), expected("Settings", &["settings"], &[]));
    let body = |n: usize, at: usize| &initial[n]["resources"][at]["body"];
    let web = body(0, 0);
    assert!(web["excluded"] == json!(["10.0.0.0/8", "fd00::/8"]) && web["sessions"] == 20000, "{web}");
    assert_eq!(body(1, 3)["reserved_ports"], json!([443]));
    let first = json!({"@type": format!("{TYPE_URL_PREFIX}Endpoint"), "address": "10.1.0.11", "name": "tenant-a/api-0",
        "policy": "Service tenant-a/api", "vips": ["203.0.113.10"]});
    assert_eq!(*body(2, 0), first);
    let service = body(3, 1);
    assert_eq!(service["vips"], json!(["203.0.113.20", "2001:db8:113::20"]));
    assert_eq!(service["ports"], json!([{"name": "https", "protocol": 6, "port": 443}]));
    let backends: Vec<_> = service["backends"].as_array().unwrap().iter().map(|it| it["address"].clone()).collect();
    assert_eq!(backends, ["10.1.0.21", "fd00:1::21"]);
    let settings = body(5, 0);
    let counts =
        ["egress_policies", "vips", "endpoints", "services"].map(|count| settings[count].as_str().unwrap().to_owned());
    assert_eq!(counts, ["2", "4", "6", "2"]);
    let version = status(&testbed)["version"].clone();
    assert!(
        settings["version"] == version && initial.iter().all(|response| response["version"] == version),
        "{initial:?}"
    );
    assert!(gateway(&testbed)["name"] == "foreign" && gateway(&testbed)["in_step"] == false);
    ack(&mut peer, &initial);
    assert!(wait_for(Duration::from_secs(5), || gateway(&testbed)["in_step"] == true), "{}", gateway(&testbed));

    // Then only deltas.
    testbed.write_policy("more.yaml", &one_endpoint("10.1.0.31"));
    let added = update(&peer);
    assert_eq!(content(&added[0]), expected("Endpoint", &["10.1.0.31"], &[]));
    assert_eq!(content(&added[1]), expected("Service", &["Service tenant-b/web"], &[]));
    assert_eq!(content(&added[2]), expected("Settings", &["settings"], &[]));
    assert_ne!(added[1]["version"], version);
    ack(&mut peer, &added);
    peer.assert_silent(SILENCE);

    // A removal that the client rejects is sent again with the next update.
    std::fs::remove_file(testbed.folder.path().join("policy/more.yaml")).unwrap();
    let removed = update(&peer);
    assert_eq!(content(&removed[0]), expected("Endpoint", &[], &["10.1.0.31"]));
    assert_eq!(removed[1]["version"], version, "the same policy has the same version");
    nack(&mut peer, &removed, "resource Endpoint 10.1.0.31: I need it");
    let is_rejected = || gateway(&testbed)["error"] == "resource Endpoint 10.1.0.31: I need it";
    assert!(wait_for(Duration::from_secs(5), is_rejected), "{}", gateway(&testbed));
    assert_eq!(gateway(&testbed)["in_step"], false);
    let (_, table, _) = testbed.policy_status(&[]);
    assert!(table.contains("BEHIND") && table.contains("rejected: resource Endpoint 10.1.0.31: I need it"), "{table}");
    testbed.policyd().wait_for_log(&["update_refused", "foreign", "I need it"]);
    assert!((testbed.policyd().metric("vipgate_policyd_answers_total", "refused") - 3.0).abs() < 0.5);
    testbed.write_policy("more.yaml", &one_endpoint("10.1.0.41"));
    let again = update(&peer);
    assert_eq!(content(&again[0]), expected("Endpoint", &["10.1.0.41"], &["10.1.0.31"]));
    ack(&mut peer, &again);
    assert!(wait_for(Duration::from_secs(5), || gateway(&testbed)["in_step"] == true), "{}", gateway(&testbed));
    assert_eq!(gateway(&testbed)["error"], "");

    // On a new stream the client sends its versions, and gets the differences.
    peer.send_command(&json!({"close": true}));
    assert_eq!(peer.next_event_of("ended"), "OK");
    testbed.write_policy("more.yaml", &one_endpoint("10.1.0.42"));
    let is_published = || status(&testbed)["version"] != again[1]["version"];
    assert!(wait_for(Duration::from_secs(5), is_published));
    peer.send_command(&json!({"open": true}));
    for (n, kind) in KINDS.iter().enumerate().filter(|(_, kind)| **kind != "Gateway") {
        let mut known = versions(&initial[n]);
        if *kind == "Endpoint" {
            known["10.1.0.41"] = versions(&again[0])["10.1.0.41"].clone();
        }
        peer.send_command(&request(kind, &json!({"initial_resource_versions": known})));
    }
    let resumed = update(&peer);
    assert_eq!(content(&resumed[0]), expected("Endpoint", &["10.1.0.42"], &["10.1.0.41"]));
    assert_eq!(content(&resumed[1]), expected("Service", &["Service tenant-b/web"], &[]));
    assert_eq!(content(&resumed[2]), expected("Settings", &["settings"], &[]));
    ack(&mut peer, &resumed);
    assert!(wait_for(Duration::from_secs(5), || gateway(&testbed)["in_step"] == true), "{}", gateway(&testbed));
    peer.assert_silent(SILENCE);
}

#[test]
fn a_client_can_subscribe_to_single_and_missing_names() {
    let (testbed, mut peer) = client("names");
    let names = json!({"resource_names_subscribe": ["10.1.0.11", "10.1.0.77"]});
    peer.send_command(&request("Endpoint", &names));
    let response = peer.next_event_of("response");
    assert_eq!(content(&response), expected("Endpoint", &["10.1.0.11"], &["10.1.0.77"]));
    ack(&mut peer, from_ref(&response));
    // Resources without a subscription are not sent; a missing one is sent when it is added.
    testbed.write_policy("more.yaml", &one_endpoint("10.1.0.31"));
    peer.assert_silent(SILENCE);
    testbed.write_policy("more.yaml", &one_endpoint("10.1.0.77"));
    let response = peer.next_event_of("response");
    assert_eq!(content(&response), expected("Endpoint", &["10.1.0.77"], &[]));
    ack(&mut peer, from_ref(&response));
    peer.send_command(&request("Endpoint", &json!({"resource_names_unsubscribe": ["10.1.0.77"]})));
    testbed.write_policy("more.yaml", &one_endpoint("10.1.0.31"));
    peer.assert_silent(SILENCE);
    peer.send_command(&request("Endpoint", &json!({"resource_names_subscribe": ["10.1.0.31"]})));
    assert_eq!(content(&peer.next_event_of("response")), expected("Endpoint", &["10.1.0.31"], &[]));

    // An unknown resource type is empty.
    peer.send_command(&json!({"send": {"type_url": "type.googleapis.com/envoy.config.cluster.v3.Cluster"}}));
    let empty = peer.next_event_of("response");
    assert_eq!(content(&empty), expected("Cluster", &[], &[]));
    assert_eq!(empty["type_url"], "type.googleapis.com/envoy.config.cluster.v3.Cluster");

    // Requests without a node id are rejected.
    for nameless in [
        json!({"type_url": format!("{TYPE_URL_PREFIX}Vip")}),
        json!({"type_url": format!("{TYPE_URL_PREFIX}Vip"), "node": {}}),
    ] {
        let mut other = XdsPeer::client(&testbed, &testbed.gateway, ADDRESS);
        other.send_command(&json!({"open": true}));
        other.send_command(&json!({"send": nameless}));
        let ended = other.next_event();
        assert!(ended["ended"] == "INVALID_ARGUMENT", "{ended}");
        assert!(ended["details"].as_str().unwrap().contains("node.id"), "{ended}");
    }
    assert_eq!(gateway(&testbed)["connected"], true, "other streams are unaffected");
}

#[test]
fn a_large_policy_fits_default_grpc_message_limits() {
    const COUNT: usize = 20_000;
    let mut testbed = Testbed::new("large");
    let mut text = String::new();
    for number in 0..COUNT / 1000 {
        let mut addresses = String::new();
        for n in number * 1000..(number + 1) * 1000 {
            let pod = format!("targetRef: {{kind: Pod, name: a-pod-with-quite-a-long-name-{n}, namespace: tenant-b}}");
            write!(addresses, "{{addresses: [10.64.{}.{}], {pod}}}, ", n / 250, n % 250 + 1).unwrap();
        }
        text += &slice(&format!("many-{number}"), &addresses);
    }
    testbed.write_policy("many.yaml", &text);
    testbed.start_policyd("");
    let mut peer = XdsPeer::client(&testbed, &testbed.gateway, ADDRESS);
    peer.send_command(&json!({"open": true, "brief": true}));
    peer.send_command(&request("Endpoint", &json!({})));
    let (mut count, mut responses) = (0, 0);
    while count < COUNT + 6 {
        // Python's gRPC accepts 4 MiB by default; a larger message would end the stream.
        let response = peer.next_event();
        assert!(response["response"]["bytes"].as_u64().is_some_and(|bytes| bytes < 4 << 20), "{response}");
        count += response["response"]["resources"].as_array().unwrap().len();
        responses += 1;
        ack(&mut peer, from_ref(&response["response"]));
    }
    assert_eq!(count, COUNT + 6);
    assert!(responses > 1, "it would have fit into one response");
    peer.assert_silent(SILENCE);
}
