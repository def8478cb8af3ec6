//! Metrics over HTTP: names, help, types, labels, values, OpenMetrics, health and readiness.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vipgate::heartbeat::LeaseClock;
use vipgate::state::capture::CaptureStatus;
use vipgate::state::group::GroupStatus;
use vipgate::state::lease::GroupLease;
use vipgate_dataplane::flow::direction::Direction;
use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::replication::lease::Lease;
use vipgate_dataplane::session::end_reason::EndReason;

use crate::gateway::group::{group, sharded_policy};
use crate::gateway::{Gateway, Worker, dropped};

fn gateway() -> Gateway {
    Gateway::start(&[Worker::Replies(vec![], 1), Worker::Replies(vec![], 1)])
}

fn one_of_three(lease: Option<Arc<GroupLease>>) -> Gateway {
    let workers = [Worker::Replies(vec![], 1), Worker::Replies(vec![], 1)];
    Gateway::start_group(&workers, &sharded_policy(), GroupStatus { lease, ..group(&["gw-a", "gw-b"]) }, None)
}

/// Status code, head and body.
fn get(address: SocketAddr, path: &str, head: &str) -> (u16, String, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n{head}\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), head.to_lowercase(), body.to_owned())
}

fn scrape(gateway: &Gateway) -> String {
    let (code, head, body) = get(gateway.metrics, "/metrics", "");
    assert_eq!(code, 200);
    assert!(head.contains("content-type: text/plain; version=0.0.4"), "{head}");
    body
}

/// Values by series; a series is the part of a line before its last space.
fn values(text: &str) -> BTreeMap<&str, u64> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let pairs = lines.map(|line| line.rsplit_once(' ').unwrap());
    // OpenMetrics prints whole seconds as `0.0`.
    pairs.map(|(series, value)| (series, value.strip_suffix(".0").unwrap_or(value).parse().unwrap())).collect()
}

/// Name, type and labels.
const EXPECTED: [(&str, &str, &str); 47] = [
    ("vipgate_packets_total", "counter", "direction worker"),
    ("vipgate_bytes_total", "counter", "direction worker"),
    ("vipgate_drops_total", "counter", "reason"),
    ("vipgate_sessions", "gauge", "worker"),
    ("vipgate_sessions_created_total", "counter", "worker"),
    ("vipgate_sessions_expired_total", "counter", "reason worker"),
    ("vipgate_policy_version_info", "gauge", "version"),
    ("vipgate_policy_updates_total", "counter", "result"),
    ("vipgate_policy_connected", "gauge", ""),
    ("vipgate_handoffs_total", "counter", "worker"),
    ("vipgate_out_of_window_total", "counter", "worker"),
    ("vipgate_port_blocks", "gauge", "state vip"),
    ("vipgate_vip_shard_ports", "gauge", "vip"),
    ("vipgate_control_loop_stall_seconds", "gauge", "time"),
    ("vipgate_serving", "gauge", ""),
    ("vipgate_members_serving", "gauge", ""),
    ("vipgate_view", "gauge", ""),
    ("vipgate_peer_up", "gauge", "peer"),
    ("vipgate_peer_authenticated", "gauge", "peer"),
    ("vipgate_peer_refused_total", "counter", ""),
    ("vipgate_standby_sessions", "gauge", "worker"),
    ("vipgate_standby_sessions_rejected_total", "counter", "worker"),
    ("vipgate_standby_sessions_activated_total", "counter", "worker"),
    ("vipgate_replication_records_sent_total", "counter", "peer"),
    ("vipgate_replication_records_applied_total", "counter", "peer"),
    ("vipgate_replication_queued_bytes", "gauge", "peer"),
    ("vipgate_replication_resyncs_total", "counter", "peer"),
    ("vipgate_services", "gauge", ""),
    ("vipgate_backends", "gauge", "state"),
    ("vipgate_service_sessions", "gauge", "service"),
    ("vipgate_service_sessions_created_total", "counter", "service"),
    ("vipgate_consumed_total", "counter", "worker"),
    ("vipgate_build_info", "gauge", "version"),
    ("vipgate_sessions_capacity", "gauge", ""),
    ("vipgate_sessions_reserve", "gauge", "worker"),
    ("vipgate_session_fair_share", "gauge", "worker"),
    ("vipgate_frames", "gauge", "place"),
    ("vipgate_interface_mtu_excess_bytes", "gauge", "interface"),
    ("vipgate_link_up", "gauge", "interface"),
    ("vipgate_xdp_attached", "gauge", "interface"),
    ("vipgate_capture_complete", "gauge", ""),
    ("vipgate_capture_failures_total", "counter", ""),
    ("vipgate_xdp_detached_total", "counter", "interface"),
    ("vipgate_guard_detached_total", "counter", "interface"),
    ("vipgate_ring_losses_total", "counter", "cause worker"),
    ("vipgate_connections", "gauge", "listener"),
    ("vipgate_connections_refused_total", "counter", "listener reason"),
];

