//! Policy changes under traffic.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use vipgate_lab::reflector::query_udp;
use vipgate_tests::{EXTRA_ENDPOINT, SERVER, Testbed, VIP_A, session_state, tenant_with_pool, wait_for};

#[test]
fn endpoint_changes_keep_open_connections() {
    let testbed = Testbed::with_gateway("change");
    let in_force = |count: u64| testbed.query(&["status"])["policy"]["updates_applied"].as_u64().unwrap() >= count;
    let [p1, _, _, p4] = &testbed.pods;
    // A connection that is idle until its request at the end.
    let open = p1.run(|| {
        let mut stream = TcpStream::connect(SocketAddr::from(([198, 51, 100, 10], 80)))?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        std::thread::sleep(Duration::from_secs(3));
        stream.write_all(b"GET / HTTP/1.1\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    });
    assert_eq!(query_udp(p4, SERVER[0].parse().unwrap()).unwrap(), "10.1.0.31", "not covered yet");
    let original = testbed.read_policy("tenant-b.yaml");
    testbed.write_policy("tenant-b.yaml", &format!("{original}\n---{EXTRA_ENDPOINT}"));
    assert!(wait_for(Duration::from_secs(5), || in_force(2)), "{}", testbed.log());
    assert_eq!(query_udp(p4, SERVER[0].parse().unwrap()).unwrap(), "203.0.113.20");
    testbed.write_policy("tenant-b.yaml", &original);
    assert!(wait_for(Duration::from_secs(5), || in_force(3)));
    assert_eq!(query_udp(p4, SERVER[0].parse().unwrap()).unwrap(), "10.1.0.31", "no longer covered");
    assert!(open.join().unwrap().unwrap().ends_with("203.0.113.10"), "the open connection is unaffected");
}

#[test]
fn an_invalid_file_keeps_the_last_good_policy_and_is_reported() {
    let testbed = Testbed::with_gateway("invalid");
    let original = testbed.read_policy("tenant-a.yaml");
    testbed.write_policy("tenant-a.yaml", &original.replace("addressType: IPv4", "addressType: IPv5"));
    if testbed.uses_policy_server {
        // The server rejects it, and the gateway doesn't receive it.
        let policyd = testbed.policyd();
        policyd.wait_for_log(&["manifest_refused", "tenant-a.yaml:", "addressType"]);
        let (code, stdout, stderr) = testbed.policy_status(&[]);
        assert!(code == 0 && stdout.contains("tenant-a.yaml:") && stdout.contains("addressType"), "{stdout}{stderr}");
        assert!(policyd.metric("vipgate_policyd_faulty_objects", "instead=\"last_good\"") > 0.5);
        let policy = &testbed.query(&["status"])["policy"];
        assert!(policy["updates_rejected"] == 0 && policy["last_error"] == "", "{policy}");
    } else {
        let is_last_good = || testbed.metric("vipgate_policy_objects", "state=\"last_good\"") > 0.5;
        assert!(wait_for(Duration::from_secs(5), is_last_good), "{}", testbed.log());
        let policy = &testbed.query(&["status"])["policy"];
        let faulty = &policy["manifests"]["faulty"][0];
        assert!(faulty["name"] == "EndpointSlice tenant-a/api-ipv4" && faulty["last_good"] == true, "{policy}");
        let reason = faulty["reasons"][0].as_str().unwrap();
        assert!(reason.contains("tenant-a.yaml:") && reason.contains("addressType"), "{reason}");
        assert!(policy["updates_rejected"] == 0 && policy["manifests"]["healthy"] == true, "{policy}");
        assert_eq!(testbed.http_status("/readyz"), 200, "one tenant's error doesn't affect readiness");
    }
    testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
    testbed.write_policy("tenant-a.yaml", &original);
    let recovered = || {
        let of_server =
            !testbed.uses_policy_server || testbed.policyd().metric("vipgate_policyd_faulty_objects", "") < 0.5;
        let of_files =
            testbed.uses_policy_server || testbed.metric("vipgate_policy_objects", "state=\"last_good\"") < 0.5;
        of_server && of_files && testbed.query(&["status"])["policy"]["last_error"] == ""
    };
    assert!(wait_for(Duration::from_secs(5), recovered));
}

/// From an empty directory to a policy whose first change removes an endpoint; then a truncated file, as left by a
/// failed `kubectl > tenant-a.yaml`; then `accept-empty`.
#[test]
fn an_empty_source_withdraws_nothing_until_accepted() {
    let mut testbed = Testbed::new("empty");
    testbed.uses_policy_server = false;
    let originals = ["tenant-a.yaml", "tenant-b.yaml"].map(|name| (name, testbed.read_policy(name)));
    let path = |testbed: &Testbed, name: &str| testbed.folder.path().join("policy").join(name);
    for (name, _) in &originals {
        fs::remove_file(path(&testbed, name)).unwrap();
    }
    testbed.spawn_gateway("");
    let waits = |testbed: &Testbed| testbed.log().contains("source_empty") && testbed.log().contains("no_policy");
    assert!(wait_for(Duration::from_secs(20), || waits(&testbed)), "{}", testbed.log());
    assert!(wait_for(Duration::from_secs(5), || testbed.http_status("/healthz") == 200));
    assert_eq!(testbed.http_status("/readyz"), 503);
    let [p1, p2, ..] = &testbed.pods;
    assert!(query_udp(p1, SERVER[0].parse().unwrap()).is_err(), "closed without a policy");
    for (name, text) in &originals {
        testbed.write_policy(name, text);
    }
    assert!(wait_for(Duration::from_secs(20), || testbed.is_ready()), "{}", testbed.log());
    assert_eq!(query_udp(p2, SERVER[0].parse().unwrap()).unwrap(), VIP_A[0]);

    let (_, complete) = &originals[0];
    let p2_endpoint = "  - addresses: [10.1.0.12]\n    \
                       conditions: {ready: true, serving: true, terminating: false}\n    \
                       targetRef: {kind: Pod, name: api-1, namespace: tenant-a}\n";
    assert!(complete.contains(p2_endpoint));
    testbed.write_policy("tenant-a.yaml", &complete.replace(p2_endpoint, ""));
    // The first change removes it.
    testbed.wait_uncovered(p2, SERVER[0], "10.1.0.12");

    fs::write(path(&testbed, "tenant-a.yaml"), "").unwrap();
    let is_healthy = || testbed.metric("vipgate_policy_source_healthy", "") > 0.5;
    assert!(wait_for(Duration::from_secs(5), || !is_healthy()), "{}", testbed.log());
    testbed.check_source_addresses(p1, SERVER, VIP_A);
    assert_eq!(testbed.http_status("/readyz"), 200);
    let socket = testbed.folder.path().join("gateway.sock").display().to_string();
    let (_, stdout, _) = testbed.command(&["status", "--socket", &socket]);
    assert!(stdout.contains("UNHEALTHY") && stdout.contains("tenant-a.yaml: is empty"), "{stdout}");

    let accept = || testbed.command(&["policy", "accept-empty", "--socket", &socket]);
    let (code, stdout, stderr) = accept();
    assert!(
        code == 0 && stdout.contains("out of force: 4 objects") && stdout.contains("tenant-a.yaml: 4"),
        "{stdout}{stderr}"
    );
    assert_eq!(query_udp(p1, SERVER[0].parse().unwrap()).unwrap(), "10.1.0.11");
    assert!(is_healthy());
    let (code, _, stderr) = accept();
    assert!(code == 1 && stderr.contains("no part of the source"), "{stderr}");
}

/// Without a Pod, strict tenancy takes addresses of slices as they are: the status of whatever compiles them says so.
#[test]
fn slices_are_reported_as_not_verified_until_there_is_a_pod() {
    let testbed = Testbed::with_gateway("slices");
    let socket = testbed.folder.path().join("gateway.sock").display().to_string();
    let of_gateway = ["status", "--socket", &socket];
    let arguments = if testbed.uses_policy_server { &["policy", "status"][..] } else { &of_gateway[..] };
    let is_unverified = || {
        let (code, stdout, stderr) = testbed.command(arguments);
        assert_eq!(code, 0, "{stderr}");
        stdout.contains("\nslices    addresses NOT VERIFIED")
    };
    assert!(is_unverified());
    testbed.write_policy(
        "pod.yaml",
        "apiVersion: v1\nkind: Pod\nmetadata: {name: api-0, namespace: tenant-a}\n\
         status: {podIP: 10.1.0.11, podIPs: [{ip: 10.1.0.11}, {ip: \"fd00:1::11\"}]}\n",
    );
    assert!(wait_for(Duration::from_secs(5), || !is_unverified()), "{}", testbed.log());
    testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
}

#[test]
fn a_gateway_that_is_alone_keeps_addresses_of_pools_over_a_restart() {
    let (state, more) = session_state();
    let mut testbed = Testbed::new("pool");
    testbed.uses_policy_server = false;
    testbed.write_policy("tenant-c.yaml", &tenant_with_pool(&["a", "b"]));
    testbed.start(&more);
    let source = |testbed: &Testbed| query_udp(&testbed.pods[3], SERVER[0].parse().unwrap()).unwrap();
    let vip = source(&testbed);
    assert!(["203.0.113.40", "203.0.113.41"].contains(&vip.as_str()), "{vip}");
    testbed.stop("KILL");
    // What `a` has given up is quarantined: `c` waits.
    testbed.write_policy("tenant-c.yaml", &tenant_with_pool(&["b", "c"]));
    testbed.start(&more);
    assert_eq!(source(&testbed), vip);
    assert!(testbed.log().contains("VG0420"), "{}", testbed.log());
    let record = fs::read_to_string(state.path().join("gw-test.addresses")).unwrap();
    assert!(record.contains(&format!("{vip} EgressPolicy tenant-c/b\n")) && record.lines().count() == 2, "{record}");
}

#[test]
fn sighup_reloads_the_policy() {
    let testbed = Testbed::with_gateway("hup");
    testbed.process().signal("HUP").unwrap();
    assert!(wait_for(Duration::from_secs(3), || testbed.log().contains("\"event\":\"reload\"")));
    testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
}

#[test]
fn status_commands_and_metrics_match_the_traffic() {
    let testbed = Testbed::with_gateway("show");
    testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
    let vips = testbed.query(&["vips"]);
    let vips: Vec<&str> = vips["vips"].as_array().unwrap().iter().map(|vip| vip["address"].as_str().unwrap()).collect();
    assert_eq!(vips, ["203.0.113.10", "203.0.113.20", "2001:db8:113::10", "2001:db8:113::20"]);
    let endpoints = testbed.query(&["endpoints"]);
    assert_eq!(endpoints["endpoints"].as_array().unwrap().len(), 6);
    let filter = ["sessions", "--endpoint", "10.1.0.11", "--proto", "tcp"];
    let sessions = testbed.query(&filter);
    let session = &sessions["sessions"][0];
    assert!(session["vip"].as_str().unwrap().starts_with("203.0.113.10:"), "{session}");
    assert_eq!(session["remote"], "198.51.100.10:80");
    assert_eq!(testbed.query(&["sessions", "--endpoint", "10.1.0.99"])["sessions"].as_array().unwrap().len(), 0);
    assert!(testbed.query(&["sessions", "flush", "--proto", "icmp"])["ended"].as_u64().unwrap() >= 1);
    assert_eq!(
        testbed.query(&["sessions", "--proto", "icmp", "--state", "established"])["sessions"].as_array().unwrap().len(),
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
        testbed.metric(name, labels);
    }
}
