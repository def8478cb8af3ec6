//! Manifests of a cluster: its gateways, an address pool for BGP and one for L2, and two tenants.

use std::fmt::Write as _;

use super::{BGP_VIPS, HTTP_PORT, L2_VIPS, LINE_PORT};

/// Number of bulk pods of tenant A, from 10.1.1.1.
pub const BULK_PODS_A: u8 = 100;
/// Number of bulk pods of tenant B, from 10.1.2.1.
pub const BULK_PODS_B: u8 = 20;

/// Addresses of the bulk pods, tenant A's first.
pub(super) fn bulk_pods() -> impl Iterator<Item = [String; 2]> {
    bulk_addresses(1, BULK_PODS_A).chain(bulk_addresses(2, BULK_PODS_B))
}

fn bulk_addresses(tenant: u8, last: u8) -> impl Iterator<Item = [String; 2]> {
    (1..=last).map(move |number| [format!("10.1.{tenant}.{number}"), format!("fd00:1::{tenant}:{number}")])
}

/// Manifests of the gateways with these indices and of the address pools.
pub(super) fn gateways(indices: &[usize]) -> String {
    let mut text = String::new();
    for number in indices.iter().map(|index| index + 1) {
        let _ = write!(
            text,
            "---\napiVersion: vipgate.io/v1alpha1\nkind: VipGateway\nmetadata: {{name: gw-{number}}}\n\
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

/// Manifests of both tenants.
pub(super) fn tenants() -> String {
    let pods =
        |numbers: &[u8]| numbers.iter().map(|n| [format!("10.1.0.{n}"), format!("fd00:1::{n}")]).collect::<Vec<_>>();
    let mut a = pods(&[11, 12]);
    a.extend(bulk_addresses(1, BULK_PODS_A));
    let mut b = pods(&[21]);
    b.extend(bulk_addresses(2, BULK_PODS_B));
    tenant("a", "api", BGP_VIPS, &a) + &tenant("b", "web", L2_VIPS, &b)
}

fn tenant(name: &str, service: &str, vips: [&str; 2], endpoints: &[[String; 2]]) -> String {
    let mut text = format!(
        "---\napiVersion: v1\nkind: Namespace\nmetadata: {{name: tenant-{name}}}\n\
         ---\napiVersion: v1\nkind: Service\n\
         metadata: {{name: {service}, namespace: tenant-{name}, annotations: {{vipgate.io/egress: \"true\"}}}}\n\
         spec:\n  type: LoadBalancer\n  ports:\n\
         \x20   - {{name: tcp, port: {HTTP_PORT}, targetPort: {LINE_PORT}, protocol: TCP}}\n\
         \x20   - {{name: udp, port: {HTTP_PORT}, targetPort: {LINE_PORT}, protocol: UDP}}\n\
         status: {{loadBalancer: {{ingress: [{{ip: {}}}, {{ip: \"{}\"}}]}}}}\n",
        vips[0], vips[1]
    );
    for (index, family) in ["IPv4", "IPv6"].into_iter().enumerate() {
        let _ = write!(
            text,
            "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
             metadata: {{name: {service}-{}, namespace: tenant-{name}, \
             labels: {{kubernetes.io/service-name: {service}}}}}\n\
             addressType: {family}\n\
             ports: [{{name: tcp, port: {LINE_PORT}}}, {{name: udp, port: {LINE_PORT}, protocol: UDP}}]\n\
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

/// Addresses of tenant A's bulk pods, of one family: 0 is IPv4, 1 is IPv6.
pub fn sources_a(family: usize) -> Vec<String> {
    bulk_addresses(1, BULK_PODS_A).map(|addresses| addresses[family].clone()).collect()
}

/// Addresses of tenant B's bulk pods, of one family.
pub fn sources_b(family: usize) -> Vec<String> {
    bulk_addresses(2, BULK_PODS_B).map(|addresses| addresses[family].clone()).collect()
}
