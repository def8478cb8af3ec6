//! Faults of interfaces under a running gateway: detached XDP programs, links down, dead next hops, recreated
//! interfaces. The gateway drops, reports and recovers.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::{Duration, Instant};
use std::{fs, thread};

use vipgate::lab::run;
use vipgate_tests::traffic::{Connections, start_echo_server};
use vipgate_tests::{POD_FILTER, SERVER, Testbed, VIP_A, session_state, wait_for};

const INTERFACES: [&str; 2] = ["gw-in", "gw-out"];

/// Whether an XDP program is attached to an interface, as shown by iproute2.
fn has_xdp(testbed: &Testbed, interface: &str) -> bool {
    testbed.gateway.output(&["ip", "-d", "link", "show", interface]).unwrap().contains("prog/xdp")
}

fn interface(testbed: &Testbed, name: &str) -> serde_json::Value {
    let status = testbed.query(&["status"]);
    let all = status["interfaces"].as_array().unwrap();
    all.iter().find(|it| it["name"] == name).unwrap().clone()
}

#[track_caller]
fn wait_ready(testbed: &Testbed, context: &str) {
    let is_ready = || testbed.http_get("/readyz").0 == 200;
    assert!(
        wait_for(Duration::from_secs(10), is_ready),
        "{context}: {:?}\n{}",
        testbed.http_get("/readyz"),
        testbed.log()
    );
}

/// While the gateway is suspended, it can't reattach the programs, and the kernel must not forward pod traffic
/// either; once resumed, it reattaches them.
#[test]
fn a_detached_xdp_program_leaks_nothing_and_is_reattached() {
    let testbed = Testbed::with_gateway("xdpoff");
    testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
    let capture = testbed.capture(POD_FILTER);
    testbed.process().signal("STOP").unwrap();
    for interface in INTERFACES {
        testbed.gateway.ip(&["link", "set", interface, "xdp", "off"]).unwrap();
        assert!(!has_xdp(&testbed, interface));
    }
    for server in SERVER {
        let ping = ["ping", "-c", "3", "-i", "0.1", "-W", "1", server];
        assert!(testbed.pods[0].output(&ping).is_err(), "the kernel has forwarded it");
    }
    testbed.process().signal("CONT").unwrap();
    let resumed = Instant::now();
    let is_reattached = || INTERFACES.iter().all(|interface| has_xdp(&testbed, interface));
    assert!(wait_for(Duration::from_secs(2), is_reattached), "{}", testbed.log());
    println!("reattached {:?} after the gateway was resumed", resumed.elapsed());
    testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
    assert!(testbed.log().contains("xdp_detached"), "{}", testbed.log());
    assert!(testbed.metric("vipgate_steered_packets_total", "outcome=\"guarded\"") >= 6.0);
    for interface in INTERFACES {
        let label = format!("interface=\"{interface}\"");
        assert!((testbed.metric("vipgate_xdp_detached_total", &label) - 1.0).abs() < 0.1, "{interface}");
        assert!((testbed.metric("vipgate_xdp_attached", &label) - 1.0).abs() < 0.1, "{interface}");
    }
    wait_ready(&testbed, "after");

    // While the gateway runs: the time without a program.
    let mut longest = Duration::ZERO;
    for interface in INTERFACES {
        testbed.gateway.ip(&["link", "set", interface, "xdp", "off"]).unwrap();
        let detached = Instant::now();
        assert!(wait_for(Duration::from_secs(2), || has_xdp(&testbed, interface)), "{}", testbed.log());
        longest = longest.max(detached.elapsed());
    }
    println!("detached for {longest:?} at most, as shown by iproute2");
    testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
    assert_eq!(capture.end(), Vec::<String>::new(), "a pod's address leaked");
}

/// The tc guard is removed with `detach`, and doesn't exist with `on_exit: pass`.
#[test]
fn detach_removes_the_tc_guard() {
    let mut testbed = Testbed::with_gateway("guard");
    let filters =
        |testbed: &Testbed| testbed.gateway.output(&["tc", "filter", "show", "dev", "gw-in", "ingress"]).unwrap();
    assert!(filters(&testbed).contains("vipgate_guard"), "{}", filters(&testbed));
    testbed.stop("TERM");
    let config = testbed.write_config("");
    assert!(filters(&testbed).contains("vipgate_guard"), "the guard stays after exit: {}", filters(&testbed));
    assert_eq!(testbed.command(&["detach", "--config", &config]).0, 0);
    assert!(!filters(&testbed).contains("vipgate_guard") && !has_xdp(&testbed, "gw-in"), "{}", filters(&testbed));
    // With `on_exit: pass`, nothing may outlive the process.
    testbed.start("xdp: {on_exit: pass}");
    assert!(!filters(&testbed).contains("vipgate_guard"), "{}", filters(&testbed));
    testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
}

