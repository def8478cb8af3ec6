//! Random policies with several gateways: each endpoint has one gateway or a diagnostic, and an added or removed
//! gateway moves only its own keys.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use vipgate_coverage::{Coverage, property};
use vipgate_dataplane::policy::spec::Announce;

use super::*;
use crate::compiler::tests::determinism::random_documents;

pub(super) const GATEWAYS: [&str; 4] = ["gw-a", "gw-b", "gw-c", "gw-d"];
const ZONES: [&str; 3] = ["", ", zone: z1", ", zone: z2"];

/// Random overlapping policies, with gateways that have zones, nodes and limits.
pub(super) fn documents_with_gateways() -> impl Strategy<Value = Vec<String>> {
    let limited = (0..ZONES.len(), prop::sample::select(vec!["", ", maxAddresses: 1", ", maxAddresses: 2"]));
    let gateways = prop::collection::vec(prop::option::weighted(0.7, limited), GATEWAYS.len());
    let gateways = prop_oneof![1 => Just(vec![None; GATEWAYS.len()]), 12 => gateways];
    let policy = (
        prop::sample::select(vec!["", "zoneAffinity: Prefer, ", "zoneAffinity: Require, "]),
        prop::sample::select(vec!["", "distribution: RoundRobin, "]),
        prop::sample::select(vec!["", "", "gateways: {names: [gw-a, gw-b]}, ", "gateways: {names: [gw-d]}, "]),
    );
    let announce = prop::sample::select(vec!["L2", "BGP"]);
    (random_documents(), gateways, prop::collection::vec((policy, 0..ZONES.len()), 12), announce).prop_map(
        |(mut documents, gateways, more, announce)| {
            for (document, ((zone, distribution, names), at)) in documents.iter_mut().zip(more) {
                if document.contains("kind: EgressPolicy") {
                    *document = document.replacen("spec: {", &format!("spec: {{{zone}{distribution}{names}"), 1);
                }
                *document = document.replace("\"], targetRef", &format!("\"]{}, targetRef", ZONES[at]));
                let node = ["", "nodeName: node-1, ", "nodeName: node-2, "][at];
                *document = document.replace("containers: []", &format!("{node}containers: []"));
                *document = document.replace("spec: {ranges", &format!("spec: {{announce: {announce}, ranges"));
            }
            for (name, (zone, limit)) in GATEWAYS.iter().zip(gateways).filter_map(|(name, it)| Some((name, it?))) {
                documents.push(gateway_with(name, &format!("node: node-1{}{limit}", ZONES[zone])));
            }
            documents
        },
    )
}

#[test]
fn each_endpoint_has_a_gateway_that_owns_its_vips_or_a_diagnostic() {
    let classes = [
        "standalone",
        "listed shard",
        "slot of the VIP's map",
        "slot of another map",
        "endpoint without a gateway",
        "VIP with backups",
        "gateway at its limit",
    ];
    let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    property(config, &documents_with_gateways(), &classes, |documents, coverage| {
        let Outcome { placement, diagnostics, .. } = compiled(&documents);
        if placement.peers.is_empty() {
            prop_assert!(placement.vips.iter().all(|vip| vip.shards.is_empty() && vip.shard_map.is_none()));
            prop_assert!(placement.endpoints.iter().all(|it| it.gateway.is_none() && it.slot.is_none()));
            coverage.count("standalone");
            return Ok(());
        }
        for endpoint in &placement.endpoints {
            check_endpoint(&placement, endpoint, coverage)?;
            let is_reported = placement.gateway_of(endpoint).is_some() || !diagnostics.is_empty();
            prop_assert!(is_reported, "{} has no VIP and no diagnostic", endpoint.address);
        }
        for vip in &placement.vips {
            check_vip(&placement, vip, coverage)?;
        }
        for Peer { name, .. } in &placement.peers {
            let spec = documents.iter().find(|it| it.contains("kind: VipGateway") && it.contains(&**name)).unwrap();
            let limit = [1, 2].into_iter().find(|max| spec.contains(&format!("maxAddresses: {max}")));
            let owns = |vip: &&VipSpec| block_orders(&placement, vip).iter().any(|order| order[0] == *name);
            let owned = placement.vips.iter().filter(owns).count();
            prop_assert!(owned <= limit.unwrap_or(usize::MAX));
            coverage.add("gateway at its limit", u64::from(Some(owned) == limit));
        }
        Ok(())
    });
}

