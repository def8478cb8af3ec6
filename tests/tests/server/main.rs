//! Policy that comes from a policy server: what happens when the server, the network between, its source or its certificates
//! fail, while traffic flows.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod certificates;
mod closed;
mod etcd;
mod lost;
mod manifests;

/// One more endpoint for tenant B: p4.
const MORE: &str = "
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: more, namespace: tenant-b, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: https, port: 8443}]
endpoints: [{addresses: [10.1.0.31], conditions: {ready: true}}]
";
