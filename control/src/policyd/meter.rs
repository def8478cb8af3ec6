//! What requests cost, noted before they are taken in: a stream makes its connection one that is used, and a message counts from the
//! moment that its length has come, not when all of it has.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http_body::{Frame, SizeHint};
use prost::bytes::Bytes;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::Request;
use tower::{Layer, Service};

use super::budget::{Budget, Charge};
use super::listen::Connection;
use crate::listener::InUse;

/// The prefix of a message: whether it is compressed, and its length (gRPC over HTTP/2, "Length-Prefixed-Message").
const PREFIX: usize = 5;

/// Puts meters around requests.
#[derive(Clone, Debug)]
pub(super) struct Meter(pub(super) Arc<Budget>);

impl<S> Layer<S> for Meter {
    type Service = Metered<S>;

    fn layer(&self, inner: S) -> Metered<S> {
        Metered { inner, budget: self.0.clone() }
    }
}

/// A service whose requests have meters.
#[derive(Clone, Debug)]
pub(super) struct Metered<S> {
    inner: S,
    budget: Arc<Budget>,
}

impl<S: Service<Request<Body>>> Service<Request<Body>> for Metered<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let (parts, body) = request.into_parts();
        let connection = parts.extensions.get::<Connection>();
        let charge = self.budget.charge(connection.and_then(|it| it.remote));
        let in_use = connection.map(|it| it.activity.begin());
        let message = Message { prefix: [0; PREFIX], filled: 0, remaining: 0, charge };
        self.inner.call(Request::from_parts(parts, Body::new(Measured { body, message, _in_use: in_use })))
    }
}

/// A request's messages as they come.
struct Measured {
    body: Body,
    message: Message,
    _in_use: Option<InUse>,
}

/// The message that comes.
struct Message {
    prefix: [u8; PREFIX],
    filled: usize,
    remaining: usize,
    charge: Charge,
}

impl Message {
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
                self.charge.set(self.remaining)?;
            }
        }
        Ok(())
    }

    /// More is asked for: what has come whole was taken.
    fn is_taken(&mut self) {
        if self.remaining == 0 {
            // Less is never refused.
            let _ = self.charge.set(0);
        }
    }
}

impl http_body::Body for Measured {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        self.message.is_taken();
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_counts_as_soon_as_its_length_has_come_and_until_it_is_taken() {
        let budget = Arc::new(Budget::new(1000, 1000));
        let mut message = Message { prefix: [0; PREFIX], filled: 0, remaining: 0, charge: budget.charge(None) };
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
    }
}
