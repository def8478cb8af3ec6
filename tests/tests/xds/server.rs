//! A gateway with an independent xDS server.

use std::collections::BTreeMap;
use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

use serde_json::{Value, json};
use vipgate_lab::Host;
use vipgate_lab::reflector::query_udp;
use vipgate_tests::traffic::Traffic;
use vipgate_tests::xds_peer::{TYPE_URL_PREFIX, XdsPeer};
use vipgate_tests::{SERVER, Testbed, VIP_A, VIP_B, wait_for};

const ADDRESS: &str = "127.0.0.1:18000";
/// The policy of all endpoints.
pub(crate) const POLICY: &str = "EgressPolicy test/all";

/// The gateway's configuration of its policy server.
pub(crate) fn server_config(testbed: &Testbed) -> String {
    let cache = testbed.folder.path().join("policy.cache").display().to_string();
    format!("zone: zone-7\npolicy: {{server: {{url: \"http://{ADDRESS}\", cache: {cache}}}}}")
}

pub(crate) fn policy(name: &str) -> Value {
    json!({"name": name, "body": {"name": name, "destinations": ["0.0.0.0/0", "::/0"]}})
}

pub(crate) fn vip(address: &str) -> Value {
    json!({"name": address, "body": {"address": address, "name": "test"}})
}

pub(crate) fn endpoint(address: &str, vip: &str) -> Value {
    json!({"name": address, "body": {"address": address, "name": "test/pod", "policy": POLICY, "vips": [vip]}})
}

/// Settings with the numbers of policies, VIPs and endpoints.
pub(crate) fn settings(version: &str, counts: [u64; 3]) -> Value {
    let [policies, vips, endpoints] = counts;
    let body = json!({"version": version, "egress_policies": policies, "vips": vips, "endpoints": endpoints});
    json!({"name": "settings", "version": version, "body": body})
}

/// Sends a response with this nonce.
pub(crate) fn send(peer: &mut XdsPeer, nonce: u32, kind: &str, resources: &[Value], removed: &[&str]) {
    let response = json!({"type": kind, "nonce": nonce.to_string(), "resources": resources, "removed": removed});
    peer.send_command(&json!({"send": response}));
}

/// Number of resource types.
const TYPES: usize = 10;

/// Receives the subscriptions of a new stream, by resource type.
pub(crate) fn subscriptions(peer: &XdsPeer) -> BTreeMap<String, Value> {
    peer.next_event_of("opened");
    let by_kind = |event: Value| {
        let kind = event["type"].as_str().unwrap().to_owned();
        (kind, event["request"].clone())
    };
    let all: BTreeMap<String, Value> = (0..TYPES).map(|_| by_kind(peer.next_event())).collect();
    assert_eq!(all.len(), TYPES, "{all:?}");
    all
}

/// The ACKs and NACKs of `count` responses, by nonce: none, or the error.
pub(crate) fn replies(peer: &XdsPeer, count: usize) -> BTreeMap<u32, Option<String>> {
    let mut replies = BTreeMap::new();
    while replies.len() < count {
        let request = peer.next_event_of("request");
        let nonce = request["response_nonce"].as_str().unwrap_or_else(|| panic!("neither ACK nor NACK: {request}"));
        let error = request["error_detail"]["message"].as_str().map(str::to_owned);
        assert!(replies.insert(nonce.parse().unwrap(), error).is_none(), "duplicate ACK or NACK: {request}");
    }
    replies
}

/// Asserts that all of these responses are ACKed.
pub(crate) fn accepted(peer: &XdsPeer, nonces: std::ops::RangeInclusive<u32>) {
    let expected: BTreeMap<u32, Option<String>> = nonces.map(|nonce| (nonce, None)).collect();
    assert_eq!(replies(peer, expected.len()), expected);
}

/// Sends the policy of tenants A and B in four responses, numbered from this nonce.
pub(crate) fn send_all(peer: &mut XdsPeer, nonce: u32) {
    send(peer, nonce, "EgressPolicy", &[policy(POLICY)], &[]);
    let [a4, a6, b4] = [VIP_A[0], VIP_A[1], VIP_B[0]];
    send(peer, nonce + 1, "Vip", &[vip(a4), vip(a6), vip(b4)], &[]);
    let endpoints = [("10.1.0.11", a4), ("fd00:1::11", a6), ("fd00:1::12", a6), ("10.1.0.21", b4)];
    send(peer, nonce + 2, "Endpoint", &endpoints.map(|(address, vip)| endpoint(address, vip)), &[]);
    send(peer, nonce + 3, "Settings", &[settings("v1", ALL)], &[]);
}

/// Counts of [`send_all`].
pub(crate) const ALL: [u64; 3] = [1, 3, 4];