fn check_endpoint(placement: &Placement, endpoint: &EndpointSpec, coverage: &Coverage) -> TestCaseResult {
    let home = placement.gateway_of(endpoint);
    prop_assert_eq!(home.is_none(), endpoint.vips.is_empty());
    let own = endpoint.vips.iter().map(|own| placement.vips.iter().find(|vip| vip.address == *own).unwrap());
    let owns = |vip: &VipSpec| block_orders(placement, vip).iter().any(|order| Some(&order[0]) == home);
    prop_assert_eq!(own.clone().any(owns), home.is_some(), "{}", endpoint.address);
    if let Some(slot) = &endpoint.slot {
        prop_assert!(endpoint.gateway.is_none() && usize::from(slot.slot) < SLOTS);
        prop_assert_eq!(slot_order(placement, endpoint).unwrap().first(), home);
        let maps: BTreeSet<_> = own.filter_map(|vip| vip.shard_map.as_ref()).map(|it| &it.map).collect();
        // Without a name, it is unambiguous.
        prop_assert!(slot.map.is_some() || maps.len() == 1, "{:?}", maps);
        coverage.count(if slot.map.is_some() { "slot of another map" } else { "slot of the VIP's map" });
    } else {
        prop_assert_eq!(endpoint.gateway.as_ref(), home);
        coverage.count(if home.is_some() { "listed shard" } else { "endpoint without a gateway" });
    }
    Ok(())
}

fn check_vip(placement: &Placement, vip: &VipSpec, coverage: &Coverage) -> TestCaseResult {
    match vip.announce {
        Announce::L2 => {
            prop_assert!(vip.shards.len() == 1 && vip.shards[0].blocks.is_none() && vip.shard_map.is_none());
        }
        Announce::Bgp => prop_assert!(vip.shards.is_empty() && vip.shard_map.is_some()),
    }
    let orders = block_orders(placement, vip);
    let all: BTreeSet<_> = orders.iter().flatten().collect();
    prop_assert!(all.iter().all(|name| placement.peer(name).is_some()));
    for order in &orders {
        prop_assert_eq!(order.iter().collect::<BTreeSet<_>>().len(), order.len(), "each once");
        prop_assert!((1..=1 + MAX_BACKUPS).contains(&order.len()));
        if vip.announce == Announce::Bgp {
            prop_assert_eq!(order.len(), all.len().min(1 + MAX_BACKUPS));
        }
        coverage.add("VIP with backups", u64::from(order.len() > 1));
    }
    Ok(())
}

/// A tenant: a Service with one VIP, or one of each family, and pods.
#[derive(Clone, Debug)]
struct Tenant {
    bgp: bool,
    dual_stack: bool,
    pods: u8,
}

fn tenants() -> impl Strategy<Value = Vec<Tenant>> {
    let tenant =
        (any::<bool>(), any::<bool>(), 1..12_u8).prop_map(|(bgp, dual_stack, pods)| Tenant { bgp, dual_stack, pods });
    prop::collection::vec(tenant, 1..6)
}

/// Gateways by VIP, port block and endpoint.
#[derive(Debug, Default)]
struct Owners {
    vips: BTreeMap<IpAddr, BTreeSet<Arc<str>>>,
    blocks: BTreeMap<(IpAddr, u16), Arc<str>>,
    endpoints: BTreeMap<IpAddr, Arc<str>>,
}

