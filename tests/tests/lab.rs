//! The laboratory itself: what it makes is removed, also after a panic and by the next one; and what its hosts do.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use std::{env, fs, mem, panic, process, thread};

use vipgate_lab::reflector::{HTTP, query_http_at, start};
use vipgate_lab::{Capture, IMMEDIATE, Lab, LinkConfig, wait_for};

fn has_namespace(name: &str) -> bool {
    Path::new("/run/netns").join(name).exists()
}

#[test]
fn a_lab_is_removed_with_its_processes_when_its_test_panics() {
    let directory = vipgate_lab::directory().unwrap();
    let log = directory.path().join("log");
    let netns = format!("vipgate-{}-panics-host", process::id());
    let test = thread::spawn::<_, ()>(move || {
        let lab = Lab::new("panics").unwrap();
        let host = lab.host("host", false).unwrap();
        let sleeping = host.spawn(&["sleep", "1000"], &log).unwrap();
        let pid = sleeping.id();
        // Nothing but the lab ends it.
        mem::forget(sleeping);
        panic::resume_unwind(Box::new(pid));
    });
    let pid = *test.join().unwrap_err().downcast::<u32>().unwrap();
    assert!(!has_namespace(&netns), "{netns} is still there");
    // It isn't reaped, since nobody waits for it.
    let state = || fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    assert!(wait_for(Duration::from_secs(5), || state().is_empty() || state().contains(") Z ")), "{}", state());
}

#[test]
fn a_lab_removes_what_dead_processes_have_left_and_nothing_else() {
    let mut child = Command::new("true").spawn().unwrap();
    let dead = child.id();
    child.wait().unwrap();
    let (left, foreign) = (format!("vipgate-{dead}-left"), format!("vipgate-other-{dead}"));
    let directories: [PathBuf; 2] = [&left, &foreign].map(|name| env::temp_dir().join(name));
    for (name, directory) in [&left, &foreign].into_iter().zip(&directories) {
        vipgate_lab::run(&["ip", "netns", "add", name]).unwrap();
        fs::create_dir(directory).unwrap();
    }
    let own = vipgate_lab::memory_directory().unwrap();
    let _lab = Lab::new("leftovers").unwrap();
    assert!(!has_namespace(&left) && !directories[0].exists());
    assert!(has_namespace(&foreign) && directories[1].exists() && own.path().exists());
    vipgate_lab::run(&["ip", "netns", "del", &foreign]).unwrap();
    fs::remove_dir(&directories[1]).unwrap();
}

#[test]
fn a_command_that_fails_is_a_result() {
    let lab = Lab::new("execute").unwrap();
    let host = lab.host("host", false).unwrap();
    let result = host.execute(&["sh", "-c", "echo out; echo err >&2; exit 3"]).unwrap();
    assert_eq!(result, (3, "out\n".to_owned(), "err\n".to_owned()));
    let error = host.output(&["sh", "-c", "echo reason >&2; exit 3"]).unwrap_err().to_string();
    assert!(error.ends_with("reason"), "{error}");
}

#[test]
fn hosts_of_a_link_and_of_a_bridge_reach_each_other_over_both_families() {
    let lab = Lab::new("links").unwrap();
    let [switch, one, other] = ["switch", "one", "other"].map(|name| lab.host(name, false).unwrap());
    switch.add_bridge("net").unwrap();
    lab.attach((&one, "eth0"), (&switch, "one"), "net").unwrap();
    lab.attach((&other, "eth0"), (&switch, "other"), "net").unwrap();
    let macs = [Some("02:00:00:00:07:01"), Some("02:00:00:00:07:02")];
    lab.link_with((&one, "direct"), (&other, "direct"), LinkConfig { mtu: 9000, macs, ..LinkConfig::default() })
        .unwrap();
    for (host, number) in [(&one, 1), (&other, 2)] {
        host.addresses("eth0", &[&format!("10.1.0.{number}/24"), &format!("fd00:1::{number}/64")]).unwrap();
        host.addresses("direct", &[&format!("10.2.0.{number}/24"), &format!("fd00:2::{number}/64")]).unwrap();
    }
    start(&other, &[]);
    let directory = vipgate_lab::directory().unwrap();
    let file = directory.path().join("direct.pcap");
    let capture = Capture::start(&other, "direct", &IMMEDIATE, "tcp", &file).unwrap();
    assert!(capture.is_empty());
    for (server, client) in [("10.1.0.2", "10.1.0.1"), ("fd00:1::2", "fd00:1::1"), ("10.2.0.2", "10.2.0.1")] {
        let query = || query_http_at(&one, (server.parse::<std::net::IpAddr>().unwrap(), HTTP).into());
        assert!(wait_for(Duration::from_secs(5), || query().is_ok_and(|seen| seen == client)), "{server}");
    }
    let captured = capture.end().unwrap();
    assert!(!captured.is_empty() && captured.iter().all(|line| line.contains("10.2.0.")), "{captured:?}");
    let link = one.output(&["ip", "link", "show", "direct"]).unwrap();
    assert!(link.contains("mtu 9000") && link.contains("02:00:00:00:07:01"), "{link}");
}
