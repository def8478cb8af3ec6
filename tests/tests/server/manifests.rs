//! Manifests that change all the time, and manifests that are broken.

use std::thread;
use std::time::Duration;

use serde_json::Value;
use vipgate::lab::peers::ask_udp;
use vipgate_tests::traffic::Traffic;
use vipgate_tests::{EXCLUDED, MORE, SERVER, VIP_B, World, wait_for};

#[test]
fn a_flood_of_updates_ends_in_the_last_one_and_costs_nothing() {
    const ROUNDS: usize = 500;
    let mut world = World::new("flood");
    world.served = true;
    world.start("");
    let traffic = Traffic::start(&world);
    let original = world.policy("tenant-b.yaml");
    for round in 0..ROUNDS {
        // Endpoints that come and go, others all the time; at the end there is p4 and one more.
        let extra = if round % 2 == 1 { "10.1.0.31" } else { "10.1.0.32" };
        let more = MORE.replace("[10.1.0.31]", &format!("[{extra}]"));
        let many = MORE.replace("name: more", "name: many").replace("10.1.0.31", &format!("10.1.1.{}", round % 250));
        world.write_policy("tenant-b.yaml", &format!("{original}---{more}---{many}"));
        thread::sleep(Duration::from_millis(8));
    }
    let last = format!("10.1.1.{}", (ROUNDS - 1) % 250);
    let (code, shown, _) =
        world.policy_status(&["--endpoint", &last, "--endpoint", "10.1.0.31", "--wait", "15", "-o", "json"]);
    assert_eq!(code, 0, "{shown}\n{}", world.policyd().log());
    world.wait_in_force();
    let endpoints = world.ask(&["endpoints"]);
    let mut endpoints: Vec<&str> =
        endpoints["endpoints"].as_array().unwrap().iter().map(|it| it["address"].as_str().unwrap()).collect();
    endpoints.sort_unstable();
    let mut expected =
        ["10.1.0.11", "10.1.0.12", "10.1.0.21", "10.1.0.31", &last, "fd00:1::11", "fd00:1::12", "fd00:1::21"];
    expected.sort_unstable();
    assert_eq!(endpoints, expected);
    traffic.end();
    assert_eq!(ask_udp(&world.pods[3], SERVER[0].parse().unwrap()).unwrap(), VIP_B[0]);
    assert!(world.metric("vipgate_policy_updates_total", "result=\"rejected\"") < 0.5, "{}", world.log());
    let publications = world.policyd().metric("vipgate_policyd_publications_total", "");
    assert!(publications >= 5.0, "only {publications}: no flood");
    let version = &world.ask(&["status"])["policy"]["version"];
    let (_, shown, _) = world.policy_status(&["-o", "json"]);
    let shown: Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(&shown["version"], version);
    world.check_frames();
}

/// What `vipgate policy status` says, as a table and as JSON.
fn shown(world: &World) -> (String, Value) {
    let (code, table, stderr) = world.policy_status(&[]);
    assert_eq!(code, 0, "{stderr}");
    let (code, json, stderr) = world.policy_status(&["-o", "json"]);
    assert_eq!(code, 0, "{stderr}");
    (table, serde_json::from_str(&json).unwrap())
}

