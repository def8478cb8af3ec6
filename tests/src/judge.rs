//! Judges: what captures show must never be, whoever's fault it is.
//!
//! They read what tcpdump wrote and know nothing of the product. Who speaks in a packet, its payload says: clients begin
//! everything with their identity, eight digits, and so does the answer.

mod claims;
mod packet;
mod pcap;
mod sessions;
#[cfg(test)]
mod tests;
mod tunnel;

pub use claims::{Claim, Kind, claims};
pub use packet::{Packet, identity};
pub use pcap::{Frame, read};
pub use sessions::{pods_outside, shared_tuples, two_at_once};
pub use tunnel::{Inner, most_copies, travelled};
