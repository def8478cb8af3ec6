//! Flannel's masquerading: the rules that flanneld 0.22 writes with `--ip-masq`, in its order.

use vipgate_lab::Host;

/// Adds the rules to a node.
pub(crate) fn add_flannel_rules(node: &Host, number: usize) {
    let families = [
        ("iptables", "10.244.0.0/16", format!("10.244.{number}.0/24"), "224.0.0.0/4"),
        ("ip6tables", "fd00:244::/32", format!("fd00:244:{number}::/64"), "ff00::/8"),
    ];
    for (program, network, subnet, multicast) in families {
        let run = |rule: &str| {
            let rule: Vec<&str> = rule.split(' ').collect();
            node.output(&[&[program, "-w", "-t", "nat"], rule.as_slice()].concat()).unwrap();
        };
        run("-N FLANNEL-POSTRTG");
        run("-A POSTROUTING -m comment --comment flanneld -j FLANNEL-POSTRTG");
        for rule in [
            // Packets that kube-proxy masquerades anyway.
            "-m mark --mark 0x4000/0x4000 -j RETURN".to_owned(),
            format!("-s {subnet} -d {network} -j RETURN"),
            format!("-s {network} -d {subnet} -j RETURN"),
            format!("! -s {network} -d {subnet} -j RETURN"),
            format!("-s {network} ! -d {multicast} -j MASQUERADE --random-fully"),
            format!("! -s {network} -d {network} -j MASQUERADE --random-fully"),
        ] {
            run(&format!("-A FLANNEL-POSTRTG {rule}"));
        }
    }
}
