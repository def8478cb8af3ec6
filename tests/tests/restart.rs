//! Sessions outlive the process: killed at any moment, stopped in order, or replaced.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use vipgate_tests::ledger::RING_LOSSES;
use vipgate_tests::traffic::{Connections, Outcome, Traffic, echo_server};
use vipgate_tests::{POD_PACKETS, SERVER, World, state};

fn sessions(world: &World) -> usize {
    world.ask(&["sessions"])["sessions"].as_array().map_or(0, Vec::len)
}

#[test]
fn connections_survive_twenty_kills_under_load() {
    let (_folder, more) = state();
    let mut world = World::new("kills");
    // After each kill 800 clients retransmit at once, on the cores that the workers need: the rings between workers, which are shorter than
    // the sockets' fill rings, overflow, too.
    world.ledger.allow(RING_LOSSES);
    world.ledger.allow(["link_full"]);
    world.start(&more);
    let _server = echo_server(&world);
    let capture = world.capture(POD_PACKETS);
    let clients =
        [(0, SERVER[0]), (2, SERVER[1])].map(|(pod, server)| Connections::open(&world, &world.pods[pod], server, 400));
    let begun = Instant::now();
    for round in 0..20_u64 {
        // Anywhere between two rounds of questions.
        thread::sleep(Duration::from_millis(60 + round * 37 % 100));
        world.end("KILL");
        world.start(&more);
        assert!(world.log().contains("state_taken_up"), "{}", world.log());
    }
    let kills = begun.elapsed();
    let outcomes = clients.map(Connections::end);
    // All ask at once, and TCP doubles its pause with each loss in a row (RFC 6298 section 5.5): what was lost before the end of the kills comes again
    // after at most as long a time as it has been lost for.
    let longest = (2 * kills + Duration::from_secs(1)).as_millis();
    for outcome in &outcomes {
        let Outcome { alive, changed, longest_ms } = *outcome;
        assert!(alive == 400 && changed == 0 && u128::from(longest_ms) < longest, "{outcomes:?}, kills for {kills:?}");
    }
    world.check_frames();
    assert_eq!(capture.end(), Vec::<String>::new(), "a pod's address was seen outside");
}

#[test]
fn a_planned_restart_keeps_sessions_and_detach_ends_them() {
    let (folder, more) = state();
    let mut world = World::new("planned");
    world.start(&more);
    let _server = echo_server(&world);
    let clients = Connections::open(&world, &world.pods[0], SERVER[0], 50);
    let before = sessions(&world);
    assert!(before >= 50, "{before}");
    let begun = Instant::now();
    world.end("TERM");
    world.start(&more);
    let away = begun.elapsed();
    let outcome = clients.end();
    assert!(
        outcome.alive == 50 && outcome.changed == 0 && outcome.longest_ms < 5_000,
        "{outcome:?}, away for {away:?}"
    );
    assert!(sessions(&world) >= 50);

    let (code, _, stderr) = world.command(&["detach", "--config", &world.config(&more)]);
    assert!(code == 1 && stderr.contains("does this gateway run already"), "not from under it: {stderr}");
    world.end("TERM");
    // Where its interfaces aren't, nothing is touched.
    let kept = fs::read_dir(folder.path().join("gw-test")).unwrap().count();
    let program = vipgate_tests::binary().display().to_string();
    let elsewhere =
        world.server.output(&[&program, "detach", "--config", &world.config(&more)]).unwrap_err().to_string();
    for words in
        ["interface gw-in: there is none", "interface gw-out", "another network namespace", "nothing was removed"]
    {
        assert!(elsewhere.contains(words), "{words}: {elsewhere}");
    }
    assert!(kept > 0 && fs::read_dir(folder.path().join("gw-test")).unwrap().count() == kept);
    let links = world.gateway.output(&["ip", "-d", "link", "show", "gw-in"]).unwrap();
    assert!(links.contains("xdp"), "the steering program stays: {links}");
    assert_eq!(world.command(&["detach", "--config", &world.config(&more)]).0, 0);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left");
}

