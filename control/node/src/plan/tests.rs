//! Plans of a small node, and what differs between two of them.

use std::collections::BTreeSet;

use super::*;
use crate::marks::MarkMask;
use crate::nft::script::{Before, Change, change};
use crate::policy::{Coverage, EgressPolicy, Pod};

const GATEWAYS: [&str; 2] = ["192.0.2.11:8473", "192.0.2.12:8473"];

fn settings() -> Settings {
    Settings {
        node: "node-1".into(),
        mask: MarkMask::default(),
        pod_prefixes: vec!["10.244.0.0/16".parse().unwrap()],
        tunnel_device: "vipgate0".to_owned(),
        hold_device: "vipgate-hold".to_owned(),
    }
}

fn policy() -> NodePolicy {
    let covered = |order, has_vip| Some(Coverage { policy: 0, order, has_vip });
    let pod = |coverage| Pod { name: "tenant-a/web".into(), coverage };
    NodePolicy {
        node: "node-1".into(),
        tunnel: TunnelEndpoint { address: "192.0.2.101:8473".parse().unwrap(), vni: 7, mac: [0x0a, 0x76, 1, 2, 3, 4] },
        pod_prefixes: vec!["10.244.1.0/24".parse().unwrap()],
        policies: vec![EgressPolicy {
            name: "EgressPolicy tenant-a/web".into(),
            destinations: vec!["0.0.0.0/0".parse().unwrap(), "::/0".parse().unwrap()],
            excluded: vec!["172.16.0.0/12".parse().unwrap()],
        }],
        orders: vec![["gw-a".into(), "gw-b".into()].into()],
        pods: [
            ("10.244.1.5", covered(Some(0), true)),
            ("10.244.1.6", None),
            ("10.244.1.7", covered(None, false)),
            ("fd00:244::5", covered(Some(0), true)),
        ]
        .map(|(address, coverage)| (address.parse().unwrap(), pod(coverage)))
        .into(),
    }
}

/// Gateways that are active and reachable as given.
fn gateways(states: [(bool, bool); 2]) -> Vec<Gateway> {
    let gateway = |(n, (is_active, is_reachable)): (usize, (bool, bool))| Gateway {
        name: ["gw-a", "gw-b"][n].into(),
        is_active: Some(is_active),
        is_reachable,
        endpoint: GATEWAYS[n].parse().ok(),
    };
    states.into_iter().enumerate().map(gateway).collect()
}

/// The plan of a policy and gateways.
fn plan(policy: Option<&NodePolicy>, gateways: &[Gateway], local: &[IpAddr]) -> NodePlan {
    let cluster = Cluster { prefixes: vec!["10.96.0.0/12".parse().unwrap()], nodes: vec![[192, 0, 2, 101].into()] };
    let local_addresses = &local.iter().copied().collect::<BTreeSet<_>>();
    let inputs = Inputs { settings: &settings(), policy, cluster: &cluster, gateways, local_addresses, mtu: 1450 };
    NodePlan::new(&inputs, &mut Indices::default())
}

fn endpoints(plan: &NodePlan) -> Vec<&str> {
    let maps = ["endpoints4", "endpoints6"].map(|name| plan.table.maps[name].elements.values());
    maps.into_iter().flatten().map(String::as_str).collect()
}

#[test]
fn pods_go_to_the_first_gateway_of_their_order_that_is_active_and_reachable() {
    let policy = policy();
    for (states, target) in [
        ([(true, true), (true, true)], "via_1"),
        ([(false, true), (true, true)], "via_2"),
        ([(true, false), (true, true)], "via_2"),
        ([(false, false), (false, false)], "unreachable"),
    ] {
        let plan = plan(Some(&policy), &gateways(states), &[]);
        let to = format!("goto policy_0_{target}");
        assert_eq!(endpoints(&plan), [&to, "goto pass", "goto policy_0_no_vip", &to], "{states:?}");
    }
}

