//! How often refusals are logged.

use std::net::Ipv4Addr;

use super::*;

#[test]
fn a_refusal_is_logged_once_in_a_while_for_each_address_and_name() {
    let refusals = Refusals::default();
    let (a, b) = (Some(IpAddr::from(Ipv4Addr::LOCALHOST)), Some(IpAddr::from([192, 0, 2, 1])));
    let (now, later) = (Instant::now(), Instant::now() + LOG_INTERVAL);
    assert_eq!(refusals.is_due(a, "gw-a", now), Some(0));
    assert_eq!(refusals.is_due(a, "gw-a", now), None);
    assert_eq!(refusals.is_due(b, "gw-a", now), Some(0));
    assert_eq!(refusals.is_due(a, "gw-b", now), Some(0));
    assert_eq!(refusals.is_due(a, "gw-a", now), None);
    assert_eq!(refusals.is_due(a, "gw-a", later), Some(2), "it says how often it has come since");
    assert_eq!(refusals.is_due(a, "gw-a", later), None);
}

#[test]
fn what_is_kept_of_refusals_is_bounded() {
    let (refusals, now) = (Refusals::default(), Instant::now());
    for n in 0..3 * MAX_REFUSALS {
        assert_eq!(refusals.is_due(None, &n.to_string(), now), Some(0));
    }
    assert!(refusals.0.lock().unwrap().len() <= MAX_REFUSALS);
}

#[test]
fn orders_come_from_admins_or_from_those_who_are_no_gateways_or_from_this_host() {
    let peer = |names: Option<&[&str]>, is_here| Peer { address: None, is_here, names: names.map(Names::named) };
    let admins = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
    let is_gateway = |name: &str| name.starts_with("gw-");
    let may = |peer: &Peer, named: &[&str]| peer.may_order(&admins(named), is_gateway).is_ok();
    let (operator, gateway) = (peer(Some(&["x", "operator"]), false), peer(Some(&["gateway", "gw-a"]), true));
    assert!(may(&operator, &[]) && may(&operator, &["operator"]) && !may(&operator, &["root"]));
    assert!(!may(&gateway, &[]) && may(&gateway, &["root", "gw-a"]), "whoever names a gateway means it");
    assert!(may(&peer(None, true), &[]) && !may(&peer(None, false), &[]));
    let why = gateway.may_order(&[], is_gateway).unwrap_err();
    assert_eq!(why.code(), tonic::Code::PermissionDenied);
    assert!(why.message().contains("is of gateway gw-a, and no gateway may do this"), "{why}");
}
