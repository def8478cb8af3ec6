//! Limits of a policy: what the tables and the steering program have capacity for.

/// Endpoints per gateway and address family: with VIPs and own addresses, the capacity of the steering program.
pub const MAX_ENDPOINTS: usize = 262_144;
/// Overlay nodes per gateway.
pub const MAX_NODES: usize = 65_536;
/// Prefixes of cluster addresses: the capacity of the steering program.
pub const MAX_CLUSTER_PREFIXES: usize = 131_072;
/// Backend ports per gateway and address family: the capacity of the steering program.
pub const MAX_BACKEND_PORTS: usize = 524_288;
