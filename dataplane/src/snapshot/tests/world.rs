//! Random policies: few names and addresses, so that they come, go, return and clash.

use std::net::IpAddr;

use proptest::prelude::*;
use proptest::sample::Index;

use crate::snapshot::change::PolicyChange;
use crate::snapshot::spec::*;

/// The names that policies have.
pub(super) const POLICIES: [&str; 4] = ["a", "b", "c", "d"];
/// The addresses that are VIPs at times; the last two are also endpoints at times.
pub(super) const VIPS: [&str; 8] =
    ["192.0.2.1", "192.0.2.2", "192.0.2.3", "192.0.2.4", "2001:db8::1", "2001:db8::2", "10.0.0.9", "fd00::9"];
/// The addresses that are endpoints at times. The first three share a shard, and so do the first two of IPv6.
pub(super) const ENDPOINTS: [&str; 11] = [
    "10.0.0.1",
    "10.0.10.25",
    "10.0.16.86",
    "10.0.0.4",
    "10.0.0.5",
    "10.0.0.6",
    "fd00::1",
    "fd00::63e",
    "fd00::3",
    "10.0.0.9",
    "fd00::9",
];
/// Far sides that are nothing else.
pub(super) const FARS: [&str; 3] = ["198.51.100.1", "198.51.100.200", "2001:db8:51::1"];

pub(super) fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// What there is. Where it contradicts itself, as when a policy goes that an endpoint names, the endpoint gives way.
#[derive(Clone, Debug, Default)]
pub(super) struct World {
    version: u32,
    policies: [Option<PolicyLook>; POLICIES.len()],
    vips: [Option<VipLook>; VIPS.len()],
    endpoints: [Option<EndpointLook>; ENDPOINTS.len()],
}

#[derive(Clone, Debug)]
pub(super) struct PolicyLook {
    excluded: usize,
    guaranteed: Option<u32>,
    drops: bool,
}

#[derive(Clone, Debug)]
pub(super) struct VipLook {
    routed: bool,
    reserved: bool,
}

#[derive(Clone, Debug)]
pub(super) struct EndpointLook {
    policy: usize,
    /// Bits: which of the VIPs.
    vips: u8,
    named: bool,
}

/// One thing that comes, goes or is different.
#[derive(Clone, Debug)]
pub(super) enum Edit {
    Policy(usize, Option<PolicyLook>),
    Vip(usize, Option<VipLook>),
    Endpoint(usize, Option<EndpointLook>),
}

/// What makes a policy one that can't be.
#[derive(Clone, Copy, Debug)]
pub(super) enum Flaw {
    NamesNoPolicy,
    NamesNoVip,
    NamesVipOfTheOtherFamily,
    EndpointAtVip,
    PolicyGone,
    VipGone,
    EndpointTwice,
    VipTwice,
    PolicyTwice,
    ComesAndGoes,
}

#[derive(Clone, Debug)]
pub(super) enum Step {
    /// To another policy, key by key or whole.
    Change { edits: Vec<Edit>, whole: bool },
    /// To one that is flawed.
    Flawed { edits: Vec<Edit>, flaw: Flaw, at: Index, whole: bool },
    /// A session of an endpoint opens, or ends.
    Session { endpoint: usize, opens: bool },
    /// A worker takes a block of a VIP, or gives it back.
    Block { vip: usize, taken: bool },
}

pub(super) fn step() -> impl Strategy<Value = Step> {
    use Flaw::*;
    let flaws = [
        NamesNoPolicy,
        NamesNoVip,
        NamesVipOfTheOtherFamily,
        EndpointAtVip,
        PolicyGone,
        VipGone,
        EndpointTwice,
        VipTwice,
        PolicyTwice,
        ComesAndGoes,
    ];
    let edits = || prop_oneof![4 => prop::collection::vec(edit(), 1..5), 1 => prop::collection::vec(edit(), 5..40)];
    prop_oneof![
        6 => (edits(), prop::bool::weighted(0.2)).prop_map(|(edits, whole)| Step::Change { edits, whole }),
        3 => (edits(), prop::sample::select(flaws.to_vec()), any::<Index>(), any::<bool>())
            .prop_map(|(edits, flaw, at, whole)| Step::Flawed { edits, flaw, at, whole }),
        2 => (0..ENDPOINTS.len(), prop::bool::weighted(0.6))
            .prop_map(|(endpoint, opens)| Step::Session { endpoint, opens }),
        2 => (0..VIPS.len(), prop::bool::weighted(0.6)).prop_map(|(vip, taken)| Step::Block { vip, taken }),
    ]
}

