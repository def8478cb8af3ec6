//! Drain and undrain under traffic.

use std::time::Duration;

use vipgate_tests::cluster::{ClientConfig, Cluster, SERVER, sleep_ms, sources_a};
use vipgate_tests::wait_for;

use crate::scenario::{MAX_OUTAGE, Scenario, allow_shard_moves, check_new_connections, restart_gateway};

#[test]
fn an_undrained_gateway_takes_sessions_again() {
    let cluster = Cluster::running("undrain", 3);
    let created = || cluster.gateways[1].metric("vipgate_sessions_created_total", "");
    let scenario = Scenario::start(&cluster, 300, 20);
    allow_shard_moves(&cluster);
    assert_eq!(cluster.gateways[1].command(&["drain"]).0, 0);
    sleep_ms(2_000);
    assert_eq!(cluster.gateways[1].command(&["undrain"]).0, 0);
    cluster.wait_converged();
    let before = created();
    let works = || {
        check_new_connections(&cluster, "again", 50_000_000, 300);
        created() - before > 10.0
    };
    assert!(
        wait_for(Duration::from_secs(10), works),
        "the gateway opens no sessions\n{}",
        cluster.gateways[1].log_tail()
    );
    scenario.end(&cluster).check_uninterrupted(MAX_OUTAGE / 2.0);
}

/// A lost SYN is retransmitted after a second: connections opened while shards move must not have to wait for that.
#[test]
fn connections_opened_during_drain_and_undrain_do_not_wait() {
    const RATE: u32 = 260;
    let cluster = Cluster::running("begin", 3);
    let monitor = cluster.start_monitor();
    let traffic = ClientConfig::short_connections(SERVER[0], sources_a(0), RATE * 10, RATE);
    let brief = cluster.start_clients("begin", 10_000_000, &traffic);
    for command in ["drain", "undrain", "drain", "undrain"] {
        sleep_ms(1_500);
        assert_eq!(cluster.gateways[1].command(&[command]).0, 0);
    }
    let brief = brief.wait(Duration::from_mins(1));
    println!("{}\n{}", brief.summary(), cluster.drop_summary());
    brief.check_all_succeeded();
    assert!(brief.longest_wait(f64::MAX) < 0.95, "{}", brief.summary());
    for reason in ["no_lease", "no_owner"] {
        assert!(cluster.drop_count(reason) < 1.0, "{reason}: {}", cluster.drop_summary());
    }
    monitor.verify_with_more_hops(&cluster);
}

/// A gateway is drained under load and stopped when it reports that it serves no more sessions; no connection is
/// affected.
#[test]
fn a_drain_under_load_is_hitless() {
    let mut cluster = Cluster::running("drain", 3);
    let scenario = Scenario::start(&cluster, 1_000, 40);
    let brief = cluster.start_clients(
        "brief",
        50_000_000,
        &ClientConfig::short_connections(SERVER[0], sources_a(0), 1_000, 200),
    );
    // With these there are always connections that have just been opened.
    let traffic = ClientConfig {
        rate: 200,
        intervals: vec![(100, 0.3, 0.6)],
        ..ClientConfig::held_connections(SERVER[0], sources_a(0), 1_000)
    };
    let young = cluster.start_clients("young", 60_000_000, &traffic);
    sleep_ms(2_000);
    allow_shard_moves(&cluster);
    let (code, stdout, stderr) = cluster.gateways[0].command(&["drain"]);
    println!("{stdout}{}", cluster.drop_summary());
    assert!(code == 0 && stdout.contains("it owns no shards"), "{code}: {stdout}{stderr}");
    cluster.route_via(&cluster.indices_except(0));
    sleep_ms(200);
    cluster.gateways[0].stop("TERM");
    brief.wait(Duration::from_mins(1)).check_all_succeeded();
    sleep_ms(1_000);
    let young = young.end();
    println!("young: {}\n{}", young.summary(), cluster.drop_summary());
    young.check_all_succeeded();
    scenario.end(&cluster).check_uninterrupted(MAX_OUTAGE / 2.0);
}

/// Gateways are drained and restarted one after the other, as by an upgrade.
#[test]
fn a_rolling_restart_is_hitless() {
    let mut cluster = Cluster::running("rolling", 3);
    let scenario = Scenario::start(&cluster, 1_000, 40);
    for number in cluster.indices() {
        allow_shard_moves(&cluster);
        cluster.gateways[number].command(&["drain"]);
        sleep_ms(1_000);
        cluster.route_via(&cluster.indices_except(number));
        sleep_ms(200);
        cluster.gateways[number].stop("TERM");
        restart_gateway(&mut cluster, number);
        sleep_ms(500);
    }
    check_new_connections(&cluster, "after", 60_000_000, 500);
    scenario.end(&cluster).check_uninterrupted(MAX_OUTAGE / 2.0);
}

/// Every VIP has the two gateways as its candidates: of two simultaneous drains, one is refused.
#[test]
fn the_last_gateway_of_a_vip_is_not_drained() {
    let cluster = Cluster::running("refused", 2);
    let drain = |number: usize| cluster.gateways[number].command(&["drain"]);
    let outcomes = std::thread::scope(|scope| {
        let threads = [0, 1].map(|number| scope.spawn(move || drain(number)));
        threads.map(|thread| thread.join().unwrap())
    });
    let refused = outcomes.iter().position(|(code, ..)| *code == 1).expect("one is refused");
    let (_, stdout, stderr) = &outcomes[refused];
    assert!(stdout.contains("REFUSED") && stderr.contains("no other gateway could take over"), "{stdout}{stderr}");
    assert_eq!(outcomes[1 - refused].0, 0, "{:?}", outcomes[1 - refused]);
    let (_, status, _) = cluster.gateways[refused].command(&["status"]);
    assert!(status.contains("REFUSED   no other gateway could take over"), "{status}");
    // Once the other one is back, nothing is in the way.
    assert_eq!(cluster.gateways[1 - refused].command(&["undrain"]).0, 0);
    let (code, stdout, stderr) = cluster.gateways[refused].command(&["drain"]);
    assert_eq!(code, 0, "{stdout}{stderr}");
}
