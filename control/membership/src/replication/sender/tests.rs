//! Sender: order of full syncs, and the acknowledged epoch of each peer.

use super::*;

const NAMES: [&str; 3] = ["a", "b", "c"];

fn id_of(name: &str) -> Option<GatewayId> {
    NAMES.iter().position(|it| *it == name).map(|at| GatewayId(at as u8))
}

/// A sender with one worker whose table takes three chunks.
fn sender() -> Sender {
    Sender::new(1, |_| vec![0])
}

fn set_peers(sender: &mut Sender, names: &[&str], view: u64) {
    sender.set_peers(names.iter().map(|name| (*name).into()).collect(), view, 7);
}

fn due(sender: &mut Sender) -> Option<ListRequest> {
    let mut requests = sender.next_requests(id_of, |_| 0);
    assert!(requests.len() <= 1, "one request to a worker at once");
    requests.pop()
}

fn reply(sender: &mut Sender, request: &ListRequest) {
    let cursor = Some(request.chunk.cursor + 1).filter(|cursor| *cursor < 3);
    let listed = Listed { observed: (8, 0), policy: "v1".into(), records: Vec::new(), cursor };
    sender.listed(&request.peer, request.chunk, &listed);
}

/// Runs full syncs to their end; returns the peer and the acknowledged epoch of each request.
fn complete_syncs(sender: &mut Sender) -> Vec<(u8, u64)> {
    let mut requested = Vec::new();
    while let Some(request) = due(sender) {
        requested.push((request.target.0, request.acknowledged_epoch));
        reply(sender, &request);
    }
    requested
}

#[test]
fn full_syncs_of_several_peers_are_interleaved() {
    let mut sender = sender();
    set_peers(&mut sender, &NAMES, 7);
    for name in NAMES {
        assert!(sender.link_up(name, 1, 1));
    }
    let requested: Vec<u8> = complete_syncs(&mut sender).into_iter().map(|(to, _)| to).collect();
    assert_eq!(requested, [0, 1, 2, 0, 1, 2, 0, 1, 2]);
    // Also while one of them requests a full sync again and again.
    sender.require_sync("b");
    let mut request = due(&mut sender).unwrap();
    let mut requested = vec![request.target.0];
    for _ in 0..4 {
        sender.require_sync("a");
        reply(&mut sender, &request);
        request = due(&mut sender).unwrap();
        requested.push(request.target.0);
    }
    assert_eq!(requested, [1, 0, 1, 0, 1]);
}

#[test]
fn peers_of_the_first_view_inherit_the_acknowledged_epoch() {
    let mut sender = sender();
    set_peers(&mut sender, &[], 0);
    set_peers(&mut sender, &["a", "b"], 7);
    sender.link_up("a", 1, 1);
    assert_eq!(complete_syncs(&mut sender), [(0, 7); 3]);
    // Peers that are added or return later have received nothing from this process.
    set_peers(&mut sender, &["b", "c"], 9);
    set_peers(&mut sender, &["a", "b", "c"], 10);
    sender.link_up("b", 2, 1);
    assert_eq!(complete_syncs(&mut sender), [(1, 7); 3]);
    sender.link_up("a", 3, 1);
    sender.link_up("c", 4, 1);
    assert_eq!(complete_syncs(&mut sender), [(0, 0), (2, 0), (0, 0), (2, 0), (0, 0), (2, 0)]);
}

#[test]
fn a_process_in_its_predecessors_place_inherits_no_acknowledged_epoch() {
    for takes_place_first in [true, false] {
        let mut sender = sender();
        if takes_place_first {
            sender.take_place();
        }
        set_peers(&mut sender, &["a"], 7);
        sender.link_up("a", 1, 1);
        if !takes_place_first {
            assert_eq!(due(&mut sender).unwrap().acknowledged_epoch, 7);
            sender.list_failed(due_chunk());
            sender.take_place();
        }
        assert_eq!(complete_syncs(&mut sender), [(0, 0); 3]);
    }
}

fn due_chunk() -> ChunkRequest {
    ChunkRequest { round: 1, worker: 0, cursor: 0, expected: (7, None) }
}

#[test]
fn a_restarted_peer_has_no_acknowledged_epoch() {
    let mut sender = sender();
    set_peers(&mut sender, &["a"], 7);
    sender.link_up("a", 1, 5);
    assert_eq!(complete_syncs(&mut sender), [(0, 7); 3]);
    assert!(sender.link_up("a", 2, 5) && !sender.link_up("a", 1, 5), "an older link is ignored");
    assert_eq!(complete_syncs(&mut sender), [(0, 7); 3], "a reconnected link");
    sender.link_up("a", 3, 6);
    assert_eq!(complete_syncs(&mut sender), [(0, 0); 3]);
}