/// Another program is replaced; if it is attached repeatedly, the gateway drops, reports it, and retries with
/// backoff.
#[test]
fn a_foreign_xdp_program_is_replaced_with_backoff() {
    let testbed = Testbed::with_gateway("xdpother");
    let (source, object) = (testbed.folder.path().join("other.c"), testbed.folder.path().join("other.o"));
    let text = "__attribute__((section(\"xdp\"), used)) int other(void *context) { return 2; }\n\
                __attribute__((section(\"license\"), used)) char terms[] = \"GPL\";\n";
    fs::write(&source, text).unwrap();
    let [from, to] = [&source, &object].map(|path| path.display().to_string());
    run(&["clang", "-O2", "-g", "-target", "bpf", "-c", &from, "-o", &to]).unwrap();
    let attach_other = || {
        testbed
            .gateway
            .output(&["ip", "-force", "link", "set", "dev", "gw-in", "xdpdrv", "obj", &to, "sec", "xdp"])
            .unwrap();
    };
    let state = || interface(&testbed, "gw-in")["xdp"].as_str().unwrap_or_default().to_owned();
    let capture = testbed.capture(POD_FILTER);
    attach_other();
    assert!(wait_for(Duration::from_secs(2), || state() == "attached"), "{}\n{}", state(), testbed.log());
    testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
    assert!(testbed.log().contains("another program attached, id "), "{}", testbed.log());
    // Attached repeatedly, as soon as ours is back: after the fifth time the gateway pauses.
    let backs_off = wait_for(Duration::from_secs(5), || {
        attach_other();
        thread::sleep(Duration::from_millis(30));
        state().starts_with("another program, id ")
    });
    assert!(backs_off, "it replaces the program without backoff: {}", testbed.log());
    let (status, body) = testbed.http_get("/readyz");
    assert!(status == 503 && body.contains("gw-in has another XDP program, id "), "{status} {body}");
    assert!(
        testbed.pods[0].output(&["ping", "-c", "2", "-i", "0.1", "-W", "1", SERVER[0]]).is_err(),
        "packets are forwarded with another program attached"
    );
    // The other program is not attached any more.
    assert!(wait_for(Duration::from_secs(5), || state() == "attached"), "{}\n{}", state(), testbed.log());
    wait_ready(&testbed, "after");
    testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
    assert_eq!(capture.end(), Vec::<String>::new(), "a pod's address leaked");
}

#[test]
fn a_link_down_is_reported_with_its_cause() {
    let testbed = Testbed::with_gateway("linkdown");
    wait_ready(&testbed, "before");
    let is_unready = |words: &str| {
        let page = testbed.http_get("/readyz");
        page.0 == 503 && page.1.contains(words)
    };
    // Set down at the link's other end.
    testbed.router.ip(&["link", "set", "to-gw", "down"]).unwrap();
    let set_down = Instant::now();
    assert!(
        wait_for(Duration::from_secs(1), || is_unready("interface gw-out has no carrier")),
        "{:?}",
        testbed.http_get("/readyz")
    );
    println!("detected after {:?}", set_down.elapsed());
    assert_eq!(interface(&testbed, "gw-out")["down"], "has no carrier");
    assert!(testbed.metric("vipgate_link_up", "gw-out") < 0.5 && testbed.metric("vipgate_link_up", "gw-in") > 0.5);
    let (_, status, _) = testbed.command(&["status", "--socket", &testbed.socket()]);
    assert!(status.contains("FAULT") && status.contains("DOWN: no carrier"), "{status}");
    testbed.router.ip(&["link", "set", "to-gw", "up"]).unwrap();
    // The kernel has removed it with the link.
    testbed.router.addresses("to-gw", &["2001:db8:113::fe/64"]).unwrap();
    // A single gateway only reports the fault; there is no hold-down.
    wait_ready(&testbed, "carrier restored");
    testbed.gateway.ip(&["link", "set", "gw-in", "down"]).unwrap();
    assert!(
        wait_for(Duration::from_secs(1), || is_unready("interface gw-in is administratively down")),
        "{:?}",
        testbed.http_get("/readyz")
    );
    testbed.gateway.ip(&["link", "set", "gw-in", "up"]).unwrap();
    wait_ready(&testbed, "interface up");
    for event in ["link_down", "link_up", "\"unable\"", "\"able\""] {
        assert!(testbed.log().contains(event), "{event}: {}", testbed.log());
    }
}

