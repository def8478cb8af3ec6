//! The charts: packet path over sessions, forwarded over offered load, flows without a reply after a failover.

use std::fmt::Write as _;

use super::axis::Axis;
use super::chart::{Chart, Drawing, Series};
use super::results::{FailoverResult, LoadResult, PathResult, Results};

/// Time per packet of VPP 26.10 (NAT44-ED, UDP from outside to inside, random order, one core) in ns, by sessions. Measured
/// by this project on a machine of the same kind, not in the same run; without its packet generator, middles of ranges of
/// medians: 58 to 60, 199 to 210, 357 to 436.
const VPP_NS: [[f64; 2]; 3] = [[1000.0, 58.0], [65_536.0, 205.0], [1_048_576.0, 400.0]];
/// Time without a reply from which a flow counts as interrupted: four intervals of the failover benchmark's probes, in ms.
const MIN_OUTAGE_MS: f64 = 100.0;

/// A chart and its file name.
#[derive(Debug)]
pub(super) struct Figure {
    pub(super) name: String,
    pub(super) chart: Chart,
    /// Points of results.
    pub(super) points: usize,
}

/// All charts that the results allow.
pub(super) fn draw(results: &Results) -> Vec<Figure> {
    let mut figures = Vec::new();
    figures.extend(path_over_sessions(&results.path));
    let mut cases: Vec<(u32, u16)> = results.loads.iter().map(|it| (it.flows, it.size)).collect();
    cases.sort_unstable();
    cases.dedup();
    for (flows, size) in cases {
        let of_case: Vec<&LoadResult> =
            results.loads.iter().filter(|it| (it.flows, it.size) == (flows, size)).collect();
        figures.extend(forwarded_over_offered(flows, size, &of_case));
    }
    figures.extend(interrupted_flows(&results.failovers));
    figures
}

/// Time per packet over sessions, with the machine's limit and VPP.
fn path_over_sessions(results: &[PathResult]) -> Option<Figure> {
    let first = results.first()?;
    let kinds = distinct(results.iter().map(PathResult::kind));
    let points_of = |kind: &str, value: fn(&PathResult) -> f64| {
        let of_kind = results.iter().filter(|it| it.kind() == kind);
        sorted(of_kind.map(|it| [f64::from(it.sessions), value(it)]).collect())
    };
    let measured = |kind: &String| Series {
        label: format!("vipgate, {kind}"),
        drawing: Drawing::Measured,
        points: points_of(kind, |it| it.ns_per_packet),
    };
    let mut series: Vec<Series> = kinds.iter().map(measured).collect();
    series.push(Series {
        label: format!("limit: forwarding alone and one random read of memory, {}", first.kind()),
        drawing: Drawing::Comparison,
        points: points_of(&first.kind(), |it| it.forwarding_ns + it.random_line_ns),
    });
    series.push(Series {
        label: "VPP 26.10 NAT44-ED, IPv4, measured in another run".to_owned(),
        drawing: Drawing::Measured,
        points: VPP_NS.to_vec(),
    });
    let values = |at: usize| series.iter().flat_map(move |it| it.points.iter().map(move |point| point[at]));
    let (x, y) = (Axis::logarithmic("sessions", values(0)), Axis::linear("ns per packet", 0.0, values(1)));
    let chart = Chart {
        title: "Packet path of established sessions".to_owned(),
        note: "one worker, 64-byte packets in memory, random order; vipgate-bench path".to_owned(),
        x,
        y,
        series,
    };
    Some(Figure { name: "path-sessions.svg".to_owned(), chart, points: results.len() })
}

/// Forwarded over offered load of each system.
fn forwarded_over_offered(flows: u32, size: u16, results: &[&LoadResult]) -> Option<Figure> {
    let control = results.first()?.control_mpps;
    let subjects = distinct(results.iter().map(|it| it.subject.clone()));
    let measured = |subject: &String| {
        let of_subject = results.iter().filter(|it| it.subject == *subject);
        Series {
            label: subject_label(subject),
            drawing: Drawing::Measured,
            points: sorted(of_subject.map(|it| [it.offered_mpps, it.mpps]).collect()),
        }
    };
    let mut series: Vec<Series> = subjects.iter().map(measured).collect();
    let x = Axis::linear("offered, Mpps", 0.0, results.iter().map(|it| it.offered_mpps));
    let y = Axis::linear("forwarded, Mpps", 0.0, results.iter().map(|it| it.mpps));
    let end = x.last().min(y.last());
    let all = Series {
        label: "everything forwarded".to_owned(),
        drawing: Drawing::Comparison,
        points: vec![[0.0, 0.0], [end, end]],
    };
    series.push(all);
    let chart = Chart {
        title: format!("Forwarded over offered load, {flows} flows"),
        note: format!(
            "{size}-byte UDP frames over veth; the source alone sends {control:.1} Mpps; vipgate-bench wire --loads"
        ),
        x,
        y,
        series,
    };
    Some(Figure { name: format!("wire-loads-{flows}-{size}.svg"), chart, points: results.len() })
}

