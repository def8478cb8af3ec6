//! Policy that changes while traffic flows.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use vipgate::lab::peers::ask_udp;
use vipgate_tests::{MORE, SERVER, VIP_A, World, wait_for};

#[test]
fn endpoints_come_and_go_and_open_connections_stay() {
    let world = World::with_gateway("change");
    let in_force = |count: u64| world.ask(&["status"])["policy"]["updates_applied"].as_u64().unwrap() >= count;
    let [p1, _, _, p4] = &world.pods;
    // A connection that is open all along: it asks only at the end.
    let open = p1.run(|| {
        let mut stream = TcpStream::connect(SocketAddr::from(([198, 51, 100, 10], 80)))?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        std::thread::sleep(Duration::from_secs(3));
        stream.write_all(b"GET / HTTP/1.1\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    });
    assert_eq!(ask_udp(p4, SERVER[0].parse().unwrap()).unwrap(), "10.1.0.31", "not covered yet");
    let original = world.policy("tenant-b.yaml");
    world.write_policy("tenant-b.yaml", &format!("{original}\n---{MORE}"));
    assert!(wait_for(Duration::from_secs(5), || in_force(2)), "{}", world.log());
    assert_eq!(ask_udp(p4, SERVER[0].parse().unwrap()).unwrap(), "203.0.113.20");
    world.write_policy("tenant-b.yaml", &original);
    assert!(wait_for(Duration::from_secs(5), || in_force(3)));
    assert_eq!(ask_udp(p4, SERVER[0].parse().unwrap()).unwrap(), "10.1.0.31", "covered no more");
    assert!(open.join().unwrap().unwrap().ends_with("203.0.113.10"), "the open connection never noticed");
}

#[test]
fn an_invalid_file_keeps_the_last_good_policy_and_says_where_it_is_wrong() {
    let world = World::with_gateway("invalid");
    let original = world.policy("tenant-a.yaml");
    world.write_policy("tenant-a.yaml", &original.replace("addressType: IPv4", "addressType: IPv5"));
    if world.served {
        // It is the server that finds it, and the gateway never hears of it.
        let policyd = world.policyd();
        policyd.wait_for_log(&["manifest_refused", "tenant-a.yaml:", "addressType"]);
        let (code, shown, stderr) = world.policy_status(&[]);
        assert!(code == 0 && shown.contains("tenant-a.yaml:") && shown.contains("addressType"), "{shown}{stderr}");
        assert!(policyd.metric("vipgate_policyd_faulty_objects", "instead=\"last_good\"") > 0.5);
        let policy = &world.ask(&["status"])["policy"];
        assert!(policy["updates_rejected"] == 0 && policy["last_error"] == "", "{policy}");
    } else {
        let kept = || world.metric("vipgate_policy_objects", "state=\"last_good\"") > 0.5;
        assert!(wait_for(Duration::from_secs(5), kept), "{}", world.log());
        let policy = &world.ask(&["status"])["policy"];
        let faulty = &policy["manifests"]["faulty"][0];
        assert!(faulty["name"] == "EndpointSlice tenant-a/api-ipv4" && faulty["last_good"] == true, "{policy}");
        let reason = faulty["reasons"][0].as_str().unwrap();
        assert!(reason.contains("tenant-a.yaml:") && reason.contains("addressType"), "{reason}");
        assert!(policy["updates_rejected"] == 0 && policy["manifests"]["healthy"] == true, "{policy}");
        assert_eq!(world.answer("/readyz"), 200, "one tenant's mistake");
    }
    world.check_identity(&world.pods[0], SERVER, VIP_A);
    world.write_policy("tenant-a.yaml", &original);
    let mended = || {
        let of_server = !world.served || world.policyd().metric("vipgate_policyd_faulty_objects", "") < 0.5;
        let of_files = world.served || world.metric("vipgate_policy_objects", "state=\"last_good\"") < 0.5;
        of_server && of_files && world.ask(&["status"])["policy"]["last_error"] == ""
    };
    assert!(wait_for(Duration::from_secs(5), mended));
}

/// From an empty folder to a policy, whose first change takes away; what `kubectl > tenant-a.yaml` leaves on its way; and the word
/// that it is meant.
#[test]
fn emptiness_is_waited_out_and_withdraws_nothing_until_it_is_accepted() {
    let mut world = World::new("empty");
    world.served = false;
    let originals = ["tenant-a.yaml", "tenant-b.yaml"].map(|name| (name, world.policy(name)));
    let path = |world: &World, name: &str| world.folder.path().join("policy").join(name);
    for (name, _) in &originals {
        fs::remove_file(path(&world, name)).unwrap();
    }
    world.launch("");
    let waits = |world: &World| world.log().contains("source_empty") && world.log().contains("no_policy");
    assert!(wait_for(Duration::from_secs(20), || waits(&world)), "{}", world.log());
    assert!(wait_for(Duration::from_secs(5), || world.answer("/healthz") == 200));
    assert_eq!(world.answer("/readyz"), 503);
    let [p1, p2, ..] = &world.pods;
    assert!(ask_udp(p1, SERVER[0].parse().unwrap()).is_err(), "closed");
    for (name, text) in &originals {
        world.write_policy(name, text);
    }
    assert!(wait_for(Duration::from_secs(20), || world.is_ready()), "{}", world.log());
    assert_eq!(ask_udp(p2, SERVER[0].parse().unwrap()).unwrap(), VIP_A[0]);

    let (_, whole) = &originals[0];
    let second = "  - addresses: [10.1.0.12]\n    conditions: {ready: true, serving: true, terminating: false}\n    \
                  targetRef: {kind: Pod, name: api-1, namespace: tenant-a}\n";
    assert!(whole.contains(second));
    world.write_policy("tenant-a.yaml", &whole.replace(second, ""));
    // The first change takes it away.
    world.wait_uncovered(p2, SERVER[0], "10.1.0.12");

    fs::write(path(&world, "tenant-a.yaml"), "").unwrap();
    let is_healthy = || world.metric("vipgate_policy_source_healthy", "") > 0.5;
    assert!(wait_for(Duration::from_secs(5), || !is_healthy()), "{}", world.log());
    world.check_identity(p1, SERVER, VIP_A);
    assert_eq!(world.answer("/readyz"), 200);
    let socket = world.folder.path().join("gateway.sock").display().to_string();
    let (_, shown, _) = world.command(&["status", "--socket", &socket]);
    assert!(shown.contains("UNHEALTHY") && shown.contains("tenant-a.yaml: is empty"), "{shown}");

    let accept = || world.command(&["policy", "accept-empty", "--socket", &socket]);
    let (code, shown, stderr) = accept();
    assert!(
        code == 0 && shown.contains("out of force: 4 objects") && shown.contains("tenant-a.yaml: 4"),
        "{shown}{stderr}"
    );
    assert_eq!(ask_udp(p1, SERVER[0].parse().unwrap()).unwrap(), "10.1.0.11");
    assert!(is_healthy());
    let (code, _, stderr) = accept();
    assert!(code == 1 && stderr.contains("nothing of the source is empty"), "{stderr}");
}

#[test]
fn sighup_reads_the_policy_again() {
    let world = World::with_gateway("hup");
    world.process().signal("HUP").unwrap();
    assert!(wait_for(Duration::from_secs(3), || world.log().contains("\"event\":\"reload\"")));
    world.check_identity(&world.pods[0], SERVER, VIP_A);
}

#[test]
fn what_the_gateway_says_of_itself_is_true() {
    let world = World::with_gateway("show");
    world.check_identity(&world.pods[0], SERVER, VIP_A);
    let vips = world.ask(&["vips"]);
    let vips: Vec<&str> = vips["vips"].as_array().unwrap().iter().map(|vip| vip["address"].as_str().unwrap()).collect();
    assert_eq!(vips, ["203.0.113.10", "203.0.113.20", "2001:db8:113::10", "2001:db8:113::20"]);
    let endpoints = world.ask(&["endpoints"]);
    assert_eq!(endpoints["endpoints"].as_array().unwrap().len(), 6);
    let filter = ["sessions", "--endpoint", "10.1.0.11", "--proto", "tcp"];
    let sessions = world.ask(&filter);
    let session = &sessions["sessions"][0];
    assert!(session["vip"].as_str().unwrap().starts_with("203.0.113.10:"), "{session}");
    assert_eq!(session["remote"], "198.51.100.10:80");
    assert_eq!(world.ask(&["sessions", "--endpoint", "10.1.0.99"])["sessions"].as_array().unwrap().len(), 0);
    assert!(world.ask(&["sessions", "flush", "--proto", "icmp"])["ended"].as_u64().unwrap() >= 1);
    assert_eq!(
        world.ask(&["sessions", "--proto", "icmp", "--state", "established"])["sessions"].as_array().unwrap().len(),
        0
    );
    for (name, labels) in [
        ("vipgate_sessions", "worker=\"0\""),
        ("vipgate_sessions_created_total", ""),
        ("vipgate_sessions_expired_total", "reason=\"flushed\""),
        ("vipgate_policy_version_info", "version="),
        ("vipgate_policy_connected", ""),
        ("vipgate_build_info", "version="),
        ("vipgate_drops_total", "reason=\"no_service\""),
        ("vipgate_port_blocks", "vip=\"203.0.113.10\",state=\"claimed\""),
        ("vipgate_bytes_total", "direction=\"egress\""),
        ("vipgate_steered_packets_total", "outcome=\"captured\""),
    ] {
        world.metric(name, labels);
    }
}
