//! Updates of the XDP program's maps that the kernel refuses: no pod leaves with its own address, policy isn't in force
//! and not acknowledged until the maps hold it, and then it is, without a restart.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use aya::maps::{HashMap, Map, MapData, MapInfo};
use vipgate_lab::reflector::query_udp;
use vipgate_tests::{EXTRA_ENDPOINT, POD_FILTER, SERVER, Testbed, VIP_A, wait_for};

/// Addresses in the steering program's map, as another process sees it.
type Hosts = HashMap<MapData, [u8; 4], [u32; 2]>;

/// The map of IPv4 addresses of the program at the gateway's inside interface.
fn hosts(testbed: &Testbed) -> Hosts {
    let link = testbed.gateway.output(&["ip", "-j", "-d", "link", "show", "gw-in"]).unwrap();
    let link: serde_json::Value = serde_json::from_str(&link).unwrap();
    let id = link[0]["xdp"]["prog"]["id"].as_u64().unwrap();
    let program = aya::programs::loaded_programs().map(Result::unwrap).find(|program| u64::from(program.id()) == id);
    let maps = program.unwrap().map_ids().unwrap().unwrap();
    let is_hosts = |id: &u32| MapInfo::from_id(*id).unwrap().name_as_str() == Some("hosts4");
    let id = maps.into_iter().find(is_hosts).unwrap();
    Hosts::try_from(Map::HashMap(MapData::from_id(id).unwrap())).unwrap()
}

/// Addresses of 240.0.0.0/4, which nobody has.
fn unused() -> impl Iterator<Item = [u8; 4]> {
    (0xf000_0000_u32..).map(u32::to_be_bytes)
}

/// Fills the map with addresses that have no role; returns their number.
fn fill(hosts: &mut Hosts) -> usize {
    unused().take_while(|address| hosts.insert(address, [0, 0], 0).is_ok()).count()
}

/// The source address that the server sees of p4, which isn't covered at first.
fn source(testbed: &Testbed) -> Option<String> {
    query_udp(&testbed.pods[3], SERVER[0].parse().unwrap()).ok()
}

#[test]
fn a_pod_that_the_map_has_no_room_for_leaks_nothing_and_is_translated_once_it_has() {
    let testbed = Testbed::with_gateway("nomap");
    testbed.accounting.allow(["capture_failures"]);
    let status = || testbed.query(&["status"]);
    assert_eq!(source(&testbed).as_deref(), Some("10.1.0.31"), "not covered yet");
    let before = status();
    let mut hosts = hosts(&testbed);
    let count = fill(&mut hosts);
    let original = testbed.read_policy("tenant-b.yaml");
    testbed.write_policy("tenant-b.yaml", &format!("{original}\n---{EXTRA_ENDPOINT}"));
    let is_ready = || testbed.http_status("/readyz") == 200;
    assert!(wait_for(Duration::from_secs(5), || !is_ready()), "{}", testbed.log());
    let capture = testbed.capture(POD_FILTER);

    assert_eq!(source(&testbed), None, "it is dropped");
    let (code, reason) = testbed.http_get("/readyz");
    assert!(code == 503 && reason.contains("capture is incomplete") && reason.contains("hosts"), "{code} {reason}");
    assert!(testbed.metric("vipgate_capture_complete", "") < 0.5);
    assert!(testbed.metric("vipgate_steered_packets_total", "outcome=\"held\"") > 0.5);
    let held = status();
    assert!(held["capture_error"].as_str().unwrap().contains("hosts"), "{held}");
    for field in ["updates_applied", "updates_rejected", "version", "endpoints", "last_error"] {
        assert_eq!(held["policy"][field], before["policy"][field], "{field}: the previous policy is in force");
    }
    if testbed.uses_policy_server {
        let (code, ..) = testbed.policy_status(&["--wait", "1"]);
        assert_ne!(code, 0, "the update isn't acknowledged");
    }
    let failures = || testbed.metric("vipgate_capture_failures_total", "");
    let failed = failures();
    assert!(wait_for(Duration::from_secs(5), || failures() > failed), "it is retried");
    testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
    assert_eq!(capture.end().unwrap(), Vec::<String>::new(), "a pod's address leaked");
    assert_eq!(testbed.log().matches("capture_incomplete").count(), 1, "{}", testbed.log());

    for address in unused().take(count) {
        hosts.remove(&address).unwrap();
    }
    assert!(wait_for(Duration::from_secs(5), is_ready), "{:?}\n{}", testbed.http_get("/readyz"), testbed.log());
    assert_eq!(source(&testbed).as_deref(), Some("203.0.113.20"), "{}", testbed.log());
    assert!(status()["policy"]["updates_applied"].as_u64() > before["policy"]["updates_applied"].as_u64());
    assert_eq!(status()["capture_error"], "");
    assert!(testbed.log().contains("capture_complete") && testbed.metric("vipgate_capture_complete", "") > 0.5);
    if testbed.uses_policy_server {
        testbed.wait_in_force();
    }
    testbed.check_frames();
}

/// Without room for a pod, an update that doesn't need it is in force at once.
#[test]
fn a_later_update_replaces_one_that_waits() {
    let testbed = Testbed::with_gateway("nomap2");
    testbed.accounting.allow(["capture_failures"]);
    let mut hosts = hosts(&testbed);
    fill(&mut hosts);
    let original = testbed.read_policy("tenant-b.yaml");
    testbed.write_policy("tenant-b.yaml", &format!("{original}\n---{EXTRA_ENDPOINT}"));
    let is_ready = || testbed.http_status("/readyz") == 200;
    assert!(wait_for(Duration::from_secs(5), || !is_ready()), "{}", testbed.log());
    testbed.write_policy("tenant-b.yaml", &original);
    assert!(wait_for(Duration::from_secs(5), is_ready), "{:?}\n{}", testbed.http_get("/readyz"), testbed.log());
    assert_eq!(source(&testbed).as_deref(), Some("10.1.0.31"), "it isn't covered");
    testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
}