/// A dead router behind a working link, for each family.
#[test]
fn a_dead_next_hop_is_reported_with_its_cause() {
    let testbed = Testbed::with_gateway("deadhop");
    for (number, address) in [(0, "203.0.113.254"), (1, "2001:db8:113::fe")] {
        let shows = |value: u8| {
            let series = format!("vipgate_next_hop_up{{interface=\"gw-out\",address=\"{address}\"}} {value}\n");
            testbed.http_get("/metrics").1.contains(&series)
        };
        assert!(wait_for(Duration::from_secs(5), || shows(1)), "{address}: {}", testbed.log());
        wait_ready(&testbed, address);
        // No neighbor replies for this family any more.
        let net = format!("{address}/{}", [24, 64][number]);
        testbed.router.ip(&["address", "del", &net, "dev", "to-gw"]).unwrap();
        let removed = Instant::now();
        let words = format!("no next hop of the default route answers outside: {address} on gw-out");
        let is_reported = || testbed.http_get("/readyz").1.contains(&words);
        assert!(wait_for(Duration::from_secs(5), is_reported), "{:?}\n{}", testbed.http_get("/readyz"), testbed.log());
        let detected = removed.elapsed();
        println!("{address}: detected after {detected:?}");
        assert!(detected < Duration::from_millis(1_500), "{detected:?}");
        assert!(shows(0));
        let (_, status, _) = testbed.command(&["status", "--socket", &testbed.socket()]);
        assert!(status.lines().any(|line| line.contains(address) && line.contains("DOWN")), "{status}");
        testbed.router.addresses("to-gw", &[&net]).unwrap();
        wait_ready(&testbed, address);
    }
}

/// A veth that is deleted and recreated is another device. The gateway attaches the program to it before it is up,
/// and exits; restarted, as by systemd, it uses the new device and restores the sessions.
#[test]
fn a_recreated_interface_is_reattached_with_its_sessions() {
    let (_folder, more) = session_state();
    let mut testbed = Testbed::new("recreate");
    testbed.start(&more);
    let _server = start_echo_server(&testbed);
    let clients = Connections::open(&testbed, &testbed.pods[0], SERVER[0], 50);
    let capture = testbed.capture(POD_FILTER);
    // The new device has the same MAC address, so pods needn't resolve it again.
    let mac = testbed.gateway.output(&["cat", "/sys/class/net/gw-in/address"]).unwrap();
    testbed.gateway.ip(&["link", "del", "gw-in"]).unwrap();
    let is_removed = || testbed.http_get("/readyz").1.contains("interface gw-in is gone");
    assert!(wait_for(Duration::from_secs(2), is_removed), "{:?}", testbed.http_get("/readyz"));
    // The routes to the pods are gone with it. Replies that arrive now must not take the default route.
    thread::sleep(Duration::from_millis(500));
    let (switch_netns, gateway_netns) = (testbed.switch.netns().to_owned(), testbed.gateway.netns().to_owned());
    let queues = ["numtxqueues", "2", "numrxqueues", "2"];
    let mut command = vec!["ip", "link", "add", "to-gw", "netns", &switch_netns];
    command.extend(queues);
    command.extend(["type", "veth", "peer", "name", "gw-in", "address", mac.trim(), "netns", &gateway_netns]);
    command.extend(queues);
    run(&command).unwrap();
    // The program is attached before the interface is up.
    assert!(wait_for(Duration::from_secs(2), || has_xdp(&testbed, "gw-in")), "{}", testbed.log());
    for (host, interface) in [(&testbed.switch, "to-gw"), (&testbed.gateway, "gw-in")] {
        let offloads = ["tx", "off", "rx", "off", "tso", "off", "gso", "off", "gro", "off"];
        host.output(&[&["ethtool", "-K", interface][..], &offloads].concat()).unwrap();
    }
    testbed.switch.ip(&["link", "set", "to-gw", "master", "pods", "up"]).unwrap();
    testbed.gateway.addresses("gw-in", &["10.1.0.1/24", "fd00:1::1/64"]).unwrap();
    testbed.gateway.ip(&["link", "set", "gw-in", "up"]).unwrap();
    let status = testbed.wait_exit();
    assert!(!status.success() && status.code() != Some(2), "systemd restarts it: {status:?}");
    assert!(testbed.log().contains("interface gw-in was recreated"), "{}", testbed.log());
    testbed.start(&more);
    let outcome = clients.end();
    assert!(outcome.alive == 50 && outcome.changed == 0, "{outcome:?}");
    testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
    wait_ready(&testbed, "after");
    testbed.check_frames();
    assert_eq!(capture.end(), Vec::<String>::new(), "a pod's address leaked");
}
