//! Faults of interfaces under a running gateway: detached XDP programs and tc guards, links down, dead next hops,
//! recreated interfaces, added queues. The gateway drops, reports and recovers.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::{Duration, Instant};
use std::{fs, thread};

use vipgate_lab::{Host, run};
use vipgate_tests::traffic::{hold_connections, start_line_server};
use vipgate_tests::{POD_FILTER, SERVER, Testbed, VIP_A, session_state, wait_for};

const INTERFACES: [&str; 2] = ["gw-in", "gw-out"];

/// Whether an XDP program is attached to an interface, as shown by iproute2.
fn has_xdp(testbed: &Testbed, interface: &str) -> bool {
    testbed.gateway.output(&["ip", "-d", "link", "show", interface]).unwrap().contains("prog/xdp")
}

/// Whether the tc guard is installed on an interface, as shown by iproute2.
fn has_guard(testbed: &Testbed, interface: &str) -> bool {
    let filters = testbed.gateway.output(&["tc", "filter", "show", "dev", interface, "ingress"]);
    filters.is_ok_and(|filters| filters.contains("vipgate_guard"))
}

/// Compiles a BPF program of somebody else; returns the path of its object.
fn compile_other(testbed: &Testbed, section: &str, verdict: i32) -> String {
    let (source, object) = (testbed.folder.path().join("other.c"), testbed.folder.path().join("other.o"));
    let text = format!(
        "__attribute__((section(\"{section}\"), used)) int other(void *context) {{ return {verdict}; }}\n\
         __attribute__((section(\"license\"), used)) char terms[] = \"GPL\";\n"
    );
    fs::write(&source, text).unwrap();
    let [from, to] = [&source, &object].map(|path| path.display().to_string());
    run(&["clang", "-O2", "-g", "-target", "bpf", "-c", &from, "-o", &to]).unwrap();
    to
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
    assert_eq!(capture.end().unwrap(), Vec::<String>::new(), "a pod's address leaked");
}

/// The tc guard is removed with `detach`, and doesn't exist with `on_exit: pass`.
#[test]
fn detach_removes_the_tc_guard() {
    let mut testbed = Testbed::with_gateway("guard");
    assert!(has_guard(&testbed, "gw-in"));
    testbed.stop("TERM");
    let config = testbed.write_config("");
    assert!(has_guard(&testbed, "gw-in"), "the guard stays after exit");
    assert_eq!(testbed.command(&["detach", "--config", &config]).0, 0);
    assert!(!has_guard(&testbed, "gw-in") && !has_xdp(&testbed, "gw-in"));
    // With `on_exit: pass`, nothing may outlive the process.
    testbed.start("xdp: {on_exit: pass}");
    wait_ready(&testbed, "without a guard");
    assert!(!has_guard(&testbed, "gw-in"));
    assert_eq!(interface(&testbed, "gw-in")["guard"], "");
    testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
}

/// Whether sessions are stored or not, and from other mount and PID namespaces, as those of a container.
#[test]
fn detach_removes_nothing_while_a_gateway_runs() {
    let mut testbed = Testbed::new("detachrun");
    for (more, signal) in [("xdp: {on_exit: pass}", "TERM"), ("", "KILL")] {
        testbed.start(more);
        let config = testbed.write_config(more);
        let container = ["unshare", "--mount", "--pid", "--fork"];
        let (code, _, stderr) = testbed.command_with_wrapper(&container, &["detach", "--config", &config]);
        for words in ["interface gw-in: ", "is this gateway already running", "nothing was removed"] {
            assert!(code == 1 && stderr.contains(words), "{code}: {stderr}");
        }
        for interface in INTERFACES {
            assert!(has_xdp(&testbed, interface) && has_guard(&testbed, interface) == more.is_empty(), "{interface}");
        }
        testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
        assert!(!testbed.log().contains("_detached"), "{}", testbed.log());
        testbed.stop(signal);
    }
    let (code, stdout, stderr) = testbed.command(&["detach", "--config", &testbed.write_config("")]);
    assert_eq!(code, 0, "after SIGKILL: {stdout}{stderr}");
    for interface in INTERFACES {
        assert!(!has_xdp(&testbed, interface) && !has_guard(&testbed, interface), "{interface}");
    }
}