#[test]
fn metric_names_and_types_match_the_contract() {
    let gateway = one_of_three(None);
    let text = scrape(&gateway);
    let lines: BTreeSet<&str> = text.lines().collect();
    for (name, kind, labels) in EXPECTED {
        assert!(lines.contains(format!("# TYPE {name} {kind}").as_str()), "{name}: {text}");
        let help = format!("# HELP {name} ");
        assert!(text.lines().any(|line| line.strip_prefix(&help).is_some_and(|help| help.ends_with('.'))), "{name}");
        let series: Vec<&str> = values(&text).into_keys().filter(|s| s.split('{').next() == Some(name)).collect();
        assert!(!series.is_empty(), "{name}");
        for series in series {
            assert_eq!(label_names(series), labels, "{series}");
        }
    }
}

/// The label names of a series, sorted.
fn label_names(series: &str) -> String {
    let inside = series.split_once('{').map_or("", |(_, inside)| inside.trim_end_matches('}'));
    let mut names: Vec<&str> =
        inside.split(',').filter(|l| !l.is_empty()).map(|l| l.split_once('=').unwrap().0).collect();
    names.sort_unstable();
    names.join(" ")
}

/// Idle connections to the metrics port block neither scrapes nor commands.
#[test]
fn idle_connections_are_capped() {
    vipgate::listener::raise_descriptor_limit();
    let gateway = gateway();
    let idle: Vec<TcpStream> = (0..1500).map(|_| TcpStream::connect(gateway.metrics).unwrap()).collect();
    let text = scrape(&gateway);
    let values = values(&text);
    let open = values["vipgate_connections{listener=\"metrics\"}"];
    assert!((1..=64).contains(&open), "{open} of one address");
    let superseded = values["vipgate_connections_refused_total{listener=\"metrics\",reason=\"superseded\"}"];
    assert_eq!(superseded, 1501 - open);
    assert_eq!(values["vipgate_connections{listener=\"admin\"}"], 0);
    drop(idle);
}

#[test]
fn every_series_has_a_description_and_is_unique() {
    let gateway = gateway();
    let text = scrape(&gateway);
    let mut name = "";
    let mut described = BTreeSet::new();
    let mut series = BTreeSet::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            name = rest.split(' ').next().unwrap();
            assert!(described.insert(name), "{name} is described twice");
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            assert_eq!(rest.split(' ').next(), Some(name));
        } else {
            let this = line.rsplit_once(' ').unwrap().0;
            assert_eq!(this.split('{').next(), Some(name), "under its own description");
            assert!(series.insert(this), "{this} is exported twice");
        }
    }
}

