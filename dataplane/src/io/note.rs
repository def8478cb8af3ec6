//! What goes with a packet from one worker to another, or around within one, or came with it from another gateway: some bits in the
//! frame's mark, and for fragments the ports of their datagram before the packet. A packet from outside has none of it.

use super::Received;
use crate::fragments::{Known, Ports};
use crate::snapshot::spec::AROUND;
use crate::snapshot::tunnels::LAST_LEG;

const SETTLED: u16 = 1;
const GATHERED: u16 = 2;
const HAIRPIN: u16 = 4;
const KNOWN: u16 = 8;
/// How often another gateway has sent it here or elsewhere, in two bits.
const LEG: u32 = 4;
const FROM_PEER: u16 = 3 << LEG;
/// The sides that a packet of another gateway came in on there, in two bits.
const SIDES: u32 = 6;
/// Above this bit: workers that were asked in vain.
const ASKED: u32 = 8;
/// Bytes before the packet that hold a datagram's ports.
const KNOWN_BYTES: usize = 9;

impl Received {
    /// Whether it was sent to the worker that has its flow; it is not sent on.
    #[inline]
    pub fn is_settled(&self) -> bool {
        self.has(SETTLED)
    }

    /// Notes that it is sent to the worker that has its flow.
    pub fn settle(&mut self) {
        self.note(SETTLED);
    }

    /// Whether it is a fragment that was sent to the worker that gathers its datagram.
    pub fn is_gathered(&self) -> bool {
        self.has(GATHERED)
    }

    /// Notes that it is sent to the worker that gathers its datagram.
    pub fn gather(&mut self) {
        self.note(GATHERED);
    }

    /// Whether it left a pod for a VIP of this gateway: it is to be taken as if it came from outside.
    #[inline]
    pub fn is_hairpin(&self) -> bool {
        self.has(HAIRPIN)
    }

    /// Sends it around: it has left a pod for a VIP of this gateway, and nothing else is known of it.
    pub fn turn_around(&mut self) {
        self.frame.set_mark(HAIRPIN);
    }

    /// Notes that it came out of a tunnel: the sides that it came in on at the gateway that sent it, and how often it has gone
    /// from gateway to gateway.
    pub fn arrive(&mut self, sides: u8, leg: u8) {
        let sides = if sides & AROUND == 0 { u16::from(sides & 3) << SIDES } else { HAIRPIN };
        self.frame.set_mark(u16::from(leg & 3) << LEG | sides);
    }

    /// Whether another gateway has sent it.
    #[inline]
    pub fn is_from_peer(&self) -> bool {
        self.has(FROM_PEER)
    }

    /// How often it has gone from gateway to gateway; 0: it is from outside.
    pub fn leg(&self) -> u8 {
        (self.frame.mark() >> LEG) as u8 & 3
    }

    /// Whether it is sent to no other gateway.
    pub fn is_at_last(&self) -> bool {
        self.leg() >= LAST_LEG
    }

    /// The sides that it came in on: those of its interface, unless another gateway took it in.
    #[inline]
    pub fn sides(&self, of_interface: u8) -> u8 {
        let mark = self.frame.mark();
        if mark & FROM_PEER == 0 { of_interface } else { (mark >> SIDES) as u8 & 3 }
    }

    /// Workers that were asked in vain to open its session.
    pub fn asked(&self) -> u8 {
        (self.frame.mark() >> ASKED) as u8
    }

    /// Notes that one more worker was asked in vain.
    pub fn ask_another(&mut self) {
        let asked = self.asked().saturating_add(1);
        self.frame.set_mark(self.frame.mark() & ((1 << ASKED) - 1) | u16::from(asked) << ASKED);
    }

    /// What is known of the datagram that it is a fragment of.
    pub fn known(&self) -> Option<Known> {
        let bytes: &[u8; KNOWN_BYTES] = self.frame.headroom().last_chunk().filter(|_| self.has(KNOWN))?;
        let [protocol, s0, s1, d0, d1, id @ ..] = *bytes;
        let (source, destination) = (u16::from_be_bytes([s0, s1]), u16::from_be_bytes([d0, d1]));
        Some(Known { ports: Ports { protocol, source, destination }, translated_id: u32::from_be_bytes(id) })
    }

    /// Notes what is known of its datagram; nothing if there is no room before the packet.
    pub fn set_known(&mut self, known: Known) {
        let Known { ports: Ports { protocol, source, destination }, translated_id } = known;
        let Some(bytes) = self.frame.headroom_mut().last_chunk_mut::<KNOWN_BYTES>() else { return };
        bytes[0] = protocol;
        bytes[1..3].copy_from_slice(&source.to_be_bytes());
        bytes[3..5].copy_from_slice(&destination.to_be_bytes());
        bytes[5..].copy_from_slice(&translated_id.to_be_bytes());
        self.note(KNOWN);
    }

    #[inline]
    fn has(&self, bit: u16) -> bool {
        self.frame.mark() & bit != 0
    }

    fn note(&mut self, bit: u16) {
        self.frame.set_mark(self.frame.mark() | bit);
    }
}

#[cfg(test)]
mod tests {
    use vipgate_mem::Arena;

    use super::*;
    use crate::io::InterfaceId;

    #[test]
    fn notes_stand_side_by_side_and_leave_the_packet_alone() {
        let mut frame = Arena::allocate(1, 2048).unwrap().frames().pop().unwrap();
        assert!(frame.replace(b"packet"));
        let mut received = Received::new(frame, InterfaceId(1));
        assert!(!received.is_settled() && received.known().is_none() && received.asked() == 0);
        let known = Known { ports: Ports { protocol: 17, source: 4000, destination: 53 }, translated_id: 0xdead_beef };
        received.set_known(known);
        received.settle();
        received.ask_another();
        received.ask_another();
        assert_eq!((received.known(), received.asked(), received.frame.bytes()), (Some(known), 2, &b"packet"[..]));
        assert!(received.is_settled() && !received.is_hairpin() && !received.is_gathered());
        received.turn_around();
        assert!(received.is_hairpin() && !received.is_settled() && received.known().is_none());
        assert_eq!((received.is_from_peer(), received.sides(2)), (false, 2));
        received.arrive(1, LAST_LEG);
        received.settle();
        received.ask_another();
        assert!(received.is_from_peer() && received.is_at_last() && received.is_settled() && !received.is_hairpin());
        assert_eq!((received.sides(2), received.asked()), (1, 1));
        received.arrive(AROUND, 1);
        assert!(received.is_hairpin() && received.is_from_peer() && !received.is_at_last());
    }
}
