//! Nodes that run the agent: their tunnel endpoints, prefixes and pods.

use vipgate_dataplane::policy::spec::NodeSpec;

use super::*;

fn with_agents() -> Options {
    let node_agents = Some(NodeAgents { port: 8473, vni: 7, secret: None });
    Options { tenancy: Tenancy::Open, node_agents, ..Options::default() }
}

/// A Node with these addresses (`type address`) and fields of its spec.
fn node(name: &str, addresses: &[&str], spec: &str) -> String {
    let address = |text: &&str| {
        let (kind, address) = text.split_once(' ').unwrap();
        format!("{{type: {kind}, address: \"{address}\"}}")
    };
    let addresses: Vec<_> = addresses.iter().map(address).collect();
    format!(
        "apiVersion: v1\nkind: Node\nmetadata: {{name: {name}}}\nspec: {{{spec}}}\nstatus: {{addresses: [{}]}}\n",
        addresses.join(", ")
    )
}

fn pod_on(node: &str, name: &str, address: &str) -> String {
    pod("a", name, "app: web", address).replace("containers", &format!("nodeName: {node}, containers"))
}

fn compile_agents(documents: &[String]) -> Compiled {
    compile_for(with_agents(), &objects(&documents.join("---\n")))
}

fn messages_of(compiled: &Compiled) -> Vec<String> {
    compiled.diagnostics.iter().map(ToString::to_string).collect()
}

/// `name address vni [prefixes]` of each node.
fn nodes(specs: &[NodeSpec]) -> Vec<String> {
    let text = |it: &NodeSpec| {
        let prefixes: Vec<_> = it.prefixes.iter().map(ToString::to_string).collect();
        format!("{} {} {} [{}]", it.name, it.address, it.vni, prefixes.join(" "))
    };
    specs.iter().map(text).collect()
}

/// `node: address name, ..` of each node.
fn pods(placement: &Placement) -> Vec<String> {
    let text = |it: &Arc<AgentNode>| {
        let pods: Vec<_> = it.pods.iter().map(|(address, name)| format!("{address} {name}")).collect();
        format!("{}: {}", it.tunnel.name, pods.join(", "))
    };
    placement.agents.iter().map(text).collect()
}

#[test]
fn each_node_with_an_internal_address_is_an_overlay_node() {
    let documents = [
        node("n2", &["ExternalIP 198.51.100.2", "InternalIP 192.0.2.2"], "podCIDR: 10.244.2.0/24"),
        node(
            "n1",
            &["Hostname n1", "InternalIP 127.0.0.1", "InternalIP 192.0.2.1", "InternalIP fd00::1"],
            "podCIDR: 10.244.1.0/24, podCIDRs: [10.244.1.0/24, \"fd00:244:1::/64\"]",
        ),
        node("n3", &["ExternalIP 198.51.100.3"], ""),
    ];
    let got = compile_agents(&documents);
    assert_eq!(
        nodes(&got.placement.nodes),
        ["n1 192.0.2.1:8473 7 [10.244.1.0/24 fd00:244:1::/64]", "n2 192.0.2.2:8473 7 [10.244.2.0/24]"]
    );
    assert!(got.placement.nodes.iter().all(|node| node.mac == NODE_AGENT_MAC));
    assert_eq!(
        messages_of(&got),
        [
            "m.yaml:17: status.addresses: warning: has no address of type InternalIP: its agent's tunnels have no endpoint [VG0608]"
        ]
    );
    let addresses = &got.placement.cluster.as_ref().unwrap().node_addresses;
    let expected = ["127.0.0.1", "192.0.2.1", "192.0.2.2", "198.51.100.2", "198.51.100.3", "fd00::1"].map(ip);
    assert!(addresses.iter().eq(&expected), "{addresses:?}");
    // Without the setting nothing of it exists.
    let without = compile_for(Tenancy::Open, &objects(&documents.join("---\n")));
    assert_eq!((without.placement.nodes.len(), without.placement.agents.len(), without.diagnostics.len()), (0, 0, 0));
    assert!(without.placement.cluster.unwrap().node_addresses.is_empty());
}

#[test]
fn an_overlay_node_manifest_precedes_the_node_of_its_name_and_conflicts_are_errors_of_the_second_manifest() {
    let overlay = |name: &str, address: &str, cidr: &str| {
        format!(
            "apiVersion: vipgate.io/v1alpha1\nkind: OverlayNode\nmetadata: {{name: {name}}}\n\
             spec: {{address: {address}, vni: 9, mac: \"02:00:00:00:00:01\", podCIDRs: [{cidr}]}}\n"
        )
    };
    let got = compile_agents(&[
        node("n1", &["InternalIP 192.0.2.1"], "podCIDR: 10.244.1.0/24"),
        overlay("n1", "192.0.2.11", "10.9.1.0/24"),
        pod_on("n1", "x", "10.9.1.1"),
    ]);
    assert_eq!(nodes(&got.placement.nodes), ["n1 192.0.2.11:8472 9 [10.9.1.0/24]"]);
    assert_eq!(pods(&got.placement), ["n1: 10.9.1.1 a/x"]);
    let got = compile_agents(&[
        node("n1", &["InternalIP 192.0.2.1"], "podCIDR: 10.244.1.0/24"),
        node("n2", &["InternalIP 192.0.2.1"], "podCIDR: 10.244.2.0/24"),
        node("n3", &["InternalIP 192.0.2.3"], "podCIDRs: [10.244.1.0/24]"),
    ]);
    assert_eq!(
        messages_of(&got),
        [
            "m.yaml:11: status.addresses[0].address: 192.0.2.1 is already used by Node n1 [VG0607]",
            "m.yaml:16: spec.podCIDRs[0]: 10.244.1.0/24 is already used by Node n1 [VG0607]",
        ]
    );
}

