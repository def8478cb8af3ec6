//! VIPs that BGP announces: a router with BIRD learns them from the daemon beside the gateway, while the gateway serves
//! them and no longer.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::{Duration, Instant};

use vipgate::lab::{Host, Lab};
use vipgate_tests::bgp::{Bird, ENDS, Ends, Frr};
use vipgate_tests::{SERVER, VIP_A, World, wait_for};

/// VIPs of tenant A that no link of the router's covers.
const VIPS: [&str; 2] = ["192.0.2.10", "2001:db8:2::10"];
const PATIENCE: Duration = Duration::from_secs(10);

/// A world whose tenant A has VIPs that only BGP leads to.
fn world(tag: &str) -> World {
    let world = World::new(tag);
    let mut policy = world.policy("tenant-a.yaml");
    for (old, new) in VIP_A.into_iter().zip(VIPS) {
        policy = policy.replace(&format!("ip: {old}\n"), &format!("ip: {new}\n"));
    }
    let annotation = "    vipgate.io/egress: \"true\"\n";
    assert!(policy.contains(annotation));
    let both = format!("{annotation}    vipgate.io/announce: BGP\n");
    world.write_policy("tenant-a.yaml", &policy.replace(annotation, &both));
    world
}

/// How many routes vipgate has put into a table of the gateway's.
fn given(world: &World, table: &str) -> usize {
    let of = |family| {
        let netns = world.gateway.netns();
        // There may be no such table yet.
        vipgate::lab::output(&["ip", "-n", netns, family, "route", "show", "table", table, "proto", "118"])
    };
    ["-4", "-6"].into_iter().map(|family| of(family).unwrap_or_default().lines().count()).sum()
}

fn learned(router: &Bird) {
    for (vip, gateway) in VIPS.into_iter().zip(ENDS.gateway) {
        router.wait_paths(vip, &[gateway], PATIENCE);
    }
}

fn withdrawn(router: &Bird) {
    for vip in VIPS {
        router.wait_paths(vip, &[], PATIENCE);
    }
}

#[test]
fn a_router_knows_a_vip_as_long_as_a_gateway_serves_it() {
    let mut world = world("bgp");
    let router = Bird::router(&world.router, &[ENDS]);
    let beside = Bird::gateway(&world.gateway, ENDS);
    beside.wait_established(2);
    assert!(VIPS.iter().all(|vip| router.paths(vip).is_empty()), "nobody serves it yet");
    world.start("");
    learned(&router);
    world.check_identity(&world.pods[0], SERVER, VIPS);
    // The host's own routes are what they were: the VIP is nowhere, and nothing is routed by that table.
    let own = world.gateway.output(&["ip", "-4", "route", "show", "table", "all"]).unwrap();
    let vip: Vec<&str> = own.lines().filter(|line| line.contains(VIPS[0])).collect();
    assert!(vip.len() == 1 && vip[0].contains("table 179"), "{vip:?}");

    // A tenant that needs it no longer.
    let policy = world.policy("tenant-a.yaml");
    world.write_policy("tenant-a.yaml", &policy.replace("    vipgate.io/announce: BGP\n", ""));
    withdrawn(&router);
    world.write_policy("tenant-a.yaml", &policy);
    learned(&router);

    world.end("TERM");
    assert_eq!(given(&world, "179"), 0, "a gateway that has ended advertises nothing");
    withdrawn(&router);
    assert_eq!(beside.established(), 2, "withdrawn, not lost");
}

#[test]
fn a_killed_gateway_is_withdrawn_at_once_and_comes_back() {
    let mut world = world("bgpkill");
    let router = Bird::router(&world.router, &[ENDS]);
    let beside = Bird::gateway(&world.gateway, ENDS);
    beside.wait_established(2);
    for round in 0..3 {
        world.start("");
        learned(&router);
        world.check_identity(&world.pods[1], SERVER, VIPS);
        assert_eq!(given(&world, "179"), 2);
        let killed = Instant::now();
        world.end("KILL");
        assert!(wait_for(PATIENCE, || given(&world, "179") == 0), "round {round}: the routes stay");
        println!("round {round}: withdrawn {} ms after the kill", killed.elapsed().as_millis());
        // The machine may be busy; in an idle one it takes some milliseconds.
        assert!(killed.elapsed() < Duration::from_secs(1), "round {round}: {:?}", killed.elapsed());
        if round > 0 {
            withdrawn(&router);
        }
        // Round 0: started again at once, whatever the router has heard.
    }
    assert_eq!(beside.established(), 2, "withdrawn, not lost");
}

#[test]
fn a_flushed_table_is_filled_again() {
    let mut world = world("bgpflush");
    world.start("");
    assert!(wait_for(PATIENCE, || given(&world, "179") == 2));
    for family in ["-4", "-6"] {
        world.gateway.output(&["ip", family, "route", "flush", "table", "179"]).unwrap();
    }
    assert_eq!(given(&world, "179"), 0);
    assert!(wait_for(PATIENCE, || given(&world, "179") == 2), "{}", world.log());
    world.end("TERM");
    assert_eq!(given(&world, "179"), 0);
}

