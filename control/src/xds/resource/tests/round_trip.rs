//! Round trips, and decoding of random and damaged bodies.

use super::arbitrary::any_placement;
use super::*;

/// Decodes all resources of a placement.
fn decode_all(resources: &[(Key, Content)]) -> Result<Placement, ResourceError> {
    let mut placement = Placement::default();
    let (mut policies, mut vips, mut endpoints, mut services) = (vec![], vec![], vec![], vec![]);
    let mut shard_maps = vec![];
    for (key, content) in resources {
        match decode(key.kind, &key.name, &content.body)? {
            Decoded::EgressPolicy(policy) => policies.push(Arc::unwrap_or_clone(policy)),
            Decoded::ShardMap(map) => shard_maps.push(Arc::unwrap_or_clone(map)),
            Decoded::Vip(vip) => vips.push(Arc::unwrap_or_clone(vip)),
            Decoded::Endpoint(endpoint) => endpoints.push(Arc::unwrap_or_clone(endpoint)),
            Decoded::BackendSlice(slice) => panic!("{slice:?} of a small Service"),
            Decoded::Service(service) => services.push(service.service),
            Decoded::Gateway(peer) => placement.peers.push(peer),
            Decoded::OverlayNode(node) => placement.nodes.push(Arc::unwrap_or_clone(node)),
            Decoded::Cluster(cluster) => placement.cluster = Some(cluster),
            Decoded::Settings(settings) => panic!("{settings:?} in a placement"),
        }
    }
    // Resources are sorted by name, placements by address.
    let (policies, vips, endpoints) = (policies.into(), vips.into(), endpoints.into());
    let (shard_maps, services) = (shard_maps.into(), services.into());
    Ok(Placement { policies, shard_maps, vips, endpoints, services, ..placement })
}

fn encode_again(decoded: &Decoded) -> (Key, Content) {
    match decoded {
        Decoded::EgressPolicy(policy) => encode::egress_policy(policy),
        Decoded::ShardMap(map) => encode::shard_map(map),
        Decoded::Vip(vip) => encode::vip(vip),
        Decoded::Endpoint(endpoint) => encode::endpoint(endpoint),
        Decoded::BackendSlice(slice) => encode::backend_slice(slice),
        Decoded::Service(service) => encode::service_resource(service),
        Decoded::Gateway(peer) => encode::gateway(peer),
        Decoded::OverlayNode(node) => encode::overlay_node(node),
        Decoded::Cluster(cluster) => encode::cluster(cluster),
        Decoded::Settings(settings) => panic!("{settings:?} in a placement"),
    }
}

/// One modification of a body.
#[derive(Clone, Debug)]
enum Damage {
    Set(prop::sample::Index, u8),
    Insert(prop::sample::Index, u8),
    Remove(prop::sample::Index),
    Truncate(prop::sample::Index),
    Duplicate(prop::sample::Index),
}

impl Damage {
    fn any() -> impl Strategy<Value = Self> {
        let index = any::<prop::sample::Index>;
        prop_oneof![
            (index(), any::<u8>()).prop_map(|(at, byte)| Self::Set(at, byte)),
            (index(), any::<u8>()).prop_map(|(at, byte)| Self::Insert(at, byte)),
            index().prop_map(Self::Remove),
            index().prop_map(Self::Truncate),
            index().prop_map(Self::Duplicate),
        ]
    }

    fn apply(&self, bytes: &mut Vec<u8>) {
        if bytes.is_empty() {
            return;
        }
        let length = bytes.len();
        match self {
            Self::Set(at, byte) => bytes[at.index(length)] = *byte,
            Self::Insert(at, byte) => bytes.insert(at.index(length), *byte),
            Self::Remove(at) => drop(bytes.remove(at.index(length))),
            Self::Truncate(at) => bytes.truncate(at.index(length)),
            Self::Duplicate(at) => bytes.extend_from_within(at.index(length)..),
        }
    }
}

proptest! {
    #[test]
    fn an_encoded_placement_decodes_to_itself(placement in any_placement()) {
        let resources = encode_all(&placement);
        prop_assert!(resources.is_sorted_by(|a, b| a.0 < b.0));
        prop_assert_eq!(decode_all(&resources), Ok(placement));
    }

    #[test]
    fn encoded_settings_decode_to_themselves(counts in any::<[u32; Kind::COUNTED]>(), sum in any::<u64>()) {
        let (key, content, version) = settings(counts.map(|count| count as usize), sum);
        let expected = super::super::super::proto::Settings {
            version,
            egress_policies: counts[0].into(),
            shard_maps: counts[1].into(),
            vips: counts[2].into(),
            endpoints: counts[3].into(),
            backend_slices: counts[4].into(),
            services: counts[5].into(),
            gateways: counts[6].into(),
            overlay_nodes: counts[7].into(),
            clusters: counts[8].into(),
        };
        prop_assert_eq!(decode(key.kind, &key.name, &content.body), Ok(Decoded::Settings(expected)));
    }

    #[test]
    fn random_bodies_never_panic(
        kind in prop::sample::select(Kind::ALL.to_vec()),
        name in "\\PC{0,9}",
        body: Vec<u8>,
    ) {
        let _ = decode(kind, &name, &body);
        let _ = decode(kind, SETTINGS, &body);
    }

    /// A damaged body that still decodes is valid: it survives a round trip.
    #[test]
    fn damaged_bodies_are_rejected_or_round_trip(
        placement in any_placement(),
        damages in prop::collection::vec(Damage::any(), 1..4),
        as_kind in prop::option::of(prop::sample::select(Kind::ALL[..Kind::COUNTED].to_vec())),
    ) {
        for (key, content) in encode_all(&placement) {
            let mut body = content.body.to_vec();
            for damage in &damages {
                damage.apply(&mut body);
            }
            let kind = as_kind.unwrap_or(key.kind);
            if let Ok(decoded) = decode(kind, &key.name, &body) {
                let (again, content) = encode_again(&decoded);
                prop_assert_eq!(&again, &Key { kind, name: key.name.clone() });
                prop_assert_eq!(decode(kind, &again.name, &content.body), Ok(decoded));
            }
        }
    }
}
