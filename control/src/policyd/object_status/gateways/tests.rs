use super::*;
use crate::policyd::object_status::fixtures::{connected, inputs};

/// The conditions of gateway `g1` in short, without `Accepted`.
fn status(facts: GatewayFacts) -> (String, DesiredStatus) {
    let inputs = inputs(&[], vec![facts]);
    let acceptance = Acceptance::of(&inputs.compilation.outcome);
    let status = Gateways::new(&inputs, &acceptance).status("VipGateway/g1");
    let text = |it: &Condition| format!("{} {} {}", it.kind, it.status.as_str(), it.reason);
    (status.conditions[1..].iter().map(text).collect::<Vec<_>>().join(", "), status)
}

fn active() -> GatewayFacts {
    GatewayFacts { is_active: true, desired_state: Some(DesiredState::Ready), ..connected("g1", 1) }
}

#[test]
fn a_gateway_is_ready_while_it_is_active_and_draining_while_it_asks_for_it() {
    let draining = GatewayFacts { desired_state: Some(DesiredState::Draining), ..active() };
    let drained = GatewayFacts { is_active: false, ..draining.clone() };
    let joining = GatewayFacts { is_active: false, desired_state: Some(DesiredState::Joining), ..active() };
    let cases = [
        (active(), "Ready True Active, Draining False NotDraining"),
        (draining.clone(), "Ready True Active, Draining True Draining"),
        (
            GatewayFacts { drain_block: Some("no backup".to_owned()), ..draining.clone() },
            "Ready True Active, Draining True Blocked",
        ),
        (drained.clone(), "Ready False Drained, Draining True Drained"),
        (joining.clone(), "Ready False Joining, Draining False NotDraining"),
        (
            GatewayFacts { desired_state: None, ..joining.clone() },
            "Ready False NoHeartbeat, Draining False NotDraining",
        ),
        (GatewayFacts { is_connected: false, ..joining }, "Ready False NotConnected, Draining False NotDraining"),
        // A fault asks for a drain, and is none.
        (GatewayFacts { fault: Some("link".into()), ..drained }, "Ready False Unable, Draining False NotDraining"),
        (GatewayFacts { fault: Some("link".into()), ..draining }, "Ready True Active, Draining False NotDraining"),
    ];
    for (facts, expected) in cases {
        assert_eq!(status(facts).0, expected);
    }
}

#[test]
fn only_an_active_gateway_has_vips_and_the_first_of_an_order_has_them() {
    let vips = |facts: Vec<GatewayFacts>| {
        let inputs = inputs(&[], facts);
        let acceptance = Acceptance::of(&inputs.compilation.outcome);
        let gateways = Gateways::new(&inputs, &acceptance);
        ["g1", "g2"].map(|name| gateways.status(&format!("VipGateway/{name}")).fields["vips"].as_u64().unwrap())
    };
    let backup = GatewayFacts { name: "g2".into(), ..active() };
    assert_eq!(vips(vec![active(), backup.clone()]), [1, 0]);
    assert_eq!(vips(vec![GatewayFacts { is_active: false, ..active() }, backup]), [0, 1], "its backup has taken over");
}

#[test]
fn a_new_leader_waits_for_gateways_before_it_says_that_they_are_gone() {
    let (_, desired) = status(GatewayFacts { is_active: false, ..active() });
    assert!(!desired.is_provisional);
    let mut inputs = inputs(&[], vec![]);
    inputs.leading_for = Duration::from_secs(9);
    let acceptance = Acceptance::of(&inputs.compilation.outcome);
    assert!(Gateways::new(&inputs, &acceptance).status("VipGateway/g1").is_provisional);
}

#[test]
fn the_version_is_that_of_the_last_connection() {
    let (_, desired) = status(GatewayFacts { version: Some("1.2".to_owned()), ..active() });
    assert_eq!(desired.fields["version"], "1.2");
    let (_, desired) = status(GatewayFacts { is_connected: false, ..active() });
    assert!(!desired.fields.contains_key("version") && desired.retained.contains(&"version"));
}

#[test]
fn sessions_are_those_of_the_last_sample_while_there_are_heartbeats() {
    let sessions = |facts| {
        let (_, desired) = status(facts);
        (desired.fields.get("sessions").cloned(), desired.retained.contains(&"sessions"))
    };
    assert_eq!(sessions(GatewayFacts { sessions: Some(48_211), ..active() }).0, Some(48_211.into()));
    assert_eq!(sessions(active()), (None, true), "not sampled yet");
    assert_eq!(sessions(GatewayFacts { desired_state: None, ..active() }), (None, false));
}
