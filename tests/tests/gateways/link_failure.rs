//! Link failures: an interface of a gateway that still reaches the policy server fails. Another gateway takes over
//! within two seconds, the gateway returns after a hold-down, and the last one that can serve stays active.

use std::time::Duration;

use vipgate_tests::cluster::{Cluster, Gateway, sleep_ms, unix_time};
use vipgate_tests::wait_for;

use crate::scenario::{BFD_DETECTION, Scenario, allow_shard_moves, check_new_connections};

/// Maximum time from a link failure to replies via another gateway, seconds.
const FAILOVER: f64 = 2.0;
/// A short hold-down, to shorten the tests.
const HEALTH: &str = "health: {hold_down: 1500ms}";
/// Error of a gateway whose default router is dead.
const DEAD_ROUTER: &str = "no next hop of the default route answers outside: 203.0.113.254 on gw-out";

/// Allows the drops of a gateway with a failed link: packets via that link, and the effects of moving shards.
fn allow_link_failure(cluster: &Cluster) {
    allow_shard_moves(cluster);
    cluster.accounting.allow(["no_route", "no_neighbor"]);
    // On its segment, another gateway announces the VIPs that it owned.
    cluster.accounting.allow(["vip_conflicts"]);
}

fn readiness(gateway: &Gateway) -> (u16, String) {
    gateway.http_get("/readyz")
}

#[track_caller]
fn wait_unable(gateway: &Gateway, reason: &str) {
    let is_unable = || readiness(gateway).0 == 503 && readiness(gateway).1.contains(reason);
    assert!(wait_for(Duration::from_secs(3), is_unable), "{:?}\n{}", readiness(gateway), gateway.log_tail());
}

fn epoch(cluster: &Cluster, number: usize) -> u64 {
    let peers = cluster.gateways[1].query(&["peers"]);
    let name = &cluster.gateways[number].name;
    let all = peers["peers"].as_array().unwrap();
    all.iter().find(|peer| peer["name"] == name.as_str()).unwrap()["epoch"].as_u64().unwrap()
}

/// Fails and restores a link of the first gateway under traffic.
fn check_link_failure(
    tag: &str,
    reason: &str,
    cut: impl Fn(&Cluster),
    reroute: impl Fn(&Cluster),
    heal: impl Fn(&Cluster),
) {
    let mut cluster = Cluster::new(tag, 2);
    cluster.start_all(HEALTH);
    let scenario = Scenario::start(&cluster, 200, 20);
    sleep_ms(1_000);
    allow_link_failure(&cluster);
    let died = unix_time();
    cut(&cluster);
    sleep_ms(BFD_DETECTION);
    reroute(&cluster);
    wait_unable(&cluster.gateways[0], reason);
    let peers = cluster.gateways[1].query(&["peers"]).to_string();
    assert!(peers.contains(reason), "{peers}");
    sleep_ms(2_500);
    check_new_connections(&cluster, "during", 50_000_000, 200);
    heal(&cluster);
    cluster.wait_converged();
    cluster.route_via(&cluster.indices());
    sleep_ms(500);
    let results = scenario.end(&cluster);
    println!("{tag}: flows {}", results.probes.summary());
    results.held.established_before(0.2, died).check_survived(99);
    assert!(results.probes.longest_wait(0.2) < FAILOVER, "{}", results.probes.summary());
}

#[test]
fn a_dead_outside_link_fails_over() {
    check_link_failure(
        "outlink",
        "interface gw-out has no carrier",
        |cluster| cluster.outside.ip(&["link", "set", "gw1", "down"]).unwrap(),
        |cluster| cluster.route_outside_via(&[1]),
        |cluster| cluster.outside.ip(&["link", "set", "gw1", "up"]).unwrap(),
    );
}

