use vipgate_policy::manifest::{Manifests, UnsupportedKinds, read_object};

use super::*;

fn object(value: Value) -> DynamicObject {
    serde_json::from_value(value).unwrap()
}

#[test]
fn what_changes_without_meaning_is_left_out() {
    let slice = |version: &str, time: &str| {
        object(json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {
                "name": "api-1", "namespace": "t", "resourceVersion": version, "uid": version,
                "labels": {"kubernetes.io/service-name": "api"},
                "annotations": {"endpoints.kubernetes.io/last-change-trigger-time": time},
                "managedFields": [{"manager": "kcm", "time": "2026-01-01T00:00:00Z"}],
            },
            "addressType": "IPv4",
            "endpoints": [{
                "addresses": ["10.0.0.1"], "conditions": {"ready": false},
                "targetRef": {"kind": "Pod", "name": "p", "namespace": "t", "resourceVersion": version},
            }],
        }))
    };
    let first = manifest(Kind::EndpointSlice, slice("1", "a"));
    assert_eq!(first, manifest(Kind::EndpointSlice, slice("2", "b")));
    assert_eq!(&*first.name, "EndpointSlice/t/api-1");
    let expected = json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {"name": "api-1", "namespace": "t", "labels": {"kubernetes.io/service-name": "api"}},
        "addressType": "IPv4",
        "endpoints": [{
            "addresses": ["10.0.0.1"], "conditions": {"ready": false},
            "targetRef": {"kind": "Pod", "name": "p", "namespace": "t"},
        }],
    });
    assert_eq!(first.document, expected);
}

#[test]
fn a_node_keeps_its_addresses_prefixes_and_flannels_tunnel_endpoint_alone() {
    let node = object(json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {
            "name": "n1", "labels": {"topology.kubernetes.io/zone": "z"},
            "annotations": {
                "flannel.alpha.coreos.com/backend-type": "vxlan",
                "flannel.alpha.coreos.com/kube-subnet-manager": "true",
                "volumes.kubernetes.io/controller-managed-attach-detach": "true",
            },
        },
        "spec": {"podCIDRs": ["10.244.1.0/24"], "podCIDR": "10.244.1.0/24", "providerID": "x"},
        "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}], "images": [{"names": ["x"]}]},
    }));
    let document = manifest(Kind::Node, node).document;
    assert_eq!(document["spec"], json!({"podCIDRs": ["10.244.1.0/24"], "podCIDR": "10.244.1.0/24"}));
    assert_eq!(document["status"], json!({"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}]}));
    assert_eq!(document["metadata"]["annotations"], json!({"flannel.alpha.coreos.com/backend-type": "vxlan"}));
}

#[test]
fn a_pool_keeps_the_record_of_its_addresses_which_is_no_part_of_what_is_observed_of_its_status() {
    let pool = |addresses: Value, used: u32| {
        let object = object(json!({
            "apiVersion": "vipgate.io/v1alpha1", "kind": "AddressPool", "metadata": {"name": "public", "uid": "u"},
            "spec": {"ranges": ["192.0.2.0/28"]},
            "status": {"addresses": addresses, "used": used, "conditions": [{"type": "Accepted", "status": "True"}]},
        }));
        manifest(Kind::AddressPool, object)
    };
    let status = |manifest: &Manifest| manifest.observation.clone().unwrap().status.unwrap();
    let first = pool(json!(["192.0.2.1 EgressPolicy t/p"]), 1);
    assert_eq!(first.document["status"], json!({"addresses": ["192.0.2.1 EgressPolicy t/p"]}));
    assert_eq!(status(&first), json!({"used": 1, "conditions": [{"type": "Accepted", "status": "True"}]}));
    let used = pool(json!(["192.0.2.1 EgressPolicy t/p"]), 2);
    assert_eq!(used.document, first.document, "other fields cause no compilation");
    let given = pool(json!(["192.0.2.1 EgressPolicy t/q"]), 1);
    assert_ne!(given.document, first.document);
    assert_eq!(status(&given), status(&first));
}

#[test]
fn a_pod_keeps_what_says_whether_it_has_its_address() {
    let pod = |probed: &str, status: &str| {
        object(json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": "p", "namespace": "t", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z",
                "deletionTimestamp": "2026-01-02T00:00:00Z",
            },
            "spec": {"nodeName": "n", "containers": []},
            "status": {
                "phase": "Running", "podIP": "10.0.0.1",
                "conditions": [{"type": "Initialized", "status": "True"}, {"type": "Ready", "status": status, "lastProbeTime": probed}],
            },
        }))
    };
    let document = manifest(Kind::Pod, pod("1", "True")).document;
    assert_eq!(document["metadata"]["uid"], "u");
    assert_eq!(document["metadata"]["deletionTimestamp"], "2026-01-02T00:00:00Z");
    assert_eq!(document["status"]["conditions"], json!([{"type": "Ready", "status": "True"}]));
    assert_eq!(manifest(Kind::Pod, pod("1", "True")), manifest(Kind::Pod, pod("2", "True")));
    let document = manifest(Kind::Pod, pod("1", "False")).document;
    assert_eq!(document["status"].get("conditions"), None);
}

