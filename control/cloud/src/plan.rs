//! Planner: what to change so that each VIP is attached to the gateway that owns it. Pure.
//!
//! ```text
//!   not claimed -> claim -> prepare (private addresses at home and standby) -> attach -> done
//!   attached to a gateway that is dead:    move
//!   attached to another one that isn't:    detach, then attach
//!   no longer a VIP:                       detach -> unprepare -> unclaim (-> release, if vipgate allocated it)
//! ```
//! A plan has the next step of each address, so it is carried out, observed, and planned anew. What it changes is ours: claimed by
//! this cluster, and attached to nothing, to a NIC of a gateway, or where a private address is bound to it. Whatever else has an
//! address keeps it, and the plan says so.

mod schedule;
mod surplus;
mod vip;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

use self::schedule::Step;
use crate::provider::{AddressId, Allocation, Binding, Claim, Nic, NicId, Observation, PublicAddress};

/// What there is to be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Desired {
    /// Name of the cluster.
    pub cluster: String,
    /// VIPs that are in the pool.
    pub vips: BTreeMap<IpAddr, DesiredVip>,
    /// The gateways, by name.
    pub gateways: BTreeMap<String, GatewayState>,
    /// Addresses to allocate; none where the pool has only addresses that exist. One whose token is observed exists.
    pub allocations: Vec<Allocation>,
    /// Allocated addresses that a VIP is expected to use soon: they keep their claims without one.
    pub expected: BTreeSet<AddressId>,
    /// Addresses that were long enough without use to be released.
    pub releasable: BTreeSet<AddressId>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DesiredVip {
    /// `namespace/name` of the Service or policy that uses it.
    pub owner: String,
    /// The gateway that owns it now, as the membership view has it; `None`: none is active.
    pub gateway: Option<String>,
    /// Gateways that may take it over, or back, first the next one.
    pub standbys: Vec<String>,
}

/// State of a gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GatewayState {
    /// It is an active member, or may still forward packets.
    Active,
    /// The membership view says that it is inactive: it forwards nothing of its own.
    Dead,
}

/// A change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Claims a free address, or replaces a claim of the same cluster; [`InUse`](crate::ErrorKind::InUse) if another cluster's
    /// claim was first.
    Claim(PublicAddress, Claim),
    /// Makes a NIC ready for addresses: a private address for each that has none there yet, and forwarding. The private addresses
    /// are in the next observation.
    Prepare(Nic, Vec<PublicAddress>),
    /// Attaches free addresses of ours to a NIC; [`InUse`](crate::ErrorKind::InUse) if one is attached elsewhere.
    Attach(Nic, Vec<Binding>),
    /// Moves addresses of ours from a NIC of a dead gateway to another NIC; [`InUse`](crate::ErrorKind::InUse) if one is attached
    /// to a third one meanwhile.
    Move(NicId, Nic, Vec<Binding>),
    /// Detaches addresses of ours from a NIC, if they are still attached there.
    Detach(NicId, Vec<PublicAddress>),
    /// Takes back what [`Prepare`](Self::Prepare) gave to a NIC for these addresses, unless they are attached there.
    Unprepare(Nic, Vec<Binding>),
    /// Gives up a claim of ours on an address.
    Unclaim(PublicAddress),
    /// Allocates an address; one with the same token is found, and is no other.
    Allocate(Allocation),
    /// Releases an address that vipgate allocated and that is attached nowhere.
    Release(PublicAddress),
}

/// What keeps a VIP, or a NIC, from being as desired.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Problem {
    /// The provider has no such address with the tags of the pool.
    NoAddress,
    /// Another cluster has claimed it.
    OtherCluster(String),
    /// It is attached to something that isn't a gateway of this cluster.
    Attached(String),
    /// The same, and it has a claim of this cluster: perhaps that was a gateway, with the address at its primary private address.
    AttachedWithClaim(String),
    /// The gateway has no NIC at the provider.
    NoNic(String),
    /// The NIC of the gateway can have no further VIP.
    NoCapacity(String),
    /// The gateway isn't in the address's zone.
    OtherZone(String),
    /// No gateway is active.
    NoGateway,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoAddress => f.write_str("the provider has no such address with the tags of the pool"),
            Self::OtherCluster(cluster) => write!(f, "it is claimed by the cluster {cluster}"),
            Self::Attached(at) => write!(f, "it is attached to {at}, which is no gateway's: it is not taken away"),
            Self::AttachedWithClaim(at) => write!(
                f,
                "it is attached to {at}, which is no gateway's: it is not taken away; if that was a gateway of this cluster, detach it \
                 there"
            ),
            Self::NoNic(gateway) => write!(f, "the provider has no NIC of the gateway {gateway}"),
            Self::NoCapacity(gateway) => write!(f, "the NIC of the gateway {gateway} can have no further VIP"),
            Self::OtherZone(gateway) => write!(f, "the gateway {gateway} isn't in its zone"),
            Self::NoGateway => f.write_str("no gateway that could have it is active"),
        }
    }
}

