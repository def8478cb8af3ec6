//! Nodes of flannel's VXLAN backend.

use super::*;

const BACKEND_TYPE: &str = "backend-type: vxlan";
const DATA: &str = r#"backend-data: '{"VNI":1,"VtepMAC":"be:16:5e:00:00:01"}'"#;

/// A Node with flannel's annotations, an internal address of each family, and prefixes.
fn node(name: &str, annotations: &[&str]) -> String {
    let annotations: Vec<_> = annotations.iter().map(|it| format!("flannel.alpha.coreos.com/{it}")).collect();
    let last = name.as_bytes()[name.len() - 1] - b'0';
    format!(
        "apiVersion: v1\nkind: Node\nmetadata:\n  name: {name}\n  annotations:\n    {}\n\
         spec: {{podCIDRs: [10.244.{last}.0/24, \"fd00:{last}::/64\"]}}\n\
         status: {{addresses: [{{type: InternalIP, address: \"2001:db8::{last}\"}}, {{type: InternalIP, address: 192.0.2.{last}}}]}}\n",
        annotations.join("\n    ")
    )
}

/// `name address vni mac [prefixes]` of each node, and the diagnostics without their files.
fn compiled_nodes(documents: &[String]) -> (Vec<String>, Vec<String>) {
    let got = compiled(documents);
    let text = |node: &vipgate_dataplane::policy::spec::NodeSpec| {
        let prefixes: Vec<_> = node.prefixes.iter().map(ToString::to_string).collect();
        let mac = node.mac.map(|byte| format!("{byte:02x}")).join(":");
        format!("{} {} {} {mac} [{}]", node.name, node.address, node.vni, prefixes.join(" "))
    };
    let found = messages(&got).iter().map(|it| it.split_once(": ").unwrap().1.to_owned()).collect();
    (got.placement.nodes.iter().map(text).collect(), found)
}

#[test]
fn nodes_with_flannels_annotations_are_overlay_nodes() {
    let (nodes, found) = compiled_nodes(&[
        node("n1", &[BACKEND_TYPE, DATA, "public-ip: 192.0.2.101", "backend-v6-data: 'null'"]),
        node("n2", &[BACKEND_TYPE, r#"backend-data: '{"VtepMAC":"be:16:5e:00:00:02"}'"#]),
        node(
            "n3",
            &[BACKEND_TYPE, "backend-data: 'null'", r#"backend-v6-data: '{"VNI":9,"VtepMAC":"be:16:5e:00:00:03"}'"#],
        ),
        node("n4", &["backend-type: host-gw", DATA]),
        node("n5", &[BACKEND_TYPE]),
    ]);
    assert_eq!(found, Vec::<String>::new());
    assert_eq!(
        nodes,
        [
            "n1 192.0.2.101:8472 1 be:16:5e:00:00:01 [10.244.1.0/24 fd00:1::/64]",
            "n2 192.0.2.2:8472 1 be:16:5e:00:00:02 [10.244.2.0/24 fd00:2::/64]",
            "n3 [2001:db8::3]:8472 9 be:16:5e:00:00:03 [10.244.3.0/24 fd00:3::/64]",
        ]
    );
}

#[test]
fn broken_annotations_of_flannel_are_warnings() {
    let data = "metadata.annotations[flannel.alpha.coreos.com/backend-data]: warning: ";
    let public = "metadata.annotations[flannel.alpha.coreos.com/public-ip]: warning: ";
    for (annotations, expected) in [
        (["backend-data: '{'", "a: b"], format!("{data}EOF while parsing an object at line 1 column 1")),
        (["backend-data: '{\"VNI\":1}'", "a: b"], format!("{data}missing field `VtepMAC` at line 1 column 9")),
        (
            ["backend-data: '{\"VtepMAC\":\"ff:ff:ff:ff:ff:ff\"}'", "a: b"],
            format!("{data}`ff:ff:ff:ff:ff:ff` is not a unicast MAC address"),
        ),
        (
            ["backend-data: '{\"VNI\":16777216,\"VtepMAC\":\"be:16:5e:00:00:01\"}'", "a: b"],
            format!("{data}VNI 16777216 has more than 24 bits"),
        ),
        ([DATA, "public-ip: fd00::1"], format!("{public}`fd00::1` is not an IPv4 address of a node")),
    ] {
        let (nodes, found) = compiled_nodes(&[node("n1", &[BACKEND_TYPE, annotations[0], annotations[1]])]);
        assert_eq!((nodes, found), (Vec::new(), vec![expected]));
    }
}

#[test]
fn an_overlay_node_manifest_precedes_flannels_annotations_and_conflicts_are_warnings() {
    let overlay = "apiVersion: vipgate.io/v1alpha1\nkind: OverlayNode\nmetadata: {name: n1}\n\
                   spec: {address: 192.0.2.2, vni: 7, mac: \"02:00:00:00:00:01\", podCIDRs: [10.244.3.0/24]}\n";
    let (nodes, found) = compiled_nodes(&[
        node("n1", &[BACKEND_TYPE, DATA]),
        node("n2", &[BACKEND_TYPE, DATA]),
        node("n3", &[BACKEND_TYPE, DATA]),
        overlay.to_owned(),
    ]);
    assert_eq!(
        nodes,
        [
            "n1 192.0.2.2:8472 7 02:00:00:00:00:01 [10.244.3.0/24]",
            "n3 192.0.2.3:8472 1 be:16:5e:00:00:01 [fd00:3::/64]"
        ]
    );
    assert_eq!(
        found,
        [
            "status.addresses[1].address: warning: 192.0.2.2 is already used by OverlayNode n1",
            "spec.podCIDRs[0]: warning: 10.244.3.0/24 is already used by OverlayNode n1",
        ]
    );
}
