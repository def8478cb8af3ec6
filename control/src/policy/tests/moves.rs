//! Random worlds with several gateways: everybody is served once or told why not, and what comes moves only what it wins.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use vipgate_dataplane::snapshot::spec::Announce;

use super::stable::world;
use super::*;

const GATEWAYS: [&str; 4] = ["gw-a", "gw-b", "gw-c", "gw-d"];
const ZONES: [&str; 3] = ["", ", zone: z1", ", zone: z2"];

/// The small world of overlapping policies, dealt to gateways with zones, nodes and limits.
fn dealt_world() -> impl Strategy<Value = Vec<String>> {
    let limited = (0..ZONES.len(), prop::sample::select(vec!["", ", maxAddresses: 1", ", maxAddresses: 2"]));
    let gateways = prop::collection::vec(prop::option::weighted(0.7, limited), GATEWAYS.len());
    let policy = (
        prop::sample::select(vec!["", "zoneAffinity: Prefer, ", "zoneAffinity: Require, "]),
        prop::sample::select(vec!["", "distribution: RoundRobin, "]),
        prop::sample::select(vec!["", "", "gateways: {names: [gw-a, gw-b]}, ", "gateways: {names: [gw-d]}, "]),
    );
    let announce = prop::sample::select(vec!["L2", "BGP"]);
    (world(), gateways, prop::collection::vec((policy, 0..ZONES.len()), 12), announce).prop_map(
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
                let spec = format!("spec: {{node: node-1{}{limit}}}", ZONES[zone]);
                documents.push(gateway(name, "").replace("spec: {}", &spec));
            }
            documents
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn each_endpoint_is_served_once_by_who_holds_its_vips_or_said_to_be_closed(documents in dealt_world()) {
        let Viewed { deal, complaints, .. } = compiled(&documents);
        let parts: Vec<_> = deal.peers.iter().map(|peer| (&peer.name, deal.part_of(Some(&Viewer::named(&peer.name)), ""))).collect();
        if parts.is_empty() {
            return Ok(());
        }
        for (at, endpoint) in deal.endpoints.iter().enumerate() {
            let mut serving = Vec::new();
            for (name, part) in &parts {
                let seen = &part.endpoints[at];
                prop_assert_eq!((seen.address, &seen.policy), (endpoint.spec.address, &endpoint.spec.policy));
                prop_assert!(seen.vips.iter().all(|vip| part.vips.iter().any(|own| own.address == *vip)));
                serving.extend((!seen.vips.is_empty()).then_some(*name));
            }
            prop_assert!(serving.len() <= 1, "{} is served by {:?}", endpoint.spec.address, serving);
            prop_assert_eq!(serving.first().copied(), endpoint.gateway.as_ref());
            prop_assert!(serving.len() == 1 || !complaints.is_empty(), "{} is closed silently", endpoint.spec.address);
        }
        for vip in &deal.vips {
            let names: BTreeSet<_> = vip.shares.iter().map(|share| &share.gateway).collect();
            prop_assert!(!names.is_empty() && names.len() == vip.shares.len());
            let has_blocks = vip.shares.iter().all(|share| share.blocks.is_some() == (names.len() > 1));
            prop_assert!(has_blocks && (names.len() == 1 || vip.spec.announce != Announce::L2));
        }
        for (name, part) in &parts {
            let spec = documents.iter().find(|it| it.contains("kind: Gateway") && it.contains(&***name)).unwrap();
            let limit = [1, 2].into_iter().find(|most| spec.contains(&format!("maxAddresses: {most}")));
            prop_assert!(part.vips.len() <= limit.unwrap_or(usize::MAX));
        }
    }
}

/// A tenant: a Service with one VIP, or one of each family, and pods.
#[derive(Clone, Debug)]
struct Tenant {
    routed: bool,
    both: bool,
    pods: u8,
}

fn tenants() -> impl Strategy<Value = Vec<Tenant>> {
    let tenant =
        (any::<bool>(), any::<bool>(), 1..12_u8).prop_map(|(routed, both, pods)| Tenant { routed, both, pods });
    prop::collection::vec(tenant, 1..6)
}

/// Who holds what, owns which block and translates whom.
#[derive(Debug, Default)]
struct Places {
    vips: BTreeMap<IpAddr, BTreeSet<Arc<str>>>,
    blocks: BTreeMap<(IpAddr, usize), Arc<str>>,
    endpoints: BTreeMap<IpAddr, Arc<str>>,
}

