//! Updates that come faster than they are put in force.

use super::*;
use crate::xds::book::Held;

/// A gateway that has one endpoint and is offered a second, while the server says what makes them five, one by one.
async fn crowded(between: impl AsyncFnOnce(&mut Pair)) -> (Pair, Answer) {
    let told = [1, 2, 3, 4, 5].map(|endpoints| Told::of(&deal(endpoints)));
    let mut pair = Pair::with(&told[0]).await;
    pair.talk.tell(&told[1], &told[0]).await;
    let (offer, answer) = pair.gateway.offer().await;
    assert_eq!((offer.updates, offer.change.endpoints.len()), (1, 1));
    pair.talk.tell(&told[2], &told[1]).await;
    between(&mut pair).await;
    pair.talk.tell(&told[3], &told[2]).await;
    pair.talk.tell(&told[4], &told[3]).await;
    (pair, answer)
}

impl Pair {
    /// The gateway acknowledges an update: its endpoint, and its settings.
    async fn acknowledges(&mut self, first: usize) {
        for nonce in [first, first + 1] {
            assert_eq!(self.talk.accepted().await, format!("n{nonce}"));
        }
    }

    /// The gateway is offered an update of one endpoint.
    async fn offers_one(&mut self) -> Answer {
        let (offer, answer) = self.gateway.offer().await;
        assert_eq!((offer.updates, offer.change.endpoints.len()), (1, 1));
        answer
    }
}

#[tokio::test]
async fn what_comes_in_a_crowd_takes_effect_together_and_is_acknowledged_one_by_one() {
    let (mut pair, answer) = crowded(async |_| ()).await;
    answer.send(Ok(())).unwrap();
    pair.acknowledges(9).await;
    let offer = pair.gateway.takes().await;
    assert_eq!((offer.updates, offer.change.endpoints.len()), (3, 3));
    assert_eq!(offer.change.version, Told::of(&deal(5)).version);
    for first in [11, 13, 15] {
        pair.acknowledges(first).await;
    }
    assert!(pair.gateway.status.load().known_at.is_some());
}

#[tokio::test]
async fn the_first_after_a_while_does_not_wait() {
    let told = [1, 2].map(|endpoints| Told::of(&deal(endpoints)));
    let mut pair = Pair::with(&told[0]).await;
    sleep(2 * PACE).await;
    pair.talk.say(response(Kind::Gateway, &[])).await;
    // Its beginning has been taken in; what follows belongs to it, though it comes later.
    pair.talk.tell(&told[1], &told[0]).await;
    pair.gateway.takes().await;
    assert_eq!(pair.talk.accepted().await, "n9");
    pair.acknowledges(10).await;
}

#[tokio::test]
async fn one_that_can_not_be_in_force_takes_no_other_with_it() {
    let (mut pair, answer) = crowded(async |_| ()).await;
    answer.send(Ok(())).unwrap();
    pair.acknowledges(9).await;
    let (together, answer) = pair.gateway.offer().await;
    assert_eq!(together.updates, 3);
    answer.send(Err(Rejection { resource: None, reason: "no".to_owned() })).unwrap();
    pair.offers_one().await.send(Ok(())).unwrap();
    pair.acknowledges(11).await;
    let reason = "is the wrong one".to_owned();
    pair.offers_one().await.send(Err(Rejection { resource: None, reason: reason.clone() })).unwrap();
    assert_eq!((pair.talk.refused("n13").await, pair.talk.refused("n14").await), (reason.clone(), reason));
    // Its endpoint is missing where the last one's settings count it.
    assert!(pair.gateway.hears_nothing_for(SILENCE).await);
}

#[tokio::test]
async fn one_that_means_nothing_takes_no_other_with_it() {
    let (mut pair, answer) = crowded(async |pair| {
        let held = Held { version: "1".to_owned(), body: b"\x0a\x09224.0.0.1".to_vec().into() };
        pair.talk.say(response(Kind::Endpoint, &[(key(Kind::Endpoint, "224.0.0.1"), Some(held))])).await;
        pair.talk.say(Told::of(&deal(3)).settle()).await;
    })
    .await;
    answer.send(Ok(())).unwrap();
    pair.acknowledges(9).await;
    pair.offers_one().await.send(Ok(())).unwrap();
    pair.acknowledges(11).await;
    let why = pair.gateway.refused().await;
    assert!(why.contains("224.0.0.1 is a multicast address"), "{why}");
    assert_eq!(pair.talk.refused("n13").await, why);
    assert_eq!(pair.talk.refused("n14").await, format!("part of an update that was refused: {why}"));
    for first in [15, 17] {
        pair.offers_one().await.send(Ok(())).unwrap();
        pair.acknowledges(first).await;
    }
}
