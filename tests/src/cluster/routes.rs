//! How the routers spread packets over gateways. They do what a router with BGP and BFD does, when the test says so.

use vipgate::lab::Host;

use super::{Cluster, SHARED};

impl Cluster {
    /// Both routers send to these gateways, in this order: another order is another hash.
    pub fn spread_over(&self, gateways: &[usize]) {
        self.spread_inside_over(gateways);
        self.spread_outside_over(gateways);
    }

    /// The inside router sends what leaves to these gateways.
    pub fn spread_inside_over(&self, gateways: &[usize]) {
        let hop = |family: usize, number: usize| match family {
            0 => format!("10.4.{number}.1"),
            _ => format!("fd00:4:{number}::1"),
        };
        spread(&self.inside, ["0.0.0.0/0", "::/0"], gateways, hop);
    }

    /// The outside router sends what comes for the shared VIPs to these gateways.
    pub fn spread_outside_over(&self, gateways: &[usize]) {
        let hop = |family: usize, number: usize| match family {
            0 => format!("203.0.113.{number}"),
            _ => format!("2001:db8:113::{number}"),
        };
        spread(&self.outside, SHARED, gateways, hop);
    }

    /// Both routers hash anew: nearly every flow goes to another gateway than before.
    pub fn rehash(&self, turn: usize) {
        let mut order = self.all();
        let places = order.len();
        order.rotate_left(turn % places);
        self.spread_over(&order);
    }
}

fn spread(router: &Host, destinations: [&str; 2], gateways: &[usize], hop: impl Fn(usize, usize) -> String) {
    for family in ["ipv4", "ipv6"] {
        // Over addresses, ports and protocol.
        router.sysctl(&format!("net.{family}.fib_multipath_hash_policy"), 1).unwrap();
    }
    for (family, destination) in destinations.into_iter().enumerate() {
        let hops: Vec<String> = gateways.iter().map(|number| hop(family, number + 1)).collect();
        let mut command = vec![["-4", "-6"][family], "route", "replace", destination];
        for hop in &hops {
            command.extend(["nexthop", "via", hop]);
        }
        router.ip(&command).unwrap();
    }
}
