//! What is taken away from under a gateway that runs: its XDP program, a link, an interface. It closes, says so, and comes back.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use vipgate::lab::run;
use vipgate_tests::traffic::{Connections, echo_server};
use vipgate_tests::{POD_PACKETS, SERVER, VIP_A, World, state, wait_for};

const INTERFACES: [&str; 2] = ["gw-in", "gw-out"];

/// Whether a program is on an interface, as iproute2 sees it.
fn has_xdp(world: &World, interface: &str) -> bool {
    world.gateway.output(&["ip", "-d", "link", "show", interface]).unwrap().contains("prog/xdp")
}

fn interface(world: &World, name: &str) -> serde_json::Value {
    let status = world.ask(&["status"]);
    let all = status["interfaces"].as_array().unwrap();
    all.iter().find(|it| it["name"] == name).unwrap().clone()
}

#[track_caller]
fn wait_ready(world: &World, page: &str) {
    let is_ready = || world.page("/readyz").0 == 200;
    assert!(wait_for(Duration::from_secs(10), is_ready), "{page}: {:?}\n{}", world.page("/readyz"), world.log());
}

/// A gateway that can't look sees nothing, and nothing leaves by the kernel all the same; as soon as it looks, all is as before.
#[test]
fn without_its_program_nothing_leaves_untranslated_and_it_is_put_back() {
    let world = World::with_gateway("xdpoff");
    world.check_identity(&world.pods[0], SERVER, VIP_A);
    let capture = world.capture(POD_PACKETS);
    world.process().signal("STOP").unwrap();
    for interface in INTERFACES {
        world.gateway.ip(&["link", "set", interface, "xdp", "off"]).unwrap();
        assert!(!has_xdp(&world, interface));
    }
    for server in SERVER {
        let ping = ["ping", "-c", "3", "-i", "0.1", "-W", "1", server];
        assert!(world.pods[0].output(&ping).is_err(), "the kernel has forwarded it");
    }
    world.process().signal("CONT").unwrap();
    let begun = Instant::now();
    let is_back = || INTERFACES.iter().all(|interface| has_xdp(&world, interface));
    assert!(wait_for(Duration::from_secs(2), is_back), "{}", world.log());
    println!("back {:?} after the gateway could look again", begun.elapsed());
    world.check_identity(&world.pods[0], SERVER, VIP_A);
    assert!(world.log().contains("xdp_detached"), "{}", world.log());
    assert!(world.metric("vipgate_steered_packets_total", "outcome=\"guarded\"") >= 6.0);
    for interface in INTERFACES {
        let label = format!("interface=\"{interface}\"");
        assert!((world.metric("vipgate_xdp_detached_total", &label) - 1.0).abs() < 0.1, "{interface}");
        assert!((world.metric("vipgate_xdp_attached", &label) - 1.0).abs() < 0.1, "{interface}");
    }
    wait_ready(&world, "after");

    // While it looks: how long the program is off.
    let mut longest = Duration::ZERO;
    for interface in INTERFACES {
        world.gateway.ip(&["link", "set", interface, "xdp", "off"]).unwrap();
        let begun = Instant::now();
        assert!(wait_for(Duration::from_secs(2), || has_xdp(&world, interface)), "{}", world.log());
        longest = longest.max(begun.elapsed());
    }
    println!("off for {longest:?} at most, as iproute2 sees it");
    world.check_identity(&world.pods[0], SERVER, VIP_A);
    assert_eq!(capture.end(), Vec::<String>::new(), "a pod's address was seen outside");
}

/// Nothing is left of the second line when the gateway is gone and detached.
#[test]
fn detach_removes_the_second_line_too() {
    let mut world = World::with_gateway("guard");
    let filters = |world: &World| world.gateway.output(&["tc", "filter", "show", "dev", "gw-in", "ingress"]).unwrap();
    assert!(filters(&world).contains("vipgate_guard"), "{}", filters(&world));
    world.end("TERM");
    let config = world.config("");
    assert!(filters(&world).contains("vipgate_guard"), "closed stays closed: {}", filters(&world));
    assert_eq!(world.command(&["detach", "--config", &config]).0, 0);
    assert!(!filters(&world).contains("vipgate_guard") && !has_xdp(&world, "gw-in"), "{}", filters(&world));
    // With `on_exit: pass`, nothing must outlive the process.
    world.start("xdp: {on_exit: pass}");
    assert!(!filters(&world).contains("vipgate_guard"), "{}", filters(&world));
    world.check_identity(&world.pods[0], SERVER, VIP_A);
}