/// Source address of a pod at the server.
pub(crate) fn observed_source(testbed: &Testbed, pod: usize) -> String {
    let observed = query_udp(&testbed.pods[pod], SERVER[0].parse().unwrap());
    observed.unwrap_or_else(|error| panic!("pod {pod}: {error}: {} {}", testbed.log(), testbed.http_get("/metrics").1))
}

/// A gateway that has applied the policy of [`send_all`].
pub(crate) fn start_converged(tag: &str) -> (Testbed, XdsPeer) {
    let mut testbed = Testbed::new(tag);
    let mut peer = XdsPeer::server(&testbed, &testbed.gateway, ADDRESS);
    let extra = server_config(&testbed);
    testbed.spawn_gateway(&extra);
    subscriptions(&peer);
    send_all(&mut peer, 1);
    accepted(&peer, 1..=4);
    (testbed, peer)
}

#[test]
fn a_gateway_applies_updates_in_order() {
    let mut testbed = Testbed::new("deltas");
    let mut peer = XdsPeer::server(&testbed, &testbed.gateway, ADDRESS);
    let extra = server_config(&testbed);
    testbed.spawn_gateway(&extra);
    let requests = subscriptions(&peer);
    for (kind, request) in &requests {
        let node = &request["node"];
        assert!(node["id"] == "gw-test" && node["user_agent_name"] == "vipgate", "{kind}: {node}");
        assert_eq!(node["locality"]["zone"], "zone-7");
        assert_eq!(request["type_url"], format!("{TYPE_URL_PREFIX}{kind}"));
        assert!(request.get("initial_resource_versions").is_none(), "it has no resources: {request}");
        assert!(request.get("resource_names_subscribe").is_none(), "it subscribes to all: {request}");
    }
    assert!(!testbed.is_ready());

    // Without settings: applied and ACKed after a pause.
    send(&mut peer, 1, "EgressPolicy", &[policy(POLICY)], &[]);
    send(&mut peer, 2, "Vip", &[vip(VIP_A[0]), vip(VIP_B[0])], &[]);
    send(&mut peer, 3, "Endpoint", &[endpoint("10.1.0.11", VIP_A[0])], &[]);
    send(&mut peer, 4, "Gateway", &[], &[]);
    send(&mut peer, 0, "Service", &[], &[]);
    accepted(&peer, 0..=4);
    assert_eq!([observed_source(&testbed, 0), observed_source(&testbed, 2)], [VIP_A[0], "10.1.0.21"]);
    assert!(wait_for(Duration::from_secs(5), || testbed.is_ready()));
    send(&mut peer, 50, "Endpoint", &[endpoint("10.1.0.12", VIP_A[0])], &[]);
    accepted(&peer, 50..=50);
    assert_eq!(observed_source(&testbed, 1), VIP_A[0]);

    // With settings: applied with them, at once.
    send(&mut peer, 5, "Endpoint", &[endpoint("10.1.0.21", VIP_B[0])], &["10.1.0.12"]);
    peer.assert_silent(Duration::from_millis(500));
    assert_eq!(
        [observed_source(&testbed, 1), observed_source(&testbed, 2)],
        [VIP_A[0], "10.1.0.21"],
        "the update is incomplete"
    );
    send(&mut peer, 6, "Settings", &[settings("with settings", [1, 2, 2])], &[]);
    accepted(&peer, 5..=6);
    assert_eq!([observed_source(&testbed, 1), observed_source(&testbed, 2)], ["10.1.0.12", VIP_B[0]]);
    assert_eq!(testbed.query(&["status"])["policy"]["version"], "with settings");

    // On a new stream the gateway sends its versions.
    peer.send_command(&json!({"end": true}));
    let again = subscriptions(&peer);
    let known = |kind: &str| again[kind]["initial_resource_versions"].clone();
    assert_eq!(known("Endpoint"), json!({"10.1.0.11": "1", "10.1.0.21": "1"}));
    assert_eq!(known("Vip"), json!({VIP_A[0]: "1", VIP_B[0]: "1"}));
    assert_eq!(known("EgressPolicy"), json!({POLICY: "1"}));
    assert_eq!(known("Settings"), json!({"settings": "with settings"}));
    assert_eq!(known("Gateway"), Value::Null);
    send(&mut peer, 7, "Settings", &[settings("with settings", [1, 2, 2])], &[]);
    accepted(&peer, 7..=7);
    assert_eq!(observed_source(&testbed, 0), VIP_A[0]);

    // Everything is removed.
    send(&mut peer, 8, "Endpoint", &[], &["10.1.0.11", "10.1.0.21"]);
    send(&mut peer, 9, "Vip", &[], &[VIP_A[0], VIP_B[0]]);
    send(&mut peer, 10, "EgressPolicy", &[], &[POLICY]);
    send(&mut peer, 11, "Settings", &[settings("nothing", [0, 0, 0])], &[]);
    accepted(&peer, 8..=11);
    assert_eq!(observed_source(&testbed, 0), "10.1.0.11");
    assert_eq!(testbed.query(&["endpoints"])["endpoints"], json!([]));
    testbed.check_frames();
}

