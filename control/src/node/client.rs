//! Client of the agent's admin API, for the command line.

use std::io;
use std::path::{Path, PathBuf};

use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};

use super::proto;
use super::proto::node_client::NodeClient;
use crate::admin::ClientError;
use crate::admin::client::{REPLY_TIMEOUT, call, timeout_at};

/// A connection to an agent.
#[derive(Debug)]
pub(crate) struct Client {
    path: PathBuf,
    inner: NodeClient<Channel>,
}

impl Client {
    /// Connects to the agent at a socket.
    pub(crate) async fn connect(path: &Path) -> Result<Self, ClientError> {
        // Connected directly first: tonic's error hides the cause.
        drop(timeout_at(path, UnixStream::connect(path)).await?.map_err(|error| unreachable(path, error))?);
        let target = path.to_owned();
        let connector = tower::service_fn(move |_: Uri| {
            let target = target.clone();
            async move { UnixStream::connect(target).await.map(hyper_util::rt::TokioIo::new) }
        });
        // A placeholder: the connector ignores the address.
        let endpoint = Endpoint::from_static("http://node.invalid");
        let channel = timeout_at(path, endpoint.connect_with_connector(connector)).await?;
        let channel =
            channel.map_err(|error| ClientError::Connection { path: path.to_owned(), reason: error.to_string() })?;
        Ok(Self { path: path.to_owned(), inner: NodeClient::new(channel) })
    }

    pub(crate) async fn status(mut self) -> Result<proto::StatusReply, ClientError> {
        call(&self.path, REPLY_TIMEOUT, self.inner.status(proto::StatusRequest {})).await
    }

    pub(crate) async fn endpoints(mut self) -> Result<proto::EndpointsReply, ClientError> {
        call(&self.path, REPLY_TIMEOUT, self.inner.endpoints(proto::EndpointsRequest {})).await
    }

    pub(crate) async fn trace(mut self, request: proto::TraceRequest) -> Result<proto::TraceReply, ClientError> {
        call(&self.path, REPLY_TIMEOUT, self.inner.trace(request)).await
    }
}

fn unreachable(path: &Path, error: io::Error) -> ClientError {
    let hint = match error.kind() {
        io::ErrorKind::NotFound => "there is no such socket: is an agent running, with this `admin.socket`?",
        io::ErrorKind::ConnectionRefused => "connection refused: no agent runs there any more",
        io::ErrorKind::PermissionDenied => "only root and the socket's group have access",
        _ => "cannot connect to an agent",
    };
    ClientError::Unreachable { path: path.to_owned(), hint, error }
}
