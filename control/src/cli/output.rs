//! Writing answers to stdout: text for people, JSON for programs.

use std::io::{self, Write};

use serde::Serialize;

use crate::failure::Failure;

/// Writes a piece of an answer; says whether anybody still reads. Somebody who stops reading (`| head`) is no error.
pub(crate) fn put(text: &str) -> Result<bool, Failure> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Failure::runtime(format_args!("cannot write the answer: {error}"))),
    }
}

/// Writes a whole answer.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    put(text).map(drop)
}

/// Writes one JSON document.
pub(crate) fn json(value: &impl Serialize) -> Result<(), Failure> {
    let mut text = serde_json::to_string_pretty(value).map_err(Failure::runtime)?;
    text.push('\n');
    print(&text)
}

/// Says on stderr what went wrong; a stderr that nobody reads changes nothing.
pub(crate) fn complain(text: impl std::fmt::Display) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// Text from elsewhere (manifests, names) as a terminal may see it: without control characters.
pub(crate) fn harmless(text: &str) -> String {
    text.chars().map(|char| if char.is_control() && char != '\n' { '\u{fffd}' } else { char }).collect()
}

/// Tenths of a percent that a part is of a whole, rounded up: what isn't empty doesn't look so.
pub(crate) fn permille(part: u64, whole: u64) -> u64 {
    (part * 1000).div_ceil(whole.max(1))
}

/// Tenths of a percent, as people read them: `57.6 %`.
pub(crate) fn percent(permille: u64) -> String {
    format!("{}.{} %", permille / 10, permille % 10)
}

/// A span of time in its two largest units: `350ms`, `12s`, `4m10s`, `2h3m`, `5d1h`.
pub(crate) fn span(milliseconds: u64) -> String {
    let seconds = milliseconds / 1000;
    let two = |large: u64, unit: char, small: u64, part: char| match small {
        0 => format!("{large}{unit}"),
        _ => format!("{large}{unit}{small}{part}"),
    };
    match seconds {
        0 if milliseconds > 0 => format!("{milliseconds}ms"),
        0..60 => format!("{seconds}s"),
        60..3600 => two(seconds / 60, 'm', seconds % 60, 's'),
        3600..86_400 => two(seconds / 3600, 'h', seconds % 3600 / 60, 'm'),
        _ => two(seconds / 86_400, 'd', seconds % 86_400 / 3600, 'h'),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_read_well() {
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
            assert_eq!(span(milliseconds), text);
        }
    }

    #[test]
    fn nothing_from_a_manifest_steers_the_terminal() {
        assert_eq!(harmless("a\x1b[2Jb\nc\x07\r"), "a\u{fffd}[2Jb\nc\u{fffd}\u{fffd}");
    }
}
