//! What the machine can do at best, measured beside each result: a packet path that only reads headers, counts down the time
//! to live and writes link addresses; and reading random cache lines of as much memory as the table has, sixteen at once.

use std::hint::black_box;
use std::time::Instant;

use anyhow::{Context, Result};
use hdrhistogram::Histogram;
use vipgate_dataplane::batch::MOST;
use vipgate_dataplane::wire::{checksum, ethernet, ipv4};
use vipgate_mem::{Arena, HEADROOM, Slab, prefetch_read};

use crate::packets::{Flow, INSIDE_MAC, POD_MAC, write_forward};

/// Lines on their way at once.
const AHEAD: usize = 16;
const READS: usize = 1 << 21;
const PACKETS: usize = 1 << 20;
const FRAMES: usize = 4096;
/// As many packets as are only forwarded in the time of a batch that is translated: interrupts hit both alike.
const PART: usize = MOST * 5;

/// Nanoseconds a packet that is only forwarded, and how long five batches of them take: what the machine itself interrupts shows
/// there, too.
pub(crate) fn forwarding(size: u16) -> Result<(f64, Histogram<u64>)> {
    let mut frames = Arena::allocate(FRAMES, 2048).context("memory for frames")?.frames();
    for (frame, number) in frames.iter_mut().zip(0..) {
        frame.reset(HEADROOM);
        frame.set_len(size);
        write_forward(frame.bytes_mut(), Flow::new(number));
    }
    let link = ethernet::link(POD_MAC, INSIDE_MAC);
    let mut best = f64::MAX;
    let mut batches = Histogram::<u64>::new(3)?;
    for _ in 0..5 {
        let start = Instant::now();
        let mut batch = start;
        for n in 0..PACKETS {
            if n % PART == 0 {
                let now = Instant::now();
                batches.record((now - batch).as_nanos() as u64)?;
                batch = now;
            }
            frames[(n + 8) % FRAMES].prefetch();
            let bytes = frames[n % FRAMES].bytes_mut();
            let Ok(header) = ipv4::Header::parse(&bytes[ethernet::HEADER..]) else { continue };
            ethernet::set_link(bytes, &link);
            let ip = &mut bytes[ethernet::HEADER..];
            // Up and down in turn, so that it can go on forever.
            ip[ipv4::TTL] = if header.ttl == 64 { 63 } else { 64 };
            let old = u16::from_be_bytes([ip[10], ip[11]]);
            let delta = checksum::Delta::of(u32::from(header.ttl) << 8, u32::from(ip[ipv4::TTL]) << 8);
            ip[10..12].copy_from_slice(&delta.apply(old).to_be_bytes());
        }
        best = best.min(start.elapsed().as_nanos() as f64 / PACKETS as f64);
    }
    Ok((best, batches))
}

#[derive(Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(64))]
struct Line([u64; 8]);

/// Nanoseconds a random line of so many bytes.
pub(crate) fn random_line(bytes: usize) -> Result<f64> {
    let mut lines: Slab<Line> = Slab::new((bytes / size_of::<Line>()).max(AHEAD)).context("memory for lines")?;
    for (line, n) in lines.iter_mut().zip(0..) {
        line.0[0] = n;
    }
    let random = |n: usize| (n as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
    let place = |n: usize| (random(n) % lines.len() as u64) as usize;
    let mut best = f64::MAX;
    for round in 0..5 {
        let mut ahead = [0; AHEAD];
        let start = Instant::now();
        let mut sum = 0_u64;
        for n in 0..READS {
            let next = place(n + round * READS);
            prefetch_read(&lines, next);
            let due = std::mem::replace(&mut ahead[n % AHEAD], next);
            sum = sum.wrapping_add(lines[due].0[0]);
        }
        black_box(sum);
        best = best.min(start.elapsed().as_nanos() as f64 / READS as f64);
    }
    Ok(best)
}
