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

use super::room::Slot;

/// The longest a client may take for a request, headers and all, and for its first stream.
const REQUEST: Duration = Duration::from_secs(10);
/// The longest a connection may be unused.
const IDLE: Duration = Duration::from_secs(75);

/// What a connection must keep to.
#[derive(Clone, Debug)]
pub enum Pace {
    /// HTTP/1: a request must come whole within a time, and the next one within another.
    Requests {
        /// For a request.
        request: Duration,
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
    pub fn requests() -> Self {
        Self::Requests { request: REQUEST, idle: IDLE }
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

/// A connection with a slot. Reading and writing fail once the slot is gone or the time is over, so whoever serves it closes it.
#[derive(Debug)]
pub struct Guard<S> {
    stream: S,
    slot: Slot,
    from: Option<IpAddr>,
    pace: Pace,
    timer: Pin<Box<Sleep>>,
    /// HTTP/1: whether a part of a request has come that isn't answered.
    is_asked: bool,
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
        Self { stream, slot, from: None, pace, timer, is_asked: true, is_held: false }
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
            && !self.is_asked
        {
            self.is_asked = true;
            self.timer.as_mut().reset(Instant::now() + request);
        }
    }

    /// Bytes have gone.
    fn sent(&mut self) {
        if let Pace::Requests { idle, .. } = self.pace {
            if self.is_asked {
                self.is_asked = false;
                self.slot.release();
            }
            self.timer.as_mut().reset(Instant::now() + idle);
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
        Pin::new(&mut self.stream).poll_flush(context)
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
    const IDLE: Duration = Duration::from_millis(800);

    fn requests() -> Pace {
        Pace::Requests { request: REQUEST, idle: IDLE }
    }

    fn guarded(room: &Arc<Room>, pace: Pace) -> (DuplexStream, Guard<DuplexStream>) {
        let (client, server) = duplex(4096);
        (client, Guard::new(server, room.admit([192, 0, 2, 1].into()).unwrap(), pace))
    }

    fn room() -> Arc<Room> {
        Room::new("test", Limits { connections: 10, per_address: 10 })
    }

    #[tokio::test]
    async fn a_request_that_comes_byte_by_byte_ends_at_the_deadline_and_so_does_silence() {
        for is_silent in [true, false] {
            let room = room();
            let (mut client, mut server) = guarded(&room, requests());
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
        let (mut client, mut server) = guarded(&room, requests());
        for _ in 0..3 {
            client.write_all(b"request").await.unwrap();
            assert_eq!(server.read(&mut [0; 16]).await.unwrap(), 7);
            server.write_all(b"response").await.unwrap();
            tokio::time::sleep(IDLE * 5 / 8).await;
        }
        assert_eq!(room.refused(Reason::Slow), 0);
        assert_eq!(server.read(&mut [0; 16]).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(room.refused(Reason::Slow), 1);
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
        let (_client, mut server) = guarded(&room, requests());
        let reading = tokio::spawn(async move { server.read(&mut [0; 16]).await });
        tokio::task::yield_now().await;
        let _newer = room.admit([192, 0, 2, 1].into()).unwrap();
        assert_eq!(reading.await.unwrap().unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
    }
}
