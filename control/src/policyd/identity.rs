//! Client authentication and authorization: with client certificates, a gateway's name must be in its certificate (RFC
//! 9525 section 6); in a pod it, and the agent of a node, may have a token instead. Rejections are logged, rate-limited per address and
//! name.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dashmap::DashMap;
use tonic::{Request, Status};
use vipgate_common::MinInterval;

use super::listen::{ConnectionInfo, peer_address};
use crate::xds::tls::CertificateNames;

/// Minimum interval between log lines about the same rejection.
const LOG_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum number of distinct rejections that are tracked; beyond it the table is cleared.
const MAX_TRACKED_REJECTIONS: usize = 1024;
/// Independently locked parts of the table; `len` asks each.
const SHARDS: usize = 16;

/// Why a client without a certificate is rejected.
const NO_CERTIFICATE: &str = "the client presents no certificate";

/// Identity of a client.
#[derive(Clone, Debug, Default)]
pub struct ClientIdentity {
    /// Its remote address.
    pub address: Option<SocketAddr>,
    /// Whether it connects from this host.
    is_local: bool,
    credential: Credential,
}

/// What a client has shown.
#[derive(Clone, Debug, Default)]
enum Credential {
    /// Nothing is required, and any name is accepted.
    #[default]
    Unneeded,
    /// Nothing, though it is required.
    Missing,
    /// A certificate with these names.
    Certificate(CertificateNames),
    /// The token of this pod.
    Token(VerifiedPod),
}

/// What a pod is, by its service account.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PodRole {
    Gateway,
    /// The agent of a node.
    Agent,
}

/// The pod whose token a request has, once it is verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct VerifiedPod {
    pub(super) role: PodRole,
    /// The node that it runs on, whose name is the gateway's, too.
    pub(super) node: Arc<str>,
}

impl fmt::Display for VerifiedPod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.role {
            PodRole::Gateway => write!(f, "gateway {}", self.node),
            PodRole::Agent => write!(f, "the agent of node {}", self.node),
        }
    }
}

impl ClientIdentity {
    /// The client of a request.
    pub fn from_request<T>(request: &Request<T>) -> Self {
        let connection = request.extensions().get::<ConnectionInfo>();
        let certificates = connection.and_then(|it| it.certificates.as_ref()).map(|chain| chain.first());
        let credential = match (certificates, request.extensions().get::<VerifiedPod>()) {
            (None, _) => Credential::Unneeded,
            (Some(Some(certificate)), _) => Credential::Certificate(CertificateNames::from_certificate(certificate)),
            (Some(None), Some(pod)) => Credential::Token(pod.clone()),
            (Some(None), None) => Credential::Missing,
        };
        let ip = |address: Option<SocketAddr>| address.map(|it| it.ip().to_canonical());
        let remote = ip(connection.and_then(|it| it.remote));
        let from_this_host =
            |remote: IpAddr| remote.is_loopback() || ip(connection.and_then(|it| it.local)) == Some(remote);
        Self { address: peer_address(request), is_local: remote.is_some_and(from_this_host), credential }
    }

    /// Checks that the client may act as this gateway.
    ///
    /// # Errors
    /// `PERMISSION_DENIED` when neither its certificate nor its token is that gateway's.
    pub fn authorize_gateway(&self, gateway: &str) -> Result<(), Status> {
        let reason = match &self.credential {
            Credential::Unneeded => return Ok(()),
            Credential::Certificate(names) if names.contains(gateway) => return Ok(()),
            Credential::Token(pod) if pod.role == PodRole::Gateway && *pod.node == *gateway => return Ok(()),
            Credential::Certificate(names) => format!(
                "the certificate is valid for {names}, not for gateway {gateway}: give the gateway a certificate with \
                 the DNS name {gateway} (`policy.server.cert`), or set its `name` to one in its certificate"
            ),
            Credential::Token(pod @ VerifiedPod { role: PodRole::Agent, .. }) => {
                format!("the token is that of {pod}, not of a gateway")
            }
            Credential::Token(pod) => {
                format!("the token is that of {pod}, not of {gateway}: set the gateway's `name` to {}", pod.node)
            }
            Credential::Missing => format!("{NO_CERTIFICATE}, and no token (`policy.server.token`)"),
        };
        Err(Status::permission_denied(reason))
    }

    /// Whether the client has shown a certificate.
    pub fn has_certificate(&self) -> bool {
        matches!(self.credential, Credential::Certificate(_))
    }

    /// Whether the client has shown a token.
    pub fn has_token(&self) -> bool {
        matches!(self.credential, Credential::Token(_))
    }

    /// Checks that the client may act as the agent of this node.
    ///
    /// # Errors
    /// `PERMISSION_DENIED` when neither its certificate nor its token is that node's.
    pub fn authorize_node(&self, node: &str) -> Result<(), Status> {
        let reason = match &self.credential {
            Credential::Unneeded => return Ok(()),
            Credential::Certificate(names) if names.contains(node) => return Ok(()),
            Credential::Token(pod) if pod.role == PodRole::Agent && *pod.node == *node => return Ok(()),
            Credential::Certificate(names) => format!(
                "the certificate is valid for {names}, not for node {node}: give its agent a certificate with the DNS \
                 name {node}"
            ),
            Credential::Token(pod @ VerifiedPod { role: PodRole::Gateway, .. }) => {
                format!("the token is that of {pod}, not of an agent")
            }
            Credential::Token(pod) => {
                format!("the token is that of {pod}, not of {node}: set the agent's `name` to {}", pod.node)
            }
            Credential::Missing => format!("{NO_CERTIFICATE}, and no token (`server.token`)"),
        };
        Err(Status::permission_denied(reason))
    }

