//! Compares the trace of a packet with what the gateway then does with it.

use std::net::SocketAddr;

use crossbeam::channel::bounded;
use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::flow::verdict::{AfterResolution, Verdict};
use vipgate_dataplane::observe::packet_summary::PacketSummary;
use vipgate_dataplane::policy::network::NextHop;
use vipgate_dataplane::stage::trace::{PacketClass, Probe, TraceResult};
use vipgate_dataplane::worker::command::Command;

use crate::Gateway;

/// Hand-offs of one packet that are followed.
const MAX_HANDOFFS: usize = 8;

/// Source and destination after translation; `None` if the packet leaves in a tunnel.
fn predicted_ends(predicted: &TraceResult) -> Option<[SocketAddr; 2]> {
    let is_tunneled =
        predicted.class == Some(PacketClass::ForwardToOwner) || matches!(predicted.next_hop, Some(NextHop::Node(_)));
    predicted.translated.filter(|_| !is_tunneled)
}

fn has_ends(predicted: [SocketAddr; 2], packet: &[u8]) -> bool {
    let packet = PacketSummary::of(packet).unwrap();
    let [source, destination] = packet.ports.unwrap_or_default();
    let ends = [(packet.source, source), (packet.destination, destination)];
    // A port that is chosen at random is not predicted.
    predicted.into_iter().zip(ends).all(|(predicted, (address, port))| {
        predicted.ip() == address && ([0, port].contains(&predicted.port()) || port == 0)
    })
}

/// Checks a prediction against the packets sent, when the packet was not captured.
pub fn check_sent(predicted: &TraceResult, sent: &[(InterfaceId, Vec<u8>)]) {
    let (Verdict::Forward(out), Some(mut ends)) = (predicted.verdict, predicted_ends(predicted)) else { return };
    // A VIP may have a private address outside.
    let snapshot = &predicted.snapshot;
    let mut private = snapshot.policy.static_nat().addresses();
    if let Some((private, _)) = private.find(|(_, vip)| *vip == ends[0].ip())
        && snapshot.network.interface(out).role.is_outside()
    {
        ends[0].set_ip(private);
    }
    let is_it = |(interface, packet): &(InterfaceId, Vec<u8>)| *interface == out && has_ends(ends, packet);
    assert!(sent.iter().any(is_it), "predicted {ends:?} out of {out:?}, sent {sent:02x?}");
}

impl Gateway {
    /// Traces a packet from a worker through all workers that it would be handed to. `None` for what isn't predicted:
    /// fragments, ICMP errors, ARP and ND, and tunnel packets.
    pub fn predict(&mut self, worker: usize, interface: InterfaceId, packet: &[u8]) -> Option<TraceResult> {
        if self.hostile {
            return None;
        }
        let mut at = worker;
        drop(self.captured());
        let mut probe = Box::new(Probe::new(packet.to_vec(), interface));
        for _ in 0..MAX_HANDOFFS {
            let (reply, response) = bounded(1);
            self.commands[at].send(Command::Trace { probe, reply }).unwrap();
            let now = self.now;
            while response.is_empty() {
                self.workers[at].turn(now);
            }
            probe = response.recv().unwrap();
            let found = probe.result.take()?;
            let snapshot = &found.snapshot;
            let is_tunnel_packet =
                snapshot.tunnels.is_gateway_packet(packet) || snapshot.tunnels.is_overlay_packet(packet);
            let is_unpredicted = !(probe.batch.fragments.is_empty() && probe.batch.icmp_errors.is_empty());
            if is_tunnel_packet || is_unpredicted || !probe.batch.arp_nd.is_empty() {
                return None;
            }
            match found.verdict {
                Verdict::HandOff(next) => at = usize::from(next.0),
                _ => return Some(found),
            }
        }
        panic!("handed off in a loop: {packet:02x?}");
    }

    /// Checks a prediction against the capture of the packet.
    pub fn check_prediction(&mut self, predicted: &TraceResult, worker: usize, packet: &[u8]) {
        let mut captured = self.captured();
        // Captures show VIPs; only a packet from outside has a private address.
        let mut translated = packet.to_vec();
        predicted.snapshot.policy.static_nat().received(&mut translated);
        let packet = &translated[..];
        let mut at = worker;
        let seen = loop {
            let Some(position) = captured.iter().position(|it| usize::from(it.worker.0) == at && it.before == packet)
            else {
                // The capture ring was full, or the packet was padded.
                return;
            };
            let seen = captured.remove(position);
            match seen.verdict {
                Verdict::HandOff(next) => at = usize::from(next.0),
                _ => break seen,
            }
        };
        let is_same = match (predicted.verdict, seen.verdict) {
            // An ICMP error or reset may be suppressed by the rate limiter.
            (Verdict::Drop(_), Verdict::Reply(_) | Verdict::AwaitNeighbor(AfterResolution::Reply)) => {
                predicted.reply.is_some()
            }
            // So may a reply to a health check.
            (
                Verdict::Reply(_) | Verdict::AwaitNeighbor(AfterResolution::Reply) | Verdict::Hairpin,
                Verdict::Consume,
            ) => predicted.class == Some(PacketClass::HealthCheck),
            (predicted, seen) => predicted == seen,
        };
        assert!(
            is_same,
            "predicted {:?} ({:?}), was {:?}, for {packet:02x?}",
            predicted.verdict, predicted.class, seen.verdict
        );
        let is_forwarded = matches!(
            seen.verdict,
            Verdict::Forward(_)
                | Verdict::Hairpin
                | Verdict::AwaitNeighbor(AfterResolution::Forward | AfterResolution::Fragment)
        );
        if !is_forwarded {
            return;
        }
        assert_eq!(Some(predicted.direction), seen.direction, "{:?} {packet:02x?}", predicted.class);
        if let Some(ends) = predicted_ends(predicted) {
            assert!(has_ends(ends, &seen.after), "predicted {ends:?}, {packet:02x?} became {:02x?}", seen.after);
        }
    }
}
