//! Session persistence: sessions survive a kill at any time, a planned stop, and a changed configuration.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::{Duration, Instant};
use std::{fs, thread};

use tempfile::TempDir;
use vipgate_tests::cluster::Clients;
use vipgate_tests::drop_accounting::RING_LOSSES;
use vipgate_tests::traffic::{Traffic, hold_connections, start_line_server};
use vipgate_tests::{POD_FILTER, SERVER, Testbed, session_state};

fn sessions(testbed: &Testbed) -> usize {
    testbed.query(&["sessions"])["sessions"].as_array().map_or(0, Vec::len)
}

#[test]
fn connections_survive_twenty_kills_under_load() {
    let (_folder, more) = session_state();
    let mut testbed = Testbed::new("kills");
    // After each kill 800 clients retransmit at once, on the cores of the workers: the rings between workers, which
    // are shorter than the sockets' fill rings, overflow, too.
    testbed.accounting.allow(RING_LOSSES);
    testbed.accounting.allow(["link_full"]);
    testbed.start(&more);
    let _server = start_line_server(&testbed);
    let capture = testbed.capture(POD_FILTER);
    let clients = [(0, SERVER[0]), (2, SERVER[1])].map(|(pod, server)| hold_connections(&testbed, pod, server, 400));
    let started = Instant::now();
    for round in 0..20_u64 {
        // At a varying phase of the clients' intervals.
        thread::sleep(Duration::from_millis(60 + round * 37 % 100));
        testbed.stop("KILL");
        testbed.start(&more);
        assert!(testbed.log().contains("state_restored"), "{}", testbed.log());
    }
    let kills = started.elapsed();
    let outcomes = Clients::end_all(clients);
    // All clients send at once, and TCP doubles its timeout with each loss in a row (RFC 6298 section 5.5): what was
    // lost before the last restart is retransmitted after at most the time for which it has been lost.
    let max_wait = (2 * kills + Duration::from_secs(1)).as_secs_f64();
    for outcome in outcomes {
        outcome.check_all_succeeded();
        assert!(outcome.longest_wait(f64::INFINITY) < max_wait, "{}, kills for {kills:?}", outcome.summary());
    }
    testbed.check_frames();
    assert_eq!(capture.end().unwrap(), Vec::<String>::new(), "a pod's address leaked");
}

#[test]
fn a_planned_restart_keeps_sessions_and_detach_ends_them() {
    let (folder, more) = session_state();
    let mut testbed = Testbed::new("planned");
    testbed.start(&more);
    let _server = start_line_server(&testbed);
    let clients = hold_connections(&testbed, 0, SERVER[0], 50);
    let before = sessions(&testbed);
    assert!(before >= 50, "{before}");
    let stopped = Instant::now();
    testbed.stop("TERM");
    testbed.start(&more);
    let downtime = stopped.elapsed();
    let outcome = clients.end();
    outcome.check_all_succeeded();
    assert!(outcome.longest_wait(f64::INFINITY) < 5.0, "{}, down for {downtime:?}", outcome.summary());
    assert!(sessions(&testbed) >= 50);

    let (code, _, stderr) = testbed.command(&["detach", "--config", &testbed.write_config(&more)]);
    assert!(code == 1 && stderr.contains("is this gateway already running"), "not while it runs: {stderr}");
    testbed.stop("TERM");
    // In a namespace without its interfaces, detach changes nothing.
    let kept = fs::read_dir(folder.path().join("gw-test")).unwrap().count();
    let binary = vipgate_tests::binary().display().to_string();
    let elsewhere =
        testbed.server.output(&[&binary, "detach", "--config", &testbed.write_config(&more)]).unwrap_err().to_string();
    for words in
        ["interface gw-in: no such interface", "interface gw-out", "another network namespace", "nothing was removed"]
    {
        assert!(elsewhere.contains(words), "{words}: {elsewhere}");
    }
    assert!(kept > 0 && fs::read_dir(folder.path().join("gw-test")).unwrap().count() == kept);
    let interface = testbed.gateway.output(&["ip", "-d", "link", "show", "gw-in"]).unwrap();
    assert!(interface.contains("xdp"), "the steering program stays: {interface}");
    assert_eq!(testbed.command(&["detach", "--config", &testbed.write_config(&more)]).0, 0);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "all state is removed");
}

