//! A connection with a slot and deadlines: reads and writes fail once it is evicted or times out.

use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

use crate::listener::limiter::{Exchange, Slot};

/// Timeout of receiving a whole request, and of opening the first stream.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout of sending a response.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);
/// Timeout of an idle connection.
const IDLE_TIMEOUT: Duration = Duration::from_secs(75);

/// The deadlines of a connection.
#[derive(Clone, Debug)]
pub enum Deadlines {
    /// HTTP/1: timeouts of receiving a request, of sending its response, and of being idle until the next request.
    Http1 {
        /// The requests of this connection.
        exchange: Arc<Exchange>,
        /// Timeout of receiving a request.
        request: Duration,
        /// Timeout of sending its response.
        response: Duration,
        /// Timeout between two requests.
        idle: Duration,
    },
    /// HTTP/2: timeouts of opening the first stream, and of being idle without streams. A connection with a stream is
    /// in use.
    Http2 {
        /// The streams of this connection.
        activity: Arc<StreamCounter>,
        /// Timeout of the first stream.
        first_stream: Duration,
        /// Timeout without streams.
        idle: Duration,
    },
}

impl Deadlines {
    /// The default timeouts of HTTP/1.
    pub fn http1(exchange: Arc<Exchange>) -> Self {
        Self::Http1 { exchange, request: REQUEST_TIMEOUT, response: RESPONSE_TIMEOUT, idle: IDLE_TIMEOUT }
    }

    /// The default timeouts of HTTP/2.
    pub fn http2(activity: Arc<StreamCounter>) -> Self {
        Self::Http2 { activity, first_stream: REQUEST_TIMEOUT, idle: IDLE_TIMEOUT }
    }
}

/// The number of open streams of a connection.
#[derive(Debug, Default)]
pub struct StreamCounter {
    streams: AtomicUsize,
    /// When a stream last ended.
    ended: Mutex<Option<Instant>>,
}

/// An open stream, until dropped.
#[derive(Debug)]
pub struct OpenStream(Arc<StreamCounter>);

impl StreamCounter {
    /// Counts another open stream.
    pub fn open(self: &Arc<Self>) -> OpenStream {
        self.streams.fetch_add(1, Relaxed);
        OpenStream(self.clone())
    }

    fn is_active(&self) -> bool {
        self.streams.load(Relaxed) > 0
    }

    fn ended(&self) -> Option<Instant> {
        *self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        *self.0.ended.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        self.0.streams.fetch_sub(1, Relaxed);
    }
}

/// HTTP/1: the progress of the current request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    /// No request.
    Idle,
    /// Partly received.
    Receiving,
    /// Fully received, nothing of the response sent.
    Received,
    /// The response is partly sent.
    Responding,
}

/// A connection with a slot and deadlines. Reads and writes fail once it is evicted or times out, so the server closes
/// it.
#[derive(Debug)]
pub struct ConnectionGuard<S> {
    stream: S,
    slot: Slot,
    from: Option<IpAddr>,
    requires_certificate: bool,
    deadlines: Deadlines,
    timer: Pin<Box<Sleep>>,
    progress: Progress,
    /// HTTP/2: whether the slot is marked as in use.
    is_in_use: bool,
}

impl<S> ConnectionGuard<S> {
    /// Wraps a connection and starts its first deadline.
    pub fn new(stream: S, slot: Slot, deadlines: Deadlines) -> Self {
        let first = match &deadlines {
            Deadlines::Http1 { request, .. } => *request,
            Deadlines::Http2 { first_stream: first, .. } => *first,
        };
        let timer = Box::pin(sleep_until(Instant::now() + first));
        let (from, requires_certificate, is_in_use) = Default::default();
        let progress = Progress::Receiving;
        Self { stream, slot, from, requires_certificate, deadlines, timer, progress, is_in_use }
    }

    /// Sets the remote address for the log.
    pub fn with_remote(self, from: IpAddr) -> Self {
        Self { from: Some(from), ..self }
    }

    /// Sets whether its client is identified by its certificate, also if it has shown none.
    pub fn requiring_certificate(self, requires_certificate: bool) -> Self {
        Self { requires_certificate, ..self }
    }

    /// Whether its client is identified by its certificate.
    pub fn requires_certificate(&self) -> bool {
        self.requires_certificate
    }

    /// The connection.
    pub fn get_ref(&self) -> &S {
        &self.stream
    }

    pub fn deadlines(&self) -> &Deadlines {
        &self.deadlines
    }

