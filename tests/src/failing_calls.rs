//! Calls that fail or are late: an injector between a real process and the kernel, which needs nothing of the process.
//!
//! ```text
//!   test -- commands by a pipe --> `call-tracer trace` -- ptrace(2) --> the process, executed by `call-tracer run`
//! ```
//! The wrapper `run` installs a seccomp filter that reports the calls of `kinds` to a tracer (`SECCOMP_RET_TRACE`), and
//! executes the process. The tracer counts them by kind, gives some an error in place of their result, and makes others
//! wait. Other calls aren't stopped, nor are those that the process's own filters refuse. SIGSTOP doesn't stop a traced
//! process.

mod descriptor;
pub mod kinds;
mod probes;
pub mod tracer;

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use vipgate_lab::Host;

pub use self::descriptor::Descriptor;
use self::kinds::Kind;
pub use self::probes::{Flow, Probes};
use crate::METRICS_PORT;

/// Time for a process to answer whether it is ready.
const READINESS_TIMEOUT: Duration = Duration::from_secs(1);

/// Calls that fail or are late.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    pub kind: &'static Kind,
    /// The number of the first one of its kind, from 1.
    pub first: u64,
    /// Whether all later ones are affected, too, until the report.
    pub repeats: bool,
    /// What happens to them.
    pub effect: Effect,
}

/// What happens to a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// It does nothing and returns this error.
    Error(i32),
    /// It waits before it is made.
    Delay(Duration),
}

/// What a tracer has counted since its last command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Calls by the name of their kind.
    pub counts: BTreeMap<String, u64>,
    /// The first ones that were affected, described.
    pub affected: Vec<String>,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, first, repeats, effect } = self;
        write!(f, "{} {first}{}: {effect}", kind.name, if *repeats { " and later" } else { "" })
    }
}

impl fmt::Display for Effect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Error(number) => write!(f, "{}", io::Error::from_raw_os_error(*number)),
            Self::Delay(delay) => write!(f, "{} ms late", delay.as_millis()),
        }
    }
}

impl Fault {
    /// Whether a call of a kind is affected, by its number.
    fn affects(&self, kind: &Kind, number: u64) -> bool {
        self.kind.name == kind.name && (number == self.first || self.repeats && number > self.first)
    }

    /// As words of a command.
    fn encode(&self) -> String {
        let (effect, value) = match self.effect {
            Effect::Error(number) => ("error", number.to_string()),
            Effect::Delay(delay) => ("delay", delay.as_millis().to_string()),
        };
        format!("{} {} {} {effect} {value}", self.kind.name, self.first, self.repeats)
    }

    /// From words of a command.
    fn decode(words: &[&str]) -> Option<Self> {
        let [kind, first, repeats, effect, value] = words else { return None };
        let effect = match *effect {
            "error" => Effect::Error(value.parse().ok()?),
            "delay" => Effect::Delay(Duration::from_millis(value.parse().ok()?)),
            _ => return None,
        };
        Some(Self { kind: kinds::find(kind)?, first: first.parse().ok()?, repeats: repeats.parse().ok()?, effect })
    }
}

/// A running tracer. Dropping it kills the processes that it traces.
#[derive(Debug)]
pub struct Injector {
    program: String,
    process: Child,
    commands: ChildStdin,
    replies: BufReader<ChildStdout>,
}

impl Injector {
    /// Starts the tracer, which is the program `call-tracer`.
    pub fn start(program: &str) -> Self {
        let mut command = Command::new(program);
        let mut process = command.arg("trace").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let commands = process.stdin.take().unwrap();
        let replies = BufReader::new(process.stdout.take().unwrap());
        Self { program: program.to_owned(), process, commands, replies }
    }

    /// Command prefix of a process whose calls are to fail. It waits for [`Self::attach`].
    pub fn wrapper(&self) -> Vec<String> {
        vec![self.program.clone(), "run".to_owned()]
    }

    /// Traces a process that has just been started with the wrapper. Its calls count from when its loader has ended.
    pub fn attach(&mut self, pid: u32) {
        self.request(&format!("attach {pid}"));
    }

    /// Counts calls, from now on; none is affected.
    pub fn count(&mut self) {
        self.request("count");
    }

    /// Counts calls, from now on, and affects some.
    pub fn arm(&mut self, fault: &Fault) {
        self.request(&format!("arm {}", fault.encode()));
    }

    /// Ends the last command: no call is affected from now on.
    pub fn report(&mut self) -> Report {
        let report: Value = serde_json::from_str(&self.request("report")).unwrap();
        let counts = report["counts"].as_object().into_iter().flatten();
        let affected = report["affected"].as_array().into_iter().flatten();
        Report {
            counts: counts.map(|(name, count)| (name.clone(), count.as_u64().unwrap_or_default())).collect(),
            affected: affected.filter_map(Value::as_str).map(str::to_owned).collect(),
        }
    }

    fn request(&mut self, command: &str) -> String {
        writeln!(self.commands, "{command}").unwrap();
        let mut reply = String::new();
        self.replies.read_line(&mut reply).unwrap();
        assert!(!reply.is_empty() && !reply.starts_with("error"), "{command}: {reply}");
        reply
    }
}

impl Drop for Injector {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Whether the gateway on a host reports that it is ready. One that hangs isn't waited for.
pub fn is_ready(host: &Host) -> bool {
    let response = host.run(|| {
        let address = SocketAddr::from(([127, 0, 0, 1], METRICS_PORT));
        let mut stream = TcpStream::connect_timeout(&address, READINESS_TIMEOUT)?;
        stream.set_read_timeout(Some(READINESS_TIMEOUT))?;
        stream.write_all(b"GET /readyz HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n")?;
        let mut response = String::new();
        stream.read_to_string(&mut response)?;
        Ok(response)
    });
    response.join().is_ok_and(|response| response.is_ok_and(|text| text.starts_with("HTTP/1.1 200 ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_decoded_as_it_was_encoded() {
        let kind = kinds::find("bpf/map_update").unwrap();
        for (repeats, effect) in [(false, Effect::Error(28)), (true, Effect::Delay(Duration::from_millis(300)))] {
            let fault = Fault { kind, first: 7, repeats, effect };
            let text = fault.encode();
            assert_eq!(Fault::decode(&text.split(' ').collect::<Vec<_>>()), Some(fault), "{text}");
        }
        assert_eq!(Fault::decode(&["nothing", "1", "false", "error", "5"]), None);
    }

    #[test]
    fn a_fault_affects_one_call_or_all_from_it_on() {
        let kind = kinds::find("openat").unwrap();
        let numbers = |repeats| {
            let fault = Fault { kind, first: 2, repeats, effect: Effect::Error(5) };
            (1..5).filter(|number| fault.affects(kind, *number)).collect::<Vec<u64>>()
        };
        assert_eq!((numbers(false), numbers(true)), (vec![2], vec![2, 3, 4]));
        let other = kinds::find("open").unwrap();
        assert!(!Fault { kind, first: 1, repeats: true, effect: Effect::Error(5) }.affects(other, 1));
    }
}