#[test]
fn sessions_survive_changed_workers_and_capacity() {
    let (_folder, more) = session_state();
    let mut testbed = Testbed::new("migrate");
    // While no gateway runs, packets wait in the sockets of the next process.
    testbed.accounting.allow(RING_LOSSES);
    testbed.start(&more);
    let traffic = Traffic::start(&testbed);
    let tables = [("[0]", 65_536), ("[1, 0]", 65_536), ("[0, 1]", 4_096), ("[1]", 1_000), ("[0, 1]", 65_536)];
    for (round, (cores, capacity)) in tables.into_iter().enumerate() {
        thread::sleep(Duration::from_millis(300));
        testbed.stop(if round % 2 == 0 { "KILL" } else { "TERM" });
        let more = more.replace("65536", &capacity.to_string());
        testbed.start(&format!("{more}\nworkers: {{cores: {cores}}}"));
        let log = testbed.log();
        assert!(
            log.contains("\"event\":\"state_migrated\"") && log.contains("\"dropped\":0"),
            "{cores}, {capacity}: {log}"
        );
        assert!(!log.contains("state_unusable") && !log.contains("state_lost"), "{log}");
    }
    traffic.end_after_outage();
    testbed.check_frames();
}

#[test]
fn sessions_migrate_with_capacity_for_one_set_of_files() {
    let folder = TempDir::with_prefix("vipgate-test-small-").unwrap();
    let path = folder.path().display().to_string();
    // The old set of files takes 32 MiB, the new one 16: each slab has at least 2.
    vipgate_lab::run(&["mount", "-t", "tmpfs", "-o", "size=38m", "tmpfs", &path]).unwrap();
    let mut testbed = Testbed::new("tight");
    testbed.accounting.allow(RING_LOSSES);
    let more = format!("sessions: {{capacity: 4096, state: {path}}}");
    testbed.start(&more);
    let traffic = Traffic::start(&testbed);
    thread::sleep(Duration::from_millis(300));
    testbed.stop("KILL");
    testbed.start(&format!("{more}\nworkers: {{cores: [0]}}"));
    let log = testbed.log();
    traffic.end_after_outage();
    testbed.stop("KILL");
    vipgate_lab::run(&["umount", &path]).unwrap();
    assert!(log.contains("state_no_room") && log.contains("state_migrated") && !log.contains("state_lost"), "{log}");
}

#[test]
fn incompatible_session_state_is_reported_and_discarded() {
    let (folder, more) = session_state();
    let mut testbed = Testbed::new("foreign");
    testbed.start(&more);
    testbed.check_source_addresses(&testbed.pods[0], SERVER, vipgate_tests::VIP_A);
    let start = |testbed: &mut Testbed, more: &str| {
        testbed.start(more);
        testbed.check_source_addresses(&testbed.pods[0], SERVER, vipgate_tests::VIP_A);
    };
    // Files of another layout version and another number of workers can't be migrated.
    testbed.stop("KILL");
    for entry in fs::read_dir(folder.path().join("gw-test")).unwrap() {
        let mut bytes = fs::read(entry.as_ref().unwrap().path()).unwrap();
        bytes[8] = 99;
        fs::write(entry.unwrap().path(), bytes).unwrap();
    }
    start(&mut testbed, &format!("{more}\nworkers: {{cores: [0]}}"));
    let log = testbed.log();
    assert!(log.contains("its layout is version 99") && log.contains("the worker no longer exists"), "{log}");
    // Corrupting the files under a running gateway would crash it.
    testbed.stop("KILL");
    for entry in fs::read_dir(folder.path().join("gw-test")).unwrap() {
        let mut bytes = fs::read(entry.as_ref().unwrap().path()).unwrap();
        bytes[..4].copy_from_slice(b"junk");
        fs::write(entry.unwrap().path(), bytes).unwrap();
    }
    start(&mut testbed, &format!("{more}\nworkers: {{cores: [0]}}"));
    assert!(testbed.log().contains("it is damaged"), "{}", testbed.log());
}

#[test]
fn a_full_state_filesystem_is_reported_and_tolerated() {
    let folder = TempDir::with_prefix("vipgate-test-small-").unwrap();
    let path = folder.path().display().to_string();
    vipgate_lab::run(&["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", &path]).unwrap();
    let mut testbed = Testbed::new("noroom");
    testbed.start(&format!("sessions: {{capacity: 65536, state: {path}}}"));
    let log = testbed.log();
    testbed.stop("KILL");
    vipgate_lab::run(&["umount", &path]).unwrap();
    assert!(log.contains("state_lost") && log.contains("no space for"), "{log}");
}

#[test]
fn a_second_gateway_of_the_same_name_leaves_the_sessions_of_the_first() {
    let (_folder, more) = session_state();
    let mut first = Testbed::new("first");
    first.start(&more);
    let mut second = Testbed::new("second");
    second.start(&more);
    assert!(second.log().contains("state_lost") && second.log().contains("another process uses"), "{}", second.log());
    for testbed in [&first, &second] {
        testbed.check_source_addresses(&testbed.pods[0], SERVER, vipgate_tests::VIP_A);
    }
    let kept = sessions(&first);
    first.stop("KILL");
    first.start(&more);
    assert!(sessions(&first) >= kept, "the second gateway took no sessions");
}
