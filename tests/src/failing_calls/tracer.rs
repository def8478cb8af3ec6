//! The program `call-tracer`: the tracer, and the wrapper of the processes that it traces.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufRead, Write};
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::libc;
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};
use serde_json::json;

use super::descriptor::{self, Sockets};
use super::kinds::{KINDS, Kind, Target};
use super::{Effect, Fault};

/// The first call after the loader has loaded a program's libraries.
const STARTED: i64 = libc::SYS_set_robust_list;
/// How long the wrapper waits for the tracer.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(10);
/// How often threads that wait are looked at.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Affected calls in a report.
const MAX_AFFECTED: usize = 8;
/// Bytes of a path in a report.
const MAX_PATH: usize = 160;

/// What the threads that trace share.
#[derive(Debug, Default)]
struct State {
    /// Whether the loader of the last process has ended.
    has_started: bool,
    is_counting: bool,
    counts: BTreeMap<&'static str, u64>,
    fault: Option<Fault>,
    affected: Vec<String>,
    sockets: Sockets,
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs the tracer: one reply for each command, until there are no more. Then the processes that it traces are killed.
///
/// # Errors
/// When the commands or the replies can't be read or written.
pub fn trace_on_command(commands: impl BufRead, mut replies: impl Write) -> io::Result<()> {
    let state = Arc::new(Mutex::new(State::default()));
    for command in commands.lines() {
        let reply = execute(&command?, &state).unwrap_or_else(|error| format!("error: {error}"));
        writeln!(replies, "{reply}")?;
        replies.flush()?;
    }
    Ok(())
}

fn execute(command: &str, state: &Arc<Mutex<State>>) -> Result<String, String> {
    let words: Vec<&str> = command.split(' ').collect();
    match words.as_slice() {
        ["attach", pid] => attach(Pid::from_raw(pid.parse().map_err(|_| "no process id")?), state)?,
        ["count"] => lock(state).begin(None),
        ["arm", fault @ ..] => lock(state).begin(Some(Fault::decode(fault).ok_or("no fault")?)),
        ["report"] => return Ok(lock(state).end()),
        _ => return Err("unknown command".to_owned()),
    }
    Ok("ok".to_owned())
}

/// Traces a process and what it starts, in a thread: what is traced belongs to the thread.
fn attach(process: Pid, state: &Arc<Mutex<State>>) -> Result<(), String> {
    let state = state.clone();
    lock(&state).has_started = false;
    let (sender, result) = mpsc::channel();
    thread::spawn(move || {
        let options = Options::PTRACE_O_TRACESECCOMP
            | Options::PTRACE_O_TRACECLONE
            | Options::PTRACE_O_TRACEFORK
            | Options::PTRACE_O_TRACEVFORK
            | Options::PTRACE_O_EXITKILL;
        let seized = ptrace::seize(process, options);
        // Its receiver waits.
        let _ = sender.send(seized);
        if seized.is_ok() {
            trace(&state);
        }
    });
    let seized = result.recv().map_err(|error| error.to_string())?;
    seized.map_err(|error| format!("cannot trace {process}: {error}"))
}

/// Resumes each traced thread that has stopped, until all have ended.
fn trace(state: &Mutex<State>) {
    let mut waiting: Vec<(Instant, Pid)> = Vec::new();
    loop {
        let mut flags = WaitPidFlag::__WALL | WaitPidFlag::__WNOTHREAD;
        if !waiting.is_empty() {
            flags |= WaitPidFlag::WNOHANG;
        }
        match waitpid(Pid::from_raw(-1), Some(flags)) {
            Ok(WaitStatus::PtraceEvent(thread, _, libc::PTRACE_EVENT_SECCOMP)) => {
                waiting.extend(handle(thread, state).map(|until| (until, thread)));
            }
            // A new thread, or a stop of all threads.
            Ok(WaitStatus::PtraceEvent(thread, ..) | WaitStatus::PtraceSyscall(thread)) => resume(thread, None),
            Ok(WaitStatus::Stopped(thread, signal)) => resume(thread, Some(signal)),
            Ok(WaitStatus::StillAlive) => thread::sleep(POLL_INTERVAL),
            Err(Errno::ECHILD) => return,
            Ok(_) | Err(_) => {}
        }
        let now = Instant::now();
        for (_, thread) in waiting.extract_if(.., |(until, _)| *until <= now) {
            resume(thread, None);
        }
    }
}

fn resume(thread: Pid, signal: Option<Signal>) {
    // Fails if it was killed meanwhile.
    let _ = ptrace::cont(thread, signal);
}

/// Handles a call before it is made, and resumes its thread, unless it has to wait: until when.
fn handle(thread: Pid, state: &Mutex<State>) -> Option<Instant> {
    // Fails if it was killed meanwhile.
    if let Ok(mut registers) = ptrace::getregs(thread) {
        let call = registers.orig_rax.cast_signed();
        match lock(state).effect_on(thread, call, [registers.rdi, registers.rsi]) {
            Some(Effect::Delay(delay)) => return Some(Instant::now() + delay),
            Some(Effect::Error(error)) => {
                // No call has this number: the kernel makes none, and returns what is in rax.
                registers.orig_rax = u64::MAX;
                registers.rax = (-i64::from(error)).cast_unsigned();
                let _ = ptrace::setregs(thread, registers);
            }
            None => {}
        }
    }
    resume(thread, None);
    None
}

impl State {
    fn begin(&mut self, fault: Option<Fault>) {
        (self.is_counting, self.fault) = (true, fault);
        self.counts.clear();
        self.affected.clear();
    }

