//! Errors of programming the kernel.

use std::io;

/// Why the kernel can't be programmed.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// No netlink socket.
    #[error("netlink: {0}")]
    Netlink(io::Error),
    /// A netlink request was refused.
    #[error("{what}: {source}")]
    Request {
        /// What was requested.
        what: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Connections can't be listed or deleted.
    #[error("conntrack: {0}")]
    Conntrack(io::Error),
    /// `nft` can't be run.
    #[error("{program}: {source}: install nftables, or set `nft`")]
    NoNft {
        program: String,
        /// Why.
        source: io::Error,
    },
    /// `nft` failed.
    #[error("nft {command}: {message}")]
    Nft {
        /// Its arguments.
        command: String,
        /// The beginning of what it wrote.
        message: String,
    },
    /// A setting of the kernel can't be written.
    #[error("{path}: {source}")]
    Setting {
        /// Its file.
        path: String,
        /// Why.
        source: io::Error,
    },
}

impl KernelError {
    /// Maps the error of a request.
    pub(super) fn request(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Request { what, source }
    }
}

/// Whether a request failed with this error number.
pub(super) fn is_errno(error: &io::Error, number: i32) -> bool {
    error.raw_os_error() == Some(number)
}
