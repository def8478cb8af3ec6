//! Errors of opening netlink. Later failures are logged and retried.

use std::io;

/// Why monitoring or changing the kernel's network state failed.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// No interface has this name.
    #[error("interface {name}: not found in this network namespace")]
    InterfaceMissing {
        /// Its name in the configuration.
        name: String,
    },
    /// The loopback device.
    #[error("interface {name}: is a loopback device; name the interfaces towards pods and the outside network")]
    Loopback {
        /// Its name in the configuration.
        name: String,
    },
    /// A device without Ethernet headers.
    #[error("interface {name}: isn't an Ethernet device (ARPHRD type {link_type}); vipgate needs Ethernet frames")]
    NotEthernet {
        /// Its name in the configuration.
        name: String,
        /// Its ARPHRD type.
        link_type: u16,
    },
    /// The process lacks a capability.
    #[error("{operation}: not permitted; run as root or with CAP_NET_ADMIN")]
    NotPermitted {
        /// The operation that failed.
        operation: &'static str,
    },
    /// Any other netlink error.
    #[error("{operation}: {source}")]
    Netlink {
        /// The operation that failed.
        operation: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// The monitoring task has ended.
    #[error("the task that monitors the kernel's network state has ended; restart the gateway")]
    Ended,
}

impl NetworkError {
    /// Classifies an error of the kernel.
    pub(super) fn new(operation: &'static str, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::PermissionDenied => Self::NotPermitted { operation },
            _ => Self::Netlink { operation, source },
        }
    }
}
