//! Diagnostics: `trace` predicts the result for a packet, `explain` and `drops` name the policy, `capture` shows the
//! packets.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::time::Duration;

use serde_json::Value;
use vipgate_lab::Process;
use vipgate_lab::reflector::{query_http, query_udp};
use vipgate_tests::{EXCLUDED, SERVER, Testbed, VIP_A, VIP_B, binary, wait_for};

fn socket(testbed: &Testbed) -> String {
    testbed.folder.path().join("gateway.sock").display().to_string()
}

/// Runs a command against the gateway: exit code, stdout and stderr.
fn run(testbed: &Testbed, command: &[&str]) -> (i32, String, String) {
    testbed.command(&[command, &["--socket", &socket(testbed)]].concat())
}

fn trace(testbed: &Testbed, from: &str, to: &str, options: &[&str]) -> Value {
    testbed.query(&[&["trace", "--from", from, "--to", to], options].concat())
}

fn text<'a>(reply: &'a Value, field: &str) -> &'a str {
    reply[field].as_str().unwrap()
}

/// Text of a step of a trace.
fn step<'a>(trace: &'a Value, stage: &str) -> &'a str {
    steps(trace, stage)[0]
}

/// The texts of all steps of a stage, at least one: each worker that receives the packet has its own.
fn steps<'a>(trace: &'a Value, stage: &str) -> Vec<&'a str> {
    let of_stage = trace["steps"].as_array().unwrap().iter().filter(|step| step["stage"] == stage);
    let texts: Vec<_> = of_stage.map(|step| step["text"].as_str().unwrap()).collect();
    assert!(!texts.is_empty(), "no {stage} in {trace}");
    texts
}

#[test]
fn trace_predicts_the_forwarding_result() {
    let testbed = Testbed::with_gateway("trace");
    for (family, (pod, server)) in [("10.1.0.11", SERVER[0]), ("fd00:1::11", SERVER[1])].into_iter().enumerate() {
        let to = if family == 0 { format!("{server}:80") } else { format!("[{server}]:80") };
        let predicted = trace(&testbed, pod, &to, &[]);
        assert_eq!(text(&predicted, "verdict"), "forward", "{predicted}");
        assert_eq!((text(&predicted, "direction"), text(&predicted, "interface")), ("egress", "gw-out"));
        assert!(text(&predicted, "source").contains(VIP_A[family]), "{predicted}");
        assert_eq!(query_http(&testbed.pods[0], server.parse().unwrap()).unwrap(), VIP_A[family]);
        // The same session, now established.
        let sessions = testbed.query(&["sessions", "--endpoint", pod, "--proto", "tcp"]);
        let session = &sessions["sessions"][0];
        let established = trace(&testbed, text(session, "endpoint"), text(session, "remote"), &["--established"]);
        assert_eq!(
            (text(&established, "verdict"), text(&established, "source")),
            ("forward", text(session, "vip")),
            "{established}"
        );
        // Worker 0 hands the segment off if worker 1 has the session.
        assert!(steps(&established, "session").last().unwrap().contains(" matches;"), "{established}");
        let reply = trace(&testbed, text(session, "remote"), text(session, "vip"), &["--established"]);
        assert_eq!((text(&reply, "direction"), text(&reply, "interface")), ("reply", "gw-in"), "{reply}");
        assert_eq!(text(&reply, "destination"), text(session, "endpoint"), "{reply}");
    }
    let excluded = trace(&testbed, "10.1.0.21", EXCLUDED[0], &["--proto", "udp"]);
    assert_eq!((text(&excluded, "verdict"), text(&excluded, "direction")), ("forward", "unchanged"), "{excluded}");
    assert!(step(&excluded, "destination").contains("excluded by 10.0.0.0/8"), "{excluded}");
    assert_eq!(query_udp(&testbed.pods[2], EXCLUDED[0].parse().unwrap()).unwrap(), "10.1.0.21");
    let kernel = trace(&testbed, "10.1.0.31", SERVER[0], &[]);
    assert_eq!(text(&kernel, "verdict"), "kernel", "{kernel}");
    assert_eq!(query_udp(&testbed.pods[3], SERVER[0].parse().unwrap()).unwrap(), "10.1.0.31");
    let client = trace(&testbed, &format!("{}:50000", SERVER[0]), &format!("{}:80", VIP_A[0]), &[]);
    assert!(step(&client, "backend").contains(", port 8080"), "{client}");
    let unused_port = trace(&testbed, SERVER[0], &format!("{}:9", VIP_A[0]), &["--proto", "udp"]);
    assert_eq!((text(&unused_port, "verdict"), text(&unused_port, "reason")), ("drop", "no_service"), "{unused_port}");
    let before = testbed.metric("vipgate_drops_total", "reason=\"no_service\"");
    let send =
        format!("import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'?', ('{}', 9))", VIP_A[0]);
    testbed.accounting.expect_exactly([("no_service", 1)]);
    testbed.server.output(&["python3", "-c", &send]).unwrap();
    let dropped = || testbed.metric("vipgate_drops_total", "reason=\"no_service\"") > before + 0.5;
    assert!(wait_for(Duration::from_secs(3), dropped), "{}", testbed.query(&["drops"]));
    let drops = testbed.query(&["drops", "--reason", "no_service"]);
    let last = &drops["last"]["no_service"];
    assert_eq!((text(last, "protocol"), text(last, "interface")), ("udp", "gw-out"), "{drops}");
    assert_eq!(text(last, "destination"), format!("{}:9", VIP_A[0]), "{drops}");
    let by_address = &drops["by_address"][0];
    assert_eq!((text(by_address, "address"), text(by_address, "name")), (VIP_A[0], "Service tenant-a/api"), "{drops}");
    // A trace has no side effects.
    assert!(testbed.query(&["sessions", "--remote", "198.51.100.77"])["sessions"].as_array().unwrap().is_empty());
    trace(&testbed, "10.1.0.11", "198.51.100.77:7", &[]);
    assert!(testbed.query(&["sessions", "--remote", "198.51.100.77"])["sessions"].as_array().unwrap().is_empty());
    testbed.check_frames();
}

