//! Responses of a stream that wait for the network. When the stream ends and its client doesn't read, they are dropped: its connection may
//! stay, and would hold them for as long.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker};

use tokio::sync::mpsc;
use tokio_stream::Stream;
use tonic::Status;

use crate::policyd::codec::Response;

/// What the network takes responses from.
#[derive(Debug)]
pub(super) struct Outgoing(Arc<Mutex<Queue>>);

/// Drops what waits.
#[derive(Debug)]
pub(super) struct Discard(Weak<Mutex<Queue>>);

#[derive(Debug)]
struct Queue {
    /// None: what waited was dropped.
    receiver: Option<mpsc::Receiver<Result<Response, Status>>>,
    /// What comes instead.
    status: Option<Status>,
    /// Whoever waits for more.
    waker: Option<Waker>,
}

impl Outgoing {
    /// Takes from a channel.
    pub(super) fn new(receiver: mpsc::Receiver<Result<Response, Status>>) -> (Self, Discard) {
        let queue = Arc::new(Mutex::new(Queue { receiver: Some(receiver), status: None, waker: None }));
        // Once the client is gone, so is the receiver, whoever could still drop it.
        let discard = Discard(Arc::downgrade(&queue));
        (Self(queue), discard)
    }
}

impl Discard {
    /// Drops what waits. The client learns the status instead, if it ever reads again.
    pub(super) fn discard(&self, status: Status) {
        let Some(queue) = self.0.upgrade() else { return };
        let mut queue = lock(&queue);
        queue.status = Some(status);
        let (receiver, waker) = (queue.receiver.take(), queue.waker.take());
        drop(queue);
        drop(receiver);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

fn lock(queue: &Mutex<Queue>) -> MutexGuard<'_, Queue> {
    queue.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Stream for Outgoing {
    type Item = Result<Response, Status>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let mut queue = lock(&self.0);
        let Some(receiver) = &mut queue.receiver else { return Poll::Ready(queue.status.take().map(Err)) };
        let next = receiver.poll_recv(context);
        if next.is_pending() {
            queue.waker = Some(context.waker().clone());
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use tokio_stream::StreamExt as _;

    use super::*;
    use crate::policyd::budget::{Budget, Purpose};

    #[tokio::test]
    async fn what_waits_is_dropped_with_its_charge_and_the_status_comes_instead() {
        let budget = Arc::new(Budget::new(4000, 4000));
        let (sender, receiver) = mpsc::channel(4);
        let (mut outgoing, discard) = Outgoing::new(receiver);
        for nonce in ["1", "2"] {
            let mut charge = budget.charge(None, Purpose::Responses);
            charge.set(100).unwrap();
            let response = Response { bytes: vec![7_u8; 100].into(), nonce: nonce.to_owned(), charge: Some(charge) };
            sender.send(Ok(response)).await.unwrap();
        }
        assert_eq!(outgoing.next().await.unwrap().unwrap().nonce, "1");
        assert_eq!(budget.held(), 100);
        discard.discard(Status::deadline_exceeded("too slow"));
        assert_eq!(budget.held(), 0);
        assert!(sender.is_closed());
        let refusal = outgoing.next().await.unwrap().unwrap_err();
        assert_eq!(refusal.message(), "too slow");
        assert!(outgoing.next().await.is_none());
    }

    #[tokio::test]
    async fn whoever_waits_for_more_learns_it_too_and_a_client_that_is_gone_closes_the_channel() {
        let (sender, receiver) = mpsc::channel(4);
        let (mut outgoing, discard) = Outgoing::new(receiver);
        let waiting = tokio::spawn(async move {
            let next = outgoing.next().await;
            (next, outgoing)
        });
        while !waiting.is_finished() {
            // Whether it waits by now or not.
            tokio::task::yield_now().await;
            discard.discard(Status::deadline_exceeded("too slow"));
        }
        let (next, _) = waiting.await.unwrap();
        assert!(next.unwrap().is_err());
        drop(sender);
        let (sender, receiver) = mpsc::channel::<Result<Response, Status>>(4);
        let (outgoing, discard) = Outgoing::new(receiver);
        drop(outgoing);
        assert!(sender.is_closed());
        discard.discard(Status::deadline_exceeded("too slow"));
    }
}