#[test]
fn all_reasons_and_directions_are_exported_from_the_start() {
    let gateway = gateway();
    let text = scrape(&gateway);
    let values = values(&text);
    for reason in DropReason::ALL {
        assert_eq!(values[format!("vipgate_drops_total{{reason=\"{}\"}}", reason.name()).as_str()], dropped(reason));
    }
    for (worker, forwarded) in [(0, 1), (1, 2)] {
        for direction in Direction::ALL {
            let packets = if direction <= Direction::Reply { forwarded } else { 0 };
            let labels = format!("{{worker=\"{worker}\",direction=\"{}\"}}", direction.name());
            assert_eq!(values[format!("vipgate_packets_total{labels}").as_str()], packets);
            assert_eq!(values[format!("vipgate_bytes_total{labels}").as_str()], packets * 100);
        }
        for reason in EndReason::ALL {
            let expected = if reason == EndReason::Flushed { 7 } else { 0 };
            let series = format!("vipgate_sessions_expired_total{{worker=\"{worker}\",reason=\"{}\"}}", reason.name());
            assert_eq!(values[series.as_str()], expected);
        }
        assert_eq!(values[format!("vipgate_sessions{{worker=\"{worker}\"}}").as_str()], 20 + worker);
        assert_eq!(values[format!("vipgate_handoffs_total{{worker=\"{worker}\"}}").as_str()], 5);
    }
    assert_eq!(values["vipgate_policy_version_info{version=\"5f2c\"}"], 1);
    assert_eq!(values["vipgate_policy_updates_total{result=\"applied\"}"], 2);
    assert_eq!(values["vipgate_policy_updates_total{result=\"rejected\"}"], 1);
    assert_eq!(values["vipgate_policy_connected"], 1);
    for vip in ["203.0.113.10", "203.0.113.11"] {
        assert_eq!(values[format!("vipgate_port_blocks{{vip=\"{vip}\",state=\"free\"}}").as_str()], 1008);
        assert_eq!(values[format!("vipgate_port_blocks{{vip=\"{vip}\",state=\"claimed\"}}").as_str()], 0);
    }
    assert_eq!(values["vipgate_sessions_capacity"], 65_536);
}

#[test]
fn group_metrics_are_exported() {
    let gateway = one_of_three(None);
    let text = scrape(&gateway);
    let values = values(&text);
    let expected = [
        ("serving", 1),
        ("members_serving", 2),
        ("view", 14),
        ("peer_up{peer=\"gw-b\"}", 1),
        ("peer_up{peer=\"gw-c\"}", 0),
        ("peer_authenticated{peer=\"gw-b\"}", 1),
        ("peer_authenticated{peer=\"gw-c\"}", 0),
        ("peer_refused_total", 5),
        ("replication_records_sent_total{peer=\"gw-b\"}", 120),
        ("replication_records_applied_total{peer=\"gw-b\"}", 80),
        ("replication_queued_bytes{peer=\"gw-b\"}", 4096),
        ("replication_resyncs_total{peer=\"gw-b\"}", 2),
        ("replication_records_sent_total{peer=\"gw-c\"}", 0),
        ("standby_sessions{worker=\"1\"}", 9),
        ("standby_sessions_rejected_total{worker=\"1\"}", 1),
        ("out_of_window_total{worker=\"1\"}", 7),
        ("standby_sessions_activated_total{worker=\"0\"}", 2),
        ("port_blocks{vip=\"203.0.113.10\",state=\"elsewhere\"}", 0),
        ("port_blocks{vip=\"203.0.113.10\",state=\"free\"}", 1008),
        ("port_blocks{vip=\"203.0.113.11\",state=\"elsewhere\"}", 336),
        ("port_blocks{vip=\"203.0.113.11\",state=\"free\"}", 672),
    ];
    for (series, value) in expected {
        assert_eq!(values.get(format!("vipgate_{series}").as_str()), Some(&value), "{series}");
    }
    assert!(!text.contains("\nvipgate_lease_seconds"), "no lease is required");
    assert!(!text.contains("peer=\"gw-a\""), "it isn't its own peer");
}

