//! Asking why: what `trace` foretells is what packets then meet, `explain` and `drops` say whose they are, `capture` shows them.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::time::Duration;

use serde_json::Value;
use vipgate::lab::Process;
use vipgate::lab::peers::{ask_http, ask_udp};
use vipgate_tests::{EXCLUDED, SERVER, VIP_A, VIP_B, World, binary, wait_for};

fn socket(world: &World) -> String {
    world.folder.path().join("gateway.sock").display().to_string()
}

/// Runs a command against the gateway: exit code, stdout and stderr.
fn say(world: &World, command: &[&str]) -> (i32, String, String) {
    world.command(&[command, &["--socket", &socket(world)]].concat())
}

fn trace(world: &World, from: &str, to: &str, more: &[&str]) -> Value {
    world.ask(&[&["trace", "--from", from, "--to", to], more].concat())
}

fn text<'a>(answer: &'a Value, field: &str) -> &'a str {
    answer[field].as_str().unwrap()
}

/// The sentence of a step.
fn step<'a>(answer: &'a Value, stage: &str) -> &'a str {
    let steps = answer["steps"].as_array().unwrap();
    let found = steps.iter().find(|step| step["stage"] == stage);
    found.unwrap_or_else(|| panic!("no {stage} in {answer}"))["text"].as_str().unwrap()
}

#[test]
fn what_trace_foretells_comes_true() {
    let world = World::with_gateway("trace");
    for (at, (pod, server)) in [("10.1.0.11", SERVER[0]), ("fd00:1::11", SERVER[1])].into_iter().enumerate() {
        let to = if at == 0 { format!("{server}:80") } else { format!("[{server}]:80") };
        let foretold = trace(&world, pod, &to, &[]);
        assert_eq!(text(&foretold, "verdict"), "forward", "{foretold}");
        assert_eq!((text(&foretold, "direction"), text(&foretold, "interface")), ("egress", "gw-out"));
        assert!(text(&foretold, "source").contains(VIP_A[at]), "{foretold}");
        assert_eq!(ask_http(&world.pods[0], server.parse().unwrap()).unwrap(), VIP_A[at]);
        // The same session, as it is known by now.
        let sessions = world.ask(&["sessions", "--endpoint", pod, "--proto", "tcp"]);
        let session = &sessions["sessions"][0];
        let known = trace(&world, text(session, "endpoint"), text(session, "remote"), &["--later"]);
        assert_eq!((text(&known, "verdict"), text(&known, "source")), ("forward", text(session, "vip")), "{known}");
        assert!(step(&known, "session").contains("is known"), "{known}");
        let answer = trace(&world, text(session, "remote"), text(session, "vip"), &["--later"]);
        assert_eq!((text(&answer, "direction"), text(&answer, "interface")), ("reply", "gw-in"), "{answer}");
        assert_eq!(text(&answer, "destination"), text(session, "endpoint"), "{answer}");
    }
    let excluded = trace(&world, "10.1.0.21", EXCLUDED[0], &["--proto", "udp"]);
    assert_eq!((text(&excluded, "verdict"), text(&excluded, "direction")), ("forward", "unchanged"), "{excluded}");
    assert!(step(&excluded, "destination").contains("excluded by 10.0.0.0/8"), "{excluded}");
    assert_eq!(ask_udp(&world.pods[2], EXCLUDED[0].parse().unwrap()).unwrap(), "10.1.0.21");
    let kernel = trace(&world, "10.1.0.31", SERVER[0], &[]);
    assert_eq!(text(&kernel, "verdict"), "kernel", "{kernel}");
    assert_eq!(ask_udp(&world.pods[3], SERVER[0].parse().unwrap()).unwrap(), "10.1.0.31");
    let client = trace(&world, &format!("{}:50000", SERVER[0]), &format!("{}:80", VIP_A[0]), &[]);
    assert!(step(&client, "backend").contains(", port 8080"), "{client}");
    let stray = trace(&world, SERVER[0], &format!("{}:9", VIP_A[0]), &["--proto", "udp"]);
    assert_eq!((text(&stray, "verdict"), text(&stray, "reason")), ("drop", "no_service"), "{stray}");
    let before = world.metric("vipgate_drops_total", "reason=\"no_service\"");
    let send =
        format!("import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'?', ('{}', 9))", VIP_A[0]);
    world.ledger.expect_exactly([("no_service", 1)]);
    world.server.output(&["python3", "-c", &send]).unwrap();
    let dropped = || world.metric("vipgate_drops_total", "reason=\"no_service\"") > before + 0.5;
    assert!(wait_for(Duration::from_secs(3), dropped), "{}", world.ask(&["drops"]));
    let drops = world.ask(&["drops", "--reason", "no_service"]);
    let last = &drops["last"]["no_service"];
    assert_eq!((text(last, "protocol"), text(last, "interface")), ("udp", "gw-out"), "{drops}");
    assert_eq!(text(last, "destination"), format!("{}:9", VIP_A[0]), "{drops}");
    let of = &drops["by_address"][0];
    assert_eq!((text(of, "address"), text(of, "name")), (VIP_A[0], "Service tenant-a/api"), "{drops}");
    // A trace leaves nothing behind.
    assert!(world.ask(&["sessions", "--remote", "198.51.100.77"])["sessions"].as_array().unwrap().is_empty());
    trace(&world, "10.1.0.11", "198.51.100.77:7", &[]);
    assert!(world.ask(&["sessions", "--remote", "198.51.100.77"])["sessions"].as_array().unwrap().is_empty());
    world.check_frames();
}

