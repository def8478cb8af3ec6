//! Stability of the placement in random worlds: what a change doesn't name stays where it is.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use vipgate_coverage::{Coverage, property};

use super::worlds::{Kind, World, endpoint_order, pod_of, tenant, vip_homes, worlds};
use super::*;

fn config() -> ProptestConfig {
    ProptestConfig { cases: 192, failure_persistence: None, ..ProptestConfig::default() }
}

/// The order without an added gateway begins with the home of before: that one stays the owner until the added gateway
/// is active. The same holds in reverse, when a gateway is removed: its first backup is the new home.
fn check_order(added: &str, before: &[Arc<str>], after: &[Arc<str>]) -> TestCaseResult {
    let first = after.iter().find(|name| ***name != *added);
    prop_assert_eq!(first, before.first(), "{:?} {:?}", before, after);
    Ok(())
}

/// Elements of both lists with the same key.
fn both<'a, T: 'a, K: Ord>(
    before: impl IntoIterator<Item = &'a T>,
    after: impl IntoIterator<Item = &'a T>,
    key: impl Fn(&T) -> K,
) -> Vec<(&'a T, &'a T)> {
    let before: BTreeMap<K, &T> = before.into_iter().map(|it| (key(it), it)).collect();
    after.into_iter().filter_map(|it| Some((*before.get(&key(it))?, it))).collect()
}

/// Except L2 VIPs of several in a group, which are spread anew, and those that may have backups in one zone only.
#[test]
fn an_added_or_removed_gateway_moves_nothing_before_it_is_active() {
    let classes = [
        "a slot of a VIP moves to it",
        "a slot of a VIP stays",
        "an L2 VIP moves to it",
        "an L2 VIP stays",
        "an endpoint moves by its slot",
        "an endpoint moves by its L2 VIP",
        "an endpoint stays",
        "a map of a place",
    ];
    property(config(), &(worlds(), any::<prop::sample::Index>()), &classes, |(mut world, at), coverage| {
        let at = at.index(world.sites.len());
        world.sites.iter_mut().enumerate().filter(|(n, _)| *n != at).for_each(|(_, site)| site.max_addresses = None);
        let after = world.placement();
        let added = world.sites.remove(at).name;
        let before = world.placement();
        let is_checked = |tenant: &worlds::Tenant| tenant.bgp || (tenant.vips == 1 && tenant.affinity != "Require");
        for (old, new) in both(&before.vips, &after.vips, |vip| vip.address) {
            let tenant = world.tenant_of(new);
            if !is_checked(tenant) {
                continue;
            }
            let what = if tenant.bgp { "a slot of a VIP" } else { "an L2 VIP" };
            for (old, new) in block_orders(&before, old).iter().zip(&block_orders(&after, new)) {
                check_order(added, old, new)?;
                coverage.count(format!("{what} {}", if *new[0] == *added { "moves to it" } else { "stays" }));
            }
        }
        for (old, new) in both(&*before.shard_maps, &*after.shard_maps, |map| map.name.clone()) {
            coverage.add("a map of a place", u64::from(new.name.contains(" zone ")));
            for slot in 0..SLOTS as u16 {
                check_order(added, old.order(slot), new.order(slot))?;
            }
        }
        for (old, new) in both(&before.endpoints, &after.endpoints, |endpoint| endpoint.address) {
            let tenant = world.tenants.iter().find(|it| it.id == pod_of(new.address).0).unwrap();
            if old.vips.is_empty() || !is_checked(tenant) {
                continue;
            }
            let (old, by_slot, new) = (endpoint_order(&before, old), new.slot.is_some(), endpoint_order(&after, new));
            check_order(added, &old, &new)?;
            coverage.count(match (*new[0] == *added, by_slot) {
                (true, true) => "an endpoint moves by its slot",
                (true, false) => "an endpoint moves by its L2 VIP",
                (false, _) => "an endpoint stays",
            });
        }
        Ok(())
    });
}

