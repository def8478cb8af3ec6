//! Contract with Google's own client: it accepts the fake's dialect, and the provider makes the same requests as it does.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use vipgate_cloud::plan::Action;
use vipgate_cloud::{AddressId, Allocation, ErrorKind, Provider, PublicAddress, Tags};
use vipgate_cloud_testkit::RecordedRequest;

use crate::calls::Calls;
use crate::contract::vendor_client::{assert_golden, run as run_client};
use crate::gcp::bench::{Bench, NIC_1, NIC_2, kind, our_claim};

const TOKEN: &str = "token-1";

#[tokio::test]
async fn the_provider_makes_the_requests_of_googles_own_client() {
    let ours = Bench::new().await;
    ours.server.with(|cloud| cloud.page_size = 1);
    let allocated = run(&ours).await;
    let ours = normalized(&ours.requests());

    let vendor = Bench::new().await;
    vendor.server.with(|cloud| {
        cloud.tokens.valid.insert("vendor".to_owned());
        cloud.page_size = 1;
    });
    let report = run_client("gcp.py", &[&vendor.server.url(), &parameters(&allocated).to_string()]).await;
    let theirs = normalized(&vendor.requests());
    assert_eq!(vendor.route(), None);

    let misspelt = json!({ "type": "ONE_TO_ONE_NAT", "natIp": "203.0.113.1" });
    assert_eq!(schema_errors(&report, "AccessConfig", &misspelt).len(), 1, "schemas allow no other field");
    check_schemas(&report, &ours);
    check_schemas(&report, &theirs);
    for response in report["responses"].as_array().expect("responses") {
        check(&report, response["schema"].as_str().expect("a name"), &response["body"]);
    }
    let requests: Vec<Value> = theirs.iter().map(|it| serde_json::from_str(it).expect("JSON")).collect();
    let golden = json!({ "package": report["package"], "revision": report["revision"], "requests": requests });
    assert_golden("gcp", &golden);
    assert_eq!(pretty(&ours), pretty(&theirs), "left: the provider's requests; right: the client's");
}

/// List, claim, attach, refused second attachment, move, detach, unclaim, allocate, release. Returns the allocated address.
async fn run(bench: &Bench) -> String {
    let provider = &bench.provider;
    provider.claim(&bench.address("vip-1").await, &our_claim()).await.expect("claimed");
    let (binding, nic) = (bench.binding(NIC_1).await, bench.nic(NIC_1).await);
    provider.prepare(&nic, std::slice::from_ref(&binding.address), &[]).await.expect("ready");
    provider.attach(&nic, &[binding]).await.expect("attached");
    let (binding, nic) = (bench.binding(NIC_2).await, bench.nic(NIC_2).await);
    assert_eq!(kind(provider.attach(&nic, std::slice::from_ref(&binding)).await), ErrorKind::InUse);
    let from = vipgate_cloud::NicId(NIC_1.to_owned());
    provider.move_from_dead(&from, &nic, &[binding]).await.expect("moved");
    let address = bench.address("vip-1").await;
    provider.detach(&nic.id, std::slice::from_ref(&address)).await.expect("detached");
    provider.unclaim(&address).await.expect("unclaimed");
    let tags = Tags::from([("pool".to_owned(), "edge".to_owned())]);
    let allocation = Allocation { tags, claim: our_claim(), is_ipv6: false, zone: None, token: TOKEN.to_owned() };
    provider.execute(&Action::Allocate(allocation), &[]).await.expect("allocated");
    // The client lists addresses once.
    let names: Vec<String> = bench.server.with(|cloud| cloud.state.addresses.keys().cloned().collect());
    let name = names.into_iter().find(|name| name.starts_with("vipgate-")).expect("the allocated one");
    let allocated = PublicAddress { id: AddressId(name.clone()), claim: Some(our_claim()), ..address };
    provider.release(&allocated).await.expect("released");
    name
}

/// What the client is given, so that it does the same.
fn parameters(allocated: &str) -> Value {
    let ids: Vec<String> = (1..=20).map(|number| format!("00000000-0000-4000-8000-{number:012}")).collect();
    let unclaimed = json!({ "pool": "edge", "team": "net" });
    let claim = json!({ "vipgate-cluster": "prod", "vipgate-vip": "shop_-web" });
    let merged = |labels: Value, more: &Value| {
        let mut labels: BTreeMap<String, Value> = serde_json::from_value(labels).expect("a map");
        labels.extend(serde_json::from_value::<BTreeMap<String, Value>>(more.clone()).expect("a map"));
        json!(labels)
    };
    json!({
        "project": "p1",
        "region": "europe-west1",
        "filter": r#"(labels.pool = "edge") AND (labels.team = "net")"#,
        "names": ["vip-1", "vip-2"],
        "address": "vip-1",
        "gateways": [{ "zone": "europe-west1-b", "name": "gw-1" }, { "zone": "europe-west1-c", "name": "gw-2" }],
        "accessConfig": "vipgate-203-0-113-1",
        "claimed": merged(unclaimed.clone(), &claim),
        "unclaimed": unclaimed,
        "allocated": allocated,
        "description": format!("Allocated by vipgate, token {TOKEN}"),
        "allocatedLabels": merged(json!({ "pool": "edge", "vipgate-allocated": TOKEN }), &claim),
        "requestIds": ids,
    })
}

/// The different requests, without what is random or legitimately differs.
fn normalized(requests: &[RecordedRequest]) -> BTreeSet<String> {
    let one = |request: &RecordedRequest| {
        let mut path: Vec<&str> = request.path.split('/').collect();
        if let Some(at) = path.iter().position(|part| *part == "operations") {
            // Numbered by the fake in the order of changes.
            path[at + 1] = "OPERATION";
        }
        let mut query: BTreeMap<&str, &str> = request.query.iter().map(|(name, value)| (&**name, &**value)).collect();
        // The client names the default format in each request.
        assert_eq!(query.remove("alt").unwrap_or("json"), "json");
        // A random number each time.
        query.entry("requestId").and_modify(|id| *id = "UUID");
        json!({ "method": request.method, "path": path.join("/"), "query": query, "body": request.json() }).to_string()
    };
    requests.iter().map(one).collect()
}

fn pretty(requests: &BTreeSet<String>) -> String {
    requests.iter().cloned().collect::<Vec<_>>().join("\n")
}

/// Bodies of requests against the schema of the method.
fn check_schemas(report: &Value, requests: &BTreeSet<String>) {
    let mut checked = 0;
    for request in requests {
        let request: Value = serde_json::from_str(request).expect("JSON");
        let path = request["path"].as_str().expect("a path");
        let schema = match path.rsplit('/').next() {
            Some("setLabels") => "RegionSetLabelsRequest",
            Some("addAccessConfig") => "AccessConfig",
            Some("addresses") if request["method"] == "POST" => "Address",
            _ => {
                assert!(request["body"].is_null(), "{path} has no body");
                continue;
            }
        };
        check(report, schema, &request["body"]);
        checked += 1;
    }
    assert!(checked >= 5, "only {checked} bodies");
}

fn check(report: &Value, schema: &str, body: &Value) {
    let errors = schema_errors(report, schema, body);
    assert!(errors.is_empty(), "{errors:?}: {body}");
}

fn schema_errors(report: &Value, schema: &str, body: &Value) -> Vec<String> {
    let schema = json!({ "$ref": format!("#/$defs/{schema}"), "$defs": report["schemas"] });
    let validator = jsonschema::validator_for(&schema).expect("a schema");
    validator.iter_errors(body).map(|error| error.to_string()).collect()
}