#[test]
fn a_reused_pod_address_does_not_inherit_sessions() {
    let (testbed, mut peer) = start_converged("reuse");
    let socket = |host: &Host, address: &'static str| {
        let bound = host.run(move || {
            let socket = UdpSocket::bind(address)?;
            socket.set_read_timeout(Some(Duration::from_secs(2)))?;
            Ok(socket)
        });
        bound.join().unwrap().unwrap()
    };
    let receive = |socket: &UdpSocket| {
        let mut text = [0; 64];
        socket.recv_from(&mut text).map(|(length, from)| (String::from_utf8_lossy(&text[..length]).into_owned(), from))
    };
    let (server, server_address) =
        (socket(&testbed.server, "198.51.100.10:9999"), SocketAddr::from(([198, 51, 100, 10], 9999)));
    let old = socket(&testbed.pods[2], "10.1.0.21:40000");
    old.send_to(b"old", server_address).unwrap();
    let (_, old_at) = receive(&server).unwrap();
    assert_eq!(old_at.ip().to_string(), VIP_B[0]);
    server.send_to(b"answer", old_at).unwrap();
    assert_eq!(receive(&old).unwrap().0, "answer");
    drop(old);

    // The pod is removed, and an uncovered pod gets its address and uses the same port.
    send(&mut peer, 5, "Endpoint", &[], &["10.1.0.21"]);
    send(&mut peer, 6, "Settings", &[settings("v2", [1, 3, 3])], &[]);
    accepted(&peer, 5..=6);
    testbed.pods[2].ip(&["address", "del", "10.1.0.21/24", "dev", "eth0"]).unwrap();
    testbed.pods[3].addresses("eth0", &["10.1.0.21/24"]).unwrap();
    testbed.gateway.ip(&["neigh", "flush", "dev", "gw-in"]).unwrap();
    let new = socket(&testbed.pods[3], "10.1.0.21:40000");
    new.send_to(b"new", server_address).unwrap();
    let (_, new_at) = receive(&server).unwrap();
    assert_eq!(new_at.to_string(), "10.1.0.21:40000", "not translated");
    server.send_to(b"answer", new_at).unwrap();
    assert_eq!(receive(&new).unwrap().0, "answer");
    // Late packets to the old pod are dropped, and its session ends with it.
    testbed.accounting.expect_exactly([("no_service", 1)]);
    server.send_to(b"late", old_at).unwrap();
    assert!(receive(&new).is_err(), "a reply to the old pod has reached the new one");
    let sessions = testbed.query(&["sessions", "--endpoint", "10.1.0.21"])["sessions"].as_array().unwrap().clone();
    assert!(sessions.iter().all(|session| session["state"] == "quarantined"), "{sessions:?}");
    testbed.check_frames();
}

#[test]
fn an_incomplete_update_is_never_applied() {
    let (testbed, mut peer) = start_converged("broken");
    let traffic = Traffic::start(&testbed);
    // The stream ends in the middle: p4 was added, p3 was removed, and no settings follow.
    send(&mut peer, 5, "Endpoint", &[endpoint("10.1.0.31", VIP_B[0])], &["10.1.0.21"]);
    peer.send_command(&json!({"end": true}));
    let again = subscriptions(&peer);
    let known = again["Endpoint"]["initial_resource_versions"].as_object().unwrap();
    assert!(known.contains_key("10.1.0.21") && !known.contains_key("10.1.0.31"), "{known:?}");
    assert_eq!(observed_source(&testbed, 3), "10.1.0.31");
    // The server pauses in the middle, for longer than a few retransmissions take, and continues.
    send(&mut peer, 6, "Endpoint", &[endpoint("10.1.0.31", VIP_B[0])], &[]);
    peer.assert_silent(Duration::from_millis(2500));
    assert_eq!(observed_source(&testbed, 3), "10.1.0.31", "the update is incomplete");
    send(&mut peer, 7, "Settings", &[settings("v2", [1, 3, 5])], &[]);
    accepted(&peer, 6..=7);
    assert_eq!(observed_source(&testbed, 3), VIP_B[0]);
    traffic.end();
    assert_eq!(testbed.query(&["status"])["policy"]["updates_rejected"], 0);
}
