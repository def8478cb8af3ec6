//! Exposition formats: the Prometheus text format (version 0.0.4), with full metric names in `# HELP` and `# TYPE`
//! lines, and OpenMetrics on request (`Accept`), where only the samples of a counter have the suffix `_total`.

use std::fmt::{self, Write};
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use crate::metric::{Family, Kind};

/// Media type of the text format.
pub(super) const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";
/// Media type of OpenMetrics.
pub(super) const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Encodes metrics in the text format.
pub(super) fn text(families: &[Family]) -> Result<String, fmt::Error> {
    let mut out = String::new();
    for family in families {
        let kind = match family.metric.kind {
            Kind::Counter => "counter",
            Kind::Gauge | Kind::Milliseconds | Kind::Info => "gauge",
        };
        let name = family.metric.full_name();
        writeln!(out, "# HELP {name} {}.", family.metric.help)?;
        writeln!(out, "# TYPE {name} {kind}")?;
        for (labels, value) in &family.values {
            out.push_str(&name);
            for ((label, text), separator) in labels.iter().zip(std::iter::once("{").chain(std::iter::repeat(","))) {
                write!(out, "{separator}{label}=\"{}\"", escaped(text))?;
            }
            out.push_str(if labels.is_empty() { " " } else { "} " });
            match family.metric.kind {
                Kind::Milliseconds => writeln!(out, "{}", seconds(*value))?,
                Kind::Counter | Kind::Gauge | Kind::Info => writeln!(out, "{value}")?,
            }
        }
    }
    Ok(out)
}

fn seconds(ms: u64) -> f64 {
    Duration::from_millis(ms).as_secs_f64()
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// Encodes metrics as OpenMetrics.
pub(super) fn open_metrics(families: Vec<Family>) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(SnapshotCollector(families)));
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry)?;
    Ok(text)
}

/// A snapshot of all metrics as a collector of the `prometheus-client` library.
#[derive(Debug)]
struct SnapshotCollector(Vec<Family>);

impl Collector for SnapshotCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        for family in &self.0 {
            let (name, help) = (format!("vipgate_{}", family.metric.name), format!("{}.", family.metric.help));
            let metric = encoder.encode_descriptor(&name, &help, None, family.metric_type())?;
            family.encode(metric)?;
        }
        Ok(())
    }
}

impl EncodeMetric for Family {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), fmt::Error> {
        for (labels, value) in &self.values {
            match self.metric.kind {
                Kind::Info => encoder.encode_info(labels)?,
                // An empty label set would be encoded as `{}`.
                _ if labels.is_empty() => self.encode_value(&mut encoder, *value)?,
                _ => self.encode_value(&mut encoder.encode_family(labels)?, *value)?,
            }
        }
        Ok(())
    }

    fn metric_type(&self) -> MetricType {
        match self.metric.kind {
            Kind::Counter => MetricType::Counter,
            Kind::Gauge | Kind::Milliseconds => MetricType::Gauge,
            Kind::Info => MetricType::Info,
        }
    }
}

impl Family {
    fn encode_value(&self, encoder: &mut MetricEncoder<'_>, value: u64) -> Result<(), fmt::Error> {
        match self.metric.kind {
            Kind::Counter => encoder.encode_counter::<NoLabelSet, u64, u64>(&value, None),
            Kind::Milliseconds => encoder.encode_gauge(&seconds(value)),
            Kind::Gauge | Kind::Info => encoder.encode_gauge(&i64::try_from(value).unwrap_or(i64::MAX)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metric::{Label, metrics};

    #[test]
    fn the_text_format_has_full_names_and_escapes_labels() {
        metrics! {
            /// All.
            ALL:
            A = Counter("a", [Label::any("x", ""), Label::any("y", "")]): "What a is";
            B = Gauge("b", []): "What b is";
            C = Info("c", [Label::any("version", "")]): "What c is";
            D = Milliseconds("d", []): "What d is";
        }
        assert_eq!(ALL.len(), 4);
        let families = [
            A.family(vec![(vec![("x", "1".to_owned()), ("y", "\"b\\\n".to_owned())], 7)]),
            D.single(420),
            B.family(vec![]),
            C.by_label([("1", 1)]),
        ];
        let expected = "# HELP vipgate_a_total What a is.\n\
                        # TYPE vipgate_a_total counter\n\
                        vipgate_a_total{x=\"1\",y=\"\\\"b\\\\\\n\"} 7\n\
                        # HELP vipgate_d What d is.\n\
                        # TYPE vipgate_d gauge\n\
                        vipgate_d 0.42\n\
                        # HELP vipgate_b What b is.\n\
                        # TYPE vipgate_b gauge\n\
                        # HELP vipgate_c_info What c is.\n\
                        # TYPE vipgate_c_info gauge\n\
                        vipgate_c_info{version=\"1\"} 1\n";
        assert_eq!(text(&families).unwrap(), expected);
    }
}
