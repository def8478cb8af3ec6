//! BGP advertisement of VIPs: a router with BIRD learns them from the daemon beside the gateway while the gateway is
//! active.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::{Duration, Instant};

use vipgate_lab::{Host, Lab};
use vipgate_tests::bgp::{Bird, DEFAULT_PEERING, Frr, PeeringAddresses};
use vipgate_tests::{SERVER, Testbed, VIP_A, wait_for};

/// VIPs of tenant A outside of the router's connected networks.
const VIPS: [&str; 2] = ["192.0.2.10", "2001:db8:2::10"];
const BGP_TIMEOUT: Duration = Duration::from_secs(10);

/// A testbed whose tenant A has VIPs that are announced by BGP only.
fn start_testbed(tag: &str) -> Testbed {
    let testbed = Testbed::new(tag);
    let mut policy = testbed.read_policy("tenant-a.yaml");
    for (old, new) in VIP_A.into_iter().zip(VIPS) {
        policy = policy.replace(&format!("ip: {old}\n"), &format!("ip: {new}\n"));
    }
    let annotation = "    vipgate.io/egress: \"true\"\n";
    assert!(policy.contains(annotation));
    let both = format!("{annotation}    vipgate.io/announce: BGP\n");
    testbed.write_policy("tenant-a.yaml", &policy.replace(annotation, &both));
    testbed
}

/// Number of vipgate's routes in a routing table of the gateway's host.
fn route_count(testbed: &Testbed, table: &str) -> usize {
    let routes = |family| {
        let netns = testbed.gateway.netns();
        // The table may not exist yet.
        vipgate_lab::output(&["ip", "-n", netns, family, "route", "show", "table", table, "proto", "118"])
    };
    ["-4", "-6"].into_iter().map(|family| routes(family).unwrap_or_default().lines().count()).sum()
}

fn wait_learned(router: &Bird) {
    for (vip, gateway) in VIPS.into_iter().zip(DEFAULT_PEERING.gateway) {
        router.wait_next_hops(vip, &[gateway], BGP_TIMEOUT);
    }
}

fn wait_withdrawn(router: &Bird) {
    for vip in VIPS {
        router.wait_next_hops(vip, &[], BGP_TIMEOUT);
    }
}

#[test]
fn a_vip_is_advertised_while_a_gateway_is_active() {
    let mut testbed = start_testbed("bgp");
    let router = Bird::router(&testbed.router, &[DEFAULT_PEERING]);
    let daemon = Bird::gateway(&testbed.gateway, DEFAULT_PEERING);
    daemon.wait_established(2);
    assert!(VIPS.iter().all(|vip| router.next_hops(vip).is_empty()), "no gateway is active yet");
    testbed.start("");
    wait_learned(&router);
    testbed.check_source_addresses(&testbed.pods[0], SERVER, VIPS);
    // The host's own routing is unchanged: the VIP is in BGP's table only, which no rule uses.
    let own = testbed.gateway.output(&["ip", "-4", "route", "show", "table", "all"]).unwrap();
    let vip: Vec<&str> = own.lines().filter(|line| line.contains(VIPS[0])).collect();
    assert!(vip.len() == 1 && vip[0].contains("table 179"), "{vip:?}");

    // The tenant's annotation is removed, and restored.
    let policy = testbed.read_policy("tenant-a.yaml");
    testbed.write_policy("tenant-a.yaml", &policy.replace("    vipgate.io/announce: BGP\n", ""));
    wait_withdrawn(&router);
    testbed.write_policy("tenant-a.yaml", &policy);
    wait_learned(&router);

    testbed.stop("TERM");
    assert_eq!(route_count(&testbed, "179"), 0, "a stopped gateway advertises nothing");
    wait_withdrawn(&router);
    assert_eq!(daemon.established(), 2, "withdrawn, not lost");
}

#[test]
fn routes_are_withdrawn_when_a_gateway_is_killed() {
    let mut testbed = start_testbed("bgpkill");
    let router = Bird::router(&testbed.router, &[DEFAULT_PEERING]);
    let daemon = Bird::gateway(&testbed.gateway, DEFAULT_PEERING);
    daemon.wait_established(2);
    for round in 0..3 {
        testbed.start("");
        wait_learned(&router);
        testbed.check_source_addresses(&testbed.pods[1], SERVER, VIPS);
        assert_eq!(route_count(&testbed, "179"), 2);
        let killed = Instant::now();
        testbed.stop("KILL");
        assert!(wait_for(BGP_TIMEOUT, || route_count(&testbed, "179") == 0), "round {round}: the routes stay");
        println!("round {round}: withdrawn {} ms after the kill", killed.elapsed().as_millis());
        // A few milliseconds on an idle machine.
        assert!(killed.elapsed() < Duration::from_secs(1), "round {round}: {:?}", killed.elapsed());
        if round > 0 {
            wait_withdrawn(&router);
        }
        // Round 0: started again at once, before the router has processed the withdrawal.
    }
    assert_eq!(daemon.established(), 2, "withdrawn, not lost");
}

