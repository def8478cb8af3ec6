//! Evidence of a soak: whether captures are complete enough for the judges, and whether a log line has the time of a faked clock.

/// How far a log line's time may be from the time at which it was written, seconds; clocks jump by at least 5.
const TOLERANCE: f64 = 1.0;

/// Why a capture is no evidence, if so: it is empty, or lacks more than 1 in 100 frames.
pub(crate) fn capture_error(place: &str, frames: usize, missed: u64) -> Option<String> {
    if frames == 0 {
        return Some(format!("nothing was captured {place}"));
    }
    let has_holes = missed * 100 > frames as u64;
    has_holes.then(|| format!("{missed} frames {place} were not captured, beside {frames} that were"))
}

/// Why a line that was written between two moments can't come from a clock that is so many seconds off, if so.
pub(crate) fn clock_error(stamp: &str, seconds: f64, (from, to): (f64, f64)) -> Option<String> {
    let Some(shown) = unix_seconds(stamp) else { return Some(format!("`{stamp}` is no time")) };
    let is_right = (from - TOLERANCE..=to + TOLERANCE).contains(&(shown - seconds));
    (!is_right).then(|| format!("its clock should be {seconds} s off, and is {:.1} s", shown - to))
}

/// Seconds since 1970 of a time as logs have it: RFC 3339, in UTC.
fn unix_seconds(stamp: &str) -> Option<f64> {
    let (date, time) = stamp.strip_suffix('Z')?.split_once('T')?;
    let mut date = date.splitn(3, '-').map(|text| text.parse::<i32>().ok());
    let (year, month, day) = (date.next()??, date.next()??, date.next()??);
    let mut time = time.splitn(3, ':').map(|text| text.parse::<f64>().ok());
    let (hour, minute, second) = (time.next()??, time.next()??, time.next()??);
    // Years that begin in March end with their leap day.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = 365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day - 1 - 719_468;
    Some(f64::from(days) * 86_400.0 + hour * 3_600.0 + minute * 60.0 + second)
}
