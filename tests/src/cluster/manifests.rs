//! Policy of a cluster: its gateways, an address pool of each kind, and two tenants.

use std::fmt::Write as _;

use super::{CLAIMED, HTTP, LINES, SHARED};

/// How many addresses of the crowd are tenant A's; 10.1.1.1 and on.
pub const CROWD_A: u8 = 100;
/// How many are tenant B's; 10.1.2.1 and on.
pub const CROWD_B: u8 = 20;

/// The addresses of the crowd, tenant A's first.
pub(super) fn crowd() -> impl Iterator<Item = [String; 2]> {
    part(1, CROWD_A).chain(part(2, CROWD_B))
}

fn part(tenant: u8, last: u8) -> impl Iterator<Item = [String; 2]> {
    (1..=last).map(move |number| [format!("10.1.{tenant}.{number}"), format!("fd00:1::{tenant}:{number}")])
}

/// The gateways, as many, and a pool of each kind.
pub(super) fn gateways(count: usize) -> String {
    let mut text = String::new();
    for number in 1..=count {
        let _ = write!(
            text,
            "---\napiVersion: vipgate.io/v1alpha1\nkind: Gateway\nmetadata: {{name: gw-{number}}}\n\
             spec: {{peerAddress: 10.2.0.{number}}}\n"
        );
    }
    for (name, ranges, announce) in [
        ("shared", "192.0.2.0/28, \"2001:db8:2::/120\"", "BGP"),
        ("claimed", "203.0.113.16/28, \"2001:db8:113::20/124\"", "L2"),
    ] {
        let _ = write!(
            text,
            "---\napiVersion: vipgate.io/v1alpha1\nkind: AddressPool\nmetadata: {{name: {name}}}\n\
             spec: {{ranges: [{ranges}], announce: {announce}}}\n"
        );
    }
    text
}

/// Both tenants.
pub(super) fn tenants() -> String {
    let own =
        |numbers: &[u8]| numbers.iter().map(|n| [format!("10.1.0.{n}"), format!("fd00:1::{n}")]).collect::<Vec<_>>();
    let mut a = own(&[11, 12]);
    a.extend(part(1, CROWD_A));
    let mut b = own(&[21]);
    b.extend(part(2, CROWD_B));
    tenant("a", "api", SHARED, &a) + &tenant("b", "web", CLAIMED, &b)
}

fn tenant(name: &str, service: &str, vips: [&str; 2], endpoints: &[[String; 2]]) -> String {
    let mut text = format!(
        "---\napiVersion: v1\nkind: Namespace\nmetadata: {{name: tenant-{name}}}\n\
         ---\napiVersion: v1\nkind: Service\n\
         metadata: {{name: {service}, namespace: tenant-{name}, annotations: {{vipgate.io/egress: \"true\"}}}}\n\
         spec:\n  type: LoadBalancer\n  ports:\n\
         \x20   - {{name: tcp, port: {HTTP}, targetPort: {LINES}, protocol: TCP}}\n\
         \x20   - {{name: udp, port: {HTTP}, targetPort: {LINES}, protocol: UDP}}\n\
         status: {{loadBalancer: {{ingress: [{{ip: {}}}, {{ip: \"{}\"}}]}}}}\n",
        vips[0], vips[1]
    );
    for (index, family) in ["IPv4", "IPv6"].into_iter().enumerate() {
        let _ = write!(
            text,
            "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
             metadata: {{name: {service}-{}, namespace: tenant-{name}, labels: {{kubernetes.io/service-name: {service}}}}}\n\
             addressType: {family}\nports: [{{name: tcp, port: {LINES}}}, {{name: udp, port: {LINES}, protocol: UDP}}]\n\
             endpoints:\n",
            family.to_lowercase()
        );
        for addresses in endpoints {
            let pod = addresses[0].replace('.', "-");
            let _ = writeln!(
                text,
                "  - {{addresses: [\"{}\"], conditions: {{ready: true}}, \
                 targetRef: {{kind: Pod, name: pod-{pod}, namespace: tenant-{name}}}}}",
                addresses[index]
            );
        }
    }
    text
}

/// The addresses of the crowd that are tenant A's, of one family: 0 is IPv4.
pub fn sources_a(family: usize) -> Vec<String> {
    part(1, CROWD_A).map(|addresses| addresses[family].clone()).collect()
}

/// Those of tenant B.
pub fn sources_b(family: usize) -> Vec<String> {
    part(2, CROWD_B).map(|addresses| addresses[family].clone()).collect()
}
