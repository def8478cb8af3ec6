//! The admin socket: gRPC on a Unix socket, for the command line and whoever else may open the file.

mod server;
mod sessions;

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Channel, Endpoint, Server, Uri};

use crate::failure::Failure;
use crate::gateway::state::GatewayState;
use proto::admin_client::AdminClient;
use proto::admin_server::AdminServer;

/// The generated messages and services.
#[expect(missing_docs, unused_qualifications, clippy::pedantic, reason = "generated; the .proto file has the comments")]
pub mod proto {
    tonic::include_proto!("vipgate.admin.v1");
}

/// Of the interface: raised when an older client would misunderstand.
pub const PROTOCOL: u32 = 1;

/// The open socket; its file goes with it.
#[derive(Debug)]
pub struct Socket {
    listener: UnixListener,
    file: SocketFile,
}

#[derive(Debug)]
struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Somebody may have removed it before us.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Opens the socket, in place of one that a dead gateway left.
///
/// # Errors
/// When a living gateway has it, or the file system refuses.
pub async fn bind(path: &Path) -> Result<Socket, Failure> {
    let failed = |what: &str, error: io::Error| {
        Failure::runtime(format_args!("admin.socket: cannot {what} {}: {error}", path.display()))
    };
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(|error| failed("make the folder of", error))?;
    }
    if UnixStream::connect(path).await.is_ok() {
        return Err(Failure::runtime(format_args!("admin.socket: another gateway answers on {}", path.display())));
    }
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed("replace", error)),
        _ => {}
    }
    let listener = UnixListener::bind(path).map_err(|error| failed("open", error))?;
    let file = SocketFile(path.to_owned());
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o660))
        .map_err(|error| failed("set the mode of", error))?;
    Ok(Socket { listener, file })
}

/// Answers on the socket until told to stop.
pub async fn serve(state: Arc<GatewayState>, socket: Socket, mut stop: watch::Receiver<bool>) {
    let Socket { listener, file: _file } = socket;
    let service = AdminServer::new(server::Service { state });
    let stopped = async move {
        // The sender is gone, or says so: both mean stop.
        let _ = stop.wait_for(|stop| *stop).await;
    };
    let server = Server::builder().add_service(service);
    let result = tokio::select! {
        result = server.serve_with_incoming(UnixListenerStream::new(listener)) => result,
        () = stopped => Ok(()),
    };
    if let Err(error) = result {
        tracing::error!(%error, "the admin socket has failed");
    }
}

/// Connects to a gateway.
///
/// # Errors
/// When nobody answers there, or it speaks another version of the interface.
pub async fn connect(path: &Path) -> Result<AdminClient<Channel>, Failure> {
    let nobody = |error: io::Error| {
        let hint = match error.kind() {
            io::ErrorKind::NotFound => "there is no such socket: is a gateway running, with this `admin.socket`?",
            io::ErrorKind::ConnectionRefused => "nobody answers: the gateway that made it is gone",
            io::ErrorKind::PermissionDenied => "permission denied: only root and the socket's group may ask",
            _ => "cannot connect",
        };
        Failure::runtime(format_args!("{}: {hint} ({error})", path.display()))
    };
    // Tried once by hand, because the error that the library gives hides the cause.
    drop(UnixStream::connect(path).await.map_err(nobody)?);
    let target = path.to_owned();
    let connector = tower::service_fn(move |_: Uri| {
        let target = target.clone();
        async move { UnixStream::connect(target).await.map(hyper_util::rt::TokioIo::new) }
    });
    // The address is never looked at: the connector knows where to go.
    let endpoint = Endpoint::from_static("http://gateway.invalid");
    let channel = endpoint.connect_with_connector(connector).await.map_err(Failure::runtime)?;
    Ok(AdminClient::new(channel))
}
