//! The servers of the admin socket and of metrics: started once, before the initial policy, and running until shutdown.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use vipgate_common::Tasks;

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
    tasks: Tasks,
    _socket_file: admin::SocketFile,
}

impl Servers {
    /// Opens both listeners and serves them on the background runtime, in these tasks.
    pub(super) async fn start(
        config: &Config,
        state: &Arc<GatewayState>,
        background: &BackgroundRuntime,
        tasks: Tasks,
    ) -> Result<Self, CommandError> {
        let failed = |error: io::Error| CommandError::runtime(error).context("metrics.listen");
        // Bound on this thread, since a port below 1024 requires a capability.
        let metrics =
            metrics::bind(config.metrics.listen).await.map_err(CommandError::runtime)?.into_std().map_err(failed)?;
        let path = config.admin.socket.clone();
        let both = async move {
            Ok((
                TcpListener::from_std(metrics).map_err(failed)?,
                admin::bind(&path).await.map_err(CommandError::runtime)?,
            ))
        };
        let (metrics, admin): (_, admin::Socket) = background.run::<Result<_, CommandError>>(both).await?;
        let connections = state.connections.metrics.clone();
        let monitored = Monitored::gateway(state.clone());
        let runtime = background.handle();
        tasks.spawn_on("admin socket", admin::serve(state.clone(), admin.listener, tasks.clone()), runtime);
        tasks.spawn_on("metrics", metrics::serve(monitored, metrics, connections, tasks.clone()), runtime);
        Ok(Self { tasks, _socket_file: admin.file })
    }

    /// Stops both; requests in progress have [`STOP_TIMEOUT`] to complete.
    pub(super) async fn close(self) {
        self.tasks.stop(STOP_TIMEOUT).await;
    }
}
