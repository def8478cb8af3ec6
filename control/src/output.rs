//! Output to stdout and stderr: text or JSON, and formatting helpers.

use std::io::{self, Write};

use serde::Serialize;

use crate::command_error::CommandError;

/// Writes text to stdout; false if the reader has closed the pipe (`| head`), which is no error.
pub(crate) fn put(text: &str) -> Result<bool, CommandError> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(CommandError::runtime(error).context("cannot write to stdout")),
    }
}

/// Writes text to stdout; a closed pipe is no error.
pub(crate) fn print(text: &str) -> Result<(), CommandError> {
    put(text).map(drop)
}

/// Writes a line of progress to stdout, like `println!`, but ignores errors: what a command has begun goes on, and is
/// cleaned up, without a reader.
macro_rules! progress {
    ($($text:tt)*) => {
        drop($crate::output::put(&format!("{}\n", format_args!($($text)*))))
    };
}

pub(crate) use progress;

/// Writes one JSON document.
pub(crate) fn json(value: &impl Serialize) -> Result<(), CommandError> {
    let mut text = serde_json::to_string_pretty(value).map_err(CommandError::runtime)?;
    text.push('\n');
    print(&text)
}

/// Writes a line to stderr; errors are ignored.
pub(crate) fn print_error(text: impl std::fmt::Display) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// Replaces control characters in text from manifests and names, which could be terminal escape sequences.
pub(crate) fn sanitize(text: &str) -> String {
    text.chars().map(|char| if char.is_control() && char != '\n' { '\u{fffd}' } else { char }).collect()
}

/// Ratio in tenths of a percent, rounded up: only 0 of the whole is shown as 0.
pub(crate) fn permille(part: u64, whole: u64) -> u64 {
    (part * 1000).div_ceil(whole.max(1))
}

/// Formats tenths of a percent: `57.6 %`.
pub(crate) fn format_percent(permille: u64) -> String {
    format!("{}.{} %", permille / 10, permille % 10)
}

/// Formats a number of things: `1 Service`, `2 Services`.
pub(crate) fn format_count(count: impl Into<u64>, noun: &str) -> String {
    let count = count.into();
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

/// Formats a duration in its two largest units: `350ms`, `12s`, `4m10s`, `2h3m`, `5d1h`.
pub(crate) fn format_duration(milliseconds: u64) -> String {
    let seconds = milliseconds / 1000;
    let units = |large: u64, large_unit: char, small: u64, small_unit: char| match small {
        0 => format!("{large}{large_unit}"),
        _ => format!("{large}{large_unit}{small}{small_unit}"),
    };
    match seconds {
        0 if milliseconds > 0 => format!("{milliseconds}ms"),
        0..60 => format!("{seconds}s"),
        60..3600 => units(seconds / 60, 'm', seconds % 60, 's'),
        3600..86_400 => units(seconds / 3600, 'h', seconds % 3600 / 60, 'm'),
        _ => units(seconds / 86_400, 'd', seconds % 86_400 / 3600, 'h'),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_their_two_largest_units() {
        let expected = [
            (0, "0s"),
            (350, "350ms"),
            (59_999, "59s"),
            (60_000, "1m"),
            (250_000, "4m10s"),
            (7_440_000, "2h4m"),
            (86_400_000, "1d"),
            (435_600_000, "5d1h"),
        ];
        for (milliseconds, text) in expected {
            assert_eq!(format_duration(milliseconds), text);
        }
    }

    #[test]
    fn control_characters_of_manifests_are_replaced() {
        assert_eq!(sanitize("a\x1b[2Jb\nc\x07\r"), "a\u{fffd}[2Jb\nc\u{fffd}\u{fffd}");
    }
}
