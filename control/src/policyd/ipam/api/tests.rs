use vipgate_policy::manifest::UnclassedServices;

use super::*;

fn pool(status: &Value) -> DynamicObject {
    let metadata = json!({"name": "public", "uid": "u", "resourceVersion": "7"});
    let document = json!({
        "apiVersion": "vipgate.io/v1alpha1", "kind": "AddressPool", "metadata": metadata, "status": status,
    });
    serde_json::from_value(document).unwrap()
}

#[test]
fn what_is_written_to_a_pool_is_read_again() {
    let lines = ["192.0.2.1 EgressPolicy t/p", "192.0.2.2 Service t/s 2026-01-01T00:00:00.123456789Z"];
    let record = AddressRecord::from_lines(lines).unwrap();
    let (name, listed) = read_pool(pool(&json!({"used": 1}))).unwrap();
    let written = listed.write(&name, &record).document;
    assert_eq!(written["status"], json!({"addresses": lines}));
    assert_eq!(written["metadata"], json!({"name": "public", "uid": "u", "resourceVersion": "7"}));
    assert!(keeps(&pool(&written["status"]), &record));
    assert!(!keeps(&pool(&json!({"used": 1})), &record), "a cluster that drops it");
    let empty = AddressRecord::default();
    assert!(!listed.has_record && keeps(&pool(&listed.write(&name, &empty).document["status"]), &empty));
}

#[test]
fn what_is_no_record_is_left_out() {
    let lines = ["192.0.2.1", "192.0.2.2 Service t/s"];
    let (_, listed) = read_pool(pool(&json!({"addresses": lines, "used": 1}))).unwrap();
    assert_eq!(listed.record.lines().collect::<Vec<_>>(), lines[1..]);
    for status in [json!(null), json!({}), json!({"addresses": "192.0.2.2 Service t/s"}), json!({"addresses": [7]})] {
        assert_eq!(read_pool(pool(&status)).unwrap().1.record, AddressRecord::default(), "{status}");
    }
}

#[test]
fn a_service_without_addresses_has_no_field_of_its_manager() {
    let service = json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": "web", "namespace": "t", "uid": "u", "resourceVersion": "6"},
        "spec": {"type": "LoadBalancer"}, "status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}},
    });
    let request = ServiceRequest::read(&serde_json::from_value(service).unwrap(), UnclassedServices::Serve).unwrap();
    let listed = ListedService { request, uid: "u".into(), version: "6".to_owned() };
    let written = listed.write(&["192.0.2.1".parse().unwrap()]).document;
    assert_eq!(written["status"], json!({"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}}));
    let metadata = json!({"name": "web", "namespace": "t", "uid": "u", "resourceVersion": "6"});
    let given_up = json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata});
    assert_eq!(listed.write(&[]).document, given_up);
}
