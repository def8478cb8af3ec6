//! Gateways fail and come back: pods on all nodes go on, or receive errors, and nothing leaves by a node.

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use vipgate_lab::reflector::{query_http, query_udp};
use vipgate_tests::cluster::{Cluster, L2_VIPS, LineServer, SERVER, sleep_ms};
use vipgate_tests::wait_for;

use crate::cluster::NodeCluster;
use crate::gateways::{Load, allow_shard_moves};

/// The longest time without replies that a dead gateway may cost, in seconds. Also the bound where nothing should be
/// noticed: builds of other tests may share the machine, and delay replies.
pub(crate) const MAX_OUTAGE: f64 = 1.3;
/// The same for a link: its gateway stays up, and has to give its shards away first.
const MAX_LINK_OUTAGE: f64 = 2.0;

#[test]
fn a_killed_gateway_and_a_dead_link_cost_pods_a_second_and_no_connection() {
    let mut cluster = NodeCluster::with_gateways("nc-failover", 2, 2);
    let server = LineServer::start(cluster.cluster.folder.path(), &cluster.cluster.server);
    allow_shard_moves(&cluster);
    let leaks = cluster.start_leak_verifier();

    let load = Load::start(&cluster, "killed", 1_000_000);
    let target = cluster.owner();
    let killed = cluster.cluster.gateways[target].kill();
    cluster.wait_no_target(target);
    sleep_ms(2_000);
    let outage = load.end(&cluster);
    println!("gateway {target} killed: {}", outage.describe(killed));
    outage.check(MAX_OUTAGE);

    cluster.start_gateway(target);
    cluster.wait_targets(|targets| targets.iter().any(|name| *name == format!("gw-{}", target + 1)));
    let load = Load::start(&cluster, "cut", 2_000_000);
    let target = cluster.owner();
    // Its port at the inside router: both ends lose their carrier.
    let port = format!("to-gw{}", target + 1);
    cluster.cluster.accounting.allow(["no_route", "no_neighbor"]);
    let cut = vipgate_tests::cluster::unix_time();
    cluster.cluster.inside.ip(&["link", "set", &port, "down"]).unwrap();
    cluster.wait_no_target(target);
    sleep_ms(3_000);
    let outage = load.end(&cluster);
    println!("inside link of gateway {target} down: {}", outage.describe(cut));
    outage.check(MAX_LINK_OUTAGE);

    leaks.check();
    server.end();
    cluster.check_kernels_agree();
}

#[test]
fn without_any_gateway_pods_receive_errors_and_go_on_once_one_is_back() {
    let mut cluster = NodeCluster::with_gateways("nc-none", 2, 2);
    let leaks = cluster.start_leak_verifier();
    allow_shard_moves(&cluster);
    for gateway in &mut cluster.cluster.gateways {
        gateway.kill();
    }
    let all_unreachable = |cluster: &NodeCluster| {
        cluster.nodes.iter().all(|node| node.node.query(&["status"])["pods"]["unreachable"] == 2)
    };
    assert!(wait_for(Duration::from_secs(10), || all_unreachable(&cluster)), "{}", cluster.evidence(0));
    let before = cluster.node_drops("unreachable");
    for node in 0..3 {
        for server in SERVER {
            let server = server.parse().unwrap();
            let error = query_http(&cluster.covered(node).host, server).unwrap_err();
            assert!(matches!(error.kind(), ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable), "{error}");
            query_udp(&cluster.covered(node).host, server).unwrap_err();
        }
        // Destinations that need no gateway.
        let neighbor = crate::cluster::NEIGHBOR[0].parse().unwrap();
        query_http(&cluster.covered(node).host, neighbor).unwrap();
    }
    let counted = || cluster.node_drops("unreachable") >= before + 12;
    assert!(wait_for(Duration::from_secs(10), counted), "{before}, {}", cluster.evidence(0));

    cluster.start_gateway(0);
    let began = Instant::now();
    cluster.wait_targets(|targets| targets.iter().filter(|target| *target == "gw-1").count() == 6);
    println!("one gateway is ready again: the nodes use it after {:?}", began.elapsed());
    for node in 0..3 {
        cluster.wait_translated(node);
    }
    cluster.start_gateway(1);
    cluster.cluster.wait_converged();
    for node in 0..3 {
        cluster.wait_translated(node);
    }
    leaks.check();
    cluster.check_kernels_agree();
}

/// Without a policy server no other gateway becomes the owner of what a dead one owned: membership doesn't change.
#[test]
fn without_the_policy_server_pods_go_on_also_when_a_gateway_dies() {
    let minutes = std::env::var("VIPGATE_AWAY_MINUTES").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    let away = Duration::from_mins(minutes);
    let mut cluster = NodeCluster::with_gateways("nc-away", 3, 3);
    let server = LineServer::start(cluster.cluster.folder.path(), &cluster.cluster.server);
    let leaks = cluster.start_leak_verifier();
    allow_shard_moves(&cluster);
    cluster.cluster.policyd.take().unwrap().kill();
    let load = Load::start(&cluster, "away", 1_000_000);
    std::thread::sleep(away / 2);
    // One that the pods' IPv4 packets don't use.
    let used = cluster.owner();
    let killed = (used + 1) % 3;
    cluster.cluster.gateways[killed].kill();
    std::thread::sleep(away / 2);
    let outage = load.end(&cluster);
    println!("policy server away for {away:?}, gateway {killed} killed meanwhile: {}", outage.describe(0.0));
    outage.check(MAX_OUTAGE);

    // The one that they use: nothing may leave by the node, and all is well once the server is back.
    cluster.cluster.gateways[used].kill();
    // One that has had no lease for five minutes doesn't answer echo requests any more: then all look alike to nodes.
    if away / 2 < Duration::from_mins(5) {
        cluster.wait_no_target(used);
    }
    sleep_ms(2_000);
    let began = Instant::now();
    cluster.start_policyd();
    for node in 0..3 {
        let (pod, server) = (cluster.covered(node).host.clone(), SERVER[0].parse().unwrap());
        let works = || query_udp(&pod, server).is_ok_and(|source| source == L2_VIPS[0]);
        assert!(wait_for(Duration::from_secs(30), works), "{}", cluster.evidence(node));
    }
    println!("policy server started: the last gateway has the VIPs, all pods work after {:?}", began.elapsed());
    for number in [used, killed] {
        cluster.cluster.gateways[number].spawn(&Cluster::overlay_config(number + 1));
        cluster.cluster.gateways[number].wait_ready();
    }
    cluster.cluster.wait_converged();
    for node in 0..3 {
        cluster.wait_translated(node);
    }
    leaks.check();
    server.end();
    cluster.check_kernels_agree();
}
