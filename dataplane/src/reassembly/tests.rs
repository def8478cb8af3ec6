//! Tests of virtual reassembly by example; `model.rs` has the property tests.

use vipgate_mem::Arena;

use super::*;
use crate::flow::ids::InterfaceId;

pub(super) const TIMEOUT: u32 = 2_000;
pub(super) const PORTS: TransportPorts = TransportPorts { protocol: 17, source: 4000, destination: 53 };
pub(super) const NOW: Tick = Tick(u32::MAX - 1_000);

/// A datagram of 56 bytes in four fragments.
pub(super) const FRAGMENTS: [Fragment; 4] = [
    Fragment { offset: 0, length: 16, more: true },
    Fragment { offset: 16, length: 16, more: true },
    Fragment { offset: 32, length: 16, more: true },
    Fragment { offset: 48, length: 8, more: false },
];

pub(super) fn fragments(datagrams: u32, parked: u32) -> VirtualReassembly {
    VirtualReassembly::new(datagrams, parked, TIMEOUT, HashKey::fixed()).unwrap()
}

pub(super) fn key(source: u32, id: u32) -> DatagramKey<u32> {
    DatagramKey { source, destination: 0xcb00_7101, id, protocol: 17 }
}

pub(super) fn v6(high: u64, low: u64, id: u32) -> DatagramKey<V6> {
    DatagramKey { source: V6 { high, low }, destination: V6 { high: 2, low: 2 }, id, protocol: 0 }
}

/// Frames that are distinguished by their interface number.
pub(super) fn frames(count: u8) -> Vec<Received> {
    let frames = Arena::allocate(count.into(), 256).unwrap().frames();
    frames.into_iter().zip(0..).map(|(frame, n)| Received::new(frame, InterfaceId(n))).collect()
}

pub(super) fn tags<'a>(received: impl IntoIterator<Item = &'a Received>) -> Vec<u8> {
    received.into_iter().map(|received| received.interface.0).collect()
}

pub(super) fn release<A: Address>(fragments: &mut VirtualReassembly, key: &DatagramKey<A>) -> Option<Received> {
    fragments.release(key).map(|waiting| match waiting {
        BufferedFragment::Frame(received) => received,
        BufferedFragment::InBatch(packet) => panic!("packet {packet} was buffered"),
    })
}

fn released<A: Address>(fragments: &mut VirtualReassembly, key: &DatagramKey<A>) -> Vec<u8> {
    tags(&std::iter::from_fn(|| release(fragments, key)).collect::<Vec<_>>())
}

/// Buffers the only packet of a batch.
fn buffer<A: Address>(
    fragments: &mut VirtualReassembly,
    key: &DatagramKey<A>,
    received: Received,
) -> Result<(), Received> {
    match fragments.reserve(key, 0) {
        Some(place) => fragments.fill(place, received),
        None => return Err(received),
    }
    Ok(())
}

fn expired_frames(fragments: &mut VirtualReassembly, now: Tick, budget: usize) -> Vec<u8> {
    let mut expired = Vec::new();
    fragments.expire(now, budget, |received| expired.push(received));
    tags(&expired)
}

fn first<A: Address>(fragments: &mut VirtualReassembly, key: &DatagramKey<A>, id: u32) -> Result<Known, FragmentError> {
    fragments.add_first(key, FRAGMENTS[0], PORTS, id, NOW)
}

#[test]
fn later_fragments_are_translated_like_the_first_one() {
    let mut fragments = fragments(8, 8);
    let known = Known { ports: PORTS, translated_id: 77 };
    assert_eq!(first(&mut fragments, &key(1, 5), 77), Ok(known));
    for piece in &FRAGMENTS[1..] {
        assert_eq!(fragments.add_later(&key(1, 5), *piece, NOW), Ok(LaterFragment::Resolved(known)));
    }
    assert_eq!((fragments.len(), fragments.buffered()), (1, 0));
}

