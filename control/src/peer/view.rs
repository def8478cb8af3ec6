//! The part of the membership view that links need.

use std::net::SocketAddr;
use std::sync::Arc;

use super::identity::Fingerprint;
use crate::membership;

/// All gateways of the group, including this one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerView {
    /// The view's number; it only grows.
    pub number: u64,
    pub members: Vec<PeerMember>,
    /// The complete view, for peers that can't reach the policy server.
    pub membership: Arc<membership::MembershipView>,
}

/// One gateway of the group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerMember {
    /// The gateway's name.
    pub name: Arc<str>,
    /// Listen address for links; `None` while unknown.
    pub address: Option<SocketAddr>,
    /// Fingerprint of its certificate; `None` while unknown, so there are no links to it.
    pub fingerprint: Option<Fingerprint>,
    /// Whether it is an active member.
    pub active: bool,
    /// The incarnation of its current process.
    pub incarnation: u64,
}

impl PeerView {
    /// The part of a view that links need.
    pub fn of(view: &Arc<membership::MembershipView>) -> Self {
        let member = |member: &membership::Member| PeerMember {
            name: member.name.clone(),
            address: member.peer,
            fingerprint: member.fingerprint.map(Fingerprint),
            active: member.serving,
            incarnation: member.incarnation,
        };
        Self { number: view.number, members: view.members.iter().map(member).collect(), membership: view.clone() }
    }

    /// The gateway with this name.
    pub fn member(&self, name: &str) -> Option<&PeerMember> {
        self.members.iter().find(|member| *member.name == *name)
    }
}
