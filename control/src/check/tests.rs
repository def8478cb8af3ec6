//! Checks of example files and of invalid files.

mod codes;

use std::fs::{create_dir_all, write};
use std::path::Path;

use super::*;
use crate::xds::fixtures::pki::{Authority, Identity};

fn conf(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../conf").join(name)
}

#[test]
fn the_example_configuration_is_valid() {
    let report = run_in(
        &conf(".."),
        &[conf("gateway.yaml"), conf("policyd.yaml"), conf("node.yaml"), conf("demo/policy")],
        None,
    )
    .0;
    assert_eq!(report.diagnostics, []);
    assert_eq!(report.exit_code(), 0);
    let what: Vec<_> = report.configurations.iter().map(|configuration| configuration.role.as_str()).collect();
    assert_eq!(what, ["gateway gw-a", "policyd", "node node-1"]);
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
    assert_eq!((policy.endpoints, policy.without_vip), (6, 0));
    let services: Vec<_> = policy.services.iter().map(|service| (service.name.as_str(), service.backends)).collect();
    assert_eq!(services, [("Service tenant-a/api", 4), ("Service tenant-b/web", 2)]);
    let text = report.to_string();
    assert!(text.contains("4 VIPs, 2 policies, 6 endpoints, 0 of them without a VIP"), "{text}");
    assert!(text.ends_with("\nerrors: 0, warnings: 0\n"), "{text}");
    assert!(serde_json::to_string(&report).unwrap().contains("\"version\""));
}

#[test]
fn the_example_of_several_gateways_is_valid() {
    let report = run(&[conf("demo/group")], None);
    assert_eq!(report.diagnostics, []);
    let policy = report.policy.as_ref().unwrap();
    let vips: Vec<_> = policy.vips.iter().map(|vip| vip.address.as_str()).collect();
    assert_eq!((vips, policy.endpoints, policy.without_vip), (vec!["192.0.2.10", "2001:db8:2::10"], 4, 0));
}

#[test]
fn all_of_conf_can_be_checked_at_once() {
    let report = run_in(&conf(".."), &[conf("")], None).0;
    assert_eq!(report.diagnostics, []);
    assert_eq!(report.configurations.len(), 4);
}

#[test]
fn all_diagnostics_are_reported_in_order() {
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
    let report = run(&[dir.path().to_owned(), at("gateway.yaml"), "/nonexistent".into()], None);
    assert_eq!(report.exit_code(), 2);
    let prefix = format!("{}/", dir.path().display());
    let messages: Vec<_> =
        report.diagnostics.iter().map(|diagnostic| diagnostic.to_string().replace(&prefix, "")).collect();
    for (message, expected) in messages.iter().zip([
        "/nonexistent: can't be read: ",
        "gateway.yaml:2: interface: unknown field, did you mean `interfaces`?",
        "m/1.yaml:3: metadata.annotations[vipgate.io/egress]: must be \"true\" or \"false\", is \"yes\"",
        "m/2.yaml:2: kind: warning: `Secret` is not a supported kind and is ignored",
        "m/2.yaml:",
        "m/3.json:1: kind: is missing",
        "policyd.yaml:2: source.files: at least one",
    ]) {
        assert!(message.starts_with(expected), "{message}\nexpected: {expected}");
    }
    assert_eq!(messages.len(), 7, "{messages:#?}");
}

/// Exit code and diagnostics of a file.
fn check_text(name: &str, text: &str) -> (u8, Vec<String>) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join(name);
    write(&file, text).unwrap();
    let report = run(std::slice::from_ref(&file), None);
    let prefix = format!("{}/", dir.path().display());
    (report.exit_code(), report.diagnostics.iter().map(|it| it.to_string().replace(&prefix, "")).collect())
}

