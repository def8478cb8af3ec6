//! Endpoint churn on a large policy: each VIP has a Service with an egress policy, each endpoint one VIP. Endpoints are
//! added, changed and removed uniformly at random, with a fixed seed.

use std::net::{IpAddr, Ipv4Addr};

use vipgate_dataplane::flow::tuple::HashKey;
use vipgate_dataplane::policy::spec::{
    AddressSelection, Announce, EgressSpec, EndpointSpec, Limits, OnExhaustion, VipSpec,
};
use vipgate_policy::compiler::Placement;

use super::PolicySize;

/// First endpoint address and first VIP, each followed by consecutive addresses.
const FIRST_ENDPOINT: Ipv4Addr = Ipv4Addr::new(10, 64, 0, 0);
const FIRST_VIP: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 0);
/// A tenth as many endpoints again are absent at first, so that an added endpoint is rarely the one just removed.
const ABSENT_RATIO: u32 = 10;

/// The current policy.
#[derive(Debug)]
pub(super) struct Churn {
    vips: u32,
    /// VIP number by endpoint number; `None` while the endpoint is absent.
    vip_of: Vec<Option<u32>>,
    present: Vec<u32>,
    absent: Vec<u32>,
    changes: u64,
    random: Random,
}

/// Pseudo-random numbers with a fixed seed.
#[derive(Debug)]
struct Random {
    key: HashKey,
    drawn: u64,
}

impl Default for Random {
    fn default() -> Self {
        Self { key: HashKey::fixed(), drawn: 0 }
    }
}

impl Random {
    /// A uniform random number below `bound`.
    fn below(&mut self, bound: usize) -> usize {
        self.drawn += 1;
        ((u128::from(self.key.draw(self.drawn)) * bound as u128) >> 64) as usize
    }
}

impl Churn {
    /// A policy with `endpoints` spread evenly over all VIPs.
    pub(super) fn new(PolicySize { vips, endpoints }: PolicySize) -> Self {
        let all = endpoints + endpoints / ABSENT_RATIO + 1;
        let vip_of = (0..all).map(|number| (number < endpoints).then_some(number % vips)).collect();
        let (present, absent) = ((0..endpoints).collect(), (endpoints..all).collect());
        Self { vips, vip_of, present, absent, changes: 0, random: Random::default() }
    }

    /// Changes one endpoint: alternately adds one, changes the VIP of one, and removes one. Returns its number.
    pub(super) fn change_next(&mut self) -> u32 {
        self.changes += 1;
        let (number, vip) = match self.changes % 3 {
            1 => {
                let number = self.absent.swap_remove(self.random.below(self.absent.len()));
                self.present.push(number);
                (number, Some(self.random.below(self.vips as usize) as u32))
            }
            2 => {
                let number = self.present[self.random.below(self.present.len())];
                let offset = 1 + self.random.below(self.vips as usize - 1) as u32;
                (number, self.vip_of[number as usize].map(|vip| (vip + offset) % self.vips))
            }
            _ => {
                let number = self.present.swap_remove(self.random.below(self.present.len()));
                self.absent.push(number);
                (number, None)
            }
        };
        self.vip_of[number as usize] = vip;
        number
    }

    /// Number of endpoints.
    pub(super) fn endpoint_count(&self) -> usize {
        self.present.len()
    }

    /// Number of VIPs, and of policies.
    pub(super) fn vip_count(&self) -> usize {
        self.vips as usize
    }

    /// An endpoint, if it is present.
    pub(super) fn endpoint(&self, number: u32) -> Option<EndpointSpec> {
        let vip = self.vip_of[number as usize]?;
        Some(EndpointSpec {
            address: endpoint_address(number),
            name: format!("bench/pod-{number}").into(),
            policy: policy_name(vip).into(),
            vips: vec![vip_address(vip)],
            gateway: None,
            slot: None,
            remarks: vec![],
        })
    }

    /// All present endpoints.
    pub(super) fn endpoints(&self) -> impl Iterator<Item = EndpointSpec> {
        (0..self.vip_of.len() as u32).filter_map(|number| self.endpoint(number))
    }

    /// The whole policy, as published by a policy server.
    pub(super) fn placement(&self) -> Placement {
        Placement {
            shard_maps: Vec::new().into(),
            policies: self.policies().collect(),
            vips: self.vips().collect(),
            endpoints: self.endpoints().collect(),
            services: Vec::new().into(),
            nodes: Vec::new(),
            cluster: None,
            agents: [].into(),
            peers: Vec::new(),
        }
    }

    fn policies(&self) -> impl Iterator<Item = EgressSpec> {
        (0..self.vips).map(|vip| EgressSpec {
            name: policy_name(vip).into(),
            destinations: ["0.0.0.0/0", "::/0"].iter().filter_map(|net| net.parse().ok()).collect(),
            excluded: Vec::new(),
            address_selection: AddressSelection::PerEndpoint,
            limits: Limits::default(),
            on_exhaustion: OnExhaustion::default(),
        })
    }

    fn vips(&self) -> impl Iterator<Item = VipSpec> {
        (0..self.vips).map(|vip| VipSpec {
            address: vip_address(vip),
            name: policy_name(vip).into(),
            announce: Announce::L2,
            reserved_ports: vec![80],
            shards: vec![],
            shard_map: None,
            private: vec![],
        })
    }
}

/// Address of an endpoint, by number.
pub(super) fn endpoint_address(number: u32) -> IpAddr {
    Ipv4Addr::from_bits(FIRST_ENDPOINT.to_bits() + number).into()
}

/// Address of a VIP, by number.
pub(super) fn vip_address(number: u32) -> IpAddr {
    Ipv4Addr::from_bits(FIRST_VIP.to_bits() + number).into()
}

fn policy_name(vip: u32) -> String {
    format!("Service bench/service-{vip}")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn endpoints_are_added_changed_and_removed_in_turn() {
        let mut churn = Churn::new(PolicySize { vips: 7, endpoints: 100 });
        let mut model: BTreeMap<IpAddr, EndpointSpec> = churn.endpoints().map(|it| (it.address, it)).collect();
        assert_eq!(model.len(), 100);
        for change in 0..3000 {
            let number = churn.change_next();
            let (address, new) = (endpoint_address(number), churn.endpoint(number));
            let old = match &new {
                Some(endpoint) => model.insert(address, endpoint.clone()),
                None => model.remove(&address),
            };
            match change % 3 {
                0 => assert!(old.is_none() && new.is_some()),
                1 => assert_ne!(old.unwrap().vips, new.unwrap().vips),
                _ => assert!(old.is_some() && new.is_none()),
            }
            assert_eq!((model.len(), churn.endpoint_count()), (100 + usize::from(change % 3 < 2), model.len()));
        }
        assert!(churn.endpoints().eq(model.into_values()));
    }
}
