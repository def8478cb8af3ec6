//! Packet metadata that crosses a hand-off, a hairpin or a tunnel between gateways: flags in the frame's mark, and for
//! fragments the ports of their datagram in the headroom. A packet received from a device has none.

use super::Received;
use crate::flow::datagram::{Known, TransportPorts};
use crate::flow::tunnel_metadata::{HAIRPIN_SIDE, TunnelMetadata};

/// Limit of forwarding between gateways, against loops. Usually once is enough. Fragments go to the gateway that
/// reassembles their datagram, and from there to the owner. While a shard changes its owner, the former owner forwards
/// what still arrives there, and the new one sends that back until it has the new view.
pub const MAX_GATEWAY_HOPS: u8 = 3;

const FLOW_HANDED_OFF: u16 = 1;
const FRAGMENT_HANDED_OFF: u16 = 2;
const HAIRPIN: u16 = 4;
const HAS_DATAGRAM: u16 = 8;
/// Gateway-to-gateway hops, two bits.
const HOPS_SHIFT: u32 = 4;
const FROM_PEER: u16 = 3 << HOPS_SHIFT;
/// The sides of its ingress interface on the gateway that forwarded it, two bits.
const SIDES_SHIFT: u32 = 6;
/// One of these bits in a packet that no gateway forwarded, which has no sides.
const COVERED_ONLY: u16 = 1 << SIDES_SHIFT;
/// Shift of the number of workers tried, seven bits.
const TRIED_SHIFT: u32 = 8;
/// Maximum number of workers tried.
pub const MAX_WORKERS_TRIED: u8 = 127;
const PORT_REQUEST: u16 = 1 << 15;
/// Headroom bytes for the ports of a datagram.
const DATAGRAM_BYTES: usize = 9;

impl Received {
    /// Whether it has any metadata.
    #[inline]
    pub fn has_metadata(&self) -> bool {
        self.frame.mark() != 0
    }

    /// Whether it was handed off to the worker that owns its flow; it is not handed off again.
    #[inline]
    pub fn is_handed_off(&self) -> bool {
        self.has(FLOW_HANDED_OFF)
    }

    /// Marks it as handed off to the worker that owns its flow.
    pub fn mark_handed_off(&mut self) {
        self.set(FLOW_HANDED_OFF);
    }

    /// Whether it is a fragment that was handed off to the worker that reassembles its datagram.
    pub fn is_fragment_handed_off(&self) -> bool {
        self.has(FRAGMENT_HANDED_OFF)
    }

    /// Marks it as handed off to the worker that reassembles its datagram.
    pub fn mark_fragment_handed_off(&mut self) {
        self.set(FRAGMENT_HANDED_OFF);
    }

    /// Whether it is a hairpin packet: sent by an endpoint to a VIP of this gateway, and processed as if it came from
    /// outside.
    #[inline]
    pub fn is_hairpin(&self) -> bool {
        self.has(HAIRPIN)
    }

    /// Marks it as a hairpin packet and clears all other metadata.
    pub fn mark_hairpin(&mut self) {
        self.frame.set_mark(HAIRPIN);
    }

    /// Sets the metadata of a packet that came out of a tunnel.
    pub fn mark_from_peer(&mut self, metadata: TunnelMetadata) {
        let TunnelMetadata { sides, hop_count, requests_port } = metadata;
        let sides = if sides & HAIRPIN_SIDE == 0 { u16::from(sides & 3) << SIDES_SHIFT } else { HAIRPIN };
        let request = if requests_port { PORT_REQUEST } else { 0 };
        self.frame.set_mark(u16::from(hop_count & 3) << HOPS_SHIFT | sides | request);
    }

    /// Whether the gateway that its endpoint belongs to has no port for it: another one opens its session.
    #[inline]
    pub fn requests_port(&self) -> bool {
        self.has(PORT_REQUEST)
    }

    /// Marks it as a packet that the gateway of its endpoint has no port for.
    pub fn mark_port_request(&mut self) {
        self.set(PORT_REQUEST);
    }

    /// Whether it came out of the tunnel of a node that sends packets of covered pods alone.
    #[inline]
    pub fn is_covered_only(&self) -> bool {
        self.frame.mark() & (FROM_PEER | COVERED_ONLY) == COVERED_ONLY
    }

    /// Marks it as a packet out of the tunnel of a node that sends packets of covered pods alone.
    pub fn mark_covered_only(&mut self) {
        self.set(COVERED_ONLY);
    }

    /// Whether another gateway forwarded it.
    #[inline]
    pub fn is_from_peer(&self) -> bool {
        self.has(FROM_PEER)
    }

    /// Gateway-to-gateway hops; 0 if it came from outside.
    pub fn hop_count(&self) -> u8 {
        (self.frame.mark() >> HOPS_SHIFT) as u8 & 3
    }

