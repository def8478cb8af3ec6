//! Line clients and their server: traffic whose payloads identify the client, and the results of each client.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use vipgate_lab::{Host, Process, download};

use super::LINE_PORT;
use crate::{built_program, wait_for};

/// Configuration of a set of line clients.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ClientConfig<'a> {
    /// Server address and port.
    #[serde(borrow)]
    pub server: (&'a str, u16),
    /// Their addresses, round-robin; empty: the host's own.
    pub source_addresses: Vec<String>,
    /// Number of clients.
    pub count: u32,
    /// Clients started per second.
    pub rate: u32,
    /// Maximum number of concurrent clients.
    pub max_concurrent: u32,
    /// Lines that each client sends; 0: until the end.
    pub lines: u32,
    /// Distribution of the intervals between lines: (percent of clients, shortest, longest) in seconds.
    pub intervals: Vec<(u32, f64, f64)>,
    /// Reply timeout in seconds.
    pub timeout: u32,
    /// Length of a line in bytes.
    pub line_length: u32,
    /// Whether clients that have sent all their lines keep their port until the end.
    pub keep_port: bool,
    /// UDP instead of TCP.
    pub udp: bool,
}

impl Default for ClientConfig<'_> {
    fn default() -> Self {
        Self {
            server: (super::SERVER[0], LINE_PORT),
            source_addresses: Vec::new(),
            count: 1,
            rate: 1000,
            max_concurrent: u32::MAX,
            lines: 0,
            intervals: vec![(100, 0.05, 0.2)],
            timeout: 10,
            line_length: 16,
            keep_port: false,
            udp: false,
        }
    }
}

impl ClientConfig<'_> {
    /// UDP flows with short intervals, which measure outages.
    pub fn probes(to: &str, sources: Vec<String>, count: u32) -> ClientConfig<'_> {
        ClientConfig {
            server: (to, LINE_PORT),
            source_addresses: sources,
            count,
            intervals: vec![(100, 0.02, 0.03)],
            udp: true,
            ..ClientConfig::default()
        }
    }

    /// Held connections, one in twenty of which sends often; together no more load than a small machine bears.
    pub fn held_connections(to: &str, sources: Vec<String>, count: u32) -> ClientConfig<'_> {
        // 5000 connections send 2600 lines a second: twice as many saturate two cores, and then queues, not gateways, delay
        // replies.
        ClientConfig {
            server: (to, LINE_PORT),
            source_addresses: sources,
            count,
            rate: 1500,
            intervals: vec![(5, 0.1, 0.2), (95, 4.0, 6.0)],
            timeout: 15,
            ..ClientConfig::default()
        }
    }

    /// Connections that send one line and close.
    pub fn short_connections(to: &str, sources: Vec<String>, count: u32, rate: u32) -> ClientConfig<'_> {
        ClientConfig {
            server: (to, LINE_PORT),
            source_addresses: sources,
            count,
            rate,
            max_concurrent: 500,
            lines: 1,
            ..ClientConfig::default()
        }
    }

    pub(crate) fn reply_timeout(&self) -> Duration {
        Duration::from_secs(u64::from(self.timeout))
    }
}

/// Running line clients.
#[derive(Debug)]
pub struct Clients {
    process: Process,
    log: PathBuf,
    result: PathBuf,
    count: u32,
}

impl Clients {
    /// Starts clients. `name` names their files; identities are numbered from `first`, and must be unique in a test.
    pub fn start(folder: &Path, host: &Host, name: &str, first: u32, traffic: &ClientConfig<'_>) -> Self {
        let file = |extension: &str| folder.join(format!("clients-{name}.{extension}"));
        let (config, result, log) = (file("config"), file("json"), file("log"));
        fs::write(&config, serde_json::to_vec(&(first, traffic)).unwrap()).unwrap();
        let (config, output) = (config.display().to_string(), result.display().to_string());
        let process = host.spawn(&[&line_traffic(), "clients", &config, &output], &log).unwrap();
        Self { process, log, result, count: traffic.count }
    }

    /// Complete lines of their output.
    fn output(&self) -> String {
        let mut output = fs::read_to_string(&self.log).unwrap();
        output.truncate(output.rfind('\n').map_or(0, |end| end + 1));
        output
    }

    /// Waits until all clients have started, and got a reply or timed out.
    pub fn wait_started(&mut self, timeout: Duration) {
        let have_started = self.have_started(timeout);
        assert!(have_started, "not all of {} clients have started: {}", self.count, self.output());
    }

    fn have_started(&mut self, timeout: Duration) -> bool {
        wait_for(timeout, || self.output().contains("open ") || !self.process.is_alive())
    }

