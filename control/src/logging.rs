//! Structured logs: events with fields, as text for people or as JSON for machines, on stderr.

use std::io::IsTerminal;

use tracing::Subscriber;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

use crate::config::{Log, LogFormat};

/// The environment variable that overrides the configured level.
const VARIABLE: &str = "RUST_LOG";

/// Begins to log as configured; the environment variable `RUST_LOG` overrides the level. A second call changes nothing.
pub fn start(log: Log) {
    let wish = std::env::var(VARIABLE).ok();
    let (filter, misunderstood) = filter(wish.as_deref(), log);
    let subscriber = subscriber(log.format, filter, std::io::stderr, std::io::stderr().is_terminal());
    // An error means that somebody has begun already, which is fine: tests run several gateways in one process.
    let _ = tracing::subscriber::set_global_default(subscriber);
    if let Some(error) = misunderstood {
        tracing::warn!(event = "log_level", error, "{VARIABLE} is not understood; log.level holds");
    }
}

/// What is logged, and what is wrong with the wish for something else.
fn filter(wish: Option<&str>, log: Log) -> (EnvFilter, Option<String>) {
    let configured = EnvFilter::new(log.level.as_str());
    match wish.filter(|wish| !wish.trim().is_empty()).map(EnvFilter::try_new) {
        None => (configured, None),
        Some(Ok(wished)) => (wished, None),
        Some(Err(error)) => (configured, Some(error.to_string())),
    }
}

fn subscriber<W>(format: LogFormat, filter: EnvFilter, writer: W, colours: bool) -> Box<dyn Subscriber + Send + Sync>
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(writer).with_target(false);
    match format {
        LogFormat::Text => Box::new(builder.with_ansi(colours).finish()),
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
    struct Page(Arc<Mutex<Vec<u8>>>);

    impl Write for Page {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// What is logged of a `ready` and of a debug event.
    fn logged(format: LogFormat, wish: Option<&str>) -> String {
        let page = Page::default();
        let writer = page.clone();
        let (filter, _) = filter(wish, Log { format, level: LogLevel::Info });
        let subscriber = subscriber(format, filter, move || writer.clone(), false);
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!(event = "ready", name = "gw-a", "ready");
            tracing::debug!(event = "detail", "detail");
        });
        String::from_utf8(page.0.lock().unwrap().clone()).unwrap()
    }

    #[test]
    fn json_lines_have_their_fields_at_the_top() {
        let text = logged(LogFormat::Json, None);
        let line: serde_json::Value = serde_json::from_str(text.trim_end()).unwrap();
        assert_eq!(line["event"], "ready");
        assert_eq!(line["message"], "ready");
        assert_eq!(line["name"], "gw-a");
        assert_eq!(line["level"], "INFO");
    }

    #[test]
    fn text_has_the_same_fields() {
        let text = logged(LogFormat::Text, None);
        assert!(text.contains("ready event=\"ready\" name=\"gw-a\""), "{text}");
        assert_eq!(text.lines().count(), 1);
    }

    #[test]
    fn the_environment_overrides_the_level_if_it_is_understood() {
        assert!(logged(LogFormat::Text, Some("debug")).contains("detail"));
        assert!(logged(LogFormat::Text, Some("off")).is_empty());
        assert!(!logged(LogFormat::Text, Some(" ")).contains("detail"), "empty is no wish");
        let log = Log { format: LogFormat::Text, level: LogLevel::Info };
        assert!(filter(Some("vipgate=nonsense"), log).1.is_some());
        assert_eq!(logged(LogFormat::Text, Some("vipgate=nonsense")).lines().count(), 1, "log.level holds");
    }
}
