//! Errors of the steering program.

use std::{io, iter};

use aya::EbpfError;
use aya::maps::MapError;
use aya::programs::ProgramError;
use thiserror::Error;
use vipgate_dataplane::io::frame_layout::FrameLayout;

/// Failed loading of the program, or failed update of its maps.
#[derive(Debug, Error)]
pub enum SteeringError {
    /// Another XDP program is attached.
    #[error(
        "interface {interface}: another XDP program is attached ({name}, id {id}); remove it first: \
             `ip link set dev {interface} xdp off`"
    )]
    Foreign { interface: String, name: String, id: u32 },
    /// The kernel refused to attach or detach it; the reason has a hint.
    #[error("interface {interface}: cannot {what}: {reason}")]
    Refused { interface: String, what: &'static str, reason: String },
    /// The BPF object can't be loaded.
    #[error("cannot load the steering program: {}{}", error_chain(.0), hint(&error_chain(.0)))]
    Load(#[source] EbpfError),
    /// The kernel rejected the program.
    #[error("the kernel rejected the steering program: {}{}", error_chain(.0), hint(&error_chain(.0)))]
    Verify(#[source] ProgramError),
    /// The kernel doesn't support programs for packets in several buffers.
    #[error(
        "an MTU of more than {} bytes needs XDP multi-buffer, Linux 6.6 or later: {}{}",
        FrameLayout::Page.max_mtu(), error_chain(.0), hint(&error_chain(.0))
    )]
    MultiBuffer(#[source] ProgramError),
    /// A map can't be updated.
    #[error("cannot update the steering program's map {table}: {}", error_chain(.source))]
    Table {
        /// Name of the map.
        table: &'static str,
        /// Error of the kernel.
        source: MapError,
    },
    /// The BPF object has no such program or map: it doesn't match this version.
    #[error("the steering program has no {0}")]
    NoSuchPart(&'static str),
}

fn hint(text: &str) -> &'static str {
    if text.contains("Operation not permitted") || text.contains("os error 1)") || text.contains("Permission denied") {
        " (vipgate needs root, or CAP_NET_ADMIN, CAP_BPF and CAP_PERFMON; before Linux 5.11 also RLIMIT_MEMLOCK=unlimited)"
    } else {
        ""
    }
}

/// The kernel's error number in an error or its sources.
pub(crate) fn raw_os_error(error: &(dyn std::error::Error + 'static)) -> Option<i32> {
    let chain = iter::successors(Some(error), |&error| error.source());
    chain.filter_map(|error| error.downcast_ref::<io::Error>()).find_map(io::Error::raw_os_error)
}

/// An error and its sources in one line, without repetitions.
pub(crate) fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let message = error.to_string();
        if !text.contains(&message) {
            text = format!("{text}: {message}");
        }
        cause = error.source();
    }
    text
}
