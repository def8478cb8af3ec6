//! What a policy server may send: whole responses, one after the other, to the policy that workers would have of them.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::{Duration, Instant};

use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryResponse;
use vipgate_dataplane::snapshot::build::Builder;
use vipgate_dataplane::snapshot::policy::Policy;

use super::{network, next};
use crate::policy::Viewer;
use crate::xds::book::Book;
use crate::xds::resource::{Content, Decoded, Key, Kind, decode, encode};

/// Responses of one input.
const MOST: usize = 16;
/// What an input may take, even on a busy machine and without optimization: tables of Services are the most of it.
const LONGEST: Duration = Duration::from_secs(20);

/// Responses, each with its length before it. Those that make a whole are offered, and put in force if the engine takes them.
pub fn xds(mut data: &[u8]) {
    let begun = Instant::now();
    let viewer = Viewer::named("g1");
    let (mut book, mut builder) = (Book::default(), Builder::new(network()));
    for _ in 0..MOST {
        let Some(response) = next::<DeltaDiscoveryResponse>(&mut data) else { break };
        read_alone(&response);
        let (held, staged) = (book.held().clone(), book.has_staged());
        if book.stage(response).is_err() {
            assert_eq!(book.has_staged(), staged, "nothing of a refused response is taken in");
        }
        assert_eq!(*book.held(), held, "what has come isn't held before it is in force");
        if !book.is_whole() {
            continue;
        }
        let before = seen(&builder.snapshot().policy);
        let offer = book.offer(&viewer);
        match builder.with_change(&offer.change) {
            Ok(snapshot) => {
                book.commit();
                assert_eq!(
                    seen(&snapshot.policy),
                    anew(&book, &viewer),
                    "a change, and all of it anew, come to the same"
                );
                assert_eq!(snapshot.policy.version(), book.version());
            }
            Err(error) => {
                assert_eq!(seen(&builder.snapshot().policy), before, "a refused change changes nothing: {error}");
                book.discard();
            }
        }
        assert!(!book.has_staged());
    }
    assert!(begun.elapsed() < LONGEST, "{:?}", begun.elapsed());
}

/// The policy of all that a book holds, built at once.
fn anew(book: &Book, viewer: &Viewer) -> String {
    let mut again = Book::default();
    assert_eq!(again.stage_held(book.held().clone()), Ok(()), "what was read can be read again");
    let offer = again.offer(viewer);
    match Builder::new(network()).with_change(&offer.change) {
        Ok(snapshot) => seen(&snapshot.policy),
        Err(error) => error.to_string(),
    }
}

/// Each resource by itself: what is read means the same when it is encoded again.
fn read_alone(response: &DeltaDiscoveryResponse) {
    let Some(kind) = Kind::of_url(&response.type_url) else { return };
    for resource in &response.resources {
        let body = resource.resource.as_ref().map(|body| body.value.as_slice()).unwrap_or_default();
        let Ok(meaning) = decode(kind, &resource.name, body) else { continue };
        let Some((key, Content { body, .. })) = encoded(&meaning) else { continue };
        assert_eq!(key, Key { kind, name: resource.name.as_str().into() });
        assert_eq!(decode(kind, &key.name, &body), Ok(meaning));
    }
}

fn encoded(meaning: &Decoded) -> Option<(Key, Content)> {
    Some(match meaning {
        Decoded::EgressPolicy(policy) => encode::egress_policy(policy),
        Decoded::Vip(vip) => encode::vip(vip),
        Decoded::Endpoint(endpoint) => encode::endpoint(endpoint),
        Decoded::Service(service) => encode::service(service),
        Decoded::Gateway(peer) => encode::gateway(peer),
        Decoded::OverlayNode(node) => encode::overlay_node(node),
        Decoded::Cluster(cluster) => encode::cluster(cluster),
        Decoded::Settings(_) => return None,
    })
}

/// What a policy says, whatever way it came about.
pub(super) fn seen(policy: &Policy) -> String {
    let mut lines = BTreeMap::new();
    for vip in policy.live_vips() {
        lines.insert(format!("vip {}", vip.address), format!("{} {:?} {:?}", vip.name, vip.announce, vip.reserved));
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
