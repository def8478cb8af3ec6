//! Command line with a single gateway: tables, JSON, filters, limits, exit codes, errors.

use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::time::{Duration, Instant};

use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::policy::spec::EndpointSpec;

use crate::gateway::{Gateway, Worker, dropped, policy, program, sessions};

fn two_workers() -> Gateway {
    Gateway::start(&[Worker::Replies(sessions(3), 2), Worker::Replies(sessions(2), 100)])
}

#[test]
fn status_table_fits_eighty_columns() {
    let expected = "\
gateway   gw-a, ready, up 0s
node      node-1
program   vipgate VERSION, pid PID
policy    5f2c, generation 3, in force for 0s
          2 VIPs, 2 endpoints, 1 Service, from files /etc/vipgate/policy
cluster   no pod_cidrs: uncovered packets are left to the kernel
updates   2 applied, 1 rejected
REJECTED  a.yaml:7: spec.addresses: \u{fffd}[31mnot an address
sessions  41 of 65536 (0.1 %)
standby   17 sessions of other gateways (0.1 % in total)

WORKER  CORE  SESSIONS  EGRESS  REPLY  UNCHANGED  HANDOFFS  WAITING  DROPS
     0     2        20       1      1          0         5        0      1
     1     3        21       2      2          0         5        0      5

INTERFACE  ROLE    LINK  XDP       MAC                 MTU  ADDRESSES
gw-in      inside  up    attached  02:00:00:00:00:1a  1500  10.1.0.1 fd00:1::1

SOCKET  QUEUE  WORKER  MODE    ZERO COPY
gw-in       0       0  native  yes

frames           pool 4000, total 4096
ring_losses      fill_ring_empty 3
"
    .replace("VERSION", env!("CARGO_PKG_VERSION"))
    .replace("PID", &std::process::id().to_string());
    let shown = two_workers().table(&["status"]);
    assert_eq!(shown, expected);
    assert!(shown.lines().all(|line| line.chars().count() <= 80));
}

#[test]
fn status_json_contains_every_field() {
    let status = two_workers().json(&["status"]);
    assert_eq!(status["protocol"], vipgate::admin::PROTOCOL);
    assert_eq!(status["name"], "gw-a");
    assert_eq!(status["zone"], "", "an absent zone is empty");
    assert_eq!(status["ready"], true);
    assert_eq!(status["sessions"], 41);
    assert_eq!(status["session_capacity"], 65_536);
    assert_eq!(status["standby_sessions"], 17);
    assert_eq!(status["policy"]["version"], "5f2c");
    assert_eq!(status["policy"]["updates_rejected"], 1);
    let workers = status["workers"].as_array().unwrap();
    assert_eq!(workers.len(), 2);
    assert_eq!(workers[1]["core"], 3);
    let directions = ["egress", "inbound", "peer_in", "peer_out", "reply", "service_reply", "unchanged"];
    let packets = workers[1]["packets"].as_object().unwrap();
    assert_eq!(packets.keys().collect::<Vec<_>>(), directions);
    assert_eq!((packets["egress"].as_u64(), packets["inbound"].as_u64()), (Some(2), Some(0)));
    assert_eq!(status["sockets"][0]["zero_copy"], true);
    assert_eq!(status["interfaces"][0]["mac"], "02:00:00:00:00:1a");
    assert_eq!(status["figures"][0]["labels"]["place"], "pool");
}

#[test]
fn services_are_listed_with_backends_and_their_sessions() {
    let gateway = two_workers();
    let policy = gateway.state.compiled.load_full();
    let usage = &policy.services().next().unwrap().v4.frontends[0].backends[0].usage;
    for _ in 0..30 {
        usage.open();
    }
    usage.close();
    usage.measure(1500);
    let expected = "\
SERVICE           ADDRESS                STATE                             SESSIONS  NEW/S  \
NOTES                                  TABLE BYTES
tenant-a/api      203.0.113.10 : 80/tcp  1 of 2, health 200 on port 30000        29     20  \
external: Local, client affinity 60 s            2
  tenant-a/api-0  10.1.0.11 : 8080       ready, weight 5                         29     20  
  -               10.1.0.12 : 8080       terminating                              0      0  no new sessions
"
    .replace("20  \n", "20\n");
    assert_eq!(gateway.table(&["services"]), expected);
    let listed = gateway.json(&["services"]);
    let service = &listed["services"][0];
    assert_eq!((&service["name"], &service["sessions"]), (&"Service tenant-a/api".into(), &29.into()));
    assert_eq!(service["health"], serde_json::json!({"port": 30_000, "local_endpoints": 1, "error": ""}));
    assert_eq!(service["lookup_table_bytes"], 2, "one table of the only backend that accepts sessions: one slot");
    let backend = serde_json::json!({
        "address": "10.1.0.12", "name": "", "state": "terminating", "weight": 1, "external": false, "internal": false,
        "ports": [8080], "sessions": 0, "opened": 0, "opened_per_second": 0,
    });
    assert_eq!(service["backends"][1], backend);
}

#[test]
fn sessions_of_all_workers_are_listed() {
    let gateway = two_workers();
    let expected = "\
PROTO  DIRECTION  ENDPOINT         VIP                REMOTE             STATE        IDLE  EXPIRES  OUT  IN  WORKER
tcp    egress     10.1.0.11:40000  203.0.113.10:1024  198.51.100.10:443  established   12s     2h4m   10  20       0
udp    inbound    10.1.0.11:40001  203.0.113.10:1025  198.51.100.10:443  opening       12s     2h4m   10  20       0
tcp    egress     10.1.0.11:40002  203.0.113.10:1026  198.51.100.10:443  established   12s     2h4m   10  20       0
tcp    egress     10.1.0.11:40000  203.0.113.10:1024  198.51.100.10:443  established   12s     2h4m   10  20       1
udp    inbound    10.1.0.11:40001  203.0.113.10:1025  198.51.100.10:443  opening       12s     2h4m   10  20       1
";
    assert_eq!(gateway.table(&["sessions"]), expected);
    let listed = gateway.json(&["sessions"]);
    assert_eq!(listed["truncated"], false);
    assert_eq!(listed["sessions"].as_array().unwrap().len(), 5);
    let session = serde_json::json!({
        "worker": 0, "protocol": "tcp", "endpoint": "10.1.0.11:40000", "vip": "203.0.113.10:1024",
        "remote": "198.51.100.10:443", "state": "established", "idle_ms": 12_345, "expires_ms": 7_440_000,
        "packets_out": 10, "bytes_out": 1000, "packets_in": 20, "bytes_in": 2000, "direction": "egress",
    });
    assert_eq!(listed["sessions"][0], session);
}

#[test]
fn every_filter_is_applied() {
    let gateway = two_workers();
    let count = |filter: &[&str]| gateway.json(&[&["sessions"], filter].concat())["sessions"].as_array().unwrap().len();
    assert_eq!(count(&["--proto", "udp"]), 2);
    assert_eq!(count(&["--proto", "6"]), 3);
    assert_eq!(count(&["--state", "established"]), 3);
    assert_eq!(count(&["--endpoint", "10.1.0.11", "--proto", "tcp", "--state", "opening"]), 0);
    assert_eq!(count(&["--endpoint", "10.1.0.12"]), 0);
    assert_eq!(count(&["--vip", "203.0.113.10"]), 5);
    assert_eq!(count(&["--vip", "203.0.113.11"]), 0);
    assert_eq!(count(&["--remote", "198.51.100.10"]), 5);
    assert_eq!(count(&["--remote", "198.51.100.11"]), 0);
    assert_eq!(gateway.table(&["sessions", "--vip", "203.0.113.11"]), "no sessions match\n");
}

#[test]
fn a_limit_truncates_the_list_and_reports_it() {
    let gateway = Gateway::start(&[Worker::Replies(sessions(1500), 700), Worker::Replies(sessions(20), 7)]);
    let count = |limit: &[&str]| {
        let listed = gateway.json(&[&["sessions"], limit].concat());
        (listed["sessions"].as_array().unwrap().len(), listed["truncated"].as_bool().unwrap())
    };
    assert_eq!(count(&[]), (1520, false));
    assert_eq!(count(&["--limit", "0"]), (1520, false));
    assert_eq!(count(&["--limit", "1520"]), (1520, false));
    assert_eq!(count(&["--limit", "1519"]), (1519, true));
    assert_eq!(count(&["--limit", "1"]), (1, true));
    let table = gateway.table(&["sessions"]);
    assert_eq!(table.lines().count(), 1 + 100 + 1, "header, a screenful, and a note about the rest");
    assert!(table.ends_with("... and more; --limit 0 shows all\n"));
    let all = gateway.table(&["sessions", "--limit", "0"]);
    assert_eq!(all.lines().count(), 1521);
    assert_eq!(all.matches("PROTO").count(), 1);
}

#[test]
fn a_flush_ends_only_matching_sessions() {
    let gateway = two_workers();
    assert_eq!(gateway.json(&["sessions", "flush", "--proto", "udp"]), serde_json::json!({"ended": 2}));
    assert_eq!(gateway.json(&["sessions"])["sessions"].as_array().unwrap().len(), 3);
    assert_eq!(gateway.table(&["sessions", "flush", "--all"]), "3 sessions ended\n");
    assert_eq!(gateway.table(&["sessions", "flush", "--all"]), "0 sessions ended\n");
    // A filter before `flush` is rejected: it would be ignored, and all sessions flushed.
    assert_eq!(gateway.vipgate(&["sessions", "--proto", "udp", "flush"]).0, 2);
}

#[test]
fn vips_and_endpoints_show_the_policy_in_force() {
    let gateway = two_workers();
    let vips = "\
VIP           ANNOUNCE  ENDPOINTS  SESSIONS  IN TABLE  NAME                  RESERVED PORTS
203.0.113.10  L2                1         0         0  Service tenant-a/api  80 443
203.0.113.11  BGP               0         0         0  Service tenant-a/api  30000 30001 30002 30003 \
30004 30005 30006 30007 and 2 more
";
    assert_eq!(gateway.table(&["vips"]), vips);
    let vips = gateway.json(&["vips"]);
    assert_eq!(vips["vips"][0]["reserved_ports"], serde_json::json!([80, 443]));
    assert_eq!(vips["vips"][1]["reserved_ports"].as_array().unwrap().len(), 10);
    let endpoints = "\
ENDPOINT    POD             SESSIONS  REFUSED  VIPS            POLICY
10.1.0.11   tenant-a/api-0         0        0  203.0.113.10    EgressPolicy tenant-a/out
fd00:1::11  -                      0        0  none (dropped)  EgressPolicy tenant-a/out
";
    assert_eq!(gateway.table(&["endpoints"]), endpoints);
    let endpoints = gateway.json(&["endpoints"]);
    assert_eq!(endpoints["endpoints"][1]["vips"], serde_json::json!([]));
    assert_eq!(endpoints["endpoints"][0]["policy"], "EgressPolicy tenant-a/out");
}

#[test]
fn explain_sums_a_vips_sessions_and_ports_over_workers() {
    let vip = &two_workers().json(&["explain", "203.0.113.10"])["vip"];
    assert_eq!(vip["vip"]["table_sessions"], 5);
    assert_eq!(vip["ports"]["blocks_used"], 2);
}

#[test]
fn a_hundred_thousand_endpoints_are_listed() {
    let mut set = policy();
    set.endpoints = (0..100_000_u32)
        .map(|number| EndpointSpec {
            address: std::net::Ipv4Addr::from(0x0a00_0000 + number).into(),
            name: format!("tenant-with-a-long-name/deployment-with-a-long-name-{number}").into(),
            policy: "EgressPolicy tenant-a/out".into(),
            vips: vec!["203.0.113.10".parse().unwrap()],
            gateway: None,
            slot: None,
            remarks: vec![],
        })
        .collect();
    let gateway = Gateway::start_with(&[Worker::Replies(vec![], 1)], &set);
    assert_eq!(gateway.table(&["endpoints"]).lines().count(), 100_001);
    assert_eq!(gateway.json(&["vips"])["vips"][0]["endpoints"], 100_000);
}

#[test]
fn drops_are_summed_over_workers_and_explained() {
    let gateway = two_workers();
    let expected = format!(
        "REASON        PACKETS  DESCRIPTION\n\
         no_service          2  {}\n\
         ttl                 1  {}\n\
         rx_no_buffer        3  {}\n",
        DropReason::NoService.help(),
        DropReason::Ttl.help(),
        DropReason::RxNoBuffer.help()
    );
    assert_eq!(gateway.table(&["drops"]), expected);
    assert_eq!(gateway.table(&["drops", "--all"]).lines().count(), 1 + DropReason::ALL.len());
    let drops = gateway.json(&["drops"]);
    for reason in DropReason::ALL {
        assert_eq!(drops[reason.name()], dropped(reason), "{}", reason.name());
    }
    // Plus last, notes, by_address, by_policy.
    assert_eq!(drops.as_object().unwrap().len(), DropReason::ALL.len() + 4);
}

#[test]
fn a_silent_worker_is_reported_after_the_timeout() {
    let gateway = Gateway::start(&[Worker::Replies(sessions(3), 100), Worker::Silent]);
    let start = Instant::now();
    let (code, stdout, stderr) = gateway.vipgate(&["sessions"]);
    assert!(start.elapsed() < Duration::from_secs(9), "{:?}", start.elapsed());
    assert_eq!(code, 1, "{stderr}");
    assert_eq!(stdout.lines().count(), 4, "the other worker's sessions are listed: {stdout}");
    let socket = gateway.socket().display().to_string();
    assert!(stderr.contains("worker 1 (core 3)") && stderr.contains(&socket), "{stderr}");
    assert_eq!(gateway.json(&["status"])["name"], "gw-a", "other commands still work");
}

#[test]
fn a_stopped_worker_is_reported_at_once() {
    let gateway = Gateway::start(&[Worker::Stopped]);
    let start = Instant::now();
    for command in [&["sessions"][..], &["sessions", "flush", "--all"]] {
        let (code, _, stderr) = gateway.vipgate(command);
        assert_eq!(code, 1);
        assert!(stderr.contains("worker 0 (core 2) has ended"), "{stderr}");
    }
    assert!(start.elapsed() < Duration::from_secs(4));
}

#[test]
fn a_closed_pipe_is_no_error() {
    let gateway = Gateway::start(&[Worker::Replies(sessions(20_000), 4096)]);
    for format in ["table", "json"] {
        let socket = gateway.socket();
        let mut child = program()
            .args(["sessions", "--limit", "0", "-o", format, "--socket"])
            .arg(socket)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(!line.is_empty());
        let output = child.wait_with_output().unwrap();
        assert_eq!((output.status.code(), String::from_utf8(output.stderr).unwrap().as_str()), (Some(0), ""));
    }
}