/// A change that adds something.
#[derive(Clone, Debug)]
enum Change {
    /// A VIP of each family of a tenant, and of a pool if that has one.
    Vip,
    /// A Service that shares a VIP of an older tenant.
    SharingService,
    Tenant(worlds::Tenant),
    Pod,
    Pool,
}

impl Change {
    fn any() -> impl Strategy<Value = Self> {
        let others = prop::sample::select(vec![Self::Vip, Self::Vip, Self::SharingService, Self::Pod, Self::Pool]);
        prop_oneof![3 => others, 1 => tenant(9).prop_map(Self::Tenant)]
    }

    /// Applies it to the tenant at this index.
    fn apply(&self, world: &mut World, at: usize) {
        match self {
            Self::Vip => world.tenants[at].vips += 1,
            Self::Tenant(tenant) => world.tenants.push(tenant.clone()),
            Self::Pod => world.tenants[at].pods += 1,
            Self::Pool => world.others.push(pool("another", "{ranges: [198.51.101.0/24], announce: BGP}")),
            Self::SharingService => {
                let vips = world.tenants[at].addresses();
                // A Service shares no VIP of a pool's policy or of the cluster's.
                let is_alone = matches!(world.tenants[at].kind, Kind::Pool | Kind::OfCluster);
                let vip = if is_alone { "198.51.101.1".into() } else { vips[0].to_string() };
                let created = ", creationTimestamp: \"2021-01-01T00:00:00Z\"";
                world.others.push(service("t9", created, 443, &[&vip]));
            }
        }
    }
}

/// An added VIP may have its turn before others, which then may lack capacity. So there are limits only if it is the
/// last VIP of the youngest tenant; in a list of addresses, those of the other family follow.
fn without_limits_unless_last(world: &mut World, at: usize) {
    let tenant = &world.tenants[at];
    if at + 1 < world.tenants.len() || (tenant.is_dual_stack && tenant.kind != Kind::Pool) {
        world.sites.iter_mut().for_each(|site| site.max_addresses = None);
    }
}

/// Asserts that no VIP and no endpoint has moved, except endpoints of the tenant `at` to an added VIP's gateway.
fn check_added(
    (world, at): (&World, usize),
    before: &Placement,
    after: &Placement,
    coverage: &Coverage,
) -> TestCaseResult {
    let (old, new) = (vip_homes(before), vip_homes(after));
    let addresses: BTreeSet<IpAddr> = old.keys().map(|(_, address)| *address).collect();
    let mut added: BTreeSet<Arc<str>> = BTreeSet::new();
    for (name, address) in new.keys().filter(|(_, address)| !addresses.contains(address)) {
        added.extend(new[&(name.clone(), *address)].iter().cloned());
    }
    let new: BTreeMap<IpAddr, _> = new.into_iter().map(|((_, address), homes)| (address, homes)).collect();
    for ((name, address), homes) in &old {
        if let Some(after) = new.get(address) {
            prop_assert_eq!(homes, after, "{} {}", name, address);
            coverage.count("a VIP stays");
        }
    }
    for (old, new) in both(&before.endpoints, &after.endpoints, |endpoint| endpoint.address) {
        let homes = (before.gateway_of(old), after.gateway_of(new));
        if homes.0 == homes.1 {
            coverage.count(if new.slot.is_some() { "an endpoint with a slot stays" } else { "an endpoint stays" });
            continue;
        }
        let tenant = &world.tenants[at];
        prop_assert!(pod_of(new.address).0 == tenant.id && !tenant.bgp, "{} has moved: {:?}", new.address, homes);
        prop_assert!(homes.1.is_some_and(|home| added.contains(home)), "{} {:?}", new.address, homes);
        coverage.count("an endpoint moves to the added VIP");
    }
    Ok(())
}

