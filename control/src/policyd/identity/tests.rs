//! Log rate limiting of rejections, and authorization of admin commands.

use std::net::Ipv4Addr;

use super::*;

/// A certificate with these names; `None`: none is needed.
fn credential(names: Option<&[&str]>) -> Credential {
    names.map_or(Credential::Unneeded, |names| Credential::Certificate(CertificateNames::from_names(names)))
}

#[test]
fn a_rejection_is_logged_once_per_interval_for_each_address_and_name() {
    let log = RejectionLog::default();
    let (a, b) = (Some(IpAddr::from(Ipv4Addr::LOCALHOST)), Some(IpAddr::from([192, 0, 2, 1])));
    let (now, later) = (Instant::now(), Instant::now() + LOG_INTERVAL);
    assert_eq!(log.is_due(a, "gw-a", now), Some(0));
    assert_eq!(log.is_due(a, "gw-a", now), None);
    assert_eq!(log.is_due(b, "gw-a", now), Some(0));
    assert_eq!(log.is_due(a, "gw-b", now), Some(0));
    assert_eq!(log.is_due(a, "gw-a", now), None);
    assert_eq!(log.is_due(a, "gw-a", later), Some(2), "it returns the number of suppressed lines");
    assert_eq!(log.is_due(a, "gw-a", later), None);
}

#[test]
fn the_number_of_tracked_rejections_is_bounded() {
    let (log, now) = (RejectionLog::default(), Instant::now());
    for n in 0..3 * MAX_TRACKED_REJECTIONS {
        assert_eq!(log.is_due(None, &n.to_string(), now), Some(0));
    }
    assert!(log.0.len() <= MAX_TRACKED_REJECTIONS);
}

#[test]
fn commands_are_allowed_to_admins_by_default_all_but_gateways_and_nodes_and_without_certificates_to_this_host() {
    let client =
        |names: Option<&[&str]>, is_local| ClientIdentity { address: None, is_local, credential: credential(names) };
    let admins = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
    let role_of = |name: &str| match name.split_once('-')? {
        ("gw", _) => Some("gateway"),
        ("n", _) => Some("node"),
        _ => None,
    };
    let is_allowed =
        |client: &ClientIdentity, named: &[&str]| client.authorize_command(&admins(named), role_of).is_ok();
    let (operator, gateway) = (client(Some(&["x", "operator"]), false), client(Some(&["gateway", "gw-a"]), true));
    assert!(is_allowed(&operator, &[]) && is_allowed(&operator, &["operator"]) && !is_allowed(&operator, &["root"]));
    assert!(!is_allowed(&gateway, &[]) && is_allowed(&gateway, &["root", "gw-a"]), "`admins` may name a gateway");
    assert!(is_allowed(&client(None, true), &[]) && !is_allowed(&client(None, false), &[]));
    let error = gateway.authorize_command(&[], role_of).unwrap_err();
    assert_eq!(error.code(), tonic::Code::PermissionDenied);
    assert!(error.message().contains("is that of gateway gw-a, and gateways may not do this"), "{error}");
    let error = client(Some(&["n-1"]), true).authorize_command(&[], role_of).unwrap_err();
    assert!(error.message().contains("is that of node n-1, and nodes may not do this"), "{error}");
}

#[test]
fn the_agent_of_a_node_needs_a_certificate_with_the_name_of_the_node() {
    let client = |names: Option<&[&str]>| ClientIdentity { credential: credential(names), ..ClientIdentity::default() };
    assert!(client(Some(&["x", "n-1"])).authorize_node("n-1").is_ok() && client(None).authorize_node("n-1").is_ok());
    let error = client(Some(&["n-1"])).authorize_node("n-2").unwrap_err();
    assert_eq!(error.code(), tonic::Code::PermissionDenied);
    assert!(error.message().contains("not for node n-2"), "{error}");
}

#[test]
fn a_client_with_a_token_is_the_agent_of_its_node_and_one_with_nothing_is_nobody() {
    let client = |credential| ClientIdentity { address: None, is_local: true, credential };
    let pod = |role| client(Credential::Token(VerifiedPod { role, node: "n-1".into() }));
    let (agent, gateway, nobody) = (pod(PodRole::Agent), pod(PodRole::Gateway), client(Credential::Missing));
    assert!(agent.authorize_node("n-1").is_ok());
    let error = agent.authorize_node("n-2").unwrap_err();
    assert!(error.message().contains("the agent of node n-1, not of n-2"), "{error}");
    let error = gateway.authorize_node("n-1").unwrap_err();
    assert!(error.message().contains("that of gateway n-1, not of an agent"), "{error}");
    assert!(gateway.authorize_gateway("n-1").is_ok());
    let error = gateway.authorize_gateway("n-2").unwrap_err();
    assert!(error.message().contains("that of gateway n-1, not of n-2: set the gateway's `name` to n-1"), "{error}");
    for client in [&agent, &nobody] {
        assert!(client.authorize_gateway("n-1").is_err() && client.authorize_gateway("").is_err());
    }
    for client in [&agent, &gateway, &nobody] {
        assert!(!client.has_certificate() && client.authorize_query().is_err());
        for admins in [vec![], vec!["n-1".to_owned(), String::new()]] {
            assert!(client.authorize_command(&admins, |_| None).is_err(), "not even on the server's own host");
        }
    }
    assert!(nobody.authorize_node("n-1").is_err() && nobody.authorize_node("").is_err());
}
