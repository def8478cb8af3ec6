//! Manifests that change rapidly, and broken manifests.

use std::thread;
use std::time::Duration;

use serde_json::Value;
use vipgate_lab::reflector::query_udp;
use vipgate_tests::traffic::Traffic;
use vipgate_tests::{EXCLUDED, EXTRA_ENDPOINT, SERVER, Testbed, VIP_B, wait_for};

#[test]
fn rapid_updates_converge_to_the_last_one() {
    const ROUNDS: usize = 500;
    let mut testbed = Testbed::new("flood");
    testbed.uses_policy_server = true;
    testbed.start("");
    let traffic = Traffic::start(&testbed);
    let original = testbed.read_policy("tenant-b.yaml");
    for round in 0..ROUNDS {
        // Endpoints change in every round; the last round has p4 and one more.
        let extra = if round % 2 == 1 { "10.1.0.31" } else { "10.1.0.32" };
        let more = EXTRA_ENDPOINT.replace("[10.1.0.31]", &format!("[{extra}]"));
        let many =
            EXTRA_ENDPOINT.replace("name: more", "name: many").replace("10.1.0.31", &format!("10.1.1.{}", round % 250));
        testbed.write_policy("tenant-b.yaml", &format!("{original}---{more}---{many}"));
        thread::sleep(Duration::from_millis(8));
    }
    let last = format!("10.1.1.{}", (ROUNDS - 1) % 250);
    let (code, stdout, _) =
        testbed.policy_status(&["--endpoint", &last, "--endpoint", "10.1.0.31", "--wait", "15", "-o", "json"]);
    assert_eq!(code, 0, "{stdout}\n{}", testbed.policyd().log());
    testbed.wait_in_force();
    let endpoints = testbed.query(&["endpoints"]);
    let mut endpoints: Vec<&str> =
        endpoints["endpoints"].as_array().unwrap().iter().map(|it| it["address"].as_str().unwrap()).collect();
    endpoints.sort_unstable();
    let mut expected =
        ["10.1.0.11", "10.1.0.12", "10.1.0.21", "10.1.0.31", &last, "fd00:1::11", "fd00:1::12", "fd00:1::21"];
    expected.sort_unstable();
    assert_eq!(endpoints, expected);
    traffic.end();
    assert_eq!(query_udp(&testbed.pods[3], SERVER[0].parse().unwrap()).unwrap(), VIP_B[0]);
    assert!(testbed.metric("vipgate_policy_updates_total", "result=\"rejected\"") < 0.5, "{}", testbed.log());
    let publications = testbed.policyd().metric("vipgate_policyd_publications_total", "");
    assert!(publications >= 5.0, "only {publications} publications: the updates were too slow");
    let version = &testbed.query(&["status"])["policy"]["version"];
    let (_, status, _) = testbed.policy_status(&["-o", "json"]);
    let status: Value = serde_json::from_str(&status).unwrap();
    assert_eq!(&status["version"], version);
    testbed.check_frames();
}

/// Output of `vipgate policy status`, as a table and as JSON.
fn policy_status(testbed: &Testbed) -> (String, Value) {
    let (code, table, stderr) = testbed.policy_status(&[]);
    assert_eq!(code, 0, "{stderr}");
    let (code, json, stderr) = testbed.policy_status(&["-o", "json"]);
    assert_eq!(code, 0, "{stderr}");
    (table, serde_json::from_str(&json).unwrap())
}