#[test]
fn explain_reports_policy_precedence() {
    let testbed = Testbed::with_gateway("explain");
    testbed.write_policy(
        "overlap.yaml",
        "apiVersion: vipgate.io/v1alpha1\nkind: EgressPolicy\nmetadata: {name: greedy, namespace: tenant-b}\n\
         spec:\n  selectors: [{podSelector: {matchLabels: {app: web}}}]\n  addresses: [203.0.113.77]\n\
         ---\napiVersion: v1\nkind: Pod\nmetadata: {name: web-0, namespace: tenant-b, labels: {app: web}}\n\
         status: {podIP: 10.1.0.21, podIPs: [{ip: 10.1.0.21}]}\n\
         ---\napiVersion: vipgate.io/v1alpha1\nkind: AddressPool\nmetadata: {name: greedy}\n\
         spec: {ranges: [203.0.113.77/32]}\n",
    );
    let remarks = || testbed.query(&["explain", "10.1.0.21"])["endpoint"]["remarks"].clone();
    let wanted =
        "takes precedence over EgressPolicy tenant-b/greedy, which also covers it: serviceRef precedes selectors";
    assert!(wait_for(Duration::from_secs(10), || remarks()[0] == wanted), "{}\n{}", remarks(), testbed.log());
    let pod = testbed.query(&["explain", "10.1.0.21"]);
    assert_eq!(text(&pod["endpoint"]["endpoint"], "policy"), "EgressPolicy tenant-b/web");
    assert_eq!(pod["endpoint"]["excluded"], serde_json::json!(["10.0.0.0/8", "fd00::/8"]));
    assert_eq!(text(&pod["backend_of"][0], "service"), "Service tenant-b/web");
    let vip = testbed.query(&["explain", VIP_A[0]]);
    assert_eq!(vip["vip"]["users"], serde_json::json!([{"policy": "Service tenant-a/api", "endpoints": 2}]), "{vip}");
    assert_eq!(vip["vip"]["services"], serde_json::json!(["Service tenant-a/api (tcp/80, udp/53)"]));
    let (code, stdout, _) = run(&testbed, &["explain", VIP_B[1]]);
    assert!(code == 0 && stdout.contains("of Service tenant-b/web, announced by L2"), "{stdout}");
    for (command, code, error) in [
        (
            vec!["explain", "10.1.0.99"],
            1,
            "10.1.0.99 is neither an endpoint nor a VIP nor a backend in the policy in force",
        ),
        (vec!["explain", "pod-a1"], 2, "invalid IP address"),
        (vec!["trace", "--from", "10.1.0.11", "--to", "2001:db8::1"], 2, "a packet has addresses of one family"),
        (vec!["trace", "--from", "10.1.0.11", "--to", "1.2.3.4", "--proto", "47"], 2, "only tcp, udp, sctp, icmp"),
        (vec!["trace", "--from", "10.1.0.11:1", "--to", "1.2.3.4", "--proto", "icmp"], 2, "icmp has no ports"),
        (
            vec!["trace", "--from", "10.1.0.11", "--to", "1.2.3.4", "--interface", "eth9"],
            2,
            "this gateway has gw-in, gw-out",
        ),
        (
            vec!["trace", "--from", "10.1.0.11", "--to", "1.2.3.4", "--worker", "7"],
            2,
            "this gateway has 2, counted from 0",
        ),
        (
            vec!["trace", "--from", "10.1.0.11", "--to", "1.2.3.4", "--length", "1779"],
            2,
            "length 1779: this gateway's packet buffers hold 1778 bytes",
        ),
        (vec!["drops", "--reason", "bad_luck"], 2, "\"bad_luck\" is not a drop reason; known reasons: no_service"),
        (vec!["capture", "--filter", "hots 10.1.0.11"], 2, "--filter: unknown keyword \"hots\""),
        (vec!["capture", "--filter", "in eth9"], 2, "in \"eth9\": this gateway has gw-in, gw-out"),
    ] {
        let (actual, stdout, stderr) = run(&testbed, &command);
        assert_eq!((actual, stdout.as_str()), (code, ""), "{command:?}: {stderr}");
        assert!(stderr.contains(error), "{command:?}: {stderr}");
    }
}

