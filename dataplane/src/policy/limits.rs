//! The limits of a policy, in one table. Schemas, compiler, decoder and engine refer to it, so what the compiler emits is what
//! decoder and engine accept. `docs/security-model.md` shows it.

pub use crate::flow::ids::MAX_VIPS;
pub use crate::policy::members::MAX_GATEWAYS;

/// Endpoints per gateway and address family: with VIPs and own addresses, the capacity of the steering program.
pub const MAX_ENDPOINTS: usize = 262_144;
/// VIPs of all endpoints together, of both families: each endpoint has a list of its own.
pub const MAX_ENDPOINT_VIPS: usize = 4 << 20;
/// Overlay nodes per gateway.
pub const MAX_NODES: usize = 65_536;
/// Prefixes of cluster addresses: the capacity of the steering program.
pub const MAX_CLUSTER_PREFIXES: usize = 131_072;
/// Destination and excluded prefixes of all policies, per address family: the capacity of the steering program.
pub const MAX_EGRESS_PREFIXES: usize = 524_288;
/// Egress policies, annotated Services included.
pub const MAX_POLICIES: usize = 65_536;
/// Services with VIPs.
pub const MAX_SERVICES: usize = 65_536;
/// Backend ports per gateway and address family: the capacity of the steering program.
pub const MAX_BACKEND_PORTS: usize = 524_288;
/// Bytes of the Maglev tables of all Services.
pub const MAX_LOOKUP_TABLE_BYTES: usize = 256 << 20;

/// Labels that selectors are compared with in one compilation.
pub const MAX_SELECTOR_STEPS: usize = 32 << 20;

/// Entries of each list of prefixes of a policy.
pub const MAX_PREFIXES_OF_POLICY: usize = 4096;
/// VIPs of a policy that it lists, or that it asks of one pool; VIPs of an endpoint are those of one policy.
pub const MAX_ADDRESSES_OF_POLICY: usize = 256;
/// Pools of a policy.
pub const MAX_POOLS_OF_POLICY: usize = 16;
/// Selectors of a policy.
pub const MAX_SELECTORS_OF_POLICY: usize = 64;
/// Labels and expressions of one label selector, and values of one expression.
pub const MAX_SELECTOR_TERMS: usize = 256;
/// `sessionsPerEndpoint` and `newSessionsPerSecond`: the most sessions that a gateway may have.
pub const MAX_SESSIONS_PER_ENDPOINT: usize = 1 << 28;
/// `guaranteedPortsPerEndpoint`: ports of one VIP.
pub const MAX_GUARANTEED_PORTS: usize = 65_535;
/// Gateways that a policy names.
pub const MAX_GATEWAYS_OF_POLICY: usize = MAX_GATEWAYS;
/// VIPs of a Service.
pub const MAX_VIPS_OF_SERVICE: usize = 64;
/// Ports of a Service.
pub const MAX_PORTS_OF_SERVICE: usize = 4096;
/// Backends of a Service: they are numbered with 16 bits.
pub const MAX_BACKENDS_OF_SERVICE: usize = 65_535;
/// Entries of `loadBalancerSourceRanges` of a Service.
pub const MAX_SOURCE_RANGES_OF_SERVICE: usize = 65_535;
/// Ranges of an address pool.
pub const MAX_RANGES_OF_POOL: usize = 4096;
/// Names of Services that the name of a VIP lists.
pub const MAX_NAMES_OF_VIP: usize = 8;
/// Bytes of a text, such as the names of the Services that share a VIP.
pub const MAX_TEXT_BYTES: usize = 64 << 10;
/// Bytes of a resource's name: more than kind, namespace and name of a Kubernetes object need.
pub const MAX_NAME_BYTES: usize = 1024;

/// What a limit is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// One object alone: one above it is invalid.
    Object,
    /// All objects together: it is given out by age, and a namespace gets no more than its share.
    Whole,
    /// All objects together, which only the platform team writes.
    Platform,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// What is counted, as diagnostics name it.
    pub what: &'static str,
    /// The most that is accepted.
    pub max: usize,
    /// What it is about.
    pub scope: Scope,
    /// The objects and fields that it concerns.
    pub fields: &'static str,
}