#[test]
fn a_manifest_that_can_t_be_read_is_reported_and_stays_as_it_was_last_read() {
    let mut testbed = Testbed::new("broken");
    testbed.uses_policy_server = true;
    testbed.start("");
    let traffic = Traffic::start(&testbed);
    let original = testbed.read_policy("tenant-b.yaml");
    let broken = original.replace("excludedCIDRs: [10.0.0.0/8", "excludedCIDRs: [10.0.0.0/33");
    let line = broken.lines().position(|line| line.contains("excludedCIDRs")).unwrap() + 1;
    let position = format!("tenant-b.yaml:{line}");
    testbed.write_policy("tenant-b.yaml", &broken);
    testbed.write_policy("more.yaml", EXTRA_ENDPOINT);

    let policyd = testbed.policyd();
    policyd.wait_for_log(&["manifest_refused", &position, "spec.excludedCIDRs"]);
    policyd.wait_for_log(&["object_refused", "EgressPolicy tenant-b/web", "it stays in force as it was last read"]);
    let covered = || query_udp(&testbed.pods[3], SERVER[0].parse().unwrap()).is_ok_and(|seen| seen == VIP_B[0]);
    assert!(wait_for(Duration::from_secs(10), covered), "valid manifests are in force: {}", policyd.log());
    let (table, json) = policy_status(&testbed);
    let row = table.lines().find(|line| line.starts_with("EgressPolicy tenant-b/web")).unwrap();
    assert!(row.contains("LAST GOOD"), "{table}");
    assert!(table.contains(&position) && table.contains("spec.excludedCIDRs"), "{table}");
    let diagnostic = &json["diagnostics"][0];
    assert!(diagnostic["file"].as_str().unwrap().ends_with("tenant-b.yaml"), "{diagnostic}");
    assert!(diagnostic["line"] == line && diagnostic["severity"] == "error", "{diagnostic}");
    assert!(diagnostic["field"].as_str().unwrap().starts_with("spec.excludedCIDRs"), "{diagnostic}");
    let named =
        |name: &str| json["policies"].as_array().unwrap().iter().find(|policy| policy["name"] == name).unwrap().clone();
    let web = named("EgressPolicy tenant-b/web");
    assert!(web["accepted"] == false && web["last_good"] == true, "{web}");
    assert_eq!(named("Service tenant-a/api")["accepted"], true);
    let faulty =
        |instead: &str| testbed.policyd().metric("vipgate_policyd_faulty_objects", &format!("instead=\"{instead}\""));
    assert!(faulty("last_good") > 0.5 && faulty("nothing") < 0.5);
    // The last good version is in force: 10.9.0.200 is excluded.
    assert_eq!(query_udp(&testbed.pods[2], SERVER[0].parse().unwrap()).unwrap(), VIP_B[0]);
    traffic.end();
    assert_eq!(query_udp(&testbed.pods[2], EXCLUDED[0].parse().unwrap()).unwrap(), "10.1.0.21");
    // The gateway got no error.
    let policy = &testbed.query(&["status"])["policy"];
    assert!(policy["last_error"] == "" && policy["updates_rejected"] == 0, "{policy}");
    let (code, _, stderr) = testbed.policy_status(&["--wait", "1"]);
    assert!(code == 1 && stderr.contains("not all of it is in force"), "{stderr}");

    // Corrected and changed: 10.9.0.200 is no longer excluded.
    testbed
        .write_policy("tenant-b.yaml", &original.replace("excludedCIDRs: [10.0.0.0/8", "excludedCIDRs: [10.0.0.0/16"));
    testbed.wait_in_force();
    // A single datagram may be lost outside of the gateway; what the gateway drops is accounted for.
    let translated = || query_udp(&testbed.pods[2], EXCLUDED[0].parse().unwrap()).is_ok_and(|seen| seen == VIP_B[0]);
    assert!(wait_for(Duration::from_secs(10), translated), "{}", testbed.log());
    assert!(faulty("last_good") < 0.5);
    let (table, json) = policy_status(&testbed);
    assert!(!table.contains("LAST GOOD") && json["diagnostics"].as_array().unwrap().is_empty(), "{table}");
}

#[test]
fn policy_status_wait_reports_whether_policy_is_in_force() {
    let mut testbed = Testbed::new("wait");
    testbed.uses_policy_server = true;
    testbed.start("");
    let exit_code = |arguments: &[&str]| testbed.policy_status(arguments).0;
    assert_eq!(exit_code(&["--endpoint", "10.1.0.11", "--wait", "5"]), 0);
    assert_eq!(exit_code(&["--endpoint", "10.1.0.11", "--endpoint", "fd00:1::21", "--wait", "5"]), 0);
    // An uncovered address.
    let (code, stdout, stderr) = testbed.policy_status(&["--endpoint", "10.1.0.31", "--wait", "1"]);
    assert!(code == 1 && stdout.contains("none covers it") && stderr.contains("not all of it"), "{stdout}{stderr}");
    assert_eq!(exit_code(&["--endpoint", "10.1.0.31"]), 0, "without --wait it only reports");
    assert_eq!(exit_code(&["--endpoint", "10.1.0.300", "--wait", "1"]), 2);
    // It waits until the update is in force.
    testbed.write_policy("more.yaml", EXTRA_ENDPOINT);
    assert_eq!(exit_code(&["--endpoint", "10.1.0.31", "--wait", "10"]), 0);
    assert_eq!(query_udp(&testbed.pods[3], SERVER[0].parse().unwrap()).unwrap(), VIP_B[0]);
    testbed.stop("TERM");
    let (code, stdout, _) = testbed.policy_status(&["--endpoint", "10.1.0.11", "--wait", "1"]);
    assert_eq!(code, 1, "no gateway is connected: {stdout}");
    testbed.policyd.take().unwrap().kill();
    let (code, _, stderr) = testbed.policy_status(&["--wait", "1"]);
    assert!(code == 1 && stderr.contains("http://127.0.0.1:18000"), "{stderr}");
}
