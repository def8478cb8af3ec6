//! Health checks of Services on the node's own addresses, as load balancers ask for them (`healthCheckNodePort`). At the VIPs the
//! workers answer, with the same words.

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use vipgate_dataplane::snapshot::policy::Policy;

use super::state::GatewayState;
use crate::listener;

/// How long one may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// Bytes of a request that are read; it may have more.
const REQUEST: usize = 4096;

/// The ports that are answered.
#[derive(Debug)]
pub(super) struct HealthChecks {
    state: Arc<GatewayState>,
    listening: BTreeMap<u16, JoinHandle<()>>,
}

impl HealthChecks {
    /// None yet.
    pub(super) fn new(state: Arc<GatewayState>) -> Self {
        Self { state, listening: BTreeMap::new() }
    }

    /// Listens where the policy in force wants it, and nowhere else. A port that can't be had is asked for again with the next call.
    pub(super) fn follow(&mut self) {
        let wanted = wanted(&self.state.compiled.load());
        self.listening.retain(|port, task| {
            let stays = wanted.contains_key(port) && !task.is_finished();
            if !stays {
                task.abort();
            }
            stays
        });
        let before = self.state.health_errors.load_full();
        let mut errors = BTreeMap::new();
        for (port, service) in wanted {
            if self.listening.contains_key(&port) {
                continue;
            }
            match listen(port) {
                Ok(listener) => {
                    let task = tokio::spawn(serve(listener, port, self.state.clone()));
                    self.listening.insert(port, task);
                }
                Err(error) => {
                    let reason = format!("cannot answer health checks of {service} on port {port}: {error}");
                    if before.get(&port) != Some(&reason) {
                        tracing::error!(event = "health_port", port, service = &*service, "{reason}");
                    }
                    errors.insert(port, reason);
                }
            }
        }
        if *before != errors {
            self.state.health_errors.store(Arc::new(errors));
        }
    }
}

impl Drop for HealthChecks {
    fn drop(&mut self) {
        self.listening.values().for_each(JoinHandle::abort);
    }
}

/// The ports of health checks, and whose they are.
fn wanted(policy: &Policy) -> BTreeMap<u16, Arc<str>> {
    let services = policy.services();
    services.filter_map(|it| Some((it.spec.health?.port, it.spec.name.clone()))).collect()
}

fn listen(port: u16) -> io::Result<TcpListener> {
    // Of both families at once, where the kernel has both.
    let any = SocketAddr::from((Ipv6Addr::UNSPECIFIED, port));
    let listener = std::net::TcpListener::bind(any).or_else(|error| match error.kind() {
        io::ErrorKind::AddrInUse => Err(error),
        _ => std::net::TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)),
    })?;
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}

async fn serve(listener: TcpListener, port: u16, state: Arc<GatewayState>) {
    loop {
        let (stream, from, mut slot) = listener::accept(&listener, &state.rooms.health).await;
        let state = state.clone();
        tokio::spawn(async move {
            tokio::select! {
                // Who doesn't ask, or doesn't listen, is let go.
                answered = tokio::time::timeout(PATIENCE, answer(stream, port, &state)) => if answered.is_err() {
                    slot.expire(Some(from.ip()));
                },
                () = slot.superseded() => {}
            }
        });
    }
}

async fn answer(mut stream: TcpStream, port: u16, state: &GatewayState) -> io::Result<()> {
    let mut request = Vec::with_capacity(REQUEST);
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        if request.len() >= REQUEST || stream.read_buf(&mut request).await? == 0 {
            return Ok(());
        }
    }
    let policy = state.compiled.load_full();
    let service = policy.services().find(|service| service.spec.health.is_some_and(|health| health.port == port));
    let Some(answer) = service.and_then(|service| service.health_answer()) else { return Ok(()) };
    stream.write_all(answer).await?;
    stream.shutdown().await
}