#[test]
fn excluded_destinations_and_the_cluster_are_left_unchanged() {
    let plan = plan(Some(&policy()), &gateways([(true, true); 2]), &[]);
    let ranges: Vec<&str> = plan.table.sets["unchanged4_0"].elements.iter().map(String::as_str).collect();
    let expected =
        ["10.244.0.0-10.244.255.255", "10.96.0.0-10.111.255.255", "172.16.0.0-172.31.255.255", "192.0.2.101"];
    assert_eq!(ranges, expected);
    for (destination, is_unchanged) in [("172.16.0.1", true), ("198.51.100.10", false), ("2001:db8::1", false)] {
        assert_eq!(plan.is_unchanged(0, destination.parse().unwrap()), is_unchanged, "{destination}");
    }
}

#[test]
fn before_the_first_policy_all_pods_are_unknown_and_there_are_no_tunnels() {
    let plan = plan(None, &gateways([(true, true); 2]), &[]);
    assert!(endpoints(&plan).is_empty() && plan.tunnel.is_none() && plan.own_prefixes.is_empty());
    assert_eq!(plan.table.sets["pods4"].elements.first().map(String::as_str), Some("10.244.0.0-10.244.255.255"));
    assert!(plan.table.chains["raw"].rules.contains(&"ip saddr @pods4 ip saddr != @known4 goto unknown".to_owned()));
}

#[test]
fn a_failover_changes_the_elements_of_endpoints_and_replies_alone() {
    let policy = policy();
    let before = plan(Some(&policy), &gateways([(true, true); 2]), &[]);
    let after = plan(Some(&policy), &gateways([(false, false), (true, true)]), &[]);
    let Change { prepare, switch } = change(Before::Exactly(&before.table), &after.table);
    let script = prepare + &switch;
    let elements = |line: &&str| line.starts_with("add element") || line.starts_with("delete element");
    let changed: BTreeSet<&str> = script.lines().filter(elements).filter_map(|line| line.split(' ').nth(4)).collect();
    assert_eq!(changed, ["endpoints4", "endpoints6", "replies"].into(), "{script}");
    // Besides, one chain for policy and gateway each comes and goes.
    let chains = script.lines().filter(|line| !elements(line));
    assert!(chains.clone().all(|line| line.contains(" policy_0_via_")), "{script}");
    assert!(!after.changes_connections(Some(&before)));
}

#[test]
fn replies_of_connections_through_a_gateway_go_to_it_or_to_another_but_never_out_of_the_node() {
    let policy = policy();
    let plan = plan(Some(&policy), &gateways([(true, false), (true, true)]), &[]);
    let replies: Vec<(&str, &str)> =
        plan.table.maps["replies"].elements.iter().map(|(mark, to)| (mark.as_str(), to.as_str())).collect();
    assert_eq!(replies, [("0x00000100", "goto via_2"), ("0x00000200", "goto via_2")]);
    let steer = &plan.table.chains["steer"].rules;
    let at = |text: &str| steer.iter().position(|rule| rule.contains(text)).unwrap();
    let unknown = at("!= 0 goto unreachable");
    assert!(at("vmap @replies") < unknown && unknown < at("ct direction reply ip saddr @pods4 goto pass"));
}

