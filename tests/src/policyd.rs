//! Policy servers on the testbed's hosts.

use std::fmt::Write as _;
use std::fs;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::Duration;

use vipgate_lab::{Host, Process, READY};

use crate::{binary, wait_for};

/// Configuration of a policy server.
#[derive(Clone, Copy, Debug)]
pub struct PolicydConfig<'a> {
    /// Base name of its files.
    pub name: &'a str,
    /// Listen address for gateways.
    pub listen: &'a str,
    /// Port of its metrics on loopback.
    pub metrics: u16,
    /// Extra YAML for its configuration. Without `source:` it reads the testbed's policy files.
    pub extra: &'a str,
}

impl Default for PolicydConfig<'_> {
    fn default() -> Self {
        Self { name: "policyd", listen: "127.0.0.1:18000", metrics: 9470, extra: "" }
    }
}

/// A running policy server; killed on drop.
#[derive(Debug)]
pub struct Policyd {
    process: Process,
    host: Host,
    metrics: u16,
}

impl Policyd {
    /// Starts a server on a host, with its files in `folder`, and waits until it is ready.
    pub fn start(host: &Host, folder: &Path, settings: PolicydConfig<'_>) -> Self {
        Self::start_with_wrapper(&[], host, folder, settings)
    }

    /// The same with a command prefix, such as `env` with variables.
    pub fn start_with_wrapper(wrapper: &[String], host: &Host, folder: &Path, settings: PolicydConfig<'_>) -> Self {
        let mut server = Self::spawn_with_wrapper(wrapper, host, folder, settings);
        server.process.wait_for_log(READY, Duration::from_secs(20)).unwrap_or_else(|error| panic!("{error}"));
        server
    }

    /// Starts a server without waiting.
    pub fn spawn(host: &Host, folder: &Path, settings: PolicydConfig<'_>) -> Self {
        Self::spawn_with_wrapper(&[], host, folder, settings)
    }

    /// The same with a command prefix.
    pub fn spawn_with_wrapper(wrapper: &[String], host: &Host, folder: &Path, settings: PolicydConfig<'_>) -> Self {
        let PolicydConfig { name, listen, metrics, extra } = settings;
        let mut text = format!(
            "listen: \"{listen}\"\nmetrics: {{listen: \"127.0.0.1:{metrics}\"}}\nlog: {{format: json}}\n{extra}\n"
        );
        if !extra.lines().any(|line| line.starts_with("source:")) {
            writeln!(text, "source: {{files: [{}/policy]}}", folder.display()).unwrap();
        }
        if !extra.lines().any(|line| line.starts_with("state:")) {
            writeln!(text, "state: {}/{name}-state", folder.display()).unwrap();
        }
        let (config, log) = (folder.join(format!("{name}.yaml")), folder.join(format!("{name}.log")));
        fs::write(&config, text).unwrap();
        let program = binary().display().to_string();
        let config = config.display().to_string();
        let wrapper = wrapper.iter().map(String::as_str);
        let command: Vec<&str> = wrapper.chain([program.as_str(), "policyd", "--config", &config]).collect();
        let process = host.spawn(&command, &log).unwrap();
        Self { process, host: host.clone(), metrics }
    }

    pub fn process(&mut self) -> &mut Process {
        &mut self.process
    }

    /// Sends SIGKILL and waits for its exit.
    pub fn kill(mut self) {
        self.process.stop("KILL", Duration::from_secs(5)).unwrap().expect("the policy server exits");
    }

    pub fn log(&self) -> String {
        self.process.log()
    }

    /// Waits for a log line that contains all of these words: longer than a server waits that goes on with the record of
    /// addresses of another one, which may happen twice in a row.
    pub fn wait_for_log(&self, words: &[&str]) {
        let found = || self.log().lines().any(|line| words.iter().all(|word| line.contains(word)));
        assert!(wait_for(Duration::from_secs(30), found), "no line with {words:?} in:\n{}", self.log());
    }

    /// The sum of a metric's values over all labels that contain `labels`.
    pub fn metric(&self, name: &str, labels: &str) -> f64 {
        metric(&self.host, self.metrics, name, labels)
    }
}

/// The sum of a metric's values over all labels that contain `labels`, scraped from a port on a host's loopback.
pub(crate) fn metric(host: &Host, port: u16, name: &str, labels: &str) -> f64 {
    let (_, text) = http_get(host, port, "/metrics").unwrap();
    let values: Vec<&str> = metric_values(&text, name, labels).collect();
    assert!(!values.is_empty(), "no metric {name} with {labels} in:\n{text}");
    values.iter().map(|value| value.parse::<f64>().unwrap()).sum()
}

/// The values of a metric in a scrape, over all labels that contain `labels`.
pub(crate) fn metric_values<'a>(text: &'a str, name: &str, labels: &str) -> impl Iterator<Item = &'a str> {
    let matches = move |line: &&str| {
        line.strip_prefix(name).is_some_and(|rest| rest.starts_with([' ', '{'])) && line.contains(labels)
    };
    text.lines().filter(matches).map(|line| line.rsplit(' ').next().unwrap_or_default())
}

/// HTTP GET on a host's loopback: the status and the whole response.
pub(crate) fn http_get(host: &Host, port: u16, path: &str) -> io::Result<(u16, String)> {
    let request = format!("GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n");
    let response = host.run(move || {
        let mut stream = TcpStream::connect(SocketAddr::from(([127, 0, 0, 1], port)))?;
        stream.write_all(request.as_bytes())?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    });
    let text = response.join().unwrap()?;
    let status = text.split(' ').nth(1).and_then(|status| status.parse().ok());
    Ok((status.ok_or_else(|| io::Error::other(text.clone()))?, text))
}
