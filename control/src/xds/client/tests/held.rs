//! Updates that the gateway has accepted, but that wait for the kernel.

use super::*;
use crate::xds::client::cache_writer::WRITE_INTERVAL;

#[tokio::test]
async fn a_held_update_is_acknowledged_once_it_is_in_force_and_later_ones_are_relative_to_it() {
    let policies = [2, 3, 4].map(|pods| ServerPolicy::of(&sample_placement(pods)));
    let [two, three, four] = &policies;
    let mut pair = Pair::synced(two).await;
    wait_cached(pair.dir.path(), two).await;
    pair.stream.send_diff(three, two).await;
    let (update, reply) = pair.gateway.next_update().await;
    assert_eq!(update.change.endpoints.len(), 1);
    let (_first, receiver) = oneshot::channel();
    reply.send(Ok(Effect::Held(receiver))).unwrap();
    assert!(pair.stream.receives_nothing_for(WRITE_INTERVAL + SILENCE).await, "no ACK, no NACK");
    assert!(is_cached(pair.dir.path(), two), "a restart begins with what is in force");

    pair.stream.send_diff(four, three).await;
    let (update, reply) = pair.gateway.next_update().await;
    assert_eq!(update.change.endpoints.len(), 1, "relative to the one that is held");
    let (in_force, receiver) = oneshot::channel();
    reply.send(Ok(Effect::Held(receiver))).unwrap();
    assert!(pair.stream.receives_nothing_for(SILENCE).await);
    in_force.send(()).unwrap();
    for nonce in ["n9", "n10", "n11", "n12"] {
        assert_eq!(pair.stream.expect_ack().await, nonce);
    }
    wait_cached(pair.dir.path(), four).await;
}

#[tokio::test]
async fn what_is_held_is_sent_again_after_a_reconnection() {
    let [two, three] = [2, 3].map(|pods| ServerPolicy::of(&sample_placement(pods)));
    let mut pair = Pair::synced(&two).await;
    pair.stream.send_diff(&three, &two).await;
    let (_, reply) = pair.gateway.next_update().await;
    let (_first, receiver) = oneshot::channel();
    reply.send(Ok(Effect::Held(receiver))).unwrap();
    drop(pair.stream);
    let mut stream = pair.server.accept_stream().await;
    let requests = stream.subscriptions().await;
    let known = |kind: Kind| {
        let at = Kind::OF_GATEWAYS.iter().position(|it| *it == kind).unwrap();
        requests[at].initial_resource_versions.len()
    };
    // Not the third endpoint, nor the version of the policy.
    assert_eq!((known(Kind::Endpoint), known(Kind::Settings)), (2, 0));
}
