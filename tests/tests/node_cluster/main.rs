//! Node agents in a Kubernetes cluster of namespaces: a real API server, real kube-proxy, real CNI plugins.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod api_objects;
mod cluster;
mod cni;
mod failover;
mod first_packet;
mod gateways;
mod kube_proxy;
mod leaks;
mod masquerading;
mod network_policy;
mod repair;
mod steering;
