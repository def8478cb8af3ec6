//! State of a region.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net};

/// Name of the region.
pub(super) const REGION: &str = "eu-west-1";

#[derive(Clone, Default)]
pub(super) struct State {
    pub(super) eips: BTreeMap<String, Eip>,
    pub(super) enis: BTreeMap<String, Eni>,
    pub(super) instances: BTreeMap<String, String>,
    pub(super) subnets: BTreeMap<String, IpNet>,
    pub(super) address_limit: usize,
    /// Addresses that were ever allocated.
    pub(super) allocated: usize,
    counter: u32,
}

#[derive(Clone)]
pub(super) struct Eip {
    pub(super) public: IpAddr,
    pub(super) group: String,
    pub(super) tags: BTreeMap<String, String>,
    pub(super) association: Option<Association>,
}

#[derive(Clone)]
pub(super) struct Association {
    pub(super) id: String,
    pub(super) eni: String,
    pub(super) private: IpAddr,
}

#[derive(Clone)]
pub(super) struct Eni {
    pub(super) instance: String,
    pub(super) zone: String,
    pub(super) subnet: String,
    pub(super) source_dest_check: bool,
    /// The primary one first.
    pub(super) private: Vec<IpAddr>,
    pub(super) ipv6: Vec<IpAddr>,
    /// Delegated prefixes of both families.
    pub(super) prefixes: Vec<IpNet>,
}

impl Eni {
    /// What takes room in a family: addresses and prefixes.
    pub(super) fn used(&self, is_ipv6: bool) -> usize {
        let addresses = if is_ipv6 { &self.ipv6 } else { &self.private };
        addresses.len() + self.prefixes.iter().filter(|prefix| prefix.addr().is_ipv6() == is_ipv6).count()
    }

    /// Whether it has an address, alone or in a prefix.
    pub(super) fn has(&self, address: IpAddr) -> bool {
        let mut addresses = self.private.iter().chain(&self.ipv6);
        addresses.any(|it| *it == address) || self.prefixes.iter().any(|prefix| prefix.contains(&address))
    }
}

/// Private addresses per interface and family, by instance type ("IP addresses per network interface per instance type").
pub(super) const TYPES: [(&str, usize); 3] = [("t3.nano", 2), ("t3.medium", 6), ("c7gn.xlarge", 15)];

pub(super) fn subnet_id(zone: &str) -> String {
    format!("subnet-{zone}")
}

impl State {
    pub(super) fn new() -> Self {
        Self { address_limit: 100, ..Self::default() }
    }

    pub(super) fn next_id(&mut self, prefix: &str) -> String {
        self.counter += 1;
        format!("{prefix}-{:017x}", self.counter)
    }

    pub(super) fn add_instance(&mut self, instance_type: &str, zone: &str) -> (String, String) {
        let subnet = subnet_id(zone);
        let number = u8::try_from(self.subnets.len()).unwrap_or(u8::MAX);
        let net = Ipv4Net::new(Ipv4Addr::new(10, 0, number, 0), 24).map(IpNet::from);
        if let Ok(net) = net {
            self.subnets.entry(subnet.clone()).or_insert(net);
        }
        let (instance, eni) = (self.next_id("i"), self.next_id("eni"));
        let first = self.subnets[&subnet].network();
        let used = self.enis.values().filter(|eni| eni.subnet == subnet).count() as u32;
        let primary = match first {
            IpAddr::V4(first) => Ipv4Addr::from_bits(first.to_bits() + 10 + used).into(),
            IpAddr::V6(first) => first.into(),
        };
        let new = Eni {
            instance: instance.clone(),
            zone: zone.to_owned(),
            subnet,
            source_dest_check: true,
            private: vec![primary],
            ipv6: vec![Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 1, self.counter as u16).into()],
            prefixes: Vec::new(),
        };
        self.enis.insert(eni.clone(), new);
        self.instances.insert(instance.clone(), instance_type.to_owned());
        (instance, eni)
    }

    pub(super) fn terminate(&mut self, instance: &str) {
        self.instances.remove(instance);
        self.enis.retain(|_, eni| eni.instance != instance);
        for eip in self.eips.values_mut() {
            let is_gone = eip.association.as_ref().is_some_and(|it| !self.enis.contains_key(&it.eni));
            if is_gone {
                eip.association = None;
            }
        }
    }

    pub(super) fn add_address(&mut self, public: IpAddr, tags: BTreeMap<String, String>) -> String {
        let id = self.next_id("eipalloc");
        self.eips.insert(id.clone(), Eip { public, group: REGION.to_owned(), tags, association: None });
        id
    }
}