#[test]
fn explain_says_which_policy_wins_and_why() {
    let world = World::with_gateway("explain");
    world.write_policy(
        "overlap.yaml",
        "apiVersion: vipgate.io/v1alpha1\nkind: EgressPolicy\nmetadata: {name: greedy, namespace: tenant-b}\n\
         spec:\n  selectors: [{podSelector: {matchLabels: {app: web}}}]\n  addresses: [203.0.113.77]\n\
         ---\napiVersion: v1\nkind: Pod\nmetadata: {name: web-0, namespace: tenant-b, labels: {app: web}}\n\
         status: {podIP: 10.1.0.21, podIPs: [{ip: 10.1.0.21}]}\n",
    );
    let remarks = || world.ask(&["explain", "10.1.0.21"])["endpoint"]["remarks"].clone();
    let wanted = "wins over EgressPolicy tenant-b/greedy, which covers it too: one with serviceRef comes before one with selectors";
    assert!(wait_for(Duration::from_secs(10), || remarks()[0] == wanted), "{}\n{}", remarks(), world.log());
    let pod = world.ask(&["explain", "10.1.0.21"]);
    assert_eq!(text(&pod["endpoint"]["endpoint"], "policy"), "EgressPolicy tenant-b/web");
    assert_eq!(pod["endpoint"]["excluded"], serde_json::json!(["10.0.0.0/8", "fd00::/8"]));
    assert_eq!(text(&pod["backend_of"][0], "service"), "Service tenant-b/web");
    let vip = world.ask(&["explain", VIP_A[0]]);
    assert_eq!(vip["vip"]["users"], serde_json::json!([{"policy": "Service tenant-a/api", "endpoints": 2}]), "{vip}");
    assert_eq!(vip["vip"]["services"], serde_json::json!(["Service tenant-a/api (tcp/80, udp/53)"]));
    let (code, stdout, _) = say(&world, &["explain", VIP_B[1]]);
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
        (vec!["drops", "--reason", "bad_luck"], 2, "\"bad_luck\" is no drop reason; there are no_service"),
        (vec!["capture", "--filter", "hots 10.1.0.11"], 2, "--filter: \"hots\" means nothing here"),
        (vec!["capture", "--filter", "in eth9"], 2, "in \"eth9\": this gateway has gw-in, gw-out"),
        (vec!["top"], 2, "top needs a terminal"),
        (vec!["top", "--once", "wide"], 2, "expected COLUMNSxLINES"),
    ] {
        let (got, stdout, stderr) = say(&world, &command);
        assert_eq!((got, stdout.as_str()), (code, ""), "{command:?}: {stderr}");
        assert!(stderr.contains(error), "{command:?}: {stderr}");
    }
}

/// Captures in the background.
fn capture(world: &World, more: &[&str], log: &str) -> Process {
    let (program, socket) = (binary().display().to_string(), socket(world));
    let log = world.folder.path().join(log);
    let before = begun(world);
    let command = [&[program.as_str(), "capture", "--socket", &socket], more].concat();
    let process = world.gateway.spawn(&command, &log).unwrap();
    assert!(wait_for(Duration::from_secs(5), || begun(world) > before), "{}", fs::read_to_string(log).unwrap());
    process
}

fn begun(world: &World) -> usize {
    world.log().matches("a capture begins").count()
}

fn ended(world: &World) -> usize {
    world.log().matches("the capture has ended").count()
}