    /// Checks that the client may read what is in force: with client certificates any with one, otherwise everybody.
    ///
    /// # Errors
    /// `PERMISSION_DENIED` when it may not.
    pub fn authorize_query(&self) -> Result<(), Status> {
        let reason = match &self.credential {
            Credential::Unneeded | Credential::Certificate(_) => return Ok(()),
            Credential::Token(pod) => format!("the token is that of {pod}, which may not do this"),
            Credential::Missing => NO_CERTIFICATE.to_owned(),
        };
        Err(Status::permission_denied(reason))
    }

    /// Checks that the client may run admin commands. With client certificates: a name in `admins`; if `admins` is
    /// empty, any certificate without a name that is a client's by `role_of`, e.g. a `gateway`. Without: connections
    /// from this host.
    ///
    /// # Errors
    /// `PERMISSION_DENIED` when it may not.
    pub fn authorize_command(
        &self,
        admins: &[String],
        role_of: impl Fn(&str) -> Option<&'static str>,
    ) -> Result<(), Status> {
        let reason = match &self.credential {
            Credential::Unneeded if self.is_local => return Ok(()),
            Credential::Unneeded => {
                "without client certificates (`tls.ca`) this is allowed from the server's own host only".to_owned()
            }
            Credential::Missing => NO_CERTIFICATE.to_owned(),
            Credential::Token(pod) => format!("the token is that of {pod}, which may not do this"),
            Credential::Certificate(names) if !admins.is_empty() => {
                if admins.iter().any(|admin| names.contains(admin)) {
                    return Ok(());
                }
                format!("the certificate is valid for {names}, none of which is in the server's `admins`")
            }
            Credential::Certificate(names) => match names.iter().find_map(|name| Some((name, role_of(name)?))) {
                None => return Ok(()),
                Some((name, role)) => format!(
                    "the certificate is that of {role} {name}, and {role}s may not do this: use a certificate with a \
                     name in the server's `admins`"
                ),
            },
        };
        Err(Status::permission_denied(reason))
    }
}

/// Rate limiter for log lines about rejections. Every stream and connection may be rejected, each under a key of its
/// own: they don't wait for each other.
#[derive(Debug)]
pub struct RejectionLog(DashMap<RejectionKey, MinInterval>);

impl Default for RejectionLog {
    fn default() -> Self {
        Self(DashMap::with_shard_amount(SHARDS))
    }
}

/// The address of the client, and the claimed gateway name, the command or the reason.
type RejectionKey = (Option<IpAddr>, String);

impl RejectionLog {
    /// Logs a rejected stream.
    pub fn log_gateway(&self, peer: &ClientIdentity, gateway: &str, status: &Status) {
        let Some(repeated) = self.is_due(peer.address.map(|it| it.ip()), gateway, Instant::now()) else { return };
        let (address, reason) = (peer.address.map(|it| it.to_string()).unwrap_or_default(), status.message());
        tracing::warn!(event = "gateway_refused", gateway, address, reason, repeated, "gateway refused");
    }

    /// Logs a rejected stream of a node's agent.
    pub fn log_node(&self, peer: &ClientIdentity, node: &str, status: &Status) {
        let Some(repeated) = self.is_due(peer.address.map(|it| it.ip()), node, Instant::now()) else { return };
        let (address, reason) = (peer.address.map(|it| it.to_string()).unwrap_or_default(), status.message());
        tracing::warn!(event = "node_refused", node, address, reason, repeated, "node agent refused");
    }

    /// Logs a denied admin command.
    pub fn log_command(&self, peer: &ClientIdentity, command: &str, status: &Status) {
        let Some(repeated) = self.is_due(peer.address.map(|it| it.ip()), command, Instant::now()) else { return };
        let (address, reason) = (peer.address.map(|it| it.to_string()).unwrap_or_default(), status.message());
        tracing::warn!(event = "order_refused", command, address, reason, repeated, "command denied");
    }

    /// Logs a rejected connection.
    pub fn log_client(&self, from: SocketAddr, reason: &str) {
        let Some(repeated) = self.is_due(Some(from.ip()), reason, Instant::now()) else { return };
        tracing::warn!(event = "client_refused", address = %from, reason, repeated, "client refused");
    }

    /// Returns how often the rejection was suppressed since the last log line if it is due again, else `None`.
    fn is_due(&self, address: Option<IpAddr>, subject: &str, now: Instant) -> Option<u64> {
        // Concurrent rejections may exceed the limit by their number.
        if self.0.len() >= MAX_TRACKED_REJECTIONS {
            self.0.clear();
        }
        self.0.entry((address, subject.to_owned())).or_default().due(LOG_INTERVAL, now)
    }
}

#[cfg(test)]
mod tests;