fn gateway_with_tls(ca: &Path, own: &Identity) -> String {
    let Identity { cert, key } = own;
    let files = [ca, cert, key].map(|path| path.display().to_string());
    let [ca, cert, key] = files;
    format!(
        "name: gw-a\ninterfaces: [{{name: a, role: both}}]\npolicy:\n  server:\n    url: \"https://x:1\"\n    \
         cache: /tmp/c\n    ca: {ca}\n    cert: {cert}\n    key: {key}\n"
    )
}

#[test]
fn tls_files_of_a_client_are_checked() {
    let ca = Authority::new("ca");
    let (good, other) = (ca.issue(&["gw-a"]), ca.issue(&["gw-b"]));
    assert_eq!(check_text("gateway.yaml", &gateway_with_tls(&ca.ca(), &good)), (0, vec![]));
    let missing = ca.ca().with_file_name("missing");
    let with = |cert: &Path, key: &Path| Identity { cert: cert.to_owned(), key: key.to_owned() };
    let rejected = |ca: &Path, own: &Identity, location: &str, reason: &str| {
        expect_one(&gateway_with_tls(ca, own), 2, &format!("gateway.yaml:{location}: "), reason);
    };
    let unreadable = "missing: can't be read: No such file";
    rejected(&missing, &good, "7: policy.server.ca", unreadable);
    rejected(&ca.ca(), &with(&missing, &good.key), "8: policy.server.cert", unreadable);
    rejected(&ca.ca(), &with(&good.cert, &missing), "9: policy.server.key", unreadable);
    rejected(&ca.ca(), &with(&good.cert, &other.key), "8: policy.server.cert", "KeyMismatch");
    rejected(&ca.file("nothing.pem", "hello"), &good, "7: policy.server.ca", "holds no certificate (PEM)");
    let text = gateway_with_tls(&ca.ca(), &other);
    expect_one(&text, 0, "gateway.yaml:8: policy.server.cert: warning: ", "is of gw-b, not of gw-a");
}

/// Checks a `gateway.yaml`, and expects an exit code and one diagnostic.
fn expect_one(text: &str, code: u8, location: &str, reason: &str) {
    let (got, messages) = check_text("gateway.yaml", text);
    assert_eq!(got, code, "{messages:?}");
    assert!(
        messages.len() == 1 && messages[0].starts_with(location) && messages[0].contains(reason),
        "{messages:?}\n{location}{reason}"
    );
}

#[test]
fn tls_files_of_a_server_are_checked() {
    let ca = Authority::new("ca");
    let (good, expired) = (ca.issue(&["gw-a"]), ca.issue_expired(&["old"]));
    let text = |Identity { cert, key }: &Identity| {
        format!(
            "listen: \"127.0.0.1:1\"\nsource: {{etcd: {{endpoints: [\"http://a:1\"]}}}}\ntls: {{cert: {}, key: {}}}\n",
            cert.display(),
            key.display()
        )
    };
    let (code, messages) = check_text("policyd.yaml", &text(&expired));
    assert!(code == 0 && messages.len() == 1, "{messages:?}");
    assert!(
        messages[0].starts_with("policyd.yaml:3: tls.cert: warning: ") && messages[0].contains("expired at "),
        "{messages:?}"
    );
    let (code, messages) = check_text("policyd.yaml", &text(&Identity { key: good.key, ..expired }));
    assert!(code == 2 && messages.iter().any(|it| it.contains("KeyMismatch")), "{messages:?}");
}

#[test]
fn missing_sources_are_reported() {
    let gateway = "name: a\ninterfaces: [{name: a, role: both}]\npolicy: {files: [/nonexistent/policy]}\n";
    let (code, messages) = check_text("gateway.yaml", gateway);
    assert_eq!(code, 2);
    assert!(
        messages[0].starts_with("gateway.yaml:3: policy.files[0]: /nonexistent/policy: can't be read: No such"),
        "{messages:?}"
    );
    let (code, messages) =
        check_text("policyd.yaml", "listen: \"127.0.0.1:1\"\nsource: {files: [/tmp, /nonexistent/x]}\n");
    assert_eq!(code, 2);
    assert!(messages[0].starts_with("policyd.yaml:2: source.files[1]: /nonexistent/x: can't be read"), "{messages:?}");
}

