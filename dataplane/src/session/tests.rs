//! What the tests of sessions have in common, and what they promise together.

use super::timeout::Timeouts;
use super::tuple::{HashKey, Tuple};
use super::{Draft, Sessions};
use crate::counters::Direction;
use crate::time::Tick;

/// Tables with room for so many sessions.
pub(crate) fn sessions(capacity: u32) -> Sessions {
    Sessions::new(capacity, Timeouts::default(), HashKey::new([11, 22, 33, 44])).unwrap()
}

/// A session that a pod begins with a datagram from `port`, and that leaves from `vip_port`.
pub(crate) fn draft(port: u16, vip_port: u16) -> Draft<u32> {
    let origin = Tuple { source: 0x0a00_0001, destination: 9, source_port: port, destination_port: 53, protocol: 17 };
    Draft {
        origin,
        translated: Tuple { source: 0xc000_0201, source_port: vip_port, ..origin },
        direction: Direction::Egress,
        reply_direction: Direction::Reply,
        origin_side: 1,
        reply_side: 2,
        next_hop: None,
        generation: 3,
    }
}

#[test]
fn as_many_sessions_of_one_family_fit_as_the_capacity_says() {
    let mut sessions = sessions(1000);
    for n in 0..1000 {
        sessions.commit(&draft(n, n), Tick(1000)).unwrap();
    }
    assert!(sessions.commit(&draft(1000, 1000), Tick(1000)).is_err() && !sessions.has_room::<u32>());
}
