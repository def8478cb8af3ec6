//! What the gateway says would become of a packet, beside what becomes of it.

use crossbeam::channel::bounded;
use vipgate_dataplane::command::Command;
use vipgate_dataplane::explain::{Class, Found, Probe};
use vipgate_dataplane::io::InterfaceId;
use vipgate_dataplane::snapshot::network::NextHop;
use vipgate_dataplane::verdict::Verdict;
use vipgate_dataplane::watch::glimpse::Glimpse;
use vipgate_dataplane::watch::tap::Captured;

use super::Gateway;

/// Hand-overs of one packet that are followed.
const MOST_HANDOVERS: usize = 8;

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
            (Verdict::Drop(_), Verdict::Answer(_)) => foretold.hears.is_some(),
            (foretold, seen) => foretold == seen,
        };
        assert!(
            is_same,
            "foretold {:?} ({:?}), but {:?}, of {packet:02x?}",
            foretold.verdict, foretold.class, seen.verdict
        );
        let sent = matches!(seen.verdict, Verdict::Forward(_) | Verdict::Around | Verdict::Wait);
        if !sent {
            return;
        }
        assert_eq!(foretold.direction, seen.direction, "{:?} {packet:02x?}", foretold.class);
        // What goes into a tunnel is somewhere inside of what is seen.
        let is_wrapped = foretold.class == Some(Class::Peer) || matches!(foretold.next_hop, Some(NextHop::Node(_)));
        let (Some(foretold), false) = (foretold.translated, is_wrapped) else { return };
        let went = Glimpse::of(&seen.after).unwrap();
        let [source, destination] = went.ports.unwrap_or_default();
        for (foretold, went) in foretold.into_iter().zip([(went.source, source), (went.destination, destination)]) {
            assert_eq!(foretold.ip(), went.0, "{packet:02x?}");
            // A port that is drawn is foretold by nobody.
            assert!([0, went.1].contains(&foretold.port()) || went.1 == 0, "{foretold} foretold, port {} seen", went.1);
        }
    }

    /// What was captured since it was asked last.
    pub fn captured(&self) -> Vec<Captured> {
        let mut all = Vec::new();
        for ring in &self.rings {
            while let Some(place) = ring.take() {
                all.push((*place).clone());
                ring.give(place);
            }
        }
        all
    }
}
