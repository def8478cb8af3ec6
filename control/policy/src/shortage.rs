//! Objects that have fewer addresses of a pool than they ask for, where a provider can allocate more.

use crate::manifest::Family;

/// A shortage of an EgressPolicy, ClusterEgressPolicy or Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shortage {
    pub pool: String,
    /// The object, as it is named in claims: `Service namespace/name`.
    pub owner: String,
    pub family: Family,
    /// Addresses that it asks for, with those that it has.
    pub wanted: usize,
}
