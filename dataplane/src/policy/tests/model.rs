//! Random policies with few names and addresses, so that they are removed, added again and in conflict.

use std::net::IpAddr;

use proptest::prelude::*;
use proptest::sample::Index;

use crate::policy::spec::*;
use crate::policy_set::PolicySet;

/// Names of egress policies.
pub(super) const POLICIES: [&str; 4] = ["a", "b", "c", "d"];
/// Addresses that may be VIPs; the last two may also be endpoints.
pub(super) const VIPS: [&str; 8] =
    ["192.0.2.1", "192.0.2.2", "192.0.2.3", "192.0.2.4", "2001:db8::1", "2001:db8::2", "10.0.0.9", "fd00::9"];
/// Addresses that may be endpoints. The first three share a bucket, and so do the first two of IPv6.
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
/// Remote addresses that are neither VIPs nor endpoints.
pub(super) const REMOTES: [&str; 3] = ["198.51.100.1", "198.51.100.200", "2001:db8:51::1"];

pub(super) fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Model state: the objects of a policy. Where they are inconsistent, as with an endpoint of a removed policy, the
/// endpoint is changed or left out.
#[derive(Clone, Debug, Default)]
pub(super) struct ModelState {
    version: u32,
    policies: [Option<PolicyShape>; POLICIES.len()],
    vips: [Option<VipShape>; VIPS.len()],
    endpoints: [Option<EndpointShape>; ENDPOINTS.len()],
}

#[derive(Clone, Debug)]
pub(super) struct PolicyShape {
    excluded: usize,
    guaranteed: Option<u32>,
    drops: bool,
}

#[derive(Clone, Debug)]
pub(super) struct VipShape {
    routed: bool,
    reserved: bool,
}

#[derive(Clone, Debug)]
pub(super) struct EndpointShape {
    policy: usize,
    /// Bit mask of its VIPs.
    vips: u8,
    named: bool,
}

/// An object to be added, changed or removed.
#[derive(Clone, Debug)]
pub(super) enum Edit {
    Policy(usize, Option<PolicyShape>),
    Vip(usize, Option<VipShape>),
    Endpoint(usize, Option<EndpointShape>),
}

/// An inconsistency in a policy or change.
#[derive(Clone, Copy, Debug)]
pub(super) enum Flaw {
    UnknownPolicy,
    UnknownVip,
    VipOfOtherFamily,
    EndpointIsVip,
    PolicyInUse,
    VipInUse,
}

#[derive(Clone, Debug)]
pub(super) enum Step {
    /// A valid change, by key or as a whole.
    Change { edits: Vec<Edit>, whole: bool },
    /// An invalid change.
    Invalid { edits: Vec<Edit>, flaw: Flaw, at: Index, whole: bool },
    /// A session of an endpoint opens or ends.
    Session { endpoint: usize, opens: bool },
    /// A worker claims a block of a VIP, or releases it.
    Block { vip: usize, taken: bool },
}

pub(super) fn step() -> impl Strategy<Value = Step> {
    use Flaw::*;
    let flaws = [UnknownPolicy, UnknownVip, VipOfOtherFamily, EndpointIsVip, PolicyInUse, VipInUse];
    let edits = || prop_oneof![4 => prop::collection::vec(edit(), 1..5), 1 => prop::collection::vec(edit(), 5..40)];
    prop_oneof![
        6 => (edits(), prop::bool::weighted(0.2)).prop_map(|(edits, whole)| Step::Change { edits, whole }),
        3 => (edits(), prop::sample::select(flaws.to_vec()), any::<Index>(), any::<bool>())
            .prop_map(|(edits, flaw, at, whole)| Step::Invalid { edits, flaw, at, whole }),
        2 => (0..ENDPOINTS.len(), prop::bool::weighted(0.6))
            .prop_map(|(endpoint, opens)| Step::Session { endpoint, opens }),
        2 => (0..VIPS.len(), prop::bool::weighted(0.6)).prop_map(|(vip, taken)| Step::Block { vip, taken }),
    ]
}

pub(super) fn edit() -> impl Strategy<Value = Edit> {
    let policy = (0..3_usize, prop::sample::select(vec![None, None, Some(1), Some(500)]), any::<bool>())
        .prop_map(|(excluded, guaranteed, drops)| PolicyShape { excluded, guaranteed, drops });
    let vip = (any::<bool>(), any::<bool>()).prop_map(|(routed, reserved)| VipShape { routed, reserved });
    let endpoint = (0..POLICIES.len(), any::<u8>(), any::<bool>()).prop_map(|(policy, vips, named)| EndpointShape {
        policy,
        vips,
        named,
    });
    prop_oneof![
        2 => (0..POLICIES.len(), prop::option::weighted(0.8, policy)).prop_map(|(at, it)| Edit::Policy(at, it)),
        2 => (0..VIPS.len(), prop::option::weighted(0.7, vip)).prop_map(|(at, it)| Edit::Vip(at, it)),
        3 => (0..ENDPOINTS.len(), prop::option::weighted(0.75, endpoint)).prop_map(|(at, it)| Edit::Endpoint(at, it)),
    ]
}

