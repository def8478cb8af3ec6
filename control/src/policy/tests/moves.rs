//! Random worlds with several gateways: everybody is served once or told why not, and what comes moves only what it wins.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use vipgate_dataplane::snapshot::spec::Announce;

use super::stable::world;
use super::*;

pub(super) const GATEWAYS: [&str; 4] = ["gw-a", "gw-b", "gw-c", "gw-d"];
const ZONES: [&str; 3] = ["", ", zone: z1", ", zone: z2"];

/// The small world of overlapping policies, dealt to gateways with zones, nodes and limits.
pub(super) fn dealt_world() -> impl Strategy<Value = Vec<String>> {
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
                documents.push(gateway_with(name, &format!("node: node-1{}{limit}", ZONES[zone])));
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
        if deal.peers.is_empty() {
            prop_assert!(deal.vips.iter().all(|vip| vip.shares.is_empty()));
            prop_assert!(deal.endpoints.iter().all(|endpoint| endpoint.gateway.is_none()));
            return Ok(());
        }
        for endpoint in &deal.endpoints {
            let home = endpoint.gateway.as_ref();
            let is_at_home = |vip: &&VipSpec| vip.shares.iter().any(|share| Some(&share.gateway) == home);
            let own = endpoint.vips.iter().map(|own| deal.vips.iter().find(|vip| vip.address == *own).unwrap());
            prop_assert_eq!(own.filter(is_at_home).count(), endpoint.vips.len(), "{}", endpoint.address);
            prop_assert_eq!(home.is_none(), endpoint.vips.is_empty());
            prop_assert!(home.is_some() || !complaints.is_empty(), "{} is closed silently", endpoint.address);
        }
        for vip in &deal.vips {
            let names: BTreeSet<_> = vip.shares.iter().map(|share| &share.gateway).collect();
            prop_assert!(!names.is_empty() && names.len() == vip.shares.len());
            let has_blocks = vip.shares.iter().all(|share| share.blocks.is_some() == (names.len() > 1));
            for share in &vip.shares {
                let backups: BTreeSet<_> = share.backups.iter().collect();
                prop_assert_eq!(backups.len(), share.backups.len());
                prop_assert!(!backups.contains(&share.gateway));
                prop_assert!(backups.iter().all(|name| deal.peers.iter().any(|peer| peer.name == **name)));
                if names.len() > 1 {
                    prop_assert!(backups.is_subset(&names) && backups.len() == (names.len() - 1).min(MOST_BACKUPS));
                }
            }
            prop_assert!(has_blocks && (names.len() == 1 || vip.announce != Announce::L2));
        }
        // VIPs of one Service or policy that have one home go to one place.
        for (one, other) in deal.vips.iter().zip(deal.vips.iter().skip(1)) {
            let is_l2 = one.announce == Announce::L2 && other.announce == Announce::L2;
            if is_l2 && one.name == other.name && one.shares[0].gateway == other.shares[0].gateway {
                prop_assert_eq!(&one.shares[0].backups, &other.shares[0].backups);
            }
        }
        for Peer { name, .. } in &deal.peers {
            let spec = documents.iter().find(|it| it.contains("kind: Gateway") && it.contains(&**name)).unwrap();
            let limit = [1, 2].into_iter().find(|most| spec.contains(&format!("maxAddresses: {most}")));
            let has = deal.vips.iter().filter(|vip| vip.shares.iter().any(|share| share.gateway == *name)).count();
            prop_assert!(has <= limit.unwrap_or(usize::MAX));
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
    blocks: BTreeMap<(IpAddr, u16), Arc<str>>,
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
            let address = vip.address;
            for ShareSpec { gateway, blocks, backups: _ } in &vip.shares {
                places.vips.entry(address).or_default().insert(gateway.clone());
                let is_own = |block: &u16| blocks.as_ref().is_none_or(|own| own.contains(BlockId(*block)));
                let own = (0..).take(BLOCKS).filter(is_own);
                places.blocks.extend(own.map(|block| ((address, block), gateway.clone())));
            }
        }
        let gateway = |it: &EndpointSpec| it.gateway.clone().unwrap();
        places.endpoints = deal.endpoints.iter().map(|it| (it.address, gateway(it))).collect();
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
