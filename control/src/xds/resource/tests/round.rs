//! There and back again, and what else may come.

use super::arbitrary::deal;
use super::*;

/// The deal that some resources make.
fn read_all(resources: &[(Key, Content)]) -> Result<Deal, Fault> {
    let mut deal = Deal::default();
    for (key, content) in resources {
        match decode(key.kind, &key.name, &content.body)? {
            Decoded::EgressPolicy(policy) => deal.policies.push(policy),
            Decoded::Vip(vip) => deal.vips.push(vip),
            Decoded::Endpoint(endpoint) => deal.endpoints.push(endpoint),
            Decoded::Service(service) => deal.services.push(service),
            Decoded::Gateway(peer) => deal.peers.push(peer),
            Decoded::OverlayNode(node) => deal.nodes.push(node),
            Decoded::Cluster(cluster) => deal.cluster = Some(cluster),
            Decoded::Settings(settings) => panic!("{settings:?} in a deal"),
        }
    }
    // Resources are sorted by name, deals by what the name says.
    deal.vips.sort_by_key(|vip| vip.address);
    deal.endpoints.sort_by_key(|endpoint| endpoint.address);
    Ok(deal)
}

fn encode_again(meaning: &Decoded) -> (Key, Content) {
    match meaning {
        Decoded::EgressPolicy(policy) => encode::egress_policy(policy),
        Decoded::Vip(vip) => encode::vip(vip),
        Decoded::Endpoint(endpoint) => encode::endpoint(endpoint),
        Decoded::Service(service) => encode::service(service),
        Decoded::Gateway(peer) => encode::gateway(peer),
        Decoded::OverlayNode(node) => encode::overlay_node(node),
        Decoded::Cluster(cluster) => encode::cluster(cluster),
        Decoded::Settings(settings) => panic!("{settings:?} in a deal"),
    }
}

/// One thing that happens to bytes on their way.
#[derive(Clone, Debug)]
enum Damage {
    Set(prop::sample::Index, u8),
    Insert(prop::sample::Index, u8),
    Remove(prop::sample::Index),
    Cut(prop::sample::Index),
    Twice(prop::sample::Index),
}

impl Damage {
    fn any() -> impl Strategy<Value = Self> {
        let place = any::<prop::sample::Index>;
        prop_oneof![
            (place(), any::<u8>()).prop_map(|(at, byte)| Self::Set(at, byte)),
            (place(), any::<u8>()).prop_map(|(at, byte)| Self::Insert(at, byte)),
            place().prop_map(Self::Remove),
            place().prop_map(Self::Cut),
            place().prop_map(Self::Twice),
        ]
    }

    fn happen(&self, bytes: &mut Vec<u8>) {
        if bytes.is_empty() {
            return;
        }
        let length = bytes.len();
        match self {
            Self::Set(at, byte) => bytes[at.index(length)] = *byte,
            Self::Insert(at, byte) => bytes.insert(at.index(length), *byte),
            Self::Remove(at) => drop(bytes.remove(at.index(length))),
            Self::Cut(at) => bytes.truncate(at.index(length)),
            Self::Twice(at) => bytes.extend_from_within(at.index(length)..),
        }
    }
}

proptest! {
    #[test]
    fn what_is_encoded_comes_back(deal in deal()) {
        let resources = encode_all(&deal);
        prop_assert!(resources.is_sorted_by(|a, b| a.0 < b.0));
        prop_assert_eq!(read_all(&resources), Ok(deal));
    }

    #[test]
    fn settings_come_back(counts in any::<[u32; Kind::COUNTED]>(), sum in any::<u64>()) {
        let (key, content, version) = settings(counts.map(|count| count as usize), sum);
        let expected = super::super::super::proto::Settings {
            version,
            egress_policies: counts[0].into(),
            vips: counts[1].into(),
            endpoints: counts[2].into(),
            services: counts[3].into(),
            gateways: counts[4].into(),
            overlay_nodes: counts[5].into(),
            clusters: counts[6].into(),
        };
        prop_assert_eq!(decode(key.kind, &key.name, &content.body), Ok(Decoded::Settings(expected)));
    }

    #[test]
    fn any_bytes_are_read_or_refused(
        kind in prop::sample::select(Kind::ALL.to_vec()),
        name in "\\PC{0,9}",
        body: Vec<u8>,
    ) {
        let _ = decode(kind, &name, &body);
        let _ = decode(kind, SETTINGS, &body);
    }

    /// What comes through is as good as what was sent: encoded again, it says the same.
    #[test]
    fn damaged_resources_are_read_or_refused(
        deal in deal(),
        damages in prop::collection::vec(Damage::any(), 1..4),
        as_kind in prop::option::of(prop::sample::select(Kind::ALL[..Kind::COUNTED].to_vec())),
    ) {
        for (key, content) in encode_all(&deal) {
            let mut body = content.body.to_vec();
            for damage in &damages {
                damage.happen(&mut body);
            }
            let kind = as_kind.unwrap_or(key.kind);
            if let Ok(meaning) = decode(kind, &key.name, &body) {
                let (again, content) = encode_again(&meaning);
                prop_assert_eq!(&again, &Key { kind, name: key.name.clone() });
                prop_assert_eq!(decode(kind, &again.name, &content.body), Ok(meaning));
            }
        }
    }
}
