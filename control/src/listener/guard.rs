//! A connection that keeps its slot only while it is used in time.

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

use super::room::{Exchange, Slot};

/// The longest a client may take for a request, headers and all, and for its first stream.
const REQUEST: Duration = Duration::from_secs(10);
/// The longest it may take to receive an answer.
const ANSWER: Duration = Duration::from_secs(30);
/// The longest a connection may be unused.
const IDLE: Duration = Duration::from_secs(75);

/// What a connection must keep to.
#[derive(Clone, Debug)]
pub enum Pace {
    /// HTTP/1: a request must come whole within a time, its answer go within another, and the next request begin within a third.
    Requests {
        /// The requests of this connection.
        exchange: Arc<Exchange>,
        /// For a request.
        request: Duration,
        /// For its answer.
        answer: Duration,
        /// Between two.
        idle: Duration,
    },
    /// HTTP/2: a first stream must be opened within a time, and none may be missing for another. A connection with a stream is used.
    Streams {
        /// The streams of this connection.
        activity: Arc<Activity>,
        /// Until the first one.
        first: Duration,
        /// Without any.
        idle: Duration,
    },
    /// None.
    Free,
}

impl Pace {
    /// That of HTTP/1.
    pub fn requests(exchange: Arc<Exchange>) -> Self {
        Self::Requests { exchange, request: REQUEST, answer: ANSWER, idle: IDLE }
    }

    /// That of HTTP/2.
    pub fn streams(activity: Arc<Activity>) -> Self {
        Self::Streams { activity, first: REQUEST, idle: IDLE }
    }
}

/// How many streams of a connection are in use.
#[derive(Debug, Default)]
pub struct Activity {
    streams: AtomicUsize,
    /// When the last one ended.
    ended: Mutex<Option<Instant>>,
}

/// A stream in use, until it is dropped.
#[derive(Debug)]
pub struct InUse(Arc<Activity>);

impl Activity {
    /// Another stream is in use.
    pub fn begin(self: &Arc<Self>) -> InUse {
        self.streams.fetch_add(1, Relaxed);
        InUse(self.clone())
    }

    fn is_used(&self) -> bool {
        self.streams.load(Relaxed) > 0
    }

    fn ended(&self) -> Option<Instant> {
        *self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        *self.0.ended.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        self.0.streams.fetch_sub(1, Relaxed);
    }
}

/// HTTP/1: how far the request of a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    /// There is none.
    Idle,
    /// A part of it has come.
    Coming,
    /// All of it has come, and nothing of its answer has gone.
    Come,
    /// A part of its answer has gone.
    Answering,
}

/// A connection with a slot. Reading and writing fail once the slot is gone or the time is over, so whoever serves it closes it.
#[derive(Debug)]
pub struct Guard<S> {
    stream: S,
    slot: Slot,
    from: Option<IpAddr>,
    pace: Pace,
    timer: Pin<Box<Sleep>>,
    progress: Progress,
    /// HTTP/2: whether the slot is held.
    is_held: bool,
}

impl<S> Guard<S> {
    /// Begins to watch a connection.
    pub fn new(stream: S, slot: Slot, pace: Pace) -> Self {
        let first = match &pace {
            Pace::Requests { request, .. } => *request,
            Pace::Streams { first, .. } => *first,
            Pace::Free => Duration::ZERO,
        };
        if matches!(pace, Pace::Free) {
            slot.hold();
        }
        let timer = Box::pin(sleep_until(Instant::now() + first));
        Self { stream, slot, from: None, pace, timer, progress: Progress::Coming, is_held: false }
    }

    /// With the address that the log names.
    pub fn seen_from(self, from: IpAddr) -> Self {
        Self { from: Some(from), ..self }
    }

    /// The connection.
    pub fn get_ref(&self) -> &S {
        &self.stream
    }

    /// What it keeps to.
    pub fn pace(&self) -> &Pace {
        &self.pace
    }

