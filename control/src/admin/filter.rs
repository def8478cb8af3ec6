//! Text form of session filters and packets: protocol and state names, addresses with ports.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};
use thiserror::Error;
use vipgate_dataplane::observe::packet_summary::PacketSummary;
use vipgate_dataplane::session::query::{SessionFilter, SessionState};
use vipgate_dataplane::wire::protocol;

use super::capture_filter::GRAMMAR;

/// Named protocols. SCTP's number: RFC 9260.
const PROTOCOLS: [(&str, u8); 5] = [
    ("tcp", protocol::TCP),
    ("udp", protocol::UDP),
    ("sctp", 132),
    ("icmp", protocol::ICMP),
    ("icmpv6", protocol::ICMPV6),
];

/// An invalid filter.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum FilterError {
    /// Unknown protocol.
    #[error("\"{0}\" is not a protocol: tcp, udp, sctp, icmp, icmpv6 or a number up to 255")]
    Protocol(String),
    /// Unknown session state.
    #[error("\"{0}\" is not a session state: opening, established, half_closed, closing or quarantined")]
    State(String),
    /// Unknown keyword of a capture filter.
    #[error("unknown keyword \"{0}\"; expected {GRAMMAR}")]
    UnknownKeyword(String),
    /// Keyword without its argument.
    #[error("\"{0}\" requires {1}")]
    MissingArgument(String, &'static str),
    /// Invalid argument of a keyword.
    #[error("{keyword} \"{text}\": not a valid {expected}")]
    InvalidArgument {
        keyword: String,
        /// Its argument.
        text: String,
        /// Expected kind of argument.
        expected: &'static str,
    },
    /// A criterion that may be given once only.
    #[error("{0} is given more than once")]
    Duplicate(&'static str),
    #[error("in \"{name}\": this gateway has {known}")]
    UnknownInterface {
        /// The name in the filter.
        name: String,
        /// The gateway's interfaces.
        known: String,
    },
}

/// The number of a protocol.
///
/// # Errors
/// When it is neither a known name nor a number.
pub fn protocol(text: &str) -> Result<u8, FilterError> {
    let known = PROTOCOLS.iter().find(|(name, _)| name.eq_ignore_ascii_case(text));
    known.map(|&(_, number)| number).or_else(|| text.parse().ok()).ok_or_else(|| FilterError::Protocol(text.to_owned()))
}

/// The name of a protocol, or its number if it is not a named one.
pub fn protocol_name(number: u8) -> String {
    let known = PROTOCOLS.iter().find(|(_, known)| *known == number);
    known.map_or_else(|| number.to_string(), |(name, _)| (*name).to_owned())
}

/// Source and destination of a packet, with ports if its protocol has them.
pub fn source_and_destination(packet: &PacketSummary) -> [String; 2] {
    let PacketSummary { source, destination, ports, .. } = *packet;
    match ports {
        Some([from, to]) => [(source, from), (destination, to)].map(|end| SocketAddr::from(end).to_string()),
        None => [source, destination].map(|address| address.to_string()),
    }
}

/// The session state of this name.
///
/// # Errors
/// When the name is unknown.
pub fn session_state(text: &str) -> Result<SessionState, FilterError> {
    let found = SessionState::ALL.into_iter().find(|state| state.name().eq_ignore_ascii_case(text));
    found.ok_or_else(|| FilterError::State(text.to_owned()))
}

/// JSON form of a session filter.
#[derive(Serialize, Deserialize)]
#[serde(remote = "SessionFilter")]
pub(super) struct SessionFilterJson {
    endpoint: Option<IpAddr>,
    vip: Option<IpAddr>,
    remote: Option<IpAddr>,
    protocol: Option<u8>,
    #[serde(with = "state_by_name")]
    state: Option<SessionState>,
}

/// JSON form of a session state: its name.
mod state_by_name {
    use serde::de::Error as _;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use vipgate_dataplane::session::query::SessionState;

    pub(super) fn serialize<S: Serializer>(
        state: &(impl Copy + Into<Option<SessionState>>),
        to: S,
    ) -> Result<S::Ok, S::Error> {
        let state: Option<SessionState> = (*state).into();
        state.map(SessionState::name).serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<SessionState>, D::Error> {
        let name = Option::<String>::deserialize(from)?;
        name.map(|name| super::session_state(&name)).transpose().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn protocol_and_state_names_round_trip() {
        for (name, number) in PROTOCOLS {
            assert_eq!(protocol(name), Ok(number));
            assert_eq!(protocol(&name.to_uppercase()), Ok(number));
            assert_eq!(protocol_name(number), name);
        }
        assert_eq!(protocol("47"), Ok(47));
        assert_eq!(protocol_name(47), "47");
        for state_ in SessionState::ALL {
            assert_eq!(session_state(state_.name()), Ok(state_));
        }
    }

    #[test]
    fn errors_name_the_invalid_value() {
        assert_eq!(protocol("256"), Err(FilterError::Protocol("256".to_owned())));
        assert_eq!(protocol(""), Err(FilterError::Protocol(String::new())));
        let names = SessionState::ALL.map(SessionState::name);
        let error = session_state("open").unwrap_err().to_string();
        assert!(names.iter().all(|name| error.contains(name)), "{error}");
        let json = |text| SessionFilterJson::deserialize(&mut serde_json::Deserializer::from_str(text));
        assert_eq!(json(r#"{"state":null}"#).unwrap(), SessionFilter::default(), "an empty filter matches everything");
        let error = json(r#"{"state":"open"}"#).unwrap_err().to_string();
        assert!(error.contains("\"open\" is not a session state"), "{error}");
        assert!(json(r#"{"vip":"203.0.113.300","state":null}"#).is_err());
    }

    #[test]
    fn a_session_filter_is_read_as_it_was_written() {
        for state in SessionState::ALL.map(Some).into_iter().chain([None]) {
            let [endpoint, vip] = ["10.1.0.11", "2001:db8::10"].map(|address| address.parse().ok());
            let filter = SessionFilter { endpoint, vip, remote: None, protocol: Some(17), state };
            let mut text = Vec::new();
            SessionFilterJson::serialize(&filter, &mut serde_json::Serializer::new(&mut text)).unwrap();
            let read = SessionFilterJson::deserialize(&mut serde_json::Deserializer::from_slice(&text));
            assert_eq!(read.unwrap(), filter);
        }
    }
}
