//! Client of an admin socket, for the command line. Every reply has a timeout, and every error names the socket and the
//! probable cause.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;
use tokio::io::{AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::protocol::{AGENT, Answer, GATEWAY, Greeting, PROTOCOL, RequestError, encode, read_line};
use crate::command_error::CommandError;

/// Timeout of a reply. Longer than the gateway's own timeout for its workers.
pub(crate) const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// Limit of a reply in bytes: enough for a million endpoints.
const MAX_REPLY_BYTES: usize = 512 << 20;

/// A request to a gateway has failed.
#[derive(Debug, Error)]
pub enum ClientError {
    /// The socket can't be connected to.
    #[error("{}: {hint} ({error})", .path.display())]
    Unreachable {
        /// The socket.
        path: PathBuf,
        /// Probable cause.
        hint: String,
        /// The kernel's error.
        error: io::Error,
    },
    /// Connected, but no reply.
    #[error("{}: no reply within {seconds} s; is the listener a vipgate gateway?", .path.display())]
    Timeout {
        /// The socket.
        path: PathBuf,
        /// The timeout.
        seconds: u64,
    },
    /// Protocol error or broken connection.
    #[error("{}: {reason}; the gateway has stopped, or another program listens there", .path.display())]
    Connection {
        /// The socket.
        path: PathBuf,
        /// The error.
        reason: String,
    },
    /// A gateway of another version.
    #[error(
        "{}: the gateway is {theirs}, this command is vipgate {} with version {PROTOCOL}; use the command of the \
         gateway's version",
        .path.display(), env!("CARGO_PKG_VERSION")
    )]
    Version {
        /// The socket.
        path: PathBuf,
        /// Version of the gateway.
        theirs: String,
    },
    /// The gateway rejected the request as invalid.
    #[error("{0}")]
    InvalidRequest(String),
    /// The gateway couldn't execute the request.
    #[error("{}: {reason}", .path.display())]
    Rejected {
        /// The socket.
        path: PathBuf,
        reason: String,
    },
}

impl From<ClientError> for CommandError {
    fn from(error: ClientError) -> Self {
        match error {
            ClientError::InvalidRequest(_) => Self::usage(error),
            _ => Self::runtime(error),
        }
    }
}

/// A connection to a gateway or an agent with the same version of the admin API. One request at a time.
#[derive(Debug)]
pub struct Client {
    path: PathBuf,
    stream: BufReader<UnixStream>,
    /// What has arrived of a line.
    line: Vec<u8>,
    name: String,
}

impl Client {
    /// Connects to a gateway and checks the version of the admin API.
    ///
    /// # Errors
    /// When there is no gateway, or it has another version of the API.
    pub async fn connect(path: &Path) -> Result<Self, ClientError> {
        Self::connect_to(GATEWAY, path).await
    }

    /// Connects to the agent of a node.
    pub(crate) async fn connect_agent(path: &Path) -> Result<Self, ClientError> {
        Self::connect_to(AGENT, path).await
    }

    async fn connect_to(service: &str, path: &Path) -> Result<Self, ClientError> {
        let stream = timeout_at(path, REPLY_TIMEOUT, UnixStream::connect(path)).await?;
        let stream = stream.map_err(|error| unreachable(service, path, error))?;
        let (client, greeting) = Self::greeted(path, stream).await?;
        if greeting.protocol == PROTOCOL && greeting.service == service {
            return Ok(Self { name: greeting.name, ..client });
        }
        let theirs = match greeting.protocol {
            PROTOCOL => "one that doesn't support this request".to_owned(),
            theirs => format!("vipgate {} with version {theirs} of the admin API", greeting.version),
        };
        Err(ClientError::Version { path: path.to_owned(), theirs })
    }

    /// Reads the greeting of any service, of any version.
    async fn greeted(path: &Path, stream: UnixStream) -> Result<(Self, Greeting), ClientError> {
        let stream = BufReader::new(stream);
        let mut client = Self { path: path.to_owned(), stream, line: Vec::new(), name: String::new() };
        let greeting = client.read(REPLY_TIMEOUT).await?;
        Ok((client, greeting))
    }

    /// The service that listens on a socket.
    pub(super) async fn identify(path: &Path, stream: UnixStream) -> Result<Greeting, ClientError> {
        Ok(Self::greeted(path, stream).await?.1)
    }

