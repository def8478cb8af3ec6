//! Port blocks of a policy: for each endpoint and each of its VIPs, the ports that this gateway may use for it.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use vipgate_dataplane::flow::ids::Owner;
use vipgate_dataplane::policy::compiled::{Policy, Vip};
use vipgate_dataplane::policy::endpoints::Endpoint;
use vipgate_dataplane::policy::spec::AddressSelection;
use vipgate_dataplane::ports::BLOCK_PORTS;

/// The ports of a VIP that sessions of an endpoint may use at this gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PortBlock {
    /// The first and the last port.
    pub(super) first: u16,
    pub(super) last: u16,
    /// Number of ports. Fewer than `first..=last` if other gateways own some of them, or some are reserved.
    pub(super) ports: u16,
    /// `namespace/policy namespace/pod`; without the pod if that is unknown.
    pub(super) tenant: Arc<str>,
}

/// All port blocks, by endpoint and VIP.
pub(super) type PortBlocks = BTreeMap<(IpAddr, IpAddr), PortBlock>;

/// The port blocks of a policy, limited to ports from `first` to `last`.
pub(super) fn for_policy(policy: &Policy, (first, last): (u16, u16)) -> PortBlocks {
    let mut blocks = PortBlocks::new();
    for (address, endpoint) in policy.endpoints() {
        let spec = &policy.egress_of(endpoint).spec;
        let vip_count = match spec.address_selection {
            AddressSelection::PerEndpoint => 1,
            AddressSelection::PerConnection => usize::MAX,
        };
        for vip in policy.vips_of(endpoint).take(vip_count) {
            if let Some((first, last, ports)) = range(policy, endpoint, vip, (first, last)) {
                let tenant = tenant(&spec.name, &endpoint.name);
                blocks.insert((address, vip.address), PortBlock { first, last, ports, tenant });
            }
        }
    }
    blocks
}

/// The tenant of an endpoint as text.
pub(super) fn tenant(policy: &str, pod: &str) -> Arc<str> {
    let policy = policy.split_once(' ').map_or(policy, |(_, name)| name);
    if pod.is_empty() { policy.into() } else { format!("{policy} {pod}").into() }
}

fn range(policy: &Policy, endpoint: &Endpoint, vip: &Vip, (first, last): (u16, u16)) -> Option<(u16, u16, u16)> {
    if policy.owner_of(endpoint) != Owner::This {
        return None;
    }
    let blocks = (!vip.shards.is_standalone()).then(|| vip.shards.own_blocks());
    let (first, last, count) = match blocks {
        None => (first, last, u32::from(last - first) + 1),
        Some(blocks) => {
            let ranges = blocks.iter().filter_map(|block| {
                let end = block.first_port().saturating_add(BLOCK_PORTS as u16 - 1);
                let (from, to) = (block.first_port().max(first), end.min(last));
                (from <= to).then_some((from, to))
            });
            let ranges: Vec<(u16, u16)> = ranges.collect();
            let ((start, _), (_, end)) = (*ranges.first()?, *ranges.last()?);
            (start, end, ranges.iter().map(|(from, to)| u32::from(to - from) + 1).sum())
        }
    };
    let reserved = vip.ports.reserved.iter().filter(|port| (first..=last).contains(*port)).count();
    // At most 65535: port 0 is never used.
    Some((first, last, u16::try_from(count.saturating_sub(reserved as u32)).unwrap_or(u16::MAX)))
}

/// The difference between two states, removed blocks (`false`) before added ones (`true`).
pub(super) fn changes<'a>(
    before: &'a PortBlocks,
    after: &'a PortBlocks,
) -> impl Iterator<Item = (bool, (IpAddr, IpAddr), &'a PortBlock)> {
    let removed = before.iter().filter(|(key, block)| after.get(*key) != Some(*block));
    let added = after.iter().filter(|(key, block)| before.get(*key) != Some(*block));
    removed.map(|(key, block)| (false, *key, block)).chain(added.map(|(key, block)| (true, *key, block)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(tenant: &str) -> PortBlock {
        PortBlock { first: 1024, last: 65_535, ports: 64_512, tenant: tenant.into() }
    }

    #[test]
    fn removed_blocks_come_before_added_ones() {
        let key = |n: u8| (IpAddr::from([10, 1, 0, n]), IpAddr::from([203, 0, 113, 10]));
        let before = PortBlocks::from([(key(1), block("a")), (key(2), block("a"))]);
        let after = PortBlocks::from([(key(1), block("a")), (key(2), block("b")), (key(3), block("b"))]);
        let result: Vec<_> =
            changes(&before, &after).map(|(is_added, key, block)| (is_added, key, &*block.tenant)).collect();
        assert_eq!(result, [(false, key(2), "a"), (true, key(2), "b"), (true, key(3), "b")]);
        assert_eq!(changes(&after, &after).count(), 0);
    }

    #[test]
    fn tenants_are_named_by_policy_and_pod() {
        assert_eq!(&*tenant("EgressPolicy tenant-a/api", "tenant-a/pod-1"), "tenant-a/api tenant-a/pod-1");
        assert_eq!(&*tenant("Service tenant-a/api", ""), "tenant-a/api");
    }
}
