//! The end that receives: a program where the last veth's packets enter the stack. It counts all of them; of some it keeps
//! every byte, which are looked at when the trial is over, so that nothing but the program runs beside the gateway.

use anyhow::{Context, Result, ensure};
use aya::maps::{Array, PerCpuArray, RingBuf};
use aya::programs::tc::{self, SchedClassifier, TcAttachType};
use aya::{Ebpf, EbpfLoader};
use hdrhistogram::Histogram;

use super::ground::Ground;
use super::take;
use crate::packets::{VIP, is_right};

static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/sink.bpf.o"));

/// Samples that the ring has room for, with something to spare.
pub(super) const SAMPLES: u64 = 16_000;
/// Where a packet's time of departure is: behind the headers and its number.
const DEPARTURE: usize = 50;

/// A sink that counts.
#[derive(Debug)]
pub(super) struct Sink {
    program: Ebpf,
}

/// What it saw.
#[derive(Debug)]
pub(super) struct Seen {
    pub(super) packets: u64,
    /// From the source's clock to the sink's, of the samples, in nanoseconds.
    pub(super) latency: Histogram<u64>,
    /// When each of the samples arrived, in nanoseconds of the monotonic clock.
    pub(super) arrivals: Vec<u64>,
}

impl Sink {
    /// Begins to count. `packets` is how many may come: it says how many of them are samples.
    pub(super) fn open(ground: &Ground, core: usize, packets: u64) -> Result<Self> {
        let program = ground.sink.run(core, || {
            // Older kernels want a place to attach to, newer ones have it.
            let _ = tc::qdisc_add_clsact("eth0");
            let mut object = EbpfLoader::new().load(OBJECT).context("cannot load the sink's program")?;
            let mut expected: Array<_, [u64; 2]> = take(&mut object, "expected")?;
            let vip = u32::from_ne_bytes(VIP.to_be_bytes());
            expected.set(0, [vip.into(), mask(packets)], 0)?;
            let sink: &mut SchedClassifier =
                object.program_mut("wire_sink").context("the sink has no program")?.try_into()?;
            sink.load().context("the kernel refused the sink's program")?;
            sink.attach("eth0", TcAttachType::Ingress).context("cannot attach the sink's program")?;
            Ok(object)
        })?;
        Ok(Self { program })
    }

    /// Ends counting. Fails when a packet isn't what it should be: then a figure would mean nothing.
    pub(super) fn close(mut self) -> Result<Seen> {
        let counts: PerCpuArray<_, [u64; 4]> = take(&mut self.program, "counts")?;
        let mut samples: RingBuf<_> = take(&mut self.program, "samples")?;
        let mut sums = [0; 4];
        for core in counts.get(&0, 0)?.iter() {
            sums.iter_mut().zip(core).for_each(|(sum, count)| *sum += count);
        }
        let [packets, foreign, duplicates, _] = sums;
        ensure!(foreign == 0, "{foreign} of {packets} packets did not come from the VIP: the gateway leaks");
        ensure!(
            duplicates == 0,
            "{duplicates} of {packets} packets came twice: the gateway, or the source, repeats them"
        );
        let (mut latency, mut arrivals) = (Histogram::new(3)?, Vec::new());
        while let Some(sample) = samples.next() {
            let [departed, arrived] = inspect(&sample)?;
            latency.record(arrived.saturating_sub(departed))?;
            arrivals.push(arrived);
        }
        Ok(Seen { packets, latency, arrivals })
    }
}

/// When a sample departed and arrived, if every byte of it is as it should be.
fn inspect(sample: &[u8]) -> Result<[u64; 2]> {
    let number = |at: usize| sample.get(at..).and_then(<[u8]>::first_chunk).map(|bytes| u64::from_ne_bytes(*bytes));
    let length = sample.get(8..).and_then(<[u8]>::first_chunk).map_or(0, |bytes| u32::from_ne_bytes(*bytes) as usize);
    let frame = sample.get(12..12 + length).filter(|frame| frame.len() >= 60).context("a sample is cut off")?;
    ensure!(is_right(frame), "a packet's checksum is wrong: {frame:02x?}");
    ensure!(frame[22] == 63, "a packet's TTL is {} instead of 63: {frame:02x?}", frame[22]);
    ensure!(frame[30..32] == [198, 51] && frame[36..38] == [1, 187], "a packet has another destination: {frame:02x?}");
    let departed = number(12 + DEPARTURE).context("a sample is cut off")?;
    let arrived = number(0).context("a sample is cut off")?;
    Ok([departed, arrived])
}

/// One packet in a power of two is a sample; this many less one.
fn mask(packets: u64) -> u64 {
    packets.div_ceil(SAMPLES).next_power_of_two() - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_room_for_all_samples() {
        for packets in [0, 1, SAMPLES, SAMPLES + 1, 4_000_000, 1 << 26] {
            assert!(packets / (mask(packets) + 1) <= SAMPLES, "{packets}");
        }
        assert_eq!((mask(0), mask(SAMPLES), mask(SAMPLES + 1)), (0, 0, 1));
    }
}
