//! What several tests need.

use vipgate_policy::compiler;

/// A gateway of the policy on a node of its own.
pub(crate) fn policy_peer(name: &str) -> compiler::Peer {
    compiler::Peer {
        name: name.into(),
        node: name.into(),
        zone: "".into(),
        address: None,
        pods: [].into(),
        uncovered: None,
    }
}