    /// Waits until all clients have started and got a reply.
    pub fn wait_established(&mut self, timeout: Duration) {
        self.have_started(timeout);
        if self.output().contains(&format!("open {}\n", self.count)) {
            return;
        }
        self.stop();
        self.process.wait(Duration::from_secs(20));
        let failed: Vec<Client> =
            self.read().into_iter().filter(|client| client.lines[1] == 0 || !client.succeeded()).collect();
        panic!(
            "{} of {} clients got no reply, at {}: {:?}",
            failed.len(),
            self.count,
            unix_time(),
            &failed[..failed.len().min(5)]
        );
    }

    fn read(&self) -> Vec<Client> {
        serde_json::from_str(&fs::read_to_string(&self.result).unwrap()).unwrap()
    }

    /// Stops the clients; their results.
    pub fn end(self) -> ClientResults {
        self.stop();
        self.wait(Duration::from_mins(1))
    }

    /// Stops sending, and waits for outstanding replies in the background.
    pub fn stop(&self) {
        self.process.signal("TERM").unwrap();
    }

    /// Stops several sets of clients at the same time.
    pub fn end_all<const N: usize>(clients: [Self; N]) -> [ClientResults; N] {
        clients.iter().for_each(Self::stop);
        clients.map(|clients| clients.wait(Duration::from_mins(1)))
    }

    /// Waits until the clients finish on their own.
    pub fn wait(mut self, timeout: Duration) -> ClientResults {
        let exited = self.process.wait(timeout);
        assert!(exited.is_some_and(|status| status.success()), "the clients don't finish: {}", self.output());
        ClientResults(self.read())
    }
}

/// Result of one client.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Client {
    /// Its identity, in every payload.
    pub identity: String,
    /// Its address, if configured.
    pub source: String,
    /// Start time, seconds since the epoch.
    pub started_at: f64,
    /// Mean interval between lines, seconds.
    pub interval: f64,
    /// Lines sent and answered.
    pub lines: [u64; 2],
    /// The longest wait for a reply in seconds, and the time at which it ended. Over TCP it includes the connect, over UDP
    /// it is the longest time without a reply.
    pub longest_wait: [f64; 2],
    /// `alive`, `done`, `silent`, or the error that ended it.
    pub end: String,
    /// Received replies to other clients or out of order.
    pub misdelivered: u64,
    /// When datagrams without a reply were sent, seconds since the epoch.
    pub lost: Vec<f64>,
}

impl Client {
    /// Whether it ended without an error.
    pub fn succeeded(&self) -> bool {
        self.end == "alive" || self.end == "done"
    }
}

/// Results of a set of clients.
#[derive(Clone, Debug)]
pub struct ClientResults(pub Vec<Client>);

impl ClientResults {
    /// Clients that had been running for `age` at a time.
    #[must_use]
    pub fn established_before(&self, age: f64, time: f64) -> Self {
        Self(self.0.iter().filter(|client| client.started_at + age <= time).cloned().collect())
    }

    /// Clients that started after a time.
    #[must_use]
    pub fn started_after(&self, time: f64) -> Self {
        Self(self.0.iter().filter(|client| client.started_at > time).cloned().collect())
    }

    /// Number of clients, and number of failed ones.
    pub fn total_and_failed(&self) -> [usize; 2] {
        [self.0.len(), self.0.iter().filter(|client| !client.succeeded()).count()]
    }

    /// Asserts that at least this percentage succeeded.
    pub fn check_survived(&self, percent: usize) {
        let [all, lost] = self.total_and_failed();
        assert!(all > 0 && lost * 100 <= all * (100 - percent), "{}", self.summary());
    }

    /// The longest wait of clients with at most this interval, in seconds.
    pub fn longest_wait(&self, max_interval: f64) -> f64 {
        self.0
            .iter()
            .filter(|client| client.interval <= max_interval)
            .map(|client| client.longest_wait[0])
            .fold(0.0, f64::max)
    }

    /// The 99th percentile of their longest waits.
    pub fn p99_wait(&self, max_interval: f64) -> f64 {
        let mut waits: Vec<f64> = self
            .0
            .iter()
            .filter(|client| client.interval <= max_interval)
            .map(|client| client.longest_wait[0])
            .collect();
        waits.sort_by(f64::total_cmp);
        waits.get((waits.len() * 99).saturating_sub(1) / 100).copied().unwrap_or_default()
    }

    /// When the first client started, seconds since the epoch.
    #[must_use]
    pub fn first_started(&self) -> f64 {
        self.0.iter().map(|client| client.started_at).fold(f64::INFINITY, f64::min)
    }

