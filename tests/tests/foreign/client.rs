//! A client of other people's making at `vipgate policyd`.

use std::fmt::Write as _;
use std::slice::from_ref;
use std::time::Duration;

use serde_json::{Value, json};
use vipgate_tests::foreign::{Peer, TYPE};
use vipgate_tests::{World, wait_for};

const ADDRESS: &str = "127.0.0.1:18000";
/// In the order in which the server sends them.
const KINDS: [&str; 6] = ["EgressPolicy", "Vip", "Endpoint", "Service", "Gateway", "Settings"];
/// Nothing comes for so long: nothing will.
const SILENCE: Duration = Duration::from_millis(700);

/// Endpoints of tenant B.
fn slice(name: &str, addresses: &str) -> String {
    format!(
        "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
         metadata: {{name: {name}, namespace: tenant-b, labels: {{kubernetes.io/service-name: web}}}}\n\
         addressType: IPv4\nports: [{{name: https, port: 8443}}]\nendpoints: [{addresses}]\n---\n"
    )
}

fn one(address: &str) -> String {
    slice("more", &format!("{{addresses: [{address}]}}"))
}

/// A world with a policy server, and a client with an open stream.
fn client(tag: &str) -> (World, Peer) {
    let mut world = World::new(tag);
    world.start_policyd("");
    let mut peer = Peer::client(&world, &world.gateway, ADDRESS);
    peer.tell(&json!({"open": true}));
    (world, peer)
}

/// A request about a kind, with more fields.
fn request(kind: &str, more: &Value) -> Value {
    let mut request = json!({"node": {"id": "foreign"}, "type_url": format!("{TYPE}{kind}")});
    request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    json!({"send": request})
}

fn accept(peer: &mut Peer, responses: &[Value]) {
    for response in responses {
        let request = json!({"type_url": response["type_url"], "response_nonce": response["nonce"]});
        peer.tell(&json!({"send": request}));
    }
}

fn refuse(peer: &mut Peer, responses: &[Value], why: &str) {
    let error = json!({"code": 3, "message": why});
    for response in responses {
        let request =
            json!({"type_url": response["type_url"], "response_nonce": response["nonce"], "error_detail": error});
        peer.tell(&json!({"send": request}));
    }
}

/// What a response says: its kind, names that come, names that go.
fn says(response: &Value) -> (String, Vec<String>, Vec<String>) {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let come = response["resources"].as_array().unwrap().iter().map(|it| text(&it["name"])).collect();
    let go = response["removed"].as_array().unwrap().iter().map(text).collect();
    (text(&response["type"]), come, go)
}

/// The same as [`says`], to compare with.
fn said(kind: &str, come: &[&str], go: &[&str]) -> (String, Vec<String>, Vec<String>) {
    let all = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    (kind.to_owned(), all(come), all(go))
}

/// Names and versions of a response's resources.
fn versions(response: &Value) -> Value {
    let resources = response["resources"].as_array().unwrap().iter();
    resources.map(|it| (it["name"].as_str().unwrap().to_owned(), it["version"].clone())).collect()
}

fn status(world: &World) -> Value {
    serde_json::from_str(&world.policy_status(&["-o", "json"]).1).unwrap()
}

/// What a change of an endpoint is told in: itself, the Service that it is behind, and the settings.
fn update(peer: &Peer) -> [Value; 3] {
    std::array::from_fn(|_| peer.next_of("response"))
}

/// How things stand with the client, as the server says.
fn gateway(world: &World) -> Value {
    status(world)["gateways"][0].clone()
}

