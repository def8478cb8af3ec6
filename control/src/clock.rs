//! Clocks: the tick of workers, leases and peer links, and wall-clock time.

use std::time::SystemTime;

use vipgate_dataplane::flow::time::Tick;

/// The current tick: milliseconds of `CLOCK_BOOTTIME`, comparable across workers and across processes of one boot. Not
/// affected by wall-clock changes. It advances while the machine is suspended, as `CLOCK_MONOTONIC` doesn't: other
/// gateways take over meanwhile, so a lease must not outlast it.
pub(crate) fn now() -> Tick {
    let clock = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    // Wraps after 49 days; only differences matter (see `Tick`).
    Tick((clock.tv_sec.cast_unsigned() * 1000 + clock.tv_nsec.cast_unsigned() / 1_000_000) as u32)
}

/// Wall-clock time in milliseconds since the Unix epoch.
pub(crate) fn unix_ms(time: SystemTime) -> u64 {
    let elapsed = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `/proc/uptime` counts the time of suspensions.
    #[test]
    fn ticks_count_all_the_time_since_boot() {
        let uptime = || {
            let text = std::fs::read_to_string("/proc/uptime").unwrap();
            // With hundredths of a second.
            let hundredths: u64 = text.split(' ').next().unwrap().replace('.', "").parse().unwrap();
            // Modulo 2^32, like ticks.
            Tick((hundredths * 10) as u32)
        };
        let (before, now, after) = (uptime(), now(), uptime());
        assert!(now.plus(20).reached(before) && after.plus(20).reached(now), "{before:?} {now:?} {after:?}");
    }
}