    /// Whether it may go on; wakes the task when it may not any more.
    fn check(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        if self.slot.poll_superseded(context) {
            return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "gave way to newer connections"));
        }
        if matches!(self.pace, Pace::Free) {
            return Ok(());
        }
        if let Pace::Streams { activity, .. } = &self.pace {
            let is_used = activity.is_used();
            if is_used != self.is_held {
                self.is_held = is_used;
                if is_used { self.slot.hold() } else { self.slot.release() }
            }
        }
        if let Pace::Requests { exchange, answer, .. } = &self.pace
            && matches!(self.progress, Progress::Idle | Progress::Coming)
            && exchange.is_open()
        {
            self.progress = Progress::Come;
            self.timer.as_mut().reset(Instant::now() + *answer);
        }
        while self.timer.as_mut().poll(context).is_ready() {
            let next = match &self.pace {
                Pace::Streams { activity, idle, .. } if activity.is_used() => Instant::now() + *idle,
                Pace::Streams { activity, idle, .. } => match activity.ended().map(|ended| ended + *idle) {
                    Some(next) if next > Instant::now() => next,
                    _ => return Err(self.late()),
                },
                Pace::Requests { .. } | Pace::Free => return Err(self.late()),
            };
            self.timer.as_mut().reset(next);
        }
        Ok(())
    }

    fn late(&self) -> io::Error {
        self.slot.expire(self.from);
        io::Error::new(io::ErrorKind::TimedOut, "too slow, or unused for too long")
    }

    /// Bytes have come.
    fn received(&mut self) {
        if let Pace::Requests { request, .. } = self.pace
            && self.progress == Progress::Idle
        {
            self.progress = Progress::Coming;
            self.timer.as_mut().reset(Instant::now() + request);
        }
    }

    /// Bytes have gone. Those that answer no request put no deadline off.
    fn sent(&mut self) {
        if self.progress == Progress::Come {
            self.progress = Progress::Answering;
        }
    }

    /// All bytes have gone: whoever serves HTTP/1 flushes once an answer is written, and else while it waits.
    fn flushed(&mut self) {
        if let Pace::Requests { exchange, idle, .. } = &self.pace
            && self.progress == Progress::Answering
        {
            self.progress = Progress::Idle;
            exchange.end();
            self.timer.as_mut().reset(Instant::now() + *idle);
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Guard<S> {
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

impl<S: AsyncWrite + Unpin> AsyncWrite for Guard<S> {
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

    use super::super::room::{Limits, Reason, Room};
    use super::*;

    const REQUEST: Duration = Duration::from_millis(400);
    const ANSWER: Duration = Duration::from_millis(600);
    const IDLE: Duration = Duration::from_millis(800);

    fn guarded(room: &Arc<Room>, pace: Pace) -> (DuplexStream, Guard<DuplexStream>) {
        let (client, server) = duplex(4096);
        (client, Guard::new(server, room.admit([192, 0, 2, 1].into()).unwrap(), pace))
    }

    /// One with requests.
    fn asked(room: &Arc<Room>) -> (DuplexStream, Guard<DuplexStream>, Arc<Exchange>) {
        let (client, server) = duplex(4096);
        let slot = room.admit([192, 0, 2, 1].into()).unwrap();
        let exchange = slot.exchange();
        let pace = Pace::Requests { exchange: exchange.clone(), request: REQUEST, answer: ANSWER, idle: IDLE };
        (client, Guard::new(server, slot, pace), exchange)
    }

    fn room() -> Arc<Room> {
        Room::new("test", Limits { connections: 10, per_address: 10 })
    }

    #[tokio::test]
    async fn a_request_that_comes_byte_by_byte_ends_at_the_deadline_and_so_does_silence() {
        for is_silent in [true, false] {
            let room = room();
            let (mut client, mut server, _) = asked(&room);
            let begun = Instant::now();
            let slow = tokio::spawn(async move {
                while is_silent || client.write_all(b"x").await.is_ok() {
                    tokio::time::sleep(REQUEST / 20).await;
                }
            });
            let error = loop {
                match server.read(&mut [0; 16]).await {
                    Ok(_) => {}
                    Err(error) => break error,
                }
            };
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
            assert!(begun.elapsed() >= REQUEST);
            assert_eq!(room.refused(Reason::Slow), 1);
            // It stays so, and whoever asks again doesn't fail otherwise.
            assert!(server.write(b"x").await.is_err());
            slow.abort();
        }
    }

    #[tokio::test]
    async fn requests_in_time_go_on_and_the_next_one_may_take_longer_to_begin() {
        let room = room();
        let (mut client, mut server, exchange) = asked(&room);
        for _ in 0..3 {
            client.write_all(b"request").await.unwrap();
            assert_eq!(server.read(&mut [0; 16]).await.unwrap(), 7);
            exchange.begin();
            // Nothing of the answer is there yet.
            server.flush().await.unwrap();
            assert!(exchange.is_open());
            server.write_all(b"response").await.unwrap();
            server.flush().await.unwrap();
            assert!(!exchange.is_open());
            tokio::time::sleep(IDLE * 5 / 8).await;
        }
        assert_eq!(room.refused(Reason::Slow), 0);
        assert_eq!(server.read(&mut [0; 16]).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(room.refused(Reason::Slow), 1);
    }

    #[tokio::test]
    async fn what_answers_no_request_puts_no_deadline_off() {
        let room = room();
        let (_client, mut server, _) = asked(&room);
        let begun = Instant::now();
        server.write_all(b"unasked").await.unwrap();
        server.flush().await.unwrap();
        assert_eq!(server.read(&mut [0; 16]).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!(begun.elapsed() < IDLE, "{:?}", begun.elapsed());
    }

    #[tokio::test]
    async fn an_answer_gives_way_to_nobody_but_must_be_taken_in_time() {
        let room = Room::new("test", Limits { connections: 4, per_address: 4 });
        let (mut client, mut server, exchange) = asked(&room);
        client.write_all(b"request").await.unwrap();
        assert_eq!(server.read(&mut [0; 16]).await.unwrap(), 7);
        exchange.begin();
        let begun = Instant::now();
        let answering = tokio::spawn(async move { server.write_all(&[0; 8192]).await });
        let _newer: Vec<Slot> = (0..8).map(|_| room.admit([192, 0, 2, 1].into()).unwrap()).collect();
        assert_eq!(answering.await.unwrap().unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!(begun.elapsed() >= ANSWER, "{:?}", begun.elapsed());
        assert_eq!((room.refused(Reason::Superseded), room.refused(Reason::Slow)), (5, 1));
    }

    #[tokio::test]
    async fn a_connection_is_used_while_it_has_a_stream() {
        let room = room();
        let pace = |activity: &Arc<Activity>| Pace::Streams { activity: activity.clone(), first: REQUEST, idle: IDLE };
        let activity = Arc::<Activity>::default();
        let (_client, mut server) = guarded(&room, pace(&activity));
        let stream = activity.begin();
        let begun = Instant::now();
        tokio::spawn(async move {
            tokio::time::sleep(2 * IDLE).await;
            drop(stream);
        });
        assert_eq!(server.read(&mut [0; 16]).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!(begun.elapsed() >= 3 * IDLE, "{:?}", begun.elapsed());
        let (_client, mut server) = guarded(&room, pace(&Arc::default()));
        let begun = Instant::now();
        assert!(server.read(&mut [0; 16]).await.is_err());
        assert!(begun.elapsed() >= REQUEST);
    }

    #[tokio::test]
    async fn whoever_has_to_give_way_sees_it_at_once() {
        let room = Room::new("test", Limits { connections: 1, per_address: 1 });
        let (_client, mut server, _) = asked(&room);
        let reading = tokio::spawn(async move { server.read(&mut [0; 16]).await });
        tokio::task::yield_now().await;
        let _newer = room.admit([192, 0, 2, 1].into()).unwrap();
        assert_eq!(reading.await.unwrap().unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
    }
}