impl ModelState {
    /// The state after these edits.
    pub(super) fn edited(&self, edits: &[Edit]) -> Self {
        let mut state = self.clone();
        state.version += 1;
        for edit in edits.iter().cloned() {
            match edit {
                Edit::Policy(at, shape) => state.policies[at] = shape,
                Edit::Vip(at, shape) => state.vips[at] = shape,
                Edit::Endpoint(at, shape) => state.endpoints[at] = shape,
            }
        }
        state
    }

    /// The consistent policy of this state.
    pub(super) fn policy_set(&self) -> PolicySet {
        let is_present = |at: &usize| self.policies[*at].is_some();
        let first = (0..POLICIES.len()).find(is_present);
        let policies = self.policies.iter().zip(POLICIES).filter_map(|(shape, name)| Some(shape.as_ref()?.spec(name)));
        let vips = self.vips.iter().zip(VIPS).filter_map(|(shape, at)| Some(shape.as_ref()?.spec(ip(at))));
        let vips: Vec<VipSpec> = vips.collect();
        let is_vip = |address| vips.iter().any(|vip| vip.address == address);
        let endpoint = |(shape, address): (&Option<EndpointShape>, &str)| {
            let (shape, address) = (shape.as_ref()?, ip(address));
            let policy = Some(shape.policy).filter(is_present).or(first)?;
            let own = VIPS.iter().enumerate().filter(|(at, _)| shape.vips >> at & 1 == 1).map(|(_, vip)| ip(vip));
            (!is_vip(address)).then(|| EndpointSpec {
                address,
                name: if shape.named { "tenant/pod" } else { "" }.into(),
                policy: POLICIES[policy].into(),
                vips: own.filter(|vip| is_vip(*vip) && vip.is_ipv4() == address.is_ipv4()).collect(),
                gateway: None,
                slot: None,
                remarks: vec![],
            })
        };
        let endpoints = self.endpoints.iter().zip(ENDPOINTS).filter_map(endpoint).collect();
        let version = self.version.to_string();
        PolicySet {
            version,
            policies: policies.collect(),
            shard_maps: Vec::new(),
            vips,
            endpoints,
            services: Vec::new(),
            nodes: Vec::new(),
            cluster: ClusterSpec::default(),
        }
    }
}

impl PolicyShape {
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

impl VipShape {
    fn spec(&self, address: IpAddr) -> VipSpec {
        VipSpec {
            address,
            name: "Service tenant/api".into(),
            announce: if self.routed { Announce::Bgp } else { Announce::L2 },
            reserved_ports: if self.reserved { vec![80, 443] } else { vec![] },
            shards: vec![],
            shard_map: None,
            private: vec![],
        }
    }
}

/// Makes a policy invalid; `None` if it has no object to do that with.
pub(super) fn invalid_policy(mut set: PolicySet, flaw: Flaw, at: Index) -> Option<PolicySet> {
    fn one<T>(of: &mut [T], at: Index) -> Option<&mut T> {
        (!of.is_empty()).then(|| at.get_mut(of))
    }
    match flaw {
        Flaw::UnknownPolicy => one(&mut set.endpoints, at)?.policy = "nobody".into(),
        Flaw::UnknownVip => one(&mut set.endpoints, at)?.vips = vec![ip("203.0.113.1")],
        Flaw::VipOfOtherFamily => {
            let vips: Vec<IpAddr> = set.vips.iter().map(|vip| vip.address).collect();
            let endpoint = one(&mut set.endpoints, at)?;
            let other = vips.into_iter().find(|vip| vip.is_ipv4() != endpoint.address.is_ipv4())?;
            endpoint.vips.push(other);
        }
        Flaw::EndpointIsVip => {
            let policy = set.policies.first()?.name.clone();
            let address = one(&mut set.vips, at)?.address;
            set.endpoints.push(EndpointSpec {
                address,
                name: "".into(),
                policy,
                vips: vec![],
                gateway: None,
                slot: None,
                remarks: vec![],
            });
        }
        Flaw::PolicyInUse => {
            let name = one(&mut set.endpoints, at)?.policy.clone();
            set.policies.retain(|policy| policy.name != name);
        }
        Flaw::VipInUse => {
            let removed = *set.endpoints.iter().flat_map(|endpoint| &endpoint.vips).next()?;
            set.vips.retain(|vip| vip.address != removed);
        }
    }
    Some(set)
}
