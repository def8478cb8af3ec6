//! What requests and responses cost: a stream makes its connection one that is used, a message counts from the moment that its length
//! has come, not when all of it has, and must come in time; what is sent counts until the network has taken it.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use http_body::{Frame, SizeHint};
use prost::bytes::Bytes;
use tokio::time::{Sleep, sleep};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::BoxFuture;
use tonic::codegen::http::{Request, Response};
use tower::{Layer, Service};

use super::budget::{Budget, Charge, Purpose};
use super::listen::Connection;
use crate::listener::InUse;

/// The prefix of a message: whether it is compressed, and its length (gRPC over HTTP/2, "Length-Prefixed-Message").
const PREFIX: usize = 5;
/// How a message's time is counted.
const SECOND: Duration = Duration::from_secs(1);
/// Seconds that a message may take to come, and bytes of it for which there is one more.
const MESSAGE_SECONDS: usize = 10;
const BYTES_PER_SECOND: usize = 1_000_000;

/// Puts meters around requests and responses.
#[derive(Clone, Debug)]
pub(super) struct Meter(pub(super) Arc<Budget>);

impl<S> Layer<S> for Meter {
    type Service = Metered<S>;

    fn layer(&self, inner: S) -> Metered<S> {
        Metered { inner, budget: self.0.clone() }
    }
}

/// A service whose requests and responses have meters.
#[derive(Clone, Debug)]
pub(super) struct Metered<S> {
    inner: S,
    budget: Arc<Budget>,
}

impl<S> Service<Request<Body>> for Metered<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = BoxFuture<Response<Body>, S::Error>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let (parts, body) = request.into_parts();
        let connection = parts.extensions.get::<Connection>();
        let from = connection.and_then(|it| it.remote);
        let message = Message::new(self.budget.charge(from, Purpose::Requests));
        let in_use = connection.map(|it| it.activity.begin());
        let body = Body::new(Received { body, message, second: None, _in_use: in_use });
        let response = self.inner.call(Request::from_parts(parts, body));
        let budget = self.budget.clone();
        let counted = move |body| Body::new(Sent { body, budget, from });
        Box::pin(async move { response.await.map(|response| response.map(counted)) })
    }
}

/// A request's messages as they come.
struct Received {
    body: Body,
    message: Message,
    /// Ends with the second that is counted.
    second: Option<Pin<Box<Sleep>>>,
    _in_use: Option<InUse>,
}

/// The message that comes.
struct Message {
    prefix: [u8; PREFIX],
    filled: usize,
    remaining: usize,
    /// How many it may still take.
    seconds: usize,
    charge: Charge,
}

impl Message {
    fn new(charge: Charge) -> Self {
        Self { prefix: [0; PREFIX], filled: 0, remaining: 0, seconds: 0, charge }
    }

    /// Bytes have come, of any number of messages.
    fn measure(&mut self, mut data: &[u8]) -> Result<(), Status> {
        while !data.is_empty() {
            if self.remaining > 0 {
                let taken = self.remaining.min(data.len());
                self.remaining -= taken;
                data = &data[taken..];
                continue;
            }
            let taken = (PREFIX - self.filled).min(data.len());
            self.prefix[self.filled..self.filled + taken].copy_from_slice(&data[..taken]);
            self.filled += taken;
            data = &data[taken..];
            if self.filled == PREFIX {
                let [_, length @ ..] = self.prefix;
                self.remaining = u32::from_be_bytes(length) as usize;
                self.filled = 0;
                self.seconds = MESSAGE_SECONDS + self.remaining / BYTES_PER_SECOND;
                self.charge.set(self.remaining)?;
            }
        }
        Ok(())
    }

    /// More is asked for: what has come whole was taken.
    fn is_taken(&mut self) {
        if self.remaining == 0 {
            self.charge.force(0);
        }
    }
}

impl Received {
    /// Why the message that comes takes too long. Only seconds count in which somebody waits for it: while the server is busy with what
    /// came before, a client can't send all of it.
    fn poll_late(&mut self, context: &mut Context<'_>) -> Poll<Status> {
        while self.message.remaining > 0 {
            let second = self.second.get_or_insert_with(|| Box::pin(sleep(SECOND)));
            ready!(second.as_mut().poll(context));
            self.second = None;
            let Some(seconds) = self.message.seconds.checked_sub(1) else {
                let why = format!("a message is too slow: {} bytes of it have not come", self.message.remaining);
                return Poll::Ready(Status::deadline_exceeded(why));
            };
            self.message.seconds = seconds;
        }
        self.second = None;
        Poll::Pending
    }
}