#[test]
fn etcd_with_tls_is_rejected_with_a_workaround() {
    let text = "listen: \"127.0.0.1:1\"\nsource: {etcd: {endpoints: [\"http://a:1\", \"https://b:2379\"]}}\n";
    let (code, messages) = check_text("policyd.yaml", text);
    assert_eq!((code, messages.len()), (2, 1), "{messages:?}");
    let start =
        "policyd.yaml:2: source.etcd.endpoints[1]: https://b:2379: https isn't supported for etcd by this version";
    assert!(messages[0].starts_with(start) && messages[0].contains("etcd grpc-proxy start"), "{messages:?}");
}

#[test]
fn a_cluster_dump_may_have_unsupported_kinds() {
    let item = |kind: &str, n: u8| {
        let head = format!("- apiVersion: v1\n  kind: {kind}\n  metadata: {{name: x{n}, namespace: t}}\n");
        if kind == "Service" { format!("{head}  spec: {{ports: [{{port: 80}}]}}\n") } else { head }
    };
    let items = [item("Secret", 1), item("ConfigMap", 2), item("Secret", 3), item("Service", 4)].concat();
    let (code, messages) = check_text("dump.yaml", &format!("apiVersion: v1\nitems:\n{items}kind: List\n"));
    assert_eq!(code, 0, "{messages:?}");
    assert_eq!(messages.len(), 2, "one for each kind: {messages:?}");
    assert!(
        messages[0].starts_with("dump.yaml:4: items[0].kind: warning: `Secret` is not a supported kind and is ignored")
    );
    // An unknown kind in vipgate's API group is an error.
    let ours = "apiVersion: vipgate.io/v1alpha1\nkind: EgresPolicy\nmetadata: {name: x}\n";
    let (code, messages) = check_text("ours.yaml", ours);
    assert!(code == 2 && messages[0].contains("`EgresPolicy` is not a supported kind; supported: "), "{messages:?}");
    // Truncated output of kubectl.
    let (code, messages) = check_text("cut.yaml", &format!("apiVersion: v1\nitems:\n{items}"));
    assert_eq!(code, 2);
    let start =
        "cut.yaml:15: kind: is missing: the document is probably truncated at line 15, since a List has its kind after";
    assert!(messages.len() == 1 && messages[0].starts_with(start), "{messages:?}");
}

#[test]
fn manifests_are_checked_for_the_tenancy_of_the_configuration_or_of_the_argument() {
    let dir = tempfile::tempdir().unwrap();
    let manifest = "apiVersion: vipgate.io/v1alpha1\nkind: EgressPolicy\nmetadata: {name: p}\n\
                    spec: {selectors: [{podSelector: {}}], addresses: [203.0.113.1]}\n";
    write(dir.path().join("m.yaml"), manifest).unwrap();
    let policyd = |tenancy: &str| format!("listen: \"127.0.0.1:1\"\nsource: {{kubernetes: {{}}}}\n{tenancy}");
    for (configured, argument, expected) in [
        (None, None, 1),
        (None, Some(Tenancy::Open), 0),
        (Some(""), None, 1),
        (Some("tenancy: open"), None, 0),
        (Some("tenancy: open"), Some(Tenancy::Strict), 1),
        (Some("tenancy: strict"), Some(Tenancy::Open), 0),
    ] {
        let file = dir.path().join("policyd.yaml");
        if let Some(tenancy) = configured {
            write(&file, policyd(tenancy)).unwrap();
        }
        let report = run(&[dir.path().to_owned()], argument);
        let errors: Vec<_> = report.diagnostics.iter().filter(|it| it.is_error()).map(|it| it.code).collect();
        assert_eq!(errors, vec![Code::AddressOutsidePools; expected], "{configured:?} {argument:?}");
    }
}
