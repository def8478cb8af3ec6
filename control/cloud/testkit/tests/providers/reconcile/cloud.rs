//! What the worlds need of a fake cloud, whichever it is.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;
use vipgate_cloud::{Claim, Provider, Scope};
use vipgate_cloud_testkit::{FakeCloud, RecordedRequest, Reply};

use crate::reconcile::random::Random;

/// Our cluster, and the other one.
pub(crate) const OURS: &str = "ours";
pub(crate) const THEIRS: &str = "theirs";
/// The gateways.
pub(crate) const GATEWAYS: [&str; 3] = ["gw-1", "gw-2", "gw-3"];

/// Errors of an API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    Throttled,
    Unavailable,
    Internal,
}

/// A public address as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) id: String,
    pub(crate) in_pool: bool,
    pub(crate) claim: Option<Claim>,
    pub(crate) is_allocated: bool,
    /// What it is attached to, and the private address there.
    pub(crate) at: Option<(String, String)>,
    /// Tags that aren't vipgate's.
    pub(crate) others_tags: BTreeMap<String, String>,
}

/// A NIC as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Interface {
    pub(crate) gateway: Option<String>,
    pub(crate) zone: String,
    pub(crate) primary: String,
    /// Other private addresses, with the public ones that they are bound to.
    pub(crate) secondary: BTreeMap<String, BTreeSet<IpAddr>>,
}

/// A cloud as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Snapshot {
    pub(crate) addresses: BTreeMap<IpAddr, Address>,
    /// By what `NicId` has.
    pub(crate) nics: BTreeMap<String, Interface>,
}

impl Snapshot {
    pub(crate) fn nic_of(&self, gateway: &str) -> Option<(&String, &Interface)> {
        self.nics.iter().find(|(_, nic)| nic.gateway.as_deref() == Some(gateway))
    }

    /// The gateway that an address is attached to.
    pub(crate) fn gateway_of(&self, address: &Address) -> Option<&str> {
        self.nics.get(&address.at.as_ref()?.0)?.gateway.as_deref()
    }
}

/// A fake cloud with three gateways. What is done by hand is done by somebody else.
pub(crate) trait Cloud: FakeCloud + Sized {
    type Provider: Provider + 'static;
    /// Whether a claim is written only if the address is still as it was read.
    const HAS_SWAP: bool;

    fn new(random: &mut Random) -> Self;
    fn provider(&self, url: &str) -> Self::Provider;
    fn scope(&self) -> Scope;
    fn snapshot(&self) -> Snapshot;
    /// The addresses that the pool has or could have.
    fn pool(&self) -> Vec<IpAddr>;
    /// Private addresses that VIPs may get.
    fn candidates(&self) -> Vec<IpNet>;
    /// Whether only a claim distinguishes an address of ours that is attached from somebody else's.
    fn is_ambiguous(&self) -> bool;
    /// VIPs that a NIC can have, with nothing of anybody else's at it.
    fn capacity(&self) -> usize;
    /// Zone of an address, if it can't be attached elsewhere.
    fn zone_of(&self, address: IpAddr) -> Option<String>;

    fn is_change(request: &RecordedRequest) -> bool;
    fn describe(request: &RecordedRequest) -> String;
    fn refuse(refusal: Refusal, after: Option<u64>) -> Reply;

    /// Lets reads be this many changes behind.
    fn set_lag(&mut self, changes: usize);
    /// Time that operations take; how many of the next ones fail.
    fn set_operations(&mut self, time: Duration, failures: usize);

    fn add(&mut self, address: IpAddr);
    fn remove(&mut self, address: IpAddr);
    fn attach_elsewhere(&mut self, address: IpAddr);
    /// To a private address of a gateway that isn't vipgate's. Whether there is one.
    fn attach_at(&mut self, address: IpAddr, gateway: &str) -> bool;
    fn detach(&mut self, address: IpAddr);
    fn set_claim(&mut self, address: IpAddr, claim: Option<&Claim>);
    /// Gives a gateway's NIC a secondary private address, which is returned.
    fn add_private(&mut self, gateway: &str) -> Option<String>;
    fn terminate(&mut self, gateway: &str);
    fn launch(&mut self, gateway: &str);
}
