//! Invalid resources: NACKed by name, without any effect.

use std::time::Duration;

use serde_json::{Value, json};
use vipgate_tests::traffic::Traffic;
use vipgate_tests::xds_peer::XdsPeer;
use vipgate_tests::{SERVER, Testbed, VIP_A, VIP_B, wait_for};

use crate::server::{
    ALL, POLICY, accepted, endpoint, policy, replies, send, server_config, settings, start_converged, subscriptions,
    vip,
};

const ADDRESS: &str = "127.0.0.1:18000";

/// Type and content of an invalid resource, and the words of its rejection.
type Case = (&'static str, Value, [&'static str; 2]);

/// An Endpoint message whose name is invalid UTF-8.
const INVALID_UTF8: &str = "0a0931302e312e302e37371202fffe";

fn cases() -> Vec<Case> {
    let unknown_policy = json!({"address": "10.1.0.77", "policy": "EgressPolicy no/body", "vips": [VIP_A[0]]});
    let unknown_announce = json!({"address": "203.0.113.99", "announce": 7});
    vec![
        ("Endpoint", endpoint(VIP_B[0], VIP_A[0]), ["Endpoint 203.0.113.20", "both an endpoint and a VIP"]),
        ("Vip", vip("10.1.0.11"), ["10.1.0.11", "both an endpoint and a VIP"]),
        ("Vip", vip("203.0.113.1"), ["Vip 203.0.113.1", "is a local address of this gateway"]),
        ("Vip", vip("0.0.0.0"), ["Vip 0.0.0.0", "address: 0.0.0.0 is"]),
        (
            "Vip",
            json!({"name": "203.0.113.99", "body": unknown_announce}),
            ["Vip 203.0.113.99", "announce: 7 is unknown"],
        ),
        ("Vip", json!({"name": "203.0.113.99", "hex": "ffff"}), ["Vip 203.0.113.99", "is not a valid Vip"]),
        (
            "Endpoint",
            json!({"name": "10.1.0.77", "hex": INVALID_UTF8}),
            ["Endpoint 10.1.0.77", "is not a valid Endpoint"],
        ),
        (
            "Endpoint",
            json!({"name": "10.1.0.77", "body": unknown_policy}),
            ["Endpoint 10.1.0.77", "EgressPolicy no/body"],
        ),
        ("EgressPolicy", policy(""), ["EgressPolicy", "is empty"]),
    ]
}

/// Whether an error contains all of these words.
fn contains_all(error: Option<&String>, words: [&str; 2]) -> bool {
    error.is_some_and(|error| words.iter().all(|word| error.contains(word)))
}

#[test]
fn invalid_resources_are_nacked_by_name_and_nothing_changes() {
    let (testbed, mut peer) = start_converged("nack");
    let traffic = Traffic::start(&testbed);
    let in_force = || {
        let names = |kind: &str| -> Vec<Value> {
            testbed.query(&[kind])[kind].as_array().unwrap().iter().map(|it| it["address"].clone()).collect()
        };
        (names("endpoints"), names("vips"), testbed.query(&["status"])["policy"]["version"].clone())
    };
    let before = in_force();
    // Each of the cases, and the oversized message.
    testbed.accounting.expect_exactly([("policy_rejected", cases().len() as u64 + 1)]);
    let mut nonce = 4;
    for (number, (kind, resource, words)) in (1..).zip(cases()) {
        let mut counts = ALL;
        counts[["EgressPolicy", "Vip", "Endpoint"].iter().position(|known| *known == kind).unwrap()] += 1;
        send(&mut peer, nonce + 1, kind, &[resource], &[]);
        send(&mut peer, nonce + 2, "Settings", &[settings("bad", counts)], &[]);
        let replies = replies(&peer, 2);
        assert!(contains_all(replies[&(nonce + 1)].as_ref(), words), "{words:?}: {replies:?}");
        assert!(replies[&(nonce + 2)].is_some(), "the whole update is rejected: {replies:?}");
        nonce += 2;
        let policy = &testbed.query(&["status"])["policy"];
        let error = policy["last_error"].as_str().unwrap().to_owned();
        assert!(policy["updates_rejected"] == number && contains_all(Some(&error), words), "{policy}");
        assert_eq!(in_force(), before, "{words:?}");
    }
    assert!(testbed.log().contains("policy_rejected"), "{}", testbed.log());

    // An oversized message: the gateway closes the stream, and reconnects after a pause with its current versions.
    peer.send_command(&json!({"send": {"type": "Vip", "nonce": "1000", "resources": [
        {"name_bytes": 68_000_000, "body": {"address": "203.0.113.99"}}]}}));
    peer.next_event_of("closed");
    let again = subscriptions(&peer);
    assert_eq!(again["Endpoint"]["initial_resource_versions"].as_object().unwrap().len(), 4);
    let error = testbed.query(&["status"])["policy"]["last_error"].clone();
    assert!(error.as_str().unwrap().contains("too large"), "{error}");
    assert_eq!(in_force(), before);

    // A valid update is accepted afterwards.
    send(&mut peer, 2001, "Endpoint", &[endpoint("10.1.0.31", VIP_B[0])], &[]);
    send(&mut peer, 2002, "Settings", &[settings("good", [1, 3, 5])], &[]);
    accepted(&peer, 2001..=2002);
    assert_eq!(testbed.query(&["status"])["policy"]["last_error"], "");
    traffic.end();
    testbed.check_frames();
}

#[test]
fn an_invalid_first_policy_is_nacked() {
    let mut testbed = Testbed::new("first");
    let mut peer = XdsPeer::server(&testbed, &testbed.gateway, ADDRESS);
    let extra = server_config(&testbed);
    testbed.spawn_gateway(&extra);
    subscriptions(&peer);
    testbed.accounting.expect_exactly([("policy_rejected", 1)]);
    send(&mut peer, 1, "Vip", &[vip("203.0.113.1")], &[]);
    send(&mut peer, 2, "Settings", &[settings("own", [0, 1, 0])], &[]);
    let rejected = replies(&peer, 2);
    assert!(
        contains_all(rejected[&1].as_ref(), ["Vip 203.0.113.1", "is a local address of this gateway"]),
        "{rejected:?}"
    );
    assert_eq!(testbed.http_status("/readyz"), 503);
    let status = testbed.query(&["status"]);
    assert!(status["policy"]["updates_rejected"] == 1 && status["policy"]["server"]["has_policy"] == false, "{status}");

    // An incomplete update isn't applied: further endpoints may follow.
    send(&mut peer, 3, "EgressPolicy", &[policy(POLICY)], &[]);
    send(&mut peer, 4, "Vip", &[vip(VIP_A[0]), vip(VIP_A[1])], &[]);
    send(&mut peer, 5, "Endpoint", &[endpoint("fd00:1::11", VIP_A[1])], &[]);
    peer.assert_silent(Duration::from_millis(2500));
    assert_eq!(testbed.http_status("/readyz"), 503);
    send(&mut peer, 6, "Endpoint", &[endpoint("10.1.0.11", VIP_A[0])], &[]);
    send(&mut peer, 7, "Gateway", &[], &[]);
    send(&mut peer, 8, "Settings", &[settings("first", [1, 2, 2])], &[]);
    accepted(&peer, 3..=8);
    assert!(wait_for(Duration::from_secs(5), || testbed.is_ready()), "{}", testbed.log());
    testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
}
