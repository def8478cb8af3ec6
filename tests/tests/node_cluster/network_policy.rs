//! NetworkPolicy in the form of Calico's: per pod, established connections and allowed new ones are accepted, packets that
//! conntrack finds invalid are dropped.

use std::fmt::Write as _;

use vipgate_lab::Host;
use vipgate_tests::cluster::LINE_PORT;

use crate::kube_proxy::load;

/// Loads the policy for all pods of a node, and replaces the one before.
///
/// Pods may open any connection; they accept new ones to the ports of the reflectors and of the line server, and pings.
pub(crate) fn load_policy(node: &Host, pods: &[[String; 2]]) {
    let mut dispatch = String::new();
    for [v4, v6] in pods {
        for (ip, address) in [("ip", v4), ("ip6", v6)] {
            let _ = writeln!(dispatch, "    {ip} saddr {address} jump from-pod\n    {ip} daddr {address} jump to-pod");
        }
    }
    let table = format!(
        "table inet calico\ndelete table inet calico\n\
         table inet calico {{\n\
         \x20 counter invalid {{}}\n  counter denied {{}}\n\
         \x20 chain forward {{\n    type filter hook forward priority filter; policy accept;\n{dispatch}  }}\n\
         \x20 chain from-pod {{\n    ct state established,related accept\n\
         \x20   ct state invalid counter name invalid drop\n    ct state new return\n  }}\n\
         \x20 chain to-pod {{\n    ct state established,related accept\n\
         \x20   ct state invalid counter name invalid drop\n\
         \x20   ct state new tcp dport {{ 80, {LINE_PORT} }} accept\n    ct state new udp dport {{ 5353, {LINE_PORT} }} accept\n\
         \x20   meta l4proto {{ icmp, ipv6-icmp }} accept\n    counter name denied drop\n  }}\n}}\n"
    );
    load(node, &table);
}

/// Packets dropped as invalid, and as denied.
pub(crate) fn dropped(node: &Host) -> [u64; 2] {
    ["invalid", "denied"].map(|name| {
        let text = node.output(&["nft", "list", "counter", "inet", "calico", name]).unwrap();
        let count = text.split("packets ").nth(1).and_then(|rest| rest.split(' ').next());
        count.and_then(|count| count.parse().ok()).unwrap_or_else(|| panic!("no counter: {text}"))
    })
}
