//! Traffic source: runs `source.bpf.c` on live frames with BPF_PROG_TEST_RUN, in this thread.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use aya::maps::Array;
use aya::programs::Xdp;
use aya::{EbpfLoader, TestRun, TestRunAttrs, TestRunOptions};
use nix::net::if_::if_nametoindex;
use rustix::time::{ClockId, clock_gettime};
use vipgate_dataplane::wire::ethernet::Mac;

use super::take_map;
use crate::machine::run_on;
use crate::wire::testbed::{INSIDE_MAC, SOURCE_MAC, Testbed};

static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/source.bpf.o"));

/// Frames per batch of the test run, like a NIC driver's NAPI budget.
const BATCH: u32 = 64;
/// Minimum time of the program per frame that it doesn't send, and per frame that it sends, in seconds. A trial is one
/// call, because the kernel waits for a grace period around each. A call ends after a number of frames, not after a
/// time, so the number is sized for a fast machine; a slow one drops the remaining frames.
const SKIP_TIME: f64 = 45e-9;
const SEND_TIME: f64 = 130e-9;
/// Maximum number of sequence numbers in the sink's bitmap.
const MAX_SEQUENCES: u64 = 1 << 26;

#[derive(Clone, Copy, Debug)]
pub(crate) struct OfferedLoad {
    /// Millions of packets per second; `None` is the maximum.
    pub(crate) mpps: Option<f64>,
    pub(crate) duration: Duration,
    /// Number of flows.
    pub(crate) flows: u32,
    /// One packet per flow, instead of random flows for the duration.
    pub(crate) once_per_flow: bool,
    /// Frame size without FCS.
    pub(crate) bytes: usize,
}

/// The sent packets.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sent {
    pub(super) packets: u64,
    /// From the first packet to the last one.
    pub(super) seconds: f64,
    /// CPU usage of its core, including the receive path of the gateway's interface, which runs in its context.
    pub(super) cpu: f64,
}

/// Sends from the source's namespace, on this core. Calls `on_start` right before the first packet.
pub(super) fn send(testbed: &Testbed, core: usize, load: OfferedLoad, on_start: impl FnOnce() + Send) -> Result<Sent> {
    run_on(&testbed.source, core, || run(load, on_start))
}

fn run(load: OfferedLoad, on_start: impl FnOnce()) -> Result<Sent> {
    let interface = if_nametoindex("eth0").context("the source has no interface eth0")?;
    let mut object = EbpfLoader::new().load(OBJECT).context("cannot load the source's BPF object")?;
    let mut settings: Array<_, [u64; 8]> = take_map(&mut object, "settings")?;
    let progress: Array<_, [u64; 4]> = take_map(&mut object, "progress")?;
    let max_packets = if load.once_per_flow { load.flows.into() } else { MAX_SEQUENCES };
    let words = [
        load.duration.as_nanos() as u64,
        load.mpps.map_or(0, packet_gap),
        load.flows.into(),
        load.once_per_flow.into(),
        max_packets,
        interface.into(),
        mac_to_u64(INSIDE_MAC),
        mac_to_u64(SOURCE_MAC),
    ];
    settings.set(0, words, 0)?;
    let program: &mut Xdp =
        object.program_mut("wire_source").context("the source's BPF object has no program wire_source")?.try_into()?;
    program.load().context("the kernel rejected the source's BPF program")?;

    let frame = vec![0; load.bytes];
    let mut call = TestRunOptions::new();
    call.data_in = Some(&frame);
    call.repeat = load.repeat_count();
    call.attrs = TestRunAttrs::new().xdp_live_frames(BATCH);
    on_start();
    let before = (clock_ns(ClockId::ThreadCPUTime), clock_ns(ClockId::Monotonic));
    program.test_run(call).context("BPF_PROG_TEST_RUN on live frames failed: it needs Linux 5.18")?;
    let (cpu, wall) = (clock_ns(ClockId::ThreadCPUTime) - before.0, clock_ns(ClockId::Monotonic) - before.1);
    let [packets, _, first, last] = progress.get(&0, 0)?;
    ensure!(packets > 1, "the source sent no packets");
    Ok(Sent { packets, seconds: (last - first) as f64 / 1e9, cpu: cpu as f64 / wall as f64 })
}

impl OfferedLoad {
    /// Maximum number of packets sent.
    #[expect(clippy::cast_sign_loss, reason = "rates and times are positive")]
    pub(super) fn max_packets(&self) -> u64 {
        if self.once_per_flow {
            return self.flows.into();
        }
        let seconds = self.duration.as_secs_f64();
        ((self.mpps.map_or(f64::MAX, |mpps| mpps * 1e6) * seconds).min(seconds / SEND_TIME) as u64).min(MAX_SEQUENCES)
    }

    /// Repetitions of the test run, sent or not.
    #[expect(clippy::cast_sign_loss, reason = "rates and times are positive")]
    fn repeat_count(&self) -> u32 {
        let (seconds, sent) = (self.duration.as_secs_f64(), self.max_packets() as f64);
        (sent + (seconds - sent * SEND_TIME) / SKIP_TIME) as u32
    }
}

/// The time between packets, in 1/256 ns.
#[expect(clippy::cast_sign_loss, reason = "rates are positive")]
fn packet_gap(mpps: f64) -> u64 {
    (256_000.0 / mpps).round() as u64
}

/// A MAC address in the first six bytes, in memory order, of a number.
pub(super) fn mac_to_u64(mac: Mac) -> u64 {
    let mut bytes = [0; 8];
    bytes[..6].copy_from_slice(&mac);
    u64::from_ne_bytes(bytes)
}

/// The time of a clock, in nanoseconds.
pub(super) fn clock_ns(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_run_is_long_enough_for_the_offered_load() {
        let load =
            |mpps| OfferedLoad { mpps, duration: Duration::from_secs(1), flows: 1, once_per_flow: false, bytes: 60 };
        assert_eq!((load(Some(1.0)).max_packets(), load(None).max_packets()), (1_000_000, 7_692_307));
        assert!(u64::from(load(None).repeat_count()) >= load(None).max_packets());
        assert_eq!(load(Some(100.0)).repeat_count(), load(None).repeat_count(), "more than the source's maximum");
        assert!(load(Some(1.0)).repeat_count() > 20_000_000, "mostly skipped");
        assert_eq!((packet_gap(1.0), packet_gap(2.0)), (256_000, 128_000));
        assert_eq!(mac_to_u64([1, 2, 3, 4, 5, 6]).to_ne_bytes(), [1, 2, 3, 4, 5, 6, 0, 0]);
    }
}
