//! A gateway without any policy drops all traffic.

use std::time::Duration;
use std::{fs, thread};

use vipgate_lab::reflector::{query_http, query_udp};
use vipgate_tests::{POD_FILTER, SERVER, Testbed, VIP_A, VIP_B, wait_for};

/// Asserts that no traffic of pods passes, covered or not.
fn check_closed(testbed: &Testbed) {
    let capture = testbed.capture(POD_FILTER);
    let mut probes = Vec::new();
    for pod in [&testbed.pods[0], &testbed.pods[3]] {
        for server in SERVER {
            let (pod, address) = (pod.clone(), server.parse().unwrap());
            probes.push(thread::spawn(move || {
                let ping = pod.output(&["ping", "-c", "2", "-i", "0.2", "-W", "1", server]);
                let (udp, tcp) = (query_udp(&pod, address), query_http(&pod, address));
                let passed = ping.is_ok() || udp.is_ok() || tcp.is_ok();
                assert!(!passed, "{} reaches {server}: {ping:?}, {udp:?}, {tcp:?}", pod.name());
            }));
        }
    }
    for probe in probes {
        probe.join().unwrap();
    }
    assert_eq!(capture.end().unwrap(), Vec::<String>::new(), "a pod's address leaked");
    // Inbound traffic is dropped, too.
    assert!(testbed.router.output(&["ping", "-c", "1", "-W", "1", "10.1.0.31"]).is_err());
}

/// The gateway's own addresses stay reachable, for operators and the policy server.
fn check_own_addresses(testbed: &Testbed) {
    for (host, addresses) in
        [(&testbed.pods[0], ["10.1.0.1", "fd00:1::1"]), (&testbed.router, ["203.0.113.1", "2001:db8:113::1"])]
    {
        for address in addresses {
            host.output(&["ping", "-c", "1", "-W", "2", address]).unwrap();
        }
    }
}

fn check_reports_no_policy(testbed: &Testbed, damaged: bool) {
    let status = testbed.query(&["status"]);
    assert_eq!(status["ready"], false, "{status}");
    let server = &status["policy"]["server"];
    assert!(server["connected"] == false && server["has_policy"] == false, "{server}");
    assert!(server["error"].as_str().unwrap().contains("refused"), "{server}");
    assert_eq!(server["cache_error"].as_str().unwrap().contains("was ignored"), damaged, "{server}");
    let socket = testbed.folder.path().join("gateway.sock").display().to_string();
    let (_, stdout, _) = testbed.command(&["status", "--socket", &socket]);
    assert!(stdout.contains("NOT READY") && stdout.contains("NO POLICY, so everything is dropped"), "{stdout}");
    assert_eq!(stdout.contains("CACHE"), damaged, "{stdout}");
    let log = testbed.log();
    assert!(log.contains("\"event\":\"no_policy\""), "{log}");
    assert_eq!(log.contains("policy_cache_damaged"), damaged, "{log}");
    assert_eq!([testbed.http_status("/readyz"), testbed.http_status("/healthz")], [503, 200]);
    assert!(testbed.metric("vipgate_policy_connected", "") < 0.5);
}

#[test]
fn a_gateway_without_policy_drops_until_the_server_is_reachable() {
    let mut testbed = Testbed::new("closed");
    testbed.uses_policy_server = true;
    let cache = testbed.folder.path().join("policy.cache");
    for damaged in [true, false] {
        if damaged {
            fs::write(&cache, "vipgate policy cache 2\nand then something else, twelve bytes at least").unwrap();
        } else {
            fs::remove_file(&cache).unwrap();
        }
        testbed.spawn_gateway("");
        // The client may fail before the main thread has logged that there is no policy.
        let is_closed = || ["policy_server_unreachable", "no_policy"].iter().all(|event| testbed.log().contains(event));
        assert!(wait_for(Duration::from_secs(20), is_closed), "{}", testbed.log());
        check_reports_no_policy(&testbed, damaged);
        // Packets wait in the rings until there is a policy: then those of p4 are dropped.
        testbed.accounting.expect(["no_policy"]);
        check_closed(&testbed);
        check_own_addresses(&testbed);
        assert!(!testbed.is_ready());

        testbed.start_policyd("");
        assert!(wait_for(Duration::from_secs(20), || testbed.is_ready()), "{}", testbed.log());
        assert_eq!(testbed.http_status("/readyz"), 200);
        testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
        testbed.check_source_addresses(&testbed.pods[2], SERVER, VIP_B);
        testbed.check_source_addresses(&testbed.pods[3], SERVER, ["10.1.0.31", "fd00:1::31"]);
        testbed.wait_in_force();
        testbed.wait_cached();
        assert_eq!(testbed.policy_server_status()["cache_error"], "");

        // The damaged cache has been replaced.
        testbed.policyd.take().unwrap().kill();
        testbed.stop("KILL");
        testbed.start_gateway("");
        assert!(!testbed.log().contains("no_policy"), "{}", testbed.log());
        testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
        testbed.check_frames();
        testbed.stop("TERM");
    }
}

#[test]
fn sigterm_stops_a_gateway_that_waits_for_policy() {
    let mut testbed = Testbed::new("waits");
    testbed.uses_policy_server = true;
    testbed.spawn_gateway("");
    assert!(
        wait_for(Duration::from_secs(20), || testbed.log().contains("\"event\":\"no_policy\"")),
        "{}",
        testbed.log()
    );
    let status = testbed.stop("TERM");
    assert!(status.success(), "{status}: {}", testbed.log());
    assert!(!testbed.folder.path().join("gateway.sock").exists(), "the socket is removed");
    // Without a policy all traffic stays dropped.
    assert!(query_udp(&testbed.pods[3], SERVER[0].parse().unwrap()).is_err());
    assert_eq!(testbed.command(&["detach", "--config", &testbed.write_config("")]).0, 0);
    assert_eq!(query_udp(&testbed.pods[3], SERVER[0].parse().unwrap()).unwrap(), "10.1.0.31");
}
