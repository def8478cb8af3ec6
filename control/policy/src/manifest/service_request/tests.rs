//! What Services may ask of address management.

use std::sync::Arc;

use crate::diagnostic::Diagnostic;
use crate::manifest::{Manifests, UnsupportedKinds, read};
use crate::yaml::Source;

#[test]
fn addresses_and_pools_that_there_can_not_be_are_warned_of() {
    let warnings = |annotations: &str, spec: &str| {
        let text = format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: s, annotations: {{{annotations}}}}}\n\
             spec: {{type: LoadBalancer, ports: [{{port: 80}}]{spec}}}\n\
             status: {{loadBalancer: {{ingress: [{{ip: 203.0.113.10}}]}}}}\n"
        );
        let mut got = Manifests::default();
        read(&Arc::new(Source::new("m.yaml", text)), UnsupportedKinds::Reject, &mut got);
        // The Service itself is in force.
        assert!(got.objects.len() == 1 && !got.diagnostics.iter().any(Diagnostic::is_error));
        got.diagnostics.iter().map(|it| format!("{}: {}", it.field, it.reason)).collect::<Vec<_>>()
    };
    let addresses = |text: &str| warnings(&format!("vipgate.io/addresses: \"{text}\""), "");
    let pool = |text: &str| warnings(&format!("vipgate.io/pool: \"{text}\""), "");
    let none: [&str; 0] = [];
    assert_eq!(addresses("203.0.113.9, 2001:db8::9"), none);
    assert_eq!(
        addresses("203.0.113.300"),
        [
            "metadata.annotations[vipgate.io/addresses]: `203.0.113.300` is not an IP address; vipgate assigns no address"
        ]
    );
    assert_eq!(
        addresses("203.0.113.9,203.0.113.8"),
        [
            "metadata.annotations[vipgate.io/addresses]: 203.0.113.9 and 203.0.113.8 are of one family: name at most one \
             of each; vipgate assigns no address"
        ]
    );
    let field = ", loadBalancerIP: 203.0.113.0/24";
    let of_field = ["spec.loadBalancerIP: `203.0.113.0/24` is not an IP address; vipgate assigns no address"];
    assert_eq!(warnings("", field), of_field);
    assert_eq!(warnings("vipgate.io/addresses: 203.0.113.9", field), none);
    for name in ["public", "public.example-1", "a", "9"] {
        assert_eq!(pool(name), none, "{name}");
    }
    for name in ["Public", "a_b", "a..b", "-a", "a-", ".", "a.b-.c", &"a".repeat(254)] {
        let expected = "is no possible name of an AddressPool; vipgate assigns no address";
        assert_eq!(pool(name), [format!("metadata.annotations[vipgate.io/pool]: `{name}` {expected}")]);
    }
}