/// Another program is replaced; against somebody who insists, the gateway closes, says so, and comes back more slowly.
#[test]
fn another_program_is_replaced_but_not_for_ever_at_once() {
    let world = World::with_gateway("xdpother");
    let (source, object) = (world.folder.path().join("other.c"), world.folder.path().join("other.o"));
    let text = "__attribute__((section(\"xdp\"), used)) int other(void *context) { return 2; }\n\
                __attribute__((section(\"license\"), used)) char terms[] = \"GPL\";\n";
    fs::write(&source, text).unwrap();
    let [from, to] = [&source, &object].map(|path| path.display().to_string());
    run(&["clang", "-O2", "-g", "-target", "bpf", "-c", &from, "-o", &to]).unwrap();
    let usurp = || {
        world
            .gateway
            .output(&["ip", "-force", "link", "set", "dev", "gw-in", "xdpdrv", "obj", &to, "sec", "xdp"])
            .unwrap();
    };
    let state = || interface(&world, "gw-in")["xdp"].as_str().unwrap_or_default().to_owned();
    let capture = world.capture(POD_PACKETS);
    usurp();
    assert!(wait_for(Duration::from_secs(2), || state() == "attached"), "{}\n{}", state(), world.log());
    world.check_identity(&world.pods[0], SERVER, VIP_A);
    assert!(world.log().contains("another program was there, id "), "{}", world.log());
    // Four times more, each as soon as ours is back: then it pauses.
    let insisted = wait_for(Duration::from_secs(5), || {
        usurp();
        thread::sleep(Duration::from_millis(30));
        state().starts_with("another program, id ")
    });
    assert!(insisted, "it fights for ever: {}", world.log());
    let (status, body) = world.page("/readyz");
    assert!(status == 503 && body.contains("gw-in has another XDP program, id "), "{status} {body}");
    assert!(world.pods[0].output(&["ping", "-c", "2", "-i", "0.1", "-W", "1", SERVER[0]]).is_err(), "not closed");
    // Nobody insists any more.
    assert!(wait_for(Duration::from_secs(5), || state() == "attached"), "{}\n{}", state(), world.log());
    wait_ready(&world, "after");
    world.check_identity(&world.pods[0], SERVER, VIP_A);
    assert_eq!(capture.end(), Vec::<String>::new(), "a pod's address was seen outside");
}

#[test]
fn a_link_that_is_down_shows_and_says_why() {
    let world = World::with_gateway("linkdown");
    wait_ready(&world, "before");
    let said = |words: &str| {
        let page = world.page("/readyz");
        page.0 == 503 && page.1.contains(words)
    };
    // The cable's other end.
    world.router.ip(&["link", "set", "to-gw", "down"]).unwrap();
    let begun = Instant::now();
    assert!(
        wait_for(Duration::from_secs(1), || said("interface gw-out has no carrier")),
        "{:?}",
        world.page("/readyz")
    );
    println!("known after {:?}", begun.elapsed());
    assert_eq!(interface(&world, "gw-out")["down"], "has no carrier");
    assert!(world.metric("vipgate_link_up", "gw-out") < 0.5 && world.metric("vipgate_link_up", "gw-in") > 0.5);
    let (_, status, _) = world.command(&["status", "--socket", &world.socket()]);
    assert!(status.contains("UNABLE") && status.contains("DOWN: no carrier"), "{status}");
    world.router.ip(&["link", "set", "to-gw", "up"]).unwrap();
    // Which the kernel has taken away with the link.
    world.router.addresses("to-gw", &["2001:db8:113::fe/64"]).unwrap();
    // One that is alone only says so; it is never held down.
    wait_ready(&world, "the cable is there again");
    world.gateway.ip(&["link", "set", "gw-in", "down"]).unwrap();
    assert!(wait_for(Duration::from_secs(1), || said("interface gw-in is set down")), "{:?}", world.page("/readyz"));
    world.gateway.ip(&["link", "set", "gw-in", "up"]).unwrap();
    wait_ready(&world, "the interface is up again");
    for event in ["link_down", "link_up", "\"unable\"", "\"able\""] {
        assert!(world.log().contains(event), "{event}: {}", world.log());
    }
}

