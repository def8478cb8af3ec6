//! Which gateway a pod's packets go to: the one that owns its shard, as long as it is reachable; otherwise another one,
//! which forwards them to the owner.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// A gateway as seen from this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewayState {
    pub name: Arc<str>,
    /// Whether the membership view has it active; `None`: there is no view yet.
    pub is_active: Option<bool>,
    /// Whether it answers echoes.
    pub is_reachable: bool,
    /// Why no packets can be sent to it; `None`: they can.
    pub fault: Option<Fault>,
}

/// Why no packets can be sent to a gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fault {
    /// It has reported no tunnel endpoint: `overlay` isn't configured, or it has never run.
    NoTunnelEndpoint,
    /// Its tunnel endpoint has another port or address family than this node's.
    IncompatibleEndpoint,
    /// Its tunnel endpoint is an address of this node: the kernel would not send packets out.
    LocalEndpoint,
    /// More gateways than marks.
    NoMark,
}

impl Fault {
    /// For people.
    pub fn text(self) -> &'static str {
        match self {
            Self::NoTunnelEndpoint => "it has reported no tunnel endpoint: configure `overlay` in its gateway.yaml",
            Self::IncompatibleEndpoint => "its tunnel endpoint has another port or address family than this node's",
            Self::LocalEndpoint => "its tunnel endpoint is an address of this node itself",
            Self::NoMark => "`mark_mask` has too few bits for the number of gateways",
        }
    }
}

/// Selects the gateway for an order (home, then backups). In this sequence, the first one of:
/// 1. active and reachable gateways in the order: the first of them owns the shard;
/// 2. other active and reachable gateways;
/// 3. active gateways, though they don't answer: their answers may be lost;
/// 4. reachable gateways, though none is active: they may have standby sessions, and the view may be old;
///
/// Within 2 to 4, those in the order precede the others, which are spread over nodes by rendezvous hashing. `None`: there
/// is none.
pub fn select(order: &[Arc<str>], gateways: &[GatewayState], node: &str) -> Option<usize> {
    let rank = |(at, gateway): (usize, &GatewayState)| {
        let is_active = gateway.is_active.unwrap_or(true);
        let class = match (is_active, gateway.is_reachable) {
            _ if gateway.fault.is_some() => return None,
            (true, true) => 0,
            (true, false) => 1,
            (false, true) => 2,
            (false, false) => return None,
        };
        let place = order.iter().position(|name| *name == gateway.name).unwrap_or(usize::MAX);
        let spread = if place == usize::MAX { weight(node, &gateway.name) } else { 0 };
        Some(((class, place, spread), at))
    };
    gateways.iter().enumerate().filter_map(rank).min().map(|(_, at)| at)
}

fn weight(node: &str, gateway: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    (node, gateway).hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gateway(name: &str, is_active: bool, is_reachable: bool) -> GatewayState {
        GatewayState { name: name.into(), is_active: Some(is_active), is_reachable, fault: None }
    }

    fn selected(order: &[&str], gateways: &[GatewayState]) -> Option<Arc<str>> {
        let order: Vec<Arc<str>> = order.iter().map(|name| Arc::from(*name)).collect();
        select(&order, gateways, "node-1").map(|at| gateways[at].name.clone())
    }

    #[test]
    fn the_first_active_and_reachable_gateway_of_the_order_is_selected() {
        let mut gateways = ["a", "b", "c"].map(|name| gateway(name, true, true));
        assert_eq!(selected(&["b", "c", "a"], &gateways).as_deref(), Some("b"));
        gateways[1].is_active = Some(false);
        assert_eq!(selected(&["b", "c", "a"], &gateways).as_deref(), Some("c"));
        gateways[2].is_reachable = false;
        assert_eq!(selected(&["b", "c", "a"], &gateways).as_deref(), Some("a"));
        // Not of the order, but active and reachable: it forwards to the owner.
        assert_eq!(selected(&["b", "c"], &gateways).as_deref(), Some("a"));
    }

    #[test]
    fn without_a_reachable_active_gateway_any_may_be_right() {
        let silent = [gateway("a", true, false), gateway("b", false, true)];
        assert_eq!(selected(&["b", "a"], &silent).as_deref(), Some("a"));
        let inactive = [gateway("a", false, false), gateway("b", false, true)];
        assert_eq!(selected(&["a", "b"], &inactive).as_deref(), Some("b"));
        assert_eq!(selected(&["a"], &[gateway("a", false, false)]), None);
    }

    #[test]
    fn no_packets_are_sent_where_they_can_not_arrive() {
        let mut gateways = ["a", "b"].map(|name| gateway(name, true, true));
        gateways[0].fault = Some(Fault::LocalEndpoint);
        assert_eq!(selected(&["a", "b"], &gateways).as_deref(), Some("b"));
        gateways[1].fault = Some(Fault::NoTunnelEndpoint);
        assert_eq!(selected(&["a", "b"], &gateways), None);
    }

    #[test]
    fn nodes_spread_over_gateways_that_are_in_no_order() {
        let gateways = ["a", "b", "c"].map(|name| gateway(name, true, true));
        let nodes = (0..90).map(|n| format!("node-{n}"));
        let mut counts = [0; 3];
        nodes.for_each(|node| counts[select(&[], &gateways, &node).unwrap()] += 1);
        assert!(counts.iter().all(|count| *count > 10), "{counts:?}");
    }
}
