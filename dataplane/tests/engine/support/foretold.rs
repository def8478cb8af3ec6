//! What the gateway says would become of a packet, beside what becomes of it.

use std::net::SocketAddr;

use crossbeam::channel::bounded;
use vipgate_dataplane::command::Command;
use vipgate_dataplane::explain::{Class, Found, Probe};
use vipgate_dataplane::io::InterfaceId;
use vipgate_dataplane::snapshot::network::NextHop;
use vipgate_dataplane::verdict::{Then, Verdict};
use vipgate_dataplane::watch::glimpse::Glimpse;

use super::Gateway;

/// Hand-overs of one packet that are followed.
const MOST_HANDOVERS: usize = 8;

/// Where a packet would come from and go to when it has been translated; `None` of one that is in a tunnel then.
fn ends_foretold(foretold: &Found) -> Option<[SocketAddr; 2]> {
    let is_wrapped = foretold.class == Some(Class::Peer) || matches!(foretold.next_hop, Some(NextHop::Node(_)));
    foretold.translated.filter(|_| !is_wrapped)
}

fn are_ends(foretold: [SocketAddr; 2], packet: &[u8]) -> bool {
    let went = Glimpse::of(packet).unwrap();
    let [source, destination] = went.ports.unwrap_or_default();
    let ends = [(went.source, source), (went.destination, destination)];
    // A port that is drawn is foretold by nobody.
    foretold.into_iter().zip(ends).all(|(foretold, (address, port))| {
        foretold.ip() == address && ([0, port].contains(&foretold.port()) || port == 0)
    })
}

/// What was foretold of a packet that nobody captured came true, by what was sent because of it.
pub fn check_sent(foretold: &Found, sent: &[(InterfaceId, Vec<u8>)]) {
    let (Verdict::Forward(out), Some(ends)) = (foretold.verdict, ends_foretold(foretold)) else { return };
    let is_it = |(interface, packet): &(InterfaceId, Vec<u8>)| *interface == out && are_ends(ends, packet);
    assert!(sent.iter().any(is_it), "{ends:?} by {out:?} foretold, sent {sent:02x?}");
}

impl Gateway {
    /// What would become of a packet that came in at a worker, by way of all workers that it would be handed to. `None` where nobody
    /// foretells: of fragments, errors, questions for link addresses, and what comes out of tunnels.
    pub fn foretell(&mut self, worker: usize, interface: InterfaceId, packet: &[u8]) -> Option<Found> {
        if self.hostile {
            return None;
        }
        let mut at = worker;
        drop(self.captured());
        let mut probe = Box::new(Probe::new(packet.to_vec(), interface));
        for _ in 0..MOST_HANDOVERS {
            let (reply, answer) = bounded(1);
            self.commands[at].send(Command::Explain { probe, reply }).unwrap();
            let now = self.now;
            while answer.is_empty() {
                self.workers[at].turn(now);
            }
            probe = answer.recv().unwrap();
            let found = probe.found.take()?;
            let view = &found.view;
            let is_arrival = view.tunnels.is_arrival(packet) || view.tunnels.is_overlay_arrival(packet);
            let is_rare = !(probe.batch.fragments.is_empty() && probe.batch.errors.is_empty());
            if is_arrival || is_rare || !probe.batch.questions.is_empty() {
                return None;
            }
            match found.verdict {
                Verdict::HandOff(next) => at = usize::from(next.0),
                _ => return Some(found),
            }
        }
        panic!("handed over again and again: {packet:02x?}");
    }

    /// That came true, by what was captured since.
    pub fn check_foretold(&mut self, foretold: &Found, worker: usize, packet: &[u8]) {
        let mut captured = self.captured();
        let mut at = worker;
        let seen = loop {
            let Some(place) = captured.iter().position(|it| usize::from(it.worker.0) == at && it.before == packet)
            else {
                // The packet had no room, or was padded.
                return;
            };
            let seen = captured.remove(place);
            match seen.verdict {
                Verdict::HandOff(next) => at = usize::from(next.0),
                _ => break seen,
            }
        };
        let is_same = match (foretold.verdict, seen.verdict) {
            // Who may hear of it may hear nothing all the same: not too often.
            (Verdict::Drop(_), Verdict::Answer(_) | Verdict::Wait(Then::Answer)) => foretold.hears.is_some(),
            (foretold, seen) => foretold == seen,
        };
        assert!(
            is_same,
            "foretold {:?} ({:?}), but {:?}, of {packet:02x?}",
            foretold.verdict, foretold.class, seen.verdict
        );
        let sent =
            matches!(seen.verdict, Verdict::Forward(_) | Verdict::Around | Verdict::Wait(Then::Forward | Then::Cut));
        if !sent {
            return;
        }
        assert_eq!(Some(foretold.direction), seen.direction, "{:?} {packet:02x?}", foretold.class);
        if let Some(ends) = ends_foretold(foretold) {
            assert!(are_ends(ends, &seen.after), "{ends:?} foretold, of {packet:02x?} became {:02x?}", seen.after);
        }
    }
}
