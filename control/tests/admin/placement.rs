//! Command line: what a change of manifests would move.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use tempfile::TempDir;
use vipgate::xds::publication::Publication;
use vipgate::xds::store::ResourceStore;
use vipgate_dataplane::policy::change::PolicyChange;
use vipgate_policy::compiler::{GatewayLocality, Peer, compile};
use vipgate_policy::manifest::{Manifests, UnsupportedKinds, read};
use vipgate_policy::yaml::Source;

use crate::gateway::group::group;
use crate::gateway::{Gateway, Worker, vipgate};

/// Gateways with these last letters; all but `d` as the testbed knows them.
fn manifests(gateways: &str) -> String {
    let gateway = |letter: char| {
        format!(
            "apiVersion: vipgate.io/v1alpha1\nkind: VipGateway\nmetadata: {{name: gw-{letter}}}\n\
             spec: {{node: node-of-gw-{letter}, zone: zone-1, peerAddress: 10.2.0.{}}}\n---\n",
            u32::from(letter)
        )
    };
    let endpoints: Vec<String> = (1..=40).map(|n| format!("{{addresses: [10.1.0.{n}]}}")).collect();
    let slice = |service: &str, endpoints: &[String]| {
        format!(
            "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\naddressType: IPv4\n\
             metadata: {{name: {service}, namespace: a, labels: {{kubernetes.io/service-name: {service}}}}}\n\
             endpoints: [{}]\n---\n",
            endpoints.join(", ")
        )
    };
    let service = |name: &str, vip: &str| {
        format!(
            "apiVersion: v1\nkind: Service\n\
             metadata: {{name: {name}, namespace: a, annotations: {{vipgate.io/egress: \"true\"}}}}\n\
             spec: {{type: LoadBalancer, ports: [{{port: 80}}]}}\nstatus: {{loadBalancer: {{ingress: [{{ip: {vip}}}]}}}}\n---\n"
        )
    };
    let mut text: String = gateways.chars().map(gateway).collect();
    text += "apiVersion: vipgate.io/v1alpha1\nkind: AddressPool\nmetadata: {name: bgp}\n\
             spec: {ranges: [198.51.100.0/24], announce: BGP}\n---\n";
    text += &service("wide", "198.51.100.1");
    text += &slice("wide", &endpoints);
    text += &service("one", "203.0.113.1");
    text
}

/// A folder with a file of manifests.
fn folder(text: &str) -> (TempDir, String) {
    let folder = TempDir::with_prefix("vipgate-placement-").unwrap();
    let path: PathBuf = folder.path().join("m.yaml");
    fs::write(&path, text).unwrap();
    let path = folder.path().display().to_string();
    (folder, path)
}

fn policy(text: &str) -> PolicyChange {
    let mut manifests = Manifests::default();
    read(&Arc::new(Source::new("m.yaml", text.to_owned())), UnsupportedKinds::Reject, &mut manifests);
    assert_eq!(manifests.diagnostics, []);
    let (placement, warnings) = compile(&manifests.objects).accept().unwrap();
    assert_eq!(warnings, []);
    let (nothing, mut store) = (Publication::default(), ResourceStore::default());
    let publication = nothing.next(placement.into()).unwrap();
    store.stage_resources(publication.stored(publication.changed_since(&nothing))).unwrap();
    store.update_for(&GatewayLocality::named("gw-a")).change
}

/// A gateway of three, with their policy in force.
fn one_of_three() -> Gateway {
    let workers = [Worker::Replies(vec![], 1), Worker::Replies(vec![], 1)];
    let gateway = Gateway::start_group(&workers, &policy(&manifests("abc")), group(&["gw-a", "gw-b"]), None);
    let mut status = (**gateway.state.policy.load()).clone();
    let with_address = |peer: &Peer| Peer { address: Some([10, 2, 0, peer.name.as_bytes()[3]].into()), ..peer.clone() };
    status.peers = status.peers.iter().map(with_address).collect();
    gateway.state.policy.store(Arc::new(status));
    gateway
}

