//! Line traffic: clients that send numbered lines, and a server that returns each of them.
//!
//! ```text
//!   00000017 000042......\n     identity of the client, number of the line, padding
//! ```
//! Lines are the payload of TCP and UDP alike, and name their sender: misdelivered replies and clients that share an
//! address and port are detected. Waits for replies measure outages of gateways, so they must not contain waits for the
//! CPU: one thread bears thousands of clients. The program `line-traffic` runs both in the namespaces of a lab, see
//! [`crate::cluster::Clients`] and [`crate::cluster::LineServer`].

mod clients;
mod server;
mod socket;
#[cfg(test)]
mod tests;

use std::path::Path;
use std::{fs, io};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::signal::unix::{SignalKind, signal};

use self::server::Server;
use crate::cluster::ClientConfig;
use crate::verifier::client_identity;

/// Runs clients until they have sent all their lines, or until SIGTERM. Prints `open N` when all have started and,
/// without a number of lines, N got a reply and the others timed out or failed.
///
/// `config` has the identity of the first client and their [`ClientConfig`], as JSON, `result` gets a list of
/// [`crate::cluster::Client`].
///
/// # Errors
/// When a file can't be read or written, or an address of the configuration is invalid.
pub fn run_clients(config: &Path, result: &Path) -> io::Result<()> {
    raise_file_limit()?;
    // Clients refer to it until the process ends.
    let text: &'static str = fs::read_to_string(config)?.leak();
    let (first, config): (u32, ClientConfig<'static>) = serde_json::from_str(text)?;
    let clients = block_on(async { clients::run(first, config, terminated()?).await })?;
    fs::write(result, serde_json::to_vec(&clients)?)
}

/// Runs the server until SIGTERM: lines over TCP and UDP on `port`. Prints `listening`. `record` gets a list of
/// [`crate::cluster::ServerRecord`], as JSON.
///
/// # Errors
/// When a port is in use, or the record can't be written.
pub fn run_server(port: u16, record: &Path) -> io::Result<()> {
    raise_file_limit()?;
    let records = block_on(async {
        let stop = terminated()?;
        let server = Server::bind(port)?;
        println!("listening");
        server.run(stop).await
    })?;
    fs::write(record, serde_json::to_vec(&records)?)
}

/// Allows this process as many open files as the system does.
fn raise_file_limit() -> io::Result<()> {
    let maximum = getrlimit(Resource::Nofile).maximum;
    Ok(setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?)
}

/// Runs a future and its tasks on this thread.
fn block_on<T>(future: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(future)
}

/// Catches SIGTERM from now on; the future waits for it.
fn terminated() -> io::Result<impl Future<Output = ()>> {
    let mut signal = signal(SignalKind::terminate())?;
    Ok(async move {
        signal.recv().await;
    })
}

/// A line of this length, or a longer one if identity and number need more.
fn encode(identity: u32, number: u64, length: usize) -> Vec<u8> {
    let mut line = format!("{identity:08} {number:06}").into_bytes();
    line.resize(line.len().max(length.saturating_sub(1)), b'.');
    line.push(b'\n');
    line
}

/// Identity and number in a line without its end.
fn decode(line: &[u8]) -> Option<(u32, u64)> {
    let identity = client_identity(line)?;
    let text = std::str::from_utf8(line).ok()?;
    let number = text.get(9..)?.trim_end_matches('.');
    Some((identity, number.parse().ok()?))
}

/// Removes all whole lines from a buffer, and handles each without its end.
fn take_lines(buffer: &mut Vec<u8>, mut handle: impl FnMut(&[u8])) {
    let mut start = 0;
    while let Some(length) = buffer[start..].iter().position(|byte| *byte == b'\n') {
        handle(&buffer[start..start + length]);
        start += length + 1;
    }
    buffer.drain(..start);
}
