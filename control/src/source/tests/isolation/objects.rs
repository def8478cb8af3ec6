//! Objects as JSON: kind by kind, with the fields that policy is made of.

use serde_json::{Value, json};
use vipgate_policy::manifest::{Kind, ObjectId};

/// Annotation that makes a Service an egress policy.
pub(super) const EGRESS: &str = "vipgate.io/egress";
/// Label of a slice with the name of its Service.
pub(super) const SERVICE_NAME: &str = "kubernetes.io/service-name";

/// The identity of an object; `namespace` is empty for kinds without one.
pub(super) fn id(kind: Kind, namespace: &str, name: &str) -> ObjectId {
    ObjectId { kind, namespace: namespace.to_owned(), name: name.to_owned() }
}

/// Adds what every object has to its other fields.
pub(super) fn with_identity(id: &ObjectId, created: Option<&str>, mut fields: Value) -> Value {
    fields["apiVersion"] = id.kind.api_version().into();
    fields["kind"] = id.kind.as_str().into();
    fields["metadata"]["name"] = id.name.as_str().into();
    if id.kind.is_namespaced() {
        fields["metadata"]["namespace"] = id.namespace.as_str().into();
    }
    if let Some(created) = created {
        fields["metadata"]["creationTimestamp"] = created.into();
    }
    fields
}

/// A `LoadBalancer` Service with VIPs and one port.
pub(super) fn service(vips: &[String], port: u16) -> Value {
    let ingress: Vec<Value> = vips.iter().map(|ip| json!({"ip": ip})).collect();
    json!({
        "spec": {
            "type": "LoadBalancer",
            "loadBalancerClass": "vipgate.io/vipgate",
            "ports": [{"name": "main", "port": port, "targetPort": 8080}],
        },
        "status": {"loadBalancer": {"ingress": ingress}},
    })
}

/// An endpoint of a slice; `pod`: namespace, name and UID.
pub(super) fn endpoint(address: &str, pod: Option<(&str, &str, &str)>) -> Value {
    let mut endpoint = json!({"addresses": [address], "conditions": {"ready": true}});
    if let Some((namespace, name, uid)) = pod {
        endpoint["targetRef"] = json!({"kind": "Pod", "namespace": namespace, "name": name, "uid": uid});
    }
    endpoint
}

/// A slice of a Service. The family is that of the first address.
pub(super) fn slice(service: &str, endpoints: &[Value]) -> Value {
    let first = endpoints.first().and_then(|endpoint| endpoint["addresses"][0].as_str());
    let family = if first.is_some_and(|address| address.contains(':')) { "IPv6" } else { "IPv4" };
    json!({
        "metadata": {"labels": {SERVICE_NAME: service}},
        "addressType": family,
        "ports": [{"name": "main", "port": 8080, "protocol": "TCP"}],
        "endpoints": endpoints,
    })
}

/// A running pod that is ready.
pub(super) fn pod(labels: &Value, node: &str, uid: &str, addresses: &[String]) -> Value {
    let ips: Vec<Value> = addresses.iter().map(|ip| json!({"ip": ip})).collect();
    json!({
        "metadata": {"labels": labels, "uid": uid},
        "spec": {"nodeName": node, "containers": []},
        "status": {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True"}],
            "podIP": addresses.first(),
            "podIPs": ips,
        },
    })
}

/// The selector of the pods of an application.
pub(super) fn app(name: &str) -> Value {
    json!({"podSelector": {"matchLabels": {"app": name}}})
}

/// The texts at a path of lists and maps; `*` is every item of a list.
pub(super) fn texts<'a>(value: &'a Value, path: &str) -> Vec<&'a str> {
    let mut values = vec![value];
    for part in path.split('.') {
        values = match part {
            "*" => values.into_iter().flat_map(|value| value.as_array().into_iter().flatten()).collect(),
            key => values.into_iter().filter_map(|value| value.get(key)).collect(),
        };
    }
    values.into_iter().filter_map(Value::as_str).collect()
}

/// The VIPs that the status of a Service names.
pub(super) fn vips(service: &Value) -> Vec<&str> {
    texts(service, "status.loadBalancer.ingress.*.ip")
}

/// The addresses that a pod names.
pub(super) fn pod_addresses(pod: &Value) -> Vec<&str> {
    texts(pod, "status.podIPs.*.ip")
}
