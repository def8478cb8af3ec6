//! Any bytes as frames: from both sides, on any queue, one after the other. Nothing panics, no frame is lost (checked after each),
//! nothing leaks.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vipgate_fuzz::support::{INSIDE_MAC, OUTSIDE_MAC, Setup};
use vipgate_fuzz::{arrives, gateway};

fuzz_target!(|data: &[u8]| {
    let mut gateway = gateway(&Setup { workers: 2, capacity: 64, frames: 64, ..Setup::default() });
    gateway.hostile = true;
    let mut rest = data;
    // Each frame: where it comes in and whether it is addressed to the gateway, its length, its bytes.
    while let [place, length, more @ ..] = rest {
        let length = usize::from(*length).min(more.len());
        let (bytes, behind) = more.split_at(length);
        rest = behind;
        let inside = place & 1 == 0;
        let mut frame = bytes.to_vec();
        if place & 4 == 0 && frame.len() >= 6 {
            frame[..6].copy_from_slice(if inside { &INSIDE_MAC } else { &OUTSIDE_MAC });
        }
        arrives(&mut gateway, usize::from(place >> 1 & 1), inside, &frame);
    }
    // What waits for its neighbour or its first fragment waits no longer than that.
    gateway.pass(4_000);
    gateway.check_frames();
});
