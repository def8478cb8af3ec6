//! Structured logging to stderr: events with fields, as text or JSON. Lines that can't be written are lost and counted;
//! the process goes on.

mod line_writer;

use std::backtrace::{Backtrace, BacktraceStatus};
use std::fmt::Write as _;
use std::io::{self, IsTerminal};
use std::panic::PanicHookInfo;
use std::sync::OnceLock;

use tracing::Subscriber;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

use self::line_writer::{LineWriter, Stderr};
use crate::config::{Log, LogFormat};

/// The environment variable that overrides the configured level.
const VARIABLE: &str = "RUST_LOG";
/// Not logged: what the Kubernetes client says of each failed request, whose callers report it once.
const EXCLUDED: &str = "kube_client=off";

/// The stderr of a process that logs.
static STDERR: OnceLock<LineWriter<Stderr>> = OnceLock::new();

/// Installs the global subscriber as configured; `RUST_LOG` overrides the level. Later calls have no effect.
pub fn start(log: Log) {
    let requested = std::env::var(VARIABLE).ok();
    let (filter, invalid) = filter(requested.as_deref(), log);
    let stderr = STDERR.get_or_init(|| LineWriter::new(Stderr::open()));
    let subscriber = subscriber(log.format, filter, move || Line(stderr), io::stderr().is_terminal());
    std::panic::set_hook(Box::new(report_panic));
    // Fails when a subscriber is already installed: tests run several gateways in one process.
    let _ = tracing::subscriber::set_global_default(subscriber);
    if let Some(error) = invalid {
        tracing::warn!(event = "log_level", error, "{VARIABLE} is invalid; log.level applies");
    }
}

/// Log lines that couldn't be written.
pub(crate) fn lost_lines() -> u64 {
    STDERR.get().map_or(0, LineWriter::lost)
}

/// Writes the last words of a process that logs; false if it doesn't log.
pub(crate) fn print_last(text: &str) -> bool {
    let Some(stderr) = STDERR.get() else { return false };
    stderr.put_last(format!("{text}\n").as_bytes());
    true
}

/// Reports a panic, which ends the process: a reader of stderr that has stopped doesn't keep it from ending.
fn report_panic(panic: &PanicHookInfo<'_>) {
    let thread = std::thread::current();
    let mut text = format!("thread '{}' {panic}", thread.name().unwrap_or("unnamed"));
    let backtrace = Backtrace::capture();
    if backtrace.status() == BacktraceStatus::Captured {
        let _ = write!(text, "\n{backtrace}");
    }
    print_last(&text);
}

/// A line of the log, which the subscriber writes in one call.
struct Line(&'static LineWriter<Stderr>);

impl io::Write for Line {
    /// Never fails: the subscriber has no other place for a line, and would panic.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.put(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The effective filter, and the parse error of an invalid override.
fn filter(requested: Option<&str>, log: Log) -> (EnvFilter, Option<String>) {
    let configured = EnvFilter::new(format!("{},{EXCLUDED}", log.level.as_str()));
    match requested.filter(|text| !text.trim().is_empty()).map(EnvFilter::try_new) {
        None => (configured, None),
        Some(Ok(filter)) => (filter, None),
        Some(Err(error)) => (configured, Some(error.to_string())),
    }
}

fn subscriber<W>(format: LogFormat, filter: EnvFilter, writer: W, ansi: bool) -> Box<dyn Subscriber + Send + Sync>
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(writer).with_target(false);
    // It would report a failed write to stderr, and panic if that fails, too.
    let builder = builder.log_internal_errors(false);
    match format {
        LogFormat::Text => Box::new(builder.with_ansi(ansi).finish()),
        LogFormat::Json => Box::new(builder.json().flatten_event(true).finish()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, Write};
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::config::LogLevel;

    #[derive(Clone, Default)]
    struct Buffer(Arc<Mutex<Vec<u8>>>);

    impl Write for Buffer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// The output for one `ready` event and one debug event.
    fn logged(format: LogFormat, requested: Option<&str>) -> String {
        let buffer = Buffer::default();
        let writer = buffer.clone();
        let (filter, _) = filter(requested, Log { format, level: LogLevel::Info });
        let subscriber = subscriber(format, filter, move || writer.clone(), false);
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!(event = "ready", name = "gw-a", "ready");
            tracing::debug!(event = "detail", "detail");
        });
        String::from_utf8(buffer.0.lock().unwrap().clone()).unwrap()
    }

    #[test]
    fn json_fields_are_at_the_top_level() {
        let text = logged(LogFormat::Json, None);
        let line: serde_json::Value = serde_json::from_str(text.trim_end()).unwrap();
        assert_eq!(line["event"], "ready");
        assert_eq!(line["message"], "ready");
        assert_eq!(line["name"], "gw-a");
        assert_eq!(line["level"], "INFO");
    }

    #[test]
    fn text_lines_have_the_same_fields() {
        let text = logged(LogFormat::Text, None);
        assert!(text.contains("ready event=\"ready\" name=\"gw-a\""), "{text}");
        assert_eq!(text.lines().count(), 1);
    }

    #[test]
    fn a_valid_rust_log_overrides_the_level() {
        assert!(logged(LogFormat::Text, Some("debug")).contains("detail"));
        assert!(logged(LogFormat::Text, Some("off")).is_empty());
        assert!(!logged(LogFormat::Text, Some(" ")).contains("detail"), "a blank override is ignored");
        let log = Log { format: LogFormat::Text, level: LogLevel::Info };
        assert!(filter(Some("vipgate=nonsense"), log).1.is_some());
        assert_eq!(logged(LogFormat::Text, Some("vipgate=nonsense")).lines().count(), 1, "log.level applies");
    }
}
