//! Contents of the program's maps, as keys and values.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;

use super::tables::{Listener, SteeringTables};

/// Map value of an address: policy ID if it is an endpoint, and its roles as bits.
pub(super) type Host = [u32; 2];
pub(super) const VIP: u32 = 1;
pub(super) const ENDPOINT: u32 = 2;
pub(super) const LOCAL: u32 = 4;
pub(super) const BACKEND: u32 = 8;
pub(super) const TUNNEL: u32 = 16;
pub(super) const PRIVATE: u32 = 32;
/// IP protocol of tunnels.
const UDP: u8 = 17;

/// Map value of a prefix: flags and prefix length.
pub(super) type PrefixValue = [u8; 2];
/// Flag of a policy's prefix.
pub(super) const TRANSLATED: u8 = 1;

/// Entries of the maps, without cluster prefixes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Entries {
    pub(super) hosts: BTreeMap<IpAddr, Host>,
    pub(super) listeners: BTreeSet<Listener>,
    pub(super) cidrs: BTreeMap<(u32, IpNet), PrefixValue>,
}

impl Entries {
    pub(super) fn of(tables: &SteeringTables) -> Self {
        let mut hosts: BTreeMap<IpAddr, Host> =
            tables.endpoints.iter().map(|(address, policy)| (*address, [*policy, ENDPOINT])).collect();
        let of_roles = [(&tables.vips, VIP), (&tables.private_addresses, PRIVATE), (&tables.local_addresses, LOCAL)];
        for (addresses, role) in of_roles {
            for address in addresses {
                hosts.entry(*address).or_default()[1] |= role;
            }
        }
        for (address, ..) in &tables.listeners {
            hosts.entry(*address).or_default()[1] |= BACKEND;
        }
        let mut listeners = tables.listeners.clone();
        for (address, port) in &tables.tunnels {
            hosts.entry(*address).or_default()[1] |= TUNNEL;
            listeners.insert((*address, *port, UDP));
        }
        let value = |net: &IpNet, translated| [if translated { TRANSLATED } else { 0 }, net.prefix_len()];
        let cidrs = tables.policy_cidrs.iter().map(|(key, translated)| (*key, value(&key.1, *translated))).collect();
        Self { hosts, listeners, cidrs }
    }

    /// What these entries have and `other` doesn't: roles of addresses, listeners and prefixes.
    pub(super) fn without(&self, other: &Self) -> Self {
        let roles = |address: &IpAddr| other.hosts.get(address).map_or(0, |[_, roles]| *roles);
        let hosts = self.hosts.iter().map(|(address, [policy, own])| (*address, [*policy, own & !roles(address)]));
        Self {
            hosts: hosts.filter(|(_, [_, roles])| *roles != 0).collect(),
            listeners: &self.listeners - &other.listeners,
            cidrs: self.cidrs.iter().filter(|(key, _)| !other.cidrs.contains_key(key)).map(|(k, v)| (*k, *v)).collect(),
        }
    }

    /// Whether there are prefixes of a policy.
    pub(super) fn has_prefixes_of(&self, policy: u32) -> bool {
        self.cidrs.range((policy, lowest())..).next().is_some_and(|((other, _), _)| *other == policy)
    }

    /// The longest prefix of a policy that contains `net`.
    pub(super) fn covering(&self, policy: u32, net: IpNet) -> Option<PrefixValue> {
        let supernet = |length| IpNet::new(net.network(), length).ok().map(|net| net.trunc());
        let lengths = (0..=net.prefix_len()).rev();
        lengths.filter_map(supernet).find_map(|outer| self.cidrs.get(&(policy, outer)).copied())
    }
}

/// The prefix that is ordered before all others.
fn lowest() -> IpNet {
    IpNet::V4(ipnet::Ipv4Net::default())
}
