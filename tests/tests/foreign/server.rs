//! A server of other people's making, and a gateway that follows it.

use std::collections::BTreeMap;
use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

use serde_json::{Value, json};
use vipgate::lab::Host;
use vipgate::lab::peers::ask_udp;
use vipgate_tests::foreign::{Peer, TYPE};
use vipgate_tests::traffic::Traffic;
use vipgate_tests::{SERVER, VIP_A, VIP_B, World, wait_for};

const ADDRESS: &str = "127.0.0.1:18000";
/// The policy that endpoints name.
pub(crate) const POLICY: &str = "EgressPolicy test/all";

/// The gateway's configuration.
pub(crate) fn follow(world: &World) -> String {
    let cache = world.folder.path().join("policy.cache").display().to_string();
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

/// Settings that count policies, VIPs and endpoints.
pub(crate) fn settings(version: &str, counts: [u64; 3]) -> Value {
    let [policies, vips, endpoints] = counts;
    let body = json!({"version": version, "egress_policies": policies, "vips": vips, "endpoints": endpoints});
    json!({"name": "settings", "version": version, "body": body})
}

/// Sends a response whose nonce is its number.
pub(crate) fn send(peer: &mut Peer, nonce: u32, kind: &str, resources: &[Value], removed: &[&str]) {
    let response = json!({"type": kind, "nonce": nonce.to_string(), "resources": resources, "removed": removed});
    peer.tell(&json!({"send": response}));
}

/// Takes in the subscriptions of a stream, by kind.
pub(crate) fn subscriptions(peer: &Peer) -> BTreeMap<String, Value> {
    peer.next_of("opened");
    let of = |event: Value| {
        let kind = event["type"].as_str().unwrap().to_owned();
        (kind, event["request"].clone())
    };
    let all: BTreeMap<String, Value> = (0..8).map(|_| of(peer.next())).collect();
    assert_eq!(all.len(), 8, "{all:?}");
    all
}

/// The answers to so many responses, by nonce: nothing, or what is wrong.
pub(crate) fn answers(peer: &Peer, count: usize) -> BTreeMap<u32, Option<String>> {
    let mut answers = BTreeMap::new();
    while answers.len() < count {
        let request = peer.next_of("request");
        let nonce = request["response_nonce"].as_str().unwrap_or_else(|| panic!("no answer: {request}"));
        let error = request["error_detail"]["message"].as_str().map(str::to_owned);
        assert!(answers.insert(nonce.parse().unwrap(), error).is_none(), "answered twice: {request}");
    }
    answers
}

/// All of these responses are acknowledged.
pub(crate) fn accepted(peer: &Peer, nonces: std::ops::RangeInclusive<u32>) {
    let expected: BTreeMap<u32, Option<String>> = nonces.map(|nonce| (nonce, None)).collect();
    assert_eq!(answers(peer, expected.len()), expected);
}

/// What tenants A and B need, in four responses, the first of which has this nonce.
pub(crate) fn send_all(peer: &mut Peer, nonce: u32) {
    send(peer, nonce, "EgressPolicy", &[policy(POLICY)], &[]);
    let [a4, a6, b4] = [VIP_A[0], VIP_A[1], VIP_B[0]];
    send(peer, nonce + 1, "Vip", &[vip(a4), vip(a6), vip(b4)], &[]);
    let endpoints = [("10.1.0.11", a4), ("fd00:1::11", a6), ("fd00:1::12", a6), ("10.1.0.21", b4)];
    send(peer, nonce + 2, "Endpoint", &endpoints.map(|(address, vip)| endpoint(address, vip)), &[]);
    send(peer, nonce + 3, "Settings", &[settings("v1", ALL)], &[]);
}

/// What that is.
pub(crate) const ALL: [u64; 3] = [1, 3, 4];

/// What a pod is seen as.
pub(crate) fn seen(world: &World, pod: usize) -> String {
    ask_udp(&world.pods[pod], SERVER[0].parse().unwrap()).unwrap()
}

/// A gateway that has heard everything and put it in force.
pub(crate) fn settled(tag: &str) -> (World, Peer) {
    let mut world = World::new(tag);
    let mut peer = Peer::server(&world, &world.gateway, ADDRESS);
    let more = follow(&world);
    world.launch(&more);
    subscriptions(&peer);
    send_all(&mut peer, 1);
    accepted(&peer, 1..=4);
    (world, peer)
}

#[test]
fn a_gateway_follows_it_update_by_update() {
    let mut world = World::new("follow");
    let mut peer = Peer::server(&world, &world.gateway, ADDRESS);
    let more = follow(&world);
    world.launch(&more);
    let asked = subscriptions(&peer);
    for (kind, request) in &asked {
        let node = &request["node"];
        assert!(node["id"] == "gw-test" && node["user_agent_name"] == "vipgate", "{kind}: {node}");
        assert_eq!(node["locality"]["zone"], "zone-7");
        assert_eq!(request["type_url"], format!("{TYPE}{kind}"));
        assert!(request.get("initial_resource_versions").is_none(), "it has nothing: {request}");
        assert!(request.get("resource_names_subscribe").is_none(), "it wants all: {request}");
    }
    assert!(!world.is_ready());

    // Without settings: in force when nothing more comes, and acknowledged then.
    send(&mut peer, 1, "EgressPolicy", &[policy(POLICY)], &[]);
    send(&mut peer, 2, "Vip", &[vip(VIP_A[0]), vip(VIP_B[0])], &[]);
    send(&mut peer, 3, "Endpoint", &[endpoint("10.1.0.11", VIP_A[0])], &[]);
    send(&mut peer, 4, "Gateway", &[], &[]);
    send(&mut peer, 0, "Service", &[], &[]);
    accepted(&peer, 0..=4);
    assert_eq!([seen(&world, 0), seen(&world, 2)], [VIP_A[0], "10.1.0.21"]);
    assert!(wait_for(Duration::from_secs(5), || world.is_ready()));
    send(&mut peer, 50, "Endpoint", &[endpoint("10.1.0.12", VIP_A[0])], &[]);
    accepted(&peer, 50..=50);
    assert_eq!(seen(&world, 1), VIP_A[0]);

    // With settings: in force with them, all at once.
    send(&mut peer, 5, "Endpoint", &[endpoint("10.1.0.21", VIP_B[0])], &["10.1.0.12"]);
    peer.is_silent(Duration::from_millis(500));
    assert_eq!([seen(&world, 1), seen(&world, 2)], [VIP_A[0], "10.1.0.21"], "it isn't whole");
    send(&mut peer, 6, "Settings", &[settings("with settings", [1, 2, 2])], &[]);
    accepted(&peer, 5..=6);
    assert_eq!([seen(&world, 1), seen(&world, 2)], ["10.1.0.12", VIP_B[0]]);
    assert_eq!(world.ask(&["status"])["policy"]["version"], "with settings");

    // On a new stream it says what it has.
    peer.tell(&json!({"end": true}));
    let again = subscriptions(&peer);
    let known = |kind: &str| again[kind]["initial_resource_versions"].clone();
    assert_eq!(known("Endpoint"), json!({"10.1.0.11": "1", "10.1.0.21": "1"}));
    assert_eq!(known("Vip"), json!({VIP_A[0]: "1", VIP_B[0]: "1"}));
    assert_eq!(known("EgressPolicy"), json!({POLICY: "1"}));
    assert_eq!(known("Settings"), json!({"settings": "with settings"}));
    assert_eq!(known("Gateway"), Value::Null);
    send(&mut peer, 7, "Settings", &[settings("with settings", [1, 2, 2])], &[]);
    accepted(&peer, 7..=7);
    assert_eq!(seen(&world, 0), VIP_A[0]);

    // All is taken away.
    send(&mut peer, 8, "Endpoint", &[], &["10.1.0.11", "10.1.0.21"]);
    send(&mut peer, 9, "Vip", &[], &[VIP_A[0], VIP_B[0]]);
    send(&mut peer, 10, "EgressPolicy", &[], &[POLICY]);
    send(&mut peer, 11, "Settings", &[settings("nothing", [0, 0, 0])], &[]);
    accepted(&peer, 8..=11);
    assert_eq!(seen(&world, 0), "10.1.0.11");
    assert_eq!(world.ask(&["endpoints"])["endpoints"], json!([]));
    world.check_frames();
}

#[test]
fn an_address_that_another_pod_gets_has_no_part_in_old_sessions() {
    let (world, mut peer) = settled("reuse");
    let socket = |host: &Host, address: &'static str| {
        let bound = host.run(move || {
            let socket = UdpSocket::bind(address)?;
            socket.set_read_timeout(Some(Duration::from_secs(2)))?;
            Ok(socket)
        });
        bound.join().unwrap().unwrap()
    };
    let hear = |socket: &UdpSocket| {
        let mut text = [0; 64];
        socket.recv_from(&mut text).map(|(length, from)| (String::from_utf8_lossy(&text[..length]).into_owned(), from))
    };
    let (far, far_at) = (socket(&world.server, "198.51.100.10:9999"), SocketAddr::from(([198, 51, 100, 10], 9999)));
    let old = socket(&world.pods[2], "10.1.0.21:40000");
    old.send_to(b"old", far_at).unwrap();
    let (_, old_at) = hear(&far).unwrap();
    assert_eq!(old_at.ip().to_string(), VIP_B[0]);
    far.send_to(b"answer", old_at).unwrap();
    assert_eq!(hear(&old).unwrap().0, "answer");
    drop(old);

    // The pod is gone, and one that nobody covers gets its address, and uses the same port.
    send(&mut peer, 5, "Endpoint", &[], &["10.1.0.21"]);
    send(&mut peer, 6, "Settings", &[settings("v2", [1, 3, 3])], &[]);
    accepted(&peer, 5..=6);
    world.pods[2].ip(&["address", "del", "10.1.0.21/24", "dev", "eth0"]).unwrap();
    world.pods[3].addresses("eth0", &["10.1.0.21/24"]).unwrap();
    world.gateway.ip(&["neigh", "flush", "dev", "gw-in"]).unwrap();
    let new = socket(&world.pods[3], "10.1.0.21:40000");
    new.send_to(b"new", far_at).unwrap();
    let (_, new_at) = hear(&far).unwrap();
    assert_eq!(new_at.to_string(), "10.1.0.21:40000", "not translated");
    far.send_to(b"answer", new_at).unwrap();
    assert_eq!(hear(&new).unwrap().0, "answer");
    // What still comes for the old pod reaches nobody, and its session ends with it.
    world.ledger.expect_exactly([("no_service", 1)]);
    far.send_to(b"late", old_at).unwrap();
    assert!(hear(&new).is_err(), "an answer to the old pod has reached the new one");
    let sessions = world.ask(&["sessions", "--endpoint", "10.1.0.21"])["sessions"].as_array().unwrap().clone();
    assert!(sessions.iter().all(|session| session["state"] == "quarantined"), "{sessions:?}");
    world.check_frames();
}

