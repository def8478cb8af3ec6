//! What is promised about fragments, by example. The promises for every sequence stand in `model.rs`.

use vipgate_mem::Arena;

use super::*;
use crate::io::InterfaceId;

pub(super) const TIMEOUT: u32 = 2_000;
pub(super) const PORTS: Ports = Ports { protocol: 17, source: 4000, destination: 53 };
pub(super) const NOW: Tick = Tick(u32::MAX - 1_000);

/// A datagram of 56 bytes in four pieces.
pub(super) const PIECES: [Piece; 4] = [
    Piece { offset: 0, length: 16, more: true },
    Piece { offset: 16, length: 16, more: true },
    Piece { offset: 32, length: 16, more: true },
    Piece { offset: 48, length: 8, more: false },
];

pub(super) fn fragments(datagrams: u32, parked: u32) -> Fragments {
    Fragments::new(datagrams, parked, TIMEOUT, HashKey::fixed()).unwrap()
}

pub(super) fn key(source: u32, id: u32) -> Key<u32> {
    Key { source, destination: 0xcb00_7101, id, protocol: 17 }
}

pub(super) fn v6(high: u64, low: u64, id: u32) -> Key<V6> {
    Key { source: V6 { high, low }, destination: V6 { high: 2, low: 2 }, id, protocol: 0 }
}

/// Frames that can be told apart by the interface that they pretend to have come in on.
pub(super) fn frames(count: u8) -> Vec<Received> {
    let frames = Arena::allocate(count.into(), 256).unwrap().frames();
    frames.into_iter().zip(0..).map(|(frame, n)| Received::new(frame, InterfaceId(n))).collect()
}

pub(super) fn tags<'a>(received: impl IntoIterator<Item = &'a Received>) -> Vec<u8> {
    received.into_iter().map(|received| received.interface.0).collect()
}

pub(super) fn release<A: Address>(fragments: &mut Fragments, key: &Key<A>) -> Option<Received> {
    fragments.release(key).map(|waiting| match waiting {
        Waiting::Frame(received) => received,
        Waiting::InBatch(packet) => panic!("packet {packet} was parked"),
    })
}

fn released<A: Address>(fragments: &mut Fragments, key: &Key<A>) -> Vec<u8> {
    tags(&std::iter::from_fn(|| release(fragments, key)).collect::<Vec<_>>())
}

/// Parks the only packet of a batch.
fn park<A: Address>(fragments: &mut Fragments, key: &Key<A>, received: Received) -> Result<(), Received> {
    match fragments.reserve(key, 0) {
        Some(place) => fragments.fill(place, received),
        None => return Err(received),
    }
    Ok(())
}

fn swept(fragments: &mut Fragments, now: Tick, budget: usize) -> Vec<u8> {
    let mut expired = Vec::new();
    fragments.sweep(now, budget, |received| expired.push(received));
    tags(&expired)
}

fn first<A: Address>(fragments: &mut Fragments, key: &Key<A>, id: u32) -> Result<Known, Refusal> {
    fragments.first(key, PIECES[0], PORTS, id, NOW)
}

#[test]
fn later_fragments_find_what_the_first_one_said() {
    let mut fragments = fragments(8, 8);
    let known = Known { ports: PORTS, translated_id: 77 };
    assert_eq!(first(&mut fragments, &key(1, 5), 77), Ok(known));
    for piece in &PIECES[1..] {
        assert_eq!(fragments.later(&key(1, 5), *piece, NOW), Ok(Later::Known(known)));
    }
    assert_eq!((fragments.len(), fragments.parked()), (1, 0));
}

#[test]
fn datagrams_that_differ_in_anything_are_kept_apart() {
    let mut fragments = fragments(64, 8);
    let mine = key(0x0102_0304, 5);
    first(&mut fragments, &mine, 77).unwrap();
    first(&mut fragments, &v6(0, 0x0102_0304, 5), 78).unwrap();
    for other in [
        Key { source: 9, ..mine },
        Key { destination: 9, ..mine },
        Key { id: 9, ..mine },
        Key { id: 5 << 16, ..mine },
        Key { protocol: 6, ..mine },
    ] {
        assert_eq!(fragments.later(&other, PIECES[1], NOW), Ok(Later::Early), "{other:?}");
    }
    let as_v6 = Key { source: V6 { high: 0, low: mine.source.into() }, ..v6(0, 0, 5) };
    let mapped = Key { destination: V6 { high: 0, low: mine.destination.into() }, protocol: 17, ..as_v6 };
    assert_eq!(fragments.later(&mapped, PIECES[1], NOW), Ok(Later::Early), "the other family");
}

