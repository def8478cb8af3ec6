//! Evidence of the soak, which itself has no harness.

use crate::evidence::{capture_error, clock_error};

#[test]
fn a_capture_of_nothing_or_with_holes_is_no_evidence() {
    assert_eq!((capture_error("outside", 1000, 0), capture_error("outside", 1000, 10)), (None, None));
    assert_eq!(capture_error("outside", 0, 0).unwrap(), "nothing was captured outside");
    assert!(capture_error("outside", 0, 7).is_some());
    let holes = capture_error("outside", 1000, 11).unwrap();
    assert_eq!(holes, "11 frames outside were not captured, beside 1000 that were");
}

#[test]
fn a_clock_is_where_its_log_says() {
    // What `date -u -d @1709210096` prints: a leap day.
    let (stamp, real) = ("2024-02-29T12:34:56.250000Z", 1_709_210_096.25);
    let written = (real - 0.1, real + 0.1);
    assert_eq!(clock_error(stamp, 0.0, written), None);
    for seconds in [-86_400.0, -3_600.0, -5.0, 5.0, 3_600.0, 30.0 * 86_400.0] {
        assert_eq!(clock_error(stamp, seconds, (written.0 - seconds, written.1 - seconds)), None);
        let why = clock_error(stamp, seconds, written).unwrap();
        assert!(why.contains(&format!("should be {seconds} s off, and is -0.1 s")), "{why}");
    }
    assert_eq!(clock_error("1970-01-01T00:00:00Z", 0.0, (0.0, 0.0)), None);
    assert_eq!(clock_error("2000-03-01T00:00:00Z", 0.0, (951_868_800.0, 951_868_800.0)), None);
    for broken in ["", "2024-02-29", "2024-02-29T12:34Z", "yesterdayTnoonZ"] {
        assert_eq!(clock_error(broken, 0.0, written), Some(format!("`{broken}` is no time")));
    }
}
