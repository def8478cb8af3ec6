//! Baselines of this machine, measured with each result: a minimal packet path that parses the IPv4 header, decrements
//! the TTL and writes MAC addresses; and random reads of cache lines in as much memory as the session table, 16 in
//! flight.

use std::hint::black_box;
use std::time::Instant;

use anyhow::{Context, Result};
use hdrhistogram::Histogram;
use vipgate_dataplane::io::batch::BATCH_SIZE;
use vipgate_dataplane::wire::{checksum, ethernet, ipv4};
use vipgate_mem::{Arena, HEADROOM, Slab, prefetch_read};

use crate::packets::{Flow, INSIDE_MAC, POD_MAC, write_forward};

/// Prefetch distance: reads in flight.
const AHEAD: usize = 16;
const READS: usize = 1 << 21;
const PACKETS: usize = 1 << 20;
const FRAMES: usize = 4096;
/// Packets per timed batch: they take about as long as a translated batch, so interrupts have the same effect.
const BATCH: usize = BATCH_SIZE * 5;

/// Nanoseconds per forwarded packet, and the distribution of batch times, which shows interruptions by the machine.
pub(crate) fn measure_forwarding(size: u16) -> Result<(f64, Histogram<u64>)> {
    let mut frames = Arena::allocate(FRAMES, 2048).context("memory for frames")?.frames();
    for (frame, number) in frames.iter_mut().zip(0..) {
        frame.reset(HEADROOM);
        frame.set_len(size);
        write_forward(frame.bytes_mut(), Flow::new(number));
    }
    let macs = ethernet::mac_pair(POD_MAC, INSIDE_MAC);
    let mut best = f64::MAX;
    let mut batches = Histogram::<u64>::new(3)?;
    for _ in 0..5 {
        let start = Instant::now();
        let mut batch = start;
        for n in 0..PACKETS {
            if n % BATCH == 0 {
                let now = Instant::now();
                batches.record((now - batch).as_nanos() as u64)?;
                batch = now;
            }
            frames[(n + 8) % FRAMES].prefetch();
            let bytes = frames[n % FRAMES].bytes_mut();
            let Ok(header) = ipv4::Header::parse(&bytes[ethernet::HEADER..]) else { continue };
            ethernet::set_macs(bytes, &macs);
            let ip = &mut bytes[ethernet::HEADER..];
            // Alternates, since frames are reused.
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

/// Nanoseconds per random cache line read in `bytes` of memory.
pub(crate) fn measure_random_reads(bytes: usize) -> Result<f64> {
    let mut lines: Slab<Line> = Slab::new((bytes / size_of::<Line>()).max(AHEAD)).context("memory for lines")?;
    for (line, n) in lines.iter_mut().zip(0..) {
        line.0[0] = n;
    }
    let random = |n: usize| (n as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
    let index = |n: usize| (random(n) % lines.len() as u64) as usize;
    let mut best = f64::MAX;
    for round in 0..5 {
        let mut ahead = [0; AHEAD];
        let start = Instant::now();
        let mut sum = 0_u64;
        for n in 0..READS {
            let next = index(n + round * READS);
            prefetch_read(&lines, next);
            let due = std::mem::replace(&mut ahead[n % AHEAD], next);
            sum = sum.wrapping_add(lines[due].0[0]);
        }
        black_box(sum);
        best = best.min(start.elapsed().as_nanos() as f64 / READS as f64);
    }
    Ok(best)
}
