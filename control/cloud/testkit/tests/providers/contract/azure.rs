//! Azure: Microsoft's own client against the fake, and our provider.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use vipgate_cloud::azure::{Azure, Config};
use vipgate_cloud::plan::Action;
use vipgate_cloud::{
    AddressId, Allocation, Associate, Binding, CallMeter, ErrorKind, GatewayNic, Provider, PublicAddress, Scope, Tags,
};
use vipgate_cloud_testkit::azure::{FakeAzure, GROUP, LOCATION, SUBSCRIPTION};
use vipgate_cloud_testkit::{FakeServer, RecordedRequest};

use crate::azure::bench::{config, our_claim};
use crate::calls::Calls;
use crate::contract::vendor_client::{assert_golden, run};

const TOKEN: &str = "token-1";

/// A resource group with two gateways and two addresses, one a page.
async fn group() -> (FakeServer<FakeAzure>, Vec<GatewayNic>) {
    let mut cloud = FakeAzure::new();
    let gateways = (1..=2).map(|zone| GatewayNic {
        gateway: format!("gw-{zone}"),
        instance: cloud.add_instance(&format!("gw-{zone}"), zone),
        nic: None,
    });
    let gateways = gateways.collect();
    for number in 1..=2 {
        cloud.add_address(&format!("vip-{number}"), [203, 0, 113, number].into(), &[("pool", "edge")]);
    }
    cloud.add_address("other", [203, 0, 113, 9].into(), &[("pool", "mail")]);
    cloud.page_size = 1;
    cloud.retry_after = Some(0);
    (FakeServer::start(cloud).await.unwrap(), gateways)
}

fn provider(url: &str) -> Azure {
    let location = Some(LOCATION.to_owned());
    let config = Config { location, operation_timeout: Duration::from_secs(5), ..config(url, Associate::Nic) };
    Azure::new(&config, Arc::new(CallMeter::default())).unwrap()
}

fn tags() -> Tags {
    [("pool".to_owned(), "edge".to_owned())].into()
}

/// The life of a VIP by our provider, as in `azure.py`; the name of the address that it allocated.
async fn flow(fake: &FakeServer<FakeAzure>, gateways: Vec<GatewayNic>) -> String {
    let azure = provider(&fake.url());
    let scope = Scope { tags: tags(), prefixes: vec![], gateways };
    let address = async || azure.observe(&scope).await.unwrap().addresses.remove(0);
    let nics = azure.observe(&scope).await.unwrap().nics;
    azure.claim(&address().await, &our_claim()).await.unwrap();
    for nic in &nics {
        azure.prepare(nic, &[address().await], &[]).await.unwrap();
    }
    let prepared: PublicAddress = address().await;
    let binding = |at: usize| Binding { address: prepared.clone(), private: prepared.private[&nics[at].id] };
    azure.attach(&nics[0], &[binding(0)]).await.unwrap();
    assert_eq!(azure.attach(&nics[1], &[binding(1)]).await.unwrap_err().kind, ErrorKind::InUse);
    azure.move_from_dead(&nics[0].id, &nics[1], &[binding(1)]).await.unwrap();
    azure.detach(&nics[1].id, std::slice::from_ref(&prepared)).await.unwrap();
    for (at, nic) in nics.iter().enumerate() {
        azure.unprepare(nic, &[binding(at)]).await.unwrap();
    }
    azure.unclaim(&prepared).await.unwrap();
    let allocation =
        Allocation { tags: tags(), claim: our_claim(), is_ipv6: false, zone: None, token: TOKEN.to_owned() };
    azure.execute(&Action::Allocate(allocation), &[]).await.unwrap();
    // The client lists addresses once.
    let mut ids = fake.with(|cloud| cloud.addresses()).into_iter().map(|it| it["id"].as_str().unwrap().to_owned());
    let id = ids.find(|id| id.contains("/vipgate-")).unwrap();
    let name = id.rsplit('/').next().unwrap().to_owned();
    let new = PublicAddress { id: AddressId(id), claim: None, ..prepared };
    azure.unclaim(&new).await.unwrap();
    azure.release(&new).await.unwrap();
    name
}

/// What the client is given, so that it does the same.
fn parameters(allocated: &str) -> Value {
    let claim = json!({ "vipgate.io_cluster": "prod", "vipgate.io_vip": "shop/web" });
    let mut all = json!({ "pool": "edge", "vipgate.io_allocated": TOKEN });
    all.as_object_mut().unwrap().extend(claim.as_object().unwrap().clone());
    json!({
        "subscription": SUBSCRIPTION,
        "group": GROUP,
        "location": LOCATION,
        "tags": tags(),
        "names": ["vip-1", "vip-2"],
        "address": "vip-1",
        "nics": ["gw-1-nic", "gw-2-nic"],
        "configuration": "vipgate-vip-1",
        "claim": claim,
        "allocated": allocated,
        "allocatedTags": all,
    })
}

