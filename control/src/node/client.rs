//! Client of the agent's admin API, for the command line.

use std::io;
use std::path::{Path, PathBuf};

use tonic::transport::Channel;

use super::proto;
use super::proto::node_client::NodeClient;
use crate::admin::ClientError;
use crate::admin::client::{REPLY_TIMEOUT, call, open_channel};

/// A connection to an agent.
#[derive(Debug)]
pub(crate) struct Client {
    path: PathBuf,
    inner: NodeClient<Channel>,
}

impl Client {
    /// Connects to the agent at a socket.
    pub(crate) async fn connect(path: &Path) -> Result<Self, ClientError> {
        let channel = open_channel(path, unreachable).await?;
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
