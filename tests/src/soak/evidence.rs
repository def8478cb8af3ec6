//! Validity of the soak's evidence: complete captures, and log timestamps of a shifted clock.

#[cfg(test)]
mod tests;

/// Tolerance between a log line's timestamp and the time at which it was written, seconds; clocks jump by at least 5.
const TOLERANCE: f64 = 1.0;

/// Why a capture is insufficient, if so: it is empty, or lacks more than 1 in 100 frames.
pub fn capture_error(place: &str, frames: usize, missed: u64) -> Option<String> {
    if frames == 0 {
        return Some(format!("no frames were captured {place}"));
    }
    let is_incomplete = missed * 100 > frames as u64;
    is_incomplete.then(|| format!("{missed} frames {place} were not captured, in addition to {frames} that were"))
}

/// Why the timestamp of a line written between two times doesn't match a clock offset, if so.
pub fn clock_error(timestamp: &str, offset: f64, (from, to): (f64, f64)) -> Option<String> {
    let Some(shown) = unix_seconds(timestamp) else { return Some(format!("`{timestamp}` is no timestamp")) };
    let is_right = (from - TOLERANCE..=to + TOLERANCE).contains(&(shown - offset));
    (!is_right).then(|| format!("the clock's offset should be {offset} s, and is {:.1} s", shown - to))
}

/// Seconds since the epoch of a log timestamp (RFC 3339, UTC).
fn unix_seconds(timestamp: &str) -> Option<f64> {
    let (date, time) = timestamp.strip_suffix('Z')?.split_once('T')?;
    let mut date = date.splitn(3, '-').map(|text| text.parse::<i32>().ok());
    let (year, month, day) = (date.next()??, date.next()??, date.next()??);
    let mut time = time.splitn(3, ':').map(|text| text.parse::<f64>().ok());
    let (hour, minute, second) = (time.next()??, time.next()??, time.next()??);
    // In years that begin in March the leap day is the last day.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = 365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day - 1 - 719_468;
    Some(f64::from(days) * 86_400.0 + hour * 3_600.0 + minute * 60.0 + second)
}