#[test]
fn an_update_that_never_ends_never_takes_effect() {
    let (world, mut peer) = settled("broken");
    let traffic = Traffic::start(&world);
    // The stream ends in the middle: p4 was told, p3 was taken away, and then nothing.
    send(&mut peer, 5, "Endpoint", &[endpoint("10.1.0.31", VIP_B[0])], &["10.1.0.21"]);
    peer.tell(&json!({"end": true}));
    let again = subscriptions(&peer);
    let known = again["Endpoint"]["initial_resource_versions"].as_object().unwrap();
    assert!(known.contains_key("10.1.0.21") && !known.contains_key("10.1.0.31"), "{known:?}");
    assert_eq!(seen(&world, 3), "10.1.0.31");
    // The server stops in the middle for longer than it may take the network to lose a packet or two, and goes on.
    send(&mut peer, 6, "Endpoint", &[endpoint("10.1.0.31", VIP_B[0])], &[]);
    peer.is_silent(Duration::from_millis(2500));
    assert_eq!(seen(&world, 3), "10.1.0.31", "it isn't whole");
    send(&mut peer, 7, "Settings", &[settings("v2", [1, 3, 5])], &[]);
    accepted(&peer, 6..=7);
    assert_eq!(seen(&world, 3), VIP_B[0]);
    traffic.end();
    assert_eq!(world.ask(&["status"])["policy"]["updates_rejected"], 0);
}
