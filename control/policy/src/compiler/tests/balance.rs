//! Limits, zones and even distribution of the placement.

use std::collections::BTreeMap;

use proptest::prelude::*;
use vipgate_coverage::property;

use super::worlds::{Kind, endpoint_order, pod_of, vip_homes, worlds};
use super::*;

fn config() -> ProptestConfig {
    ProptestConfig { cases: 192, failure_persistence: None, ..ProptestConfig::default() }
}

#[test]
fn limits_hold_and_no_vip_lacks_an_owner_while_a_candidate_has_capacity() {
    let classes = ["at its limit", "below its limit", "VIP without an owner", "VIP without a part at a full gateway"];
    property(config(), &worlds(), &classes, |world, coverage| {
        let placement = world.placement();
        let homes: BTreeMap<IpAddr, Vec<Arc<str>>> =
            vip_homes(&placement).into_iter().map(|((_, vip), homes)| (vip, homes)).collect();
        let has = |vip: &IpAddr, name: &str| homes.get(vip).is_some_and(|homes| homes.iter().any(|it| **it == *name));
        let owned = |name: &str| homes.keys().filter(|vip| has(vip, name)).count();
        for site in &world.sites {
            let max = site.max_addresses.unwrap_or(usize::MAX);
            prop_assert!(owned(site.name) <= max);
            coverage.count(if owned(site.name) == max { "at its limit" } else { "below its limit" });
        }
        for tenant in world.tenants.iter().filter(|tenant| tenant.kind != Kind::Pool) {
            for vip in tenant.addresses() {
                let is_owned = homes.contains_key(&vip);
                for site in world.sites.iter().filter(|site| tenant.may_use(site)) {
                    if has(&vip, site.name) || (is_owned && !tenant.bgp) {
                        continue;
                    }
                    prop_assert_eq!(Some(owned(site.name)), site.max_addresses, "{} at {}", vip, site.name);
                    let part = "VIP without a part at a full gateway";
                    coverage.count(if is_owned { part } else { "VIP without an owner" });
                }
            }
        }
        Ok(())
    });
}

#[test]
fn all_gateways_of_an_endpoint_are_in_its_zone_if_required_and_the_nearest_first_if_preferred() {
    let classes = [
        "required by slot",
        "required by L2 VIP",
        "preferred by slot",
        "preferred by L2 VIP",
        "on the node",
        "in the zone",
        "elsewhere",
        "several gateways, by L2 VIP",
        "dropped",
    ];
    property(config(), &worlds(), &classes, |world, coverage| {
        let placement = world.placement();
        for endpoint in &placement.endpoints {
            let tenant = world.tenants.iter().find(|it| it.id == pod_of(endpoint.address).0).unwrap();
            let distance = |name: &Arc<str>| world.site(name).distance(endpoint.address);
            let is_same_family = |vip: &&VipSpec| vip.address.is_ipv4() == endpoint.address.is_ipv4();
            let own = placement.vips.iter().filter(|vip| world.tenant_of(vip).id == tenant.id).filter(is_same_family);
            let nearest = own.flat_map(|vip| block_orders(&placement, vip)).map(|order| distance(&order[0])).min();
            let order = endpoint_order(&placement, endpoint);
            let Some(home) = order.first() else {
                prop_assert!(nearest.is_none_or(|nearest| nearest == 2 && tenant.affinity == "Require"));
                coverage.add("dropped", u64::from(nearest.is_some()));
                continue;
            };
            let by = if endpoint.slot.is_some() { "by slot" } else { "by L2 VIP" };
            match tenant.affinity {
                "Require" => {
                    prop_assert!(order.iter().all(|name| distance(name) < 2), "{}: {:?}", endpoint.address, order);
                    coverage.count(format!("required {by}"));
                    let is_several = order.len() > 1 && endpoint.slot.is_none();
                    coverage.add("several gateways, by L2 VIP", u64::from(is_several));
                }
                "Prefer" => {
                    let is_sorted = endpoint.slot.is_none() || order.is_sorted_by_key(distance);
                    prop_assert!(is_sorted, "{}: {:?}", endpoint.address, order);
                    coverage.count(format!("preferred {by}"));
                }
                _ => continue,
            }
            prop_assert_eq!(Some(distance(home)), nearest, "{}: {:?}", endpoint.address, order);
            coverage.count(["on the node", "in the zone", "elsewhere"][usize::from(distance(home))]);
        }
        Ok(())
    });
}

