//! Text form of session filters and packets: protocol and state names, addresses with ports.

use std::net::{IpAddr, SocketAddr};

use thiserror::Error;
use vipgate_dataplane::observe::packet_summary::PacketSummary;
use vipgate_dataplane::session::query::{SessionFilter, SessionState};
use vipgate_dataplane::wire::protocol;

use super::proto;

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
    /// Invalid address.
    #[error("{field}: \"{text}\" is not an IP address")]
    Address {
        /// The filter's field.
        field: &'static str,
        /// Its value.
        text: String,
    },
    /// Unknown protocol.
    #[error("\"{0}\" is not a protocol: tcp, udp, sctp, icmp, icmpv6 or a number up to 255")]
    Protocol(String),
    /// Unknown session state.
    #[error("\"{0}\" is not a session state: opening, established, half_closed, closing or quarantined")]
    State(String),
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

impl TryFrom<&proto::SessionFilter> for SessionFilter {
    type Error = FilterError;

    fn try_from(filter: &proto::SessionFilter) -> Result<Self, FilterError> {
        fn non_empty(text: &str) -> Option<&str> {
            (!text.is_empty()).then_some(text)
        }
        let address = |field, text: &str| -> Result<Option<IpAddr>, FilterError> {
            let parsed = non_empty(text).map(str::parse).transpose();
            parsed.map_err(|_| FilterError::Address { field, text: text.to_owned() })
        };
        Ok(Self {
            endpoint: address("endpoint", &filter.endpoint)?,
            vip: address("vip", &filter.vip)?,
            remote: address("remote", &filter.remote)?,
            protocol: non_empty(&filter.protocol).map(protocol).transpose()?,
            state: non_empty(&filter.state).map(session_state).transpose()?,
        })
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
        let filter = proto::SessionFilter { vip: "203.0.113.300".to_owned(), ..Default::default() };
        let error = SessionFilter::try_from(&filter).unwrap_err().to_string();
        assert_eq!(error, "vip: \"203.0.113.300\" is not an IP address");
    }

    #[test]
    fn an_empty_filter_matches_everything() {
        assert_eq!(SessionFilter::try_from(&proto::SessionFilter::default()), Ok(SessionFilter::default()));
    }
}
