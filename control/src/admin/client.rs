//! The client of the admin socket: what the command line asks with. Every wait has an end, and every failure says which
//! socket and what is probably wrong there.

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
use crate::failure::Failure;

/// The longest wait for an answer or its next slice. A gateway gives its workers less than that.
const PATIENCE: Duration = Duration::from_secs(10);
/// The longest wait for a flush, which goes through the whole table before it answers.
const FLUSH_PATIENCE: Duration = Duration::from_mins(5);
/// The longest answer, bytes: room for a million endpoints.
const LONGEST: usize = 256 << 20;

/// A gateway can't be asked.
#[derive(Debug, Error)]
pub enum ClientError {
    /// Nobody to connect to.
    #[error("{}: {hint} ({error})", .path.display())]
    Unreachable {
        /// Which socket.
        path: PathBuf,
        /// What it probably is.
        hint: &'static str,
        /// What the kernel says.
        error: io::Error,
    },
    /// Connected, but no answer.
    #[error("{}: no answer within {seconds} s; is it a vipgate gateway that listens there?", .path.display())]
    Silent {
        /// Which socket.
        path: PathBuf,
        /// How long.
        seconds: u64,
    },
    /// Something that isn't the expected protocol, or a connection that broke.
    #[error("{}: {reason}; the gateway has stopped, or something else listens there", .path.display())]
    Broken {
        /// Which socket.
        path: PathBuf,
        /// What is known.
        reason: String,
    },
    /// A gateway of another version.
    #[error(
        "{}: the gateway is {theirs}, this command is vipgate {} with version {PROTOCOL}; use the command that came \
         with the gateway",
        .path.display(), env!("CARGO_PKG_VERSION")
    )]
    Version {
        /// Which socket.
        path: PathBuf,
        /// What the gateway is.
        theirs: String,
    },
    /// The gateway found the question wrong.
    #[error("{0}")]
    Question(String),
    /// The gateway couldn't answer.
    #[error("{}: {reason}", .path.display())]
    Refused {
        /// Which socket.
        path: PathBuf,
        /// Why.
        reason: String,
    },
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        match error {
            ClientError::Question(_) => Self::usage(error),
            _ => Self::runtime(error),
        }
    }
}

/// A connection to a gateway that speaks our version.
#[derive(Debug)]
pub struct Client {
    path: PathBuf,
    inner: AdminClient<Channel>,
    status: proto::StatusReply,
}

impl Client {
    /// Connects, and sees that both understand each other.
    ///
    /// # Errors
    /// When nobody answers there, or it speaks another version of the interface.
    pub async fn connect(path: &Path) -> Result<Self, ClientError> {
        // Tried once by hand, because the error that the library gives hides the cause.
        drop(timeout_at(path, UnixStream::connect(path)).await?.map_err(|error| unreachable(path, error))?);
        let target = path.to_owned();
        let connector = tower::service_fn(move |_: Uri| {
            let target = target.clone();
            async move { UnixStream::connect(target).await.map(hyper_util::rt::TokioIo::new) }
        });
        // The address is never looked at: the connector knows where to go.
        let endpoint = Endpoint::from_static("http://gateway.invalid");
        let channel = timeout_at(path, endpoint.connect_with_connector(connector)).await?;
        let channel =
            channel.map_err(|error| ClientError::Broken { path: path.to_owned(), reason: error.to_string() })?;
        let mut inner = AdminClient::new(channel).max_decoding_message_size(LONGEST);
        let status = answer(path, PATIENCE, inner.status(proto::StatusRequest {})).await?;
        if status.protocol != PROTOCOL {
            let theirs = format!("vipgate {} with version {} of the admin interface", status.version, status.protocol);
            return Err(ClientError::Version { path: path.to_owned(), theirs });
        }
        Ok(Self { path: path.to_owned(), inner, status })
    }

    /// What the gateway said of itself when we connected.
    pub fn status(&self) -> &proto::StatusReply {
        &self.status
    }

    /// Sessions that match, in slices; `limit` 0 is all.
    ///
    /// # Errors
    /// When the filter means nothing, or there is no answer.
    pub async fn sessions(mut self, filter: proto::SessionFilter, limit: u64) -> Result<Slices, ClientError> {
        let request = proto::SessionsRequest { filter: Some(filter), limit };
        let stream = answer(&self.path, PATIENCE, self.inner.sessions(request)).await?;
        Ok(Slices { path: self.path, stream })
    }

    /// Ends sessions that match; says how many.
    ///
    /// # Errors
    /// When the filter means nothing, or there is no answer.
    pub async fn flush(&mut self, filter: proto::SessionFilter) -> Result<proto::FlushSessionsReply, ClientError> {
        let request = proto::FlushSessionsRequest { filter: Some(filter) };
        answer(&self.path, FLUSH_PATIENCE, self.inner.flush_sessions(request)).await
    }

    /// The VIPs.
    ///
    /// # Errors
    /// When there is no answer.
    pub async fn vips(&mut self) -> Result<proto::VipsReply, ClientError> {
        answer(&self.path, PATIENCE, self.inner.vips(proto::VipsRequest {})).await
    }

    /// The endpoints.
    ///
    /// # Errors
    /// When there is no answer.
    pub async fn endpoints(&mut self) -> Result<proto::EndpointsReply, ClientError> {
        answer(&self.path, PATIENCE, self.inner.endpoints(proto::EndpointsRequest {})).await
    }

    /// The Services.
    ///
    /// # Errors
    /// When there is no answer.
    pub async fn services(&mut self) -> Result<proto::ServicesReply, ClientError> {
        answer(&self.path, PATIENCE, self.inner.services(proto::ServicesRequest {})).await
    }