/// The model of a request's body.
fn model(request: &RecordedRequest) -> Option<&'static str> {
    let is_address = request.path.contains("/publicIPAddresses/");
    (request.method == "PUT").then_some(if is_address { "PublicIPAddress" } else { "NetworkInterface" })
}

/// The different requests, without what is numbered by the fake, with bodies as the client writes them. Bodies have no field that
/// the client's models don't have.
async fn normalized(log: Vec<RecordedRequest>) -> BTreeSet<String> {
    let log: Vec<_> = log.into_iter().filter(|request| request.path.starts_with("/subscriptions/")).collect();
    let bodies: Vec<Value> = log.iter().filter_map(|it| Some(json!([model(it)?, it.json()]))).collect();
    let mut verified = verify(&bodies).await.into_iter();
    let one = |request: &RecordedRequest| {
        let mut path: Vec<&str> = request.path.split('/').collect();
        if let Some(at) = path.iter().position(|part| part.starts_with("operation")) {
            path[at + 1] = "OPERATION";
        }
        // Versions differ with the order of changes: that there is one is what counts.
        let conditions: Vec<&str> =
            ["if-match", "if-none-match"].into_iter().filter(|name| request.header(name).is_some()).collect();
        let body = model(request).map(|_| {
            let verified = verified.next().unwrap();
            assert_eq!(verified["unknown"], json!([]), "{}", request.json());
            verified["written"].clone()
        });
        if body.is_none() {
            assert!(request.body.is_empty(), "{} has no body", request.path);
        }
        json!({
            "method": request.method,
            "path": path.join("/"),
            "query": request.query,
            "conditions": conditions,
            // Where the client reads no model of its own, it accepts anything.
            "accept": request.header("accept").filter(|accept| *accept != "*/*").unwrap_or("application/json"),
            "contentType": request.header("content-type"),
            "body": body,
        })
        .to_string()
    };
    log.iter().map(one).collect()
}

/// Verifies bodies by the client's models.
async fn verify(bodies: &[Value]) -> Vec<Value> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), json!(bodies).to_string()).unwrap();
    let verified = run("azure.py", &["models", file.path().to_str().unwrap()]).await;
    verified.as_array().unwrap().clone()
}

#[tokio::test]
async fn the_vendors_client_accepts_the_fake_and_our_requests_are_its_own() {
    let (fake, gateways) = group().await;
    let allocated = flow(&fake, gateways).await;
    let ours = normalized(fake.take_log()).await;

    let (fake, _) = group().await;
    fake.with(|cloud| cloud.tokens.is_required = false);
    let report = run("azure.py", &["flow", &fake.url(), &parameters(&allocated).to_string()]).await;
    let theirs = normalized(fake.take_log()).await;
    let codes = json!({
        "exists": [412, "PreconditionFailed"],
        "missing": [404, "ResourceNotFound"],
        "released": [400, "PublicIPAddressCannotBeDeleted"],
        "stale": [412, "PreconditionFailed"],
        "stolen": [400, "PublicIPAddressInUse"],
    });
    assert_eq!(report["codes"], codes);
    assert_eq!(report["unknown"], json!([]), "responses of the fake have fields that the models don't have");
    let requests: Vec<Value> = theirs.iter().map(|it| serde_json::from_str(it).unwrap()).collect();
    assert_golden("azure", &json!({ "package": report["package"], "requests": requests }));

    let only = |these: &BTreeSet<String>, those: &BTreeSet<String>, is_expected: fn(&Value) -> bool| {
        let only = these.difference(those).filter(|it| !is_expected(&serde_json::from_str(it).unwrap()));
        only.cloned().collect::<Vec<_>>().join("\n")
    };
    assert_eq!(only(&ours, &theirs, is_only_ours), "", "requests of ours alone");
    assert_eq!(only(&theirs, &ours, is_only_theirs), "", "requests of the client alone");
}

/// What only we send, and why.
fn is_only_ours(request: &Value) -> bool {
    // Of another package, azure-mgmt-compute, which is large.
    request["path"].as_str().unwrap().contains("/Microsoft.Compute/virtualMachines/")
}

/// What only the client sends, and why.
fn is_only_theirs(request: &Value) -> bool {
    let path = request["path"].as_str().unwrap();
    // To see that what is attached isn't released: we read before. An attachment that is refused is the same request as the one
    // that isn't, later.
    request["method"] == "DELETE" && path.ends_with("/vip-1")
}

#[tokio::test]
async fn a_misspelt_field_is_noticed() {
    let bodies = [json!(["PublicIPAddress", { "properties": { "publicIpAllocationMethod": "Static" } }])];
    assert_eq!(verify(&bodies).await[0]["unknown"], json!(["PublicIPAddress.properties.publicIpAllocationMethod"]));
    let nested = json!({ "properties": { "ipConfigurations": [{ "properties": { "publicIP": {} } }] } });
    let verified = verify(&[json!(["NetworkInterface", nested])]).await;
    assert_eq!(verified[0]["unknown"], json!(["NetworkInterface.properties.ipConfigurations[0].properties.publicIP"]));
}
