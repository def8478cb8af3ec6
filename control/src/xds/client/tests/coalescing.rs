//! Coalescing of updates that arrive faster than they can be applied.

use super::*;
use crate::xds::store::StoredResource;

/// A gateway with one endpoint and a pending update with a second one, while updates with three more have arrived.
async fn with_backlog(between: impl AsyncFnOnce(&mut Pair)) -> (Pair, UpdateReply) {
    let policies = [1, 2, 3, 4, 5].map(|endpoints| ServerPolicy::of(&sample_placement(endpoints)));
    let mut pair = Pair::synced(&policies[0]).await;
    pair.stream.send_diff(&policies[1], &policies[0]).await;
    let (update, reply) = pair.gateway.next_update().await;
    assert_eq!((update.update_count, update.change.endpoints.len()), (1, 1));
    pair.stream.send_diff(&policies[2], &policies[1]).await;
    between(&mut pair).await;
    pair.stream.send_diff(&policies[3], &policies[2]).await;
    pair.stream.send_diff(&policies[4], &policies[3]).await;
    (pair, reply)
}

impl Pair {
    /// Expects the ACKs of an update: of its endpoint and of its Settings.
    async fn expect_acks(&mut self, first: usize) {
        for nonce in [first, first + 1] {
            assert_eq!(self.stream.expect_ack().await, format!("n{nonce}"));
        }
    }

    /// Expects an update with one endpoint that isn't coalesced.
    async fn next_single_update(&mut self) -> UpdateReply {
        let (update, reply) = self.gateway.next_update().await;
        assert_eq!((update.update_count, update.change.endpoints.len()), (1, 1));
        reply
    }
}

#[tokio::test]
async fn coalesced_updates_take_effect_together_and_are_acknowledged_one_by_one() {
    let (mut pair, reply) = with_backlog(async |_| ()).await;
    reply.send(Ok(Effect::InForce)).unwrap();
    pair.expect_acks(9).await;
    let update = pair.gateway.apply_next().await;
    assert_eq!((update.update_count, update.change.endpoints.len()), (3, 3));
    assert_eq!(update.change.version, ServerPolicy::of(&sample_placement(5)).version);
    for first in [11, 13, 15] {
        pair.expect_acks(first).await;
    }
    assert!(pair.gateway.status.load().confirmed_at.is_some());
}

#[tokio::test]
async fn the_first_update_after_the_interval_is_not_deferred() {
    let policies = [1, 2].map(|endpoints| ServerPolicy::of(&sample_placement(endpoints)));
    let mut pair = Pair::synced(&policies[0]).await;
    sleep(2 * COALESCE_INTERVAL).await;
    pair.stream.send(response(Kind::Gateway, &[])).await;
    // The first response is staged; the rest of the update isn't deferred either.
    pair.stream.send_diff(&policies[1], &policies[0]).await;
    pair.gateway.apply_next().await;
    assert_eq!(pair.stream.expect_ack().await, "n9");
    pair.expect_acks(10).await;
}

#[tokio::test]
async fn a_rejected_update_does_not_affect_the_others_coalesced_with_it() {
    let (mut pair, reply) = with_backlog(async |_| ()).await;
    reply.send(Ok(Effect::InForce)).unwrap();
    pair.expect_acks(9).await;
    let (coalesced, reply) = pair.gateway.next_update().await;
    assert_eq!(coalesced.update_count, 3);
    reply.send(Err(Rejection { resource: None, reason: "no".to_owned() })).unwrap();
    pair.next_single_update().await.send(Ok(Effect::InForce)).unwrap();
    pair.expect_acks(11).await;
    let reason = "is invalid".to_owned();
    pair.next_single_update().await.send(Err(Rejection { resource: None, reason: reason.clone() })).unwrap();
    assert_eq!((pair.stream.expect_nack("n13").await, pair.stream.expect_nack("n14").await), (reason.clone(), reason));
    // Its endpoint is missing in the last update, so the counts of the Settings don't match.
    assert!(pair.gateway.receives_nothing_for(SILENCE).await);
}

#[tokio::test]
async fn an_invalid_update_does_not_affect_the_others_coalesced_with_it() {
    let (mut pair, reply) = with_backlog(async |pair| {
        let invalid = StoredResource { version: "1".to_owned(), body: b"\x0a\x09224.0.0.1".to_vec().into() };
        pair.stream.send(response(Kind::Endpoint, &[(key(Kind::Endpoint, "224.0.0.1"), Some(invalid))])).await;
        pair.stream.send(ServerPolicy::of(&sample_placement(3)).settings_response()).await;
    })
    .await;
    reply.send(Ok(Effect::InForce)).unwrap();
    pair.expect_acks(9).await;
    pair.next_single_update().await.send(Ok(Effect::InForce)).unwrap();
    pair.expect_acks(11).await;
    let reason = pair.gateway.next_rejection().await;
    assert!(reason.contains("224.0.0.1 is a multicast address"), "{reason}");
    assert_eq!(pair.stream.expect_nack("n13").await, reason);
    assert_eq!(pair.stream.expect_nack("n14").await, format!("part of a rejected update: {reason}"));
    for first in [15, 17] {
        pair.next_single_update().await.send(Ok(Effect::InForce)).unwrap();
        pair.expect_acks(first).await;
    }
}
