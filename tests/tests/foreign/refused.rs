//! What no gateway can put in force: refused by name, and nothing changes.

use std::time::Duration;

use serde_json::{Value, json};
use vipgate_tests::foreign::Peer;
use vipgate_tests::traffic::Traffic;
use vipgate_tests::{SERVER, VIP_A, VIP_B, World, wait_for};

use crate::server::{
    ALL, POLICY, accepted, answers, endpoint, follow, policy, send, settings, settled, subscriptions, vip,
};

const ADDRESS: &str = "127.0.0.1:18000";

/// A resource of a kind that can't be, and what the refusal must say.
type Case = (&'static str, Value, [&'static str; 2]);

/// An endpoint's address, and a name that isn't UTF-8.
const NO_TEXT: &str = "0a0931302e312e302e37371202fffe";

fn cases() -> Vec<Case> {
    let of_nobody = json!({"address": "10.1.0.77", "policy": "EgressPolicy no/body", "vips": [VIP_A[0]]});
    let of_tomorrow = json!({"address": "203.0.113.99", "announce": 7});
    vec![
        ("Endpoint", endpoint(VIP_B[0], VIP_A[0]), ["Endpoint 203.0.113.20", "both an endpoint and a VIP"]),
        ("Vip", vip("10.1.0.11"), ["10.1.0.11", "both an endpoint and a VIP"]),
        ("Vip", vip("203.0.113.1"), ["Vip 203.0.113.1", "this gateway's own kernel"]),
        ("Vip", vip("0.0.0.0"), ["Vip 0.0.0.0", "address: 0.0.0.0 is"]),
        ("Vip", json!({"name": "203.0.113.99", "body": of_tomorrow}), ["Vip 203.0.113.99", "announce: 7 is unknown"]),
        ("Vip", json!({"name": "203.0.113.99", "hex": "ffff"}), ["Vip 203.0.113.99", "is no Vip"]),
        ("Endpoint", json!({"name": "10.1.0.77", "hex": NO_TEXT}), ["Endpoint 10.1.0.77", "is no Endpoint"]),
        ("Endpoint", json!({"name": "10.1.0.77", "body": of_nobody}), ["Endpoint 10.1.0.77", "EgressPolicy no/body"]),
        ("EgressPolicy", policy(""), ["EgressPolicy", "is empty"]),
    ]
}

/// Whether a refusal says all of this.
fn says(refusal: Option<&String>, words: [&str; 2]) -> bool {
    refusal.is_some_and(|refusal| words.iter().all(|word| refusal.contains(word)))
}

#[test]
fn what_is_wrong_is_refused_by_name_and_nothing_changes() {
    let (world, mut peer) = settled("nack");
    let traffic = Traffic::start(&world);
    let in_force = || {
        let names = |kind: &str| -> Vec<Value> {
            world.ask(&[kind])[kind].as_array().unwrap().iter().map(|it| it["address"].clone()).collect()
        };
        (names("endpoints"), names("vips"), world.ask(&["status"])["policy"]["version"].clone())
    };
    let before = in_force();
    // Each of these, and what is too large.
    world.ledger.expect_exactly([("policy_rejected", cases().len() as u64 + 1)]);
    let mut nonce = 4;
    for (number, (kind, resource, words)) in (1..).zip(cases()) {
        let mut counts = ALL;
        counts[["EgressPolicy", "Vip", "Endpoint"].iter().position(|known| *known == kind).unwrap()] += 1;
        send(&mut peer, nonce + 1, kind, &[resource], &[]);
        send(&mut peer, nonce + 2, "Settings", &[settings("bad", counts)], &[]);
        let answers = answers(&peer, 2);
        assert!(says(answers[&(nonce + 1)].as_ref(), words), "{words:?}: {answers:?}");
        assert!(answers[&(nonce + 2)].is_some(), "the whole update is refused: {answers:?}");
        nonce += 2;
        let policy = &world.ask(&["status"])["policy"];
        let error = policy["last_error"].as_str().unwrap().to_owned();
        assert!(policy["updates_rejected"] == number && says(Some(&error), words), "{policy}");
        assert_eq!(in_force(), before, "{words:?}");
    }
    assert!(world.log().contains("policy_rejected"), "{}", world.log());

    // More than a gateway takes: the stream ends, and after a pause the next one begins with what is in force.
    peer.tell(&json!({"send": {"type": "Vip", "nonce": "1000", "resources": [
        {"name_bytes": 68_000_000, "body": {"address": "203.0.113.99"}}]}}));
    peer.next_of("closed");
    let again = subscriptions(&peer);
    assert_eq!(again["Endpoint"]["initial_resource_versions"].as_object().unwrap().len(), 4);
    let error = world.ask(&["status"])["policy"]["last_error"].clone();
    assert!(error.as_str().unwrap().contains("too large"), "{error}");
    assert_eq!(in_force(), before);

    // What is good after all that is taken.
    send(&mut peer, 2001, "Endpoint", &[endpoint("10.1.0.31", VIP_B[0])], &[]);
    send(&mut peer, 2002, "Settings", &[settings("good", [1, 3, 5])], &[]);
    accepted(&peer, 2001..=2002);
    assert_eq!(world.ask(&["status"])["policy"]["last_error"], "");
    traffic.end();
    world.check_frames();
}

#[test]
fn a_first_policy_is_no_exception() {
    let mut world = World::new("first");
    let mut peer = Peer::server(&world, &world.gateway, ADDRESS);
    let more = follow(&world);
    world.launch(&more);
    subscriptions(&peer);
    world.ledger.expect_exactly([("policy_rejected", 1)]);
    send(&mut peer, 1, "Vip", &[vip("203.0.113.1")], &[]);
    send(&mut peer, 2, "Settings", &[settings("own", [0, 1, 0])], &[]);
    let refused = answers(&peer, 2);
    assert!(says(refused[&1].as_ref(), ["Vip 203.0.113.1", "this gateway's own kernel"]), "{refused:?}");
    assert_eq!(world.answer("/readyz"), 503);
    let status = world.ask(&["status"]);
    assert!(status["policy"]["updates_rejected"] == 1 && status["policy"]["server"]["has_policy"] == false, "{status}");

    // A pause in the middle opens nothing: who else is covered, nobody knows yet.
    send(&mut peer, 3, "EgressPolicy", &[policy(POLICY)], &[]);
    send(&mut peer, 4, "Vip", &[vip(VIP_A[0]), vip(VIP_A[1])], &[]);
    send(&mut peer, 5, "Endpoint", &[endpoint("fd00:1::11", VIP_A[1])], &[]);
    peer.is_silent(Duration::from_millis(2500));
    assert_eq!(world.answer("/readyz"), 503);
    send(&mut peer, 6, "Endpoint", &[endpoint("10.1.0.11", VIP_A[0])], &[]);
    send(&mut peer, 7, "Gateway", &[], &[]);
    send(&mut peer, 8, "Settings", &[settings("first", [1, 2, 2])], &[]);
    accepted(&peer, 3..=8);
    assert!(wait_for(Duration::from_secs(5), || world.is_ready()), "{}", world.log());
    world.check_identity(&world.pods[0], SERVER, VIP_A);
}