#[test]
fn datagrams_are_distinguished_by_every_field_of_the_key() {
    let mut fragments = fragments(64, 8);
    let mine = key(0x0102_0304, 5);
    first(&mut fragments, &mine, 77).unwrap();
    first(&mut fragments, &v6(0, 0x0102_0304, 5), 78).unwrap();
    for other in [
        DatagramKey { source: 9, ..mine },
        DatagramKey { destination: 9, ..mine },
        DatagramKey { id: 9, ..mine },
        DatagramKey { id: 5 << 16, ..mine },
        DatagramKey { protocol: 6, ..mine },
    ] {
        assert_eq!(fragments.add_later(&other, FRAGMENTS[1], NOW), Ok(LaterFragment::OutOfOrder), "{other:?}");
    }
    let as_v6 = DatagramKey { source: V6 { high: 0, low: mine.source.into() }, ..v6(0, 0, 5) };
    let mapped = DatagramKey { destination: V6 { high: 0, low: mine.destination.into() }, protocol: 17, ..as_v6 };
    assert_eq!(fragments.add_later(&mapped, FRAGMENTS[1], NOW), Ok(LaterFragment::OutOfOrder), "the other family");
}

#[test]
fn keys_are_read_from_headers() {
    let packet =
        [&[0x45, 0, 0, 28, 0xab, 0xcd, 0x20, 0, 64, 17, 0, 0, 10, 0, 0, 1, 192, 0, 2, 1][..], &[0; 8]].concat();
    let mut packet: [u8; 28] = packet.try_into().unwrap();
    let sum = crate::wire::checksum::checksum(0, &packet[..20]);
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    let header = ipv4::Header::parse(&packet).unwrap();
    let expected = DatagramKey { source: 0x0a00_0001, destination: 0xc000_0201, id: 0xabcd, protocol: 17 };
    assert_eq!(DatagramKey::of_v4(&header), expected);
    assert_eq!(Fragment::of_v4(&header), Ok(Fragment { offset: 0, length: 8, more: true }));

    let mut packet = vec![0x60, 0, 0, 0, 0, 16, 44, 64];
    packet.extend([[0; 15].as_slice(), &[9], &[0; 15], &[7], &[17, 0, 0, 1, 1, 2, 3, 4], &[0; 8]].concat());
    let header = ipv6::Header::parse(&packet).unwrap();
    let (source, destination) = (V6 { high: 0, low: 9 }, V6 { high: 0, low: 7 });
    assert_eq!(DatagramKey::of_v6(&header), Some(DatagramKey { source, destination, id: 0x0102_0304, protocol: 0 }));
    assert_eq!(Fragment::of_v6(&header), Ok(Fragment { offset: 0, length: 8, more: true }));
    packet[43] = 0;
    let atomic = ipv6::Header::parse(&packet).unwrap();
    assert_eq!((DatagramKey::of_v6(&atomic), Fragment::of_v6(&atomic)), (None, Err(FragmentError::Malformed)));
}

#[test]
fn a_first_fragment_is_rejected_as_a_later_one_and_vice_versa() {
    let mut fragments = fragments(8, 8);
    assert_eq!(fragments.add_later(&key(1, 5), FRAGMENTS[0], NOW), Err(FragmentError::Malformed));
    assert_eq!(fragments.add_first(&key(1, 5), FRAGMENTS[1], PORTS, 77, NOW), Err(FragmentError::Malformed));
    assert!(fragments.is_empty());
}

#[test]
fn out_of_order_fragments_are_released_in_order_of_arrival() {
    let mut fragments = fragments(8, 16);
    let mut frames = frames(4).into_iter();
    for i in [3, 1, 2] {
        assert_eq!(fragments.add_later(&v6(1, 1, 5), FRAGMENTS[i], NOW), Ok(LaterFragment::OutOfOrder));
        assert!(buffer(&mut fragments, &v6(1, 1, 5), frames.next().unwrap()).is_ok());
    }
    assert_eq!(fragments.buffered(), 3);
    assert!(release(&mut fragments, &v6(1, 1, 5)).is_none(), "nothing is released before the first fragment arrives");
    first(&mut fragments, &v6(1, 1, 5), 77).unwrap();
    assert!(
        buffer(&mut fragments, &v6(1, 1, 5), frames.next().unwrap()).is_err(),
        "nothing is buffered after the first fragment"
    );
    assert_eq!(released(&mut fragments, &v6(1, 1, 5)), [0, 1, 2]);
    assert_eq!(fragments.buffered(), 0);
}

