//! Loss of the policy server or of the network to it.

use std::path::Path;
use std::time::{Duration, Instant};
use std::{fs, thread};

use serde_json::Value;
use vipgate_lab::reflector::query_udp;
use vipgate_tests::policyd::{Policyd, PolicydConfig};
use vipgate_tests::traffic::Traffic;
use vipgate_tests::{EXTRA_ENDPOINT, SERVER, Testbed, VIP_A, VIP_B, session_state, wait_for};

/// Source addresses of p2 and p4 at the server.
fn observed_sources(testbed: &Testbed) -> [String; 2] {
    [1, 3].map(|pod| query_udp(&testbed.pods[pod], SERVER[0].parse().unwrap()).unwrap())
}

/// Asserts that the gateway reports in every place that it is disconnected, and the age of its policy.
fn check_reports_disconnect(testbed: &Testbed, reason: &str) {
    assert_eq!(testbed.policy_server_status()["has_policy"], true);
    // The first error is that of the lost connection, later ones are those of reconnects.
    let has_reason = || testbed.policy_server_status()["error"].as_str().unwrap().contains(reason);
    assert!(wait_for(Duration::from_secs(5), has_reason), "{}", testbed.policy_server_status());
    let socket = testbed.folder.path().join("gateway.sock").display().to_string();
    let (_, stdout, _) = testbed.command(&["status", "--socket", &socket]);
    let line = stdout.lines().find(|line| line.contains("NOT CONNECTED")).unwrap_or_else(|| panic!("{stdout}"));
    assert!(line.contains(reason) && line.contains("the policy in force was current"), "{line}");
    assert!(testbed.metric("vipgate_policy_connected", "") < 0.5);
}

#[test]
fn a_killed_policy_server_interrupts_nothing_and_updates_follow_its_restart() {
    let (_folder, more) = session_state();
    let mut testbed = Testbed::new("killed");
    testbed.uses_policy_server = true;
    testbed.start(&more);
    assert!(testbed.metric("vipgate_policy_connected", "") > 0.5);
    let vips = testbed.vips();
    let traffic = Traffic::start(&testbed);
    testbed.policyd.take().unwrap().kill();
    testbed.wait_connected(false, Duration::from_secs(5));
    check_reports_disconnect(&testbed, "refused");
    assert!(testbed.log().contains("policy_server_lost"), "{}", testbed.log());
    let has_aged = || testbed.metric("vipgate_policy_age_seconds", "") >= 2.0;
    assert!(wait_for(Duration::from_secs(10), has_aged), "the policy's age doesn't increase");
    traffic.end();

    // Without the server the gateway restarts with its cached policy.
    let traffic = Traffic::start(&testbed);
    testbed.stop("KILL");
    let started = Instant::now();
    testbed.start_gateway(&more);
    assert!(started.elapsed() < Duration::from_secs(8), "{:?}", started.elapsed());
    assert!(!testbed.log().contains("no_policy"), "it had no policy: {}", testbed.log());
    assert_eq!(testbed.vips(), vips);
    let unreachable = || testbed.log().contains("policy_server_unreachable");
    assert!(wait_for(Duration::from_secs(5), unreachable), "{}", testbed.log());
    check_reports_disconnect(&testbed, "refused");
    assert!(testbed.metric("vipgate_policy_age_seconds", "") >= 2.0, "the age survives a restart");
    assert_eq!(testbed.http_status("/readyz"), 200);

    // Changed meanwhile: p4 belongs to tenant B, and p2 is uncovered.
    testbed.write_policy("more.yaml", EXTRA_ENDPOINT);
    let tenant_a = testbed.read_policy("tenant-a.yaml");
    testbed.write_policy("tenant-a.yaml", &tenant_a.replace("[10.1.0.12]", "[10.1.0.99]"));
    assert_eq!(observed_sources(&testbed), [VIP_A[0], "10.1.0.31"], "the gateway has no update yet");
    testbed.start_policyd("");
    testbed.wait_connected(true, Duration::from_secs(15));
    testbed.wait_in_force();
    traffic.end_after_outage();
    assert_eq!(observed_sources(&testbed), ["10.1.0.12", VIP_B[0]]);
    assert!(testbed.metric("vipgate_policy_connected", "") > 0.5);
    assert!(testbed.metric("vipgate_policy_updates_total", "result=\"applied\"") >= 2.0);
    assert!(testbed.metric("vipgate_policy_updates_total", "result=\"rejected\"") < 0.5);
    testbed.check_frames();
}