#[test]
fn keys_are_read_from_headers() {
    let packet =
        [&[0x45, 0, 0, 28, 0xab, 0xcd, 0x20, 0, 64, 17, 0, 0, 10, 0, 0, 1, 192, 0, 2, 1][..], &[0; 8]].concat();
    let mut packet: [u8; 28] = packet.try_into().unwrap();
    let sum = crate::wire::checksum::checksum(0, &packet[..20]);
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    let header = ipv4::Header::parse(&packet).unwrap();
    let expected = Key { source: 0x0a00_0001, destination: 0xc000_0201, id: 0xabcd, protocol: 17 };
    assert_eq!(Key::of_v4(&header), expected);
    assert_eq!(Piece::of_v4(&header), Ok(Piece { offset: 0, length: 8, more: true }));

    let mut packet = vec![0x60, 0, 0, 0, 0, 16, 44, 64];
    packet.extend([[0; 15].as_slice(), &[9], &[0; 15], &[7], &[17, 0, 0, 1, 1, 2, 3, 4], &[0; 8]].concat());
    let header = ipv6::Header::parse(&packet).unwrap();
    let (source, destination) = (V6 { high: 0, low: 9 }, V6 { high: 0, low: 7 });
    assert_eq!(Key::of_v6(&header), Some(Key { source, destination, id: 0x0102_0304, protocol: 0 }));
    assert_eq!(Piece::of_v6(&header), Ok(Piece { offset: 0, length: 8, more: true }));
    packet[43] = 0;
    let atomic = ipv6::Header::parse(&packet).unwrap();
    assert_eq!((Key::of_v6(&atomic), Piece::of_v6(&atomic)), (None, Err(Refusal::Malformed)));
}

#[test]
fn a_first_fragment_is_never_taken_for_a_later_one() {
    let mut fragments = fragments(8, 8);
    assert_eq!(fragments.later(&key(1, 5), PIECES[0], NOW), Err(Refusal::Malformed));
    assert_eq!(fragments.first(&key(1, 5), PIECES[1], PORTS, 77, NOW), Err(Refusal::Malformed));
    assert!(fragments.is_empty());
}

#[test]
fn early_fragments_are_released_in_the_order_of_their_arrival() {
    let mut fragments = fragments(8, 16);
    let mut frames = frames(4).into_iter();
    for i in [3, 1, 2] {
        assert_eq!(fragments.later(&v6(1, 1, 5), PIECES[i], NOW), Ok(Later::Early));
        assert!(park(&mut fragments, &v6(1, 1, 5), frames.next().unwrap()).is_ok());
    }
    assert_eq!(fragments.parked(), 3);
    assert!(release(&mut fragments, &v6(1, 1, 5)).is_none(), "nothing is released before the first has come");
    first(&mut fragments, &v6(1, 1, 5), 77).unwrap();
    assert!(park(&mut fragments, &v6(1, 1, 5), frames.next().unwrap()).is_err(), "nothing waits for what has come");
    assert_eq!(released(&mut fragments, &v6(1, 1, 5)), [0, 1, 2]);
    assert_eq!(fragments.parked(), 0);
}

#[test]
fn a_datagrams_time_is_not_prolonged() {
    let mut fragments = fragments(8, 16);
    let mut frames = frames(1);
    fragments.later(&key(1, 5), PIECES[1], NOW).unwrap();
    park(&mut fragments, &key(1, 5), frames.pop().unwrap()).unwrap();
    fragments.later(&key(1, 5), PIECES[2], NOW.plus(1_999)).unwrap();
    assert!(swept(&mut fragments, NOW.plus(1_999), 100).is_empty());
    assert_eq!(swept(&mut fragments, NOW.plus(2_000), 100), [0]);
    assert_eq!((fragments.len(), fragments.parked()), (0, 0));
}

#[test]
fn a_fragment_that_comes_after_the_time_begins_a_new_datagram_even_if_nobody_swept() {
    let mut fragments = fragments(8, 16);
    let (old, new) = (Ports { source: 1, ..PORTS }, Ports { source: 2, ..PORTS });
    fragments.first(&key(1, 5), PIECES[0], old, 77, NOW).unwrap();
    assert_eq!(fragments.later(&key(1, 5), PIECES[1], NOW.plus(2_000)), Ok(Later::Early));
    park(&mut fragments, &key(1, 5), frames(1).pop().unwrap()).unwrap();
    let late = NOW.plus(4_000);
    let known = fragments.first(&key(1, 5), PIECES[0], new, 78, late).unwrap();
    assert_eq!(known, Known { ports: new, translated_id: 78 });
    assert!(release(&mut fragments, &key(1, 5)).is_none(), "what waited belongs to the old one");
    assert_eq!(swept(&mut fragments, late, 100), [0]);
}

