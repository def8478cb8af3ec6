//! A large policy whose endpoints come, change and go: behind each VIP a Service with its egress policy, each endpoint with
//! one VIP. What changes is drawn uniformly, always in the same way.

use std::net::{IpAddr, Ipv4Addr};

use vipgate::policy::Deal;
use vipgate_dataplane::session::tuple::HashKey;
use vipgate_dataplane::snapshot::spec::{
    AddressSelection, Announce, EgressSpec, EndpointSpec, Limits, OnExhaustion, PolicySet, VipSpec,
};

use super::Size;

/// First endpoint and first VIP; of both, others follow one by one.
const FIRST_ENDPOINT: Ipv4Addr = Ipv4Addr::new(10, 64, 0, 0);
const FIRST_VIP: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 0);
/// One endpoint in so many more is away at first: what comes is rarely what has just gone.
const SPARE: u32 = 10;

/// The policy as it is now.
#[derive(Debug)]
pub(super) struct Churn {
    vips: u32,
    /// The number of the VIP of each endpoint, by its own number; `None` while it is away.
    vip_of: Vec<Option<u32>>,
    there: Vec<u32>,
    away: Vec<u32>,
    changes: u64,
    random: Random,
}

/// Numbers that are the same in every run.
#[derive(Debug)]
pub(super) struct Random {
    key: HashKey,
    drawn: u64,
}

impl Default for Random {
    fn default() -> Self {
        Self { key: HashKey::fixed(), drawn: 0 }
    }
}

impl Random {
    /// A number below another one, each as likely.
    pub(super) fn below(&mut self, most: usize) -> usize {
        self.drawn += 1;
        ((u128::from(self.key.draw(self.drawn)) * most as u128) >> 64) as usize
    }
}

impl Churn {
    /// As many endpoints as wanted are there, spread over all VIPs.
    pub(super) fn new(Size { vips, endpoints }: Size) -> Self {
        let all = endpoints + endpoints / SPARE + 1;
        let vip_of = (0..all).map(|number| (number < endpoints).then_some(number % vips)).collect();
        let (there, away) = ((0..endpoints).collect(), (endpoints..all).collect());
        Self { vips, vip_of, there, away, changes: 0, random: Random::default() }
    }

    /// Changes one endpoint, in turn: one comes, one gets another VIP, one goes. Says which.
    pub(super) fn change(&mut self) -> u32 {
        self.changes += 1;
        let (number, vip) = match self.changes % 3 {
            1 => {
                let number = self.away.swap_remove(self.random.below(self.away.len()));
                self.there.push(number);
                (number, Some(self.random.below(self.vips as usize) as u32))
            }
            2 => {
                let number = self.there[self.random.below(self.there.len())];
                let further = 1 + self.random.below(self.vips as usize - 1) as u32;
                (number, self.vip_of[number as usize].map(|vip| (vip + further) % self.vips))
            }
            _ => {
                let number = self.there.swap_remove(self.random.below(self.there.len()));
                self.away.push(number);
                (number, None)
            }
        };
        self.vip_of[number as usize] = vip;
        number
    }

    /// How many endpoints are there.
    pub(super) fn endpoint_count(&self) -> usize {
        self.there.len()
    }

    /// How many VIPs there are, and policies.
    pub(super) fn vip_count(&self) -> usize {
        self.vips as usize
    }

    /// An endpoint, if it is there.
    pub(super) fn endpoint(&self, number: u32) -> Option<EndpointSpec> {
        let vip = self.vip_of[number as usize]?;
        Some(EndpointSpec {
            address: endpoint_address(number),
            name: format!("bench/pod-{number}").into(),
            policy: policy_name(vip).into(),
            vips: vec![vip_address(vip)],
            gateway: None,
            remarks: vec![],
        })
    }

    /// All endpoints that are there.
    pub(super) fn endpoints(&self) -> impl Iterator<Item = EndpointSpec> {
        (0..self.vip_of.len() as u32).filter_map(|number| self.endpoint(number))
    }

    /// All of it as one gateway sees it.
    pub(super) fn set(&self) -> PolicySet {
        PolicySet {
            version: "bench".to_owned(),
            policies: self.policies().collect(),
            vips: self.vips().collect(),
            endpoints: self.endpoints().collect(),
            ..PolicySet::default()
        }
    }

    /// All of it as a policy server has it.
    pub(super) fn deal(&self) -> Deal {
        Deal {
            policies: self.policies().collect(),
            vips: self.vips().collect(),
            endpoints: self.endpoints().collect(),
            services: Vec::new(),
            nodes: Vec::new(),
            cluster: None,
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
            shares: vec![],
        })
    }
}

/// The address of an endpoint.
pub(super) fn endpoint_address(number: u32) -> IpAddr {
    Ipv4Addr::from_bits(FIRST_ENDPOINT.to_bits() + number).into()
}

/// The address of a VIP.
pub(super) fn vip_address(number: u32) -> IpAddr {
    Ipv4Addr::from_bits(FIRST_VIP.to_bits() + number).into()
}

fn policy_name(vip: u32) -> String {
    format!("Service bench/service-{vip}")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use vipgate::policy::Viewer;
    use vipgate_dataplane::snapshot::change::PolicyChange;

    use super::*;

    #[test]
    fn endpoints_come_change_and_go_and_as_many_are_there_after_every_third_change() {
        let mut churn = Churn::new(Size { vips: 7, endpoints: 100 });
        let mut before: BTreeMap<IpAddr, EndpointSpec> = churn.endpoints().map(|it| (it.address, it)).collect();
        assert_eq!(before.len(), 100);
        for turn in 0..3000 {
            let number = churn.change();
            let (address, after) = (endpoint_address(number), churn.endpoint(number));
            let was = match &after {
                Some(endpoint) => before.insert(address, endpoint.clone()),
                None => before.remove(&address),
            };
            match turn % 3 {
                0 => assert!(was.is_none() && after.is_some()),
                1 => assert_ne!(was.unwrap().vips, after.unwrap().vips),
                _ => assert!(was.is_some() && after.is_none()),
            }
            assert_eq!((before.len(), churn.endpoint_count()), (100 + usize::from(turn % 3 < 2), before.len()));
        }
        assert!(churn.endpoints().eq(before.into_values()));
    }

    #[test]
    fn a_gateway_sees_what_the_server_has() {
        let mut churn = Churn::new(Size { vips: 3, endpoints: 20 });
        churn.change();
        let seen = churn.deal().part_of(Some(&Viewer::named("gw-bench")), "bench");
        assert!(PolicyChange::between(&churn.set(), &seen).is_empty());
        assert_eq!((seen.policies.len(), seen.vips.len(), seen.endpoints.len()), (3, 3, 21));
    }
}