/// Backends of one Service: VIPs of others stay, if gateways have room; its own go to a gateway with a backend.
#[test]
fn a_backend_moves_only_vips_of_its_service_and_these_to_backends() {
    let classes = [
        "a VIP moves to the added backend",
        "a VIP of its Service stays",
        "a VIP of another one stays",
        "at a backend",
        "no gateway at a backend",
    ];
    let inputs = (worlds(), any::<prop::sample::Index>(), prop::collection::vec(any::<bool>(), 6));
    property(config(), &inputs, &classes, |(mut world, at, are_local), coverage| {
        let at = at.index(world.tenants.len());
        world.sites.iter_mut().for_each(|site| site.max_addresses = None);
        world.tenants.iter_mut().zip(&are_local).for_each(|(tenant, is_local)| tenant.is_local = *is_local);
        let before = world.placement();
        let (id, added) = (world.tenants[at].id, world.tenants[at].pods);
        world.tenants[at].pods += 1;
        let after = world.placement();
        for (old, new) in both(&before.vips, &after.vips, |vip| vip.address) {
            let tenant = world.tenant_of(new);
            let (old, new) = (block_orders(&before, old), block_orders(&after, new));
            let home = world.site(&new[0][0]);
            if old.iter().map(|order| &order[0]).ne(new.iter().map(|order| &order[0])) {
                prop_assert!(tenant.id == id && tenant.follows_backends(), "{:?} {:?}", tenant, new);
                // Several of a group are spread anew.
                prop_assert!(tenant.vips > 1 || home.is_on_node_of(added), "{:?} {:?}", tenant, home);
                coverage.count("a VIP moves to the added backend");
            } else {
                let whose = if tenant.id == id { "its Service" } else { "another one" };
                coverage.count(format!("a VIP of {whose} stays"));
            }
            if tenant.follows_backends() {
                let is_at_backend = |site: &worlds::Site| (0..tenant.pods).any(|number| site.is_on_node_of(number));
                let mut eligible = world.sites.iter().filter(|site| tenant.may_use(site));
                let has_any = eligible.any(is_at_backend);
                prop_assert_eq!(is_at_backend(home), has_any, "{:?} {:?}", tenant, home);
                coverage.count(if has_any { "at a backend" } else { "no gateway at a backend" });
            }
        }
        Ok(())
    });
}

#[test]
fn what_is_added_moves_nothing_else() {
    let classes = [
        "Vip",
        "SharingService",
        "Tenant",
        "Pod",
        "Pool",
        "with limits",
        "with local backends",
        "a VIP stays",
        "an endpoint with a slot stays",
        "an endpoint stays",
        "an endpoint moves to the added VIP",
    ];
    let inputs = (worlds(), any::<prop::sample::Index>(), Change::any(), any::<bool>());
    property(config(), &inputs, &classes, |(mut world, at, change, is_local), coverage| {
        let at = at.index(world.tenants.len());
        // A pod that is added is a backend, which may move VIPs: that is the test above.
        let is_local = is_local && !matches!(change, Change::Pod);
        world.tenants.iter_mut().for_each(|tenant| tenant.is_local = is_local);
        coverage.add("with local backends", u64::from(is_local));
        if matches!(change, Change::Vip) {
            without_limits_unless_last(&mut world, at);
        }
        let before = world.placement();
        let mut changed = world.clone();
        change.apply(&mut changed, at);
        let name = format!("{change:?}");
        coverage.count(name.split('(').next().unwrap_or_default());
        coverage.add("with limits", u64::from(world.sites.iter().any(|site| site.max_addresses.is_some())));
        check_added((&world, at), &before, &changed.placement(), coverage)
    });
}

/// Also in reverse, for a count that shrinks: only endpoints at the gateway of the VIP that is gone move.
#[test]
fn a_policy_that_takes_one_more_or_one_less_vip_of_a_pool_moves_nothing_else() {
    let classes = ["with limits", "a VIP stays", "an endpoint with a slot stays", "an endpoint moves to the added VIP"];
    property(config(), &(worlds(), any::<prop::sample::Index>()), &classes, |(mut world, at), coverage| {
        let at = at.index(world.tenants.len());
        world.tenants[at].kind = Kind::Pool;
        without_limits_unless_last(&mut world, at);
        let fewer = world.placement();
        let mut more = world.clone();
        more.tenants[at].vips += 1;
        coverage.add("with limits", u64::from(world.sites.iter().any(|site| site.max_addresses.is_some())));
        check_added((&world, at), &fewer, &more.placement(), coverage)
    });
}
