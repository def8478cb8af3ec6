//! Health checks of Services on the node's own addresses (`healthCheckNodePort`), for external load balancers. At the
//! VIPs the workers send the same HTTP response.

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use vipgate_common::{Task, Tasks};
use vipgate_dataplane::policy::compiled::Policy;

use crate::listener;
use crate::state::GatewayState;

/// Time for one request and its response.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum size of a request head, bytes. A larger one closes the connection.
const MAX_REQUEST: usize = 4096;

/// The health check listeners, by port.
#[derive(Debug)]
pub(super) struct HealthChecks {
    state: Arc<GatewayState>,
    /// Those of connections.
    tasks: Tasks,
    listening: BTreeMap<u16, Task>,
}

impl HealthChecks {
    /// Without any listener.
    pub(super) fn new(state: Arc<GatewayState>, tasks: Tasks) -> Self {
        Self { state, tasks, listening: BTreeMap::new() }
    }

    /// Opens and closes listeners to match the policy in force. A port that can't be bound is retried by the next call.
    pub(super) fn update(&mut self) {
        let wanted = wanted(&self.state.compiled.load());
        self.listening.retain(|port, task| wanted.contains_key(port) && !task.is_finished());
        let previous = self.state.health_errors.load_full();
        let mut errors = BTreeMap::new();
        for (port, service) in wanted {
            if self.listening.contains_key(&port) {
                continue;
            }
            match listen(port) {
                Ok(listener) => {
                    let task = Task::spawn(serve(listener, port, self.state.clone(), self.tasks.clone()));
                    self.listening.insert(port, task);
                }
                Err(error) => {
                    let reason = format!("cannot answer health checks of {service} on port {port}: {error}");
                    if previous.get(&port) != Some(&reason) {
                        tracing::error!(event = "health_port", port, service = &*service, "{reason}");
                    }
                    errors.insert(port, reason);
                }
            }
        }
        if *previous != errors {
            self.state.health_errors.store(Arc::new(errors));
        }
    }
}

/// The health check ports, and the Service of each.
fn wanted(policy: &Policy) -> BTreeMap<u16, Arc<str>> {
    let services = policy.services();
    services.filter_map(|it| Some((it.spec.health?.port, it.spec.name.clone()))).collect()
}

fn listen(port: u16) -> io::Result<TcpListener> {
    let listener = bind(port, std::net::TcpListener::bind)?;
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}

/// Binds the port dual-stack, or for IPv4 alone where the kernel has no IPv6. Another error may pass, and a listener
/// stays as it was bound.
fn bind<T>(port: u16, open: impl Fn(SocketAddr) -> io::Result<T>) -> io::Result<T> {
    open((Ipv6Addr::UNSPECIFIED, port).into()).or_else(|error| match Errno::from_io_error(&error) {
        Some(Errno::AFNOSUPPORT | Errno::ADDRNOTAVAIL) => open((Ipv4Addr::UNSPECIFIED, port).into()),
        _ => Err(error),
    })
}

async fn serve(listener: TcpListener, port: u16, state: Arc<GatewayState>, tasks: Tasks) {
    loop {
        let (stream, from, mut slot) = listener::accept(&listener, &state.connections.health).await;
        let state = state.clone();
        tasks.spawn_until_stopped("health check", async move {
            tokio::select! {
                // A client that is too slow is disconnected.
                result = tokio::time::timeout(REQUEST_TIMEOUT, respond(stream, port, &state)) => if result.is_err() {
                    slot.timed_out(Some(from.ip()));
                },
                () = slot.evicted() => {}
            }
        });
    }
}

async fn respond(mut stream: TcpStream, port: u16, state: &GatewayState) -> io::Result<()> {
    let mut request = Vec::with_capacity(MAX_REQUEST);
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        if request.len() >= MAX_REQUEST || stream.read_buf(&mut request).await? == 0 {
            return Ok(());
        }
    }
    let policy = state.compiled.load_full();
    let service = policy.services().find(|service| service.spec.health.is_some_and(|health| health.port == port));
    let Some(response) = service.and_then(|service| service.health_response()) else { return Ok(()) };
    stream.write_all(response).await?;
    stream.shutdown().await
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The address that is bound if the kernel refuses IPv6 with this error.
    fn bound(refusal: Option<Errno>) -> io::Result<SocketAddr> {
        bind(80, |address| match refusal {
            Some(error) if address.is_ipv6() => Err(error.into()),
            _ => Ok(address),
        })
    }

    #[test]
    fn a_port_is_bound_for_ipv4_alone_only_where_the_kernel_has_no_ipv6() {
        let (v4, v6): (SocketAddr, SocketAddr) = ("0.0.0.0:80".parse().unwrap(), "[::]:80".parse().unwrap());
        assert_eq!(bound(None).unwrap(), v6);
        for error in [Errno::AFNOSUPPORT, Errno::ADDRNOTAVAIL] {
            assert_eq!(bound(Some(error)).unwrap(), v4);
        }
        for error in [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::NOBUFS, Errno::ADDRINUSE, Errno::ACCESS] {
            assert_eq!(Errno::from_io_error(&bound(Some(error)).unwrap_err()), Some(error));
        }
    }
}
