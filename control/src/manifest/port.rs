//! Ports of Services and of what is behind them.

use std::fmt;
use std::sync::Arc;

use super::read::Report;
use crate::complaint::Severity;

/// A protocol that has ports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// TCP, as Kubernetes takes it where nothing is said.
    #[default]
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
}

impl Protocol {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Tcp, Self::Udp, Self::Sctp];

    /// Its number in IP headers.
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

/// The protocol that a field `list[i].protocol` names.
pub(super) fn protocol(list: &str, i: usize, text: Option<&str>, report: &mut Report<'_>) -> Option<Protocol> {
    let Some(text) = text else { return Some(Protocol::default()) };
    let known = Protocol::ALL.into_iter().find(|known| known.as_str() == text);
    if known.is_none() {
        report(
            Severity::Error,
            &format!("{list}[{i}].protocol"),
            format!("`{text}` is unknown, expected TCP, UDP or SCTP"),
        );
    }
    known
}

/// The port that a field says; the field's name is asked for only if it is none.
pub(super) fn number(number: i32, field: impl FnOnce() -> String, report: &mut Report<'_>) -> Option<u16> {
    let port = u16::try_from(number).ok().filter(|port| *port > 0);
    if port.is_none() {
        report(Severity::Error, &field(), format!("must be from 1 to 65535, is {number}"));
    }
    port
}

/// The longest name, bytes: longer than any that Kubernetes allows.
const LONGEST_NAME: usize = 253;
/// Why a text is no name.
pub(super) const NO_NAME: &str = "is no name: it has more than 253 bytes, or can't be printed";

/// Whether a text can be a name, if an empty one.
pub(super) fn is_name(text: &str) -> bool {
    text.len() <= LONGEST_NAME && !text.contains(char::is_control)
}

/// The name of a port; empty if it has none.
pub(super) fn name(text: Option<&str>, field: impl FnOnce() -> String, report: &mut Report<'_>) -> Option<Arc<str>> {
    let text = text.unwrap_or_default();
    if is_name(text) {
        return Some(text.into());
    }
    report(Severity::Error, &field(), NO_NAME.to_owned());
    None
}