/// kube-proxy translates to a Service's endpoint in `prerouting`, with IPVS between `input` and `output`.
#[test]
fn the_decision_follows_destination_nat_wherever_it_is() {
    let plan = plan(Some(&policy()), &gateways([(true, true); 2]), &[]);
    let chain = |name: &str| &plan.table.chains[name];
    assert_eq!(chain("prerouting").hook, Some("filter hook prerouting priority filter + 10"));
    assert_eq!(chain("prerouting").rules.last().map(String::as_str), Some("goto steer"));
    // Only this type routes again; the node's own addresses are no pods.
    assert_eq!(chain("output").hook, Some("route hook output priority filter + 10"));
    let of_pods = |pods: &str| format!("{pods} fib saddr type != local goto steer");
    assert_eq!(chain("output").rules, ["ip saddr @pods4", "ip6 saddr @pods6"].map(of_pods));
    // The kernel routes again if the mark differs.
    for rule in ["ip saddr @pods4 goto pass", "ip6 saddr @pods6 goto pass"] {
        assert!(chain("input").rules.contains(&format!("meta mark & 0x00001f00 != 0 {rule}")), "{:?}", chain("input"));
    }
    assert_eq!(chain("pass").rules, ["meta mark set meta mark & 0xffffe0ff"]);
    // What isn't forwarded is clamped, too.
    let clamps = |name: &str| {
        let clamps = chain(name).rules.iter().filter(|rule| rule.contains("maxseg"));
        clamps.map(|rule| rule.split(' ').next().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!((clamps("forward"), clamps("guard")), (vec!["iifname".to_owned(); 2], vec!["oifname".to_owned(); 2]));
}

#[test]
fn a_pod_that_policy_does_not_know_reaches_the_cluster_alone_also_by_a_service() {
    for policy in [None, Some(policy())] {
        let plan = plan(policy.as_ref(), &gateways([(true, true); 2]), &[]);
        let steer = &plan.table.chains["steer"].rules;
        let at = |text: &str| steer.iter().position(|rule| rule == text).unwrap();
        for (ip, suffix) in [("ip", 4), ("ip6", 6)] {
            let known = at(&format!("{ip} saddr vmap @endpoints{suffix}"));
            assert!(known < at(&format!("{ip} saddr @pods{suffix} goto unknown_pod")));
        }
        let expected = [
            "fib daddr type { local, broadcast, multicast } goto pass",
            "ip daddr @cluster4 goto pass",
            "ip6 daddr @cluster6 goto pass",
            "counter name \"unknown_pod\" drop",
        ];
        assert_eq!(plan.table.chains["unknown_pod"].rules, expected);
    }
}

/// Sockets of the node may have marks with the same bits, such as WireGuard's 0xca6c.
#[test]
fn only_packets_of_pods_are_guarded() {
    let plan = plan(Some(&policy()), &gateways([(true, true); 2]), &[]);
    let drops = plan.table.chains["guard"].rules.iter().filter(|rule| rule.ends_with("drop"));
    let expected = ["ip saddr @pods4", "ip6 saddr @pods6"]
        .map(|pods| format!("meta mark & 0x00001f00 != 0 {pods} counter name \"guard\" drop"));
    assert_eq!(drops.collect::<Vec<_>>(), expected.iter().collect::<Vec<_>>());
}

/// Bridges with br_netfilter pass neighbor discovery between pods by these chains; metadata services of clouds are at
/// the node.
#[test]
fn multicast_and_link_local_destinations_are_not_steered() {
    let plan = plan(Some(&policy()), &gateways([(true, true); 2]), &[]);
    let steer = &plan.table.chains["steer"].rules;
    let at = |text: &str| steer.iter().position(|rule| rule.contains(text)).unwrap();
    let pass = "ip daddr { 169.254.0.0/16, 224.0.0.0/4, 255.255.255.255 } goto pass";
    assert!(at(pass) < at("ip saddr vmap @endpoints4"));
    assert!(at("ip6 daddr { ff00::/8, fe80::/10 } goto pass") < at("ip6 saddr vmap @endpoints6"));
    let unknown = &plan.table.chains["unknown"].rules;
    for accepted in ["ip daddr 169.254.0.0/16 accept", "ip6 daddr fe80::/10 accept"] {
        assert!(unknown.iter().any(|rule| rule == accepted), "{accepted}");
    }
}

#[test]
fn gateways_that_packets_can_not_reach_have_a_fault_and_no_tunnel() {
    let policy = policy();
    let mut gateways = gateways([(true, true); 2]);
    let local = plan(Some(&policy), &gateways, &[[192, 0, 2, 11].into()]);
    assert_eq!(local.gateways[0].0.fault, Some(Fault::LocalEndpoint));
    assert_eq!(local.tunnels.len(), 1);
    assert_eq!(endpoints(&local)[0], "goto policy_0_via_2");
    for (endpoint, fault) in [
        (None, Fault::NoTunnelEndpoint),
        (Some("192.0.2.11:8472"), Fault::IncompatibleEndpoint),
        (Some("[2001:db8::11]:8473"), Fault::IncompatibleEndpoint),
    ] {
        gateways[0].endpoint = endpoint.map(|text| text.parse().unwrap());
        assert_eq!(plan(Some(&policy), &gateways, &[]).gateways[0].0.fault, Some(fault), "{endpoint:?}");
    }
}
