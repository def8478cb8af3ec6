//! How long a session lives without packets, and what it is called meanwhile.
//!
//! Floors: RFC 4787 REQ-5 (UDP, 2 minutes, default 5), RFC 5382 REQ-5 (TCP, 2 hours 4 minutes and 4 minutes), RFC 5508
//! REQ-2 (ICMP, 60 seconds). All can be set, down to what an operator answers for.

use super::entry::{Entry, Flags};
use super::tcp;
use crate::address::Address;
use crate::command::SessionState;
use crate::counters::EndReason;
use crate::wire::protocol;

/// Timeouts in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// TCP, both handshakes seen.
    pub tcp_established: u32,
    /// TCP while opening or after closing.
    pub tcp_transitory: u32,
    /// UDP.
    pub udp: u32,
    /// ICMP queries.
    pub icmp: u32,
    /// How long a port rests after its session.
    pub quarantine: u32,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { tcp_established: 7_440_000, tcp_transitory: 240_000, udp: 300_000, icmp: 60_000, quarantine: 2_000 }
    }
}

impl Timeouts {
    /// What a session is, and how long it may be silent: from what is known of its two directions.
    pub fn state<A: Address>(&self, one: &Entry<A>, other: &Entry<A>) -> (SessionState, u32) {
        let (number, origin, reply) = (one.key().protocol, one.flags(), other.flags());
        if origin.has(Flags::QUARANTINED) {
            return (SessionState::Quarantined, self.quarantine);
        }
        let answered = if reply.has(Flags::SEEN) { SessionState::Established } else { SessionState::Opening };
        match number {
            // An association lives and closes like a connection (RFC 7857 names no timers for it).
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
            protocol::UDP => (answered, self.udp),
            _ => (answered, self.icmp),
        }
    }

    /// Why a session that was silent for too long ended.
    pub fn end_reason(number: u8, origin: Flags, reply: Flags) -> EndReason {
        if number != protocol::TCP && number != protocol::SCTP {
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
