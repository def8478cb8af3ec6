//! A gateway dies or is drained: the node sends to another one.

use std::time::Duration;

use vipgate_tests::cluster::{ClientConfig, Clients, LineServer, SERVER, sleep_ms};
use vipgate_tests::wait_for;

use crate::scenario::Scenario;

/// The longest time without replies that a dead gateway may cost.
const MAX_OUTAGE: f64 = 1.3;

#[test]
fn a_killed_gateway_costs_a_pod_less_than_a_second_and_no_connection() {
    let mut scenario = Scenario::start("node-failover");
    let uplink = scenario.capture_leaks();
    let _server = LineServer::start(scenario.cluster.folder.path(), &scenario.cluster.server);
    let folder = scenario.cluster.folder.path().to_owned();
    let start = |name: &str, first: u32, config: &ClientConfig<'_>| {
        Clients::start(&folder, &scenario.covered().host, name, first, config)
    };
    let mut probes = start("probes", 1, &ClientConfig::probes(SERVER[0], Vec::new(), 20));
    let mut held = start("held", 1000, &ClientConfig::held_connections(SERVER[0], Vec::new(), 100));
    for clients in [&mut probes, &mut held] {
        clients.wait_established(Duration::from_secs(30));
    }
    // Sessions are replicated before anything fails.
    sleep_ms(1_000);
    let target = scenario.node.query(&["endpoints"])["endpoints"][0]["target"].as_str().unwrap().to_owned();
    let index = usize::from(target == "gw-2");
    let died = scenario.cluster.gateways[index].kill();
    let moved = || scenario.node.query(&["endpoints"])["endpoints"][0]["target"].as_str() != Some(&target);
    assert!(wait_for(Duration::from_secs(5), moved), "{}", scenario.evidence());
    sleep_ms(3_000);
    let (probes, held) = (probes.end(), held.end());
    println!("{target} died at {died}; probes: {}; held: {}", probes.summary(), held.summary());
    held.check_survived(100);
    assert!(probes.longest_wait(0.2) <= MAX_OUTAGE, "{}", probes.summary());
    let leaked = uplink.end();
    assert!(leaked.is_empty(), "{} packets left by the node", leaked.len());
}
