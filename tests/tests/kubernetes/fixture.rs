//! A gateway and a policy server that reads the API, on one host.

use std::time::Duration;

use serde_json::{Value, json};
use vipgate_lab::reflector::query_udp;
use vipgate_tests::kubernetes::ApiServer;
use vipgate_tests::policyd::{Policyd, PolicydConfig};
use vipgate_tests::{SERVER, Testbed, VIP_A, VIP_B, wait_for};

/// URL of the policy server.
pub(crate) const URL: &str = "http://127.0.0.1:18001";
/// A second address of tenant B's gateway, in the testbed's outside network.
pub(crate) const VIP_POOL: &str = "203.0.113.30";
/// The pool with this address alone.
pub(crate) const POOL: &str = "
apiVersion: vipgate.io/v1alpha1
kind: AddressPool
metadata: {name: public}
spec: {ranges: [203.0.113.30/32]}
";

/// A policy that selects a pod by its labels, with an address of tenant B's gateway.
pub(crate) const BATCH_POLICY: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: tenant-c}
---
apiVersion: vipgate.io/v1alpha1
kind: EgressPolicy
metadata: {name: batch, namespace: tenant-c}
spec:
  selectors: [{podSelector: {matchLabels: {app: batch}}}]
  addresses: [203.0.113.30]
";
/// The pod that it selects: p4, once it has its address.
pub(crate) const BATCH_POD: &str = "
apiVersion: v1
kind: Pod
metadata: {name: batch-0, namespace: tenant-c, labels: {app: batch}}
spec: {containers: [{name: main, image: none}]}
";
/// Address of p4.
pub(crate) const P4: &str = "10.1.0.31";

/// Configuration of a source that reads the API as a user.
pub(crate) fn source(api: &ApiServer, user: &str, settings: &str) -> String {
    format!("source: {{kubernetes: {{kubeconfig: {}{settings}}}}}", api.kubeconfig(user).display())
}

/// Starts a policy server that reads the API.
pub(crate) fn start_policyd(testbed: &Testbed, source: &str) -> Policyd {
    start_policyd_with(testbed, source, true)
}

/// Starts a policy server that reads the API, and waits until it is ready if it is to be.
pub(crate) fn start_policyd_with(testbed: &Testbed, source: &str, is_ready: bool) -> Policyd {
    let settings = PolicydConfig { name: "policyd-1", listen: "127.0.0.1:18001", metrics: 9471, extra: source };
    if is_ready {
        Policyd::start(&testbed.gateway, testbed.folder.path(), settings)
    } else {
        Policyd::spawn(&testbed.gateway, testbed.folder.path(), settings)
    }
}

/// Starts the gateway as a client of the policy server.
pub(crate) fn start_gateway(testbed: &mut Testbed, extra: &str) {
    let cache = testbed.folder.path().join("policy.cache").display().to_string();
    testbed.start_gateway(&format!("{extra}\npolicy: {{server: {{url: \"{URL}\", cache: {cache}}}}}"));
}

/// Creates both tenants of the demo, with the addresses of their Services.
pub(crate) fn create_tenants(testbed: &Testbed, api: &ApiServer) {
    api.apply(&testbed.read_policy("tenant-a.yaml"));
    // 1.20 has no `loadBalancerClass`, which says that the Service is vipgate's; so does any annotation of vipgate's.
    let tenant = testbed.read_policy("tenant-b.yaml").replace("  loadBalancerClass: vipgate.io/vipgate\n", "");
    let annotated = "  namespace: tenant-b\n  annotations: {vipgate.io/announce: L2}\nspec:\n  type: LoadBalancer";
    api.apply(&tenant.replace("  namespace: tenant-b\nspec:\n  type: LoadBalancer", annotated));
    set_ingress(api, "tenant-a", "api", &VIP_A);
    set_ingress(api, "tenant-b", "web", &VIP_B);
}

/// Sets the ingress addresses of a Service, as a load balancer's controller does.
pub(crate) fn set_ingress(api: &ApiServer, namespace: &str, name: &str, addresses: &[&str]) {
    let ingress: Vec<Value> = addresses.iter().map(|address| json!({"ip": address})).collect();
    api.patch_status("service", namespace, name, &json!({"status": {"loadBalancer": {"ingress": ingress}}}));
}

/// Status of the policy server.
pub(crate) fn status(testbed: &Testbed) -> Value {
    let (code, stdout, stderr) = testbed.policy_status(&["--server", URL, "-o", "json"]);
    assert_eq!(code, 0, "{stderr}");
    serde_json::from_str(&stdout).unwrap()
}

/// Waits until the gateway has the server's policy in force; returns the version.
pub(crate) fn wait_in_step(testbed: &Testbed) -> String {
    let in_step = || status(testbed)["gateways"][0]["in_step"] == true;
    assert!(wait_for(Duration::from_secs(15), in_step), "{}", status(testbed));
    status(testbed)["version"].as_str().unwrap().to_owned()
}

/// Waits until the server sees a pod as `expected`.
#[track_caller]
pub(crate) fn wait_seen_as(testbed: &Testbed, pod: usize, expected: &str) {
    testbed.accounting.allow(["no_policy", "no_service"]);
    let is_seen = || query_udp(&testbed.pods[pod], SERVER[0].parse().unwrap()).is_ok_and(|source| source == expected);
    assert!(wait_for(Duration::from_secs(20), is_seen), "{}\n{}", status(testbed), testbed.log());
}

/// Whether the server sees a pod as `expected`.
pub(crate) fn is_seen_as(testbed: &Testbed, pod: usize, expected: &str) -> bool {
    query_udp(&testbed.pods[pod], SERVER[0].parse().unwrap()).is_ok_and(|source| source == expected)
}

/// Waits until the policy server reports its source as healthy, or not and why.
#[track_caller]
pub(crate) fn wait_health(testbed: &Testbed, policyd: &Policyd, reason: Option<&str>) {
    let has_reason = || {
        let source = status(testbed)["source"].to_string();
        let is_healthy = policyd.metric("vipgate_policy_source_healthy", "") > 0.5;
        reason.map_or(is_healthy, |reason| !is_healthy && source.contains(reason))
    };
    assert!(wait_for(Duration::from_secs(30), has_reason), "{}\n{}", status(testbed), policyd.log());
}