/// A VIP announced by BGP with this many endpoints, at these gateways.
fn one_vip(names: &[String], endpoints: usize) -> Placement {
    let addresses: Vec<String> = (0..endpoints).map(|n| format!("10.0.{}.{}", n / 250, n % 250 + 1)).collect();
    let mut documents: Vec<String> = names.iter().map(|name| gateway(name, "")).collect();
    documents.extend([
        pool("bgp", "{ranges: [198.51.100.0/24], announce: BGP}"),
        service("s", EGRESS, 80, &["198.51.100.1"]),
        slice("s", &addresses.iter().map(String::as_str).collect::<Vec<_>>()),
    ]);
    compiled(&documents).placement
}

/// How many orders with this home have each gateway as the first backup.
fn first_backups<'a>(orders: impl Iterator<Item = &'a [Arc<str>]>, home: &str) -> BTreeMap<&'a str, usize> {
    let mut counts = BTreeMap::new();
    orders.filter(|order| *order[0] == *home).for_each(|order| *counts.entry(&*order[1]).or_default() += 1);
    counts
}

#[test]
fn endpoints_and_ports_of_a_failed_gateway_are_spread_over_all_others() {
    for count in 4..=8 {
        for set in ["gw", "edge", "n"] {
            let names: Vec<String> = (0..count).map(|n| format!("{set}-{n}")).collect();
            let placement = one_vip(&names, 2_000);
            let ports = block_orders(&placement, &placement.vips[0]);
            for failed in &names {
                let of_endpoints = placement.endpoints.iter().filter_map(|it| slot_order(&placement, it));
                let of_ports = ports.iter().map(Vec::as_slice);
                for spread in [first_backups(of_endpoints, failed), first_backups(of_ports, failed)] {
                    assert_eq!(spread.len(), count - 1, "{failed} of {names:?}: {spread:?}");
                    let fair = spread.values().sum::<usize>() / (count - 1);
                    // With 8 gateways, 37 of the endpoints and 18 of the slots.
                    let bounds = fair * 2 / 5..=fair * 2;
                    assert!(spread.values().all(|it| bounds.contains(it)), "{failed} of {names:?}: {spread:?}");
                }
            }
        }
    }
}

#[test]
fn many_gateways_have_similar_numbers_of_endpoints_and_ports() {
    let gateway = |n: usize| {
        format!(
            "apiVersion: vipgate.io/v1alpha1\nkind: VipGateway\nmetadata: {{name: gw-{n}}}\n\
             spec: {{peerAddress: 192.0.2.{n}}}\n"
        )
    };
    let mut documents: Vec<String> = (0..64).map(gateway).collect();
    documents.push(pool("bgp", "{ranges: [198.51.100.0/24], announce: BGP}"));
    for tenant in 0..100 {
        let vips: Vec<String> = (0..2).map(|vip| format!("198.51.100.{}", tenant * 2 + vip)).collect();
        let pods: Vec<String> = (1..=20).map(|pod| format!("10.0.{tenant}.{pod}")).collect();
        let service_name = format!("s{tenant}");
        documents.push(service(&service_name, EGRESS, 80, &vips.iter().map(String::as_str).collect::<Vec<_>>()));
        documents.push(slice(&service_name, &pods.iter().map(String::as_str).collect::<Vec<_>>()));
    }
    let (placement, warnings) = compiled(&documents).accept().unwrap();
    assert_eq!((warnings, placement.vips.len(), placement.endpoints.len()), (vec![], 200, 2_000));
    let mut endpoints: BTreeMap<Arc<str>, usize> = BTreeMap::new();
    let mut ports = endpoints.clone();
    for endpoint in &placement.endpoints {
        *endpoints.entry(placement.gateway_of(endpoint).unwrap().clone()).or_default() += 1;
    }
    for homes in vip_homes(&placement).into_values() {
        for home in homes {
            *ports.entry(home).or_default() += 1;
        }
    }
    for counts in [endpoints, ports] {
        let (sum, max) = (counts.values().sum::<usize>(), counts.values().max().copied().unwrap_or_default());
        assert!(counts.len() == 64 && max * 64 < 2 * sum, "{max} of {sum}: {counts:?}");
    }
    // All Services share four maps.
    assert_eq!(placement.shard_maps.len(), 4);
}
