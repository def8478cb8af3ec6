//! Flood sender: a packet socket, many frames per system call, at a steady rate.

use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::ifaddrs::{InterfaceAddress, getifaddrs};
use nix::sys::socket::{
    AddressFamily, LinkAddr, MsgFlags, MultiHeaders, SockFlag, SockType, bind, sendmmsg, socket as packet_socket,
};

use super::PacketWriter;

/// Frames per system call.
const BATCH: usize = 64;
/// Sleep when nothing is due.
const PAUSE: Duration = Duration::from_micros(200);
/// The longest delay that is caught up.
const MAX_CATCH_UP: Duration = Duration::from_millis(5);

/// Sends from an interface of this thread's network namespace for `duration`. Returns the number of sent
/// frames.
///
/// # Errors
/// When the interface doesn't exist, or the kernel denies packet sockets.
pub fn send(interface: &str, mut writer: PacketWriter, pps: u32, duration: Duration) -> io::Result<u64> {
    let socket = open(interface)?;
    let mut headers = MultiHeaders::<LinkAddr>::preallocate(BATCH, None);
    let mut frames = vec![Vec::new(); BATCH];
    let started = Instant::now();
    let (mut sent, mut skipped) = (0_u64, 0_u64);
    while started.elapsed() < duration {
        let due = due(pps, started.elapsed(), sent + skipped);
        skipped += due.skipped;
        if due.now == 0 {
            thread::sleep(PAUSE);
            continue;
        }
        let batch = &mut frames[..due.now];
        for frame in batch.iter_mut() {
            writer.write(frame);
        }
        sent += flush(socket.as_raw_fd(), &mut headers, batch)?;
    }
    Ok(sent)
}

/// Frames that are due.
struct Due {
    now: usize,
    /// Frames that are too late to be caught up.
    skipped: u64,
}

fn due(pps: u32, elapsed: Duration, done: u64) -> Due {
    let frames_in = |time: Duration| (time.as_micros() * u128::from(pps) / 1_000_000) as u64;
    let due = frames_in(elapsed).saturating_sub(done);
    let max_backlog = frames_in(MAX_CATCH_UP).max(BATCH as u64);
    Due { now: due.min(BATCH as u64) as usize, skipped: due.saturating_sub(max_backlog) }
}

/// Opens a packet socket at an interface of this thread's network namespace.
pub(crate) fn open(interface: &str) -> io::Result<OwnedFd> {
    let socket = packet_socket(AddressFamily::Packet, SockType::Raw, SockFlag::empty(), None)?;
    bind(socket.as_raw_fd(), &packet_socket_address(interface)?)?;
    Ok(socket)
}

/// Sends frames with one system call; returns how many were sent.
pub(crate) fn flush(socket: i32, headers: &mut MultiHeaders<LinkAddr>, frames: &[Vec<u8>]) -> io::Result<u64> {
    let slices: Vec<[IoSlice<'_>; 1]> = frames.iter().map(|frame| [IoSlice::new(frame)]).collect();
    let addresses = vec![None; frames.len()];
    match sendmmsg(socket, headers, &slices, addresses, [], MsgFlags::empty()) {
        Ok(results) => Ok(results.count() as u64),
        // The interface's queue is full.
        Err(Errno::ENOBUFS | Errno::EAGAIN) => Ok(0),
        Err(error) => Err(error.into()),
    }
}

/// Link-layer address of an interface, for bind(2).
fn packet_socket_address(interface: &str) -> io::Result<LinkAddr> {
    let of_interface = |address: InterfaceAddress| {
        (address.interface_name == interface).then(|| address.address?.as_link_addr().copied()).flatten()
    };
    getifaddrs()?.find_map(of_interface).ok_or_else(|| io::Error::other(format!("no interface {interface}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_keeps_its_rate_and_limits_catch_up() {
        let at = |ms, done| due(10_000, Duration::from_millis(ms), done);
        assert_eq!((at(1, 0).now, at(1, 10).now, at(1, 0).skipped), (10, 0, 0));
        assert_eq!((at(6, 0).now, at(6, 0).skipped), (60, 0));
        assert_eq!((at(1000, 0).now, at(1000, 0).skipped), (64, 9936));
    }
}