/// Flows without a reply over the time since a gateway was killed, a series per kill.
fn interrupted_flows(results: &[FailoverResult]) -> Option<Figure> {
    let first = results.first()?;
    let mut series = Vec::new();
    for result in results {
        for (kill, outages) in result.outages.iter().enumerate() {
            series.push(Series {
                label: format!("kill {} of {}, lease of {} ms", kill + 1, result.outages.len(), result.lease_ttl_ms),
                drawing: Drawing::Steps,
                points: interrupted_over_time(outages),
            });
        }
    }
    let points = series.iter().map(|it| it.points.len()).sum();
    let values = |at: usize| series.iter().flat_map(move |it| it.points.iter().map(move |point| point[at]));
    let x = Axis::linear("ms since the gateway was killed", values(0).fold(0.0, f64::min), values(0));
    let y = Axis::linear(&format!("flows without a reply for {MIN_OUTAGE_MS} ms or longer"), 0.0, values(1));
    let chart = Chart {
        title: "Failover: flows without a reply".to_owned(),
        note: format!(
            "UDP flows, a datagram every 25 ms; routers detect after {} ms; vipgate-bench failover",
            first.router_detection_ms
        ),
        x,
        y,
        series,
    };
    Some(Figure { name: "failover-outages.svg".to_owned(), chart, points })
}

/// The number of interrupted flows after each start and each end of an outage; two points per outage.
fn interrupted_over_time(outages: &[[f64; 2]]) -> Vec<[f64; 2]> {
    let interruptions = outages.iter().filter(|[start, end]| end - start >= MIN_OUTAGE_MS);
    let mut changes: Vec<[f64; 2]> = interruptions.flat_map(|&[start, end]| [[start, 1.0], [end, -1.0]]).collect();
    changes.sort_by(|a, b| a[0].total_cmp(&b[0]));
    let mut count = 0.0;
    changes
        .iter()
        .map(|&[at, change]| {
            [at, {
                count += change;
                count
            }]
        })
        .collect()
}

impl PathResult {
    /// What a series has in common.
    fn kind(&self) -> String {
        let mut kind = format!("{}, {}", if self.family == "ipv6" { "IPv6" } else { "IPv4" }, self.direction);
        if self.protocol != "udp" {
            let _ = write!(kind, ", {}", self.protocol.to_uppercase());
        }
        if self.workers > 1 {
            let _ = write!(kind, ", {} workers", self.workers);
        }
        kind
    }
}

fn subject_label(subject: &str) -> String {
    match subject {
        "nft" => "kernel, nftables SNAT".to_owned(),
        "ovs" => "Open vSwitch, AF_XDP and conntrack SNAT".to_owned(),
        "xdp" => "stateless forwarder in XDP".to_owned(),
        "plain" => "kernel, no SNAT".to_owned(),
        other => other.to_owned(),
    }
}

/// Each value once, in order of its first appearance.
fn distinct(values: impl Iterator<Item = String>) -> Vec<String> {
    let mut distinct: Vec<String> = Vec::new();
    for value in values {
        if !distinct.contains(&value) {
            distinct.push(value);
        }
    }
    distinct
}

fn sorted(mut points: Vec<[f64; 2]>) -> Vec<[f64; 2]> {
    points.sort_by(|a, b| a[0].total_cmp(&b[0]));
    points
}

#[cfg(test)]
mod tests {
    use quick_xml::Reader;
    use quick_xml::events::Event;

    use super::*;
    use crate::plot::results;

    const PATH: &str = r#"{"benchmark":"path","sessions":SESSIONS,"direction":"mix","protocol":"udp","family":"ipv4","workers":1,"ns_per_packet":22.3,"forwarding_ns":5.7,"random_line_ns":2.8}"#;
    const LOAD: &str = r#"{"benchmark":"wire_load","subject":"SUBJECT","size":64,"flows":1000,"control_mpps":5.9,"offered_mpps":OFFERED,"mpps":0.9}"#;
    const FAILOVER: &str = r#"{"benchmark":"failover","lease_ttl_ms":600,"router_detection_ms":300,"outages_ms":[[[-20.5,480.0],[3.0,400.0],[900.0,925.0]],[[0.0,500.0]]]}"#;

