//! ECMP routes of both routers, which tests change as routers with BGP and BFD would.

use vipgate_lab::Host;

use super::{BGP_VIPS, Cluster};

impl Cluster {
    /// Both routers use these gateways as next hops, in this order: another order changes the hash.
    pub fn route_via(&self, gateways: &[usize]) {
        self.route_inside_via(gateways);
        self.route_outside_via(gateways);
    }

    /// The inside router uses these gateways as next hops for egress.
    pub fn route_inside_via(&self, gateways: &[usize]) {
        let next_hop = |family: usize, number: usize| match family {
            0 => format!("10.4.{number}.1"),
            _ => format!("fd00:4:{number}::1"),
        };
        set_ecmp(&self.inside, ["0.0.0.0/0", "::/0"], gateways, next_hop);
    }

    /// The outside router uses these gateways as next hops for the BGP VIPs.
    pub fn route_outside_via(&self, gateways: &[usize]) {
        let next_hop = |family: usize, number: usize| match family {
            0 => format!("203.0.113.{number}"),
            _ => format!("2001:db8:113::{number}"),
        };
        set_ecmp(&self.outside, BGP_VIPS, gateways, next_hop);
    }

    /// Changes the ECMP hash of both routers: nearly every flow moves to another gateway.
    pub fn rehash(&self, turn: usize) {
        let mut order = self.indices();
        let count = order.len();
        order.rotate_left(turn % count);
        self.route_via(&order);
    }
}

fn set_ecmp(router: &Host, destinations: [&str; 2], gateways: &[usize], next_hop: impl Fn(usize, usize) -> String) {
    for family in ["ipv4", "ipv6"] {
        // Hash policy 1: addresses, ports and protocol.
        router.sysctl(&format!("net.{family}.fib_multipath_hash_policy"), 1).unwrap();
    }
    for (family, destination) in destinations.into_iter().enumerate() {
        let next_hops: Vec<String> = gateways.iter().map(|number| next_hop(family, number + 1)).collect();
        let mut command = vec![["-4", "-6"][family], "route", "replace", destination];
        for next_hop in &next_hops {
            command.extend(["nexthop", "via", next_hop]);
        }
        router.ip(&command).unwrap();
    }
}
