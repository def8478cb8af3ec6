//! Fuzz target of frames: any bytes as frames, on both interfaces and any queue. No panic, no frame is lost (checked
//! after each), no pod address leaks.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vipgate_fuzz::{gateway, inject};
use vipgate_testkit::{INSIDE_MAC, OUTSIDE_MAC, Setup};

fuzz_target!(|data: &[u8]| {
    let mut gateway = gateway(&Setup { workers: 2, capacity: 64, frames: 64, ..Setup::default() });
    gateway.hostile = true;
    let mut rest = data;
    // Each frame: flags (interface, worker, gateway's MAC address or not), length, bytes.
    while let [flags, length, tail @ ..] = rest {
        let length = usize::from(*length).min(tail.len());
        let (bytes, next) = tail.split_at(length);
        rest = next;
        let inside = flags & 1 == 0;
        let mut frame = bytes.to_vec();
        if flags & 4 == 0 && frame.len() >= 6 {
            frame[..6].copy_from_slice(if inside { &INSIDE_MAC } else { &OUTSIDE_MAC });
        }
        inject(&mut gateway, usize::from(flags >> 1 & 1), inside, &frame);
    }
    // Beyond the timeouts of neighbor resolution and virtual reassembly.
    gateway.advance(4_000);
    gateway.check_frames();
});
