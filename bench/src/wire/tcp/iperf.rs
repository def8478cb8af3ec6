//! iperf3 between the sink's namespace (server) and the source's (client), and its JSON result.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use vipgate_lab::Process;

use super::DataDirection;
use super::losses::Counters;
use crate::wire::testbed::{REMOTE, Testbed};

/// Time that a connection needs to be fast; not measured.
const WARM_UP: Duration = Duration::from_secs(1);
/// Time for the server to listen, for connections to open, and for iperf3 to exchange results.
const START_TIMEOUT: Duration = Duration::from_secs(5);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
const RESULT_TIMEOUT: Duration = Duration::from_secs(8);
const PORT: &str = "5201";

/// Result of a transfer.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Goodput {
    /// Payload that the receiver's application read, in Gbit/s.
    pub(super) gbps: f64,
    pub(super) seconds: f64,
    /// Segments that the sender's kernel sent again.
    pub(super) retransmits: u64,
    /// CPU usage of the sender's and of the receiver's iperf3, in cores.
    pub(super) cpu: [f64; 2],
    /// What vipgate counted meanwhile: drops by reason, hand-offs.
    pub(super) counters: Counters,
    /// Packets that interfaces and the kernel's backlog lost meanwhile.
    pub(super) lost: Counters,
}

/// Sends for a while over parallel connections.
pub(super) fn run(testbed: &Testbed, streams: u32, direction: DataDirection, duration: Duration) -> Result<Goodput> {
    let directory = vipgate_lab::directory().context("cannot create a directory for iperf3")?;
    let _server = start_server(testbed, directory.path())?;
    let [seconds, warm_up] = [duration, WARM_UP].map(|it| it.as_secs().to_string());
    let limit = (WARM_UP + duration + CONNECT_TIMEOUT + RESULT_TIMEOUT).as_secs();
    let reverse = if direction == DataDirection::Download { "--reverse" } else { "" };
    // iperf3 reports errors in its JSON, and exits with 1 then.
    let command = format!(
        "timeout --kill-after=1 {limit} iperf3 --client {REMOTE} --port {PORT} --json --time {seconds} --omit {warm_up} \
         --parallel {streams} --connect-timeout {} {reverse} || true",
        CONNECT_TIMEOUT.as_millis()
    );
    let output = testbed.source.output(&["sh", "-c", &command])?;
    ensure!(!output.trim().is_empty(), "iperf3 printed no result within {limit} s: no data passed");
    parse(&output)
}

/// Starts a server of one test and waits until it listens.
fn start_server(testbed: &Testbed, directory: &Path) -> Result<Process> {
    let command = ["iperf3", "--server", "--one-off", "--port", PORT];
    let mut server = testbed.sink.spawn(&command, &directory.join("server.log"))?;
    let sockets = || testbed.sink.output(&["ss", "-Hltn", &format!("sport = :{PORT}")]);
    server.wait_ready(START_TIMEOUT, || sockets().is_ok_and(|listening| !listening.trim().is_empty()))?;
    Ok(server)
}

/// Reads the client's JSON.
fn parse(output: &str) -> Result<Goodput> {
    let result: Value = serde_json::from_str(output).context("iperf3 printed no JSON")?;
    if let Some(error) = result["error"].as_str() {
        bail!("iperf3: {error}");
    }
    let end = &result["end"];
    let number = |value: &Value, name: &str| value.as_f64().with_context(|| format!("iperf3's result has no {name}"));
    let bits = number(&end["sum_received"]["bits_per_second"], "end.sum_received.bits_per_second")?;
    let seconds = number(&end["sum_received"]["seconds"], "end.sum_received.seconds")?;
    let retransmits = &end["sum_sent"]["retransmits"];
    let retransmits = retransmits.as_u64().context("iperf3's result has no end.sum_sent.retransmits")?;
    let usage = &end["cpu_utilization_percent"];
    let [local, remote] = ["host_total", "remote_total"].map(|name| usage[name].as_f64().unwrap_or_default() / 100.0);
    // The client's own usage is the receiver's if the server sends.
    let client_sends = result["start"]["test_start"]["reverse"].as_u64() != Some(1);
    let cpu = if client_sends { [local, remote] } else { [remote, local] };
    Ok(Goodput { gbps: bits / 1e9, seconds, retransmits, cpu, counters: Counters::new(), lost: Counters::new() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn goodput_is_what_the_receiver_read() {
        let output = r#"{"start": {"test_start": {"reverse": 1}}, "end": {
            "sum_sent": {"bits_per_second": 2.5e9, "retransmits": 7},
            "sum_received": {"bits_per_second": 2.0e9, "seconds": 3.0},
            "cpu_utilization_percent": {"host_total": 30.0, "remote_total": 70.0}}}"#;
        let goodput = parse(output).unwrap();
        assert_eq!((goodput.gbps, goodput.retransmits, goodput.cpu), (2.0, 7, [0.7, 0.3]));
    }

    #[test]
    fn errors_of_iperf3_are_reported() {
        let error = parse(r#"{"start": {}, "end": {}, "error": "unable to connect to server"}"#).unwrap_err();
        assert_eq!(error.to_string(), "iperf3: unable to connect to server");
        assert!(parse("").is_err());
        assert!(parse(r#"{"end": {}}"#).is_err());
    }
}
