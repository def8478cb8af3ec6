//! A data link of one gateway dies while it still reaches the policy server: others serve in its place within two seconds, it comes back
//! when it has been well for a while, and the last one that can serve goes on.

use std::time::Duration;

use vipgate_tests::cluster::{Cluster, Gateway, moment, pass};
use vipgate_tests::wait_for;

use crate::scene::{DETECTED, Scene, new_ones_work, shares_move};

/// From the death of a link to answers by way of another gateway, seconds.
const FAILOVER: f64 = 2.0;
/// So that the scenario doesn't wait for long.
const HEALTH: &str = "health: {hold_down: 1500ms}";
/// What a gateway says whose router is dead, whoever else answers on that link.
const DEAD_ROUTER: &str = "no next hop of the default route answers outside: 203.0.113.254 on gw-out";

/// What a gateway without one of its links may drop: what it sends there, and what shares that move cost.
fn a_link_dies(cluster: &Cluster) {
    shares_move(cluster);
    cluster.ledger.allow(["no_route", "no_neighbor"]);
    // On its segment, another gateway announces the VIPs that it had.
    cluster.ledger.allow(["vip_conflicts"]);
}

fn ready(gateway: &Gateway) -> (u16, String) {
    gateway.page("/readyz")
}

#[track_caller]
fn wait_unable(gateway: &Gateway, words: &str) {
    let said = || ready(gateway).0 == 503 && ready(gateway).1.contains(words);
    assert!(wait_for(Duration::from_secs(3), said), "{:?}\n{}", ready(gateway), gateway.log_tail());
}

fn epoch(cluster: &Cluster, number: usize) -> u64 {
    let peers = cluster.gateways[1].ask(&["peers"]);
    let name = &cluster.gateways[number].name;
    let all = peers["peers"].as_array().unwrap();
    all.iter().find(|peer| peer["name"] == name.as_str()).unwrap()["epoch"].as_u64().unwrap()
}

/// Kills a link of the first gateway and heals it again, with sessions and flows that notice.
fn a_dead_link(tag: &str, words: &str, cut: impl Fn(&Cluster), notice: impl Fn(&Cluster), heal: impl Fn(&Cluster)) {
    let mut cluster = Cluster::new(tag, 2);
    cluster.start_all(HEALTH);
    let scene = Scene::begin(&cluster, 200, 20);
    pass(1_000);
    a_link_dies(&cluster);
    let died = moment();
    cut(&cluster);
    pass(DETECTED);
    notice(&cluster);
    wait_unable(&cluster.gateways[0], words);
    let unable = cluster.gateways[1].ask(&["peers"]).to_string();
    assert!(unable.contains(words), "{unable}");
    pass(2_500);
    new_ones_work(&cluster, "during", 50_000_000, 200);
    heal(&cluster);
    cluster.wait_whole();
    cluster.spread_over(&cluster.all());
    pass(500);
    let ended = scene.end(&cluster);
    println!("{tag}: flows {}", ended.probes.summary());
    ended.held.older(0.2, died).check_survived(99);
    assert!(ended.probes.longest(0.2) < FAILOVER, "{}", ended.probes.summary());
}

#[test]
fn a_dead_outside_link() {
    a_dead_link(
        "outlink",
        "interface gw-out has no carrier",
        |cluster| cluster.outside.ip(&["link", "set", "gw1", "down"]).unwrap(),
        |cluster| cluster.spread_outside_over(&[1]),
        |cluster| cluster.outside.ip(&["link", "set", "gw1", "up"]).unwrap(),
    );
}

#[test]
fn a_dead_inside_link() {
    a_dead_link(
        "inlink",
        "interface gw-in has no carrier",
        |cluster| cluster.inside.ip(&["link", "set", "to-gw1", "down"]).unwrap(),
        |cluster| cluster.spread_inside_over(&[1]),
        |cluster| {
            cluster.inside.ip(&["link", "set", "to-gw1", "up"]).unwrap();
            cluster.inside.addresses("to-gw1", &["fd00:4:1::fe/64"]).unwrap();
        },
    );
}

/// The link itself is fine: only probes can know.
#[test]
fn a_dead_router_behind_a_live_link() {
    a_dead_link(
        "router",
        DEAD_ROUTER,
        |cluster| {
            // A port answers for an address of its bridge, even if it is no port of that any more.
            cluster.outside.sysctl("net.ipv4.conf.gw1.arp_ignore", 1).unwrap();
            cluster.outside.ip(&["link", "set", "gw1", "nomaster"]).unwrap();
        },
        |cluster| cluster.spread_outside_over(&[1]),
        |cluster| cluster.outside.ip(&["link", "set", "gw1", "master", "public"]).unwrap(),
    );
}

/// The other gateway is a next hop, too, on the same link, and goes on answering: what is for the world is lost all the same.
#[test]
fn a_dead_default_router_beside_a_live_next_hop() {
    a_dead_link(
        "beside",
        DEAD_ROUTER,
        |cluster| {
            let gateway = &cluster.gateways[0];
            for (net, hop) in [("10.99.0.0/16", "203.0.113.2"), ("fd00:99::/48", "2001:db8:113::2")] {
                gateway.host.route(net, hop).unwrap();
                let answers = || gateway.metric("vipgate_next_hop_up", &format!("address=\"{hop}\"")) > 0.5;
                assert!(wait_for(Duration::from_secs(3), answers), "{hop}: {}", gateway.log_tail());
            }
            // The bridge passes frames on between its ports, and takes none from this one for itself.
            let rules = "add table bridge dead; add chain bridge dead input { type filter hook input priority 0; }; \
                         add rule bridge dead input iifname gw1 drop";
            cluster.outside.output(&["nft", rules]).unwrap();
        },
        |cluster| cluster.spread_outside_over(&[1]),
        |cluster| {
            cluster.outside.output(&["nft", "delete table bridge dead"]).unwrap();
        },
    );
}

/// A link that flaps moves shares once, and not with each flap; and who is left goes on although its own link dies, too.
#[test]
fn a_link_that_flaps_and_the_last_gateway_that_can_serve() {
    let mut cluster = Cluster::new("flap", 2);
    cluster.start_all(HEALTH);
    a_link_dies(&cluster);
    let set = |number: usize, state: &str| {
        cluster.outside.ip(&["link", "set", &format!("gw{}", number + 1), state]).unwrap();
    };
    let serving = |number: usize| cluster.gateways[number].metric("vipgate_serving", "") > 0.5;
    let before = epoch(&cluster, 0);
    for _ in 0..6 {
        set(0, "down");
        pass(250);
        set(0, "up");
        pass(250);
    }
    wait_unable(&cluster.gateways[0], "gw-out has no carrier");
    let after = epoch(&cluster, 0);
    assert!(after > before && !serving(0) && serving(1));
    // Shares moved once: had it come back in between, it would have stopped at a later view.
    set(0, "down");
    pass(300);
    assert_eq!(epoch(&cluster, 0), after, "shares move with each flap");
    // The other one's link dies, too: somebody has to.
    set(1, "down");
    wait_unable(&cluster.gateways[1], "interface gw-out has no carrier");
    pass(1_000);
    assert!(serving(1) && !serving(0), "the last one goes on: {}", cluster.gateways[1].log_tail());
    // Who is well again stands in for it.
    set(0, "up");
    let moved = || serving(0) && !serving(1);
    assert!(wait_for(Duration::from_secs(15), moved), "{}", cluster.gateways[0].log_tail());
    set(1, "up");
    cluster.wait_whole();
}
