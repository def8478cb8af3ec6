//! The program's maps of captured traffic in the kernel: single writes.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use aya::Ebpf;
use aya::maps::lpm_trie::Key;
use aya::maps::{Array, HashMap, LpmTrie, Map, MapData, MapError};
use ipnet::IpNet;

use super::SteeringError;
use super::entries::{Host, PrefixValue};
use super::tables::Listener;

/// An IPv6 address as map key.
type V6Key = [u8; 16];
/// Map keys of listeners: address, port, protocol.
type Listener4 = [u8; 8];
type Listener6 = [u8; 24];
/// Map keys of destinations: policy ID and address, after the prefix length that [`Key`] adds.
type Cidr4 = [u8; 8];
type Cidr6 = [u8; 20];

type Hosts<Address> = HashMap<MapData, Address, Host>;
type Listeners<Key> = HashMap<MapData, Key, u8>;
type Prefixes<Key> = LpmTrie<MapData, Key, PrefixValue>;

/// One map per address family of each kind.
pub(super) struct Maps {
    flags: Array<MapData, u32>,
    hosts: (Hosts<[u8; 4]>, Hosts<V6Key>),
    listeners: (Listeners<Listener4>, Listeners<Listener6>),
    cidrs: (Prefixes<Cidr4>, Prefixes<Cidr6>),
    cluster: (Prefixes<[u8; 4]>, Prefixes<V6Key>),
    #[cfg(test)]
    pub(super) faults: super::tests::faults::Faults,
}

impl Maps {
    pub(super) fn take(program: &mut Ebpf) -> Result<Self, SteeringError> {
        Ok(Self {
            flags: take_map(program, "flags")?,
            hosts: (take_map(program, "hosts4")?, take_map(program, "hosts6")?),
            listeners: (take_map(program, "listeners4")?, take_map(program, "listeners6")?),
            cidrs: (take_map(program, "cidrs4")?, take_map(program, "cidrs6")?),
            cluster: (take_map(program, "cluster4")?, take_map(program, "cluster6")?),
            #[cfg(test)]
            faults: super::tests::faults::Faults::default(),
        })
    }

    /// Writes to a map; in tests, it may be made to fail.
    fn write(
        &mut self,
        table: &'static str,
        write: impl FnOnce(&mut Self) -> Result<(), MapError>,
    ) -> Result<(), SteeringError> {
        #[cfg(test)]
        self.faults.check(table)?;
        write(self).map_err(|source| SteeringError::Table { table, source })
    }

    pub(super) fn set_flags(&mut self, bits: u32) -> Result<(), SteeringError> {
        self.write("flags", |maps| maps.flags.set(0, bits, 0))
    }

    pub(super) fn set_host(&mut self, address: IpAddr, host: Option<Host>) -> Result<(), SteeringError> {
        self.write("hosts", |Self { hosts: (v4, v6), .. }| match (address, host) {
            (IpAddr::V4(address), Some(host)) => v4.insert(address.octets(), host, 0),
            (IpAddr::V6(address), Some(host)) => v6.insert(address.octets(), host, 0),
            (IpAddr::V4(address), None) => ignore_missing(v4.remove(&Ipv4Addr::octets(&address))),
            (IpAddr::V6(address), None) => ignore_missing(v6.remove(&Ipv6Addr::octets(&address))),
        })
    }

    pub(super) fn set_listener(
        &mut self,
        (address, port, protocol): Listener,
        is_present: bool,
    ) -> Result<(), SteeringError> {
        // Port in network order, protocol as u16 in host order.
        let [high, low] = port.to_be_bytes();
        let [first, second] = u16::from(protocol).to_ne_bytes();
        self.write("listeners", |Self { listeners: (v4, v6), .. }| match address {
            IpAddr::V4(address) => {
                let [a, b, c, d] = address.octets();
                let key = [a, b, c, d, high, low, first, second];
                if is_present { v4.insert(key, 1, 0) } else { ignore_missing(v4.remove(&key)) }
            }
            IpAddr::V6(address) => {
                let mut key = Listener6::default();
                key[..16].copy_from_slice(&address.octets());
                key[16..20].copy_from_slice(&[high, low, first, second]);
                if is_present { v6.insert(key, 1, 0) } else { ignore_missing(v6.remove(&key)) }
            }
        })
    }

