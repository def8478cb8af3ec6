//! What can go wrong when the kernel's network is opened. Later failures are logged and tried again.

use std::io;

/// Why the kernel's network couldn't be opened.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// No interface has this name.
    #[error("interface {name}: not found in this network namespace")]
    InterfaceMissing {
        /// Its name in the configuration.
        name: String,
    },
    /// The loopback device.
    #[error("interface {name}: is a loopback device; name the interfaces that pods and the world are behind")]
    Loopback {
        /// Its name in the configuration.
        name: String,
    },
    /// A device without Ethernet headers.
    #[error("interface {name}: isn't an Ethernet device (ARPHRD type {link_type}); vipgate needs Ethernet frames")]
    NotEthernet {
        /// Its name in the configuration.
        name: String,
        /// The kernel's ARPHRD number of it.
        link_type: u16,
    },
    /// The kernel wants more rights.
    #[error("{doing}: not permitted; run as root or with CAP_NET_ADMIN")]
    NotPermitted {
        /// What was tried.
        doing: &'static str,
    },
    /// Netlink failed otherwise.
    #[error("{doing}: {source}")]
    Netlink {
        /// What was tried.
        doing: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// Nobody listens any more.
    #[error("the task that follows the kernel's network has ended; restart the gateway")]
    Ended,
}

impl NetworkError {
    /// Sorts what the kernel said.
    pub(super) fn new(doing: &'static str, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::PermissionDenied => Self::NotPermitted { doing },
            _ => Self::Netlink { doing, source },
        }
    }
}