#[test]
fn sessions_go_on_with_other_workers_and_capacities() {
    let (_folder, more) = state();
    let mut world = World::new("migrate");
    // While nobody is there, packets wait in the sockets of the next process.
    world.ledger.allow(RING_LOSSES);
    world.start(&more);
    let traffic = Traffic::start(&world);
    let tables = [("[0]", 65_536), ("[1, 0]", 65_536), ("[0, 1]", 4_096), ("[1]", 1_000), ("[0, 1]", 65_536)];
    for (round, (cores, capacity)) in tables.into_iter().enumerate() {
        thread::sleep(Duration::from_millis(300));
        world.end(if round % 2 == 0 { "KILL" } else { "TERM" });
        let more = more.replace("65536", &capacity.to_string());
        world.start(&format!("{more}\nworkers: {{cores: {cores}}}"));
        let log = world.log();
        assert!(
            log.contains("\"event\":\"state_migrated\"") && log.contains("\"dropped\":0"),
            "{cores}, {capacity}: {log}"
        );
        assert!(!log.contains("state_unusable") && !log.contains("state_lost"), "{log}");
    }
    traffic.end_after_absence();
    world.check_frames();
}

#[test]
fn sessions_go_on_where_there_is_room_for_one_set_of_files_only() {
    let folder = TempDir::with_prefix("vipgate-test-small-").unwrap();
    let path = folder.path().display().to_string();
    // One set of files takes 28 MiB, the other one 14: each slab at least 2.
    vipgate::lab::run(&["mount", "-t", "tmpfs", "-o", "size=34m", "tmpfs", &path]).unwrap();
    let mut world = World::new("tight");
    world.ledger.allow(RING_LOSSES);
    let more = format!("sessions: {{capacity: 4096, state: {path}}}");
    world.start(&more);
    let traffic = Traffic::start(&world);
    thread::sleep(Duration::from_millis(300));
    world.end("KILL");
    world.start(&format!("{more}\nworkers: {{cores: [0]}}"));
    let log = world.log();
    traffic.end_after_absence();
    world.end("KILL");
    vipgate::lab::run(&["umount", &path]).unwrap();
    assert!(log.contains("state_no_room") && log.contains("state_migrated") && !log.contains("state_lost"), "{log}");
}

#[test]
fn state_of_others_is_named_and_forgotten() {
    let (folder, more) = state();
    let mut world = World::new("foreign");
    world.start(&more);
    world.check_identity(&world.pods[0], SERVER, vipgate_tests::VIP_A);
    let start = |world: &mut World, more: &str| {
        world.start(more);
        world.check_identity(&world.pods[0], SERVER, vipgate_tests::VIP_A);
    };
    // Another version's tables, and another number of workers: nothing can be made of them.
    world.end("KILL");
    for entry in fs::read_dir(folder.path().join("gw-test")).unwrap() {
        let mut bytes = fs::read(entry.as_ref().unwrap().path()).unwrap();
        bytes[8] = 99;
        fs::write(entry.unwrap().path(), bytes).unwrap();
    }
    start(&mut world, &format!("{more}\nworkers: {{cores: [0]}}"));
    let log = world.log();
    assert!(log.contains("its layout is version 99") && log.contains("a worker that is no more"), "{log}");
    // A gateway that runs would die of it.
    world.end("KILL");
    for entry in fs::read_dir(folder.path().join("gw-test")).unwrap() {
        let mut bytes = fs::read(entry.as_ref().unwrap().path()).unwrap();
        bytes[..4].copy_from_slice(b"junk");
        fs::write(entry.unwrap().path(), bytes).unwrap();
    }
    start(&mut world, &format!("{more}\nworkers: {{cores: [0]}}"));
    assert!(world.log().contains("it is damaged"), "{}", world.log());
}

#[test]
fn without_room_it_says_so_and_works() {
    let folder = TempDir::with_prefix("vipgate-test-small-").unwrap();
    let path = folder.path().display().to_string();
    vipgate::lab::run(&["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", &path]).unwrap();
    let mut world = World::new("noroom");
    world.start(&format!("sessions: {{capacity: 65536, state: {path}}}"));
    let log = world.log();
    world.end("KILL");
    vipgate::lab::run(&["umount", &path]).unwrap();
    assert!(log.contains("state_lost") && log.contains("no room for"), "{log}");
}

#[test]
fn of_two_with_one_name_both_run_and_the_first_keeps_its_sessions() {
    let (_folder, more) = state();
    let mut first = World::new("first");
    first.start(&more);
    let mut second = World::new("second");
    second.start(&more);
    assert!(second.log().contains("state_lost") && second.log().contains("another process uses"), "{}", second.log());
    for world in [&first, &second] {
        world.check_identity(&world.pods[0], SERVER, vipgate_tests::VIP_A);
    }
    let kept = sessions(&first);
    first.end("KILL");
    first.start(&more);
    assert!(sessions(&first) >= kept, "the second one took nothing");
}