fn edit() -> impl Strategy<Value = Edit> {
    let policy = (0..3_usize, prop::sample::select(vec![None, None, Some(1), Some(500)]), any::<bool>())
        .prop_map(|(excluded, guaranteed, drops)| PolicyLook { excluded, guaranteed, drops });
    let vip = (any::<bool>(), any::<bool>()).prop_map(|(routed, reserved)| VipLook { routed, reserved });
    let endpoint = (0..POLICIES.len(), any::<u8>(), any::<bool>()).prop_map(|(policy, vips, named)| EndpointLook {
        policy,
        vips,
        named,
    });
    prop_oneof![
        2 => (0..POLICIES.len(), prop::option::weighted(0.8, policy)).prop_map(|(at, look)| Edit::Policy(at, look)),
        2 => (0..VIPS.len(), prop::option::weighted(0.7, vip)).prop_map(|(at, look)| Edit::Vip(at, look)),
        3 => (0..ENDPOINTS.len(), prop::option::weighted(0.75, endpoint)).prop_map(|(at, look)| Edit::Endpoint(at, look)),
    ]
}

impl World {
    /// Another one.
    pub(super) fn edited(&self, edits: &[Edit]) -> Self {
        let mut world = self.clone();
        world.version += 1;
        for edit in edits.iter().cloned() {
            match edit {
                Edit::Policy(at, look) => world.policies[at] = look,
                Edit::Vip(at, look) => world.vips[at] = look,
                Edit::Endpoint(at, look) => world.endpoints[at] = look,
            }
        }
        world
    }

    /// As control tells it.
    pub(super) fn set(&self) -> PolicySet {
        let there = |at: &usize| self.policies[*at].is_some();
        let first = (0..POLICIES.len()).find(there);
        let policies = self.policies.iter().zip(POLICIES).filter_map(|(look, name)| Some(look.as_ref()?.spec(name)));
        let vips = self.vips.iter().zip(VIPS).filter_map(|(look, at)| Some(look.as_ref()?.spec(ip(at))));
        let vips: Vec<VipSpec> = vips.collect();
        let is_vip = |address| vips.iter().any(|vip| vip.address == address);
        let endpoint = |(look, address): (&Option<EndpointLook>, &str)| {
            let (look, address) = (look.as_ref()?, ip(address));
            let policy = Some(look.policy).filter(there).or(first)?;
            let own = VIPS.iter().enumerate().filter(|(at, _)| look.vips >> at & 1 == 1).map(|(_, vip)| ip(vip));
            (!is_vip(address)).then(|| EndpointSpec {
                address,
                name: if look.named { "tenant/pod" } else { "" }.into(),
                policy: POLICIES[policy].into(),
                vips: own.filter(|vip| is_vip(*vip) && vip.is_ipv4() == address.is_ipv4()).collect(),
                gateway: None,
                remarks: vec![],
            })
        };
        let endpoints = self.endpoints.iter().zip(ENDPOINTS).filter_map(endpoint).collect();
        let version = self.version.to_string();
        PolicySet {
            version,
            policies: policies.collect(),
            vips,
            endpoints,
            services: Vec::new(),
            nodes: Vec::new(),
            cluster: ClusterSpec::default(),
        }
    }
}