#[test]
fn the_pods_of_a_node_are_those_on_it_and_their_addresses_outside_of_its_prefixes_are_prefixes() {
    let on_host = pod_on("n1", "host", "192.0.2.1").replace("nodeName", "hostNetwork: true, nodeName");
    let got = compile_agents(&[
        node("n1", &["InternalIP 192.0.2.1"], "podCIDR: 10.244.1.0/24"),
        node("n2", &["InternalIP 192.0.2.2"], ""),
        pod_on("n1", "a", "10.244.1.9"),
        pod_on("n1", "b", "10.7.0.1"),
        pod_on("n2", "c", "10.7.0.3"),
        pod_on("n2", "d", "fd00::d"),
        pod_on("n2", "e", "10.7.0.2"),
        pod_on("n9", "f", "10.7.0.4"),
        pod("a", "pending", "app: web", "10.7.0.5"),
        on_host,
    ]);
    assert_eq!(messages_of(&got), Vec::<String>::new());
    assert_eq!(
        pods(&got.placement),
        ["n1: 10.7.0.1 a/b, 10.244.1.9 a/a", "n2: 10.7.0.2 a/e, 10.7.0.3 a/c, fd00::d a/d"]
    );
    assert_eq!(
        nodes(&got.placement.nodes),
        [
            "n1 192.0.2.1:8473 7 [10.7.0.1/32 10.244.1.0/24]",
            "n2 192.0.2.2:8473 7 [10.7.0.2/32 10.7.0.3/32 fd00::d/128]"
        ]
    );
}

#[test]
fn covered_endpoints_without_pod_manifests_are_on_the_node_of_their_slice_or_of_their_prefix() {
    let at =
        |document: String, node: &str| document.replace("], targetRef", &format!("], nodeName: {node}, targetRef"));
    let documents = [
        node("n1", &["InternalIP 192.0.2.1"], "podCIDR: 10.244.1.0/24"),
        node("n2", &["InternalIP 192.0.2.2"], "podCIDR: 10.244.2.0/24"),
        service("s", EGRESS, 80, &["203.0.113.1"]),
        slice("s", &["10.244.1.1", "10.244.2.1", "10.244.3.1"]),
        at(slice("s", &["10.244.1.2"]), "n2"),
        service("t", "", 80, &["203.0.113.2"]),
        slice("t", &["10.244.1.3"]),
        pod_on("n2", "p", "10.244.1.1"),
    ];
    let got = compile_agents(&documents);
    assert_eq!(
        pods(&got.placement),
        ["n1: ", "n2: 10.244.1.1 a/p, 10.244.1.2 a/s-10-244-1-2, 10.244.2.1 a/s-10-244-2-1"]
    );
}

#[test]
fn a_node_stays_the_same_allocation_until_it_or_its_pods_differ() {
    let parsed = |text: &String| Arc::new(objects(text).pop().unwrap());
    let mut documents: Vec<Arc<Object>> = [
        node("n1", &["InternalIP 192.0.2.1"], "podCIDR: 10.244.1.0/24"),
        node("n2", &["InternalIP 192.0.2.2"], "podCIDR: 10.244.2.0/24"),
        pod_on("n1", "x", "10.244.1.1"),
        pod_on("n2", "y", "10.244.2.1"),
    ]
    .iter()
    .map(parsed)
    .collect();
    let mut compiler = Compiler::new(with_agents());
    let first = compiler.compile(&documents).placement;
    documents.push(parsed(&pod_on("n2", "z", "10.244.2.2")));
    let second = compiler.compile(&documents).placement;
    assert!(Arc::ptr_eq(&first.agents[0], &second.agents[0]) && !Arc::ptr_eq(&first.agents[1], &second.agents[1]));
    documents.push(parsed(&service("s", "", 80, &[])));
    let third = compiler.compile(&documents).placement;
    assert!(Arc::ptr_eq(&second.agents, &third.agents));
}

#[test]
fn with_a_secret_each_node_has_a_mac_address_of_its_own_that_every_server_derives() {
    let documents =
        [node("n1", &["InternalIP 192.0.2.1"], "podCIDR: 10.244.1.0/24"), node("n2", &["InternalIP 192.0.2.2"], "")];
    let macs = |secret: &str| {
        let agents = NodeAgents { port: 8473, vni: 7, secret: Some(TunnelSecret::new(secret.as_bytes())) };
        let options = Options { node_agents: Some(agents), ..with_agents() };
        let got = compile_for(options, &objects(&documents.join("---\n")));
        assert!(got.placement.nodes.iter().all(|node| node.verify_mac));
        let agents: Vec<[u8; 6]> = got.placement.agents.iter().map(|agent| agent.tunnel.mac).collect();
        let nodes: Vec<[u8; 6]> = got.placement.nodes.iter().map(|node| node.mac).collect();
        assert_eq!(nodes, agents, "a node receives its own");
        nodes
    };
    let (one, other) = (macs("0123456789abcdef"), macs("0123456789abcdeg"));
    assert_eq!(one, macs("0123456789abcdef"));
    let distinct: std::collections::BTreeSet<_> = one.iter().chain(&other).collect();
    assert_eq!(distinct.len(), 4);
    // Unicast, and locally administered.
    assert!(distinct.iter().all(|mac| mac[0] & 0b11 == 0b10), "{distinct:02x?}");
    let debug = format!("{:?}", TunnelSecret::new(b"0123456789abcdef"));
    assert_eq!(debug, "TunnelSecret", "it isn't printed");
}
