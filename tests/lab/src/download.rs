//! A verified download: a server that sends at a bounded rate, and a client that measures gaps; SHA-256 on both sides.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ring::digest::{Context, Digest, SHA256};

use crate::Host;
use crate::reflector::join;

/// Timeout of each side.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes per write.
const BLOCK: usize = 16 * 1024;

/// A running download.
#[derive(Debug)]
pub struct Download {
    client_address: SocketAddr,
    bytes: u64,
    started: Instant,
    received: Arc<AtomicU64>,
    sender: JoinHandle<io::Result<Digest>>,
    receiver: JoinHandle<io::Result<Received>>,
}

/// Result of a download.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Bytes received by the client.
    pub bytes: u64,
    /// Whether all bytes arrived in order: the same SHA-256 on both sides.
    pub is_intact: bool,
    /// The first 4 bytes of the client's SHA-256, for display.
    pub checksum: u32,
    /// The longest gap between received data.
    pub longest_gap: Duration,
    /// Time from the start to the last byte.
    pub duration: Duration,
}

#[derive(Debug)]
struct Received {
    digest: Digest,
    longest_gap: Duration,
    duration: Duration,
}

impl Download {
    /// Starts a download from a server at an address of its host; returns when the connection is established. Sends at
    /// most `rate` bytes per second.
    ///
    /// # Errors
    /// When the connection can't be established in time.
    pub fn start(server: &Host, at: SocketAddr, client: &Host, bytes: u64, rate: u64) -> io::Result<Self> {
        // A socket stays in the namespace in which it was created, whichever thread uses it.
        let listener = join(server.run(move || TcpListener::bind(at)))?;
        let stream = join(client.run(move || TcpStream::connect_timeout(&at, TIMEOUT)))?;
        let (accepted, peer) = accept(&listener)?;
        let received = Arc::new(AtomicU64::new(0));
        let progress = received.clone();
        Ok(Self {
            client_address: SocketAddr::new(peer.ip().to_canonical(), peer.port()),
            bytes,
            started: Instant::now(),
            received,
            sender: thread::spawn(move || send(accepted, bytes, rate)),
            receiver: thread::spawn(move || receive(stream, &progress)),
        })
    }

    /// The client's address at the server.
    pub fn client_address(&self) -> SocketAddr {
        self.client_address
    }

    /// Bytes received so far.
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Time of the start.
    pub fn started(&self) -> Instant {
        self.started
    }

    /// Whether the download is still running.
    pub fn is_running(&self) -> bool {
        self.received() < self.bytes && !self.receiver.is_finished()
    }

    /// Waits for the end of the download.
    ///
    /// # Errors
    /// When one side fails or times out.
    pub fn finish(self) -> io::Result<Outcome> {
        let received = join(self.receiver)?;
        let sent = join(self.sender)?;
        let (digest, bytes) = (received.digest.as_ref(), self.received.load(Ordering::Relaxed));
        Ok(Outcome {
            bytes,
            is_intact: bytes == self.bytes && digest == sent.as_ref(),
            checksum: digest.iter().take(4).fold(0, |sum, byte| (sum << 8) | u32::from(*byte)),
            longest_gap: received.longest_gap,
            duration: received.duration,
        })
    }
}

/// Accepts the pending connection.
fn accept(listener: &TcpListener) -> io::Result<(TcpStream, SocketAddr)> {
    listener.set_nonblocking(true)?;
    let deadline = Instant::now() + TIMEOUT;
    loop {
        match listener.accept() {
            Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < deadline => {
                thread::sleep(Duration::from_millis(2));
            }
            other => return other,
        }
    }
}

fn send(mut stream: TcpStream, bytes: u64, rate: u64) -> io::Result<Digest> {
    stream.set_write_timeout(Some(TIMEOUT))?;
    let (mut noise, mut context, mut block) = (Noise(bytes), Context::new(&SHA256), [0; BLOCK]);
    let (mut remaining, mut next) = (bytes, Instant::now());
    while remaining > 0 {
        let length = remaining.min(BLOCK as u64);
        let data = &mut block[..length as usize];
        noise.fill(data);
        context.update(data);
        stream.write_all(data)?;
        remaining -= length;
        // Lost time is not caught up: the rate is an upper bound.
        next = (next + Duration::from_nanos(length * 1_000_000_000 / rate.max(1))).max(Instant::now());
        thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    Ok(context.finish())
}

fn receive(mut stream: TcpStream, progress: &AtomicU64) -> io::Result<Received> {
    stream.set_read_timeout(Some(TIMEOUT))?;
    let (mut context, mut data) = (Context::new(&SHA256), vec![0; 4 * BLOCK]);
    let started = Instant::now();
    let (mut last, mut longest_gap) = (started, Duration::ZERO);
    loop {
        let length = stream.read(&mut data)?;
        let now = Instant::now();
        if length == 0 {
            return Ok(Received { digest: context.finish(), longest_gap, duration: last - started });
        }
        longest_gap = longest_gap.max(now - last);
        last = now;
        context.update(&data[..length]);
        progress.fetch_add(length as u64, Ordering::Relaxed);
    }
}

/// Pseudorandom bytes (SplitMix64): missing, duplicated or misplaced data changes the checksum.
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

    /// A loopback connection.
    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (accept(&listener).unwrap().0, client)
    }

    #[test]
    fn a_complete_transfer_has_the_same_checksum_on_both_sides() {
        let (server, client) = pair();
        let sender = thread::spawn(move || send(server, 100_003, 10_000_000));
        let progress = AtomicU64::new(0);
        let received = receive(client, &progress).unwrap();
        let sent = sender.join().unwrap().unwrap();
        assert_eq!((received.digest.as_ref(), progress.into_inner()), (sent.as_ref(), 100_003));
        assert!(received.duration >= Duration::from_millis(9), "above the rate limit: {received:?}");
    }

    #[test]
    fn the_longest_gap_is_measured() {
        let (mut server, client) = pair();
        let sender = thread::spawn(move || {
            server.write_all(b"half").unwrap();
            thread::sleep(Duration::from_millis(60));
            server.write_all(b"half").unwrap();
        });
        let received = receive(client, &AtomicU64::new(0)).unwrap();
        sender.join().unwrap();
        assert!(received.longest_gap >= Duration::from_millis(50), "{received:?}");
    }
}
