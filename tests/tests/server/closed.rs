//! A gateway that has no policy, and nobody to ask for one, is closed.

use std::fs;
use std::thread;
use std::time::Duration;

use vipgate::lab::peers::{ask_http, ask_udp};
use vipgate_tests::{POD_PACKETS, SERVER, VIP_A, VIP_B, World, wait_for};

/// Nothing that pods send comes out, whoever they are and whatever they send.
fn is_closed(world: &World) {
    let capture = world.capture(POD_PACKETS);
    let mut asked = Vec::new();
    for pod in [&world.pods[0], &world.pods[3]] {
        for server in SERVER {
            let (pod, address) = (pod.clone(), server.parse().unwrap());
            asked.push(thread::spawn(move || {
                let ping = pod.output(&["ping", "-c", "2", "-i", "0.2", "-W", "1", server]);
                let (udp, tcp) = (ask_udp(&pod, address), ask_http(&pod, address));
                let through = ping.is_ok() || udp.is_ok() || tcp.is_ok();
                assert!(!through, "{} reaches {server}: {ping:?}, {udp:?}, {tcp:?}", pod.name());
            }));
        }
    }
    for asked in asked {
        asked.join().unwrap();
    }
    assert_eq!(capture.end(), Vec::<String>::new(), "a pod's address was seen outside");
    // Nothing comes in, either.
    assert!(world.router.output(&["ping", "-c", "1", "-W", "1", "10.1.0.31"]).is_err());
}

/// The gateway's own kernel goes on: it is how people and its server reach it.
fn answers_on_its_own_addresses(world: &World) {
    for (host, addresses) in
        [(&world.pods[0], ["10.1.0.1", "fd00:1::1"]), (&world.router, ["203.0.113.1", "2001:db8:113::1"])]
    {
        for address in addresses {
            host.output(&["ping", "-c", "1", "-W", "2", address]).unwrap();
        }
    }
}

fn says_it_has_nothing(world: &World, damaged: bool) {
    let status = world.ask(&["status"]);
    assert_eq!(status["ready"], false, "{status}");
    let server = &status["policy"]["server"];
    assert!(server["connected"] == false && server["has_policy"] == false, "{server}");
    assert!(server["error"].as_str().unwrap().contains("refused"), "{server}");
    assert_eq!(server["cache_error"].as_str().unwrap().contains("was ignored"), damaged, "{server}");
    let socket = world.folder.path().join("gateway.sock").display().to_string();
    let (_, shown, _) = world.command(&["status", "--socket", &socket]);
    assert!(shown.contains("NOT READY") && shown.contains("NO POLICY, so everything is dropped"), "{shown}");
    assert_eq!(shown.contains("CACHE"), damaged, "{shown}");
    let log = world.log();
    assert!(log.contains("\"event\":\"no_policy\""), "{log}");
    assert_eq!(log.contains("policy_cache_damaged"), damaged, "{log}");
    assert_eq!([world.answer("/readyz"), world.answer("/healthz")], [503, 200]);
    assert!(world.metric("vipgate_policy_connected", "") < 0.5);
}

#[test]
fn without_any_policy_it_is_closed_until_the_server_comes() {
    let mut world = World::new("closed");
    world.served = true;
    let cache = world.folder.path().join("policy.cache");
    for damaged in [true, false] {
        if damaged {
            fs::write(&cache, "vipgate policy cache 1\nand then something else, twelve bytes at least").unwrap();
        } else {
            fs::remove_file(&cache).unwrap();
        }
        world.launch("");
        let asked = || world.log().contains("policy_server_unreachable");
        assert!(wait_for(Duration::from_secs(20), asked), "{}", world.log());
        says_it_has_nothing(&world, damaged);
        // Packets wait in the rings until there is a policy: then those of p4 are dropped.
        world.ledger.expect(["no_policy"]);
        is_closed(&world);
        answers_on_its_own_addresses(&world);
        assert!(!world.is_ready());

        world.start_policyd("");
        assert!(wait_for(Duration::from_secs(20), || world.is_ready()), "{}", world.log());
        assert_eq!(world.answer("/readyz"), 200);
        world.check_identity(&world.pods[0], SERVER, VIP_A);
        world.check_identity(&world.pods[2], SERVER, VIP_B);
        world.check_identity(&world.pods[3], SERVER, ["10.1.0.31", "fd00:1::31"]);
        assert_eq!(world.server_status()["cache_error"], "");
        world.wait_in_force();

        // What was damaged is good now.
        world.policyd.take().unwrap().kill();
        world.end("KILL");
        world.start_alone("");
        assert!(!world.log().contains("no_policy"), "{}", world.log());
        world.check_identity(&world.pods[0], SERVER, VIP_A);
        world.check_frames();
        world.end("TERM");
    }
}

#[test]
fn while_it_waits_it_stops_when_told_to() {
    let mut world = World::new("waits");
    world.served = true;
    world.launch("");
    assert!(wait_for(Duration::from_secs(20), || world.log().contains("\"event\":\"no_policy\"")), "{}", world.log());
    let status = world.end("TERM");
    assert!(status.success(), "{status}: {}", world.log());
    assert!(!world.folder.path().join("gateway.sock").exists(), "the socket is gone");
    // What nobody knows stays closed.
    assert!(ask_udp(&world.pods[3], SERVER[0].parse().unwrap()).is_err());
    assert_eq!(world.command(&["detach", "--config", &world.config("")]).0, 0);
    assert_eq!(ask_udp(&world.pods[3], SERVER[0].parse().unwrap()).unwrap(), "10.1.0.31");
}