    /// Checks for eviction and deadlines, and registers the task to be woken by them.
    fn check(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        if self.slot.poll_evicted(context) {
            return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "evicted by newer connections"));
        }
        if let Deadlines::Http2 { activity, .. } = &self.deadlines {
            let is_active = activity.is_active();
            if is_active != self.is_in_use {
                self.is_in_use = is_active;
                if is_active { self.slot.mark_in_use() } else { self.slot.mark_idle() }
            }
        }
        if let Deadlines::Http1 { exchange, response, .. } = &self.deadlines
            && matches!(self.progress, Progress::Idle | Progress::Receiving)
            && exchange.is_open()
        {
            self.progress = Progress::Received;
            self.timer.as_mut().reset(Instant::now() + *response);
        }
        while self.timer.as_mut().poll(context).is_ready() {
            let next = match &self.deadlines {
                Deadlines::Http2 { activity, idle, .. } if activity.is_active() => Instant::now() + *idle,
                Deadlines::Http2 { activity, idle, .. } => match activity.ended().map(|ended| ended + *idle) {
                    Some(next) if next > Instant::now() => next,
                    _ => return Err(self.time_out()),
                },
                Deadlines::Http1 { .. } => return Err(self.time_out()),
            };
            self.timer.as_mut().reset(next);
        }
        Ok(())
    }

    fn time_out(&self) -> io::Error {
        self.slot.timed_out(self.from);
        io::Error::new(io::ErrorKind::TimedOut, "too slow, or idle for too long")
    }

    /// Bytes were received.
    fn received(&mut self) {
        if let Deadlines::Http1 { request, .. } = self.deadlines
            && self.progress == Progress::Idle
        {
            self.progress = Progress::Receiving;
            self.timer.as_mut().reset(Instant::now() + request);
        }
    }

    /// Bytes were sent. Bytes outside of a response don't extend a deadline.
    fn sent(&mut self) {
        if self.progress == Progress::Received {
            self.progress = Progress::Responding;
        }
    }

    /// All bytes were sent: the HTTP/1 server flushes after a response, and otherwise while it waits.
    fn flushed(&mut self) {
        if let Deadlines::Http1 { exchange, idle, .. } = &self.deadlines
            && self.progress == Progress::Responding
        {
            self.progress = Progress::Idle;
            exchange.end();
            self.timer.as_mut().reset(Instant::now() + *idle);
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for ConnectionGuard<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check(context)?;
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        if buffer.filled().len() > before {
            self.received();
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ConnectionGuard<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.check(context)?;
        let count = ready!(Pin::new(&mut self.stream).poll_write(context, bytes))?;
        self.sent();
        Poll::Ready(Ok(count))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.check(context)?;
        let count = ready!(Pin::new(&mut self.stream).poll_write_vectored(context, bytes))?;
        self.sent();
        Poll::Ready(Ok(count))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut self.stream).poll_flush(context))?;
        self.flushed();
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

    use super::*;
    use crate::listener::limiter::{ConnectionLimiter, Limits, RejectReason};

    const REQUEST_TIMEOUT: Duration = Duration::from_millis(400);
    const RESPONSE_TIMEOUT: Duration = Duration::from_millis(600);
    const IDLE_TIMEOUT: Duration = Duration::from_millis(800);

    fn guarded(
        limiter: &Arc<ConnectionLimiter>,
        deadlines: Deadlines,
    ) -> (DuplexStream, ConnectionGuard<DuplexStream>) {
        let (client, server) = duplex(4096);
        (client, ConnectionGuard::new(server, limiter.admit([192, 0, 2, 1].into()).unwrap(), deadlines))
    }

    /// A connection with the deadlines of HTTP/1.
    fn http1(limiter: &Arc<ConnectionLimiter>) -> (DuplexStream, ConnectionGuard<DuplexStream>, Arc<Exchange>) {
        let (client, server) = duplex(4096);
        let slot = limiter.admit([192, 0, 2, 1].into()).unwrap();
        let exchange = slot.exchange();
        let deadlines = Deadlines::Http1 {
            exchange: exchange.clone(),
            request: REQUEST_TIMEOUT,
            response: RESPONSE_TIMEOUT,
            idle: IDLE_TIMEOUT,
        };
        (client, ConnectionGuard::new(server, slot, deadlines), exchange)
    }

    fn limiter() -> Arc<ConnectionLimiter> {
        ConnectionLimiter::new("test", Limits { connections: 10, per_address: 10 })
    }

    #[tokio::test]
    async fn slow_and_silent_requests_time_out() {
        for is_silent in [true, false] {
            let limiter = limiter();
            let (mut client, mut server, _) = http1(&limiter);
            let start = Instant::now();
            let slow = tokio::spawn(async move {
                while is_silent || client.write_all(b"x").await.is_ok() {
                    tokio::time::sleep(REQUEST_TIMEOUT / 20).await;
                }
            });
            let error = loop {
                match server.read(&mut [0; 16]).await {
                    Ok(_) => {}
                    Err(error) => break error,
                }
            };
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
            assert!(start.elapsed() >= REQUEST_TIMEOUT);
            assert_eq!(limiter.rejected(RejectReason::Slow), 1);
            // Later operations fail too.
            assert!(server.write(b"x").await.is_err());
            slow.abort();
        }
    }

    #[tokio::test]
    async fn each_request_has_its_own_deadlines() {
        let limiter = limiter();
        let (mut client, mut server, exchange) = http1(&limiter);
        for _ in 0..3 {
            client.write_all(b"request").await.unwrap();
            assert_eq!(server.read(&mut [0; 16]).await.unwrap(), 7);
            exchange.begin();
            // Nothing of the response is written yet.
            server.flush().await.unwrap();
            assert!(exchange.is_open());
            server.write_all(b"response").await.unwrap();
            server.flush().await.unwrap();
            assert!(!exchange.is_open());
            tokio::time::sleep(IDLE_TIMEOUT * 5 / 8).await;
        }
        assert_eq!(limiter.rejected(RejectReason::Slow), 0);
        assert_eq!(server.read(&mut [0; 16]).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(limiter.rejected(RejectReason::Slow), 1);
    }

    #[tokio::test]
    async fn bytes_outside_of_a_response_do_not_extend_the_deadline() {
        let limiter = limiter();
        let (_client, mut server, _) = http1(&limiter);
        let start = Instant::now();
        server.write_all(b"unsolicited").await.unwrap();
        server.flush().await.unwrap();
        assert_eq!(server.read(&mut [0; 16]).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!(start.elapsed() < IDLE_TIMEOUT, "{:?}", start.elapsed());
    }

    #[tokio::test]
    async fn a_response_is_not_evicted_but_times_out() {
        let limiter = ConnectionLimiter::new("test", Limits { connections: 4, per_address: 4 });
        let (mut client, mut server, exchange) = http1(&limiter);
        client.write_all(b"request").await.unwrap();
        assert_eq!(server.read(&mut [0; 16]).await.unwrap(), 7);
        exchange.begin();
        let start = Instant::now();
        let responding = tokio::spawn(async move { server.write_all(&[0; 8192]).await });
        let _newer: Vec<Slot> = (0..8).map(|_| limiter.admit([192, 0, 2, 1].into()).unwrap()).collect();
        assert_eq!(responding.await.unwrap().unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!(start.elapsed() >= RESPONSE_TIMEOUT, "{:?}", start.elapsed());
        assert_eq!((limiter.rejected(RejectReason::Superseded), limiter.rejected(RejectReason::Slow)), (5, 1));
    }

    #[tokio::test]
    async fn a_connection_with_a_stream_is_not_idle() {
        let limiter = limiter();
        let deadlines = |activity: &Arc<StreamCounter>| Deadlines::Http2 {
            activity: activity.clone(),
            first_stream: REQUEST_TIMEOUT,
            idle: IDLE_TIMEOUT,
        };
        let activity = Arc::<StreamCounter>::default();
        let (_client, mut server) = guarded(&limiter, deadlines(&activity));
        let stream = activity.open();
        let start = Instant::now();
        tokio::spawn(async move {
            tokio::time::sleep(2 * IDLE_TIMEOUT).await;
            drop(stream);
        });
        assert_eq!(server.read(&mut [0; 16]).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!(start.elapsed() >= 3 * IDLE_TIMEOUT, "{:?}", start.elapsed());
        let (_client, mut server) = guarded(&limiter, deadlines(&Arc::default()));
        let start = Instant::now();
        assert!(server.read(&mut [0; 16]).await.is_err());
        assert!(start.elapsed() >= REQUEST_TIMEOUT);
    }

    #[tokio::test]
    async fn an_evicted_connection_fails_at_once() {
        let limiter = ConnectionLimiter::new("test", Limits { connections: 1, per_address: 1 });
        let (_client, mut server, _) = http1(&limiter);
        let reading = tokio::spawn(async move { server.read(&mut [0; 16]).await });
        tokio::task::yield_now().await;
        let _newer = limiter.admit([192, 0, 2, 1].into()).unwrap();
        assert_eq!(reading.await.unwrap().unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
    }
}