#[test]
fn a_dead_inside_link_fails_over() {
    check_link_failure(
        "inlink",
        "interface gw-in has no carrier",
        |cluster| cluster.inside.ip(&["link", "set", "to-gw1", "down"]).unwrap(),
        |cluster| cluster.route_inside_via(&[1]),
        |cluster| {
            cluster.inside.ip(&["link", "set", "to-gw1", "up"]).unwrap();
            cluster.inside.addresses("to-gw1", &["fd00:4:1::fe/64"]).unwrap();
        },
    );
}

/// The link has carrier: only next hop probes detect the failure.
#[test]
fn a_dead_router_behind_a_live_link_fails_over() {
    check_link_failure(
        "router",
        DEAD_ROUTER,
        |cluster| {
            // By default a port replies for its bridge's address, even after it has left the bridge.
            cluster.outside.sysctl("net.ipv4.conf.gw1.arp_ignore", 1).unwrap();
            cluster.outside.ip(&["link", "set", "gw1", "nomaster"]).unwrap();
        },
        |cluster| cluster.route_outside_via(&[1]),
        |cluster| cluster.outside.ip(&["link", "set", "gw1", "master", "public"]).unwrap(),
    );
}

/// The other gateway is a next hop on the same link, and keeps replying; traffic via the default router is lost all
/// the same.
#[test]
fn a_dead_default_router_beside_a_live_next_hop_fails_over() {
    check_link_failure(
        "beside",
        DEAD_ROUTER,
        |cluster| {
            let gateway = &cluster.gateways[0];
            for (net, next_hop) in [("10.99.0.0/16", "203.0.113.2"), ("fd00:99::/48", "2001:db8:113::2")] {
                gateway.host.route(net, next_hop).unwrap();
                let replies = || gateway.metric("vipgate_next_hop_up", &format!("address=\"{next_hop}\"")) > 0.5;
                assert!(wait_for(Duration::from_secs(3), replies), "{next_hop}: {}", gateway.log_tail());
            }
            // The bridge still forwards frames between its ports, but receives none from this port itself.
            let rules = "add table bridge dead; add chain bridge dead input { type filter hook input priority 0; }; \
                         add rule bridge dead input iifname gw1 drop";
            cluster.outside.output(&["nft", rules]).unwrap();
        },
        |cluster| cluster.route_outside_via(&[1]),
        |cluster| {
            cluster.outside.output(&["nft", "delete table bridge dead"]).unwrap();
        },
    );
}

/// A flapping link moves shards once, not with each flap; the last able gateway stays active although its own link
/// fails.
#[test]
fn a_flapping_link_moves_shards_once_and_the_last_able_gateway_stays_active() {
    let mut cluster = Cluster::new("flap", 2);
    cluster.start_all(HEALTH);
    allow_link_failure(&cluster);
    let set_link = |number: usize, state: &str| {
        cluster.outside.ip(&["link", "set", &format!("gw{}", number + 1), state]).unwrap();
    };
    let serving = |number: usize| cluster.gateways[number].metric("vipgate_serving", "") > 0.5;
    let before = epoch(&cluster, 0);
    for _ in 0..6 {
        set_link(0, "down");
        sleep_ms(250);
        set_link(0, "up");
        sleep_ms(250);
    }
    wait_unable(&cluster.gateways[0], "gw-out has no carrier");
    let after = epoch(&cluster, 0);
    assert!(after > before && !serving(0) && serving(1));
    // Shards moved once: had the gateway become active in between, it would have stopped in a later epoch.
    set_link(0, "down");
    sleep_ms(300);
    assert_eq!(epoch(&cluster, 0), after, "shards move with each flap");
    // The other gateway's link fails as well: one of them has to stay active.
    set_link(1, "down");
    wait_unable(&cluster.gateways[1], "interface gw-out has no carrier");
    sleep_ms(1_000);
    assert!(serving(1) && !serving(0), "the last able gateway stays active: {}", cluster.gateways[1].log_tail());
    // A recovered gateway takes over.
    set_link(0, "up");
    let moved = || serving(0) && !serving(1);
    assert!(wait_for(Duration::from_secs(15), moved), "{}", cluster.gateways[0].log_tail());
    set_link(1, "up");
    cluster.wait_converged();
}
