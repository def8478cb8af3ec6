//! Ports of Services and endpoint slices: protocol, number and name.

use std::fmt;
use std::sync::Arc;

use crate::diagnostic::{Code, Report, Severity};

/// A transport protocol with ports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// TCP, Kubernetes' default.
    #[default]
    Tcp,
    Udp,
    Sctp,
}

impl Protocol {
    /// All protocols.
    pub const ALL: [Self; 3] = [Self::Tcp, Self::Udp, Self::Sctp];

    /// IP protocol number.
    pub fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
            Self::Sctp => 132,
        }
    }

    fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
            Self::Sctp => "SCTP",
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Reads field `list[i].protocol`.
pub(super) fn protocol(list: &str, i: usize, text: Option<&str>, report: &mut Report<'_>) -> Option<Protocol> {
    let Some(text) = text else { return Some(Protocol::default()) };
    let found = Protocol::ALL.into_iter().find(|protocol| protocol.as_str() == text);
    if found.is_none() {
        report(
            Severity::Error,
            Code::UnknownValue,
            &format!("{list}[{i}].protocol"),
            format!("`{text}` is unknown, expected TCP, UDP or SCTP"),
        );
    }
    found
}

/// Reads a port number; `field` is called only for an error.
pub(super) fn number(number: i32, field: impl FnOnce() -> String, report: &mut Report<'_>) -> Option<u16> {
    let port = u16::try_from(number).ok().filter(|port| *port > 0);
    if port.is_none() {
        report(Severity::Error, Code::OutOfRange, &field(), format!("must be from 1 to 65535, is {number}"));
    }
    port
}

/// Maximum length of a name, bytes: Kubernetes' limit for any name.
const MAX_NAME_BYTES: usize = 253;
/// Error of an invalid name.
pub(super) const INVALID_NAME: &str = "is not a valid name: longer than 253 bytes, or not printable";

/// Whether a text is a valid name; it may be empty.
pub(super) fn is_valid_name(text: &str) -> bool {
    text.len() <= MAX_NAME_BYTES && !text.contains(char::is_control)
}

/// Reads the name of a port; empty if it has none.
pub(super) fn name(text: Option<&str>, field: impl FnOnce() -> String, report: &mut Report<'_>) -> Option<Arc<str>> {
    let text = text.unwrap_or_default();
    if is_valid_name(text) {
        return Some(text.into());
    }
    report(Severity::Error, Code::InvalidName, &field(), INVALID_NAME.to_owned());
    None
}
