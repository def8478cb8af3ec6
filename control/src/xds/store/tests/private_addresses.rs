//! Private addresses of VIPs that are ambiguous after an update are rejected with the reason, and those that an update moves aren't.

use vipgate_dataplane::policy::spec::PrivateAddressSpec;

use super::*;
use crate::xds::fixtures::sample_placement;

/// Gateways and the private addresses of a VIP there.
type Private<'a> = &'a [(&'a str, &'a str)];
/// VIPs with their private addresses.
type Vips<'a> = &'a [(&'a str, Private<'a>)];

fn server(vips: Vips<'_>) -> ServerPolicy {
    let mut placement = sample_placement(1);
    let template = placement.vips.iter().next().unwrap().clone();
    let private =
        |(gateway, address): &(&str, &str)| PrivateAddressSpec { gateway: (*gateway).into(), address: ip(address) };
    let vip = |(address, all): &(&str, Private<'_>)| VipSpec {
        address: ip(address),
        private: all.iter().map(private).collect(),
        ..template.clone()
    };
    // The endpoints' VIP is always there.
    let others = vips.iter().map(vip).chain([template.clone()]);
    placement.vips = others.collect::<Vec<_>>().into();
    ServerPolicy::of(&placement)
}

/// Updates from each of these to the next; the error of the last one, which is then discarded.
fn update(all: &[Vips<'_>]) -> Option<String> {
    let mut store = store_with(&server(&[]));
    let mut before = server(&[]);
    let mut error = None;
    for vips in all {
        assert_eq!(error, None);
        let after = server(vips);
        for response in responses(&after.diff(&before)) {
            store.stage(response).unwrap();
        }
        error = store.check_consistency().err().map(|error| error.to_string());
        if error.is_none() {
            store.commit();
        } else {
            store.discard();
        }
        before = after;
    }
    error
}

const A: &str = "203.0.113.7";
const B: &str = "203.0.113.8";

#[test]
fn ambiguous_private_addresses_are_rejected_with_the_reason() {
    let at = |vip, private| (vip, private);
    let first: Private<'_> = &[("g1", "10.0.9.1"), ("g2", "10.0.9.2")];
    let same: Private<'_> = &[("g2", "10.0.9.2")];
    let duplicate = "its private address 10.0.9.2 at gateway g2 is the one of VIP 203.0.113.7, too";
    let is_vip = "its private address 203.0.113.8 at gateway g1 is a VIP";
    let to_vip: Private<'_> = &[("g1", B)];
    let cases: [(&[Vips<'_>], String); 5] = [
        (&[&[at(A, first), at(B, same)]], format!("resource Vip {B}: {duplicate}")),
        (&[&[at(A, first)], &[at(A, first), at(B, same)]], format!("resource Vip {B}: {duplicate}")),
        (&[&[at(A, to_vip), at(B, &[])]], format!("resource Vip {A}: {is_vip}")),
        (&[&[at(B, &[])], &[at(A, to_vip), at(B, &[])]], format!("resource Vip {A}: {is_vip}")),
        (
            &[&[at(A, to_vip)], &[at(A, to_vip), at(B, &[])]],
            format!("resource Vip {B}: is the private address of VIP {A} at gateway g1"),
        ),
    ];
    for (updates, expected) in cases {
        assert_eq!(update(updates), Some(expected));
    }
}

#[test]
fn private_addresses_may_move_with_an_update_and_be_equal_at_two_gateways() {
    let (first, second): (Private<'_>, Private<'_>) = (&[("g1", "10.0.9.1")], &[("g1", "10.0.9.2")]);
    let elsewhere: Private<'_> = &[("g2", "10.0.9.1")];
    let of_b: Private<'_> = &[("g1", B)];
    let valid: [&[Vips<'_>]; 6] = [
        // Exchanged.
        &[&[(A, first), (B, second)], &[(A, second), (B, first)], &[(A, first), (B, second)]],
        // From one to the other one, and back.
        &[&[(A, first), (B, &[])], &[(A, &[]), (B, first)], &[(A, first)]],
        &[&[(A, first)], &[(B, first)], &[(A, first), (B, second)]],
        // The same VIP again.
        &[&[(A, first)], &[(A, first), (B, second)], &[(A, first)]],
        &[&[(A, first), (B, elsewhere)]],
        // A VIP becomes a private address, and the other way round.
        &[&[(B, &[])], &[(A, of_b)], &[(B, first)]],
    ];
    for updates in valid {
        assert_eq!(update(updates), None, "{updates:?}");
    }
}