#[test]
fn a_datagrams_timeout_is_never_extended() {
    let mut fragments = fragments(8, 16);
    let mut frames = frames(1);
    fragments.add_later(&key(1, 5), FRAGMENTS[1], NOW).unwrap();
    buffer(&mut fragments, &key(1, 5), frames.pop().unwrap()).unwrap();
    fragments.add_later(&key(1, 5), FRAGMENTS[2], NOW.plus(1_999)).unwrap();
    assert!(expired_frames(&mut fragments, NOW.plus(1_999), 100).is_empty());
    assert_eq!(expired_frames(&mut fragments, NOW.plus(2_000), 100), [0]);
    assert_eq!((fragments.len(), fragments.buffered()), (0, 0));
}

#[test]
fn a_fragment_after_the_timeout_starts_a_new_datagram_even_without_an_expiry_run() {
    let mut fragments = fragments(8, 16);
    let (old, new) = (TransportPorts { source: 1, ..PORTS }, TransportPorts { source: 2, ..PORTS });
    fragments.add_first(&key(1, 5), FRAGMENTS[0], old, 77, NOW).unwrap();
    assert_eq!(fragments.add_later(&key(1, 5), FRAGMENTS[1], NOW.plus(2_000)), Ok(LaterFragment::OutOfOrder));
    buffer(&mut fragments, &key(1, 5), frames(1).pop().unwrap()).unwrap();
    let late = NOW.plus(4_000);
    let known = fragments.add_first(&key(1, 5), FRAGMENTS[0], new, 78, late).unwrap();
    assert_eq!(known, Known { ports: new, translated_id: 78 });
    assert!(release(&mut fragments, &key(1, 5)).is_none(), "the buffered fragment belongs to the expired datagram");
    assert_eq!(expired_frames(&mut fragments, late, 100), [0]);
}

#[test]
fn an_expiry_run_stays_within_its_budget() {
    let mut fragments = fragments(64, 64);
    for frame in frames(8) {
        let key = key(1, frame.interface.0.into());
        fragments.add_later(&key, FRAGMENTS[1], NOW).unwrap();
        buffer(&mut fragments, &key, frame).unwrap();
    }
    let late = NOW.plus(TIMEOUT);
    let each: Vec<usize> = (0..6).map(|_| expired_frames(&mut fragments, late, 3).len()).collect();
    assert_eq!(each.iter().sum::<usize>(), 8, "8 datagrams and 8 frames in 6 turns of 3");
    assert!(each.iter().all(|&count| count <= 3));
    assert_eq!((fragments.len(), fragments.buffered()), (0, 0));
}

#[test]
fn an_overlap_poisons_the_datagram_until_its_timeout() {
    let mut fragments = fragments(8, 16);
    fragments.add_later(&key(1, 5), FRAGMENTS[1], NOW).unwrap();
    buffer(&mut fragments, &key(1, 5), frames(1).pop().unwrap()).unwrap();
    let overlap = Fragment { offset: 24, length: 16, more: true };
    assert_eq!(fragments.add_later(&key(1, 5), overlap, NOW), Err(FragmentError::Overlap));
    assert_eq!(expired_frames(&mut fragments, NOW, 100), [0], "the buffered frame is dropped");
    assert_eq!(first(&mut fragments, &key(1, 5), 77), Err(FragmentError::Poisoned));
    assert_eq!(fragments.add_later(&key(1, 5), FRAGMENTS[3], NOW.plus(1_999)), Err(FragmentError::Poisoned));
    assert_eq!(
        fragments.add_later(&key(1, 6), FRAGMENTS[3], NOW),
        Ok(LaterFragment::OutOfOrder),
        "other datagrams aren't affected"
    );
    let late = NOW.plus(2_000);
    assert!(fragments.add_first(&key(1, 5), FRAGMENTS[0], PORTS, 77, late).is_ok());
}

