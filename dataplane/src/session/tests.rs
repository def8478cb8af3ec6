//! Shared helpers for session tests.

use super::timeout::Timeouts;
use super::{Draft, Sessions};
use crate::flow::direction::Direction;
use crate::flow::time::Tick;
use crate::flow::tuple::{HashKey, Tuple};

/// A session table with this capacity.
pub(crate) fn sessions(capacity: u32) -> Sessions {
    Sessions::new(capacity, Timeouts::default(), HashKey::new([11, 22, 33, 44])).unwrap()
}

/// A UDP egress session from pod port `port` and VIP port `vip_port`.
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
fn one_family_can_fill_the_whole_capacity() {
    let mut sessions = sessions(1000);
    for n in 0..1000 {
        sessions.commit(&draft(n, n), Tick(1000)).unwrap();
    }
    assert!(sessions.commit(&draft(1000, 1000), Tick(1000)).is_err() && !sessions.has_capacity::<u32>());
}