#[test]
fn the_manifests_in_force_move_nothing() {
    let gateway = one_of_three();
    let (_folder, path) = folder(&manifests("abc"));
    assert_eq!(
        gateway.table(&["placement", "--dry-run", &path]),
        "nothing would move\n\
         of what stays: 0 of 1 VIPs, 0.0% of the ports of 1 distributed VIPs, 0 of 40 endpoints would move; nothing was \
         changed\n"
    );
    let diff = gateway.json(&["placement", "--dry-run", &path]);
    assert_eq!(diff["totals"]["moves_anything"], false);
    assert_eq!(diff["gateways"], serde_json::json!({"added": [], "removed": [], "changed": []}));
}

#[test]
fn an_added_gateway_gets_its_part_and_a_removed_ones_is_spread() {
    let gateway = one_of_three();
    let (_folder, path) = folder(&manifests("abcd"));
    let diff = gateway.json(&["placement", "--dry-run", &path]);
    assert_eq!(diff["gateways"]["added"], serde_json::json!(["gw-d"]));
    let all_to = |list: &str, to: &str| diff[list]["moved"].as_array().unwrap().iter().all(|it| it["to"] == to);
    assert!(all_to("ports", "gw-d") && all_to("endpoints", "gw-d") && all_to("vips", "gw-d"), "{diff}");
    let ports = diff["totals"]["ports_moved"].as_f64().unwrap();
    assert!((0.15..0.35).contains(&ports), "{ports}");
    assert!(diff["totals"]["endpoints_moved"].as_u64().unwrap() > 0, "{diff}");
    let shown = gateway.table(&["placement", "--dry-run", &path]);
    assert!(shown.starts_with("GATEWAY  CHANGE\ngw-d     added\n\n"), "{shown}");
    assert!(shown.contains("\nPORTS FROM  TO    SHARE  VIPS\ngw-a        gw-d  "), "{shown}");

    let (_folder, path) = folder(&manifests("ab"));
    let diff = gateway.json(&["placement", "--dry-run", &path]);
    assert_eq!(diff["gateways"]["removed"], serde_json::json!(["gw-c"]));
    let moved = diff["ports"]["moved"].as_array().unwrap();
    assert!(moved.len() == 2 && moved.iter().all(|it| it["from"] == "gw-c"), "{diff}");
}

#[test]
fn wrong_usage_and_invalid_manifests_end_with_2_and_a_missing_gateway_with_1() {
    let gateway = one_of_three();
    let (_folder, path) = folder(&manifests("abc"));
    let (code, stdout, stderr) = gateway.vipgate(&["placement", &path]);
    assert_eq!((code, stdout.as_str()), (2, ""));
    assert!(stderr.contains("use --dry-run"), "{stderr}");
    let (_folder, invalid) = folder(&manifests("abc").replace("announce: BGP", "announce: X"));
    let (code, stdout, stderr) = gateway.vipgate(&["placement", "--dry-run", &invalid]);
    let (check_code, _, of_check) = vipgate(&["check", &invalid]);
    assert_eq!((code, stdout.as_str(), &stderr), (check_code, "", &of_check), "as `vipgate check` says it");
    let (empty, nothing) = folder("");
    fs::remove_file(empty.path().join("m.yaml")).unwrap();
    let (code, _, stderr) = gateway.vipgate(&["placement", "--dry-run", &nothing]);
    assert!(code == 2 && stderr.contains("no manifests"), "{stderr}");
    let nobody = ["placement", "--dry-run", &path, "--socket", "/nonexistent/gateway.sock"];
    let (code, _, stderr) = vipgate(&nobody);
    assert!(code == 1 && stderr.contains("/nonexistent/gateway.sock"), "{stderr}");
}

#[test]
fn a_gateway_without_policy_has_no_placement() {
    let gateway = Gateway::start_waiting(&policy(&manifests("abc")), group(&["gw-a"]));
    let (_folder, path) = folder(&manifests("abc"));
    let (code, _, stderr) = gateway.vipgate(&["placement", "--dry-run", &path]);
    assert!(code == 1 && stderr.contains("still starting"), "{stderr}");
}
