//! The trait of providers, which carry out actions; and in words what these do.

use std::future::Future;
use std::net::IpAddr;

use ipnet::IpNet;

use crate::error::CloudError;
use crate::plan::Action;
use crate::provider::{Binding, Observation, PublicAddress, Scope};

/// A provider of public addresses.
pub trait Provider: Send + Sync {
    /// Reads addresses and NICs. What is read may be older than the last change (eventual consistency).
    fn observe(&self, scope: &Scope) -> impl Future<Output = Result<Observation, CloudError>> + Send;

    /// Carries out an action, with as few requests as the provider needs. What is already so is no error. Nothing is taken from
    /// anybody: an address that isn't ours is [`InUse`](crate::ErrorKind::InUse).
    ///
    /// `candidates` are private addresses to choose from; empty: the provider chooses.
    fn execute(&self, action: &Action, candidates: &[IpNet]) -> impl Future<Output = Result<(), CloudError>> + Send;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ActionKind {
    /// Claims an address.
    Claim,
    /// Gives private addresses to a NIC.
    Prepare,
    /// Attaches addresses.
    Attach,
    /// Moves addresses from a dead gateway.
    Move,
    /// Detaches addresses.
    Detach,
    /// Takes private addresses from a NIC.
    Unprepare,
    /// Gives up a claim.
    Unclaim,
    /// Allocates an address.
    Allocate,
    /// Releases an address.
    Release,
}

impl ActionKind {
    /// All kinds.
    pub const ALL: [Self; 9] = [
        Self::Claim,
        Self::Prepare,
        Self::Attach,
        Self::Move,
        Self::Detach,
        Self::Unprepare,
        Self::Unclaim,
        Self::Allocate,
        Self::Release,
    ];

    /// The kind of an action.
    pub fn of(action: &Action) -> Self {
        match action {
            Action::Claim(..) => Self::Claim,
            Action::Prepare(..) => Self::Prepare,
            Action::Attach(..) => Self::Attach,
            Action::Move(..) => Self::Move,
            Action::Detach(..) => Self::Detach,
            Action::Unprepare(..) => Self::Unprepare,
            Action::Unclaim(_) => Self::Unclaim,
            Action::Allocate(_) => Self::Allocate,
            Action::Release(_) => Self::Release,
        }
    }

    /// Its name in metrics, logs and output.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Claim => "claim",
            Self::Prepare => "prepare",
            Self::Attach => "attach",
            Self::Move => "move",
            Self::Detach => "detach",
            Self::Unprepare => "unprepare",
            Self::Unclaim => "unclaim",
            Self::Allocate => "allocate",
            Self::Release => "release",
        }
    }
}

/// An action in words, without its kind: `203.0.113.1, 203.0.113.2 to gw-b (eni-2)`.
pub fn describe(action: &Action) -> String {
    match action {
        Action::Claim(address, claim) => format!("{} for {} of {}", address.address, claim.owner, claim.cluster),
        Action::Prepare(nic, addresses) => format!("{} at {} ({})", list(addresses.iter()), nic.gateway, nic.id),
        Action::Attach(nic, bindings) => format!("{} to {} ({})", list(of(bindings)), nic.gateway, nic.id),
        Action::Move(from, nic, bindings) => {
            format!("{} from {from} to {} ({})", list(of(bindings)), nic.gateway, nic.id)
        }
        Action::Detach(from, addresses) => format!("{} from {from}", list(addresses.iter())),
        Action::Unprepare(nic, bindings) => format!("{} at {} ({})", list(of(bindings)), nic.gateway, nic.id),
        Action::Unclaim(address) | Action::Release(address) => address.address.to_string(),
        Action::Allocate(allocation) => format!("an address for {}", allocation.claim.owner),
    }
}

fn of(bindings: &[Binding]) -> impl Iterator<Item = &PublicAddress> {
    bindings.iter().map(|binding| &binding.address)
}

/// Addresses that are listed at most.
const MAX_LISTED: usize = 10;

fn list<'a>(addresses: impl Iterator<Item = &'a PublicAddress>) -> String {
    let addresses: Vec<IpAddr> = addresses.map(|address| address.address).collect();
    let mut text = addresses.iter().take(MAX_LISTED).map(IpAddr::to_string).collect::<Vec<_>>().join(", ");
    if addresses.len() > MAX_LISTED {
        text = format!("{text} and {} more", addresses.len() - MAX_LISTED);
    }
    text
}