    /// Name of the gateway or node.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sends a request that has one reply, and returns it.
    ///
    /// # Errors
    /// When the request is invalid, or fails.
    pub async fn ask<T: DeserializeOwned>(&mut self, request: &impl Serialize) -> Result<T, ClientError> {
        self.ask_within(REPLY_TIMEOUT, request).await
    }

    /// Like `ask`, with a timeout of its own.
    pub(crate) async fn ask_within<T: DeserializeOwned>(
        &mut self,
        limit: Duration,
        request: &impl Serialize,
    ) -> Result<T, ClientError> {
        self.send(request).await?;
        let reply = self.next_within(limit).await?.ok_or_else(|| self.connection_error("an answer without a reply"))?;
        match self.next_within::<T>(REPLY_TIMEOUT).await? {
            None => Ok(reply),
            Some(_) => Err(self.connection_error("an answer of several replies")),
        }
    }

    /// Sends a request that has several replies, to be read by [`Client::next`].
    ///
    /// # Errors
    /// When the connection is broken.
    pub async fn send(&mut self, request: &impl Serialize) -> Result<(), ClientError> {
        let Self { path, stream, .. } = self;
        let sent = timeout_at(path, REPLY_TIMEOUT, async { stream.write_all(&encode(request)?).await }).await?;
        sent.map_err(|error| self.connection_error(&broken(&error)))
    }

    /// The next reply; `None` at the end. Cancel-safe.
    ///
    /// # Errors
    /// When the request is invalid or fails, or the gateway stops or times out.
    pub async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, ClientError> {
        self.next_within(REPLY_TIMEOUT).await
    }

    async fn next_within<T: DeserializeOwned>(&mut self, limit: Duration) -> Result<Option<T>, ClientError> {
        match self.read(limit).await? {
            Answer::Reply(reply) => Ok(Some(reply)),
            Answer::End => Ok(None),
            Answer::Error(RequestError::Invalid(reason)) => Err(ClientError::InvalidRequest(reason)),
            Answer::Error(RequestError::Refused(reason) | RequestError::Unavailable(reason)) => {
                Err(ClientError::Rejected { path: self.path.clone(), reason })
            }
        }
    }

    async fn read<T: DeserializeOwned>(&mut self, limit: Duration) -> Result<T, ClientError> {
        let read = timeout_at(&self.path, limit, read_line(&mut self.stream, MAX_REPLY_BYTES, &mut self.line)).await?;
        let parsed = match read {
            Ok(true) => serde_json::from_slice(&self.line).map_err(|error| format!("not a reply of vipgate: {error}")),
            Ok(false) => Err(broken(&io::ErrorKind::UnexpectedEof.into())),
            Err(error) => Err(broken(&error)),
        };
        self.line.clear();
        parsed.map_err(|reason| self.connection_error(&reason))
    }

    fn connection_error(&self, reason: &str) -> ClientError {
        ClientError::Connection { path: self.path.clone(), reason: reason.to_owned() }
    }
}

fn broken(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
            "the connection broke".to_owned()
        }
        _ => error.to_string(),
    }
}

async fn timeout_at<T>(path: &Path, limit: Duration, future: impl Future<Output = T>) -> Result<T, ClientError> {
    let elapsed = |_| ClientError::Timeout { path: path.to_owned(), seconds: limit.as_secs() };
    timeout(limit, future).await.map_err(elapsed)
}

fn unreachable(service: &str, path: &Path, error: io::Error) -> ClientError {
    let article = if service == AGENT { "an" } else { "a" };
    let hint = match error.kind() {
        io::ErrorKind::NotFound => {
            format!("there is no such socket: is {article} {service} running, with this `admin.socket`?")
        }
        io::ErrorKind::ConnectionRefused => format!("connection refused: no {service} runs there any more"),
        io::ErrorKind::PermissionDenied => "only root and the socket's group have access".to_owned(),
        io::ErrorKind::WouldBlock => {
            format!("the {service} accepts no more connections: it is stuck or overloaded")
        }
        _ => format!("cannot connect to {article} {service}"),
    };
    ClientError::Unreachable { path: path.to_owned(), hint, error }
}