const fn object(what: &'static str, max: usize, fields: &'static str) -> Limit {
    Limit { what, max, scope: Scope::Object, fields }
}

const fn whole(what: &'static str, max: usize, fields: &'static str) -> Limit {
    Limit { what, max, scope: Scope::Whole, fields }
}

const fn platform(what: &'static str, max: usize, fields: &'static str) -> Limit {
    Limit { what, max, scope: Scope::Platform, fields }
}

/// VIPs of the whole.
pub const VIPS: Limit = whole("VIPs", MAX_VIPS, "Services and policies");
/// Endpoints of one family.
pub const ENDPOINTS: Limit = whole("endpoints of one address family", MAX_ENDPOINTS, "pods that policies cover");
/// VIPs of all endpoints.
pub const ENDPOINT_VIPS: Limit =
    whole("VIPs of all endpoints", MAX_ENDPOINT_VIPS, "pods that policies cover, times VIPs");
/// Prefixes of one family of all policies.
pub const EGRESS_PREFIXES: Limit = whole(
    "prefixes of policies of one address family",
    MAX_EGRESS_PREFIXES,
    "`destinationCIDRs` and `excludedCIDRs`; a policy without has one of each family",
);
pub const POLICIES: Limit =
    whole("policies", MAX_POLICIES, "EgressPolicies, ClusterEgressPolicies, annotated Services");
/// Work of selectors.
pub const SELECTOR_STEPS: Limit =
    whole("labels to compare", MAX_SELECTOR_STEPS, "labels and values of a policy's selectors, times pods");
pub const SERVICES: Limit = whole("Services with VIPs", MAX_SERVICES, "Services");
/// Backend ports of one family.
pub const BACKEND_PORTS: Limit =
    whole("backend ports of one address family", MAX_BACKEND_PORTS, "ports of a Service, times endpoints");
/// Bytes of Maglev tables.
pub const LOOKUP_TABLES: Limit = whole(
    "bytes of Maglev tables",
    MAX_LOOKUP_TABLE_BYTES,
    "Services: `vipgate.io/maglev-table-size`, times distinct sets of backends",
);

/// All limits.
pub const ALL: [Limit; 25] = [
    object("prefixes", MAX_PREFIXES_OF_POLICY, "`destinationCIDRs`, `excludedCIDRs` of a policy, each"),
    object("addresses", MAX_ADDRESSES_OF_POLICY, "`addresses` of a policy, `pools[].count`"),
    object("pools", MAX_POOLS_OF_POLICY, "`pools` of a policy"),
    object("selectors", MAX_SELECTORS_OF_POLICY, "`selectors` of a policy"),
    object("terms", MAX_SELECTOR_TERMS, "labels, expressions and values of a label selector, each"),
    object("sessions", MAX_SESSIONS_PER_ENDPOINT, "`limits.sessionsPerEndpoint`, `limits.newSessionsPerSecond`"),
    object("ports", MAX_GUARANTEED_PORTS, "`limits.guaranteedPortsPerEndpoint`"),
    object("gateways", MAX_GATEWAYS_OF_POLICY, "`gateways.names` of a policy"),
    object("VIPs", MAX_VIPS_OF_SERVICE, "`status.loadBalancer.ingress` of a Service"),
    object("ports", MAX_PORTS_OF_SERVICE, "`spec.ports` of a Service"),
    object("backends", MAX_BACKENDS_OF_SERVICE, "EndpointSlices of a Service"),
    object("source ranges", MAX_SOURCE_RANGES_OF_SERVICE, "`spec.loadBalancerSourceRanges` of a Service"),
    object("ranges", MAX_RANGES_OF_POOL, "`spec.ranges` of an AddressPool"),
    VIPS,
    ENDPOINTS,
    ENDPOINT_VIPS,
    EGRESS_PREFIXES,
    POLICIES,
    SELECTOR_STEPS,
    SERVICES,
    BACKEND_PORTS,
    LOOKUP_TABLES,
    platform("nodes", MAX_NODES, "nodes of the overlay"),
    platform("cluster prefixes", MAX_CLUSTER_PREFIXES, "`pod_cidrs`, `service_cidrs`, Nodes, ServiceCIDRs"),
    platform("gateways", MAX_GATEWAYS, "VipGateways"),
];