/// Starts `vipgate capture` in the background.
fn capture(testbed: &Testbed, options: &[&str], log: &str) -> Process {
    let (program, socket) = (binary().display().to_string(), socket(testbed));
    let log = testbed.folder.path().join(log);
    let before = started_captures(testbed);
    let command = [&[program.as_str(), "capture", "--socket", &socket], options].concat();
    let process = testbed.gateway.spawn(&command, &log).unwrap();
    assert!(
        wait_for(Duration::from_secs(5), || started_captures(testbed) > before),
        "{}",
        fs::read_to_string(log).unwrap()
    );
    process
}

fn started_captures(testbed: &Testbed) -> usize {
    testbed.log().matches("capture started").count()
}

fn ended_captures(testbed: &Testbed) -> usize {
    testbed.log().matches("capture ended").count()
}

#[test]
fn a_capture_shows_both_sides_with_the_verdict_and_always_ends() {
    let testbed = Testbed::with_gateway("capture");
    let file = testbed.folder.path().join("both.pcapng").display().to_string();
    let mut running = capture(&testbed, &["--filter", "host 10.1.0.11 and icmp", "-w", &file], "capture.log");
    // Only one capture may run at a time.
    let (code, _, stderr) = run(&testbed, &["capture"]);
    assert!(code == 1 && stderr.contains("another capture is running"), "{stderr}");
    testbed.pods[0].output(&["ping", "-c", "2", "-i", "0.2", "-W", "2", SERVER[0]]).unwrap();
    testbed.pods[1].output(&["ping", "-c", "1", "-W", "2", SERVER[0]]).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    running.signal("INT").unwrap();
    assert!(running.wait(Duration::from_secs(5)).is_some_and(|status| status.success()));
    let output = fs::read_to_string(testbed.folder.path().join("capture.log")).unwrap();
    assert!(output.contains("packets captured, stopped"), "{output}");
    let lines = vipgate_lab::output(&["tcpdump", "-n", "-r", &file]).unwrap();
    let count = |side: &str| lines.matches(side).count();
    for side in ["10.1.0.11 > 198.51.100.10", "203.0.113.10 > 198.51.100.10", "198.51.100.10 > 10.1.0.11"] {
        assert_eq!(count(side), 2, "{side} in\n{lines}");
    }
    // A reply may arrive at the other worker first, and is then captured twice.
    assert!((2..=4).contains(&count("198.51.100.10 > 203.0.113.10")), "{lines}");
    assert!(!lines.contains("10.1.0.12"), "{lines}");
    let bytes = fs::read(&file).unwrap();
    let has = |text: &str| bytes.windows(text.len()).any(|window| window == text.as_bytes());
    assert!(has("egress: forwarded") && has("reply: forwarded") && has("gw-out"));
    assert!(wait_for(Duration::from_secs(3), || ended_captures(&testbed) == 1), "{}", testbed.log());
    // A full disk.
    let mut running = capture(&testbed, &["-w", "/dev/full"], "full.log");
    testbed.pods[0].output(&["ping", "-c", "1", "-W", "2", SERVER[0]]).unwrap();
    assert_eq!(running.wait(Duration::from_secs(5)).unwrap().code(), Some(1));
    let output = fs::read_to_string(testbed.folder.path().join("full.log")).unwrap();
    assert!(output.contains("cannot write /dev/full: No space left on device"), "{output}");
    // A killed client ends its capture.
    let mut running = capture(&testbed, &["--filter", "dropped"], "killed.log");
    running.signal("KILL").unwrap();
    running.wait(Duration::from_secs(3));
    assert!(wait_for(Duration::from_secs(3), || ended_captures(&testbed) == 3), "{}", testbed.log());
    // JSON lines, and a packet limit.
    let mut running = capture(&testbed, &["--filter", "egress", "-o", "json", "--count", "1"], "lines.json");
    testbed.pods[0].output(&["ping", "-c", "1", "-W", "2", SERVER[1]]).unwrap();
    assert!(running.wait(Duration::from_secs(5)).is_some_and(|status| status.success()));
    let output = fs::read_to_string(testbed.folder.path().join("lines.json")).unwrap();
    let line: Value = serde_json::from_str(output.lines().next().unwrap()).unwrap();
    assert_eq!((text(&line, "source"), text(&line, "source_after")), ("fd00:1::11", VIP_A[1]), "{output}");
    assert!(output.contains("1 packets captured, --count 1 is reached"), "{output}");
    let (code, _, stderr) = run(&testbed, &["capture", "--for", "300ms"]);
    assert!(code == 0 && stderr.contains("0 packets captured, --for 0.3 s is over"), "{stderr}");
    testbed.check_frames();
}

