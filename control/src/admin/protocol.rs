//! What goes over an admin socket: JSON, a line each. The server greets its client, which then sends a request at a time; the
//! answer is any number of replies and an end, or an error.
//!
//! ```text
//!   server  {"protocol":1,"service":"gateway","version":"0.1.0","name":"gw-a","pid":71}
//!   client  "vips"
//!   server  {"reply":{"vips":[],"session_fair_share":0}}
//!   server  "end"
//! ```

use std::io;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use tokio::io::{AsyncBufRead, AsyncBufReadExt as _, AsyncReadExt as _};

/// Version of the API: raised by each incompatible change.
pub const PROTOCOL: u32 = 1;

/// The services: of a gateway, and of a node's agent.
pub(crate) const GATEWAY: &str = "gateway";
pub(crate) const AGENT: &str = "agent";

/// First line of a connection. Only `protocol` and `version` have the same meaning in every version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Greeting {
    pub protocol: u32,
    #[serde(default)]
    pub service: String,
    /// Of the program.
    pub version: String,
    /// Of the gateway or node.
    #[serde(default)]
    pub name: String,
    #[serde(default)]
    pub pid: u32,
}

impl Greeting {
    /// The greeting of this process.
    pub(crate) fn of(service: &str, name: &str) -> Self {
        Self {
            protocol: PROTOCOL,
            service: service.to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            name: name.to_owned(),
            pid: std::process::id(),
        }
    }
}

/// A line of an answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer<T> {
    Reply(T),
    /// The request failed; nothing follows.
    Error(RequestError),
    /// Nothing follows.
    End,
}

/// Why a request has failed.
#[derive(Clone, Debug, PartialEq, Eq, Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RequestError {
    /// The request itself is invalid.
    #[error("{0}")]
    Invalid(String),
    /// What it asks for isn't there, or isn't allowed in this state.
    #[error("{0}")]
    Refused(String),
    /// It can't be executed now.
    #[error("{0}")]
    Unavailable(String),
}

impl RequestError {
    pub(crate) fn invalid(reason: impl Into<String>) -> Self {
        Self::Invalid(reason.into())
    }

    pub(crate) fn refused(reason: impl Into<String>) -> Self {
        Self::Refused(reason.into())
    }

    pub(crate) fn unavailable(reason: impl Into<String>) -> Self {
        Self::Unavailable(reason.into())
    }
}

/// Encodes a value as a line.
pub(super) fn encode(value: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    Ok(line)
}

/// Reads a line, behind what `line` has of it already; false at the end of the stream. Cancel-safe.
pub(super) async fn read_line(
    stream: &mut (impl AsyncBufRead + Unpin),
    max_bytes: usize,
    line: &mut Vec<u8>,
) -> io::Result<bool> {
    let left = max_bytes.saturating_sub(line.len());
    stream.take(left as u64).read_until(b'\n', line).await?;
    match line.last() {
        Some(b'\n') => Ok(true),
        None => Ok(false),
        Some(_) if line.len() >= max_bytes => Err(io::Error::other(format!("a line of more than {max_bytes} bytes"))),
        Some(_) => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn lines_are_read_up_to_their_limit_and_the_end() {
        let mut stream = &b"one\n\ntwo"[..];
        let mut line = Vec::new();
        assert!(read_line(&mut stream, 4, &mut line).await.unwrap());
        assert_eq!(line, b"one\n");
        line.clear();
        assert!(read_line(&mut stream, 4, &mut line).await.unwrap());
        assert_eq!(line, b"\n");
        line.clear();
        let error = read_line(&mut stream, 4, &mut line).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "a line without its end");
        let error = read_line(&mut &b"three\n"[..], 4, &mut Vec::new()).await.unwrap_err();
        assert_eq!(error.to_string(), "a line of more than 4 bytes");
        assert!(!read_line(&mut &b""[..], 4, &mut Vec::new()).await.unwrap());
    }

    #[tokio::test]
    async fn a_line_that_comes_in_parts_is_read_from_where_it_was_left() {
        let (mut sender, receiver) = tokio::io::duplex(64);
        let (mut stream, mut line) = (tokio::io::BufReader::new(receiver), Vec::new());
        tokio::io::AsyncWriteExt::write_all(&mut sender, b"\"vi").await.unwrap();
        let wait = std::time::Duration::from_millis(20);
        assert!(tokio::time::timeout(wait, read_line(&mut stream, 64, &mut line)).await.is_err());
        tokio::io::AsyncWriteExt::write_all(&mut sender, b"ps\"\n").await.unwrap();
        assert!(read_line(&mut stream, 64, &mut line).await.unwrap());
        assert_eq!(line, b"\"vips\"\n");
    }
}
