//! ECMP routes of both routers, which tests change as routers with BGP and BFD would.

use vipgate_lab::networks;

use super::{BGP_VIPS, Cluster};

impl Cluster {
    /// Both routers use these gateways as next hops, in this order: another order changes the hash.
    pub fn route_via(&self, gateways: &[usize]) {
        self.route_inside_via(gateways);
        self.route_outside_via(gateways);
    }

    /// The inside router uses these gateways as next hops for egress.
    pub fn route_inside_via(&self, gateways: &[usize]) {
        networks::route_inside_via(&self.inside, gateways).unwrap();
    }

    /// The outside router uses these gateways as next hops for the BGP VIPs.
    pub fn route_outside_via(&self, gateways: &[usize]) {
        networks::route_outside_via(&self.outside, BGP_VIPS, gateways).unwrap();
    }

    /// Changes the ECMP hash of both routers: nearly every flow moves to another gateway.
    pub fn rehash(&self, turn: usize) {
        let mut order = self.indices();
        let count = order.len();
        order.rotate_left(turn % count);
        self.route_via(&order);
    }
}
