//! The gateways that there are, as the policy server says: as far as links need to know.

use std::net::SocketAddr;
use std::sync::Arc;

use super::identity::Fingerprint;
use crate::members;

/// All gateways, this one included.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// Its number: it only grows.
    pub number: u64,
    /// Who there is.
    pub members: Vec<Member>,
    /// All that the policy server said, for gateways that can't hear it.
    pub said: Arc<members::View>,
}

/// One gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its name.
    pub name: Arc<str>,
    /// Where it takes links; `None` while that isn't known.
    pub address: Option<SocketAddr>,
    /// Its certificate's; `None` while that isn't known: then there are no links to it.
    pub fingerprint: Option<Fingerprint>,
    /// Whether it serves.
    pub serving: bool,
    /// Which of the processes of this name it is.
    pub incarnation: u64,
}

impl View {
    /// The gateway of a name.
    pub fn member(&self, name: &str) -> Option<&Member> {
        self.members.iter().find(|member| *member.name == *name)
    }

    /// Whether a gateway serves.
    pub fn serves(&self, name: &str) -> bool {
        self.member(name).is_some_and(|member| member.serving)
    }
}
