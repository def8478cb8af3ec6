//! Files as people have them lying about, checked together.

use super::*;
use std::fs::{create_dir_all, write};
use std::path::Path;

use crate::xds::fixtures::pki::{Authority, Identity};

fn conf(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../conf").join(name)
}

#[test]
fn the_examples_are_fine() {
    let report = run_in(&conf(".."), &[conf("gateway.yaml"), conf("policyd.yaml"), conf("demo/policy")]);
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
    let report = run_in(&conf(".."), &[conf("")]);
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
        "m/2.yaml:2: kind: warning: `Secret` means nothing to vipgate and is ignored",
        "m/2.yaml:",
        "m/3.json:1: kind: is missing",
        "policyd.yaml:2: source.files: at least one",
    ]) {
        assert!(said.starts_with(expected), "{said}\nexpected: {expected}");
    }
    assert_eq!(said.len(), 7, "{said:#?}");
}

/// What is said of a configuration.
fn said_of(name: &str, text: &str) -> (u8, Vec<String>) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join(name);
    write(&file, text).unwrap();
    let report = run(std::slice::from_ref(&file));
    let prefix = format!("{}/", dir.path().display());
    (report.exit_code(), report.complaints.iter().map(|it| it.to_string().replace(&prefix, "")).collect())
}

fn served(ca: &Path, own: &Identity) -> String {
    let Identity { cert, key } = own;
    let files = [ca, cert, key].map(|path| path.display().to_string());
    let [ca, cert, key] = files;
    format!(
        "name: gw-a\ninterfaces: [{{name: a, role: both}}]\npolicy:\n  server:\n    url: \"https://x:1\"\n    \
         cache: /tmp/c\n    ca: {ca}\n    cert: {cert}\n    key: {key}\n"
    )
}

#[test]
fn files_of_tls_are_looked_at() {
    let ca = Authority::new("ca");
    let (good, other) = (ca.issue(&["gw-a"]), ca.issue(&["gw-b"]));
    assert_eq!(said_of("gateway.yaml", &served(&ca.ca(), &good)), (0, vec![]));
    let missing = ca.ca().with_file_name("missing");
    let cases = [
        (
            missing.clone(),
            good.clone(),
            2,
            "gateway.yaml:7: policy.server.ca: ",
            "missing: can't be read: No such file",
        ),
        (
            ca.ca(),
            Identity { cert: missing.clone(), ..good.clone() },
            2,
            "gateway.yaml:8: policy.server.cert: ",
            "can't be read",
        ),
        (ca.ca(), Identity { key: missing, ..good.clone() }, 2, "gateway.yaml:9: policy.server.key: ", "can't be read"),
        (
            ca.ca(),
            Identity { key: other.key.clone(), ..good.clone() },
            2,
            "gateway.yaml:8: policy.server.cert: ",
            "KeyMismatch",
        ),
        (
            ca.file("nothing.pem", "hello"),
            good.clone(),
            2,
            "gateway.yaml:7: policy.server.ca: ",
            "holds no certificate (PEM)",
        ),
        (ca.ca(), other, 0, "gateway.yaml:8: policy.server.cert: warning: ", "is of gw-b, not of gw-a"),
    ];
    for (ca, own, code, place, words) in cases {
        let (got, said) = said_of("gateway.yaml", &served(&ca, &own));
        assert_eq!(got, code, "{said:?}");
        assert!(said.len() == 1 && said[0].starts_with(place) && said[0].contains(words), "{said:?}\n{place}{words}");
    }
    let old = ca.issue_expired(&["old"]);
    let text = |Identity { cert, key }: &Identity| {
        format!(
            "listen: \"127.0.0.1:1\"\nsource: {{etcd: {{endpoints: [\"http://a:1\"]}}}}\ntls: {{cert: {}, key: {}}}\n",
            cert.display(),
            key.display()
        )
    };
    let (code, said) = said_of("policyd.yaml", &text(&old));
    assert!(code == 0 && said.len() == 1, "{said:?}");
    assert!(said[0].starts_with("policyd.yaml:3: tls.cert: warning: ") && said[0].contains("expired at "), "{said:?}");
    let (code, said) = said_of("policyd.yaml", &text(&Identity { key: good.key, ..old }));
    assert!(code == 2 && said.iter().any(|it| it.contains("KeyMismatch")), "{said:?}");
}

#[test]
fn sources_that_are_not_there_are_named() {
    let gateway = "name: a\ninterfaces: [{name: a, role: both}]\npolicy: {files: [/nonexistent/policy]}\n";
    let (code, said) = said_of("gateway.yaml", gateway);
    assert_eq!(code, 2);
    assert!(
        said[0].starts_with("gateway.yaml:3: policy.files[0]: /nonexistent/policy: can't be read: No such"),
        "{said:?}"
    );
    let (code, said) = said_of("policyd.yaml", "listen: \"127.0.0.1:1\"\nsource: {files: [/tmp, /nonexistent/x]}\n");
    assert_eq!(code, 2);
    assert!(said[0].starts_with("policyd.yaml:2: source.files[1]: /nonexistent/x: can't be read"), "{said:?}");
}

#[test]
fn etcd_with_tls_is_refused_with_the_remedy() {
    let text = "listen: \"127.0.0.1:1\"\nsource: {etcd: {endpoints: [\"http://a:1\", \"https://b:2379\"]}}\n";
    let (code, said) = said_of("policyd.yaml", text);
    assert_eq!((code, said.len()), (2, 1), "{said:?}");
    let start =
        "policyd.yaml:2: source.etcd.endpoints[1]: https://b:2379: https isn't supported for etcd by this version";
    assert!(said[0].starts_with(start) && said[0].contains("etcd grpc-proxy start"), "{said:?}");
}

#[test]
fn a_dump_of_a_cluster_may_hold_what_means_nothing_here() {
    let item = |kind: &str, n: u8| {
        let head = format!("- apiVersion: v1\n  kind: {kind}\n  metadata: {{name: x{n}, namespace: t}}\n");
        if kind == "Service" { format!("{head}  spec: {{ports: [{{port: 80}}]}}\n") } else { head }
    };
    let items = [item("Secret", 1), item("ConfigMap", 2), item("Secret", 3), item("Service", 4)].concat();
    let (code, said) = said_of("dump.yaml", &format!("apiVersion: v1\nitems:\n{items}kind: List\n"));
    assert_eq!(code, 0, "{said:?}");
    assert_eq!(said.len(), 2, "one for each kind: {said:?}");
    assert!(
        said[0].starts_with("dump.yaml:4: items[0].kind: warning: `Secret` means nothing to vipgate and is ignored")
    );
    // A kind of our own that there isn't is misspelt.
    let ours = "apiVersion: vipgate.io/v1alpha1\nkind: EgresPolicy\nmetadata: {name: x}\n";
    let (code, said) = said_of("ours.yaml", ours);
    assert!(code == 2 && said[0].contains("`EgresPolicy` means nothing to vipgate; known are"), "{said:?}");
    // What kubectl hadn't finished to write.
    let (code, said) = said_of("cut.yaml", &format!("apiVersion: v1\nitems:\n{items}"));
    assert_eq!(code, 2);
    let start =
        "cut.yaml:15: kind: is missing: the document looks cut short at line 15, since a List has its kind behind";
    assert!(said.len() == 1 && said[0].starts_with(start), "{said:?}");
}
