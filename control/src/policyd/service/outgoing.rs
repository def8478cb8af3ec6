//! Response queue of a stream. When the stream has ended and its client doesn't read, queued responses are dropped: the
//! connection may stay open and would hold them.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker};

use tokio::sync::mpsc;
use tokio_stream::Stream;
use tonic::Status;

use crate::policyd::codec::Response;

/// The stream of responses that tonic polls.
#[derive(Debug)]
pub(super) struct ResponseQueue(Arc<Mutex<Queue>>);

/// Handle that drops queued responses.
#[derive(Debug)]
pub(super) struct DiscardHandle(Weak<Mutex<Queue>>);

#[derive(Debug)]
struct Queue {
    /// `None` after a discard.
    receiver: Option<mpsc::Receiver<Result<Response, Status>>>,
    /// Final status after a discard.
    status: Option<Status>,
    /// Waker of the task that polls for the next response.
    waker: Option<Waker>,
}

impl ResponseQueue {
    /// Reads from a channel.
    pub(super) fn new(receiver: mpsc::Receiver<Result<Response, Status>>) -> (Self, DiscardHandle) {
        let queue = Arc::new(Mutex::new(Queue { receiver: Some(receiver), status: None, waker: None }));
        // A weak reference: when the client disconnects, the receiver is dropped and the channel closes.
        let discard = DiscardHandle(Arc::downgrade(&queue));
        (Self(queue), discard)
    }
}

impl DiscardHandle {
    /// Drops queued responses. If the client reads again, it gets the status instead.
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

impl Stream for ResponseQueue {
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
    async fn discard_drops_queued_responses_and_their_charges_and_ends_with_the_status() {
        let budget = Arc::new(Budget::new(4000, 4000));
        let (sender, receiver) = mpsc::channel(4);
        let (mut outgoing, discard) = ResponseQueue::new(receiver);
        for nonce in ["1", "2"] {
            let mut charge = budget.charge(None, Purpose::Responses);
            charge.set(100).unwrap();
            let response = Response { bytes: vec![7_u8; 100].into(), nonce: nonce.to_owned(), charge: Some(charge) };
            sender.send(Ok(response)).await.unwrap();
        }
        assert_eq!(outgoing.next().await.unwrap().unwrap().nonce, "1");
        assert_eq!(budget.held_bytes(), 100);
        discard.discard(Status::deadline_exceeded("too slow"));
        assert_eq!(budget.held_bytes(), 0);
        assert!(sender.is_closed());
        let error = outgoing.next().await.unwrap().unwrap_err();
        assert_eq!(error.message(), "too slow");
        assert!(outgoing.next().await.is_none());
    }

    #[tokio::test]
    async fn discard_wakes_a_waiting_reader_and_dropping_the_stream_closes_the_channel() {
        let (sender, receiver) = mpsc::channel(4);
        let (mut outgoing, discard) = ResponseQueue::new(receiver);
        let reader = tokio::spawn(async move {
            let next = outgoing.next().await;
            (next, outgoing)
        });
        while !reader.is_finished() {
            // The reader may or may not have polled yet.
            tokio::task::yield_now().await;
            discard.discard(Status::deadline_exceeded("too slow"));
        }
        let (next, _) = reader.await.unwrap();
        assert!(next.unwrap().is_err());
        drop(sender);
        let (sender, receiver) = mpsc::channel::<Result<Response, Status>>(4);
        let (outgoing, discard) = ResponseQueue::new(receiver);
        drop(outgoing);
        assert!(sender.is_closed());
        discard.discard(Status::deadline_exceeded("too slow"));
    }
}
