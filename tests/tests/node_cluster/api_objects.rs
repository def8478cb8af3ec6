//! Objects of the cluster in the API server.

use std::fmt::Write as _;
use std::time::Duration;

use serde_json::{Value, json};
use vipgate_tests::cluster::{HTTP_PORT, L2_VIPS, LINE_PORT, Node};
use vipgate_tests::kubernetes::{ADMIN, ApiServer};
use vipgate_tests::wait_for;

use crate::cluster::{NEIGHBOR, Pod};

/// Namespaces of pods that a policy selects by label, with their VIPs.
pub(crate) const BATCHES: [(&str, [&str; 2]); 2] =
    [("batch-a", ["203.0.113.21", "2001:db8:113::21"]), ("batch-b", ["203.0.113.22", "2001:db8:113::22"])];
/// Namespace of pods that the Service `web` has as backends; it covers them.
pub(crate) const COVERED: &str = "tenant-b";
/// Namespace of pods that nothing covers: backends of the Service `internal`.
pub(crate) const UNCOVERED: &str = "other";

/// The objects of a list.
pub(crate) fn items(list: &Value) -> impl Iterator<Item = &Value> {
    list["items"].as_array().into_iter().flatten()
}

/// Sends a request that must succeed.
#[track_caller]
pub(crate) fn request(api: &ApiServer, method: &str, path: &str, body: Option<&Value>) -> Value {
    let (status, text) = api.request(ADMIN, method, path, body);
    assert!((200..300).contains(&status), "{method} {path}: {status}: {text}");
    serde_json::from_str(&text).unwrap()
}

/// Creates the namespaces, Services and policies.
pub(crate) fn create_policy(api: &ApiServer) {
    let [neighbor4, neighbor6] = NEIGHBOR;
    // 1.20 has no `loadBalancerClass`, which says that the Service is vipgate's; so does any annotation of vipgate's.
    let mut text = format!(
        "---\napiVersion: v1\nkind: Namespace\nmetadata: {{name: {COVERED}}}\n\
         ---\napiVersion: v1\nkind: Namespace\nmetadata: {{name: {UNCOVERED}}}\n\
         ---\napiVersion: v1\nkind: Service\n\
         metadata: {{name: web, namespace: {COVERED}, annotations: {{vipgate.io/announce: L2}}}}\n\
         spec:\n  type: LoadBalancer\n  ipFamilyPolicy: RequireDualStack\n  ports:\n\
         \x20   - {{name: tcp, port: {HTTP_PORT}, targetPort: {LINE_PORT}, protocol: TCP}}\n\
         \x20   - {{name: udp, port: 5353, targetPort: 5353, protocol: UDP}}\n\
         ---\napiVersion: v1\nkind: Service\nmetadata: {{name: internal, namespace: {UNCOVERED}}}\n\
         spec:\n  ipFamilyPolicy: RequireDualStack\n  ports:\n\
         \x20   - {{name: tcp, port: {HTTP_PORT}, targetPort: {LINE_PORT}, protocol: TCP}}\n\
         \x20   - {{name: udp, port: 5353, targetPort: 5353, protocol: UDP}}\n\
         ---\napiVersion: vipgate.io/v1alpha1\nkind: EgressPolicy\nmetadata: {{name: web, namespace: {COVERED}}}\n\
         spec: {{serviceRef: {{name: web}}, excludedCIDRs: [{neighbor4}/32, \"{neighbor6}/128\"]}}\n"
    );
    for (namespace, [vip4, vip6]) in BATCHES {
        let _ = write!(
            text,
            "---\napiVersion: v1\nkind: Namespace\nmetadata: {{name: {namespace}}}\n\
             ---\napiVersion: vipgate.io/v1alpha1\nkind: EgressPolicy\nmetadata: {{name: batch, namespace: {namespace}}}\n\
             spec:\n  selectors: [{{podSelector: {{matchLabels: {{app: {namespace}}}}}}}]\n\
             \x20 addresses: [{vip4}, \"{vip6}\"]\n"
        );
    }
    api.apply(&text);
    let ingress: Vec<Value> = L2_VIPS.iter().map(|address| json!({"ip": address})).collect();
    api.patch_status("service", COVERED, "web", &json!({"status": {"loadBalancer": {"ingress": ingress}}}));
    for (namespace, service) in [(COVERED, "web"), (UNCOVERED, "internal")] {
        for family in ["IPv4", "IPv6"] {
            request(api, "POST", &slices(namespace), Some(&slice(service, family, &[])));
        }
    }
}

