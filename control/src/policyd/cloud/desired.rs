//! What a cloud provider is to have, from placement and membership view.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use vipgate_cloud::Observation;
use vipgate_cloud::plan::{Desired, DesiredVip, GatewayState};
use vipgate_dataplane::policy::spec::VipSpec;
use vipgate_membership::MembershipView;
use vipgate_policy::compiler::Placement;
use vipgate_policy::manifest::claim_owner;

/// The VIPs of a pool, each with the gateway that owns it now, and the states of gateways.
pub(super) fn desired(
    cluster: &str,
    placement: &Placement,
    view: &MembershipView,
    observation: &Observation,
) -> Desired {
    let of_pool = |address: &IpAddr| placement.vips.get(address);
    let vips = observation.addresses.iter().filter_map(|address| of_pool(&address.address));
    let is_active = |name: &Arc<str>| view.member(name).is_some_and(|member| member.serving);
    let state = |name: &Arc<str>| {
        let state = if is_active(name) { GatewayState::Active } else { GatewayState::Dead };
        (name.to_string(), state)
    };
    Desired {
        cluster: cluster.to_owned(),
        vips: vips.map(|vip| (vip.address, desired_vip(vip, &is_active))).collect(),
        gateways: placement.peers.iter().map(|peer| state(&peer.name)).collect::<BTreeMap<_, _>>(),
        ..Desired::default()
    }
}

fn desired_vip(vip: &VipSpec, is_active: &impl Fn(&Arc<str>) -> bool) -> DesiredVip {
    let shard = vip.shards.first();
    let order = shard.into_iter().flat_map(|shard| std::iter::once(&shard.gateway).chain(&shard.backups));
    let mut standbys: Vec<&Arc<str>> = order.collect();
    let gateway = standbys.iter().position(|name| is_active(name)).map(|at| standbys.remove(at));
    // An active one takes over first.
    standbys.sort_by_key(|name| !is_active(name));
    DesiredVip {
        owner: claim_owner(&vip.name),
        gateway: gateway.map(ToString::to_string),
        standbys: standbys.into_iter().map(ToString::to_string).collect(),
    }
}

#[cfg(test)]
mod tests {
    use vipgate_cloud::{AddressId, PublicAddress};
    use vipgate_dataplane::policy::spec::{Announce, ShardSpec};
    use vipgate_membership::Member;
    use vipgate_policy::compiler::{Peer, Table};

    use super::*;

    const VIP: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(203, 0, 113, 1));

    fn placement() -> Placement {
        let vip = VipSpec {
            address: VIP,
            name: "Service default/web".into(),
            announce: Announce::L2,
            reserved_ports: vec![],
            shards: vec![ShardSpec { gateway: "a".into(), blocks: None, backups: vec!["b".into(), "c".into()] }],
            shard_map: None,
            private: vec![],
        };
        let peer = |name: &str| Peer {
            name: name.into(),
            node: name.into(),
            zone: "".into(),
            address: None,
            pods: Arc::new([]),
            uncovered: None,
        };
        let vips = Table::default().replaced(vec![vip]);
        Placement { vips, peers: ["a", "b", "c"].map(peer).to_vec(), ..Placement::default() }
    }

    fn view(active: &[&str]) -> MembershipView {
        let member = |name: &str| Member { serving: active.contains(&name), ..Member::new(name.into(), 1) };
        MembershipView { number: 1, members: ["a", "b", "c"].map(member).to_vec(), ..MembershipView::default() }
    }

    fn observation() -> Observation {
        let address = PublicAddress {
            id: AddressId("eipalloc-1".into()),
            address: VIP,
            zone: None,
            has_tags: true,
            claim: None,
            token: None,
            attachment: None,
            private: BTreeMap::new(),
            version: String::new(),
        };
        Observation { addresses: vec![address], nics: vec![] }
    }

    fn gateways(active: &[&str]) -> (Option<String>, Vec<String>) {
        let desired = desired("prod", &placement(), &view(active), &observation());
        let DesiredVip { gateway, standbys, .. } = desired.vips[&VIP].clone();
        (gateway, standbys)
    }

    #[test]
    fn the_first_active_gateway_owns_a_vip_and_active_ones_are_its_first_standbys() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        assert_eq!(gateways(&["a", "b", "c"]), (Some("a".to_owned()), names(&["b", "c"])));
        assert_eq!(gateways(&["b", "c"]), (Some("b".to_owned()), names(&["c", "a"])));
        assert_eq!(gateways(&["c"]), (Some("c".to_owned()), names(&["a", "b"])));
        assert_eq!(gateways(&[]), (None, names(&["a", "b", "c"])));
    }

    #[test]
    fn only_vips_that_the_provider_has_are_of_the_pool() {
        let none = Observation::default();
        assert!(desired("prod", &placement(), &view(&["a"]), &none).vips.is_empty());
    }
}