/// A router that is dead behind a link that is fine, for each family.
#[test]
fn a_next_hop_that_is_dead_shows_and_says_why() {
    let world = World::with_gateway("deadhop");
    for (number, address) in [(0, "203.0.113.254"), (1, "2001:db8:113::fe")] {
        let shows = |value: u8| {
            let series = format!("vipgate_next_hop_up{{interface=\"gw-out\",address=\"{address}\"}} {value}\n");
            world.page("/metrics").1.contains(&series)
        };
        assert!(wait_for(Duration::from_secs(5), || shows(1)), "{address}: {}", world.log());
        wait_ready(&world, address);
        // Nobody answers for it any more, of this family alone.
        let net = format!("{address}/{}", [24, 64][number]);
        world.router.ip(&["address", "del", &net, "dev", "to-gw"]).unwrap();
        let begun = Instant::now();
        let words = format!("no next hop of the default route answers outside: {address} on gw-out");
        let said = || world.page("/readyz").1.contains(&words);
        assert!(wait_for(Duration::from_secs(5), said), "{:?}\n{}", world.page("/readyz"), world.log());
        let detected = begun.elapsed();
        println!("{address}: dead after {detected:?}");
        assert!(detected < Duration::from_millis(1_500), "{detected:?}");
        assert!(shows(0));
        let (_, status, _) = world.command(&["status", "--socket", &world.socket()]);
        assert!(status.lines().any(|line| line.contains(address) && line.contains("NO")), "{status}");
        world.router.addresses("to-gw", &[&net]).unwrap();
        wait_ready(&world, address);
    }
}

/// A veth that is deleted and made anew is another device. The gateway closes it and ends; started again, as systemd does, it has the device
/// and the sessions.
#[test]
fn an_interface_that_is_made_anew_is_taken_up_with_the_sessions() {
    let (_folder, more) = state();
    let mut world = World::new("anew");
    world.start(&more);
    let _server = echo_server(&world);
    let clients = Connections::open(&world, &world.pods[0], SERVER[0], 50);
    let capture = world.capture(POD_PACKETS);
    // It keeps its MAC address, so that pods needn't ask for it anew.
    let mac = world.gateway.output(&["cat", "/sys/class/net/gw-in/address"]).unwrap();
    world.gateway.ip(&["link", "del", "gw-in"]).unwrap();
    let gone = || world.page("/readyz").1.contains("interface gw-in is gone");
    assert!(wait_for(Duration::from_secs(2), gone), "{:?}", world.page("/readyz"));
    let (one, other) = (world.switch.netns().to_owned(), world.gateway.netns().to_owned());
    let queues = ["numtxqueues", "2", "numrxqueues", "2"];
    let mut command = vec!["ip", "link", "add", "to-gw", "netns", &one];
    command.extend(queues);
    command.extend(["type", "veth", "peer", "name", "gw-in", "address", mac.trim(), "netns", &other]);
    command.extend(queues);
    run(&command).unwrap();
    // Closed before it is up.
    assert!(wait_for(Duration::from_secs(2), || has_xdp(&world, "gw-in")), "{}", world.log());
    for (host, interface) in [(&world.switch, "to-gw"), (&world.gateway, "gw-in")] {
        let offloads = ["tx", "off", "rx", "off", "tso", "off", "gso", "off", "gro", "off"];
        host.output(&[&["ethtool", "-K", interface][..], &offloads].concat()).unwrap();
    }
    world.switch.ip(&["link", "set", "to-gw", "master", "pods", "up"]).unwrap();
    world.gateway.addresses("gw-in", &["10.1.0.1/24", "fd00:1::1/64"]).unwrap();
    world.gateway.ip(&["link", "set", "gw-in", "up"]).unwrap();
    let end = world.wait_end();
    assert!(!end.success() && end.code() != Some(2), "systemd starts it again: {end:?}");
    assert!(world.log().contains("interface gw-in was made anew"), "{}", world.log());
    world.start(&more);
    let outcome = clients.end();
    assert!(outcome.alive == 50 && outcome.changed == 0, "{outcome:?}");
    world.check_identity(&world.pods[0], SERVER, VIP_A);
    wait_ready(&world, "after");
    world.check_frames();
    assert_eq!(capture.end(), Vec::<String>::new(), "a pod's address was seen outside");
}