/// Serves EndpointSlices also in the version that kube-proxy 1.20 reads.
pub(crate) fn serve_beta_slices(api: &ApiServer) {
    let schema = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
    let version =
        json!({"name": "v1beta1", "served": true, "storage": false, "schema": {"openAPIV3Schema": schema}}).to_string();
    let patch = format!("[{{\"op\": \"add\", \"path\": \"/spec/versions/-\", \"value\": {version}}}]");
    api.kubectl(&["patch", "crd", "endpointslices.discovery.k8s.io", "--type=json", "-p", &patch]);
    let path = "/apis/discovery.k8s.io/v1beta1/endpointslices";
    let is_served = || api.request(ADMIN, "GET", path, None).0 == 200;
    assert!(wait_for(Duration::from_secs(20), is_served), "{:?}", api.request(ADMIN, "GET", path, None));
}

/// Registers a node, as its kubelet does.
pub(crate) fn create_node(api: &ApiServer, node: &Node, number: usize) {
    let body = json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": node.name},
        "spec": {
            "podCIDR": format!("10.244.{number}.0/24"),
            "podCIDRs": [format!("10.244.{number}.0/24"), format!("fd00:244:{number}::/64")],
        },
    });
    request(api, "POST", "/api/v1/nodes", Some(&body));
    let addresses = json!([
        {"type": "InternalIP", "address": format!("10.5.{number}.1")},
        {"type": "InternalIP", "address": format!("fd00:5:{number}::1")},
    ]);
    let path = format!("/api/v1/nodes/{}/status", node.name);
    request(api, "PATCH", &path, Some(&json!({"status": {"addresses": addresses}})));
}

fn slices(namespace: &str) -> String {
    format!("/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices")
}

fn slice(service: &str, family: &str, endpoints: &[Value]) -> Value {
    let name = format!("{service}-{}", family.to_lowercase());
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}},
        "addressType": family,
        "ports": [
            {"name": "tcp", "port": LINE_PORT, "protocol": "TCP"},
            {"name": "udp", "port": 5353, "protocol": "UDP"},
        ],
        "endpoints": endpoints,
    })
}

/// Writes the EndpointSlices of both Services, as their controller does.
pub(crate) fn write_slices(api: &ApiServer, pods: &[Pod]) {
    for (namespace, service) in [(COVERED, "web"), (UNCOVERED, "internal")] {
        for (index, family) in ["IPv4", "IPv6"].into_iter().enumerate() {
            let endpoint = |pod: &Pod| {
                json!({
                    "addresses": [pod.addresses[index]], "nodeName": format!("node-{}", pod.node + 1),
                    "conditions": {"ready": true},
                    "targetRef": {"kind": "Pod", "name": pod.name, "namespace": namespace},
                })
            };
            let endpoints: Vec<Value> = pods.iter().filter(|pod| pod.namespace == namespace).map(endpoint).collect();
            let body = slice(service, family, &endpoints);
            let path = format!("{}/{}", slices(namespace), body["metadata"]["name"].as_str().unwrap());
            request(api, "PATCH", &path, Some(&body));
        }
    }
}

/// Creates a Pod that is assigned to a node, as the scheduler leaves it.
pub(crate) fn create_pod(api: &ApiServer, namespace: &str, name: &str, node: &str) {
    let body = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": namespace}},
        "spec": {"nodeName": node, "containers": [{"name": "main", "image": "none"}]},
    });
    request(api, "POST", &format!("/api/v1/namespaces/{namespace}/pods"), Some(&body));
}

/// Writes a pod's addresses, as its kubelet does.
pub(crate) fn write_addresses(api: &ApiServer, namespace: &str, name: &str, [v4, v6]: &[String; 2]) {
    let status = json!({"status": {"phase": "Running", "podIP": v4, "podIPs": [{"ip": v4}, {"ip": v6}]}});
    request(api, "PATCH", &format!("/api/v1/namespaces/{namespace}/pods/{name}/status"), Some(&status));
}

/// Deletes a pod, as its kubelet does when its containers have ended.
pub(crate) fn delete_pod(api: &ApiServer, namespace: &str, name: &str) {
    let path = format!("/api/v1/namespaces/{namespace}/pods/{name}?gracePeriodSeconds=0");
    request(api, "DELETE", &path, None);
}
