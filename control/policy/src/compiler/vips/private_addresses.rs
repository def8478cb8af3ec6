//! Private addresses of VIPs in a cloud, as its provider has them.

use std::net::IpAddr;
use std::sync::Arc;

use foldhash::{HashMap, HashSet};
use vipgate_dataplane::policy::spec::PrivateAddressSpec;

use super::{AssignedVip, Inputs};
use crate::manifest::{Family, unusable_address};

/// Those of a VIP at gateways.
pub(super) fn of(vip: IpAddr, sources: &Inputs<'_>) -> Vec<PrivateAddressSpec> {
    let private = sources.pools.cloud(vip).and_then(|cloud| cloud.addresses.get(&vip)).map(|it| &it.private);
    // One that is the VIP itself needs no translation. The provider's tags can be edited by hand, so others may be unusable.
    let is_private = |private: IpAddr| {
        private != vip && Family::of(private) == Family::of(vip) && unusable_address(private).is_none()
    };
    let spec = |(gateway, address): (&String, &IpAddr)| PrivateAddressSpec {
        gateway: gateway.as_str().into(),
        address: *address,
    };
    private.into_iter().flatten().filter(|(_, private)| is_private(**private)).map(spec).collect()
}

/// Leaves out those that don't tell which VIP a packet is for: VIPs, and addresses of two VIPs at one gateway. Gateways don't
/// translate them either.
pub(super) fn remove_ambiguous(assigned: &mut [AssignedVip], vips: &HashSet<IpAddr>) {
    let mut counts: HashMap<(Arc<str>, IpAddr), usize> = HashMap::default();
    for PrivateAddressSpec { gateway, address } in assigned.iter().flat_map(|vip| &vip.spec.private) {
        *counts.entry((gateway.clone(), *address)).or_default() += 1;
    }
    if counts.is_empty() {
        return;
    }
    for vip in assigned {
        let is_unique = |it: &PrivateAddressSpec| counts.get(&(it.gateway.clone(), it.address)) == Some(&1);
        vip.spec.private.retain(|it| is_unique(it) && !vips.contains(&it.address));
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use vipgate_dataplane::policy::spec::{Announce, VipSpec};

    use super::*;

    fn vip(last: u8, private: &[(&str, [u8; 4])]) -> AssignedVip {
        let private = private.iter().map(|(gateway, address)| PrivateAddressSpec {
            gateway: (*gateway).into(),
            address: Ipv4Addr::from(*address).into(),
        });
        let spec = VipSpec {
            address: Ipv4Addr::new(203, 0, 113, last).into(),
            name: "Service t/s".into(),
            announce: Announce::L2,
            reserved_ports: vec![],
            shards: vec![],
            shard_map: None,
            private: private.collect(),
        };
        AssignedVip { spec, owners: vec![] }
    }

    #[test]
    fn addresses_of_two_vips_and_vips_are_left_out() {
        let mut assigned = [
            vip(1, &[("g1", [10, 0, 0, 1]), ("g2", [10, 0, 0, 1])]),
            vip(2, &[("g1", [10, 0, 0, 1]), ("g2", [10, 0, 0, 2])]),
            vip(3, &[("g1", [203, 0, 113, 4])]),
        ];
        let mut vips: HashSet<IpAddr> = assigned.iter().map(|vip| vip.spec.address).collect();
        vips.insert([203, 0, 113, 4].into());
        remove_ambiguous(&mut assigned, &vips);
        let left: Vec<_> = assigned.iter().map(|vip| vip.spec.private.clone()).collect();
        let of_g2 = |last| vec![PrivateAddressSpec { gateway: "g2".into(), address: [10, 0, 0, last].into() }];
        assert_eq!(left, [of_g2(1), of_g2(2), vec![]]);
    }
}
