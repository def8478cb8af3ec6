//! The API server of these tests: objects of our kinds, access control, faults.

use std::time::Duration;

use serde_json::{Value, json};
use vipgate_lab::{Host, Lab};
use vipgate_tests::kubernetes::{ADMIN, ApiServer, POLICYD};
use vipgate_tests::wait_for;

const POLICIES: &str = "/apis/vipgate.io/v1alpha1/namespaces/tenant-a/egresspolicies";
const SERVICES: &str = "/api/v1/namespaces/tenant-a/services";
const SLICES: &str = "/apis/discovery.k8s.io/v1/namespaces/tenant-a/endpointslices";

const TENANT: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: tenant-a}
---
apiVersion: v1
kind: Service
metadata: {name: egress, namespace: tenant-a}
spec:
  type: LoadBalancer
  ipFamilyPolicy: RequireDualStack
  selector: {app: web}
  ports: [{name: https, port: 443, targetPort: 8443}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: egress-1, namespace: tenant-a, labels: {kubernetes.io/service-name: egress}}
addressType: IPv4
ports: [{name: https, port: 8443}]
endpoints: [{addresses: [10.1.0.11], conditions: {ready: true}}]
---
apiVersion: vipgate.io/v1alpha1
kind: EgressPolicy
metadata: {name: egress, namespace: tenant-a}
spec: {serviceRef: {name: egress}}
";

const ROLE: &str = "
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: policyd}
rules:
  - {apiGroups: [vipgate.io], resources: [egresspolicies], verbs: [get, list, watch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: policyd}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: policyd}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: policyd}]
";

fn lab(tag: &str) -> (Lab, Host) {
    let lab = Lab::new(tag).unwrap();
    let host = lab.host("api", false).unwrap();
    (lab, host)
}

/// GET that must succeed.
#[track_caller]
fn get(server: &ApiServer, user: &str, path: &str) -> Value {
    let (status, body) = server.request(user, "GET", path, None);
    assert_eq!(status, 200, "{path}: {body}");
    serde_json::from_str(&body).unwrap()
}

/// The `resourceVersion` of a list.
#[track_caller]
fn version(server: &ApiServer, path: &str) -> String {
    get(server, ADMIN, path)["metadata"]["resourceVersion"].as_str().unwrap().to_owned()
}

/// The events of a watch of some seconds.
#[track_caller]
fn watch(server: &ApiServer, path: &str, version: &str, seconds: u32) -> Vec<Value> {
    let query = format!("watch=true&allowWatchBookmarks=true&timeoutSeconds={seconds}&resourceVersion={version}");
    let path = format!("{path}?{query}");
    let (status, body) = server.request(ADMIN, "GET", &path, None);
    assert_eq!(status, 200, "{path}: {body}");
    body.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn the_api_server_serves_our_kinds() {
    let (_lab, host) = lab("api");
    let mut server = ApiServer::new(&host);
    server.apply(TENANT);
    let policy = server.get("egresspolicies.vipgate.io", "tenant-a", "egress");
    assert_eq!(policy["spec"]["serviceRef"]["name"], "egress");
    assert_eq!(policy["spec"]["onExhaustion"], "Reject", "defaults of the CRD are applied");
    let by_label = format!("{SLICES}?labelSelector=kubernetes.io%2Fservice-name%3Degress");
    assert_eq!(get(&server, ADMIN, &by_label)["items"][0]["endpoints"][0]["addresses"][0], "10.1.0.11");
    let vip = json!({"status": {"loadBalancer": {"ingress": [{"ip": "203.0.113.10"}, {"ip": "2001:db8:113::10"}]}}});
    server.patch_status("service", "tenant-a", "egress", &vip);
    let service = server.get("service", "tenant-a", "egress");
    assert_eq!(service["status"]["loadBalancer"]["ingress"][1]["ip"], "2001:db8:113::10");
    assert_eq!(service["spec"]["ipFamilies"], json!(["IPv4", "IPv6"]));

    server.stop();
    server.start();
    assert_eq!(server.get("egresspolicies.vipgate.io", "tenant-a", "egress"), policy);

    assert_eq!(server.request(POLICYD, "GET", POLICIES, None).0, 403);
    server.try_kubectl(POLICYD, &["get", "egp", "-A"]).unwrap_err();
    server.apply(ROLE);
    // Roles come by a watch.
    let allowed = || server.request(POLICYD, "GET", POLICIES, None).0 == 200;
    assert!(wait_for(Duration::from_secs(5), allowed));
    assert_eq!(server.request(POLICYD, "GET", SERVICES, None).0, 403);
    assert!(server.try_kubectl(POLICYD, &["get", "egp", "-A"]).unwrap().contains("egress"));

    server.delete("egp", "tenant-a", "egress");
    assert_eq!(get(&server, POLICYD, POLICIES)["items"], json!([]));
}

#[test]
fn a_watch_from_before_a_restart_gets_410() {
    let (_lab, host) = lab("api-410");
    let mut server = ApiServer::new(&host);
    server.apply(TENANT);
    for (list, object) in [(POLICIES, "egp"), (SLICES, "endpointslice"), (SERVICES, "service")] {
        let old = version(&server, list);
        let name = get(&server, ADMIN, list)["items"][0]["metadata"]["name"].as_str().unwrap().to_owned();
        server.kubectl(&["label", "-n", "tenant-a", object, &name, "changed=yes"]);
        let events = watch(&server, list, &old, 1);
        assert_eq!((events.len(), &events[0]["type"]), (1, &json!("MODIFIED")), "{list}: {events:?}");

        server.restart();
        let events = watch(&server, list, &old, 1);
        assert_eq!((&events[0]["type"], &events[0]["object"]["code"]), (&json!("ERROR"), &json!(410)), "{events:?}");
        let now = version(&server, list);
        assert_eq!(watch(&server, list, &now, 1), [] as [Value; 0], "{list}");
    }
}

#[test]
fn a_watch_of_a_kind_that_does_not_change_gets_bookmarks() {
    let (_lab, host) = lab("api-idle");
    let server = ApiServer::new(&host);
    server.apply(TENANT);
    let old = version(&server, POLICIES);
    server.kubectl(&["create", "namespace", "tenant-b"]);
    // Sent two seconds before its end.
    let events = watch(&server, POLICIES, &old, 8);
    let last = events.last().expect("a bookmark");
    assert_eq!(last["type"], "BOOKMARK", "{events:?}");
    let bookmark = last["object"]["metadata"]["resourceVersion"].as_str().unwrap();
    assert!(bookmark.parse::<u64>().unwrap() > old.parse().unwrap(), "{bookmark} after {old}");
}

#[test]
fn a_restored_snapshot_takes_objects_and_versions_back() {
    let (_lab, host) = lab("api-restore");
    let mut server = ApiServer::new(&host);
    server.apply(TENANT);
    let folder = tempfile::tempdir().unwrap();
    let (snapshot, before) = (folder.path().join("snapshot"), version(&server, POLICIES).parse::<u64>().unwrap());
    server.save_snapshot(&snapshot);
    server.delete("egp", "tenant-a", "egress");
    assert!(version(&server, POLICIES).parse::<u64>().unwrap() > before);
    server.restore_snapshot(&snapshot);
    server.get("egp", "tenant-a", "egress");
}
