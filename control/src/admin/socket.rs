//! The socket's file and the server behind it. The file appears in one step with its final mode, takes the place of a
//! dead gateway's but never of a living one's or of anything else, and goes with the gateway.

use std::fs;
use std::io;
use std::net::Ipv4Addr;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;
use tonic::transport::server::Connected;

use super::client::Client;
use super::proto::admin_server::AdminServer;
use super::server;
use crate::failure::Failure;
use crate::gateway::state::GatewayState;
use crate::listener::{self, Guard, Pace, Reserve, Room};

/// Root and the socket's group may ask; nobody else.
const MODE: u32 = 0o660;
const FOLDER_MODE: u32 = 0o755;
/// How long connections may take to end when the gateway stops.
const GRACE: Duration = Duration::from_millis(500);
/// How long another gateway may take to say who it is.
const INTRODUCTION: Duration = Duration::from_secs(1);

/// The admin socket can't be had.
#[derive(Debug, Error)]
pub enum SocketError {
    /// A living gateway has it.
    #[error("admin.socket: {who} answers on {} already; give each gateway its own socket", .path.display())]
    Taken {
        /// Where.
        path: PathBuf,
        /// Who.
        who: String,
    },
    /// Something else has its name.
    #[error("admin.socket: {} exists and is no socket; name another file", .0.display())]
    NotASocket(PathBuf),
    /// The file system refuses.
    #[error("admin.socket: cannot {what} {}: {error}", .path.display())]
    Refused {
        /// What.
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
}

impl From<SocketError> for Failure {
    fn from(error: SocketError) -> Self {
        Self::runtime(error)
    }
}

/// The open socket; its file goes with it.
#[derive(Debug)]
pub struct Socket {
    listener: UnixListener,
    file: SocketFile,
}

#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    /// Device and inode: the name may belong to somebody else by the time that we leave.
    identity: (u64, u64),
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if fs::symlink_metadata(&self.path).is_ok_and(|found| (found.dev(), found.ino()) == self.identity) {
            // Somebody may have removed it before us.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Opens the socket, in place of one that a dead gateway left.
///
/// # Errors
/// When a living gateway has it, something else has its name, or the file system refuses.
pub async fn bind(path: &Path) -> Result<Socket, SocketError> {
    let refused = |what, error| SocketError::Refused { what, path: path.to_owned(), error };
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        let made = fs::DirBuilder::new().recursive(true).mode(FOLDER_MODE).create(folder);
        made.map_err(|error| refused("make the folder of", error))?;
    }
    refuse_others(path).await?;
    // Made under another name: nobody meets it with the wrong mode, and what a dead gateway left is replaced in one step.
    let mut draft = path.as_os_str().to_owned();
    draft.push("~");
    let draft = PathBuf::from(draft);
    match fs::remove_file(&draft) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(refused("make room beside", error)),
        _ => {}
    }
    let listener = UnixListener::bind(&draft).map_err(|error| refused("open", error))?;
    let found = fs::symlink_metadata(&draft).map_err(|error| refused("look at", error))?;
    // Removes the draft should anything fail from here on.
    let mut file = SocketFile { path: draft.clone(), identity: (found.dev(), found.ino()) };
    let mode = fs::Permissions::from_mode(MODE);
    fs::set_permissions(&draft, mode).map_err(|error| refused("set the mode of", error))?;
    fs::rename(&draft, path).map_err(|error| refused("put in place", error))?;
    path.clone_into(&mut file.path);
    Ok(Socket { listener, file })
}

/// Nobody lives at this path, and nothing but a socket would be replaced.
async fn refuse_others(path: &Path) -> Result<(), SocketError> {
    let refused = |what, error| SocketError::Refused { what, path: path.to_owned(), error };
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(refused("look at", error)),
        Ok(found) if !found.file_type().is_socket() => return Err(SocketError::NotASocket(path.to_owned())),
        Ok(_) => {}
    }
    match UnixStream::connect(path).await {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        // So busy that it takes no more connections, but alive.
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            Err(SocketError::Taken { path: path.to_owned(), who: "a busy process".to_owned() })
        }
        Err(error) => Err(refused("find out who has", error)),
        Ok(_) => {
            let other = tokio::time::timeout(INTRODUCTION, Client::connect(path)).await;
            let who = match other {
                Ok(Ok(client)) => format!("the gateway {} (pid {})", client.status().name, client.status().pid),
                _ => "another process".to_owned(),
            };
            Err(SocketError::Taken { path: path.to_owned(), who })
        }
    }
}

/// Answers on the socket until told to stop.
pub async fn serve(state: Arc<GatewayState>, socket: Socket, stop: watch::Receiver<bool>) {
    let Socket { listener, file: _file } = socket;
    let (accepted, connections) = mpsc::channel(1);
    let accepting = accept(listener, state.rooms.admin.clone(), accepted);
    // The sender is gone, or says so: both mean stop.
    let stopped = |mut stop: watch::Receiver<bool>| async move { drop(stop.wait_for(|stop| *stop).await) };
    let server = Server::builder()
        .add_service(AdminServer::new(server::Service::new(state)))
        .serve_with_incoming_shutdown(ReceiverStream::new(connections), stopped(stop.clone()));
    let grace = async {
        stopped(stop).await;
        tokio::time::sleep(GRACE).await;
    };
    tokio::select! {
        result = server => if let Err(error) = result {
            tracing::error!(%error, "the admin socket has failed");
        },
        () = accepting => {}
        () = grace => {}
    }
}

impl Connected for Guard<UnixStream> {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

/// Takes connections for the server. Commands get through when nobody else gets descriptors any more: some are kept for them.
async fn accept(listener: UnixListener, room: Arc<Room>, server: mpsc::Sender<io::Result<Guard<UnixStream>>>) {
    let mut reserve = Reserve::new();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                // Every command comes from this host.
                let Ok(slot) = room.admit(Ipv4Addr::LOCALHOST.into()) else { continue };
                if server.send(Ok(Guard::new(stream, slot, Pace::Free))).await.is_err() {
                    return std::future::pending().await;
                }
                reserve.refill();
            }
            Err(_) if reserve.give() => {}
            Err(error) => listener::failed(&room, &error).await,
        }
    }
}
