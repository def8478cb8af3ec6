//! How the packets of a pod are steered, and where replies of its connections go.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::Inputs;
use crate::marks::GatewayIndex;
use crate::selection::{GatewayState, select};

/// How the packets of a pod are steered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Steering {
    /// No policy covers it: as without vipgate.
    Pass,
    /// By a policy: excluded destinations as without vipgate, others to a gateway.
    Covered {
        /// Index of the policy.
        policy: usize,
        /// Where to.
        target: Target,
    },
    /// A policy covers it, but gives it no VIP: excluded destinations as without vipgate, others are dropped.
    NoVip {
        /// Index of the policy.
        policy: usize,
    },
}

/// Where packets for a gateway go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Target {
    /// To this gateway.
    Gateway(GatewayIndex),
    /// There is none.
    Unreachable,
}

/// A gateway with its index.
pub(super) type Numbered = (GatewayState, Option<GatewayIndex>);

/// The steering of all pods.
pub(super) fn of_pods(inputs: &Inputs<'_>, gateways: &[Numbered]) -> BTreeMap<IpAddr, Steering> {
    let Some(policy) = inputs.policy else { return BTreeMap::new() };
    let selection = Selection::new(inputs, gateways);
    let any = selection.target(&[]);
    let targets: Vec<Target> = policy.orders.iter().map(|order| selection.target(order)).collect();
    let steering = |(address, pod): (&IpAddr, &crate::policy::Pod)| {
        let steering = match pod.coverage {
            None => Steering::Pass,
            Some(coverage) if !coverage.has_vip => Steering::NoVip { policy: coverage.policy },
            Some(coverage) => {
                let target = coverage.order.and_then(|order| targets.get(order)).unwrap_or(&any);
                Steering::Covered { policy: coverage.policy, target: *target }
            }
        };
        (*address, steering)
    };
    policy.pods.iter().map(steering).collect()
}

/// Selection among gateways.
pub(super) struct Selection<'a> {
    states: Vec<GatewayState>,
    gateways: &'a [Numbered],
    node: &'a str,
}

impl<'a> Selection<'a> {
    pub(super) fn new(inputs: &Inputs<'a>, gateways: &'a [Numbered]) -> Self {
        let states = gateways.iter().map(|(state, _)| state.clone()).collect();
        Self { states, gateways, node: &inputs.settings.node }
    }

    /// The gateway of an order.
    pub(super) fn target(&self, order: &[std::sync::Arc<str>]) -> Target {
        let index = select(order, &self.states, self.node).and_then(|at| self.gateways[at].1);
        index.map_or(Target::Unreachable, Target::Gateway)
    }
}
