//! Client of the admin API, for the command line. Every request has a timeout, and every error names the socket and the
//! probable cause.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use thiserror::Error;
use tokio::net::UnixStream;
use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Response, Status, Streaming};

use super::proto::admin_client::AdminClient;
use super::{PROTOCOL, proto};
use crate::command_error::CommandError;

/// Timeout of a reply or its next chunk. Longer than the gateway's own timeout for its workers.
pub(crate) const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout of a flush, which scans the whole session table before it replies.
const FLUSH_TIMEOUT: Duration = Duration::from_mins(5);
/// Limit of a reply in bytes: enough for a million endpoints.
const MAX_REPLY_BYTES: usize = 256 << 20;

/// A request to a gateway has failed.
#[derive(Debug, Error)]
pub enum ClientError {
    /// The socket can't be connected to.
    #[error("{}: {hint} ({error})", .path.display())]
    Unreachable {
        /// The socket.
        path: PathBuf,
        /// Probable cause.
        hint: &'static str,
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

/// A connection to a gateway with the same version of the admin API.
#[derive(Debug)]
pub struct Client {
    path: PathBuf,
    inner: AdminClient<Channel>,
    status: proto::StatusReply,
}

impl Client {
    /// Connects and checks the version of the admin API.
    ///
    /// # Errors
    /// When there is no gateway, or it has another version of the API.
    pub async fn connect(path: &Path) -> Result<Self, ClientError> {
        let channel = open_channel(path, unreachable).await?;
        let mut inner = AdminClient::new(channel).max_decoding_message_size(MAX_REPLY_BYTES);
        let status = call(path, REPLY_TIMEOUT, inner.status(proto::StatusRequest {})).await?;
        if status.protocol != PROTOCOL {
            let theirs = format!("vipgate {} with version {} of the admin API", status.version, status.protocol);
            return Err(ClientError::Version { path: path.to_owned(), theirs });
        }
        Ok(Self { path: path.to_owned(), inner, status })
    }

    /// The gateway's status at the time of the connection.
    pub fn status(&self) -> &proto::StatusReply {
        &self.status
    }

    /// Streams matching sessions in chunks; `limit` 0: all.
    ///
    /// # Errors
    /// When the filter is invalid, or the request fails.
    pub async fn sessions(mut self, filter: proto::SessionFilter, limit: u64) -> Result<SessionStream, ClientError> {
        let request = proto::SessionsRequest { filter: Some(filter), limit };
        let stream = call(&self.path, REPLY_TIMEOUT, self.inner.sessions(request)).await?;
        Ok(SessionStream { path: self.path, stream })
    }

    /// Ends matching sessions; the reply has their number.
    ///
    /// # Errors
    /// When the filter is invalid, or the request fails.
    pub async fn flush(&mut self, filter: proto::SessionFilter) -> Result<proto::FlushSessionsReply, ClientError> {
        let request = proto::FlushSessionsRequest { filter: Some(filter) };
        call(&self.path, FLUSH_TIMEOUT, self.inner.flush_sessions(request)).await
    }

    /// The VIPs.
    ///
    /// # Errors
    /// When the request fails.
    pub async fn vips(&mut self) -> Result<proto::VipsReply, ClientError> {
        call(&self.path, REPLY_TIMEOUT, self.inner.vips(proto::VipsRequest {})).await
    }

    /// The endpoints.
    ///
    /// # Errors
    /// When the request fails.
    pub async fn endpoints(&mut self) -> Result<proto::EndpointsReply, ClientError> {
        call(&self.path, REPLY_TIMEOUT, self.inner.endpoints(proto::EndpointsRequest {})).await
    }

    /// The Services.
    ///
    /// # Errors
    /// When the request fails.
    pub async fn services(&mut self) -> Result<proto::ServicesReply, ClientError> {
        call(&self.path, REPLY_TIMEOUT, self.inner.services(proto::ServicesRequest {})).await
    }

    /// The gateways.
    ///
    /// # Errors
    /// When the request fails.
    pub async fn peers(&mut self) -> Result<proto::PeersReply, ClientError> {
        call(&self.path, REPLY_TIMEOUT, self.inner.peers(proto::PeersRequest {})).await
    }

    /// Drains or undrains the gateway; with `dry_run`, only lists the shards that would move.
    ///
    /// # Errors
    /// When no other gateway could take over, or the request fails.
    pub async fn drain(&mut self, draining: bool, dry_run: bool) -> Result<proto::DrainReply, ClientError> {
        call(&self.path, REPLY_TIMEOUT, self.inner.drain(proto::DrainRequest { draining, dry_run })).await
    }

    /// The placement in force.
    ///
    /// # Errors
    /// When the gateway has no policy yet, or the request fails.
    pub async fn placement(&mut self) -> Result<proto::PlacementReply, ClientError> {
        call(&self.path, REPLY_TIMEOUT, self.inner.placement(proto::PlacementRequest {})).await
    }

    /// Accepts policy files that have become empty.
    ///
    /// # Errors
    /// When none has, or the request fails.
    pub async fn accept_empty(&mut self) -> Result<proto::AcceptEmptyReply, ClientError> {
        call(&self.path, REPLY_TIMEOUT, self.inner.accept_empty(proto::AcceptEmptyRequest {})).await
    }

    /// The ports of all VIPs.
    ///
    /// # Errors
    /// When the request fails.
    pub async fn ports(&mut self) -> Result<proto::PortsReply, ClientError> {
        call(&self.path, REPLY_TIMEOUT, self.inner.ports(proto::PortsRequest {})).await
    }

    /// Traces a packet through the live tables.
    ///
    /// # Errors
    /// When the packet is invalid, or the request fails.
    pub async fn trace(&mut self, request: proto::TraceRequest) -> Result<proto::TraceReply, ClientError> {
        call(&self.path, REPLY_TIMEOUT, self.inner.trace(request)).await
    }

    /// Explains how policy handles an address.
    ///
    /// # Errors
    /// When the address is invalid, or the request fails.
    pub async fn explain(&mut self, address: String) -> Result<proto::ExplainReply, ClientError> {
        call(&self.path, REPLY_TIMEOUT, self.inner.explain(proto::ExplainRequest { address })).await
    }

    /// Starts a packet capture.
    ///
    /// # Errors
    /// When the filter is invalid, another capture is running, or the request fails.
    pub async fn capture(mut self, request: proto::CaptureRequest) -> Result<PacketStream, ClientError> {
        let stream = call(&self.path, REPLY_TIMEOUT, self.inner.capture(request)).await?;
        Ok(PacketStream { path: self.path, stream })
    }

    /// Drops by reason, every reason.
    ///
    /// # Errors
    /// When the request fails.
    pub async fn drops(&mut self) -> Result<proto::DropsReply, ClientError> {
        call(&self.path, REPLY_TIMEOUT, self.inner.drops(proto::DropsRequest {})).await
    }
}

/// A stream of session chunks.
#[derive(Debug)]
pub struct SessionStream {
    path: PathBuf,
    stream: Streaming<proto::SessionsReply>,
}

impl SessionStream {
    /// The next chunk, which may be empty; `None` at the end.
    ///
    /// # Errors
    /// When the gateway fails or times out.
    pub async fn next(&mut self) -> Result<Option<Vec<proto::Session>>, ClientError> {
        let chunk = timeout_at(&self.path, self.stream.message()).await?;
        Ok(chunk.map_err(|status| client_error(&self.path, &status))?.map(|chunk| chunk.sessions))
    }
}

/// A stream of captured packets; dropping it ends the capture.
#[derive(Debug)]
pub struct PacketStream {
    path: PathBuf,
    stream: Streaming<proto::CaptureReply>,
}

impl PacketStream {
    /// The next packets, possibly none; `None` at the end. Cancel-safe.
    ///
    /// # Errors
    /// When the gateway stops or times out.
    pub async fn next(&mut self) -> Result<Option<proto::CaptureReply>, ClientError> {
        let reply = timeout_at(&self.path, self.stream.message()).await?;
        reply.map_err(|status| client_error(&self.path, &status))
    }
}

async fn timeout_at<T>(path: &Path, future: impl Future<Output = T>) -> Result<T, ClientError> {
    let elapsed = |_| ClientError::Timeout { path: path.to_owned(), seconds: REPLY_TIMEOUT.as_secs() };
    timeout(REPLY_TIMEOUT, future).await.map_err(elapsed)
}

pub(crate) async fn call<T>(
    path: &Path,
    limit: Duration,
    future: impl Future<Output = Result<Response<T>, Status>>,
) -> Result<T, ClientError> {
    let elapsed = |_| ClientError::Timeout { path: path.to_owned(), seconds: limit.as_secs() };
    let response = timeout(limit, future).await.map_err(elapsed)?;
    response.map(Response::into_inner).map_err(|status| client_error(path, &status))
}

/// Connects to the socket of a gateway or an agent; `unreachable` names the probable cause of the kernel's error.
pub(crate) async fn open_channel(
    path: &Path,
    unreachable: fn(&Path, io::Error) -> ClientError,
) -> Result<Channel, ClientError> {
    // Connected directly first: tonic's error hides the cause.
    drop(timeout_at(path, UnixStream::connect(path)).await?.map_err(|error| unreachable(path, error))?);
    let target = path.to_owned();
    let connector = tower::service_fn(move |_: Uri| {
        let target = target.clone();
        async move { UnixStream::connect(target).await.map(hyper_util::rt::TokioIo::new) }
    });
    // A placeholder: the connector ignores the address.
    let endpoint = Endpoint::from_static("http://admin.invalid");
    let channel = timeout_at(path, endpoint.connect_with_connector(connector)).await?;
    channel.map_err(|error| ClientError::Connection { path: path.to_owned(), reason: error.to_string() })
}

fn unreachable(path: &Path, error: io::Error) -> ClientError {
    let hint = match error.kind() {
        io::ErrorKind::NotFound => "there is no such socket: is a gateway running, with this `admin.socket`?",
        io::ErrorKind::ConnectionRefused => "connection refused: no gateway runs there any more",
        io::ErrorKind::PermissionDenied => "only root and the socket's group have access",
        io::ErrorKind::WouldBlock => "the gateway accepts no more connections: it is stuck or overloaded",
        _ => "cannot connect to a gateway",
    };
    ClientError::Unreachable { path: path.to_owned(), hint, error }
}

fn client_error(path: &Path, status: &Status) -> ClientError {
    let path = path.to_owned();
    match status.code() {
        Code::InvalidArgument => ClientError::InvalidRequest(status.message().to_owned()),
        Code::Unimplemented => {
            ClientError::Version { path, theirs: "one that doesn't support this request".to_owned() }
        }
        // Only local errors have a source; the gateway's own arrive as text.
        _ if std::error::Error::source(status).is_some() => {
            ClientError::Connection { path, reason: "the connection broke".to_owned() }
        }
        _ => ClientError::Rejected { path, reason: status.message().to_owned() },
    }
}
