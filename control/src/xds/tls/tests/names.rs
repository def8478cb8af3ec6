//! Whose a certificate is.

use super::*;

fn names(own: &Identity) -> Names {
    Names::of(&certificates(&own.cert).unwrap()[0])
}

#[test]
fn a_certificate_is_of_its_dns_names_its_uris_and_its_common_name() {
    let ca = Authority::new("ca");
    let dns = names(&ca.issue(&["gw-a", "gw-a.example", "192.0.2.1"]));
    assert_eq!(dns.to_string(), "gw-a, gw-a.example");
    assert!(dns.include("gw-a") && dns.include("gw-a.example"));
    for other in ["gw-b", "gw", "example", "192.0.2.1", "GW-A", ""] {
        assert!(!dns.include(other), "{other}");
    }
    assert!(names(&ca.issue_named(Some("gw-a"), None)).include("gw-a"));
    let uri = names(&ca.issue_named(None, Some("spiffe://example.org/ns/x/gateway/gw-a")));
    assert!(uri.include("gw-a") && !uri.include("x") && !uri.include("ns"));
    let others = ["spiffe://example.org/gateway/gw-a/b", "spiffe://example.org/gw-a", "spiffe://example.org/gateway/"];
    for uri in others {
        let names = names(&ca.issue_named(None, Some(uri)));
        assert_eq!(names.to_string(), "nobody", "{uri}");
    }
}

#[test]
fn a_wildcard_is_no_name_of_a_gateway() {
    let names = names(&Authority::new("ca").issue(&["*.example"]));
    assert!(!names.include("gw-a.example"));
}

#[test]
fn what_is_no_certificate_names_nobody() {
    let names = Names::of(&CertificateDer::from(vec![0x30, 3, 2, 1, 1]));
    assert!(!names.include(""));
    assert_eq!(names.to_string(), "nobody (no DNS name, no common name)");
}
