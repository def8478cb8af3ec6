//! Fuzzing of xDS responses from a policy server, up to the compiled policy.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::{Duration, Instant};

use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryResponse;
use vipgate_dataplane::policy::build::Builder;
use vipgate_dataplane::policy::compiled::Policy;
use vipgate_policy::compiler::GatewayLocality;

use super::{network, next};
use crate::xds::resource::{Content, Decoded, Key, Kind, decode, encode};
use crate::xds::store::ResourceStore;

/// Maximum number of responses of one input.
const MAX_RESPONSES: usize = 16;
/// Time limit of one input, even on a busy machine and without optimization. Building the tables of Services takes most
/// of it.
const TIME_LIMIT: Duration = Duration::from_secs(20);

/// Decodes length-delimited responses. Whenever the resources are complete, they are compiled, and applied if the
/// engine accepts them.
pub fn xds(mut data: &[u8]) {
    let start = Instant::now();
    let viewer = GatewayLocality::named("g1");
    let (mut book, mut builder) = (ResourceStore::default(), Builder::new(network()));
    for _ in 0..MAX_RESPONSES {
        let Some(response) = next::<DeltaDiscoveryResponse>(&mut data) else { break };
        check_round_trips(&response);
        let (held, staged) = (book.resources().clone(), book.has_staged());
        if book.stage(response).is_err() {
            assert_eq!(book.has_staged(), staged, "a rejected response stages nothing");
        }
        assert_eq!(*book.resources(), held, "staged resources aren't held before they are applied");
        if !book.is_complete() {
            continue;
        }
        if book.check_consistency().is_err() {
            book.discard();
            continue;
        }
        let previous = describe(&builder.snapshot().policy);
        let update = book.update_for(&viewer);
        match builder.with_change(&update.change) {
            Ok(snapshot) => {
                book.commit();
                assert_eq!(
                    describe(&snapshot.policy),
                    rebuild(&book, &viewer),
                    "an incremental and a full build have the same result"
                );
                assert_eq!(snapshot.policy.version(), book.version());
            }
            Err(error) => {
                assert_eq!(describe(&builder.snapshot().policy), previous, "a rejected change has no effect: {error}");
                book.discard();
            }
        }
        assert!(!book.has_staged());
    }
    assert!(start.elapsed() < TIME_LIMIT, "{:?}", start.elapsed());
}

/// The policy of all resources in a store, built from scratch.
fn rebuild(book: &ResourceStore, viewer: &GatewayLocality) -> String {
    let mut copy = ResourceStore::default();
    assert_eq!(copy.stage_cached(book.resources().clone()), Ok(()), "held resources can be staged again");
    let update = copy.update_for(viewer);
    match Builder::new(network()).with_change(&update.change) {
        Ok(snapshot) => describe(&snapshot.policy),
        Err(error) => error.to_string(),
    }
}

/// Asserts the round trip of each resource of a response.
fn check_round_trips(response: &DeltaDiscoveryResponse) {
    let Some(kind) = Kind::from_type_url(&response.type_url) else { return };
    for resource in &response.resources {
        let body = resource.resource.as_ref().map(|body| body.value.as_slice()).unwrap_or_default();
        let Ok(decoded) = decode(kind, &resource.name, body) else { continue };
        let Some((key, Content { body, .. })) = reencode(&decoded) else { continue };
        assert_eq!(key, Key { kind, name: resource.name.as_str().into() });
        assert_eq!(decode(kind, &key.name, &body), Ok(decoded));
    }
}

fn reencode(decoded: &Decoded) -> Option<(Key, Content)> {
    Some(match decoded {
        Decoded::EgressPolicy(policy) => encode::egress_policy(policy),
        Decoded::ShardMap(map) => encode::shard_map(map),
        Decoded::Vip(vip) => encode::vip(vip),
        Decoded::Endpoint(endpoint) => encode::endpoint(endpoint),
        Decoded::BackendSlice(slice) => encode::backend_slice(slice),
        Decoded::Service(service) => encode::service_resource(service),
        Decoded::Gateway(peer) => encode::gateway(peer),
        Decoded::OverlayNode(node) => encode::overlay_node(node),
        Decoded::Cluster(cluster) => encode::cluster(cluster),
        Decoded::Settings(_) => return None,
    })
}

/// Description of a policy, independent of how it was built.
fn describe(policy: &Policy) -> String {
    let mut lines = BTreeMap::new();
    for vip in policy.live_vips() {
        lines.insert(
            format!("vip {}", vip.address),
            format!("{} {:?} {:?}", vip.name, vip.announce, vip.ports.reserved),
        );
    }
    for (address, endpoint) in policy.endpoints() {
        let vips: Vec<_> = policy.vips_of(endpoint).map(|vip| vip.address).collect();
        let egress = &policy.egress_of(endpoint).spec;
        lines.insert(format!("endpoint {address}"), format!("{} {vips:?} {egress:?}", endpoint.name));
    }
    for service in policy.services() {
        lines.insert(format!("service {}", service.spec.name), format!("{:?}", service.spec));
    }
    lines.insert("cluster".to_owned(), format!("{:?}", policy.cluster()));
    lines.into_iter().fold(String::new(), |mut all, (name, line)| {
        let _ = writeln!(all, "{name}: {line}");
        all
    })
}
