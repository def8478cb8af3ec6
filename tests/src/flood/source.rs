//! Who floods: frames of a packet socket, many to a system call, at a steady rate or as many as it can.

use std::io::{self, IoSlice};
use std::os::fd::AsRawFd;
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::ifaddrs::{InterfaceAddress, getifaddrs};
use nix::sys::socket::{AddressFamily, LinkAddr, MsgFlags, MultiHeaders, SockFlag, SockType, bind, sendmmsg, socket};

use super::Writer;

/// Frames of one system call.
const BATCH: usize = 64;
/// A source that paces itself sleeps this long where nothing is due.
const PAUSE: Duration = Duration::from_micros(200);
/// One that was held up makes up for no more than this.
const CATCH_UP: Duration = Duration::from_millis(5);

/// Sends from this thread's `interface` for this long; `pps` 0 is as many as possible. How many it sent.
///
/// # Errors
/// When there is no such interface, or the kernel refuses packet sockets.
pub fn send(interface: &str, mut writer: Writer, pps: u32, duration: Duration) -> io::Result<u64> {
    let wire = socket(AddressFamily::Packet, SockType::Raw, SockFlag::empty(), None)?;
    bind(wire.as_raw_fd(), &link_address(interface)?)?;
    let mut headers = MultiHeaders::<LinkAddr>::preallocate(BATCH, None);
    let mut frames = vec![Vec::new(); BATCH];
    let begun = Instant::now();
    let (mut sent, mut skipped) = (0_u64, 0_u64);
    while begun.elapsed() < duration {
        let wanted = wanted(pps, begun.elapsed(), sent + skipped);
        skipped += wanted.skipped;
        if wanted.now == 0 {
            thread::sleep(PAUSE);
            continue;
        }
        let batch = &mut frames[..wanted.now];
        for frame in batch.iter_mut() {
            writer.write(frame);
        }
        sent += flush(wire.as_raw_fd(), &mut headers, batch)?;
    }
    Ok(sent)
}

/// What is due.
struct Due {
    now: usize,
    /// What is too late to be made up for.
    skipped: u64,
}

fn wanted(pps: u32, elapsed: Duration, done: u64) -> Due {
    if pps == 0 {
        return Due { now: BATCH, skipped: 0 };
    }
    let of = |time: Duration| (time.as_micros() * u128::from(pps) / 1_000_000) as u64;
    let due = of(elapsed).saturating_sub(done);
    let most = of(CATCH_UP).max(BATCH as u64);
    Due { now: due.min(BATCH as u64) as usize, skipped: due.saturating_sub(most) }
}

fn flush(wire: i32, headers: &mut MultiHeaders<LinkAddr>, frames: &[Vec<u8>]) -> io::Result<u64> {
    let slices: Vec<[IoSlice<'_>; 1]> = frames.iter().map(|frame| [IoSlice::new(frame)]).collect();
    let addresses = vec![None; frames.len()];
    match sendmmsg(wire, headers, &slices, addresses, [], MsgFlags::empty()) {
        Ok(results) => Ok(results.count() as u64),
        // The link is full for a moment; that is what a flood does.
        Err(Errno::ENOBUFS | Errno::EAGAIN) => Ok(0),
        Err(error) => Err(error.into()),
    }
}

/// The address of an interface as packet sockets are bound to it.
fn link_address(interface: &str) -> io::Result<LinkAddr> {
    let link = |address: InterfaceAddress| {
        (address.interface_name == interface).then(|| address.address?.as_link_addr().copied()).flatten()
    };
    getifaddrs()?.find_map(link).ok_or_else(|| io::Error::other(format!("there is no {interface}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_keeps_its_rate_and_makes_up_for_little() {
        let due = |ms, done| wanted(10_000, Duration::from_millis(ms), done);
        assert_eq!((due(1, 0).now, due(1, 10).now, due(1, 0).skipped), (10, 0, 0));
        assert_eq!((due(6, 0).now, due(6, 0).skipped), (60, 0));
        assert_eq!((due(1000, 0).now, due(1000, 0).skipped), (64, 9936));
        assert_eq!(wanted(0, Duration::ZERO, 0).now, BATCH);
    }
}
