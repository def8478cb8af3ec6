//! Clocks: the tick of workers, leases and peer links, and wall-clock time.

use std::time::SystemTime;

use vipgate_dataplane::flow::time::Tick;

/// The current tick: milliseconds of `CLOCK_MONOTONIC`, comparable across workers and across processes of one boot. Not
/// affected by wall-clock changes; doesn't advance while the machine is suspended.
pub(crate) fn now() -> Tick {
    let clock = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    // Wraps after 49 days; only differences matter (see `Tick`).
    Tick((clock.tv_sec.cast_unsigned() * 1000 + clock.tv_nsec.cast_unsigned() / 1_000_000) as u32)
}

/// Wall-clock time in milliseconds since the Unix epoch.
pub(crate) fn unix_ms(time: SystemTime) -> u64 {
    let elapsed = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX)
}
