//! Policy servers on hosts of the world.

use std::fmt::Write as _;
use std::fs;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use vipgate::lab::{Host, Process};

use crate::{binary, wait_for};

/// A policy server that is to run.
#[derive(Clone, Copy, Debug)]
pub struct Plan<'a> {
    /// What its files are called.
    pub name: &'a str,
    /// Where gateways reach it.
    pub listen: &'a str,
    /// Port of its metrics on loopback.
    pub metrics: u16,
    /// More lines of YAML for its configuration. Without `source:`, it reads the world's policy files.
    pub more: &'a str,
}

impl Default for Plan<'_> {
    fn default() -> Self {
        Self { name: "policyd", listen: "127.0.0.1:18000", metrics: 9470, more: "" }
    }
}

/// A running policy server; killed when dropped.
#[derive(Debug)]
pub struct Policyd {
    process: Process,
    host: Host,
    log: PathBuf,
    metrics: u16,
}

impl Policyd {
    /// Starts one on a host, with its files in `folder`, and waits until it is ready.
    pub fn start(host: &Host, folder: &Path, plan: Plan<'_>) -> Self {
        Self::start_under(&[], host, folder, plan)
    }

    /// The same behind another command, such as `env` with variables.
    pub fn start_under(wrapper: &[String], host: &Host, folder: &Path, plan: Plan<'_>) -> Self {
        let Plan { name, listen, metrics, more } = plan;
        let mut text = format!(
            "listen: \"{listen}\"\nmetrics: {{listen: \"127.0.0.1:{metrics}\"}}\nlog: {{format: json}}\n{more}\n"
        );
        if !more.lines().any(|line| line.starts_with("source:")) {
            writeln!(text, "source: {{files: [{}/policy]}}", folder.display()).unwrap();
        }
        let (config, log) = (folder.join(format!("{name}.yaml")), folder.join(format!("{name}.log")));
        fs::write(&config, text).unwrap();
        let program = binary().display().to_string();
        let config = config.display().to_string();
        let wrapper = wrapper.iter().map(String::as_str);
        let command: Vec<&str> = wrapper.chain([program.as_str(), "policyd", "--config", &config]).collect();
        let process = host.spawn(&command, &log).unwrap();
        let mut started = Self { process, host: host.clone(), log, metrics };
        let come = || started.log().contains("\"event\":\"ready\"") || !started.process.is_alive();
        let came_up = wait_for(Duration::from_secs(20), come);
        let said = started.log();
        assert!(came_up && started.process.is_alive(), "the policy server is not ready; it said:\n{said}");
        started
    }

    /// Its process.
    pub fn process(&mut self) -> &mut Process {
        &mut self.process
    }

    /// Kills it at once.
    pub fn kill(mut self) {
        self.process.signal("KILL").unwrap();
        self.process.wait(Duration::from_secs(5)).expect("it is dead");
    }

    /// What it has logged.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Waits until a line of its log has all of these words.
    pub fn wait_for_log(&self, words: &[&str]) {
        let said = || self.log().lines().any(|line| words.iter().all(|word| line.contains(word)));
        assert!(wait_for(Duration::from_secs(10), said), "no line with {words:?} in:\n{}", self.log());
    }

    /// The sum of a metric's values over all labels that contain `labels`.
    pub fn metric(&self, name: &str, labels: &str) -> f64 {
        metric(&self.host, self.metrics, name, labels)
    }
}

/// The sum of a metric's values over all labels that contain `labels`, from a port on a host's loopback.
pub(crate) fn metric(host: &Host, port: u16, name: &str, labels: &str) -> f64 {
    let (_, text) = get(host, port, "/metrics").unwrap();
    let values: Vec<&str> = values(&text, name, labels).collect();
    assert!(!values.is_empty(), "no metric {name} with {labels} in:\n{text}");
    values.iter().map(|value| value.parse::<f64>().unwrap()).sum()
}

/// The values of a metric in this text, of all labels that contain `labels`.
pub(crate) fn values<'a>(text: &'a str, name: &str, labels: &str) -> impl Iterator<Item = &'a str> {
    let is_it = move |line: &&str| {
        line.strip_prefix(name).is_some_and(|rest| rest.starts_with([' ', '{'])) && line.contains(labels)
    };
    text.lines().filter(is_it).map(|line| line.rsplit(' ').next().unwrap_or_default())
}

/// Asks a web server on a host's loopback: the status, and what it says.
pub(crate) fn get(host: &Host, port: u16, path: &str) -> io::Result<(u16, String)> {
    let request = format!("GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n");
    let asked = host.run(move || {
        let mut stream = TcpStream::connect(SocketAddr::from(([127, 0, 0, 1], port)))?;
        stream.write_all(request.as_bytes())?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    });
    let text = asked.join().unwrap()?;
    let status = text.split(' ').nth(1).and_then(|status| status.parse().ok());
    Ok((status.ok_or_else(|| io::Error::other(text.clone()))?, text))
}