#[test]
fn a_client_is_told_everything_and_then_what_differs() {
    let (world, mut peer) = client("client");
    let told: Vec<Value> = KINDS
        .iter()
        .map(|kind| {
            peer.tell(&request(kind, &json!({})));
            peer.next_of("response")
        })
        .collect();
    let names = |n: usize| says(&told[n]);
    assert_eq!(names(0), said("EgressPolicy", &["EgressPolicy tenant-b/web", "Service tenant-a/api"], &[]));
    let vips = ["203.0.113.10", "203.0.113.20", "2001:db8:113::10", "2001:db8:113::20"];
    assert_eq!(names(1), said("Vip", &vips, &[]));
    let endpoints = ["10.1.0.11", "10.1.0.12", "10.1.0.21", "fd00:1::11", "fd00:1::12", "fd00:1::21"];
    assert_eq!(names(2), said("Endpoint", &endpoints, &[]));
    assert_eq!(names(3), said("Service", &["Service tenant-a/api", "Service tenant-b/web"], &[]));
    assert_eq!(names(4), said("Gateway", &[], &[]));
    assert_eq!(names(5), said("Settings", &["settings"], &[]));
    let body = |n: usize, at: usize| &told[n]["resources"][at]["body"];
    let web = body(0, 0);
    assert!(web["excluded"] == json!(["10.0.0.0/8", "fd00::/8"]) && web["sessions"] == 20000, "{web}");
    assert_eq!(body(1, 1)["reserved_ports"], json!([443]));
    let first = json!({"@type": format!("{TYPE}Endpoint"), "address": "10.1.0.11", "name": "tenant-a/api-0",
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
    let version = status(&world)["version"].clone();
    assert!(settings["version"] == version && told.iter().all(|response| response["version"] == version), "{told:?}");
    assert!(gateway(&world)["name"] == "foreign" && gateway(&world)["in_step"] == false);
    accept(&mut peer, &told);
    assert!(wait_for(Duration::from_secs(5), || gateway(&world)["in_step"] == true), "{}", gateway(&world));

    // What differs, and nothing else.
    world.write_policy("more.yaml", &one("10.1.0.31"));
    let more = update(&peer);
    assert_eq!(says(&more[0]), said("Endpoint", &["10.1.0.31"], &[]));
    assert_eq!(says(&more[1]), said("Service", &["Service tenant-b/web"], &[]));
    assert_eq!(says(&more[2]), said("Settings", &["settings"], &[]));
    assert_ne!(more[1]["version"], version);
    accept(&mut peer, &more);
    peer.is_silent(SILENCE);

    // A removal that the client refuses is told again with what comes next.
    std::fs::remove_file(world.folder.path().join("policy/more.yaml")).unwrap();
    let less = update(&peer);
    assert_eq!(says(&less[0]), said("Endpoint", &[], &["10.1.0.31"]));
    assert_eq!(less[1]["version"], version, "the same policy has the same version");
    refuse(&mut peer, &less, "resource Endpoint 10.1.0.31: I need it");
    let refused = || gateway(&world)["error"] == "resource Endpoint 10.1.0.31: I need it";
    assert!(wait_for(Duration::from_secs(5), refused), "{}", gateway(&world));
    assert_eq!(gateway(&world)["in_step"], false);
    let (_, table, _) = world.policy_status(&[]);
    assert!(table.contains("BEHIND") && table.contains("refused: resource Endpoint 10.1.0.31: I need it"), "{table}");
    world.policyd().wait_for_log(&["update_refused", "foreign", "I need it"]);
    assert!((world.policyd().metric("vipgate_policyd_answers_total", "refused") - 3.0).abs() < 0.5);
    world.write_policy("more.yaml", &one("10.1.0.41"));
    let again = update(&peer);
    assert_eq!(says(&again[0]), said("Endpoint", &["10.1.0.41"], &["10.1.0.31"]));
    accept(&mut peer, &again);
    assert!(wait_for(Duration::from_secs(5), || gateway(&world)["in_step"] == true), "{}", gateway(&world));
    assert_eq!(gateway(&world)["error"], "");

    // On a new stream it says what it has, and hears what differs from that.
    peer.tell(&json!({"close": true}));
    assert_eq!(peer.next_of("ended"), "OK");
    world.write_policy("more.yaml", &one("10.1.0.42"));
    let there = || status(&world)["version"] != again[1]["version"];
    assert!(wait_for(Duration::from_secs(5), there));
    peer.tell(&json!({"open": true}));
    for (n, kind) in KINDS.iter().enumerate().filter(|(_, kind)| **kind != "Gateway") {
        let mut known = versions(&told[n]);
        if *kind == "Endpoint" {
            known["10.1.0.41"] = versions(&again[0])["10.1.0.41"].clone();
        }
        peer.tell(&request(kind, &json!({"initial_resource_versions": known})));
    }
    let resumed = update(&peer);
    assert_eq!(says(&resumed[0]), said("Endpoint", &["10.1.0.42"], &["10.1.0.41"]));
    assert_eq!(says(&resumed[1]), said("Service", &["Service tenant-b/web"], &[]));
    assert_eq!(says(&resumed[2]), said("Settings", &["settings"], &[]));
    accept(&mut peer, &resumed);
    assert!(wait_for(Duration::from_secs(5), || gateway(&world)["in_step"] == true), "{}", gateway(&world));
    peer.is_silent(SILENCE);
}

#[test]
fn a_client_may_ask_for_single_names_and_for_what_is_not_there() {
    let (world, mut peer) = client("names");
    let names = json!({"resource_names_subscribe": ["10.1.0.11", "10.1.0.77"]});
    peer.tell(&request("Endpoint", &names));
    let told = peer.next_of("response");
    assert_eq!(says(&told), said("Endpoint", &["10.1.0.11"], &["10.1.0.77"]));
    accept(&mut peer, from_ref(&told));
    // What it hasn't asked for it doesn't hear of; what it asked for it does when it comes.
    world.write_policy("more.yaml", &one("10.1.0.31"));
    peer.is_silent(SILENCE);
    world.write_policy("more.yaml", &one("10.1.0.77"));
    let told = peer.next_of("response");
    assert_eq!(says(&told), said("Endpoint", &["10.1.0.77"], &[]));
    accept(&mut peer, from_ref(&told));
    peer.tell(&request("Endpoint", &json!({"resource_names_unsubscribe": ["10.1.0.77"]})));
    world.write_policy("more.yaml", &one("10.1.0.31"));
    peer.is_silent(SILENCE);
    peer.tell(&request("Endpoint", &json!({"resource_names_subscribe": ["10.1.0.31"]})));
    assert_eq!(says(&peer.next_of("response")), said("Endpoint", &["10.1.0.31"], &[]));

    // A type that isn't ours has nothing.
    peer.tell(&json!({"send": {"type_url": "type.googleapis.com/envoy.config.cluster.v3.Cluster"}}));
    let nothing = peer.next_of("response");
    assert_eq!(says(&nothing), said("Cluster", &[], &[]));
    assert_eq!(nothing["type_url"], "type.googleapis.com/envoy.config.cluster.v3.Cluster");

    // Who doesn't say who it is is refused.
    for nameless in [json!({"type_url": format!("{TYPE}Vip")}), json!({"type_url": format!("{TYPE}Vip"), "node": {}})] {
        let mut other = Peer::client(&world, &world.gateway, ADDRESS);
        other.tell(&json!({"open": true}));
        other.tell(&json!({"send": nameless}));
        let ended = other.next();
        assert!(ended["ended"] == "INVALID_ARGUMENT", "{ended}");
        assert!(ended["details"].as_str().unwrap().contains("node.id"), "{ended}");
    }
    assert_eq!(gateway(&world)["connected"], true, "others are not touched by it");
}

#[test]
fn a_large_policy_comes_in_messages_that_anybody_takes() {
    const COUNT: usize = 20_000;
    let mut world = World::new("large");
    let mut text = String::new();
    for number in 0..COUNT / 1000 {
        let mut addresses = String::new();
        for n in number * 1000..(number + 1) * 1000 {
            let pod = format!("targetRef: {{kind: Pod, name: a-pod-with-quite-a-long-name-{n}, namespace: tenant-b}}");
            write!(addresses, "{{addresses: [10.64.{}.{}], {pod}}}, ", n / 250, n % 250 + 1).unwrap();
        }
        text += &slice(&format!("many-{number}"), &addresses);
    }
    world.write_policy("many.yaml", &text);
    world.start_policyd("");
    let mut peer = Peer::client(&world, &world.gateway, ADDRESS);
    peer.tell(&json!({"open": true, "brief": true}));
    peer.tell(&request("Endpoint", &json!({})));
    let (mut count, mut responses) = (0, 0);
    while count < COUNT + 6 {
        // Python's gRPC takes 4 MiB at most unless told otherwise; more would end the stream.
        let response = peer.next();
        assert!(response["response"]["bytes"].as_u64().is_some_and(|bytes| bytes < 4 << 20), "{response}");
        count += response["response"]["resources"].as_array().unwrap().len();
        responses += 1;
        accept(&mut peer, from_ref(&response["response"]));
    }
    assert_eq!(count, COUNT + 6);
    assert!(responses > 1, "it would have fitted into one");
    peer.is_silent(SILENCE);
}