    pub(super) fn set_cidr(
        &mut self,
        (policy, net): (u32, IpNet),
        value: Option<PrefixValue>,
    ) -> Result<(), SteeringError> {
        let policy = policy.to_ne_bytes();
        let length = 32 + u32::from(net.prefix_len());
        self.write("cidrs", |Self { cidrs: (v4, v6), .. }| match net {
            IpNet::V4(net) => {
                let mut data = Cidr4::default();
                data[..4].copy_from_slice(&policy);
                data[4..].copy_from_slice(&net.network().octets());
                set_prefix(v4, &Key::new(length, data), value)
            }
            IpNet::V6(net) => {
                let mut data = Cidr6::default();
                data[..4].copy_from_slice(&policy);
                data[4..].copy_from_slice(&net.network().octets());
                set_prefix(v6, &Key::new(length, data), value)
            }
        })
    }

    pub(super) fn set_cluster_prefix(&mut self, net: IpNet, value: Option<PrefixValue>) -> Result<(), SteeringError> {
        let length = net.prefix_len().into();
        self.write("cluster", |Self { cluster: (v4, v6), .. }| match net {
            IpNet::V4(net) => set_prefix(v4, &Key::new(length, net.network().octets()), value),
            IpNet::V6(net) => set_prefix(v6, &Key::new(length, net.network().octets()), value),
        })
    }
}

pub(super) fn take_map<T: TryFrom<Map, Error = MapError>>(
    program: &mut Ebpf,
    table: &'static str,
) -> Result<T, SteeringError> {
    let map = program.take_map(table).ok_or(SteeringError::NoSuchPart(table))?;
    map.try_into().map_err(|source| SteeringError::Table { table, source })
}

fn set_prefix<K: aya::Pod>(
    map: &mut LpmTrie<MapData, K, PrefixValue>,
    key: &Key<K>,
    value: Option<PrefixValue>,
) -> Result<(), MapError> {
    match value {
        Some(value) => map.insert(key, value, 0),
        None => ignore_missing(map.remove(key)),
    }
}

/// Ignores the removal of a missing entry.
fn ignore_missing(result: Result<(), MapError>) -> Result<(), MapError> {
    match result {
        Err(MapError::SyscallError(error)) if error.io_error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Maps {
        pub(in crate::steering) fn flags(&self) -> u32 {
            self.flags.get(&0, 0).expect("flags")
        }

        /// All entries of all maps as text, sorted.
        pub(in crate::steering) fn contents(&self) -> Vec<String> {
            fn lines<K: std::fmt::Debug, V: std::fmt::Debug>(
                name: &str,
                entries: impl Iterator<Item = Result<(K, V), MapError>>,
            ) -> Vec<String> {
                entries.map(|entry| format!("{name}: {:?}", entry.expect("an entry"))).collect()
            }
            fn prefixes<K: aya::Pod + std::fmt::Debug>(
                name: &str,
                map: &LpmTrie<MapData, K, PrefixValue>,
            ) -> Vec<String> {
                lines(name, map.iter().map(|entry| entry.map(|(key, value)| ((key.prefix_len(), key.data()), value))))
            }
            let mut lines = [
                vec![format!("flags: {}", self.flags())],
                lines("hosts", self.hosts.0.iter()),
                lines("hosts", self.hosts.1.iter()),
                lines("listeners", self.listeners.0.iter()),
                lines("listeners", self.listeners.1.iter()),
                prefixes("cidrs", &self.cidrs.0),
                prefixes("cidrs", &self.cidrs.1),
                prefixes("cluster", &self.cluster.0),
                prefixes("cluster", &self.cluster.1),
            ]
            .concat();
            lines.sort();
            lines
        }
    }
}
