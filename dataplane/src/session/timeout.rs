//! Session states and idle timeouts.
//!
//! Defaults follow RFC 4787 REQ-5 (UDP: minimum 2 minutes, recommended 5), RFC 5382 REQ-5 (TCP: 2 hours 4 minutes
//! established, 4 minutes transitory) and RFC 5508 REQ-2 (ICMP: 60 seconds). Lower values can be configured.

use super::entry::{Entry, Flags};
use super::tcp;
use crate::flow::address::Address;
use crate::session::end_reason::EndReason;
use crate::session::query::SessionState;
use crate::wire::protocol;

/// Timeouts in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// TCP, established.
    pub tcp_established: u32,
    /// TCP, while opening and after closing.
    pub tcp_transitory: u32,
    pub udp: u32,
    /// ICMP queries.
    pub icmp: u32,
    /// Quarantine of a port after its session.
    pub quarantine: u32,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { tcp_established: 7_440_000, tcp_transitory: 240_000, udp: 300_000, icmp: 60_000, quarantine: 2_000 }
    }
}

impl Timeouts {
    /// State and idle timeout of a session, from its original and reply direction.
    pub fn state<A: Address>(&self, one: &Entry<A>, other: &Entry<A>) -> (SessionState, u32) {
        let (protocol_number, origin, reply) = (one.key().protocol, one.flags(), other.flags());
        if origin.has(Flags::QUARANTINED) {
            return (SessionState::Quarantined, self.quarantine);
        }
        let replied = if reply.has(Flags::SEEN) { SessionState::Established } else { SessionState::Opening };
        match protocol_number {
            // An SCTP association has the timers of a TCP connection (RFC 7857 names none for it).
            protocol::TCP | protocol::SCTP => {
                if tcp::is_closed(origin, reply) {
                    (SessionState::Closing, self.tcp_transitory)
                } else if !(origin.has(Flags::SYN) && reply.has(Flags::SYN) && one.is_confirmed()) {
                    (SessionState::Opening, self.tcp_transitory)
                } else if origin.has(Flags::FIN) || reply.has(Flags::FIN) {
                    (SessionState::HalfClosed, self.tcp_established)
                } else {
                    (SessionState::Established, self.tcp_established)
                }
            }
            protocol::UDP => (replied, self.udp),
            _ => (replied, self.icmp),
        }
    }

    /// Reason for the end of a session that reached its idle timeout.
    pub fn end_reason(protocol_number: u8, origin: Flags, reply: Flags) -> EndReason {
        if protocol_number != protocol::TCP && protocol_number != protocol::SCTP {
            return EndReason::Idle;
        }
        if origin.has(Flags::RST) || reply.has(Flags::RST) {
            EndReason::Reset
        } else if tcp::is_closed(origin, reply) {
            EndReason::Closed
        } else if reply.has(Flags::SYN) {
            EndReason::Idle
        } else {
            EndReason::Unanswered
        }
    }
}