#[test]
fn a_sweep_does_no_more_than_it_may() {
    let mut fragments = fragments(64, 64);
    for frame in frames(8) {
        let key = key(1, frame.interface.0.into());
        fragments.later(&key, PIECES[1], NOW).unwrap();
        park(&mut fragments, &key, frame).unwrap();
    }
    let late = NOW.plus(TIMEOUT);
    let each: Vec<usize> = (0..6).map(|_| swept(&mut fragments, late, 3).len()).collect();
    assert_eq!(each.iter().sum::<usize>(), 8, "8 datagrams and 8 frames in 6 turns of 3");
    assert!(each.iter().all(|&count| count <= 3));
    assert_eq!((fragments.len(), fragments.parked()), (0, 0));
}

#[test]
fn an_overlap_ends_the_datagram_until_its_time_is_over() {
    let mut fragments = fragments(8, 16);
    fragments.later(&key(1, 5), PIECES[1], NOW).unwrap();
    park(&mut fragments, &key(1, 5), frames(1).pop().unwrap()).unwrap();
    let overlap = Piece { offset: 24, length: 16, more: true };
    assert_eq!(fragments.later(&key(1, 5), overlap, NOW), Err(Refusal::Overlap));
    assert_eq!(swept(&mut fragments, NOW, 100), [0], "what waited has waited in vain");
    assert_eq!(first(&mut fragments, &key(1, 5), 77), Err(Refusal::Poisoned));
    assert_eq!(fragments.later(&key(1, 5), PIECES[3], NOW.plus(1_999)), Err(Refusal::Poisoned));
    assert_eq!(fragments.later(&key(1, 6), PIECES[3], NOW), Ok(Later::Early), "others go on");
    let late = NOW.plus(2_000);
    assert!(fragments.first(&key(1, 5), PIECES[0], PORTS, 77, late).is_ok());
}

#[test]
fn a_second_first_fragment_with_other_ports_is_an_overlap() {
    let mut fragments = fragments(8, 16);
    first(&mut fragments, &key(1, 5), 77).unwrap();
    let other = Ports { destination: 54, ..PORTS };
    assert_eq!(fragments.first(&key(1, 5), PIECES[0], other, 78, NOW), Err(Refusal::Overlap));
    assert_eq!(fragments.later(&key(1, 5), PIECES[1], NOW), Err(Refusal::Poisoned));
}

#[test]
fn repetitions_go_where_the_first_of_them_went_64_times() {
    let mut fragments = fragments(8, 16);
    let known = first(&mut fragments, &key(1, 5), 77).unwrap();
    for _ in 0..63 {
        assert_eq!(first(&mut fragments, &key(1, 5), 78), Ok(known), "with the identification of the first of them");
    }
    fragments.later(&key(1, 5), PIECES[1], NOW).unwrap();
    assert_eq!(fragments.later(&key(1, 5), PIECES[1], NOW), Ok(Later::Known(known)), "number 64");
    assert_eq!(fragments.later(&key(1, 5), PIECES[1], NOW), Err(Refusal::Repeated));
    assert_eq!(fragments.later(&key(1, 5), PIECES[2], NOW), Ok(Later::Known(known)), "what is new still passes");
}

#[test]
fn an_identification_that_comes_round_begins_a_new_datagram() {
    let mut fragments = fragments(8, 16);
    for round in 0..100 {
        let ports = Ports { source: round, ..PORTS };
        let known = fragments.first(&key(1, 5), PIECES[0], ports, round.into(), NOW).unwrap();
        assert_eq!(known, Known { ports, translated_id: round.into() });
        for piece in &PIECES[1..] {
            assert_eq!(fragments.later(&key(1, 5), *piece, NOW), Ok(Later::Known(known)));
        }
    }
    let longer = Piece { offset: 48, length: 16, more: true };
    assert_eq!(fragments.later(&key(1, 5), longer, NOW), Ok(Later::Early), "it can't be of the one before");
    assert_eq!(fragments.len(), 1);
}

#[test]
fn a_datagram_keeps_16_frames_waiting_and_is_given_up_with_the_next() {
    let mut fragments = fragments(8, 128);
    let mut frames = frames(17).into_iter();
    for i in 0..16 {
        let piece = Piece { offset: 16 + i * 8, length: 8, more: true };
        assert_eq!(fragments.later(&key(1, 5), piece, NOW), Ok(Later::Early));
        assert!(park(&mut fragments, &key(1, 5), frames.next().unwrap()).is_ok());
    }
    fragments.later(&key(1, 5), Piece { offset: 16 + 128, length: 8, more: true }, NOW).unwrap();
    assert_eq!(tags(&park(&mut fragments, &key(1, 5), frames.next().unwrap()).err()), [16]);
    assert_eq!(first(&mut fragments, &key(1, 5), 77), Err(Refusal::Poisoned));
    assert_eq!(swept(&mut fragments, NOW, 100), (0..16).collect::<Vec<_>>());
}