#[test]
fn a_flushed_route_table_is_repopulated() {
    let mut testbed = start_testbed("bgpflush");
    testbed.start("");
    assert!(wait_for(BGP_TIMEOUT, || route_count(&testbed, "179") == 2));
    for family in ["-4", "-6"] {
        testbed.gateway.output(&["ip", family, "route", "flush", "table", "179"]).unwrap();
    }
    assert_eq!(route_count(&testbed, "179"), 0);
    assert!(wait_for(BGP_TIMEOUT, || route_count(&testbed, "179") == 2), "{}", testbed.log());
    testbed.stop("TERM");
    assert_eq!(route_count(&testbed, "179"), 0);
}

/// Adds the hosts of two gateways, each with a link of its own to a router, and IPv4 prefixes of this length.
fn connect_gateways(lab: &Lab, router: &Host, peerings: [PeeringAddresses<'_>; 2], length: u8) -> [Host; 2] {
    let mut gateways = [("gw1", "one"), ("gw2", "two")].into_iter().zip(peerings);
    std::array::from_fn(|_| {
        let ((name, port), ends) = gateways.next().unwrap();
        let host = lab.host(name, true).unwrap();
        lab.link((&host, "eth0"), (router, port), 1).unwrap();
        for (end, interface, [v4, v6]) in [(&host, "eth0", ends.gateway), (router, port, ends.router)] {
            end.addresses(interface, &[&format!("{v4}/{length}"), &format!("{v6}/64")]).unwrap();
        }
        host
    })
}

#[test]
fn a_router_has_one_next_hop_per_active_gateway() {
    let lab = Lab::new("bgpecmp").unwrap();
    let router = lab.host("router", true).unwrap();
    let peerings: [PeeringAddresses<'_>; 2] = [
        PeeringAddresses { gateway: ["203.0.113.1", "2001:db8:1::1"], router: ["203.0.113.2", "2001:db8:1::2"] },
        PeeringAddresses { gateway: ["203.0.113.5", "2001:db8:5::1"], router: ["203.0.113.6", "2001:db8:5::2"] },
    ];
    let hosts = connect_gateways(&lab, &router, peerings, 30);
    let daemons: Vec<Bird> = hosts.iter().zip(peerings).map(|(host, ends)| Bird::gateway(host, ends)).collect();
    let upstream = Bird::router(&router, &peerings);
    upstream.wait_established(4);
    let change_routes = |host: &Host, command: &str| {
        for vip in VIPS {
            host.ip(&["route", command, "blackhole", vip, "proto", "118", "table", "179"]).unwrap();
        }
    };
    let both = |number: usize| [peerings[0].gateway[number], peerings[1].gateway[number]];
    for host in &hosts {
        change_routes(host, "add");
    }
    for (number, vip) in VIPS.into_iter().enumerate() {
        upstream.wait_next_hops(vip, &both(number), BGP_TIMEOUT);
    }
    change_routes(&hosts[0], "del");
    for (number, vip) in VIPS.into_iter().enumerate() {
        upstream.wait_next_hops(vip, &both(number)[1..], BGP_TIMEOUT);
    }
    drop(daemons);
}

#[test]
fn a_gateway_with_frr_and_one_with_bird_share_a_vip() {
    let lab = Lab::new("bgpmixed").unwrap();
    let router = lab.host("router", true).unwrap();
    let with_bird =
        PeeringAddresses { gateway: ["203.0.114.1", "2001:db8:114::1"], router: ["203.0.114.254", "2001:db8:114::fe"] };
    let peerings = [DEFAULT_PEERING, with_bird];
    let hosts = connect_gateways(&lab, &router, peerings, 24);
    let [frr, bird] = &hosts;
    let _daemons = (Frr::gateway(frr), Bird::gateway(bird, with_bird));
    let upstream = Bird::router(&router, &peerings);
    upstream.wait_established(4);
    for vip in VIPS {
        frr.ip(&["route", "add", "blackhole", vip, "proto", "118", "metric", "50"]).unwrap();
        bird.ip(&["route", "add", "blackhole", vip, "proto", "118", "table", "179"]).unwrap();
    }
    for (number, vip) in VIPS.into_iter().enumerate() {
        upstream.wait_next_hops(vip, &[peerings[0].gateway[number], peerings[1].gateway[number]], BGP_TIMEOUT);
    }
}

#[test]
fn frr_redistributes_routes_of_the_main_table() {
    let mut testbed = start_testbed("bgpfrr");
    let router = Bird::router(&testbed.router, &[DEFAULT_PEERING]);
    let _daemon = Frr::gateway(&testbed.gateway);
    router.wait_established(2);
    testbed.start("bgp: {table: 254, metric: 50}");
    wait_learned(&router);
    testbed.check_source_addresses(&testbed.pods[0], SERVER, VIPS);
    assert_eq!((route_count(&testbed, "254"), route_count(&testbed, "179")), (2, 0));
    testbed.stop("KILL");
    wait_withdrawn(&router);
    testbed.start("bgp: {table: 254, metric: 50}");
    wait_learned(&router);
    testbed.stop("TERM");
    wait_withdrawn(&router);
}
