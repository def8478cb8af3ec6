//! Reference of all metrics as Markdown, from their definitions: the generated part of `docs/metrics.md`.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use vipgate_dataplane::flow::drop_reason::DropReason;

use super::definitions::{
    DEVICE_METRICS, GROUP_METRICS, PACKET_METRICS, POLICY_METRICS, PORT_METRICS, PROCESS_METRICS, SESSION_METRICS,
    TRACKING_METRICS, node, policy_server,
};
use crate::listener::CONNECTION_METRICS;
use crate::metric::{Kind, LabelValues, Metric};
use crate::source::ingest::SOURCE_METRICS;
use crate::xds::tls::CERTIFICATE_METRICS;

/// A chapter of the reference.
struct Section {
    title: &'static str,
    metrics: &'static [&'static [&'static Metric]],
    /// A paragraph after its table.
    note: &'static str,
}

const SECTIONS: [Section; 10] = [
    Section { title: "Packets", metrics: &[PACKET_METRICS], note: "" },
    Section { title: "Sessions", metrics: &[SESSION_METRICS], note: "" },
    Section { title: "Ports", metrics: &[PORT_METRICS], note: "" },
    Section {
        title: "Policy and Services",
        metrics: &[POLICY_METRICS, SOURCE_METRICS],
        note: "`vipgate_policy_source_healthy` and `vipgate_policy_objects` are of gateways with `policy.files`, and \
               of policy servers.",
    },
    Section { title: "Group", metrics: &[GROUP_METRICS], note: "" },
    Section {
        title: "Certificates",
        metrics: &[CERTIFICATE_METRICS],
        note: "Of gateways with an `https` policy server, and of policy servers with `tls`.",
    },
    Section { title: "Links and device", metrics: &[TRACKING_METRICS, DEVICE_METRICS], note: "" },
    Section { title: "Process", metrics: &[PROCESS_METRICS, CONNECTION_METRICS], note: "" },
    Section {
        title: "Policy server",
        metrics: &[policy_server::POLICY_SERVER_METRICS],
        note: "A policy server also has `vipgate_policy_version_info` (the published policy), `vipgate_build_info`, \
               `vipgate_policy_source_healthy`,\n`vipgate_policy_objects`, `vipgate_connections`, \
               `vipgate_connections_refused_total` and `vipgate_log_lines_lost_total`.",
    },
    Section {
        title: "Node agent",
        metrics: &[node::NODE_METRICS],
        note: "A node agent also has `vipgate_build_info` and `vipgate_log_lines_lost_total`. Counters are read from \
               the kernel every five seconds.",
    },
];

/// All metrics with type, labels and description; the values of labels; drop reasons.
pub fn metrics_reference() -> String {
    let mut page = String::new();
    for section in &SECTIONS {
        let rows = section.metrics.iter().copied().flatten().map(|metric| {
            let labels: Vec<_> = metric.labels.iter().map(|label| label.name).collect();
            [
                format!("`{}`", metric.full_name()),
                kind(metric.kind).to_owned(),
                labels.join(", "),
                format!("{}.", metric.help),
            ]
        });
        chapter(&mut page, section.title, "");
        table(&mut page, ["metric", "type", "labels", "description"], rows);
        if !section.note.is_empty() {
            let _ = writeln!(page, "\n{}", section.note);
        }
    }
    chapter(&mut page, "Label values", "");
    table(&mut page, ["label", "values"], label_values());
    let words = "The same words in `vipgate_drops_total{reason}`, logs, `vipgate drops`, `capture` and `trace`.";
    chapter(&mut page, "Drop reasons", words);
    let reasons = DropReason::ALL.map(|reason| [format!("`{}`", reason.name()), reason.help().to_owned()]);
    table(&mut page, ["reason", "description"], reasons);
    page
}

fn chapter(page: &mut String, title: &str, text: &str) {
    let separator = if page.is_empty() { "" } else { "\n" };
    let text = if text.is_empty() { String::new() } else { format!("{text}\n\n") };
    let _ = write!(page, "{separator}## {title}\n\n{text}");
}

fn table<const N: usize>(page: &mut String, head: [&str; N], rows: impl IntoIterator<Item = [String; N]>) {
    let _ = writeln!(page, "| {} |\n|{}", head.join(" | "), "---|".repeat(N));
    for row in rows {
        let _ = writeln!(page, "| {} |", row.join(" | "));
    }
}

fn kind(kind: Kind) -> &'static str {
    match kind {
        Kind::Counter => "counter",
        Kind::Gauge => "gauge",
        Kind::Milliseconds => "gauge, seconds",
        Kind::Info => "info",
    }
}

/// The values of each label. Where metrics use a label differently, the row names them.
fn label_values() -> Vec<[String; 2]> {
    let mut all: BTreeMap<&str, BTreeMap<String, Vec<String>>> = BTreeMap::new();
    for metric in SECTIONS.iter().flat_map(|section| section.metrics.iter().copied().flatten()) {
        for label in metric.labels {
            let metrics = all.entry(label.name).or_default().entry(values(metric, label.values)).or_default();
            metrics.push(format!("`{}`", metric.full_name()));
        }
    }
    let rows = all.into_iter().flat_map(|(label, uses)| {
        let is_single = uses.len() == 1;
        uses.into_iter().map(move |(text, metrics)| {
            let name = if is_single { label.to_owned() } else { format!("{label} of {}", metrics.join(", ")) };
            [name, text]
        })
    });
    rows.collect()
}

fn values(metric: &Metric, values: LabelValues) -> String {
    let list = |values: &[&str]| values.iter().map(|value| format!("`{value}`")).collect::<Vec<_>>().join(", ");
    match (metric.name, values) {
        ("drops", _) => "see [drop reasons](#drop-reasons)".to_owned(),
        ("sessions_expired", LabelValues::Names(_)) => "see [end reasons](#end-reasons)".to_owned(),
        (_, LabelValues::Names(names)) => list(&names()),
        (_, LabelValues::OneOf(values)) => list(values),
        (_, LabelValues::Any(description)) => description.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use vipgate_dataplane::session::end_reason::EndReason;

    use super::*;

    #[test]
    fn every_end_reason_has_a_description() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/metrics.md");
        let page = std::fs::read_to_string(&path).unwrap();
        let (_, descriptions) = page.split_once("\n## End reasons\n").unwrap();
        for reason in EndReason::ALL {
            assert!(descriptions.contains(&format!("\n| `{}` | ", reason.name())), "{}", reason.name());
        }
    }

    #[test]
    fn names_are_unique_and_helps_are_sentences_without_a_period() {
        let mut names = BTreeSet::new();
        for metric in SECTIONS.iter().flat_map(|section| section.metrics.iter().copied().flatten()) {
            assert!(names.insert(metric.name), "{} is defined twice", metric.name);
            assert!(!metric.name.ends_with("_total") && !metric.help.ends_with('.'), "{}", metric.name);
            assert!(metric.help.starts_with(|first: char| first.is_ascii_uppercase()), "{}", metric.help);
        }
    }
}