#[test]
fn ports_man_pages_and_completions_work() {
    let testbed = Testbed::with_gateway("ports");
    testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
    let ports = testbed.query(&["ports"]);
    let vip = ports["vips"].as_array().unwrap().iter().find(|vip| vip["address"] == VIP_A[0]).unwrap();
    let (sessions, used) = (vip["sessions"].as_u64().unwrap(), vip["blocks_used"].as_u64().unwrap());
    assert!(sessions >= 3 && (1..=sessions).contains(&used), "{ports}");
    let counted = f64::from(u32::try_from(sessions).unwrap());
    assert!((testbed.metric("vipgate_vip_sessions", VIP_A[0]) - counted).abs() < 0.5);
    testbed.query(&["sessions", "flush", "--all"]);
    let empty = || testbed.metric("vipgate_vip_sessions", VIP_A[0]) < 0.5;
    assert!(
        wait_for(Duration::from_secs(8), empty),
        "flushed sessions leave quarantine: {}",
        testbed.query(&["ports"])
    );
    let pages = testbed.folder.path().join("man").display().to_string();
    assert_eq!(testbed.command(&["man", &pages]).0, 0);
    let page = vipgate_lab::output(&["head", "-5", &format!("{pages}/vipgate-trace.1")]).unwrap();
    assert!(page.contains("vipgate-trace"), "{page}");
    let (code, script, _) = testbed.command(&["completions", "bash"]);
    assert!(code == 0 && script.contains("complete -F _vipgate"), "{script}");
}