#[test]
fn the_remaining_lease_time_is_exported_in_seconds() {
    let lease = GroupLease::new(Arc::new(Lease::unlimited()));
    lease.set_required(true);
    lease.extend(lease.now().plus(60_000));
    let text = scrape(&one_of_three(Some(Arc::new(lease))));
    let left = text.lines().find_map(|line| line.strip_prefix("vipgate_lease_seconds ")).unwrap();
    let left: f64 = left.parse().unwrap();
    assert!((1.0..=60.0).contains(&left), "{left}");
}

#[test]
fn metrics_read_the_workers_counters() {
    let gateway = gateway();
    let series = "vipgate_drops_total{reason=\"fragment\"}";
    assert_eq!(values(&scrape(&gateway))[series], 0);
    gateway.state.workers()[1].counters.dropped(DropReason::Fragment);
    assert_eq!(values(&scrape(&gateway))[series], 1);
}

#[test]
fn open_metrics_is_negotiated_and_has_the_same_series() {
    let gateway = gateway();
    let plain = scrape(&gateway);
    let accept = "Accept: application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5\r\n";
    let (code, head, open) = get(gateway.metrics, "/metrics", accept);
    assert_eq!(code, 200);
    assert!(head.contains("content-type: application/openmetrics-text"), "{head}");
    assert!(open.ends_with("# EOF\n"));
    assert!(
        open.contains("# TYPE vipgate_packets counter\n") && open.contains("# TYPE vipgate_build info\n"),
        "{open}"
    );
    assert_eq!(values(&open), values(&plain));
}

#[test]
fn health_and_readiness_are_independent() {
    let gateway = gateway();
    let code = |path| get(gateway.metrics, path, "").0;
    assert_eq!((code("/healthz"), code("/readyz"), code("/other")), (200, 200, 404));
    gateway.state.ready.store(false, Ordering::Relaxed);
    assert_eq!((code("/healthz"), code("/readyz")), (200, 503));
}

#[test]
fn a_gateway_whose_maps_lack_something_is_not_ready_and_says_why() {
    let gateway = gateway();
    let error = "cannot update the steering program's map hosts: no memory";
    gateway.state.capture.store(Arc::new(CaptureStatus { error: Some(error.into()), failures: 3 }));
    let (code, _, body) = get(gateway.metrics, "/readyz", "");
    assert!(code == 503 && body.contains("capture is incomplete") && body.contains(error), "{code} {body}");
    let text = scrape(&gateway);
    assert_eq!(values(&text)["vipgate_capture_complete"], 0);
    assert_eq!(values(&text)["vipgate_capture_failures_total"], 3);
    gateway.state.capture.store(Arc::new(CaptureStatus { error: None, failures: 3 }));
    assert_eq!(get(gateway.metrics, "/readyz", "").0, 200);
    assert_eq!(values(&scrape(&gateway))["vipgate_capture_complete"], 1);
}

#[test]
fn an_active_gateway_without_a_lease_is_not_ready_and_says_why() {
    let gateway = gateway();
    let lease = GroupLease::new(Arc::new(Lease::unlimited()));
    lease.set_required(true);
    gateway.state.group.store(Arc::new(GroupStatus { lease: Some(Arc::new(lease)), ..GroupStatus::default() }));
    let (code, _, body) = get(gateway.metrics, "/readyz", "");
    assert!(code == 503 && body.contains("the lease has expired"), "{code} {body}");
}

#[test]
fn a_port_in_use_is_reported() {
    let gateway = gateway();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let error = runtime.block_on(vipgate::metrics::bind(gateway.metrics)).unwrap_err().to_string();
    assert!(error.starts_with(&format!("metrics.listen: cannot listen on {}: ", gateway.metrics)), "{error}");
    assert!(error.contains("another process uses it"), "{error}");
}

#[test]
fn the_port_is_closed_when_the_gateway_stops() {
    let mut gateway = gateway();
    gateway.stop();
    assert!(TcpStream::connect(gateway.metrics).is_err());
}
