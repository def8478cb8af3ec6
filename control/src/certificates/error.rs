//! Why certificates can't be made or stored.

use thiserror::Error;

use crate::source::kubernetes::{ConnectError, RequestError};

/// Why `vipgate certificates` fails.
#[derive(Debug, Error)]
pub(crate) enum CertificatesError {
    /// There is no client.
    #[error("{}", describe(.0))]
    Connect(#[from] ConnectError),
    /// The API server has refused a request, or hasn't responded.
    #[error("cannot {action}: {error}")]
    Request { action: String, error: RequestError },
    /// The object that is to own the Secrets doesn't exist.
    #[error("{0} doesn't exist, so nothing would delete the Secrets with it")]
    NoOwner(String),
    /// A Secret isn't one of ours.
    #[error("{secret} {problem}: delete it so that another one is made")]
    Foreign { secret: String, problem: String },
    /// A Secret is going to be gone.
    #[error("{0} is being deleted: run this again when it is gone")]
    BeingDeleted(String),
    /// Others have written each time.
    #[error("somebody else has changed the Secrets at each of {0} attempts")]
    Conflicts(u32),
    /// There are no random numbers.
    #[error("cannot generate a certificate: {0}")]
    Random(#[from] getrandom::Error),
    /// A certificate can't be signed or encoded.
    #[error("cannot generate a certificate: {0}")]
    Signature(#[from] rcgen::Error),
}

/// Names options of the command, not fields of a configuration file.
fn describe(error: &ConnectError) -> String {
    match error {
        ConnectError::Kubeconfig { path, error } => format!("--kubeconfig {path}: {error}"),
        ConnectError::NotInCluster(error) => format!("{error}: outside of a pod, use --kubeconfig"),
        ConnectError::Client(error) => error.to_string(),
    }
}
