//! How a process may end when its calls fail.

use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;

use vipgate_tests::failing_calls::Fault;

const SIGABRT: i32 = 6;
/// A failure at run time, and one of the loader, which can't load a library.
const FAILURES: [i32; 2] = [1, 127];
/// Calls that start a thread, and those for the pipe through which a runtime receives signals.
const THREAD_CALLS: &[&str] = &["clone", "clone3", "mmap", "mprotect"];
const RUNTIME_CALLS: &[&str] = &["socketpair", "recvfrom/unix"];
/// Panics of the standard library and tokio when the kernel refuses such a call. A release build aborts then, and
/// systemd restarts it.
const LIBRARY_PANICS: [(&[&str], &str); 5] = [
    (THREAD_CALLS, "OS can't spawn worker thread"),
    (THREAD_CALLS, "failed to spawn thread"),
    (THREAD_CALLS, "alternative stack"),
    (RUNTIME_CALLS, "failed to create UnixStream"),
    (RUNTIME_CALLS, "Bad read on self-pipe"),
];

/// How a process is expected to end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Expected {
    /// Only with an error.
    #[default]
    Running,
    /// It was stopped.
    Stopped,
    /// It was killed.
    Killed,
}

/// Checks how a process has ended.
pub(crate) fn check(status: ExitStatus, expected: Expected, log: &str) -> Result<(), String> {
    let is_out_of_memory = status.signal() == Some(SIGABRT) && log.contains("memory allocation of");
    match (expected, status.code()) {
        (Expected::Killed, _) | (Expected::Stopped, Some(0)) => Ok(()),
        (_, Some(code)) if FAILURES.contains(&code) => Ok(()),
        _ if is_out_of_memory => Ok(()),
        _ => Err(format!("the process has ended, and systemd doesn't restart it, or it has crashed: {status}")),
    }
}

/// The first panic in a log.
pub(crate) fn panic(log: &str) -> Option<String> {
    let mut lines = log.lines().skip_while(|line| !line.contains("panicked at"));
    let first = lines.next()?;
    Some(format!("{first} {}", lines.next().unwrap_or_default()))
}

/// Whether a panic is that of a library to which a fault has refused a thread, or what its runtime needs.
pub(crate) fn is_refused_start(panic: &str, fault: Option<&Fault>) -> bool {
    let call = fault.map_or("", |fault| fault.kind.name);
    LIBRARY_PANICS.iter().any(|(calls, words)| calls.contains(&call) && panic.contains(words))
}

#[test]
fn ends_that_systemd_does_not_mend_are_found() {
    let check = |status, expected, log| check(ExitStatus::from_raw(status), expected, log).is_ok();
    let code = |code: i32| code << 8;
    assert!(check(code(1), Expected::Running, "") && check(code(127), Expected::Running, ""));
    assert!(!check(code(2), Expected::Running, "") && !check(code(0), Expected::Running, ""));
    assert!(check(code(0), Expected::Stopped, "") && !check(code(101), Expected::Stopped, ""));
    assert!(check(SIGABRT, Expected::Running, "memory allocation of 9 bytes failed"));
    assert!(!check(SIGABRT, Expected::Running, "") && !check(11, Expected::Running, ""));
    assert!(check(9, Expected::Killed, ""));
}

#[test]
fn a_panic_is_found_with_its_message() {
    let log = "{\"event\":\"ready\"}\nthread 'main' panicked at a.rs:1:2:\nOS can't spawn worker thread: no\n{}\n";
    let found = panic(log).unwrap();
    assert!(found.contains("a.rs:1:2: OS can't spawn"), "{found}");
    assert!(!is_refused_start(&found, None) && panic("{}\n").is_none());
}
