use vipgate_policy::diagnostic::{Code, Diagnostic, Severity};

use super::*;
use crate::policyd::object_state::Compilation;
use crate::policyd::object_status::fixtures::{connected, inputs, with_faulty};
use crate::xds::resource::{Key, Kind};

const NAME: &str = "EgressPolicy/a/p";

/// The status of the policy, and its condition `Programmed` in short.
fn status(inputs: &Inputs) -> (DesiredStatus, String) {
    let acceptance = Acceptance::of(&inputs.compilation.outcome);
    let status = Policies::new(inputs, &acceptance).status(NAME);
    let Condition { status: truth, reason, message, .. } = status.conditions[1].clone();
    (status, format!("{} {reason}: {message}", truth.as_str()))
}

#[test]
fn a_policy_is_programmed_once_every_forwarding_gateway_has_it() {
    let of = |gateways: Vec<GatewayFacts>| {
        let (desired, programmed) = status(&inputs(&[], gateways));
        (programmed, desired.is_provisional)
    };
    assert_eq!(of(vec![]), ("False NoGateway: no gateway is connected or active".to_owned(), true));
    let in_force = ("True Programmed: in force on every gateway".to_owned(), false);
    assert_eq!(of(vec![connected("g1", 1)]), in_force);
    assert_eq!(of(vec![connected("g1", 2), connected("g2", 1)]), in_force);
    let pending = ("False NotAcknowledged: not acknowledged by 1 of 2 gateways: g2".to_owned(), true);
    assert_eq!(of(vec![connected("g1", 1), connected("g2", 0)]), pending);
    // One that forwards nothing has no part in it, and neither has one that the policy doesn't name.
    let gone = GatewayFacts { is_connected: false, ..connected("g2", 0) };
    assert_eq!(of(vec![connected("g1", 1), gone.clone()]), in_force);
    assert_eq!(of(vec![connected("g1", 1), GatewayFacts { is_known: false, ..connected("x", 0) }]), in_force);
    // One that is active and gets its policy from another server has it if its heartbeats say so.
    let elsewhere = GatewayFacts { is_active: true, ..gone };
    assert_eq!(of(vec![connected("g1", 1), GatewayFacts { in_force: 1, ..elsewhere.clone() }]), in_force);
    let unknown =
        "Unknown GatewayElsewhere: not reported as in force by gateways of another policy server: 1 of 2 gateways: g2";
    assert_eq!(of(vec![connected("g1", 1), elsewhere]), (unknown.to_owned(), true));
    let rejecting = GatewayFacts { rejection: Some("no memory".to_owned()), ..connected("g2", 0) };
    let rejected = "False RejectedByGateway: 1 of 2 gateways: g2: no memory";
    assert_eq!(of(vec![connected("g1", 1), rejecting]), (rejected.to_owned(), false));
}

#[test]
fn an_address_that_is_being_recorded_is_soon_in_force() {
    let mut inputs = inputs(&[], vec![connected("g1", 1)]);
    let mut outcome = (*inputs.compilation.outcome).clone();
    let pending = Diagnostic::for_file(NAME, Code::AddressPending, "203.0.113.2 is being recorded");
    outcome.diagnostics.push(Diagnostic { severity: Severity::Warning, ..pending });
    let published = inputs.compilation.published.clone();
    inputs.compilation = Arc::new(Compilation { outcome: Arc::new(outcome), published });
    let (desired, programmed) = status(&inputs);
    assert_eq!(programmed, "True Programmed: in force on every gateway");
    assert_eq!((&*desired.conditions[0].reason, desired.is_provisional), ("AddressPending", true));
}

#[test]
fn a_policy_of_which_a_gateway_refuses_a_part_is_not_programmed_and_says_where_and_why() {
    let refused = |kind, name: &str| vec![(Key { kind, name: name.into() }, "is a local address".into())];
    let with = |set_aside| GatewayFacts { set_aside, ..connected("g2", 1) };
    let of = |second: GatewayFacts| status(&inputs(&[], vec![connected("g1", 1), second])).1;
    let message = |resource: &str| {
        format!(
            "False RejectedByGateway: a part of it is set aside at 1 of 2 gateways: g2: {resource}: is a local address"
        )
    };
    assert_eq!(of(with(refused(Kind::Vip, "203.0.113.1"))), message("Vip 203.0.113.1"));
    assert_eq!(of(with(refused(Kind::Endpoint, "10.0.0.2"))), message("Endpoint 10.0.0.2"));
    assert_eq!(of(with(refused(Kind::EgressPolicy, "EgressPolicy a/p"))), message("EgressPolicy a/p"));
    assert_eq!(of(with(refused(Kind::Service, "Service a/s"))), "True Programmed: in force on every gateway");
    // One that another server serves says only that it has a variant.
    let elsewhere = GatewayFacts { is_connected: false, is_active: true, lacks_unknown: true, ..connected("g2", 1) };
    let expected = "True Programmed: in force on every gateway; another policy server knows what is set aside at 1 of 2 \
                    gateways: g2";
    assert_eq!(of(elsewhere), expected);
}

#[test]
fn a_status_has_addresses_endpoints_and_gateways() {
    let (desired, _) = status(&inputs(&[], vec![connected("g1", 1)]));
    let fields = json!({
        "addresses": ["203.0.113.1"], "addressCount": 1, "endpoints": 2, "gateways": ["g1", "g2"], "gatewayCount": 2,
    });
    assert_eq!(Value::Object(desired.fields), fields);
}

#[test]
fn a_policy_that_is_not_accepted_is_not_programmed() {
    let rejected = with_faulty(inputs(&[], vec![connected("g1", 1)]), false);
    assert_eq!(status(&rejected).1, "False NotAccepted: nothing of it is in force");
    let last_good = with_faulty(inputs(&[], vec![connected("g1", 1)]), true);
    let (desired, programmed) = status(&last_good);
    assert_eq!(programmed, "False NotAccepted: its last valid version is in force");
    assert_eq!(desired.fields["endpoints"], 2);
}

#[test]
fn lists_of_gateways_are_bounded() {
    let names: Vec<String> = (0..9).map(|n| format!("g{n}")).collect();
    assert_eq!(listed(1000, &names), "9 of 1000 gateways: g0, g1, g2, g3, g4, ...");
}