#[test]
fn what_nobody_asked_about_is_not_parked() {
    let mut fragments = fragments(8, 8);
    assert!(park(&mut fragments, &key(1, 5), frames(1).pop().unwrap()).is_err());
    assert!(release(&mut fragments, &key(1, 5)).is_none());
}

#[test]
fn a_flood_from_one_source_costs_nobody_else() {
    let mut fragments = fragments(64, 64);
    let refusals = (0..1_000).filter(|&id| fragments.later(&key(1, id), PIECES[1], NOW).is_err()).count();
    assert_eq!((refusals, fragments.len()), (1_000 - 16, 16), "a quarter is the flood's");
    assert_eq!(fragments.later(&key(1, 1_001), PIECES[1], NOW), Err(Refusal::TooMany));
    assert!(first(&mut fragments, &key(0x0a00_0001, 5), 77).is_ok());

    let mut frames = frames(20).into_iter();
    let parked = (0..16).filter(|&id| park(&mut fragments, &key(1, id), frames.next().unwrap()).is_ok()).count();
    assert_eq!(parked, 16, "a quarter of the frames, too");
    fragments.later(&key(1, 0), PIECES[2], NOW).unwrap();
    assert!(park(&mut fragments, &key(1, 0), frames.next().unwrap()).is_err());
    fragments.later(&key(0x0a00_0002, 5), PIECES[1], NOW).unwrap();
    assert!(park(&mut fragments, &key(0x0a00_0002, 5), frames.next().unwrap()).is_ok());
}

#[test]
fn a_host_with_a_network_full_of_addresses_gets_half() {
    let mut fragments = fragments(64, 64);
    for low in 0..1_000 {
        let _ = fragments.later(&v6(1, low, 5), PIECES[1], NOW);
    }
    assert_eq!(fragments.len(), 32);
    assert!(first(&mut fragments, &v6(2, 1, 5), 77).is_ok());
}

#[test]
fn a_full_memory_keeps_what_it_has() {
    let mut fragments = fragments(8, 8);
    for source in 0..4 {
        for id in 0..2 {
            first(&mut fragments, &key(source << 8, id), id).unwrap();
        }
    }
    assert_eq!(first(&mut fragments, &key(9 << 8, 5), 77), Err(Refusal::TooMany));
    for source in 0..4 {
        assert!(matches!(fragments.later(&key(source << 8, 1), PIECES[1], NOW), Ok(Later::Known(_))));
    }
    let late = NOW.plus(TIMEOUT);
    assert!(fragments.first(&key(9 << 8, 5), PIECES[0], PORTS, 77, late).is_ok(), "what is over makes way");
}

#[test]
fn datagrams_that_are_complete_take_no_room_from_others() {
    let mut fragments = fragments(4, 16);
    for id in 0..1_000 {
        first(&mut fragments, &key(1, id), id).unwrap();
        for piece in &PIECES[1..] {
            assert!(matches!(fragments.later(&key(1, id), *piece, NOW), Ok(Later::Known(_))));
        }
    }
    assert_eq!(fragments.len(), 4, "the last ones are remembered for their repetitions");
    assert!(matches!(fragments.later(&key(1, 999), PIECES[1], NOW), Ok(Later::Known(_))));
    for source in 2..6 {
        assert!(first(&mut fragments, &key(source << 8, 5), 77).is_ok(), "one of four each");
    }
}

#[test]
fn a_complete_datagram_makes_no_way_while_frames_of_it_wait() {
    let mut fragments = fragments(1, 16);
    for (piece, frame) in PIECES[1..].iter().zip(frames(3)) {
        fragments.later(&key(1, 5), *piece, NOW).unwrap();
        park(&mut fragments, &key(1, 5), frame).unwrap();
    }
    first(&mut fragments, &key(1, 5), 77).unwrap();
    assert_eq!(first(&mut fragments, &key(2 << 8, 6), 78), Err(Refusal::TooMany));
    assert_eq!(released(&mut fragments, &key(1, 5)), [0, 1, 2]);
    assert!(first(&mut fragments, &key(2 << 8, 6), 78).is_ok());
}

#[test]
fn no_room_at_all_is_a_limit_like_any_other() {
    let mut none = fragments(0, 0);
    assert_eq!(first(&mut none, &key(1, 5), 77), Err(Refusal::TooMany));
    let mut no_frames = fragments(4, 0);
    assert_eq!(no_frames.later(&key(1, 5), PIECES[1], NOW), Ok(Later::Early));
    assert!(park(&mut no_frames, &key(1, 5), frames(1).pop().unwrap()).is_err());
}
