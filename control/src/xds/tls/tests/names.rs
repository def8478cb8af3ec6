//! Gateway names in certificates.

use super::*;

fn names(own: &Identity) -> CertificateNames {
    CertificateNames::from_certificate(&certificates(&own.cert).unwrap()[0])
}

#[test]
fn dns_names_uris_and_common_names_are_gateway_names() {
    let ca = Authority::new("ca");
    let dns = names(&ca.issue(&["gw-a", "gw-a.example", "192.0.2.1"]));
    assert_eq!(dns.to_string(), "gw-a, gw-a.example");
    assert!(dns.contains("gw-a") && dns.contains("gw-a.example"));
    for other in ["gw-b", "gw", "example", "192.0.2.1", "GW-A", ""] {
        assert!(!dns.contains(other), "{other}");
    }
    assert!(names(&ca.issue_named(Some("gw-a"), None)).contains("gw-a"));
    let uri = names(&ca.issue_named(None, Some("spiffe://example.org/ns/x/gateway/gw-a")));
    assert!(uri.contains("gw-a") && !uri.contains("x") && !uri.contains("ns"));
    let without_name =
        ["spiffe://example.org/gateway/gw-a/b", "spiffe://example.org/gw-a", "spiffe://example.org/gateway/"];
    for uri in without_name {
        let names = names(&ca.issue_named(None, Some(uri)));
        assert_eq!(names.to_string(), "nobody", "{uri}");
    }
}

#[test]
fn wildcards_do_not_match() {
    let names = names(&Authority::new("ca").issue(&["*.example"]));
    assert!(!names.contains("gw-a.example"));
}

#[test]
fn an_unparsable_certificate_has_no_names() {
    let names = CertificateNames::from_certificate(&CertificateDer::from(vec![0x30, 3, 2, 1, 1]));
    assert!(!names.contains(""));
    assert_eq!(names.to_string(), "none (no DNS name, no gateway URI, no common name)");
}
