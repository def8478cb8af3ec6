//! The values that providers exchange with the planner.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;

/// Tags (AWS, Azure) or labels (GCP).
pub type Tags = BTreeMap<String, String>;

/// Identity of a public address at its provider: allocation id (AWS), resource id (Azure), name (GCP); of an IPv6 address that
/// has no object of its own (AWS), the address.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AddressId(pub String);

/// Identity of a NIC: ENI id (AWS), resource id (Azure), `zone/instance/nic` (GCP).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NicId(pub String);

impl fmt::Display for AddressId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for NicId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Who uses an address: written to it as tags (`vipgate.io/cluster`, `vipgate.io/vip`) before it is attached anywhere.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Claim {
    /// Name of the cluster: addresses of other clusters are never changed.
    pub cluster: String,
    /// The object that uses it, `namespace/name` of a Service or policy.
    pub owner: String,
}

/// Where a gateway's NIC is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct GatewayNic {
    /// Name of the gateway.
    pub gateway: String,
    /// Its instance, as `spec.providerID` of a Node: `aws:///eu-west-1a/i-0abc`, `azure:///subscriptions/../virtualMachines/x`,
    /// `gce://project/zone/name`.
    pub instance: String,
    /// Its NIC: id, name, or index at the instance. `None`: the primary one.
    pub nic: Option<String>,
}

/// What a public address is attached to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Associate {
    /// A private address of the NIC that it alone has.
    #[default]
    Nic,
    /// The primary private address of the NIC: one VIP per gateway.
    Instance,
}

/// What to observe.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scope {
    /// Tags that an address must have, all of them.
    pub tags: Tags,
    /// IPv6 prefixes whose addresses are in the pool, where the provider has no objects for them (AWS).
    pub prefixes: Vec<IpNet>,
    pub gateways: Vec<GatewayNic>,
}

/// A public address of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublicAddress {
    /// Its identity.
    pub id: AddressId,
    pub address: IpAddr,
    /// The zone that it can be attached in; `None`: any of the region.
    pub zone: Option<String>,
    /// Whether it has tags, and so claims. IPv6 addresses of AWS have none: the pool that lists them has them.
    pub has_tags: bool,
    /// The claim that its tags have; `None`: nobody's.
    pub claim: Option<Claim>,
    /// Token that vipgate allocated it with (tag `vipgate.io/allocated`), so that it may release it; `None`: somebody else did.
    pub token: Option<String>,
    /// Where it is attached.
    pub attachment: Option<Attachment>,
    /// Private addresses that are bound to it, by NIC: reserved for it, whether or not it is attached there.
    pub private: BTreeMap<NicId, IpAddr>,
    /// Version of the object that was read (ETag, label fingerprint); empty: the provider has none.
    pub version: String,
}

/// Where a public address is attached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attachment {
    /// The NIC; `None`: something that isn't a NIC (a NAT gateway, a load balancer).
    pub nic: Option<NicId>,
    pub private: Option<IpAddr>,
    /// Identity of the attachment, where the provider has one (AWS: association id).
    pub id: Option<String>,
}

/// VIPs that a NIC can have at most, by family.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capacity {
    /// IPv4.
    pub v4: usize,
    /// IPv6.
    pub v6: usize,
}

impl Capacity {
    /// Of one family only.
    pub fn ipv4(v4: usize) -> Self {
        Self { v4, v6: 0 }
    }

    /// That of the family of an address.
    pub fn of(self, address: IpAddr) -> usize {
        if address.is_ipv6() { self.v6 } else { self.v4 }
    }

    /// That of the family of an address.
    pub(crate) fn of_mut(&mut self, address: IpAddr) -> &mut usize {
        if address.is_ipv6() { &mut self.v6 } else { &mut self.v4 }
    }
}

/// A NIC of a gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nic {
    /// Its identity.
    pub id: NicId,
    pub gateway: String,
    pub zone: Option<String>,
    /// VIPs that it can have at most: those of ours that it has, and what is free beside addresses of others.
    pub capacity: Capacity,
    /// What VIPs get at it. With `Instance` its primary private address is bound to each claimed address from the start.
    pub associate: Associate,
    /// Whether an operation on it is under way, so that no other one can begin.
    pub is_busy: bool,
    /// Whether it forwards packets, as far as [`Prepare`](crate::plan::Action::Prepare) can have it so.
    pub is_ready: bool,
    /// What it lacks to forward packets and can't be given, in words.
    pub missing: Vec<String>,
    /// Version of the object that was read; empty: the provider has none.
    pub version: String,
}

/// What a provider has, read at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observation {
    /// The addresses with the tags of the pool, whoever uses them; sorted by address.
    pub addresses: Vec<PublicAddress>,
    /// The NICs of the gateways that exist; sorted by gateway.
    pub nics: Vec<Nic>,
}

impl Observation {
    /// Addresses that nobody has claimed and that are attached nowhere.
    pub fn free(&self) -> impl Iterator<Item = &PublicAddress> {
        self.addresses.iter().filter(|it| it.claim.is_none() && it.attachment.is_none())
    }

    /// The NIC of a gateway.
    pub fn nic_of(&self, gateway: &str) -> Option<&Nic> {
        self.nics.iter().find(|nic| nic.gateway == gateway)
    }
}

/// A public address and its private address on a NIC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binding {
    pub address: PublicAddress,
    /// The private address on the NIC.
    pub private: IpAddr,
}

/// How an address is allocated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// The tags that it gets, beside `vipgate.io/allocated` and its claim.
    pub tags: Tags,
    /// Who gets it.
    pub claim: Claim,
    /// IPv6.
    pub is_ipv6: bool,
    /// Its zone; `None`: any.
    pub zone: Option<String>,
    /// The same for each attempt to allocate the same address: an address with this token is found and returned.
    pub token: String,
}
