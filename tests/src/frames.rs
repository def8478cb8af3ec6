//! Frames for the test of leaks: of every class that may reach a gateway, well-formed or not, sent from packet sockets
//! of pods and of the router outside.
//!
//! Each frame carries its number in the list, as ID of IPv4 or flow label of IPv6, which kernels don't change: a
//! captured packet names the frame that it was.

mod classes;
mod errors;
mod packets;

use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};
use std::{io, thread};

use nix::sys::socket::{LinkAddr, MultiHeaders};
use vipgate_dataplane::wire::ethernet::Mac;

pub use self::classes::{CLASSES, list};
pub use self::errors::SESSION;
pub use self::packets::number;
use crate::flood;

/// Addresses of p1 to p4, by family.
pub const PODS: [[&str; 2]; 4] = [
    ["10.1.0.11", "fd00:1::11"],
    ["10.1.0.12", "fd00:1::12"],
    ["10.1.0.21", "fd00:1::21"],
    ["10.1.0.31", "fd00:1::31"],
];
/// Routers inside: in no prefix, and in one of pods. p4 sends in their place.
pub const INNER_ROUTERS: [[&str; 2]; 2] = [["10.99.0.1", "fd00:99::1"], ["10.1.0.254", "fd00:1::fe"]];
/// Addresses of the gateway: inside and outside.
const GATEWAY: [[&str; 2]; 2] = [["10.1.0.1", "fd00:1::1"], ["203.0.113.1", "2001:db8:113::1"]];
/// The router outside.
const ROUTER: [&str; 2] = ["203.0.113.254", "2001:db8:113::fe"];

/// Frames per burst: a veth holds 256.
const BURST: usize = 32;
const BURST_INTERVAL: Duration = Duration::from_millis(2);
/// Time for a full queue to drain.
const BURST_TIMEOUT: Duration = Duration::from_secs(5);

/// Sender of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sender {
    /// A pod, by index.
    Pod(usize),
    /// The router outside.
    Router,
}

/// A frame to be sent.
#[derive(Clone, Debug)]
pub struct Frame {
    /// One of [`CLASSES`].
    pub class: &'static str,
    /// Who sends it.
    pub sender: Sender,
    /// From the Ethernet header on.
    pub bytes: Vec<u8>,
}

/// MAC addresses of a testbed.
#[derive(Clone, Copy, Debug)]
pub struct Macs {
    /// Of the gateway, inside and outside.
    pub gateway: [Mac; 2],
    /// Of p1 to p4.
    pub pods: [Mac; 4],
    /// Of the router's interface to the gateway.
    pub router: Mac,
}

/// Sends frames from an interface of this thread's network namespace.
///
/// # Errors
/// When the interface doesn't exist, or the kernel refuses a frame: one that isn't sent proves nothing.
pub fn send(interface: &str, frames: &[Vec<u8>]) -> io::Result<()> {
    let socket = flood::open(interface)?;
    let mut headers = MultiHeaders::<LinkAddr>::preallocate(BURST, None);
    for burst in frames.chunks(BURST) {
        let (mut rest, deadline) = (burst, Instant::now() + BURST_TIMEOUT);
        while !rest.is_empty() {
            let sent = flood::flush(socket.as_raw_fd(), &mut headers, rest)?;
            if sent == 0 && Instant::now() > deadline {
                return Err(io::ErrorKind::TimedOut.into());
            }
            rest = rest.get(sent as usize..).unwrap_or_default();
            thread::sleep(BURST_INTERVAL);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MACS: Macs = Macs { gateway: [[2; 6]; 2], pods: [[4; 6]; 4], router: [6; 6] };

    #[test]
    fn a_list_has_frames_of_every_class_that_a_kernel_sends() {
        for seed in 0..20 {
            let frames = list(seed, MACS);
            for class in CLASSES {
                assert!(frames.iter().any(|frame| frame.class == class), "seed {seed}: no {class}");
            }
            assert!(frames.iter().all(|frame| (14..=1514).contains(&frame.bytes.len())), "seed {seed}");
            // The field of IPv4 has 16 bits.
            assert!(frames.len() < 0x1_0000, "seed {seed}: {} frames", frames.len());
        }
    }

    #[test]
    fn a_seed_repeats_a_list_and_frames_carry_their_numbers() {
        let [first, again, other] = [7, 7, 8].map(|seed| list(seed, MACS));
        let bytes = |frames: &[Frame]| frames.iter().map(|frame| frame.bytes.clone()).collect::<Vec<_>>();
        assert_eq!(bytes(&first), bytes(&again));
        assert_ne!(bytes(&first), bytes(&other));
        for (index, frame) in first.iter().enumerate().filter(|(_, frame)| frame.class == "protocols") {
            assert_eq!(number(&frame.bytes[14..]), Some(index));
        }
    }
}