#[test]
fn a_broken_manifest_is_named_its_last_good_version_stays_and_all_else_goes_on() {
    let mut world = World::new("broken");
    world.served = true;
    world.start("");
    let traffic = Traffic::start(&world);
    let original = world.policy("tenant-b.yaml");
    let broken = original.replace("excludedCIDRs: [10.0.0.0/8", "excludedCIDRs: [10.0.0.0/33");
    let line = broken.lines().position(|line| line.contains("excludedCIDRs")).unwrap() + 1;
    let place = format!("tenant-b.yaml:{line}");
    world.write_policy("tenant-b.yaml", &broken);
    world.write_policy("more.yaml", MORE);

    let policyd = world.policyd();
    policyd.wait_for_log(&["manifest_refused", &place, "spec.excludedCIDRs"]);
    policyd.wait_for_log(&["object_refused", "EgressPolicy tenant-b/web", "its last good version stays in force"]);
    let covered = || ask_udp(&world.pods[3], SERVER[0].parse().unwrap()).is_ok_and(|seen| seen == VIP_B[0]);
    assert!(wait_for(Duration::from_secs(10), covered), "what is good is in force: {}", policyd.log());
    let (table, json) = shown(&world);
    let row = table.lines().find(|line| line.starts_with("EgressPolicy tenant-b/web")).unwrap();
    assert!(row.contains("LAST GOOD"), "{table}");
    assert!(table.contains(&place) && table.contains("spec.excludedCIDRs"), "{table}");
    let complaint = &json["complaints"][0];
    assert!(complaint["file"].as_str().unwrap().ends_with("tenant-b.yaml"), "{complaint}");
    assert!(complaint["line"] == line && complaint["severity"] == "error", "{complaint}");
    assert!(complaint["field"].as_str().unwrap().starts_with("spec.excludedCIDRs"), "{complaint}");
    let named =
        |name: &str| json["policies"].as_array().unwrap().iter().find(|policy| policy["name"] == name).unwrap().clone();
    let web = named("EgressPolicy tenant-b/web");
    assert!(web["accepted"] == false && web["last_good"] == true, "{web}");
    assert_eq!(named("Service tenant-a/api")["accepted"], true);
    let faulty =
        |instead: &str| world.policyd().metric("vipgate_policyd_faulty_objects", &format!("instead=\"{instead}\""));
    assert!(faulty("last_good") > 0.5 && faulty("nothing") < 0.5);
    // What was good before is what is in force: 10.9.0.200 is excluded.
    assert_eq!(ask_udp(&world.pods[2], SERVER[0].parse().unwrap()).unwrap(), VIP_B[0]);
    traffic.end();
    assert_eq!(ask_udp(&world.pods[2], EXCLUDED[0].parse().unwrap()).unwrap(), "10.1.0.21");
    // The gateway has heard of nothing wrong.
    let policy = &world.ask(&["status"])["policy"];
    assert!(policy["last_error"] == "" && policy["updates_rejected"] == 0, "{policy}");
    let (code, _, stderr) = world.policy_status(&["--wait", "1"]);
    assert!(code == 1 && stderr.contains("not all of it is in force"), "{stderr}");

    // Mended, and changed: 10.9.0.200 is not excluded any more.
    world.write_policy("tenant-b.yaml", &original.replace("excludedCIDRs: [10.0.0.0/8", "excludedCIDRs: [10.0.0.0/16"));
    world.wait_in_force();
    assert_eq!(ask_udp(&world.pods[2], EXCLUDED[0].parse().unwrap()).unwrap(), VIP_B[0]);
    assert!(faulty("last_good") < 0.5);
    let (table, json) = shown(&world);
    assert!(!table.contains("LAST GOOD") && json["complaints"].as_array().unwrap().is_empty(), "{table}");
}

#[test]
fn status_waits_until_it_is_in_force_or_says_that_it_is_not() {
    let mut world = World::new("wait");
    world.served = true;
    world.start("");
    let asked = |arguments: &[&str]| world.policy_status(arguments).0;
    assert_eq!(asked(&["--endpoint", "10.1.0.11", "--wait", "5"]), 0);
    assert_eq!(asked(&["--endpoint", "10.1.0.11", "--endpoint", "fd00:1::21", "--wait", "5"]), 0);
    // Nobody covers it.
    let (code, shown, stderr) = world.policy_status(&["--endpoint", "10.1.0.31", "--wait", "1"]);
    assert!(code == 1 && shown.contains("none covers it") && stderr.contains("not all of it"), "{shown}{stderr}");
    assert_eq!(asked(&["--endpoint", "10.1.0.31"]), 0, "without --wait it only tells");
    assert_eq!(asked(&["--endpoint", "10.1.0.300", "--wait", "1"]), 2);
    // It waits for what comes, and then it is so.
    world.write_policy("more.yaml", MORE);
    assert_eq!(asked(&["--endpoint", "10.1.0.31", "--wait", "10"]), 0);
    assert_eq!(ask_udp(&world.pods[3], SERVER[0].parse().unwrap()).unwrap(), VIP_B[0]);
    world.end("TERM");
    let (code, shown, _) = world.policy_status(&["--endpoint", "10.1.0.11", "--wait", "1"]);
    assert_eq!(code, 1, "no gateway is there: {shown}");
    world.policyd.take().unwrap().kill();
    let (code, _, stderr) = world.policy_status(&["--wait", "1"]);
    assert!(code == 1 && stderr.contains("http://127.0.0.1:18000"), "{stderr}");
}