    /// The ten longest waits in seconds, and when they ended, in seconds after an event.
    pub fn describe_longest_waits(&self, event: f64) -> String {
        let mut waits: Vec<[f64; 2]> = self.0.iter().map(|client| client.longest_wait).collect();
        waits.sort_by(|a, b| b[0].total_cmp(&a[0]));
        let waits: Vec<String> =
            waits.iter().take(10).map(|[wait, end]| format!("{wait:.3} until {:.3}", end - event)).collect();
        format!("longest waits in seconds, until seconds after the event: {}", waits.join(", "))
    }

    /// Asserts that no client received a reply to another.
    pub fn check_no_misdelivery(&self) {
        let affected: Vec<&Client> = self.0.iter().filter(|client| client.misdelivered > 0).collect();
        assert!(affected.is_empty(), "{} clients received other replies, such as {:?}", affected.len(), affected[0]);
    }

    /// Asserts that all clients succeeded.
    pub fn check_all_succeeded(&self) {
        self.check_no_misdelivery();
        let failed: Vec<&Client> = self.0.iter().filter(|client| !client.succeeded()).collect();
        assert!(
            failed.is_empty(),
            "{} of {} failed, such as {:?}",
            failed.len(),
            self.0.len(),
            &failed[..failed.len().min(3)]
        );
    }

    /// Summary in one line.
    pub fn summary(&self) -> String {
        let mut ends = std::collections::BTreeMap::new();
        for client in &self.0 {
            *ends.entry(client.end.as_str()).or_insert(0) += 1;
        }
        let frequent = 0.2;
        format!(
            "{} clients {ends:?}; wait of frequent senders: {:.3} s at most, {:.3} s at p99",
            self.0.len(),
            self.longest_wait(frequent),
            self.p99_wait(frequent)
        )
    }
}

/// A line server on a host.
#[derive(Debug)]
pub struct LineServer {
    process: Process,
    record: PathBuf,
}

/// A client as the server saw it: a connection, or the datagrams of an address, port and identity.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ServerRecord {
    /// Whether over UDP.
    pub udp: bool,
    /// Its address and port at the server.
    pub peer: (String, u16),
    /// The server address that it used.
    pub local: String,
    /// The identity in its payloads.
    pub identity: String,
    /// Lines or datagrams.
    pub lines: u64,
    /// Lines of another client or out of order, over TCP.
    pub errors: u64,
}

impl LineServer {
    /// Starts a server and waits until it listens.
    pub fn start(folder: &Path, host: &Host) -> Self {
        Self::start_at(folder, host, LINE_PORT)
    }

    /// The same on another port.
    pub fn start_at(folder: &Path, host: &Host, port: u16) -> Self {
        let file = |extension: &str| folder.join(format!("lines-{}.{extension}", host.name()));
        let (log, record) = (file("log"), file("json"));
        let (port, output) = (port.to_string(), record.display().to_string());
        let mut process = host.spawn(&[&line_traffic(), "server", &port, &output], &log).unwrap();
        process.wait_for_log("listening", Duration::from_secs(10)).unwrap_or_else(|error| panic!("{error}"));
        Self { process, record }
    }

    /// Stops the server; the clients that it has seen.
    pub fn end(mut self) -> Vec<ServerRecord> {
        self.process.stop("TERM", Duration::from_secs(20)).unwrap().expect("the server exits");
        serde_json::from_str(&fs::read_to_string(&self.record).unwrap()).unwrap()
    }
}

/// The program that runs clients and servers, see [`crate::lines`].
fn line_traffic() -> String {
    let path = built_program("line-traffic");
    assert!(path.exists(), "{} is missing: build it first (`make build` does)", path.display());
    path.display().to_string()
}

/// A download with verified content.
#[derive(Debug)]
pub struct Download(download::Download);

impl Download {
    /// Starts a download of `bytes` from an address of a server, at most `rate` bytes per second.
    pub fn start(server: &Host, address: &str, client: &Host, bytes: u64, rate: u64) -> Self {
        let at = SocketAddr::new(address.parse().unwrap(), LINE_PORT + 1);
        Self(download::Download::start(server, at, client, bytes, rate).unwrap())
    }

    /// Waits for its end. Asserts that all content was right; returns the longest time in seconds without data.
    pub fn end(self) -> f64 {
        let outcome = self.0.finish().unwrap();
        assert!(outcome.is_intact, "{outcome:?}");
        outcome.longest_gap.as_secs_f64()
    }
}

/// The current time in seconds since the epoch, the clock of the clients.
pub fn unix_time() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64()
}