impl http_body::Body for Received {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        self.message.is_taken();
        let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(context) else {
            return self.poll_late(context).map(|status| Some(Err(status)));
        };
        if let Some(Ok(frame)) = &frame
            && let Some(data) = frame.data_ref()
            && let Err(status) = self.message.measure(data)
        {
            return Poll::Ready(Some(Err(status)));
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A response as it goes.
struct Sent {
    body: Body,
    budget: Arc<Budget>,
    from: Option<SocketAddr>,
}

impl Sent {
    /// The same bytes, which count until they are dropped: HTTP/2 holds some hundred kilobytes of each stream while its client doesn't read.
    fn count(&self, bytes: Bytes) -> Bytes {
        let mut charge = self.budget.charge(self.from, Purpose::Responses);
        charge.force(bytes.len());
        Bytes::from_owner(Counted { bytes, _charge: charge })
    }
}

/// Bytes that count.
struct Counted {
    bytes: Bytes,
    _charge: Charge,
}

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl http_body::Body for Sent {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        Poll::Ready(frame.map(|frame| frame.map(|frame| frame.map_data(|bytes| self.count(bytes)))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use http_body::Body as _;
    use tokio::time::{Instant, timeout};

    use super::*;

    #[test]
    fn a_message_counts_as_soon_as_its_length_has_come_and_until_it_is_taken() {
        let budget = Arc::new(Budget::new(1000, 1000));
        let mut message = Message::new(budget.charge(None, Purpose::Requests));
        message.measure(&[0, 0, 0]).unwrap();
        assert_eq!(budget.held(), 0);
        message.measure(&[2, 88]).unwrap();
        assert_eq!(budget.held(), 600);
        for _ in 0..599 {
            message.measure(&[7]).unwrap();
            message.is_taken();
        }
        assert_eq!(budget.held(), 600, "a byte is missing");
        message.measure(&[7]).unwrap();
        assert_eq!(budget.held(), 600);
        message.is_taken();
        assert_eq!(budget.held(), 0);
        // Several at once; and one that is too long is refused by its length.
        message.measure(&[0, 0, 0, 0, 1, 9, 0, 0, 0, 0, 2, 9]).unwrap();
        assert_eq!((budget.held(), message.remaining), (2, 1));
        let refusal = message.measure(&[9, 0, 0, 0, 3, 233]).unwrap_err();
        assert_eq!(refusal.code(), tonic::Code::ResourceExhausted);
        // Longer messages have more time.
        let mut message = Message::new(Arc::new(Budget::default()).charge(None, Purpose::Requests));
        message.measure(&[0, 2, 0, 0, 0]).unwrap();
        assert_eq!((message.remaining, message.seconds), (32 << 20, 10 + 33));
    }

    /// Some data, then nothing for ever.
    struct Stuck(Option<Bytes>);

    impl http_body::Body for Stuck {
        type Data = Bytes;
        type Error = Status;

        fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
            self.0.take().map_or(Poll::Pending, |data| Poll::Ready(Some(Ok(Frame::data(data)))))
        }
    }

    fn stuck(data: &'static [u8]) -> Body {
        Body::new(Stuck(Some(Bytes::from_static(data))))
    }

    #[tokio::test]
    async fn a_message_that_does_not_come_is_given_up() {
        let budget = Arc::new(Budget::new(1000, 1000));
        let message = Message::new(budget.charge(None, Purpose::Requests));
        let mut body = Received { body: stuck(&[0, 0, 0, 2, 88, 1, 2]), message, second: None, _in_use: None };
        let frame = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await.unwrap().unwrap();
        assert_eq!((frame.data_ref().map(Bytes::len), budget.held()), (Some(7), 600));
        body.message.seconds = 1;
        // While nobody waits for it, no second is counted but the one that had begun.
        let wait = poll_fn(|context| Pin::new(&mut body).poll_frame(context));
        assert!(timeout(SECOND / 10, wait).await.is_err());
        sleep(SECOND * 3).await;
        let begun = Instant::now();
        let frame = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await;
        let refusal = frame.unwrap().unwrap_err();
        assert_eq!(refusal.code(), tonic::Code::DeadlineExceeded);
        assert!(refusal.message().contains("598 bytes of it have not come"), "{refusal}");
        assert!(begun.elapsed() >= SECOND, "{:?}", begun.elapsed());
        drop(body);
        assert_eq!(budget.held(), 0);
    }

    #[tokio::test]
    async fn what_is_sent_counts_until_the_network_has_taken_it() {
        let budget = Arc::new(Budget::new(1000, 1000));
        let mut body = Sent { body: stuck(&[7; 600]), budget: budget.clone(), from: None };
        let frame = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await.unwrap().unwrap();
        let data = frame.into_data().unwrap();
        let rest = data.slice(100..);
        drop((data, body));
        assert_eq!((&rest[..], budget.held()), (&[7; 500][..], 600));
        drop(rest);
        assert_eq!(budget.held(), 0);
    }
}
