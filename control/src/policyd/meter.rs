//! Tower layer that charges requests and responses to the memory budget. A message is charged as soon as its length
//! prefix has arrived and must arrive in time; a response is charged until it is written to the network. An open stream
//! marks its connection as in use.

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
use super::listen::ConnectionInfo;
use crate::listener::OpenStream;

/// Length of a message's prefix: compressed flag and length (gRPC over HTTP/2, "Length-Prefixed-Message").
const PREFIX_LEN: usize = 5;
/// Unit in which a message's time is counted.
const SECOND: Duration = Duration::from_secs(1);
/// Time that a message may take to arrive, seconds, plus one second for each of these bytes.
const MESSAGE_SECONDS: usize = 10;
const BYTES_PER_SECOND: usize = 1_000_000;

#[derive(Clone, Debug)]
pub(super) struct MeterLayer(pub(super) Arc<Budget>);

impl<S> Layer<S> for MeterLayer {
    type Service = MeterService<S>;

    fn layer(&self, inner: S) -> MeterService<S> {
        MeterService { inner, budget: self.0.clone() }
    }
}

/// A service whose requests and responses are charged.
#[derive(Clone, Debug)]
pub(super) struct MeterService<S> {
    inner: S,
    budget: Arc<Budget>,
}

impl<S> Service<Request<Body>> for MeterService<S>
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
        let connection = parts.extensions.get::<ConnectionInfo>();
        let from = connection.and_then(|it| it.remote);
        let message = Message::new(self.budget.charge(from, Purpose::Requests));
        let in_use = connection.map(|it| it.activity.open());
        let body = Body::new(RequestBody { body, message, second: None, _in_use: in_use });
        let response = self.inner.call(Request::from_parts(parts, body));
        let budget = self.budget.clone();
        let charged = move |body| Body::new(ResponseBody { body, budget, from });
        Box::pin(async move { response.await.map(|response| response.map(charged)) })
    }
}

/// A request body whose messages are charged and timed.
struct RequestBody {
    body: Body,
    message: Message,
    /// Timer of the second that is being counted.
    second: Option<Pin<Box<Sleep>>>,
    _in_use: Option<OpenStream>,
}

/// The message that is being received.
struct Message {
    prefix: [u8; PREFIX_LEN],
    filled: usize,
    remaining: usize,
    /// Seconds that it may still take.
    seconds: usize,
    charge: Charge,
}

impl Message {
    fn new(charge: Charge) -> Self {
        Self { prefix: [0; PREFIX_LEN], filled: 0, remaining: 0, seconds: 0, charge }
    }

    /// Parses received bytes, which may span several messages, and charges each message by its prefix.
    fn receive(&mut self, mut data: &[u8]) -> Result<(), Status> {
        while !data.is_empty() {
            if self.remaining > 0 {
                let taken = self.remaining.min(data.len());
                self.remaining -= taken;
                data = &data[taken..];
                continue;
            }
            let taken = (PREFIX_LEN - self.filled).min(data.len());
            self.prefix[self.filled..self.filled + taken].copy_from_slice(&data[..taken]);
            self.filled += taken;
            data = &data[taken..];
            if self.filled == PREFIX_LEN {
                let [_, length @ ..] = self.prefix;
                self.remaining = u32::from_be_bytes(length) as usize;
                self.filled = 0;
                self.seconds = MESSAGE_SECONDS + self.remaining / BYTES_PER_SECOND;
                self.charge.set(self.remaining)?;
            }
        }
        Ok(())
    }

    /// The reader polls for more: a message that is complete has been consumed.
    fn release_if_complete(&mut self) {
        if self.remaining == 0 {
            self.charge.force(0);
        }
    }
}

impl RequestBody {
    /// Ready when the message has timed out. Only seconds in which the reader polls count: while the server processes
    /// earlier messages, flow control may keep the client from sending.
    fn poll_timeout(&mut self, context: &mut Context<'_>) -> Poll<Status> {
        while self.message.remaining > 0 {
            let second = self.second.get_or_insert_with(|| Box::pin(sleep(SECOND)));
            ready!(second.as_mut().poll(context));
            self.second = None;
            let Some(seconds) = self.message.seconds.checked_sub(1) else {
                let reason = format!("timeout of a message: {} bytes of it are missing", self.message.remaining);
                return Poll::Ready(Status::deadline_exceeded(reason));
            };
            self.message.seconds = seconds;
        }
        self.second = None;
        Poll::Pending
    }
}

impl http_body::Body for RequestBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        self.message.release_if_complete();
        let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(context) else {
            return self.poll_timeout(context).map(|status| Some(Err(status)));
        };
        if let Some(Ok(frame)) = &frame
            && let Some(data) = frame.data_ref()
            && let Err(status) = self.message.receive(data)
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