    fn figures(lines: &[String]) -> Vec<Figure> {
        let (results, warnings) = results::parse(&lines.join("\n"));
        assert!(warnings.is_empty(), "{warnings:?}");
        draw(&results)
    }

    /// Counts elements by name and class; panics if the text is not XML.
    fn elements(svg: &str) -> Vec<(String, String)> {
        let mut reader = Reader::from_str(svg);
        reader.config_mut().check_end_names = true;
        let (mut elements, mut depth) = (Vec::new(), 0);
        loop {
            let event = reader.read_event().expect("the SVG is XML");
            let (start, change) = match &event {
                Event::Start(start) => (Some(start), 1),
                Event::Empty(start) => (Some(start), 0),
                Event::End(_) => (None, -1),
                Event::Eof => break,
                _ => (None, 0),
            };
            depth += change;
            if let Some(start) = start {
                let class = start.try_get_attribute("class").expect("attributes are XML");
                let class = class.map(|it| String::from_utf8_lossy(&it.value).into_owned()).unwrap_or_default();
                elements.push((String::from_utf8_lossy(start.name().as_ref()).into_owned(), class));
            }
        }
        assert_eq!(depth, 0, "all elements end");
        elements
    }

    fn markers(svg: &str) -> usize {
        let shapes = ["circle", "rect", "polygon"];
        elements(svg).iter().filter(|(name, class)| shapes.contains(&name.as_str()) && class.starts_with('m')).count()
    }

    #[test]
    fn the_packet_path_has_a_marker_per_result_the_limit_and_vpp() {
        let lines: Vec<String> = ["1000", "65536", "1048576"].map(|it| PATH.replace("SESSIONS", it)).to_vec();
        let figures = figures(&lines);
        let [figure] = figures.as_slice() else { panic!("{figures:?}") };
        assert_eq!((figure.name.as_str(), figure.points), ("path-sessions.svg", 3));
        let svg = figure.chart.to_svg();
        assert_eq!(markers(&svg), 3 + VPP_NS.len());
        assert_eq!(svg.matches("stroke-dasharray").count(), 2, "the limit and its entry in the legend");
        for text in ["ns per packet", "sessions", "100 k", "VPP 26.10"] {
            assert!(svg.contains(text), "{text}");
        }
    }

    #[test]
    fn offered_loads_have_a_marker_per_system_and_load() {
        let line = |subject: &str, offered: &str| LOAD.replace("SUBJECT", subject).replace("OFFERED", offered);
        let mut lines = vec![line("vipgate", "2.0"), line("vipgate", "1.0"), line("nft", "1.0")];
        lines.push(line("ovs", "1.0").replace("1000", "65536"));
        let figures = figures(&lines);
        let names: Vec<(&str, usize)> = figures.iter().map(|it| (it.name.as_str(), it.points)).collect();
        assert_eq!(names, [("wire-loads-1000-64.svg", 3), ("wire-loads-65536-64.svg", 1)]);
        let svgs: Vec<String> = figures.iter().map(|it| it.chart.to_svg()).collect();
        assert_eq!((markers(&svgs[0]), markers(&svgs[1])), (3, 1));
        assert_eq!(figures[0].chart.series[0].points, [[1.0, 0.9], [2.0, 0.9]], "in order of the load");
    }

    #[test]
    fn a_failover_has_two_points_per_interrupted_flow() {
        let figures = figures(&[FAILOVER.to_owned()]);
        let [figure] = figures.as_slice() else { panic!("{figures:?}") };
        assert_eq!(figure.points, 2 * 3, "25 ms are no outage");
        assert_eq!(figure.chart.series[0].points, [[-20.5, 1.0], [3.0, 2.0], [400.0, 1.0], [480.0, 0.0]]);
        let svg = figure.chart.to_svg();
        let steps =
            |class: &str| svg.lines().filter(|line| line.contains(class)).map(|line| line.matches('V').count()).max();
        assert_eq!(
            (steps("\"line s0\""), steps("\"line s1\"")),
            (Some(3), Some(1)),
            "a step after each point but the first"
        );
        assert!(elements(&svg).iter().any(|(name, class)| name == "path" && class == "line s1"));
    }

    #[test]
    fn nothing_is_drawn_without_results() {
        assert!(draw(&Results::default()).is_empty());
    }
}