#[test]
fn a_second_first_fragment_with_other_ports_is_an_overlap() {
    let mut fragments = fragments(8, 16);
    first(&mut fragments, &key(1, 5), 77).unwrap();
    let other = TransportPorts { destination: 54, ..PORTS };
    assert_eq!(fragments.add_first(&key(1, 5), FRAGMENTS[0], other, 78, NOW), Err(FragmentError::Overlap));
    assert_eq!(fragments.add_later(&key(1, 5), FRAGMENTS[1], NOW), Err(FragmentError::Poisoned));
}

#[test]
fn duplicates_are_translated_like_the_original_64_times() {
    let mut fragments = fragments(8, 16);
    let known = first(&mut fragments, &key(1, 5), 77).unwrap();
    for _ in 0..63 {
        assert_eq!(first(&mut fragments, &key(1, 5), 78), Ok(known), "with the identification of the original");
    }
    fragments.add_later(&key(1, 5), FRAGMENTS[1], NOW).unwrap();
    assert_eq!(fragments.add_later(&key(1, 5), FRAGMENTS[1], NOW), Ok(LaterFragment::Resolved(known)), "duplicate 64");
    assert_eq!(fragments.add_later(&key(1, 5), FRAGMENTS[1], NOW), Err(FragmentError::TooManyDuplicates));
    assert_eq!(
        fragments.add_later(&key(1, 5), FRAGMENTS[2], NOW),
        Ok(LaterFragment::Resolved(known)),
        "new fragments still pass"
    );
}

#[test]
fn a_reused_identification_starts_a_new_datagram() {
    let mut fragments = fragments(8, 16);
    for round in 0..100 {
        let ports = TransportPorts { source: round, ..PORTS };
        let known = fragments.add_first(&key(1, 5), FRAGMENTS[0], ports, round.into(), NOW).unwrap();
        assert_eq!(known, Known { ports, translated_id: round.into() });
        for piece in &FRAGMENTS[1..] {
            assert_eq!(fragments.add_later(&key(1, 5), *piece, NOW), Ok(LaterFragment::Resolved(known)));
        }
    }
    let longer = Fragment { offset: 48, length: 16, more: true };
    assert_eq!(
        fragments.add_later(&key(1, 5), longer, NOW),
        Ok(LaterFragment::OutOfOrder),
        "it can't belong to the previous datagram"
    );
    assert_eq!(fragments.len(), 1);
}

#[test]
fn a_datagram_buffers_16_frames_and_is_dropped_with_the_next() {
    let mut fragments = fragments(8, 128);
    let mut frames = frames(17).into_iter();
    for i in 0..16 {
        let piece = Fragment { offset: 16 + i * 8, length: 8, more: true };
        assert_eq!(fragments.add_later(&key(1, 5), piece, NOW), Ok(LaterFragment::OutOfOrder));
        assert!(buffer(&mut fragments, &key(1, 5), frames.next().unwrap()).is_ok());
    }
    fragments.add_later(&key(1, 5), Fragment { offset: 16 + 128, length: 8, more: true }, NOW).unwrap();
    assert_eq!(tags(&buffer(&mut fragments, &key(1, 5), frames.next().unwrap()).err()), [16]);
    assert_eq!(first(&mut fragments, &key(1, 5), 77), Err(FragmentError::Poisoned));
    assert_eq!(expired_frames(&mut fragments, NOW, 100), (0..16).collect::<Vec<_>>());
}

#[test]
fn a_fragment_without_a_datagram_is_not_buffered() {
    let mut fragments = fragments(8, 8);
    assert!(buffer(&mut fragments, &key(1, 5), frames(1).pop().unwrap()).is_err());
    assert!(release(&mut fragments, &key(1, 5)).is_none());
}