impl PolicyLook {
    fn spec(&self, name: &str) -> EgressSpec {
        let excluded = [&[][..], &["198.51.100.128/25"], &["198.51.100.0/24", "2001:db8:51::/48"]][self.excluded];
        EgressSpec {
            name: name.into(),
            destinations: vec!["0.0.0.0/0".parse().unwrap(), "::/0".parse().unwrap()],
            excluded: excluded.iter().map(|net| net.parse().unwrap()).collect(),
            address_selection: AddressSelection::PerEndpoint,
            limits: Limits { guaranteed_ports: self.guaranteed, ..Limits::default() },
            on_exhaustion: if self.drops { OnExhaustion::Drop } else { OnExhaustion::Reject },
        }
    }
}

impl VipLook {
    fn spec(&self, address: IpAddr) -> VipSpec {
        VipSpec {
            address,
            name: "Service tenant/api".into(),
            announce: if self.routed { Announce::Bgp } else { Announce::L2 },
            reserved_ports: if self.reserved { vec![80, 443] } else { vec![] },
            shares: vec![],
        }
    }
}

/// The same policy with a flaw; `None` if there is nothing to spoil.
pub(super) fn flawed(mut set: PolicySet, flaw: Flaw, at: Index) -> Option<PolicySet> {
    fn one<T>(of: &mut [T], at: Index) -> Option<&mut T> {
        (!of.is_empty()).then(|| at.get_mut(of))
    }
    match flaw {
        Flaw::NamesNoPolicy => one(&mut set.endpoints, at)?.policy = "nobody".into(),
        Flaw::NamesNoVip => one(&mut set.endpoints, at)?.vips = vec![ip("203.0.113.1")],
        Flaw::NamesVipOfTheOtherFamily => {
            let vips: Vec<IpAddr> = set.vips.iter().map(|vip| vip.address).collect();
            let endpoint = one(&mut set.endpoints, at)?;
            let other = vips.into_iter().find(|vip| vip.is_ipv4() != endpoint.address.is_ipv4())?;
            endpoint.vips.push(other);
        }
        Flaw::EndpointAtVip => {
            let policy = set.policies.first()?.name.clone();
            let address = one(&mut set.vips, at)?.address;
            set.endpoints.push(EndpointSpec {
                address,
                name: "".into(),
                policy,
                vips: vec![],
                gateway: None,
                remarks: vec![],
            });
        }
        Flaw::PolicyGone => {
            let name = one(&mut set.endpoints, at)?.policy.clone();
            set.policies.retain(|policy| policy.name != name);
        }
        Flaw::VipGone => {
            let gone = *set.endpoints.iter().flat_map(|endpoint| &endpoint.vips).next()?;
            set.vips.retain(|vip| vip.address != gone);
        }
        Flaw::EndpointTwice | Flaw::ComesAndGoes => {
            let again = one(&mut set.endpoints, at)?.clone();
            set.endpoints.push(again);
        }
        Flaw::VipTwice => {
            let again = one(&mut set.vips, at)?.clone();
            set.vips.push(again);
        }
        Flaw::PolicyTwice => {
            let again = one(&mut set.policies, at)?.clone();
            set.policies.push(again);
        }
    }
    Some(set)
}

/// What makes a flawed policy of `old`. What is there twice is named twice, which `between` never does.
pub(super) fn flawed_change(old: &PolicySet, flawed: &PolicySet, flaw: Flaw) -> PolicyChange {
    let mut change = PolicyChange::between(old, flawed);
    match (flaw, flawed.vips.last(), flawed.endpoints.last(), flawed.policies.last()) {
        (Flaw::EndpointTwice, _, Some(again), _) => change.endpoints.extend([again.clone(), again.clone()]),
        (Flaw::VipTwice, Some(again), _, _) => change.vips.extend([again.clone(), again.clone()]),
        (Flaw::PolicyTwice, _, _, Some(again)) => change.policies.extend([again.clone(), again.clone()]),
        (Flaw::ComesAndGoes, _, Some(again), _) => {
            change.endpoints.push(again.clone());
            change.gone.endpoints.push(again.address);
        }
        _ => {}
    }
    change
}
