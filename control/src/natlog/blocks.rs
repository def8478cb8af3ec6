//! What a policy says of ports: for each endpoint and each VIP that it may leave with, the ports that this gateway may use for it.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use vipgate_dataplane::ports::BLOCK_PORTS;
use vipgate_dataplane::snapshot::endpoints::Endpoint;
use vipgate_dataplane::snapshot::policy::{Policy, Vip};
use vipgate_dataplane::snapshot::shares::Owner;
use vipgate_dataplane::snapshot::spec::AddressSelection;

/// The ports of a VIP that sessions of an endpoint may have here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Block {
    /// The first and the last of them.
    pub(super) first: u16,
    pub(super) last: u16,
    /// How many they are: fewer than from first to last where other gateways have some of these, or where some are never given out.
    pub(super) ports: u16,
    /// `namespace/policy namespace/pod`, as far as that is known.
    pub(super) tenant: Arc<str>,
}

/// All of them, by endpoint and VIP.
pub(super) type Blocks = BTreeMap<(IpAddr, IpAddr), Block>;

/// What is so under a policy, of ports from `first` to `last`.
pub(super) fn of(policy: &Policy, (first, last): (u16, u16)) -> Blocks {
    let mut blocks = Blocks::new();
    for (address, endpoint) in policy.endpoints() {
        let spec = &policy.egress_of(endpoint).spec;
        let used = match spec.address_selection {
            AddressSelection::PerEndpoint => 1,
            AddressSelection::PerConnection => usize::MAX,
        };
        for vip in policy.vips_of(endpoint).take(used) {
            if let Some((first, last, ports)) = range(policy, endpoint, vip, (first, last)) {
                let tenant = tenant(&spec.name, &endpoint.name);
                blocks.insert((address, vip.address), Block { first, last, ports, tenant });
            }
        }
    }
    blocks
}

/// Who it is, for people.
pub(super) fn tenant(policy: &str, pod: &str) -> Arc<str> {
    let policy = policy.split_once(' ').map_or(policy, |(_, name)| name);
    if pod.is_empty() { policy.into() } else { format!("{policy} {pod}").into() }
}

fn range(policy: &Policy, endpoint: &Endpoint, vip: &Vip, (first, last): (u16, u16)) -> Option<(u16, u16, u16)> {
    let share = policy.share_of(endpoint, vip);
    let blocks = match share {
        None if vip.shares.list().is_empty() => None,
        Some(share) if share.owner == Owner::This => share.blocks(),
        _ => return None,
    };
    let (first, last, count) = match blocks {
        None => (first, last, u32::from(last - first) + 1),
        Some(blocks) => {
            let ranges = blocks.iter().filter_map(|block| {
                let end = block.first_port().saturating_add(BLOCK_PORTS as u16 - 1);
                let (from, to) = (block.first_port().max(first), end.min(last));
                (from <= to).then_some((from, to))
            });
            let ranges: Vec<(u16, u16)> = ranges.collect();
            let ((begin, _), (_, end)) = (*ranges.first()?, *ranges.last()?);
            (begin, end, ranges.iter().map(|(from, to)| u32::from(to - from) + 1).sum())
        }
    };
    let reserved = vip.reserved.iter().filter(|port| (first..=last).contains(*port)).count();
    // 65535 at most: port 0 is nobody's.
    Some((first, last, u16::try_from(count.saturating_sub(reserved as u32)).unwrap_or(u16::MAX)))
}

/// What has changed from one moment to the next: what isn't any more comes before what is.
pub(super) fn changes<'a>(
    before: &'a Blocks,
    after: &'a Blocks,
) -> impl Iterator<Item = (bool, (IpAddr, IpAddr), &'a Block)> {
    let gone = before.iter().filter(|(key, block)| after.get(*key) != Some(*block));
    let new = after.iter().filter(|(key, block)| before.get(*key) != Some(*block));
    gone.map(|(key, block)| (false, *key, block)).chain(new.map(|(key, block)| (true, *key, block)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(tenant: &str) -> Block {
        Block { first: 1024, last: 65_535, ports: 64_512, tenant: tenant.into() }
    }

    #[test]
    fn what_changes_hands_is_given_back_first() {
        let key = |n: u8| (IpAddr::from([10, 1, 0, n]), IpAddr::from([203, 0, 113, 10]));
        let before = Blocks::from([(key(1), block("a")), (key(2), block("a"))]);
        let after = Blocks::from([(key(1), block("a")), (key(2), block("b")), (key(3), block("b"))]);
        let told: Vec<_> = changes(&before, &after).map(|(is_new, key, block)| (is_new, key, &*block.tenant)).collect();
        assert_eq!(told, [(false, key(2), "a"), (true, key(2), "b"), (true, key(3), "b")]);
        assert_eq!(changes(&after, &after).count(), 0);
    }

    #[test]
    fn tenants_are_named_by_policy_and_pod() {
        assert_eq!(&*tenant("EgressPolicy tenant-a/api", "tenant-a/pod-1"), "tenant-a/api tenant-a/pod-1");
        assert_eq!(&*tenant("Service tenant-a/api", ""), "tenant-a/api");
    }
}