#[test]
fn a_flood_from_one_source_is_held_to_a_quarter_of_the_capacity() {
    let mut fragments = fragments(64, 64);
    let errors = (0..1_000).filter(|&id| fragments.add_later(&key(1, id), FRAGMENTS[1], NOW).is_err()).count();
    assert_eq!((errors, fragments.len()), (1_000 - 16, 16), "a quarter of the datagrams");
    assert_eq!(fragments.add_later(&key(1, 1_001), FRAGMENTS[1], NOW), Err(FragmentError::LimitReached));
    assert!(first(&mut fragments, &key(0x0a00_0001, 5), 77).is_ok());

    let mut frames = frames(20).into_iter();
    let buffered = (0..16).filter(|&id| buffer(&mut fragments, &key(1, id), frames.next().unwrap()).is_ok()).count();
    assert_eq!(buffered, 16, "a quarter of the frames");
    fragments.add_later(&key(1, 0), FRAGMENTS[2], NOW).unwrap();
    assert!(buffer(&mut fragments, &key(1, 0), frames.next().unwrap()).is_err());
    fragments.add_later(&key(0x0a00_0002, 5), FRAGMENTS[1], NOW).unwrap();
    assert!(buffer(&mut fragments, &key(0x0a00_0002, 5), frames.next().unwrap()).is_ok());
}

#[test]
fn an_ipv6_prefix_is_held_to_half_of_the_capacity() {
    let mut fragments = fragments(64, 64);
    for low in 0..1_000 {
        let _ = fragments.add_later(&v6(1, low, 5), FRAGMENTS[1], NOW);
    }
    assert_eq!(fragments.len(), 32);
    assert!(first(&mut fragments, &v6(2, 1, 5), 77).is_ok());
}

#[test]
fn a_full_table_keeps_unexpired_datagrams() {
    let mut fragments = fragments(8, 8);
    for source in 0..4 {
        for id in 0..2 {
            first(&mut fragments, &key(source << 8, id), id).unwrap();
        }
    }
    assert_eq!(first(&mut fragments, &key(9 << 8, 5), 77), Err(FragmentError::LimitReached));
    for source in 0..4 {
        assert!(matches!(fragments.add_later(&key(source << 8, 1), FRAGMENTS[1], NOW), Ok(LaterFragment::Resolved(_))));
    }
    let late = NOW.plus(TIMEOUT);
    assert!(
        fragments.add_first(&key(9 << 8, 5), FRAGMENTS[0], PORTS, 77, late).is_ok(),
        "expired datagrams are removed"
    );
}

#[test]
fn complete_datagrams_use_no_capacity() {
    let mut fragments = fragments(4, 16);
    for id in 0..1_000 {
        first(&mut fragments, &key(1, id), id).unwrap();
        for piece in &FRAGMENTS[1..] {
            assert!(matches!(fragments.add_later(&key(1, id), *piece, NOW), Ok(LaterFragment::Resolved(_))));
        }
    }
    assert_eq!(fragments.len(), 4, "the last ones are kept to recognize duplicates");
    assert!(matches!(fragments.add_later(&key(1, 999), FRAGMENTS[1], NOW), Ok(LaterFragment::Resolved(_))));
    for source in 2..6 {
        assert!(first(&mut fragments, &key(source << 8, 5), 77).is_ok(), "one of four for each source");
    }
}

#[test]
fn a_complete_datagram_with_buffered_frames_is_not_evicted() {
    let mut fragments = fragments(1, 16);
    for (piece, frame) in FRAGMENTS[1..].iter().zip(frames(3)) {
        fragments.add_later(&key(1, 5), *piece, NOW).unwrap();
        buffer(&mut fragments, &key(1, 5), frame).unwrap();
    }
    first(&mut fragments, &key(1, 5), 77).unwrap();
    assert_eq!(first(&mut fragments, &key(2 << 8, 6), 78), Err(FragmentError::LimitReached));
    assert_eq!(released(&mut fragments, &key(1, 5)), [0, 1, 2]);
    assert!(first(&mut fragments, &key(2 << 8, 6), 78).is_ok());
}

#[test]
fn zero_capacity_rejects_every_fragment() {
    let mut none = fragments(0, 0);
    assert_eq!(first(&mut none, &key(1, 5), 77), Err(FragmentError::LimitReached));
    let mut no_frames = fragments(4, 0);
    assert_eq!(no_frames.add_later(&key(1, 5), FRAGMENTS[1], NOW), Ok(LaterFragment::OutOfOrder));
    assert!(buffer(&mut no_frames, &key(1, 5), frames(1).pop().unwrap()).is_err());
}
