//! Traffic sink: loads `sink.bpf.c` at the ingress of the last veth and reads its counters. Sampled packets are
//! verified after the trial, so that nothing but the BPF program runs beside the gateway.

use anyhow::{Context, Result, ensure};
use aya::maps::{Array, PerCpuArray, RingBuf};
use aya::programs::tc::{self, SchedClassifier, TcAttachType};
use aya::{Ebpf, EbpfLoader};
use hdrhistogram::Histogram;

use super::take_map;
use crate::machine::run_on;
use crate::packets::has_valid_checksums;
use crate::wire::testbed::Testbed;

static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/sink.bpf.o"));

/// Maximum number of samples of a trial; the ring buffer has some more capacity.
pub(super) const MAX_SAMPLES: u64 = 16_000;
/// Offset of the transmit timestamp: after the headers and the sequence number.
const TIMESTAMP_OFFSET: usize = 50;

/// What the system under test is expected to make of packets.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Expectation {
    source: u32,
    source_mask: u32,
}

impl Expectation {
    /// Packets with this source address.
    pub(crate) fn translated_to(source: u32) -> Self {
        Self { source, source_mask: u32::MAX }
    }

    /// Packets with a source address of the pods, untranslated.
    pub(crate) fn untranslated() -> Self {
        Self { source: 0x0a01_0400, source_mask: 0xffff_fc00 }
    }
}

/// A counting sink.
#[derive(Debug)]
pub(super) struct Sink {
    program: Ebpf,
}

/// The received packets.
#[derive(Debug)]
pub(super) struct Received {
    pub(super) packets: u64,
    /// One-way latency of the samples, in nanoseconds.
    pub(super) latency: Histogram<u64>,
    /// Arrival times of the samples, in nanoseconds of the monotonic clock.
    pub(super) arrivals: Vec<u64>,
}

impl Sink {
    /// Starts counting. The sampling rate is derived from `packets`, the maximum number of packets.
    pub(super) fn open(testbed: &Testbed, core: usize, expectation: Expectation, packets: u64) -> Result<Self> {
        let program = run_on(&testbed.sink, core, || {
            // Needed by kernels before 6.6, which have no TCX links.
            let _ = tc::qdisc_add_clsact("eth0");
            let mut object = EbpfLoader::new().load(OBJECT).context("cannot load the sink's BPF object")?;
            let mut expected: Array<_, [u64; 3]> = take_map(&mut object, "expected")?;
            let [source, mask] = [expectation.source, expectation.source_mask].map(u32::to_be);
            expected.set(0, [source.into(), mask.into(), sample_mask(packets)], 0)?;
            let sink: &mut SchedClassifier = object
                .program_mut("wire_sink")
                .context("the sink's BPF object has no program wire_sink")?
                .try_into()?;
            sink.load().context("the kernel rejected the sink's BPF program")?;
            sink.attach("eth0", TcAttachType::Ingress).context("cannot attach the sink's BPF program")?;
            Ok(object)
        })?;
        Ok(Self { program })
    }

    /// Stops counting. Fails if a packet isn't correctly translated: the measurement is invalid then.
    pub(super) fn close(mut self) -> Result<Received> {
        let counts: PerCpuArray<_, [u64; 4]> = take_map(&mut self.program, "counts")?;
        let mut samples: RingBuf<_> = take_map(&mut self.program, "samples")?;
        let mut sums = [0; 4];
        for core in counts.get(&0, 0)?.iter() {
            sums.iter_mut().zip(core).for_each(|(sum, count)| *sum += count);
        }
        let [packets, untranslated, duplicates, _] = sums;
        ensure!(untranslated == 0, "{untranslated} of {packets} packets do not have the expected source address");
        ensure!(duplicates == 0, "{duplicates} of {packets} packets are duplicates, of the gateway or of the source");
        let (mut latency, mut arrivals) = (Histogram::new(3)?, Vec::new());
        while let Some(sample) = samples.next() {
            let [sent, received] = verify_sample(&sample)?;
            latency.record(received.saturating_sub(sent))?;
            arrivals.push(received);
        }
        Ok(Received { packets, latency, arrivals })
    }
}

/// Verifies all bytes of a sample; returns its transmit and receive timestamps.
fn verify_sample(sample: &[u8]) -> Result<[u64; 2]> {
    let number = |at: usize| sample.get(at..).and_then(<[u8]>::first_chunk).map(|bytes| u64::from_ne_bytes(*bytes));
    let length = sample.get(8..).and_then(<[u8]>::first_chunk).map_or(0, |bytes| u32::from_ne_bytes(*bytes) as usize);
    let frame = sample.get(12..12 + length).filter(|frame| frame.len() >= 60);
    let frame = frame.context("a sample is truncated")?;
    ensure!(has_valid_checksums(frame), "a packet's checksum is wrong: {frame:02x?}");
    ensure!(frame[22] == 63, "a packet's TTL is {} instead of 63: {frame:02x?}", frame[22]);
    ensure!(frame[30..32] == [198, 51] && frame[36..38] == [1, 187], "a packet's destination is wrong: {frame:02x?}");
    let sent = number(12 + TIMESTAMP_OFFSET).context("a sample is truncated")?;
    let received = number(0).context("a sample is truncated")?;
    Ok([sent, received])
}

/// Mask for sampling one packet in a power of two, so that at most [`MAX_SAMPLES`] are sampled.
fn sample_mask(packets: u64) -> u64 {
    packets.div_ceil(MAX_SAMPLES).next_power_of_two() - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_samples_is_bounded() {
        for packets in [0, 1, MAX_SAMPLES, MAX_SAMPLES + 1, 4_000_000, 1 << 26] {
            assert!(packets / (sample_mask(packets) + 1) <= MAX_SAMPLES, "{packets}");
        }
        assert_eq!((sample_mask(0), sample_mask(MAX_SAMPLES), sample_mask(MAX_SAMPLES + 1)), (0, 0, 1));
    }
}