#[test]
fn a_capture_shows_both_sides_with_the_verdict_and_always_ends() {
    let world = World::with_gateway("capture");
    let file = world.folder.path().join("both.pcapng").display().to_string();
    let mut running = capture(&world, &["--filter", "host 10.1.0.11 and icmp", "-w", &file], "capture.log");
    // There is one at a time.
    let (code, _, stderr) = say(&world, &["capture"]);
    assert!(code == 1 && stderr.contains("somebody else captures"), "{stderr}");
    world.pods[0].output(&["ping", "-c", "2", "-i", "0.2", "-W", "2", SERVER[0]]).unwrap();
    world.pods[1].output(&["ping", "-c", "1", "-W", "2", SERVER[0]]).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    running.signal("INT").unwrap();
    assert!(running.wait(Duration::from_secs(5)).is_some_and(|status| status.success()));
    let said = fs::read_to_string(world.folder.path().join("capture.log")).unwrap();
    assert!(said.contains("packets captured, stopped"), "{said}");
    let lines = vipgate::lab::output(&["tcpdump", "-n", "-r", &file]).unwrap();
    let count = |side: &str| lines.matches(side).count();
    for side in ["10.1.0.11 > 198.51.100.10", "203.0.113.10 > 198.51.100.10", "198.51.100.10 > 10.1.0.11"] {
        assert_eq!(count(side), 2, "{side} in\n{lines}");
    }
    // An answer may come in at the other worker first.
    assert!((2..=4).contains(&count("198.51.100.10 > 203.0.113.10")), "{lines}");
    assert!(!lines.contains("10.1.0.12"), "{lines}");
    let bytes = fs::read(&file).unwrap();
    let has = |text: &str| bytes.windows(text.len()).any(|window| window == text.as_bytes());
    assert!(has("egress: sent on") && has("reply: sent on") && has("gw-out"));
    assert!(wait_for(Duration::from_secs(3), || ended(&world) == 1), "{}", world.log());
    // A full disk.
    let mut running = capture(&world, &["-w", "/dev/full"], "full.log");
    world.pods[0].output(&["ping", "-c", "1", "-W", "2", SERVER[0]]).unwrap();
    assert_eq!(running.wait(Duration::from_secs(5)).unwrap().code(), Some(1));
    let said = fs::read_to_string(world.folder.path().join("full.log")).unwrap();
    assert!(said.contains("cannot write /dev/full: No space left on device"), "{said}");
    // Whoever is killed is missed by nobody.
    let mut running = capture(&world, &["--filter", "dropped"], "killed.log");
    running.signal("KILL").unwrap();
    running.wait(Duration::from_secs(3));
    assert!(wait_for(Duration::from_secs(3), || ended(&world) == 3), "{}", world.log());
    // Lines for people and programs, and what ends it.
    let mut running = capture(&world, &["--filter", "egress", "-o", "json", "--count", "1"], "lines.json");
    world.pods[0].output(&["ping", "-c", "1", "-W", "2", SERVER[1]]).unwrap();
    assert!(running.wait(Duration::from_secs(5)).is_some_and(|status| status.success()));
    let said = fs::read_to_string(world.folder.path().join("lines.json")).unwrap();
    let line: Value = serde_json::from_str(said.lines().next().unwrap()).unwrap();
    assert_eq!((text(&line, "source"), text(&line, "source_after")), ("fd00:1::11", VIP_A[1]), "{said}");
    assert!(said.contains("1 packets captured, --count 1 is reached"), "{said}");
    let (code, _, stderr) = say(&world, &["capture", "--for", "300ms"]);
    assert!(code == 0 && stderr.contains("0 packets captured, --for 0.3 s is over"), "{stderr}");
    world.check_frames();
}

#[test]
fn top_ports_and_pages_are_there() {
    let world = World::with_gateway("top");
    world.check_identity(&world.pods[0], SERVER, VIP_A);
    for size in ["80x24", "200x50"] {
        let (code, stdout, stderr) = say(&world, &["top", "--every", "200ms", "--once", size]);
        assert_eq!(code, 0, "{stderr}");
        for word in ["gw-test", "egress", "sessions", "workers", "203.0.113.10", "Service tenant-a/api"] {
            assert!(stdout.contains(word), "{word} in\n{stdout}");
        }
    }
    let (code, stdout, _) = say(&world, &["top", "--every", "200ms", "--once", "40x20"]);
    assert!(code == 0 && stdout.contains("needs 60 columns"), "{stdout}");
    let ports = world.ask(&["ports"]);
    let vip = ports["vips"].as_array().unwrap().iter().find(|vip| vip["address"] == VIP_A[0]).unwrap();
    let (sessions, used) = (vip["sessions"].as_u64().unwrap(), vip["blocks_used"].as_u64().unwrap());
    assert!(sessions >= 3 && (1..=sessions).contains(&used), "{ports}");
    let counted = f64::from(u32::try_from(sessions).unwrap());
    assert!((world.metric("vipgate_vip_sessions", VIP_A[0]) - counted).abs() < 0.5);
    world.ask(&["sessions", "flush", "--all"]);
    let empty = || world.metric("vipgate_vip_sessions", VIP_A[0]) < 0.5;
    assert!(wait_for(Duration::from_secs(8), empty), "flushed, and rested: {}", world.ask(&["ports"]));
    let pages = world.folder.path().join("man").display().to_string();
    assert_eq!(world.command(&["man", &pages]).0, 0);
    let page = vipgate::lab::output(&["head", "-5", &format!("{pages}/vipgate-trace.1")]).unwrap();
    assert!(page.contains("vipgate-trace"), "{page}");
    let (code, script, _) = world.command(&["completions", "bash"]);
    assert!(code == 0 && script.contains("complete -F _vipgate"), "{script}");
}