    fn end(&mut self) -> String {
        (self.is_counting, self.fault) = (false, None);
        json!({"counts": self.counts, "affected": self.affected}).to_string()
    }

    /// Counts a call of a thread; returns what happens to it.
    fn effect_on(&mut self, thread: Pid, call: i64, arguments: [u64; 2]) -> Option<Effect> {
        self.has_started |= call == STARTED;
        if !self.has_started || !self.is_counting {
            return None;
        }
        let kind = self.kind(thread, call, arguments[0])?;
        let count = self.counts.entry(kind.name).or_default();
        *count += 1;
        let number = *count;
        let fault = self.fault.filter(|fault| fault.affects(kind, number))?;
        if self.affected.len() < MAX_AFFECTED {
            let name = fs::read_to_string(format!("/proc/{thread}/comm")).unwrap_or_default();
            let object = object(thread, kind, arguments).unwrap_or_default();
            self.affected.push(format!("{} {number} of thread {} {object}: {}", kind.name, name.trim(), fault.effect));
        }
        Some(fault.effect)
    }

    fn kind(&mut self, thread: Pid, call: i64, argument: u64) -> Option<&'static Kind> {
        let mut found = None;
        KINDS.iter().filter(|kind| kind.call == call).find(|kind| match kind.target {
            Target::Any => true,
            Target::Argument(value) => i64::from(value) == (argument & 0xffff_ffff).cast_signed(),
            Target::Descriptor(expected) => {
                *found.get_or_insert_with(|| self.sockets.classify(thread, argument)) == expected
            }
        })
    }
}

/// What a call is made on: a path, or a descriptor.
fn object(thread: Pid, kind: &Kind, arguments: [u64; 2]) -> Option<String> {
    if let Target::Descriptor(_) = kind.target {
        return descriptor::link(thread, arguments[0]);
    }
    let [first, second] = arguments;
    match kind.call {
        libc::SYS_execve
        | libc::SYS_lstat
        | libc::SYS_mkdir
        | libc::SYS_open
        | libc::SYS_readlink
        | libc::SYS_rename
        | libc::SYS_stat
        | libc::SYS_unlink => path(thread, first),
        libc::SYS_faccessat
        | libc::SYS_faccessat2
        | libc::SYS_inotify_add_watch
        | libc::SYS_mkdirat
        | libc::SYS_newfstatat
        | libc::SYS_openat
        | libc::SYS_readlinkat
        | libc::SYS_renameat
        | libc::SYS_renameat2
        | libc::SYS_statx
        | libc::SYS_unlinkat => path(thread, second),
        _ => None,
    }
}

/// A path in the memory of a thread.
fn path(thread: Pid, address: u64) -> Option<String> {
    let memory = File::open(format!("/proc/{thread}/mem")).ok()?;
    let mut bytes = [0; MAX_PATH];
    let length = memory.read_at(&mut bytes, address).ok()?;
    let text = bytes[..length].split(|byte| *byte == 0).next()?;
    Some(String::from_utf8_lossy(text).into_owned())
}

/// Executes a command, once a tracer is attached to this process; returns only if that fails.
pub fn run(command: &[String]) -> io::Error {
    let Some((program, arguments)) = command.split_first() else { return io::ErrorKind::InvalidInput.into() };
    match wait_for_tracer().and_then(|()| install_filter()) {
        Ok(()) => Command::new(program).args(arguments).exec(),
        Err(error) => error,
    }
}

/// Without a tracer, the filter's calls would fail with ENOSYS.
fn wait_for_tracer() -> io::Result<()> {
    let deadline = Instant::now() + ATTACH_TIMEOUT;
    while Instant::now() < deadline {
        let status = fs::read_to_string("/proc/self/status")?;
        let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:"));
        if tracer.is_some_and(|pid| pid.trim() != "0") {
            return Ok(());
        }
        thread::sleep(POLL_INTERVAL);
    }
    Err(io::Error::new(io::ErrorKind::TimedOut, "no tracer has attached"))
}

/// Reports the calls of all kinds to the tracer.
fn install_filter() -> io::Result<()> {
    let calls = KINDS.iter().map(|kind| kind.call).chain([STARTED]);
    let rules = calls.map(|call| (call, Vec::new())).collect();
    let architecture = TargetArch::try_from(std::env::consts::ARCH).map_err(io::Error::other)?;
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, SeccompAction::Trace(0), architecture);
    let program = BpfProgram::try_from(filter.map_err(io::Error::other)?).map_err(io::Error::other)?;
    seccompiler::apply_filter(&program).map_err(io::Error::other)
}