    /// The gateways.
    ///
    /// # Errors
    /// When there is no answer.
    pub async fn peers(&mut self) -> Result<proto::PeersReply, ClientError> {
        answer(&self.path, PATIENCE, self.inner.peers(proto::PeersRequest {})).await
    }

    /// Lets the gateway stop serving, or serve again; of a dry run, what would move.
    ///
    /// # Errors
    /// When nobody could serve in its place, or there is no answer.
    pub async fn drain(&mut self, draining: bool, dry_run: bool) -> Result<proto::DrainReply, ClientError> {
        answer(&self.path, PATIENCE, self.inner.drain(proto::DrainRequest { draining, dry_run })).await
    }

    /// Takes the policy's files at their word where they are empty.
    ///
    /// # Errors
    /// When they are empty nowhere, or there is no answer.
    pub async fn accept_empty(&mut self) -> Result<proto::AcceptEmptyReply, ClientError> {
        answer(&self.path, PATIENCE, self.inner.accept_empty(proto::AcceptEmptyRequest {})).await
    }

    /// The ports of all VIPs.
    ///
    /// # Errors
    /// When there is no answer.
    pub async fn ports(&mut self) -> Result<proto::PortsReply, ClientError> {
        answer(&self.path, PATIENCE, self.inner.ports(proto::PortsRequest {})).await
    }

    /// What would become of a packet.
    ///
    /// # Errors
    /// When there can be no such packet, or there is no answer.
    pub async fn trace(&mut self, request: proto::TraceRequest) -> Result<proto::TraceReply, ClientError> {
        answer(&self.path, PATIENCE, self.inner.trace(request)).await
    }

    /// What policy makes of an address.
    ///
    /// # Errors
    /// When it is none, or there is no answer.
    pub async fn explain(&mut self, address: String) -> Result<proto::ExplainReply, ClientError> {
        answer(&self.path, PATIENCE, self.inner.explain(proto::ExplainRequest { address })).await
    }

    /// Begins to capture packets.
    ///
    /// # Errors
    /// When the filter means nothing, somebody else captures, or there is no answer.
    pub async fn capture(mut self, request: proto::CaptureRequest) -> Result<Packets, ClientError> {
        let stream = answer(&self.path, PATIENCE, self.inner.capture(request)).await?;
        Ok(Packets { path: self.path, stream })
    }

    /// Drops by reason, every reason.
    ///
    /// # Errors
    /// When there is no answer.
    pub async fn drops(&mut self) -> Result<proto::DropsReply, ClientError> {
        answer(&self.path, PATIENCE, self.inner.drops(proto::DropsRequest {})).await
    }
}

/// A listing that is under way.
#[derive(Debug)]
pub struct Slices {
    path: PathBuf,
    stream: Streaming<proto::SessionsReply>,
}

impl Slices {
    /// The next slice, which may be empty; `None` at the end.
    ///
    /// # Errors
    /// When the gateway can't go on, or says nothing any more.
    pub async fn next(&mut self) -> Result<Option<Vec<proto::Session>>, ClientError> {
        let slice = timeout_at(&self.path, self.stream.message()).await?;
        Ok(slice.map_err(|status| explain(&self.path, &status))?.map(|slice| slice.sessions))
    }
}

/// A capture that is under way. It ends when this is dropped.
#[derive(Debug)]
pub struct Packets {
    path: PathBuf,
    stream: Streaming<proto::CaptureReply>,
}

impl Packets {
    /// The next packets, or none for a while; `None` at the end. May be dropped and called again.
    ///
    /// # Errors
    /// When the gateway has stopped, or says nothing any more.
    pub async fn next(&mut self) -> Result<Option<proto::CaptureReply>, ClientError> {
        let reply = timeout_at(&self.path, self.stream.message()).await?;
        reply.map_err(|status| explain(&self.path, &status))
    }
}

async fn timeout_at<T>(path: &Path, future: impl Future<Output = T>) -> Result<T, ClientError> {
    let silent = |_| ClientError::Silent { path: path.to_owned(), seconds: PATIENCE.as_secs() };
    timeout(PATIENCE, future).await.map_err(silent)
}

async fn answer<T>(
    path: &Path,
    patience: Duration,
    future: impl Future<Output = Result<Response<T>, Status>>,
) -> Result<T, ClientError> {
    let silent = |_| ClientError::Silent { path: path.to_owned(), seconds: patience.as_secs() };
    let response = timeout(patience, future).await.map_err(silent)?;
    response.map(Response::into_inner).map_err(|status| explain(path, &status))
}

fn unreachable(path: &Path, error: io::Error) -> ClientError {
    let hint = match error.kind() {
        io::ErrorKind::NotFound => "there is no such socket: is a gateway running, with this `admin.socket`?",
        io::ErrorKind::ConnectionRefused => "nobody answers: no gateway runs there any more",
        io::ErrorKind::PermissionDenied => "only root and the socket's group may ask this gateway",
        io::ErrorKind::WouldBlock => "the gateway takes no more connections: it is stuck, or very busy",
        _ => "cannot connect to a gateway",
    };
    ClientError::Unreachable { path: path.to_owned(), hint, error }
}

fn explain(path: &Path, status: &Status) -> ClientError {
    let path = path.to_owned();
    match status.code() {
        Code::InvalidArgument => ClientError::Question(status.message().to_owned()),
        Code::Unimplemented => ClientError::Version { path, theirs: "one that doesn't know this question".to_owned() },
        // Only failures on this side have a cause that is an error value; the gateway's own come as text.
        _ if std::error::Error::source(status).is_some() => {
            ClientError::Broken { path, reason: "the connection broke".to_owned() }
        }
        _ => ClientError::Refused { path, reason: status.message().to_owned() },
    }
}
