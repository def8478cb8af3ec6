use super::*;

fn pool(status: &Value) -> DynamicObject {
    let metadata = json!({"name": "public", "resourceVersion": "7"});
    let document = json!({
        "apiVersion": "vipgate.io/v1alpha1", "kind": "AddressPool", "metadata": metadata, "status": status,
    });
    serde_json::from_value(document).unwrap()
}

#[test]
fn what_is_written_to_a_pool_is_read_again() {
    let lines = ["192.0.2.1 EgressPolicy t/p", "192.0.2.2 Service t/s 2026-01-01T00:00:00.123456789Z"];
    let record = AddressRecord::from_lines(lines).unwrap();
    let patch = record_patch("6", &record);
    assert_eq!(patch, json!({"metadata": {"resourceVersion": "6"}, "status": {"addresses": lines}}));
    let (name, listed) = read_pool(pool(&patch["status"])).unwrap();
    assert_eq!((&*name, &*listed.version, listed.record), ("public", "7", record));
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
fn a_service_without_addresses_has_no_ingress() {
    let patch = service_patch("6", &["192.0.2.1".parse().unwrap()]);
    assert_eq!(patch["status"], json!({"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}}));
    assert_eq!(service_patch("6", &[])["status"], json!({"loadBalancer": {"ingress": null}}));
}