/// A response body whose bytes are charged.
struct ResponseBody {
    body: Body,
    budget: Arc<Budget>,
    from: Option<SocketAddr>,
}

impl ResponseBody {
    /// Charges the bytes until they are dropped: HTTP/2 buffers some hundred kilobytes of a stream whose client doesn't
    /// read.
    fn charge(&self, bytes: Bytes) -> Bytes {
        let mut charge = self.budget.charge(self.from, Purpose::Responses);
        charge.force(bytes.len());
        Bytes::from_owner(ChargedBytes { bytes, _charge: charge })
    }
}

/// Bytes with their charge.
struct ChargedBytes {
    bytes: Bytes,
    _charge: Charge,
}

impl AsRef<[u8]> for ChargedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl http_body::Body for ResponseBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        Poll::Ready(frame.map(|frame| frame.map(|frame| frame.map_data(|bytes| self.charge(bytes)))))
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
    fn a_message_is_charged_from_its_length_prefix_until_it_is_consumed() {
        let budget = Arc::new(Budget::new(1000, 1000));
        let mut message = Message::new(budget.charge(None, Purpose::Requests));
        message.receive(&[0, 0, 0]).unwrap();
        assert_eq!(budget.held_bytes(), 0);
        message.receive(&[2, 88]).unwrap();
        assert_eq!(budget.held_bytes(), 600);
        for _ in 0..599 {
            message.receive(&[7]).unwrap();
            message.release_if_complete();
        }
        assert_eq!(budget.held_bytes(), 600, "a byte is missing");
        message.receive(&[7]).unwrap();
        assert_eq!(budget.held_bytes(), 600);
        message.release_if_complete();
        assert_eq!(budget.held_bytes(), 0);
        // Several at once; one that is too long is rejected by its length.
        message.receive(&[0, 0, 0, 0, 1, 9, 0, 0, 0, 0, 2, 9]).unwrap();
        assert_eq!((budget.held_bytes(), message.remaining), (2, 1));
        let error = message.receive(&[9, 0, 0, 0, 3, 233]).unwrap_err();
        assert_eq!(error.code(), tonic::Code::ResourceExhausted);
        // Longer messages get more time.
        let mut message = Message::new(Arc::new(Budget::default()).charge(None, Purpose::Requests));
        message.receive(&[0, 2, 0, 0, 0]).unwrap();
        assert_eq!((message.remaining, message.seconds), (32 << 20, 10 + 33));
    }

    /// A body that yields one frame, then stalls.
    struct StalledBody(Option<Bytes>);

    impl http_body::Body for StalledBody {
        type Data = Bytes;
        type Error = Status;

        fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
            self.0.take().map_or(Poll::Pending, |data| Poll::Ready(Some(Ok(Frame::data(data)))))
        }
    }

    fn stalled(data: &'static [u8]) -> Body {
        Body::new(StalledBody(Some(Bytes::from_static(data))))
    }

    #[tokio::test]
    async fn an_incomplete_message_times_out_and_only_polled_time_counts() {
        let budget = Arc::new(Budget::new(1000, 1000));
        let message = Message::new(budget.charge(None, Purpose::Requests));
        let mut body = RequestBody { body: stalled(&[0, 0, 0, 2, 88, 1, 2]), message, second: None, _in_use: None };
        let frame = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await.unwrap().unwrap();
        assert_eq!((frame.data_ref().map(Bytes::len), budget.held_bytes()), (Some(7), 600));
        body.message.seconds = 1;
        // While it isn't polled, only the second that had begun counts.
        let wait = poll_fn(|context| Pin::new(&mut body).poll_frame(context));
        assert!(timeout(SECOND / 10, wait).await.is_err());
        sleep(SECOND * 3).await;
        let started = Instant::now();
        let frame = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await;
        let error = frame.unwrap().unwrap_err();
        assert_eq!(error.code(), tonic::Code::DeadlineExceeded);
        assert!(error.message().contains("598 bytes of it are missing"), "{error}");
        assert!(started.elapsed() >= SECOND, "{:?}", started.elapsed());
        drop(body);
        assert_eq!(budget.held_bytes(), 0);
    }

    #[tokio::test]
    async fn a_response_is_charged_until_its_last_byte_is_dropped() {
        let budget = Arc::new(Budget::new(1000, 1000));
        let mut body = ResponseBody { body: stalled(&[7; 600]), budget: budget.clone(), from: None };
        let frame = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await.unwrap().unwrap();
        let data = frame.into_data().unwrap();
        let rest = data.slice(100..);
        drop((data, body));
        assert_eq!((&rest[..], budget.held_bytes()), (&[7; 500][..], 600));
        drop(rest);
        assert_eq!(budget.held_bytes(), 0);
    }
}
