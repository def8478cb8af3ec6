//! Minimal gateway: one interface for both sides, one queue, generic XDP.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::time::Duration;

use vipgate_lab::{Lab, reflector};
use vipgate_tests::binary;
use vipgate_tests::drop_accounting::DropAccounting;

const POLICY: &str = r#"
apiVersion: v1
kind: Service
metadata: {name: s, namespace: a, annotations: {vipgate.io/egress: "true"}}
spec: {type: LoadBalancer, ports: [{port: 80}]}
status: {loadBalancer: {ingress: [{ip: 10.1.0.100}, {ip: "fd00:1::100"}]}}
---
apiVersion: v1
kind: List
items:
  - apiVersion: discovery.k8s.io/v1
    kind: EndpointSlice
    metadata: {name: s4, namespace: a, labels: {kubernetes.io/service-name: s}}
    addressType: IPv4
    ports: [{port: 8080}]
    endpoints: [{addresses: [10.1.0.11]}]
  - apiVersion: discovery.k8s.io/v1
    kind: EndpointSlice
    metadata: {name: s6, namespace: a, labels: {kubernetes.io/service-name: s}}
    addressType: IPv6
    ports: [{port: 8080}]
    endpoints: [{addresses: ["fd00:1::11"]}]
"#;

#[test]
fn a_single_interface_carries_both_sides() {
    let lab = Lab::new("arm").unwrap();
    let [switch, gateway, pod, router] =
        [("switch", false), ("gw", true), ("pod", false), ("router", true)].map(|(name, f)| lab.host(name, f).unwrap());
    switch.add_bridge("net").unwrap();
    for (host, number) in [(&gateway, 1), (&pod, 11), (&router, 254)] {
        lab.attach((host, "eth0"), (&switch, host.name()), "net").unwrap();
        host.addresses("eth0", &[&format!("10.1.0.{number}/24"), &format!("fd00:1::{number}/64")]).unwrap();
    }
    for (host, via) in [(&pod, ["10.1.0.1", "fd00:1::1"]), (&gateway, ["10.1.0.254", "fd00:1::254"])] {
        host.route("default", via[0]).unwrap();
        host.route("default", via[1]).unwrap();
    }
    router.addresses("lo", &["198.51.100.10/32", "2001:db8:51::10/128"]).unwrap();
    reflector::start(&router, &["198.51.100.10", "2001:db8:51::10"]);
    reflector::start_at(&pod, &["10.1.0.11", "fd00:1::11"], 8080);

    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::write(path("policy.yaml"), POLICY).unwrap();
    let config = format!(
        "name: arm\ninterfaces: [{{name: eth0, role: both}}]\nxdp: {{mode: generic}}\n\
         policy: {{files: [{}]}}\nsessions: {{capacity: 1000, state: null}}\nadmin: {{socket: {}}}\n",
        path("policy.yaml").display(),
        path("gw.sock").display()
    );
    fs::write(path("gateway.yaml"), config).unwrap();
    let command = [&binary().display().to_string(), "gateway", "--config", &path("gateway.yaml").display().to_string()];
    let mut process = gateway.spawn(&command, &path("log")).unwrap();
    process.wait_for_log("event=\"ready\"", Duration::from_secs(10)).unwrap_or_else(|error| panic!("{error}"));

    for (server, vip) in [("198.51.100.10", "10.1.0.100"), ("2001:db8:51::10", "fd00:1::100")] {
        assert_eq!(reflector::query_http(&pod, server.parse().unwrap()).unwrap(), vip);
        assert_eq!(reflector::query_udp(&pod, server.parse().unwrap()).unwrap(), vip);
        pod.output(&["ping", "-c", "1", "-W", "2", server]).unwrap();
        // Inbound: a client outside of the segment, whose replies pass through the gateway, too.
        let url = if vip.contains(':') { format!("http://[{vip}]/") } else { format!("http://{vip}/") };
        let page = router.output(&["curl", "-s", "-m", "3", "--interface", server, &url]).unwrap();
        assert_eq!(page, server, "the backend sees the client's own address");
    }
    DropAccounting::default().record("arm", &gateway, || process.log());
    assert!(process.stop("TERM", Duration::from_secs(5)).unwrap().is_some_and(|status| status.success()));
}