    /// Whether it has reached the limit of gateway-to-gateway hops.
    pub fn is_at_hop_limit(&self) -> bool {
        self.hop_count() >= MAX_GATEWAY_HOPS
    }

    /// The sides of its ingress interface, on this gateway or on the one that forwarded it.
    #[inline]
    pub fn sides(&self, of_interface: u8) -> u8 {
        let mark = self.frame.mark();
        if mark & FROM_PEER == 0 { of_interface } else { (mark >> SIDES_SHIFT) as u8 & 3 }
    }

    /// Workers that could not open its session.
    pub fn workers_tried(&self) -> u8 {
        (self.frame.mark() >> TRIED_SHIFT) as u8 & MAX_WORKERS_TRIED
    }

    /// Counts one more worker that could not open its session.
    pub fn count_worker_tried(&mut self) {
        let tried = (self.workers_tried() + 1).min(MAX_WORKERS_TRIED);
        let others = self.frame.mark() & !(u16::from(MAX_WORKERS_TRIED) << TRIED_SHIFT);
        self.frame.set_mark(others | u16::from(tried) << TRIED_SHIFT);
    }

    /// Ports and identification of its datagram, if it is a fragment that has them.
    pub fn datagram(&self) -> Option<Known> {
        let bytes: &[u8; DATAGRAM_BYTES] = self.frame.headroom().last_chunk().filter(|_| self.has(HAS_DATAGRAM))?;
        let [protocol, s0, s1, d0, d1, id @ ..] = *bytes;
        let (source, destination) = (u16::from_be_bytes([s0, s1]), u16::from_be_bytes([d0, d1]));
        Some(Known { ports: TransportPorts { protocol, source, destination }, translated_id: u32::from_be_bytes(id) })
    }

    /// Stores ports and identification of its datagram, if the headroom has space for them.
    pub fn set_datagram(&mut self, known: Known) {
        let Known { ports: TransportPorts { protocol, source, destination }, translated_id } = known;
        let Some(bytes) = self.frame.headroom_mut().last_chunk_mut::<DATAGRAM_BYTES>() else { return };
        bytes[0] = protocol;
        bytes[1..3].copy_from_slice(&source.to_be_bytes());
        bytes[3..5].copy_from_slice(&destination.to_be_bytes());
        bytes[5..].copy_from_slice(&translated_id.to_be_bytes());
        self.set(HAS_DATAGRAM);
    }

    #[inline]
    fn has(&self, bit: u16) -> bool {
        self.frame.mark() & bit != 0
    }

    fn set(&mut self, bit: u16) {
        self.frame.set_mark(self.frame.mark() | bit);
    }
}

#[cfg(test)]
mod tests {
    use vipgate_mem::Arena;

    use super::*;
    use crate::flow::ids::InterfaceId;

    #[test]
    fn metadata_fields_are_independent_and_leave_the_packet_unchanged() {
        let mut frame = Arena::allocate(1, 2048).unwrap().frames().pop().unwrap();
        assert!(frame.replace(b"packet"));
        let mut received = Received::new(frame, InterfaceId(1));
        assert!(!received.is_handed_off() && received.datagram().is_none() && received.workers_tried() == 0);
        let known =
            Known { ports: TransportPorts { protocol: 17, source: 4000, destination: 53 }, translated_id: 0xdead_beef };
        received.set_datagram(known);
        received.mark_handed_off();
        received.count_worker_tried();
        received.count_worker_tried();
        assert_eq!(
            (received.datagram(), received.workers_tried(), received.frame.bytes()),
            (Some(known), 2, &b"packet"[..])
        );
        assert!(received.is_handed_off() && !received.is_hairpin() && !received.is_fragment_handed_off());
        received.mark_hairpin();
        assert!(received.is_hairpin() && !received.is_handed_off() && received.datagram().is_none());
        assert_eq!((received.is_from_peer(), received.sides(2)), (false, 2));
        received.mark_covered_only();
        assert!(received.is_covered_only() && received.sides(2) == 2 && !received.is_from_peer());
        received.mark_from_peer(TunnelMetadata { sides: 1, hop_count: MAX_GATEWAY_HOPS, requests_port: true });
        received.mark_handed_off();
        received.count_worker_tried();
        assert!(
            received.is_from_peer() && received.is_at_hop_limit() && received.is_handed_off() && !received.is_hairpin()
        );
        assert_eq!((received.sides(2), received.workers_tried()), (1, 1));
        (0..200).for_each(|_| received.count_worker_tried());
        assert!(received.requests_port() && received.workers_tried() == MAX_WORKERS_TRIED && received.is_handed_off());
        received.mark_from_peer(TunnelMetadata { sides: HAIRPIN_SIDE, hop_count: 1, requests_port: false });
        assert!(!received.requests_port());
        assert!(received.is_hairpin() && received.is_from_peer() && !received.is_at_hop_limit());
    }
}