impl Places {
    fn of(gateways: &[&str], tenants: &[Tenant]) -> Self {
        let mut documents = vec![pool("routed", "{ranges: [198.51.100.0/24, \"2001:db8:100::/64\"], announce: BGP}")];
        documents.extend(gateways.iter().map(|name| gateway(name, "")));
        for (n, tenant) in tenants.iter().enumerate() {
            let (v4, v6) = if tenant.routed { ("198.51.100", "2001:db8:100") } else { ("203.0.113", "2001:db8:200") };
            let mut vips = vec![format!("{v4}.{n}")];
            let pods = |prefix: String| (1..=tenant.pods).map(move |pod| format!("{prefix}{pod}")).collect::<Vec<_>>();
            let slice_of =
                |pods: Vec<String>| slice(&format!("s{n}"), &pods.iter().map(String::as_str).collect::<Vec<_>>());
            documents.push(slice_of(pods(format!("10.0.{n}."))));
            if tenant.both {
                vips.push(format!("{v6}::{n}"));
                documents.push(slice_of(pods(format!("fd00:{n}::"))));
            }
            let vips: Vec<&str> = vips.iter().map(String::as_str).collect();
            documents.push(service(&format!("s{n}"), EGRESS, 80, &vips));
        }
        let (deal, complaints) = compiled(&documents).accept().unwrap();
        assert_eq!(complaints, []);
        let mut places = Self::default();
        for vip in &deal.vips {
            let address = vip.spec.address;
            for Share { gateway, blocks } in &vip.shares {
                places.vips.entry(address).or_default().insert(gateway.clone());
                let own = (0..Blocks::COUNT).filter(|block| blocks.as_ref().is_none_or(|own| own.contains(*block)));
                places.blocks.extend(own.map(|block| ((address, block), gateway.clone())));
            }
        }
        let gateway = |it: &DealtEndpoint| it.gateway.clone().unwrap();
        places.endpoints = deal.endpoints.iter().map(|it| (it.spec.address, gateway(it))).collect();
        places
    }

    /// What is here and there stays where it is.
    fn stay_in(&self, after: &Self) -> Result<(), TestCaseError> {
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

    /// The same the other way: what goes moves only what was its own.
    #[test]
    fn a_gateway_that_comes_takes_what_it_wins_and_moves_nothing_else(
        tenants in tenants(), gateways in prop::sample::subsequence(GATEWAYS.to_vec(), 2..=4), at in any::<prop::sample::Index>(),
    ) {
        let newcomer = *at.get(&gateways);
        let fewer: Vec<&str> = gateways.iter().copied().filter(|name| *name != newcomer).collect();
        let (before, after) = (Places::of(&fewer, &tenants), Places::of(&gateways, &tenants));
        for (address, now) in &after.endpoints {
            prop_assert!(**now == *newcomer || *now == before.endpoints[address], "{} has moved", address);
            // Whoever translates with a VIP holds it.
            prop_assert!(after.vips.values().any(|holders| holders.contains(now)));
        }
        for (address, now) in &after.vips {
            let others: BTreeSet<_> = now.iter().filter(|name| ***name != *newcomer).cloned().collect();
            prop_assert!(others.is_subset(&before.vips[address]), "{} has moved", address);
            prop_assert!(others == before.vips[address] || now.len() == 1, "{} has lost a holder", address);
        }
        for (block, now) in &after.blocks {
            prop_assert!(**now == *newcomer || *now == before.blocks[block], "{:?} has moved", block);
        }
    }

    #[test]
    fn a_pod_or_a_tenant_that_comes_moves_nobody(
        tenants in tenants(), count in 1..=GATEWAYS.len(), at in any::<prop::sample::Index>(),
    ) {
        let gateways = &GATEWAYS[..count];
        let before = Places::of(gateways, &tenants);
        let mut more_pods = tenants.clone();
        at.get_mut(&mut more_pods).pods += 1;
        before.stay_in(&Places::of(gateways, &more_pods))?;
        let more_tenants = [&tenants[..], &[at.get(&tenants).clone()]].concat();
        before.stay_in(&Places::of(gateways, &more_tenants))?;
    }
}