#[test]
fn an_unresolvable_server_name_does_not_delay_shutdown() {
    let mut testbed = Testbed::new("unnamed");
    // The resolver queries a name server that never replies, for ten seconds.
    let rules = "add table inet dns; add chain inet dns in { type filter hook input priority 0; }; \
                 add rule inet dns in udp dport 53 drop";
    testbed.router.output(&["nft", rules]).unwrap();
    let folder = Path::new("/etc/netns").join(testbed.gateway.netns());
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("resolv.conf"), "nameserver 203.0.113.254\n").unwrap();
    let cache = testbed.folder.path().join("policy.cache").display().to_string();
    let url = "http://policy.example:18000";
    testbed.spawn_gateway(&format!("policy: {{server: {{url: \"{url}\", cache: {cache}}}}}"));
    let tried = wait_for(Duration::from_secs(15), || testbed.log().contains("policy_server_unreachable"));
    let stopping = Instant::now();
    testbed.stop("TERM");
    let shutdown_time = stopping.elapsed();
    let started = Instant::now();
    let (code, _, stderr) = testbed.policy_status(&["--server", url]);
    let query_time = started.elapsed();
    fs::remove_dir_all(&folder).unwrap();
    assert!(tried, "{}", testbed.log());
    assert!(shutdown_time < Duration::from_secs(1), "{shutdown_time:?}");
    // The command reports it after five seconds.
    assert!(
        code == 1 && stderr.contains("no connection within 5 s") && query_time < Duration::from_secs(7),
        "{query_time:?} {stderr}"
    );
}

/// Drops all packets to the policy server's port at the router.
const CUT: &str = "add table inet cut; add chain inet cut in { type filter hook input priority 0; }; \
                   add rule inet cut in tcp dport 18000 drop";

#[test]
fn a_network_partition_to_the_server_is_detected_and_recovered() {
    const URL: &str = "http://203.0.113.254:18000";
    let mut testbed = Testbed::new("cut");
    let config = PolicydConfig { listen: "203.0.113.254:18000", ..PolicydConfig::default() };
    let policyd = Policyd::start(&testbed.router, testbed.folder.path(), config);
    let cache = testbed.folder.path().join("policy.cache").display().to_string();
    testbed.start_gateway(&format!("policy: {{server: {{url: \"{URL}\", cache: {cache}}}}}"));
    let traffic = Traffic::start(&testbed);
    testbed.router.output(&["nft", CUT]).unwrap();
    let cut = Instant::now();
    testbed.wait_connected(false, Duration::from_secs(15));
    let detected = cut.elapsed();
    assert!(detected < Duration::from_secs(12), "{detected:?}");
    check_reports_disconnect(&testbed, "");
    assert_ne!(testbed.policy_server_status()["error"], "");
    // The server detects it as well.
    policyd.wait_for_log(&["gateway_lost", "gw-test"]);
    testbed.write_policy("more.yaml", EXTRA_ENDPOINT);
    thread::sleep(Duration::from_millis(500));
    assert_eq!(observed_sources(&testbed)[1], "10.1.0.31", "the gateway has no update yet");
    testbed.router.output(&["nft", "delete table inet cut"]).unwrap();
    testbed.wait_connected(true, Duration::from_secs(30));
    let is_applied = || observed_sources(&testbed)[1] == VIP_B[0];
    assert!(wait_for(Duration::from_secs(10), is_applied), "{}", testbed.log());
    traffic.end();
    let (code, status, _) = testbed.policy_status(&["--server", URL, "-o", "json", "--wait", "5"]);
    let status: Value = serde_json::from_str(&status).unwrap();
    assert!(code == 0 && status["gateways"][0]["in_step"] == true, "{status}");
    testbed.check_frames();
}
