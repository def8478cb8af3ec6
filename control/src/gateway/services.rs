//! What runs beside the control thread: threads for whoever asks (admin socket, metrics) and for those that bring policy, so that an
//! answer of ten thousand Services, or reading as many, holds nobody up; and the signals that end a gateway.

use std::future::Future;
use std::io;

use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinHandle;

use crate::failure::Failure;
use crate::privileges;

/// Threads for tasks that may take some hundred milliseconds between two awaits. One is enough for each of two that do so at once.
const THREADS: usize = 2;

/// The threads. They inherit the cores of whoever starts them, and have no capability.
#[derive(Debug)]
pub(super) struct Services(Option<Runtime>);

impl Services {
    pub(super) fn start() -> Result<Self, Failure> {
        let mut builder = Builder::new_multi_thread();
        builder.worker_threads(THREADS).enable_all().thread_name("services").on_thread_start(privileges::begin_helper);
        let failed = |error: io::Error| Failure::runtime(format_args!("cannot start threads: {error}"));
        Ok(Self(Some(builder.build().map_err(failed)?)))
    }

    /// Runs a task there. What it spawns, and the sockets that it opens, belong there, too.
    pub(super) fn spawn<T: Send + 'static>(&self, task: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
        match &self.0 {
            Some(runtime) => runtime.spawn(task),
            // Only while it is being dropped.
            None => tokio::spawn(task),
        }
    }

    /// Runs a task there, and waits for what it comes to.
    pub(super) async fn run<T: Send + 'static>(&self, task: impl Future<Output = T> + Send + 'static) -> T {
        crate::source::intake::finished(self.spawn(task).await)
    }
}

impl Drop for Services {
    fn drop(&mut self) {
        // Whoever still asks has nothing to lose, and this may be an async context, which must not wait.
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// The signals of a gateway, from the moment on when it is told to stop by them and doesn't just die: none is lost after that.
#[derive(Debug)]
pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    pub(super) fn listen() -> Result<Self, Failure> {
        let listen =
            |kind| signal(kind).map_err(|error| Failure::runtime(format_args!("cannot listen to signals: {error}")));
        Ok(Self {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
            hangup: listen(SignalKind::hangup())?,
        })
    }

    /// Waits until the gateway is told to stop, or to read its files again. May be dropped and called again.
    pub(super) async fn next(&mut self) -> Order {
        tokio::select! {
            biased;
            _ = self.terminate.recv() => Order::Stop,
            _ = self.interrupt.recv() => Order::Stop,
            _ = self.hangup.recv() => Order::Reload,
        }
    }
}

/// What a signal says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Stop,
    Reload,
}
