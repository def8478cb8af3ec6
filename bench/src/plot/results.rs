//! Results of benchmarks, read from JSON lines.

use serde::Deserialize;
use serde_json::Value;

/// A result that has a chart.
#[derive(Debug, Deserialize)]
#[serde(tag = "benchmark", rename_all = "snake_case")]
enum Line {
    Path(PathResult),
    WireLoad(LoadResult),
    Failover(FailoverResult),
}

/// A line of `path`.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct PathResult {
    pub(super) sessions: u32,
    pub(super) direction: String,
    pub(super) protocol: String,
    pub(super) family: String,
    pub(super) workers: u32,
    pub(super) ns_per_packet: f64,
    pub(super) forwarding_ns: f64,
    pub(super) random_line_ns: f64,
}

/// A line of `wire --loads`.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct LoadResult {
    pub(super) subject: String,
    pub(super) size: u16,
    pub(super) flows: u32,
    pub(super) control_mpps: f64,
    pub(super) offered_mpps: f64,
    pub(super) mpps: f64,
}

/// A line of `failover`.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct FailoverResult {
    pub(super) lease_ttl_ms: u64,
    pub(super) router_detection_ms: u64,
    /// By kill and probe flow: start and end of its longest time without a reply, in ms after the kill.
    #[serde(rename = "outages_ms")]
    pub(super) outages: Vec<Vec<[f64; 2]>>,
}

/// All results of a file.
#[derive(Debug, Default)]
pub(super) struct Results {
    pub(super) path: Vec<PathResult>,
    pub(super) loads: Vec<LoadResult>,
    pub(super) failovers: Vec<FailoverResult>,
}

/// Reads all lines; returns a warning for each that is skipped.
pub(super) fn parse(text: &str) -> (Results, Vec<String>) {
    let (mut results, mut warnings) = (Results::default(), Vec::new());
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        match serde_json::from_str(line) {
            Ok(Line::Path(result)) => results.path.push(result),
            Ok(Line::WireLoad(result)) => results.loads.push(result),
            Ok(Line::Failover(result)) => results.failovers.push(result),
            Err(error) => warnings.push(format!("line {}: skipped: {}", number + 1, reason(line, &error))),
        }
    }
    (results, warnings)
}

/// Why a line is skipped.
fn reason(line: &str, error: &serde_json::Error) -> String {
    let value: Option<Value> = serde_json::from_str(line).ok();
    match value.as_ref().map(|value| value["benchmark"].as_str()) {
        None => "it is not JSON".to_owned(),
        Some(None) => "it is not a result of a benchmark".to_owned(),
        Some(Some(benchmark @ ("path" | "wire_load" | "failover"))) => format!("a result of `{benchmark}`: {error}"),
        Some(Some(benchmark)) => format!("there is no chart of `{benchmark}`"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_lines_are_skipped_with_a_warning() {
        let text =
            "{\"benchmark\": \"wire\", \"mpps\": 1.0}\n\nno JSON\n{}\n{\"benchmark\": \"path\", \"sessions\": 5}\n";
        let (results, warnings) = parse(text);
        assert!(results.path.is_empty() && results.loads.is_empty() && results.failovers.is_empty());
        assert_eq!(warnings.len(), 4);
        assert_eq!(warnings[0], "line 1: skipped: there is no chart of `wire`");
        assert_eq!(warnings[1], "line 3: skipped: it is not JSON");
        assert_eq!(warnings[2], "line 4: skipped: it is not a result of a benchmark");
        assert!(warnings[3].starts_with("line 5: skipped: a result of `path`: missing field"), "{}", warnings[3]);
    }
}
