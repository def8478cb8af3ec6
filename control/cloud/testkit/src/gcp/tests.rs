//! What the fake rejects.

use serde_json::{Value, json};

use super::FakeGcp;
use crate::request::RecordedRequest;
use crate::server::FakeCloud;

fn fake() -> FakeGcp {
    let mut fake = FakeGcp::new("p1", "r1");
    fake.tokens.is_required = false;
    fake.add_instance("r1-b", "gw", "10.0.0.1");
    fake.add_address("vip", "203.0.113.1", &[]);
    fake
}

fn request(method: &str, path: &str, query: &[(&str, &str)], body: &Value) -> RecordedRequest {
    RecordedRequest {
        method: method.to_owned(),
        path: format!("/compute/v1/projects/p1/{path}"),
        query: query.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
        headers: vec![("content-type".to_owned(), "application/json".to_owned())],
        body: if body.is_null() { Vec::new() } else { body.to_string().into_bytes() },
    }
}

/// Status and reason of the reply.
fn send(fake: &mut FakeGcp, request: &RecordedRequest) -> (u16, String) {
    let reply = fake.handle(request);
    let body: Value = serde_json::from_slice(&reply.body).expect("JSON");
    (reply.status, body["error"]["errors"][0]["reason"].as_str().unwrap_or_default().to_owned())
}

#[test]
fn what_the_api_rejects_is_rejected() {
    const ADD: &str = "zones/r1-b/instances/gw/addAccessConfig";
    const LABELS: &str = "regions/r1/addresses/vip/setLabels";
    const INSERT: &str = "regions/r1/addresses";
    let nic = [("networkInterface", "nic0")];
    let config = json!({ "type": "ONE_TO_ONE_NAT", "natIP": "203.0.113.1" });
    let with = |field: &str, value: Value| {
        let mut config = config.clone();
        config[field] = value;
        config
    };
    for (path, query, body, expected) in [
        (ADD, vec![("nic", "nic0")], config.clone(), (400, "badRequest")),
        (ADD, vec![], config.clone(), (400, "required")),
        (ADD, vec![("networkInterface", "nic7")], config.clone(), (400, "invalid")),
        (ADD, vec![nic[0], nic[0]], config.clone(), (400, "badRequest")),
        (ADD, vec![nic[0], ("requestId", "1")], config.clone(), (400, "invalid")),
        (ADD, vec![nic[0], ("requestId", "00000000-0000-0000-0000-000000000000")], config.clone(), (400, "invalid")),
        (ADD, nic.to_vec(), with("natIp", json!("203.0.113.1")), (400, "badRequest")),
        (ADD, nic.to_vec(), with("natIP", json!(7)), (400, "invalid")),
        (ADD, nic.to_vec(), with("natIP", json!("198.51.100.1")), (400, "invalid")),
        (ADD, nic.to_vec(), with("type", json!("DIRECT_IPV6")), (400, "invalid")),
        (ADD, nic.to_vec(), with("networkTier", json!("STANDARD")), (400, "invalid")),
        (ADD, nic.to_vec(), Value::Null, (400, "required")),
        (ADD, nic.to_vec(), json!([]), (400, "parseError")),
        ("zones/r1-c/instances/gw/addAccessConfig", nic.to_vec(), config.clone(), (404, "notFound")),
        (LABELS, vec![], json!({ "labels": {} }), (412, "conditionNotMet")),
        (LABELS, vec![], json!({ "labels": [], "labelFingerprint": "x" }), (400, "invalid")),
        (INSERT, vec![], json!({ "name": "Vip" }), (400, "invalid")),
        (INSERT, vec![], json!({ "name": "new", "labels": {} }), (400, "badRequest")),
        (INSERT, vec![], json!({ "name": "vip" }), (409, "alreadyExists")),
    ] {
        let mut fake = fake();
        let before = fake.state.clone();
        let (status, reason) = send(&mut fake, &request("POST", path, &query, &body));
        assert_eq!((status, reason.as_str()), expected, "{path} {query:?} {body}");
        assert_eq!(fake.state, before);
    }
}

#[test]
fn labels_have_the_characters_and_the_length_that_are_allowed() {
    for (key, value, is_allowed) in [
        ("team", "edge_1-a", true),
        ("team", "", true),
        ("Team", "edge", false),
        ("1team", "edge", false),
        ("team", "a.b", false),
        ("team", &"x".repeat(63), true),
        ("team", &"x".repeat(64), false),
    ] {
        let mut fake = fake();
        let fingerprint = fake.state.addresses["vip"].fingerprint();
        let body = json!({ "labels": { key: value }, "labelFingerprint": fingerprint });
        let (status, _) = send(&mut fake, &request("POST", "regions/r1/addresses/vip/setLabels", &[], &body));
        assert_eq!(status == 200, is_allowed, "{key}={value}");
        assert_ne!(fake.state.addresses["vip"].fingerprint() == fingerprint, is_allowed);
    }
}

#[test]
fn a_nic_has_one_access_config_and_an_address_one_nic() {
    let mut fake = fake();
    fake.add_instance("r1-b", "gw2", "10.0.0.2");
    fake.add_address("vip2", "203.0.113.2", &[]);
    let mut add = |instance: &str, address: &str| {
        let path = format!("zones/r1-b/instances/{instance}/addAccessConfig");
        send(&mut fake, &request("POST", &path, &[("networkInterface", "nic0")], &json!({ "natIP": address })))
    };
    assert_eq!(add("gw", "203.0.113.1").0, 200);
    assert_eq!(add("gw", "203.0.113.2"), (400, "badRequest".to_owned()));
    assert_eq!(add("gw2", "203.0.113.1"), (400, "invalid".to_owned()));
    assert_eq!(add("gw2", "203.0.113.2").0, 200);
    let delete = request("DELETE", "regions/r1/addresses/vip", &[], &Value::Null);
    assert_eq!(send(&mut fake, &delete), (400, "resourceInUseByAnotherResource".to_owned()));
}

#[test]
fn a_request_needs_a_token_that_was_issued() {
    let mut fake = fake();
    fake.tokens.is_required = true;
    let get = request("GET", "regions/r1/addresses/vip", &[], &Value::Null);
    assert_eq!(send(&mut fake, &get), (401, "authError".to_owned()));
}
