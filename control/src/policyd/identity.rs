//! Which gateway a connection may be: under TLS with client certificates, one that its certificate names (RFC 9525 section 6).
//! Refusals are logged, for each address and name once in a while.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tonic::{Request, Status};

use super::listen::{Connection, peer_address};
use crate::xds::tls::Names;

/// How often the same refusal is logged.
const LOG_INTERVAL: Duration = Duration::from_secs(10);
/// Refusals that are told apart for that; then all are forgotten.
const MAX_REFUSALS: usize = 1024;

/// Who is at the other end of a connection.
#[derive(Clone, Debug, Default)]
pub struct Peer {
    /// Where it connects from.
    pub address: Option<SocketAddr>,
    /// Whether that is this host.
    is_here: bool,
    /// The names in its certificate. None: it presents no certificate, since none is asked for, and may have any name.
    names: Option<Names>,
}

impl Peer {
    /// The peer of a request.
    pub fn of<T>(request: &Request<T>) -> Self {
        let connection = request.extensions().get::<Connection>();
        let certificates = connection.and_then(|it| it.certificates.as_ref());
        let names = certificates.map(|chain| chain.first().map(Names::of).unwrap_or_default());
        let ip = |address: Option<SocketAddr>| address.map(|it| it.ip().to_canonical());
        let remote = ip(connection.and_then(|it| it.remote));
        let is_local = |remote: IpAddr| remote.is_loopback() || ip(connection.and_then(|it| it.local)) == Some(remote);
        Self { address: peer_address(request), is_here: remote.is_some_and(is_local), names }
    }

    /// Whether it may be this gateway.
    ///
    /// # Errors
    /// When its certificate is another one's: what to say to it.
    pub fn may_be(&self, gateway: &str) -> Result<(), Status> {
        match &self.names {
            Some(names) if !names.include(gateway) => Err(Status::permission_denied(format!(
                "the certificate is of {names}, not of gateway {gateway}: give the gateway a certificate with the DNS name {gateway} \
                 (`policy.server.cert`), or the `name` that its certificate has"
            ))),
            _ => Ok(()),
        }
    }

    /// Whether it may change what the server does. With client certificates: one that `admins` names; where that names nobody, one that
    /// is no gateway's. Without: from this host.
    ///
    /// # Errors
    /// When it may not: what to say to it.
    pub fn may_order(&self, admins: &[String], is_gateway: impl Fn(&str) -> bool) -> Result<(), Status> {
        let denied = match &self.names {
            None if self.is_here => return Ok(()),
            None => {
                "without certificates of clients (`tls.ca`) this is done from the server's own host only".to_owned()
            }
            Some(names) if !admins.is_empty() => {
                if admins.iter().any(|admin| names.include(admin)) {
                    return Ok(());
                }
                format!("the certificate is of {names}, and none of that is in the server's `admins`")
            }
            Some(names) => match names.iter().find(|name| is_gateway(name)) {
                None => return Ok(()),
                Some(gateway) => format!(
                    "the certificate is of gateway {gateway}, and no gateway may do this: use one that the server's `admins` names"
                ),
            },
        };
        Err(Status::permission_denied(denied))
    }
}

/// When each refusal was logged last, and how often it has come since.
#[derive(Debug, Default)]
pub struct Refusals(Mutex<HashMap<Refusal, (Instant, u64)>>);

/// Where a stream or a connection came from, and the gateway that it would have been, or why it was refused.
type Refusal = (Option<IpAddr>, String);

impl Refusals {
    /// Logs that a stream is refused.
    pub fn log(&self, peer: &Peer, gateway: &str, status: &Status) {
        let Some(repeated) = self.is_due(peer.address.map(|it| it.ip()), gateway, Instant::now()) else { return };
        let (address, reason) = (peer.address.map(|it| it.to_string()).unwrap_or_default(), status.message());
        tracing::warn!(event = "gateway_refused", gateway, address, reason, repeated, "gateway refused");
    }

    /// Logs that an order is refused.
    pub fn log_order(&self, peer: &Peer, order: &str, status: &Status) {
        let Some(repeated) = self.is_due(peer.address.map(|it| it.ip()), order, Instant::now()) else { return };
        let (address, reason) = (peer.address.map(|it| it.to_string()).unwrap_or_default(), status.message());
        tracing::warn!(event = "order_refused", order, address, reason, repeated, "order refused");
    }

    /// Logs that a connection is refused.
    pub fn log_client(&self, from: SocketAddr, reason: &str) {
        let Some(repeated) = self.is_due(Some(from.ip()), reason, Instant::now()) else { return };
        tracing::warn!(event = "client_refused", address = %from, reason, repeated, "client refused");
    }

    /// Whether to log it: how often it wasn't since the last time.
    fn is_due(&self, address: Option<IpAddr>, gateway: &str, now: Instant) -> Option<u64> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() >= MAX_REFUSALS {
            all.clear();
        }
        let key = (address, gateway.to_owned());
        match all.get_mut(&key) {
            Some((last, repeated)) if now.saturating_duration_since(*last) < LOG_INTERVAL => {
                *repeated += 1;
                None
            }
            other => {
                let repeated = other.map_or(0, |(_, repeated)| *repeated);
                all.insert(key, (now, 0));
                Some(repeated)
            }
        }
    }
}

#[cfg(test)]
mod tests;
