//! Files as people have them lying about, checked together.

use super::*;
use std::fs::{create_dir_all, write};
use std::path::Path;

fn conf(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../conf").join(name)
}

#[test]
fn the_examples_are_fine() {
    let report = run(&[conf("gateway.yaml"), conf("policyd.yaml"), conf("demo/policy")]);
    assert_eq!(report.complaints, []);
    assert_eq!(report.exit_code(), 0);
    let what: Vec<_> = report.configurations.iter().map(|configuration| configuration.what.as_str()).collect();
    assert_eq!(what, ["gateway gw-a", "policyd"]);
    let policy = report.policy.as_ref().unwrap();
    let vips: Vec<_> = policy
        .vips
        .iter()
        .map(|vip| (vip.address.as_str(), vip.name.as_str(), vip.reserved_ports.as_slice()))
        .collect();
    assert_eq!(
        vips,
        [
            ("203.0.113.10", "Service tenant-a/api", &[53, 80][..]),
            ("203.0.113.20", "Service tenant-b/web", &[443][..]),
            ("2001:db8:113::10", "Service tenant-a/api", &[53, 80][..]),
            ("2001:db8:113::20", "Service tenant-b/web", &[443][..]),
        ]
    );
    let policies: Vec<_> = policy.policies.iter().map(|policy| (policy.name.as_str(), policy.endpoints)).collect();
    assert_eq!(policies, [("EgressPolicy tenant-b/web", 2), ("Service tenant-a/api", 4)]);
    assert_eq!((policy.endpoints, policy.closed), (6, 0));
    let services: Vec<_> = policy.services.iter().map(|service| (service.name.as_str(), service.backends)).collect();
    assert_eq!(services, [("Service tenant-a/api", 4), ("Service tenant-b/web", 2)]);
    let text = report.to_string();
    assert!(text.contains("4 VIPs, 2 policies, 6 endpoints, 0 of them without a VIP"), "{text}");
    assert!(text.ends_with("\nerrors: 0, warnings: 0\n"), "{text}");
    assert!(serde_json::to_string(&report).unwrap().contains("\"version\""));
}

#[test]
fn the_example_of_several_gateways_is_fine() {
    let report = run(&[conf("demo/group")]);
    assert_eq!(report.complaints, []);
    let policy = report.policy.as_ref().unwrap();
    let vips: Vec<_> = policy.vips.iter().map(|vip| vip.address.as_str()).collect();
    assert_eq!((vips, policy.endpoints, policy.closed), (vec!["192.0.2.10", "2001:db8:2::10"], 4, 0));
}

#[test]
fn all_of_conf_can_be_checked_at_once() {
    let report = run(&[conf("")]);
    assert_eq!(report.complaints, []);
    assert_eq!(report.configurations.len(), 3);
}

#[test]
fn every_complaint_of_every_file_is_told_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    create_dir_all(at("m")).unwrap();
    write(at("gateway.yaml"), "name: a\ninterface: []\n").unwrap();
    write(at("policyd.yaml"), "listen: \"127.0.0.1:1\"\nsource: {files: []}\n").unwrap();
    write(
        at("m/1.yaml"),
        "apiVersion: v1\nkind: Service\nmetadata: {name: s, annotations: {vipgate.io/egress: \"yes\"}}\n",
    )
    .unwrap();
    write(at("m/2.yaml"), "apiVersion: v1\nkind: Secret\nmetadata: {name: s}\n---\na: [\n").unwrap();
    write(at("m/3.json"), "{\"dashboard\": {}}").unwrap();
    let report = run(&[dir.path().to_owned(), at("gateway.yaml"), "/nonexistent".into()]);
    assert_eq!(report.exit_code(), 2);
    let prefix = format!("{}/", dir.path().display());
    let said: Vec<_> = report.complaints.iter().map(|complaint| complaint.to_string().replace(&prefix, "")).collect();
    for (said, expected) in said.iter().zip([
        "/nonexistent: can't be read: ",
        "gateway.yaml:2: interface: unknown field, did you mean `interfaces`?",
        "m/1.yaml:3: metadata.annotations[vipgate.io/egress]: must be \"true\" or \"false\", is \"yes\"",
        "m/2.yaml:2: kind: `Secret` means nothing to vipgate",
        "m/2.yaml:",
        "m/3.json:1: kind: is missing",
        "policyd.yaml:2: source.files: at least one",
    ]) {
        assert!(said.starts_with(expected), "{said}\nexpected: {expected}");
    }
    assert_eq!(said.len(), 7, "{said:#?}");
}
