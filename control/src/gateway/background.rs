//! Background runtime: threads beside the control thread for the admin socket, metrics and policy sources, so that a
//! reply with ten thousand Services, or reading as many manifests, doesn't stall the control loop. Also the process's
//! signals.

use std::future::Future;
use std::io;

use tokio::runtime::{Builder, Handle, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};
use vipgate_common::Task;

use crate::command_error::CommandError;
use crate::{blocking_threads, privileges};

/// Threads for tasks that may run some hundred milliseconds between two awaits: enough for two such tasks at once.
const THREADS: usize = 2;

/// The runtime. Its threads inherit the CPU affinity of the thread that starts them, and hold no capability.
#[derive(Debug)]
pub(super) struct BackgroundRuntime {
    /// `None` only while it is being dropped.
    runtime: Option<Runtime>,
    handle: Handle,
}

impl BackgroundRuntime {
    pub(super) fn start() -> Result<Self, CommandError> {
        let mut builder = Builder::new_multi_thread();
        builder
            .worker_threads(THREADS)
            .enable_all()
            .thread_name("background")
            .thread_keep_alive(blocking_threads::KEEP_ALIVE)
            .on_thread_start(privileges::restrict_helper);
        let failed = |error: io::Error| CommandError::runtime(error).context("cannot start background threads");
        let runtime = builder.build().map_err(failed)?;
        let handle = runtime.handle().clone();
        blocking_threads::start(&handle);
        Ok(Self { runtime: Some(runtime), handle })
    }

    /// For groups of tasks that run there.
    pub(super) fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Spawns a task on the runtime. Tasks that it spawns and sockets that it opens belong to the runtime, too.
    pub(super) fn spawn<T: Send + 'static>(&self, task: impl Future<Output = T> + Send + 'static) -> Task<T> {
        Task::spawn_on(task, &self.handle)
    }

    /// Runs a task on the runtime and returns its output.
    pub(super) async fn run<T: Send + 'static>(&self, task: impl Future<Output = T> + Send + 'static) -> T {
        self.spawn(task).await
    }
}

impl Drop for BackgroundRuntime {
    fn drop(&mut self) {
        // Pending requests may be aborted, and this may be an async context, which must not block.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// The signals that a gateway handles. From `install` on they no longer kill the process, and none is lost.
#[derive(Debug)]
pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    pub(super) fn install() -> Result<Self, CommandError> {
        let listen = |kind| {
            signal(kind).map_err(|error| CommandError::runtime(error).context("cannot install a signal handler"))
        };
        Ok(Self {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
            hangup: listen(SignalKind::hangup())?,
        })
    }

    /// Waits for the next signal. Cancel-safe.
    pub(super) async fn next(&mut self) -> SignalAction {
        tokio::select! {
            biased;
            _ = self.terminate.recv() => SignalAction::Stop,
            _ = self.interrupt.recv() => SignalAction::Stop,
            _ = self.hangup.recv() => SignalAction::Reload,
        }
    }
}

/// The action that a signal requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SignalAction {
    Stop,
    Reload,
}