impl Problem {
    /// Its reason in conditions, events and metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NoAddress => "NoAddress",
            Self::OtherCluster(_) => "ClaimedByOtherCluster",
            Self::Attached(_) | Self::AttachedWithClaim(_) => "AttachedElsewhere",
            Self::NoNic(_) => "NoNic",
            Self::NoCapacity(_) => "NoCapacity",
            Self::OtherZone(_) => "OtherZone",
            Self::NoGateway => "NoGateway",
        }
    }
}

/// What to do next, and what can't be done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AddressPlan {
    /// Changes that can be made at the same time: none needs another one, and no NIC is in two. What serves traffic is first.
    pub actions: Vec<Action>,
    /// VIPs that can't be as desired; why.
    pub problems: BTreeMap<IpAddr, Problem>,
    /// VIPs that are attached where they are to be.
    pub attached: BTreeSet<IpAddr>,
    /// Whether something else can be done after these actions, or when a NIC is no longer busy.
    pub is_waiting: bool,
}

/// Plans the next changes.
pub fn plan(desired: &Desired, observed: &Observation) -> AddressPlan {
    let world = World::new(desired, observed);
    let mut plan = AddressPlan::default();
    let mut steps: Vec<Step> = Vec::new();
    vip::plan(&world, &mut steps, &mut plan);
    surplus::plan(&world, &mut steps);
    let tokens: BTreeSet<&str> = observed.addresses.iter().filter_map(|it| it.token.as_deref()).collect();
    let missing = desired.allocations.iter().filter(|allocation| !tokens.contains(allocation.token.as_str()));
    steps.extend(missing.map(|allocation| Step::Allocate(allocation.clone())));
    schedule::schedule(steps, &mut plan);
    plan
}

/// Desired state and observation, with indexes.
struct World<'a> {
    desired: &'a Desired,
    observed: &'a Observation,
    nics: BTreeMap<&'a NicId, &'a Nic>,
    by_gateway: BTreeMap<&'a str, &'a Nic>,
}

/// Where an address is, as seen from this cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Location<'a> {
    /// Nowhere.
    Free,
    /// At the NIC of a gateway.
    At(&'a Nic),
    /// At a NIC that was a gateway's: a private address there is bound to it.
    Former(&'a NicId),
    /// Elsewhere.
    Foreign,
}

impl<'a> World<'a> {
    fn new(desired: &'a Desired, observed: &'a Observation) -> Self {
        Self {
            desired,
            observed,
            nics: observed.nics.iter().map(|nic| (&nic.id, nic)).collect(),
            by_gateway: observed.nics.iter().map(|nic| (nic.gateway.as_str(), nic)).collect(),
        }
    }

    fn location_of(&self, address: &'a PublicAddress) -> Location<'a> {
        let Some(attachment) = &address.attachment else { return Location::Free };
        let Some(id) = &attachment.nic else { return Location::Foreign };
        let bound = address.private.get(id);
        // At a gateway's NIC, but not where it was bound to: somebody attached it there by hand.
        if bound.is_none() || bound != attachment.private.as_ref() {
            return Location::Foreign;
        }
        self.nics.get(id).map_or(Location::Former(id), |nic| Location::At(nic))
    }

    fn is_dead(&self, gateway: &str) -> bool {
        self.desired.gateways.get(gateway) == Some(&GatewayState::Dead)
    }

    /// Whether another cluster has claimed the address.
    fn is_others(&self, address: &PublicAddress) -> bool {
        address.claim.as_ref().is_some_and(|claim| claim.cluster != self.desired.cluster)
    }
}

/// Where an address is attached, in words.
fn describe_attachment(address: &PublicAddress) -> String {
    let Some(attachment) = &address.attachment else { return "nothing".to_owned() };
    match (&attachment.nic, attachment.private) {
        (Some(nic), Some(private)) => format!("{private} of {nic}"),
        (Some(nic), None) => nic.to_string(),
        (None, _) => attachment.id.clone().unwrap_or_else(|| "something".to_owned()),
    }
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
