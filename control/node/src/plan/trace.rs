//! What becomes of a pod's packet to a destination, step by step, by a plan.

use std::fmt::Write;
use std::net::IpAddr;
use std::sync::Arc;

use super::{NodePlan, Steering, Target};
use crate::marks::{Action, GatewayIndex, MarkMask, RoutingNumbers};
use crate::policy::NodePolicy;
use crate::selection::GatewayState;

/// A step: where the packet is, and what is decided there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The chain, or what else decides.
    pub at: &'static str,
    /// What is decided, and why.
    pub text: String,
}

/// What becomes of a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It goes into the tunnel to this gateway.
    Gateway(Arc<str>),
    /// It is routed as without vipgate.
    Unchanged,
    /// It is held until the pod is known.
    Held,
    /// It is dropped.
    Dropped,
    /// It isn't of a pod.
    Foreign,
}

/// Traces a new connection's first packet. `policy` is that of the plan.
pub fn trace(
    plan: &NodePlan,
    policy: Option<&NodePolicy>,
    mask: MarkMask,
    numbers: RoutingNumbers,
    pod: IpAddr,
    destination: IpAddr,
) -> (Vec<Step>, Outcome) {
    let mut steps = Vec::new();
    let mut step = |at: &'static str, text: String| steps.push(Step { at, text });
    let inside = plan.inside.iter().find(|net| net.contains(&destination));
    let Some(steering) = plan.endpoints.get(&pod) else {
        let outcome = unknown(plan, pod, inside.is_some(), &mut step);
        return (steps, outcome);
    };
    let name = policy.and_then(|policy| policy.pods.get(&pod)).map(|pod| pod.name.clone()).unwrap_or_default();
    if is_on_link(destination) {
        step("steer", format!("{destination} is a multicast or link-local destination: as without vipgate"));
        return (steps, Outcome::Unchanged);
    }
    let covered = |index: usize| policy.and_then(|policy| policy.policies.get(index)).map(|policy| policy.name.clone());
    let (index, target) = match *steering {
        Steering::Pass => {
            step("steer", format!("{name} is a pod that no policy covers: routed as without vipgate"));
            return (steps, Outcome::Unchanged);
        }
        Steering::NoVip { policy } => (policy, None),
        Steering::Covered { policy, target } => (policy, Some(target)),
    };
    let policy_name = covered(index).unwrap_or_default();
    let ranges = plan.unchanged.get(index).map(Vec::as_slice).unwrap_or_default();
    let unchanged = ranges.iter().find(|range| range.first <= destination && destination <= range.last);
    if let Some(range) = unchanged.filter(|range| range.first.is_ipv4() == destination.is_ipv4()) {
        step(
            "steer",
            format!("{name} is covered by {policy_name}, which leaves {range} unchanged: routed as without vipgate"),
        );
        return (steps, Outcome::Unchanged);
    }
    step("steer", format!("{name} is covered by {policy_name}, which translates {destination}"));
    let outcome = match target {
        None => {
            step("no_vip", format!("{policy_name} gives the pod no VIP: dropped"));
            Outcome::Dropped
        }
        Some(Target::Unreachable) => {
            step("unreachable", format!("no gateway: ICMP unreachable{}", states(plan)));
            Outcome::Dropped
        }
        Some(Target::Gateway(index)) => via(plan, mask, numbers, index, &mut step),
    };
    (steps, outcome)
}

/// Whether no router forwards to a destination: what the chain `steer` leaves alone.
fn is_on_link(destination: IpAddr) -> bool {
    match destination {
        IpAddr::V4(v4) => v4.is_multicast() || v4.is_broadcast() || v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_multicast() || v6.is_unicast_link_local(),
    }
}

/// A packet from an address that policy doesn't know.
fn unknown(plan: &NodePlan, pod: IpAddr, is_inside: bool, step: &mut impl FnMut(&'static str, String)) -> Outcome {
    if !plan.pod_prefixes.iter().any(|net| net.contains(&pod)) {
        step("raw", format!("{pod} is in no pod prefix of this node: not steered"));
        Outcome::Foreign
    } else if is_inside {
        step(
            "raw",
            format!(
                "{pod} is no pod that policy knows, but the destination is inside the cluster: routed as without \
                 vipgate; if it is a Service, its endpoints outside aren't reached"
            ),
        );
        Outcome::Unchanged
    } else {
        step("raw", format!("{pod} is no pod that policy knows: held until the policy server names it"));
        Outcome::Held
    }
}

fn via(
    plan: &NodePlan,
    mask: MarkMask,
    numbers: RoutingNumbers,
    index: GatewayIndex,
    step: &mut impl FnMut(&'static str, String),
) -> Outcome {
    let name = plan.gateway(index).map(|gateway| gateway.name.clone()).unwrap_or_default();
    let mark = mask.mark(Action::Gateway(index));
    step("gateway", format!("{name}{}", states(plan)));
    step("mark", format!("{mark:#x}, by chain via_{}", index.0));
    let table = numbers.first_table + index.0;
    step("rule", format!("{}: fwmark {mark:#x}/{mask} lookup {table}", numbers.rule_priority + 1));
    let (own, remote) = (plan.tunnel, plan.tunnels.get(&index));
    if let (Some(own), Some(remote)) = (own, remote) {
        step("tunnel", format!("VXLAN {} from {} to {remote}, port {}", own.vni, own.address.ip(), own.address.port()));
    }
    Outcome::Gateway(name)
}

/// The states of all gateways.
fn states(plan: &NodePlan) -> String {
    let mut text = String::new();
    for (gateway, _) in &plan.gateways {
        let separator = if text.is_empty() { " (" } else { ", " };
        // Writing to a String can't fail.
        let _ = write!(text, "{separator}{} {}", gateway.name, state(gateway));
    }
    if text.is_empty() { " (no gateway is known)".to_owned() } else { text + ")" }
}

/// The state of a gateway in a few words.
pub fn state(gateway: &GatewayState) -> String {
    if let Some(fault) = gateway.fault {
        return format!("unusable: {}", fault.text());
    }
    let active = match gateway.is_active {
        None => "no view",
        Some(true) => "active",
        Some(false) => "inactive",
    };
    if gateway.is_reachable { active.to_owned() } else { format!("{active}, unreachable") }
}