#[test]
fn only_a_policy_with_selectors_selects_pods() {
    let policy = |kind: &str, spec: Value| {
        object(json!({"apiVersion": "vipgate.io/v1alpha1", "kind": kind, "metadata": {"name": "p", "namespace": "t"},
            "spec": spec}))
    };
    let selectors = json!({"selectors": [{"podSelector": {}}], "addresses": ["192.0.2.1"]});
    assert!(manifest(Kind::EgressPolicy, policy("EgressPolicy", selectors.clone())).selects_pods);
    assert!(manifest(Kind::ClusterEgressPolicy, policy("ClusterEgressPolicy", selectors.clone())).selects_pods);
    for spec in [json!({"serviceRef": {"name": "api"}}), json!({"selectors": []}), json!({"selectors": null})] {
        assert!(!manifest(Kind::EgressPolicy, policy("EgressPolicy", spec)).selects_pods);
    }
    assert!(!manifest(Kind::AddressPool, policy("AddressPool", selectors)).selects_pods);
}

/// The reader of manifests finds each kind's fields where they are in the API.
#[test]
fn manifests_of_all_kinds_are_readable() {
    let specs = |kind| match kind {
        Kind::AddressPool => json!({"ranges": ["192.0.2.0/28"]}),
        Kind::EgressPolicy => json!({"serviceRef": {"name": "api"}}),
        Kind::ClusterEgressPolicy => json!({"serviceRef": {"name": "api", "namespace": "t"}}),
        Kind::Gateway => json!({"peerAddress": "192.0.2.1"}),
        Kind::OverlayNode => {
            json!({"address": "192.0.2.1", "mac": "02:00:00:00:00:01", "vni": 1, "podCIDRs": ["10.1.0.0/24"]})
        }
        Kind::ServiceCidr => json!({"cidrs": ["10.96.0.0/12"]}),
        _ => json!({}),
    };
    for kind in Kind::ALL {
        let object = object(json!({
            "apiVersion": kind.api_version(), "kind": kind.as_str(),
            "metadata": {
                "name": "x", "namespace": kind.is_namespaced().then_some("t"), "resourceVersion": "7",
                "creationTimestamp": "2026-01-02T03:04:05Z", "annotations": {"other.io/x": "y"},
                "labels": {"kubernetes.io/service-name": "api"},
            },
            "spec": specs(kind), "addressType": "IPv4", "endpoints": [],
        }));
        let manifest = manifest(kind, object);
        let mut manifests = Manifests::default();
        read_object(&manifest.name, manifest.document.clone(), UnsupportedKinds::Reject, &mut manifests);
        assert_eq!(manifests.diagnostics, [], "{manifest:?}");
        let [object] = &manifests.objects[..] else { panic!("{manifest:?}") };
        assert_eq!(format!("{}/{}", object.id.kind.as_str(), object.id.path()), *manifest.name);
    }
}

#[test]
fn a_service_keeps_who_has_written_its_addresses_without_the_time() {
    let service = |manager: &str, fields: &str, time: &str| {
        let entry = json!({"manager": manager, "operation": "Update", "time": time, "fieldsV1": {fields: {}}});
        let metadata = json!({"name": "s", "namespace": "t", "managedFields": [entry]});
        manifest(Kind::Service, object(json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata})))
    };
    let first = service(FIELD_MANAGER, "f:status", "2026-01-01T00:00:00Z");
    assert!(first.document.to_string().contains(FIELD_MANAGER), "{first:?}");
    assert_eq!(first, service(FIELD_MANAGER, "f:status", "2026-01-02T00:00:00Z"));
    for (manager, fields) in [("kubectl", "f:status"), (FIELD_MANAGER, "f:metadata")] {
        let other = service(manager, fields, "2026-01-01T00:00:00Z");
        assert_eq!(other.document["metadata"].get("managedFields"), None);
    }
}