impl Owners {
    fn of(gateways: &[&str], tenants: &[Tenant]) -> Self {
        let mut documents = vec![pool("routed", "{ranges: [198.51.100.0/24, \"2001:db8:100::/64\"], announce: BGP}")];
        documents.extend(gateways.iter().map(|name| gateway(name, "")));
        for (n, tenant) in tenants.iter().enumerate() {
            let (v4, v6) = if tenant.bgp { ("198.51.100", "2001:db8:100") } else { ("203.0.113", "2001:db8:200") };
            let mut vips = vec![format!("{v4}.{n}")];
            let pods = |prefix: String| (1..=tenant.pods).map(move |pod| format!("{prefix}{pod}")).collect::<Vec<_>>();
            let slice_of =
                |pods: Vec<String>| slice(&format!("s{n}"), &pods.iter().map(String::as_str).collect::<Vec<_>>());
            documents.push(slice_of(pods(format!("10.0.{n}."))));
            if tenant.dual_stack {
                vips.push(format!("{v6}::{n}"));
                documents.push(slice_of(pods(format!("fd00:{n}::"))));
            }
            let vips: Vec<&str> = vips.iter().map(String::as_str).collect();
            documents.push(service(&format!("s{n}"), EGRESS, 80, &vips));
        }
        let (placement, warnings) = compiled(&documents).accept().unwrap();
        assert_eq!(warnings, []);
        let mut owners = Self::default();
        for vip in &placement.vips {
            let homes = block_orders(&placement, vip).into_iter().map(|order| order[0].clone());
            let homes: Vec<Arc<str>> = homes.collect();
            owners.vips.insert(vip.address, homes.iter().cloned().collect());
            owners.blocks.extend((0..).zip(homes).map(|(block, home)| ((vip.address, block), home)));
        }
        let gateway = |it: &EndpointSpec| placement.gateway_of(it).unwrap().clone();
        owners.endpoints = placement.endpoints.iter().map(|it| (it.address, gateway(it))).collect();
        owners
    }

    /// Asserts that everything in `self` has the same owner in `after`.
    fn assert_unchanged(&self, after: &Self) -> Result<(), TestCaseError> {
        for (address, before) in &self.endpoints {
            prop_assert_eq!(after.endpoints.get(address), Some(before), "{} has moved", address);
        }
        for (address, before) in &self.vips {
            prop_assert_eq!(after.vips.get(address), Some(before), "{} has moved", address);
        }
        for (block, before) in &self.blocks {
            prop_assert_eq!(after.blocks.get(block), Some(before), "{:?} has moved", block);
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// Also in the other direction: a removed gateway moves only what it owned.
    #[test]
    fn an_added_gateway_takes_only_what_it_has_the_highest_score_for(
        tenants in tenants(),
        gateways in prop::sample::subsequence(GATEWAYS.to_vec(), 2..=4),
        at in any::<prop::sample::Index>(),
    ) {
        let added = *at.get(&gateways);
        let fewer: Vec<&str> = gateways.iter().copied().filter(|name| *name != added).collect();
        let (before, after) = (Owners::of(&fewer, &tenants), Owners::of(&gateways, &tenants));
        for (address, owner) in &after.endpoints {
            prop_assert!(**owner == *added || *owner == before.endpoints[address], "{} has moved", address);
            prop_assert!(after.vips.values().any(|owners| owners.contains(owner)), "it owns a VIP");
        }
        for (address, owners) in &after.vips {
            let others: BTreeSet<_> = owners.iter().filter(|name| ***name != *added).cloned().collect();
            prop_assert!(others.is_subset(&before.vips[address]), "{} has moved", address);
            prop_assert!(others == before.vips[address] || owners.len() == 1, "{} has lost an owner", address);
        }
        for (block, owner) in &after.blocks {
            prop_assert!(**owner == *added || *owner == before.blocks[block], "{:?} has moved", block);
        }
    }

    #[test]
    fn an_added_pod_or_tenant_moves_nothing(
        tenants in tenants(), count in 1..=GATEWAYS.len(), at in any::<prop::sample::Index>(),
    ) {
        let gateways = &GATEWAYS[..count];
        let before = Owners::of(gateways, &tenants);
        let mut more_pods = tenants.clone();
        at.get_mut(&mut more_pods).pods += 1;
        before.assert_unchanged(&Owners::of(gateways, &more_pods))?;
        let more_tenants = [&tenants[..], &[at.get(&tenants).clone()]].concat();
        before.assert_unchanged(&Owners::of(gateways, &more_tenants))?;
    }
}
