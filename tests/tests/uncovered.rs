//! Pods' addresses are known: what no policy covers doesn't leave, before, while and after there is a policy, and what stays inside the
//! cluster is not translated.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use vipgate::lab::peers::ask_udp;
use vipgate_tests::{EXCLUDED, POD_PACKETS, SERVER, VIP_A, World, wait_for};

/// The pods of the world, and the far side's other addresses as if they were Services'.
const CLUSTER: &str = "pod_cidrs: [10.1.0.0/16, \"fd00:1::/32\"]\nservice_cidrs: [10.9.0.0/16, \"fd00:9::/32\"]";

fn asks(world: &World, pod: usize, server: &str) -> Option<String> {
    ask_udp(&world.pods[pod], server.parse().unwrap()).ok()
}

/// Nobody hears from these pods, whatever they ask.
fn are_silent(world: &World, pods: &[usize]) {
    for (pod, server) in pods.iter().flat_map(|pod| SERVER.map(|server| (*pod, server))) {
        assert_eq!(asks(world, pod, server), None, "pod {pod} reaches {server}");
    }
}

/// What the gateway has dropped as covered by no policy, by address.
fn uncovered(world: &World) -> Vec<String> {
    let drops = world.ask(&["drops", "--reason", "no_policy"]).to_string();
    let pods = ["10.1.0.31", "fd00:1::31", "10.1.0.11"].into_iter();
    pods.filter(|address| drops.contains(&format!("\"{address}\""))).map(str::to_owned).collect()
}

/// A world in which tenants' pods are covered, p4 isn't, and everything that the gateway knows it knows from `more` or its server.
fn scenario(world: &mut World, more: &str) {
    let capture = world.capture(POD_PACKETS);
    world.start(more);
    world.check_identity(&world.pods[0], SERVER, VIP_A);
    world.ledger.expect_exactly([("no_policy", 2)]);
    are_silent(world, &[3]);
    let cluster = &world.ask(&["status"])["policy"]["cluster"];
    assert!(cluster["drop_uncovered"] == true && cluster["pods"].to_string().contains("10.1.0.0/"), "{cluster}");
    assert_eq!(uncovered(world), ["10.1.0.31", "fd00:1::31"]);
    let trace = world.ask(&["trace", "--from", "10.1.0.31", "--to", "198.51.100.10:53", "--proto", "udp"]).to_string();
    assert!(trace.contains("no_policy") && trace.contains("doesn't leave the cluster"), "{trace}");

    let whole = world.policy("tenant-a.yaml");
    // Policy shrinks: p1 is in no slice any more.
    world.write_policy("tenant-a.yaml", &whole.replace("10.1.0.11", "10.1.0.99").replace("fd00:1::11", "fd00:1::99"));
    let covers = || world.ask(&["endpoints"]).to_string().contains("10.1.0.11\"");
    assert!(wait_for(Duration::from_secs(10), || !covers()), "{}", world.log());
    world.ledger.expect_exactly([("no_policy", 4)]);
    are_silent(world, &[0, 3]);
    assert!(uncovered(world).contains(&"10.1.0.11".to_owned()));

    // And while nobody is there.
    world.end("KILL");
    are_silent(world, &[0, 3]);
    assert_eq!(capture.end(), Vec::<String>::new(), "a pod's address was seen outside");
    world.write_policy("tenant-a.yaml", &whole);
}

/// What is inside the cluster is reached as it is, by whoever it is.
fn inside_is_reached(world: &World) {
    for (pod, own) in [(0, ["10.1.0.11", "fd00:1::11"]), (3, ["10.1.0.31", "fd00:1::31"])] {
        for (server, own) in EXCLUDED.into_iter().zip(own) {
            assert_eq!(asks(world, pod, server).as_deref(), Some(own), "pod {pod} to {server}");
        }
    }
}

#[test]
fn what_no_policy_covers_never_leaves() {
    let mut world = World::new("uncovered");
    world.served = false;
    scenario(&mut world, CLUSTER);
    // What the process before left attached holds until the next one takes over, which wants something else.
    world.start(&format!("{CLUSTER}\nuncovered: pass"));
    world.check_identity(&world.pods[0], SERVER, VIP_A);
    world.check_identity(&world.pods[3], SERVER, ["10.1.0.31", "fd00:1::31"]);
    inside_is_reached(&world);
    assert_eq!(uncovered(&world), Vec::<String>::new());
    world.check_frames();
}

#[test]
fn a_policy_server_says_which_addresses_are_pods() {
    let mut world = World::new("told");
    world.served = true;
    // Before there is a policy, all is closed, whatever is known.
    let capture = world.capture(POD_PACKETS);
    world.launch("");
    assert!(wait_for(Duration::from_secs(20), || world.log().contains("\"event\":\"no_policy\"")), "{}", world.log());
    // Packets wait in the rings until there is a policy: then those of p4 are dropped.
    world.ledger.expect_exactly([("no_policy", 2)]);
    are_silent(&world, &[0, 3]);
    assert_eq!(capture.end(), Vec::<String>::new(), "a pod's address was seen outside");
    world.start_policyd(CLUSTER);
    assert!(wait_for(Duration::from_secs(20), || world.is_ready()), "{}", world.log());
    inside_is_reached(&world);
    world.end("TERM");
    scenario(&mut world, "");
}