#[test]
fn a_router_has_a_path_to_each_gateway_that_serves() {
    let lab = Lab::new("bgpecmp").unwrap();
    let router = lab.host("router", true).unwrap();
    let all: [Ends<'_>; 2] = [
        Ends { gateway: ["203.0.113.1", "2001:db8:1::1"], router: ["203.0.113.2", "2001:db8:1::2"] },
        Ends { gateway: ["203.0.113.5", "2001:db8:5::1"], router: ["203.0.113.6", "2001:db8:5::2"] },
    ];
    let hosts = [("gw1", "one"), ("gw2", "two")].map(|(name, port)| {
        let host = lab.host(name, true).unwrap();
        lab.link((&host, "eth0"), (&router, port), 1).unwrap();
        (host, port)
    });
    for ((host, port), ends) in hosts.iter().zip(all) {
        let with = |ends: [&str; 2]| [format!("{}/30", ends[0]), format!("{}/64", ends[1])];
        let (own, routers) = (with(ends.gateway), with(ends.router));
        host.addresses("eth0", &[&own[0], &own[1]]).unwrap();
        router.addresses(port, &[&routers[0], &routers[1]]).unwrap();
    }
    let daemons = hosts.each_ref().map(|(host, _)| host);
    let daemons: Vec<Bird> = daemons.into_iter().zip(all).map(|(host, ends)| Bird::gateway(host, ends)).collect();
    let upstream = Bird::router(&router, &all);
    upstream.wait_established(4);
    let order = |host: &Host, order: &str| {
        for vip in VIPS {
            host.ip(&["route", order, "blackhole", vip, "proto", "118", "table", "179"]).unwrap();
        }
    };
    let both = |number: usize| [all[0].gateway[number], all[1].gateway[number]];
    for (host, _) in &hosts {
        order(host, "add");
    }
    for (number, vip) in VIPS.into_iter().enumerate() {
        upstream.wait_paths(vip, &both(number), PATIENCE);
    }
    order(&hosts[0].0, "del");
    for (number, vip) in VIPS.into_iter().enumerate() {
        upstream.wait_paths(vip, &both(number)[1..], PATIENCE);
    }
    drop(daemons);
}

#[test]
fn a_gateway_with_frr_and_one_with_bird_share_a_vip() {
    let lab = Lab::new("bgpmixed").unwrap();
    let router = lab.host("router", true).unwrap();
    let with_bird = Ends { gateway: ["203.0.114.1", "2001:db8:114::1"], router: ["203.0.114.254", "2001:db8:114::fe"] };
    let all = [ENDS, with_bird];
    let hosts = [("gw1", "one"), ("gw2", "two")].map(|(name, port)| {
        let host = lab.host(name, true).unwrap();
        lab.link((&host, "eth0"), (&router, port), 1).unwrap();
        (host, port)
    });
    for ((host, port), ends) in hosts.iter().zip(all) {
        let with = |ends: [&str; 2]| [format!("{}/24", ends[0]), format!("{}/64", ends[1])];
        let (own, routers) = (with(ends.gateway), with(ends.router));
        host.addresses("eth0", &[&own[0], &own[1]]).unwrap();
        router.addresses(port, &[&routers[0], &routers[1]]).unwrap();
    }
    let [(frr, _), (bird, _)] = &hosts;
    let _daemons = (Frr::gateway(frr), Bird::gateway(bird, with_bird));
    let upstream = Bird::router(&router, &all);
    upstream.wait_established(4);
    for vip in VIPS {
        frr.ip(&["route", "add", "blackhole", vip, "proto", "118", "metric", "50"]).unwrap();
        bird.ip(&["route", "add", "blackhole", vip, "proto", "118", "table", "179"]).unwrap();
    }
    for (number, vip) in VIPS.into_iter().enumerate() {
        upstream.wait_paths(vip, &[all[0].gateway[number], all[1].gateway[number]], PATIENCE);
    }
}

#[test]
fn frr_takes_the_routes_from_the_main_table() {
    let mut world = world("bgpfrr");
    let router = Bird::router(&world.router, &[ENDS]);
    let _beside = Frr::gateway(&world.gateway);
    router.wait_established(2);
    world.start("bgp: {table: 254, metric: 50}");
    learned(&router);
    world.check_identity(&world.pods[0], SERVER, VIPS);
    assert_eq!((given(&world, "254"), given(&world, "179")), (2, 0));
    world.end("KILL");
    withdrawn(&router);
    world.start("bgp: {table: 254, metric: 50}");
    learned(&router);
    world.end("TERM");
    withdrawn(&router);
}
