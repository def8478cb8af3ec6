//! `vipgate certificates`: makes and renews the certificate of a policy server, and makes what gateways and agents of
//! nodes need beside their tokens, in Secrets of the Kubernetes API. It runs once and ends; a Job runs it at the
//! installation, a CronJob each day.
//!
//! ```text
//!   names          DNS names of the server
//!   certificate    a self-signed certificate and its key: which defect it has, and the next one
//!   secret         what becomes of each Secret (pure: Secrets and the time are arguments)
//!   pass           reads, decides, writes: again when somebody else has written
//!   api            the requests
//! ```
//! A certificate that has no defect is kept byte for byte, and nothing is written when nothing changes.

mod api;
mod certificate;
mod error;
#[cfg(test)]
mod fixtures;
mod names;
mod pass;
mod secret;

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use self::api::SecretApi;
use self::error::CertificatesError;
pub(crate) use self::names::DnsName;

/// What there is to be, and in which Secrets.
#[derive(Clone, Debug)]
pub(crate) struct Specification {
    /// Secret of the policy server.
    pub(crate) server: String,
    /// Names of the policy server.
    pub(crate) server_names: Vec<DnsName>,
    /// Secret of gateways and agents of nodes: the server's CA bundle alone.
    pub(crate) clients: String,
    /// Secret with the tunnels' secret.
    pub(crate) tunnels: Option<String>,
    /// How long the certificate is valid.
    pub(crate) validity: Duration,
    /// How long before its end it is renewed.
    pub(crate) renew_before: Duration,
    /// ServiceAccount that owns the Secrets: the API server deletes them with it.
    pub(crate) owner: Option<String>,
}

/// Where the Secrets are.
#[derive(Clone, Debug)]
pub(crate) struct Location {
    /// Their namespace. Default: that of the pod, or of the kubeconfig's context.
    pub(crate) namespace: Option<String>,
    /// kubeconfig file. Default: the service account of the pod.
    pub(crate) kubeconfig: Option<PathBuf>,
}

impl Specification {
    /// The name of a Secret that two of them would have.
    pub(crate) fn ambiguous_secret(&self) -> Option<&str> {
        let tunnels = self.tunnels.as_deref();
        if self.server == self.clients || tunnels == Some(self.server.as_str()) {
            return Some(&self.server);
        }
        tunnels.filter(|tunnels| *tunnels == self.clients)
    }
}

/// Makes and renews what is missing or due; passes on a line for each thing done.
///
/// # Errors
/// If the API can't be reached, it refuses a request, or a Secret is one that must not be replaced.
pub(crate) async fn run(
    specification: &Specification,
    location: &Location,
    now: SystemTime,
    report: &mut impl FnMut(&str),
) -> Result<(), CertificatesError> {
    let mut api = SecretApi::connect(location).await?;
    pass::run(&mut api, specification, now, report).await
}
