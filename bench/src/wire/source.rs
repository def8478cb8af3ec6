//! The end that sends: a program that the kernel runs on frames of its own, again and again, in this thread.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use aya::maps::Array;
use aya::programs::Xdp;
use aya::{EbpfLoader, TestRun, TestRunAttrs, TestRunOptions};
use nix::net::if_::if_nametoindex;
use rustix::time::{ClockId, clock_gettime};
use vipgate_dataplane::wire::ethernet::Mac;

use super::ground::{Ground, INSIDE_MAC, SOURCE_MAC};
use super::take;

static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/source.bpf.o"));

/// Frames that one batch of the kernel holds: what a NIC's driver hands over at once.
const BATCH: u32 = 64;
/// How fast the program gets through a frame that it doesn't send, and one that it sends, at best, in seconds. A trial is
/// one call, because the kernel waits for a grace period around each; a call ends after so many frames, not after so much
/// time, so it is made long enough for a fast machine, and a slow one gets through the rest without sending.
const SKIPPED: f64 = 45e-9;
const SENT: f64 = 130e-9;
/// Sequence numbers that the sink has room for.
const MOST: u64 = 1 << 26;

/// What to send.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    /// Millions of packets a second; `None` is as many as possible.
    pub(super) mpps: Option<f64>,
    pub(super) duration: Duration,
    /// Flows that the packets belong to.
    pub(super) flows: u32,
    /// Each flow once, instead of at random for as long as said.
    pub(super) once: bool,
    /// Bytes of a frame without its checksum.
    pub(super) bytes: usize,
}

/// What was sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sent {
    pub(super) packets: u64,
    /// From the first packet to the last one.
    pub(super) seconds: f64,
    /// Time of its core for each second: of the program, and of what the gateway's interface does in its context.
    pub(super) cpu: f64,
}

/// Sends from the source's namespace, on this core. `begins` is called right before the first packet.
pub(super) fn send(ground: &Ground, core: usize, load: Load, begins: impl FnOnce() + Send) -> Result<Sent> {
    ground.source.run(core, || run(load, begins))
}

fn run(load: Load, begins: impl FnOnce()) -> Result<Sent> {
    let interface = if_nametoindex("eth0").context("the source has no interface")?;
    let mut object = EbpfLoader::new().load(OBJECT).context("cannot load the source's program")?;
    let mut settings: Array<_, [u64; 8]> = take(&mut object, "settings")?;
    let progress: Array<_, [u64; 4]> = take(&mut object, "progress")?;
    let most = if load.once { load.flows.into() } else { MOST };
    let words = [
        load.duration.as_nanos() as u64,
        load.mpps.map_or(0, gap),
        load.flows.into(),
        load.once.into(),
        most,
        interface.into(),
        bytes(INSIDE_MAC),
        bytes(SOURCE_MAC),
    ];
    settings.set(0, words, 0)?;
    let program: &mut Xdp = object.program_mut("wire_source").context("the source has no program")?.try_into()?;
    program.load().context("the kernel refused the source's program")?;

    let frame = vec![0; load.bytes];
    let mut call = TestRunOptions::new();
    call.data_in = Some(&frame);
    call.repeat = load.turns();
    call.attrs = TestRunAttrs::new().xdp_live_frames(BATCH);
    begins();
    let before = (now(ClockId::ThreadCPUTime), now(ClockId::Monotonic));
    program.test_run(call).context("the kernel doesn't send a program's frames: it needs Linux 5.18")?;
    let (cpu, wall) = (now(ClockId::ThreadCPUTime) - before.0, now(ClockId::Monotonic) - before.1);
    let [packets, _, first, last] = progress.get(&0, 0)?;
    ensure!(packets > 1, "the source could not send");
    Ok(Sent { packets, seconds: (last - first) as f64 / 1e9, cpu: cpu as f64 / wall as f64 })
}

impl Load {
    /// No more packets than this are sent.
    #[expect(clippy::cast_sign_loss, reason = "rates and times are positive")]
    pub(super) fn most_packets(&self) -> u64 {
        if self.once {
            return self.flows.into();
        }
        let seconds = self.duration.as_secs_f64();
        ((self.mpps.map_or(f64::MAX, |mpps| mpps * 1e6) * seconds).min(seconds / SENT) as u64).min(MOST)
    }

    /// Frames of the call that sends this.
    #[expect(clippy::cast_sign_loss, reason = "rates and times are positive")]
    fn turns(&self) -> u32 {
        let (seconds, sent) = (self.duration.as_secs_f64(), self.most_packets() as f64);
        (sent + (seconds - sent * SENT) / SKIPPED) as u32
    }
}

/// The time between packets as the program counts it, in 1/256 ns.
#[expect(clippy::cast_sign_loss, reason = "rates are positive")]
fn gap(mpps: f64) -> u64 {
    (256_000.0 / mpps).round() as u64
}

/// A link address as it lies in memory, in the first bytes of a number.
fn bytes(mac: Mac) -> u64 {
    let mut bytes = [0; 8];
    bytes[..6].copy_from_slice(&mac);
    u64::from_ne_bytes(bytes)
}

/// What a clock shows, in nanoseconds.
pub(super) fn now(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_long_enough_for_what_is_to_be_sent() {
        let load = |mpps| Load { mpps, duration: Duration::from_secs(1), flows: 1, once: false, bytes: 60 };
        assert_eq!((load(Some(1.0)).most_packets(), load(None).most_packets()), (1_000_000, 7_692_307));
        assert!(u64::from(load(None).turns()) >= load(None).most_packets());
        assert_eq!(load(Some(100.0)).turns(), load(None).turns(), "more than the source can do");
        assert!(load(Some(1.0)).turns() > 20_000_000, "mostly skipped");
        assert_eq!((gap(1.0), gap(2.0)), (256_000, 128_000));
        assert_eq!(bytes([1, 2, 3, 4, 5, 6]).to_ne_bytes(), [1, 2, 3, 4, 5, 6, 0, 0]);
    }
}
