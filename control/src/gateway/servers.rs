//! The servers of the admin socket and of metrics: started once, before the initial policy, and running until shutdown.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::command_error::CommandError;
use crate::config::Config;
use crate::gateway::background::BackgroundRuntime;
use crate::metrics::Monitored;
use crate::state::GatewayState;
use crate::{admin, metrics};

/// Time for requests in progress when a server stops.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);

/// The running servers. Dropping them removes the socket file, also after a failed startup.
#[derive(Debug)]
pub(super) struct Servers {
    stop: watch::Sender<bool>,
    tasks: [JoinHandle<()>; 2],
    _socket_file: admin::SocketFile,
}

impl Servers {
    /// Opens both listeners and serves them on the background runtime.
    pub(super) async fn start(
        config: &Config,
        state: &Arc<GatewayState>,
        background: &BackgroundRuntime,
    ) -> Result<Self, CommandError> {
        let failed = |error: io::Error| CommandError::runtime(error).context("metrics.listen");
        // Bound on this thread, since a port below 1024 requires a capability.
        let metrics = metrics::bind(config.metrics.listen).await?.into_std().map_err(failed)?;
        let path = config.admin.socket.clone();
        let both = async move { Ok((TcpListener::from_std(metrics).map_err(failed)?, admin::bind(&path).await?)) };
        let (metrics, admin): (_, admin::Socket) = background.run::<Result<_, CommandError>>(both).await?;
        let (stop, stopped) = watch::channel(false);
        let connections = state.connections.metrics.clone();
        let monitored = Monitored::gateway(state.clone());
        let tasks = [
            background.spawn(admin::serve(state.clone(), admin.listener, stopped.clone())),
            background.spawn(metrics::serve(monitored, metrics, connections, stopped)),
        ];
        Ok(Self { stop, tasks, _socket_file: admin.file })
    }

    /// Stops both; requests in progress have [`STOP_TIMEOUT`] to complete.
    pub(super) async fn close(self) {
        let _ = self.stop.send(true);
        for task in self.tasks {
            let _ = tokio::time::timeout(STOP_TIMEOUT, task).await;
        }
    }
}
