//! Tests of the soak's evidence.

use super::{capture_error, clock_error};

#[test]
fn an_empty_or_incomplete_capture_is_rejected() {
    assert_eq!((capture_error("outside", 1000, 0), capture_error("outside", 1000, 10)), (None, None));
    assert_eq!(capture_error("outside", 0, 0).unwrap(), "no frames were captured outside");
    assert!(capture_error("outside", 0, 7).is_some());
    let error = capture_error("outside", 1000, 11).unwrap();
    assert_eq!(error, "11 frames outside were not captured, in addition to 1000 that were");
}

#[test]
fn a_clock_offset_is_verified_by_log_timestamps() {
    // What `date -u -d @1709210096` prints: a leap day.
    let (timestamp, real) = ("2024-02-29T12:34:56.250000Z", 1_709_210_096.25);
    let written = (real - 0.1, real + 0.1);
    assert_eq!(clock_error(timestamp, 0.0, written), None);
    for seconds in [-86_400.0, -3_600.0, -5.0, 5.0, 3_600.0, 30.0 * 86_400.0] {
        assert_eq!(clock_error(timestamp, seconds, (written.0 - seconds, written.1 - seconds)), None);
        let error = clock_error(timestamp, seconds, written).unwrap();
        assert!(error.contains(&format!("should be {seconds} s, and is -0.1 s")), "{error}");
    }
    assert_eq!(clock_error("1970-01-01T00:00:00Z", 0.0, (0.0, 0.0)), None);
    assert_eq!(clock_error("2000-03-01T00:00:00Z", 0.0, (951_868_800.0, 951_868_800.0)), None);
    for invalid in ["", "2024-02-29", "2024-02-29T12:34Z", "yesterdayTnoonZ"] {
        assert_eq!(clock_error(invalid, 0.0, written), Some(format!("`{invalid}` is no timestamp")));
    }
}