/// The tc guard is removed, alone or with its qdisc, or replaced: it is put back, and works.
#[test]
fn a_removed_tc_guard_is_put_back() {
    let testbed = Testbed::with_gateway("guardoff");
    wait_ready(&testbed, "before");
    let capture = testbed.capture(POD_FILTER);
    // TC_ACT_UNSPEC.
    let object = compile_other(&testbed, "classifier", -1);
    let remove = ["tc", "filter", "del", "dev", "gw-in", "ingress"];
    let remove_qdisc = ["tc", "qdisc", "del", "dev", "gw-in", "clsact"];
    let place = ["tc", "filter", "replace", "dev", "gw-in", "ingress", "protocol", "all", "pref", "1"];
    let replace = [&place[..], &["handle", "0x766970", "bpf", "da", "obj", &object, "sec", "classifier"]].concat();
    let is_detached = |times: f64| {
        let count = |interface: &str| testbed.metric("vipgate_guard_detached_total", interface);
        (count("gw-in") - times).abs() < 0.1 && count("gw-out") < 0.1
    };
    for (removal, times) in [(&remove[..], 1.0), (&remove_qdisc[..], 2.0), (&replace[..], 3.0)] {
        testbed.gateway.output(removal).unwrap();
        let is_counted = wait_for(Duration::from_secs(3), || is_detached(times));
        assert!(is_counted && has_guard(&testbed, "gw-in"), "{removal:?}: {}", testbed.log());
    }
    assert_eq!(interface(&testbed, "gw-in")["guard"], "attached");
    assert!(testbed.log().contains("\"guard_detached\""), "{}", testbed.log());

    // Removed again and again: it is put back with growing delays. The gateway reports that, and forwards.
    let is_reported = wait_for(Duration::from_secs(10), || {
        // Fails if it isn't back yet.
        let _ = testbed.gateway.output(&remove);
        let (status, body) = testbed.http_get("/readyz");
        status == 503 && body.contains("interface gw-in has lost its tc guard")
    });
    assert!(is_reported, "{:?}\n{}", testbed.http_get("/readyz"), testbed.log());
    testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
    wait_ready(&testbed, "put back");
    assert!(has_guard(&testbed, "gw-in"));
    let words = "unable to forward: interface gw-in has lost its tc guard";
    assert!(!testbed.log().contains(words), "{}", testbed.log());

    // While the gateway is suspended, the new guard drops what the XDP program would have captured.
    testbed.process().signal("STOP").unwrap();
    testbed.gateway.ip(&["link", "set", "gw-in", "xdp", "off"]).unwrap();
    for server in SERVER {
        let ping = ["ping", "-c", "3", "-i", "0.1", "-W", "1", server];
        assert!(testbed.pods[0].output(&ping).is_err(), "the kernel has forwarded it");
    }
    testbed.process().signal("CONT").unwrap();
    assert!(wait_for(Duration::from_secs(2), || has_xdp(&testbed, "gw-in")), "{}", testbed.log());
    testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
    assert_eq!(capture.end().unwrap(), Vec::<String>::new(), "a pod's address leaked");
}

/// Another program is replaced; if it is attached repeatedly, the gateway drops, reports it, and retries with
/// backoff.
#[test]
fn a_foreign_xdp_program_is_replaced_with_backoff() {
    let testbed = Testbed::with_gateway("xdpother");
    // XDP_PASS.
    let object = compile_other(&testbed, "xdp", 2);
    let attach_other = || {
        testbed
            .gateway
            .output(&["ip", "-force", "link", "set", "dev", "gw-in", "xdpdrv", "obj", &object, "sec", "xdp"])
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
    assert_eq!(capture.end().unwrap(), Vec::<String>::new(), "a pod's address leaked");
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
    let _server = start_line_server(&testbed);
    let clients = hold_connections(&testbed, 0, SERVER[0], 50);
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
    clients.end().check_all_succeeded();
    testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
    wait_ready(&testbed, "after");
    testbed.check_frames();
    assert_eq!(capture.end().unwrap(), Vec::<String>::new(), "a pod's address leaked");
}

/// A queue that is added has no socket. The gateway exits; restarted, as by systemd, it polls all queues and restores
/// the sessions. Meanwhile nothing leaks.
#[test]
fn added_queues_are_polled_after_a_restart_with_its_sessions() {
    let (_folder, state) = session_state();
    let more = format!("{state}\nworkers: {{cores: [0]}}");
    let mut testbed = Testbed::new("queues");
    let set_queues = |host: &Host, interface: &str, direction: &str, count: &str| {
        host.output(&["ethtool", "-L", interface, direction, count])
    };
    // Native XDP on a veth needs as many receive queues as the other end has transmit queues.
    set_queues(&testbed.switch, "to-gw", "tx", "1").unwrap();
    set_queues(&testbed.gateway, "gw-in", "rx", "1").unwrap();
    testbed.start(&more);
    wait_ready(&testbed, "before");
    let _server = start_line_server(&testbed);
    let clients = hold_connections(&testbed, 0, SERVER[0], 50);
    let capture = testbed.capture(POD_FILTER);
    set_queues(&testbed.gateway, "gw-out", "rx", "1").expect_err("the kernel removes no queue that has a socket");
    assert_eq!(testbed.http_get("/readyz").0, 200);

    set_queues(&testbed.gateway, "gw-in", "rx", "2").unwrap();
    let status = testbed.wait_exit();
    assert!(!status.success() && status.code() != Some(2), "systemd restarts it: {status:?}");
    let words = "the receive queues of interface gw-in have changed from 1 to 2";
    assert!(testbed.log().contains(words), "{}", testbed.log());
    // The veth hasn't given the XDP program to its new queue: there the tc guard drops.
    set_queues(&testbed.switch, "to-gw", "tx", "2").unwrap();
    for server in SERVER {
        let ping = ["ping", "-c", "2", "-i", "0.1", "-W", "1", server];
        assert!(testbed.pods[0].output(&ping).is_err(), "the kernel has forwarded it");
    }

    testbed.start(&more);
    let sockets = testbed.query(&["status"])["sockets"].clone();
    let is_inside = |socket: &&serde_json::Value| socket["interface"] == "gw-in";
    assert_eq!(sockets.as_array().unwrap().iter().filter(is_inside).count(), 2, "{sockets}");
    clients.end().check_all_succeeded();
    testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
    wait_ready(&testbed, "after");
    testbed.check_frames();
    assert_eq!(capture.end().unwrap(), Vec::<String>::new(), "a pod's address leaked");
}
