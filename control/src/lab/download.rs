//! A download of which every byte is checked: a server that sends at a bounded rate, and a client that notes each time in
//! which nothing came.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ring::digest::{Context, Digest, SHA256};

use super::Host;
use super::peers::join;

/// How long either side waits for the other before it gives up.
const PATIENCE: Duration = Duration::from_secs(10);
/// Bytes that are sent at once.
const BLOCK: usize = 16 * 1024;

/// A download that runs.
#[derive(Debug)]
pub struct Download {
    seen: SocketAddr,
    bytes: u64,
    begun: Instant,
    got: Arc<AtomicU64>,
    sender: JoinHandle<io::Result<Digest>>,
    receiver: JoinHandle<io::Result<Received>>,
}

/// What came of it.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Bytes that the client got.
    pub bytes: u64,
    /// Whether they are all that was sent, in order: the same SHA-256 on both sides.
    pub whole: bool,
    /// The beginning of the client's SHA-256, for people.
    pub checksum: u32,
    /// The longest time in which nothing came.
    pub longest: Duration,
    /// From the first byte to the last.
    pub lasted: Duration,
}

#[derive(Debug)]
struct Received {
    digest: Digest,
    longest: Duration,
    lasted: Duration,
}

impl Download {
    /// Begins one from a server that listens at an address of its host, and returns when that has seen the client. At most
    /// `rate` bytes are sent in a second.
    ///
    /// # Errors
    /// When the two don't find each other in time.
    pub fn begin(server: &Host, at: SocketAddr, client: &Host, bytes: u64, rate: u64) -> io::Result<Self> {
        // A socket belongs to the host on which it was made, whichever thread uses it.
        let listener = join(server.run(move || TcpListener::bind(at)))?;
        let stream = join(client.run(move || TcpStream::connect_timeout(&at, PATIENCE)))?;
        let (served, seen) = accept(&listener)?;
        let got = Arc::new(AtomicU64::new(0));
        let progress = got.clone();
        Ok(Self {
            seen: SocketAddr::new(seen.ip().to_canonical(), seen.port()),
            bytes,
            begun: Instant::now(),
            got,
            sender: thread::spawn(move || send(served, bytes, rate)),
            receiver: thread::spawn(move || receive(stream, &progress)),
        })
    }

    /// The client as the server sees it.
    pub fn seen(&self) -> SocketAddr {
        self.seen
    }

    /// Bytes that have come so far.
    pub fn got(&self) -> u64 {
        self.got.load(Ordering::Relaxed)
    }

    /// Since when it runs.
    pub fn begun(&self) -> Instant {
        self.begun
    }

    /// Whether something is still to come.
    pub fn runs(&self) -> bool {
        self.got() < self.bytes && !self.receiver.is_finished()
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// When nothing came, or could be sent, for too long.
    pub fn end(self) -> io::Result<Outcome> {
        let received = join(self.receiver)?;
        let sent = join(self.sender)?;
        let (digest, bytes) = (received.digest.as_ref(), self.got.load(Ordering::Relaxed));
        Ok(Outcome {
            bytes,
            whole: bytes == self.bytes && digest == sent.as_ref(),
            checksum: digest.iter().take(4).fold(0, |sum, byte| (sum << 8) | u32::from(*byte)),
            longest: received.longest,
            lasted: received.lasted,
        })
    }
}

/// Takes the one connection that is on its way.
fn accept(listener: &TcpListener) -> io::Result<(TcpStream, SocketAddr)> {
    listener.set_nonblocking(true)?;
    let until = Instant::now() + PATIENCE;
    loop {
        match listener.accept() {
            Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < until => {
                thread::sleep(Duration::from_millis(2));
            }
            other => return other,
        }
    }
}

fn send(mut stream: TcpStream, bytes: u64, rate: u64) -> io::Result<Digest> {
    stream.set_write_timeout(Some(PATIENCE))?;
    let (mut noise, mut context, mut block) = (Noise(bytes), Context::new(&SHA256), [0; BLOCK]);
    let (mut left, mut next) = (bytes, Instant::now());
    while left > 0 {
        let piece = left.min(BLOCK as u64);
        let data = &mut block[..piece as usize];
        noise.fill(data);
        context.update(data);
        stream.write_all(data)?;
        left -= piece;
        // Time that was lost is not made up for: the rate is a bound.
        next = (next + Duration::from_nanos(piece * 1_000_000_000 / rate.max(1))).max(Instant::now());
        thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    Ok(context.finish())
}

fn receive(mut stream: TcpStream, got: &AtomicU64) -> io::Result<Received> {
    stream.set_read_timeout(Some(PATIENCE))?;
    let (mut context, mut data) = (Context::new(&SHA256), vec![0; 4 * BLOCK]);
    let begun = Instant::now();
    let (mut last, mut longest) = (begun, Duration::ZERO);
    loop {
        let length = stream.read(&mut data)?;
        let now = Instant::now();
        if length == 0 {
            return Ok(Received { digest: context.finish(), longest, lasted: last - begun });
        }
        longest = longest.max(now - last);
        last = now;
        context.update(&data[..length]);
        got.fetch_add(length as u64, Ordering::Relaxed);
    }
}

/// Bytes that don't repeat (SplitMix64), so that a piece that is missing, doubled or in the wrong place shows.
struct Noise(u64);

impl Noise {
    fn fill(&mut self, data: &mut [u8]) {
        for word in data.chunks_mut(8) {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut mixed = self.0;
            mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            word.copy_from_slice(&(mixed ^ (mixed >> 31)).to_le_bytes()[..word.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A connection of this host to itself.
    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (accept(&listener).unwrap().0, client)
    }

    #[test]
    fn what_came_whole_has_the_same_sum_on_both_sides() {
        let (server, client) = pair();
        let sender = thread::spawn(move || send(server, 100_003, 10_000_000));
        let got = AtomicU64::new(0);
        let received = receive(client, &got).unwrap();
        let sent = sender.join().unwrap().unwrap();
        assert_eq!((received.digest.as_ref(), got.into_inner()), (sent.as_ref(), 100_003));
        assert!(received.lasted >= Duration::from_millis(9), "faster than it may be: {received:?}");
    }

    #[test]
    fn a_pause_is_noted() {
        let (mut server, client) = pair();
        let sender = thread::spawn(move || {
            server.write_all(b"half").unwrap();
            thread::sleep(Duration::from_millis(60));
            server.write_all(b"half").unwrap();
        });
        let received = receive(client, &AtomicU64::new(0)).unwrap();
        sender.join().unwrap();
        assert!(received.longest >= Duration::from_millis(50), "{received:?}");
    }
}
