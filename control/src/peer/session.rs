//! Sessions as they go over the wire, and back.

use vipgate_dataplane::address::{Address, V6};
use vipgate_dataplane::counters::Direction;
use vipgate_dataplane::session::image::{Fate, Half, Image, ImageOf};
use vipgate_dataplane::session::tuple::Tuple;

use super::frame::Broken;
use super::proto;

/// A session's message.
pub(crate) fn encode(image: &Image) -> proto::Session {
    match image {
        Image::V4(image) => message(image, |address| address.to_be_bytes().to_vec()),
        Image::V6(image) => message(image, |address| address.to_bits().to_be_bytes().to_vec()),
    }
}

/// The session of a message; `None` if this version has no word for it.
pub(crate) fn decode(session: &proto::Session) -> Result<Option<Image>, Broken> {
    let fate = match session.fate() {
        proto::Fate::Open => Fate::Open,
        proto::Fate::Ended => Fate::Ended,
        proto::Fate::Unknown => return Ok(None),
    };
    let direction = match session.direction() {
        proto::Direction::Egress => Direction::Egress,
        proto::Direction::Inbound => Direction::Inbound,
        proto::Direction::Unknown => return Ok(None),
    };
    let halves = [half(session.first.as_ref()), half(session.second.as_ref())];
    let tuples = |length| session.origin.len() == length && session.translated.len() == length;
    if tuples(13) {
        let address = |bytes: [u8; 4]| u32::from_be_bytes(bytes);
        let (origin, translated) = (tuple(&session.origin, address), tuple(&session.translated, address));
        return Ok(origin
            .zip(translated)
            .map(|(origin, translated)| Image::V4(ImageOf { fate, direction, origin, translated, halves })));
    }
    if tuples(37) {
        let address = |bytes: [u8; 16]| V6::from_bits(u128::from_be_bytes(bytes));
        let (origin, translated) = (tuple(&session.origin, address), tuple(&session.translated, address));
        return Ok(origin
            .zip(translated)
            .map(|(origin, translated)| Image::V6(ImageOf { fate, direction, origin, translated, halves })));
    }
    Err(Broken::Garbage("a session with addresses of no family".to_owned()))
}

fn message<A: Address>(image: &ImageOf<A>, bytes: impl Fn(A) -> Vec<u8>) -> proto::Session {
    let fate = match image.fate {
        Fate::Open => proto::Fate::Open,
        Fate::Ended => proto::Fate::Ended,
    };
    // Sessions begin with a packet of one of these directions.
    let direction =
        if image.direction == Direction::Inbound { proto::Direction::Inbound } else { proto::Direction::Egress };
    let tuple = |tuple: &Tuple<A>| {
        let mut all = bytes(tuple.source);
        all.extend(bytes(tuple.destination));
        all.extend(tuple.source_port.to_be_bytes());
        all.extend(tuple.destination_port.to_be_bytes());
        all.push(tuple.protocol);
        all
    };
    let half = |half: &Half| {
        let Half { flags, idle_ms, sequence, acknowledged, packets, bytes } = *half;
        Some(proto::Half { flags: u32::from(flags), idle_ms, sequence, acknowledged, packets, bytes })
    };
    proto::Session {
        fate: fate.into(),
        direction: direction.into(),
        origin: tuple(&image.origin),
        translated: tuple(&image.translated),
        first: half(&image.halves[0]),
        second: half(&image.halves[1]),
    }
}

fn tuple<A: Address, const N: usize>(bytes: &[u8], address: impl Fn([u8; N]) -> A) -> Option<Tuple<A>> {
    let (source, rest) = bytes.split_first_chunk::<N>()?;
    let (destination, rest) = rest.split_first_chunk::<N>()?;
    let [a, b, c, d, protocol] = *rest.first_chunk()?;
    Some(Tuple {
        source: address(*source),
        destination: address(*destination),
        source_port: u16::from_be_bytes([a, b]),
        destination_port: u16::from_be_bytes([c, d]),
        protocol,
    })
}

fn half(half: Option<&proto::Half>) -> Half {
    half.map_or_else(Half::default, |half| Half {
        flags: half.flags as u8,
        idle_ms: half.idle_ms,
        sequence: half.sequence,
        acknowledged: half.acknowledged,
        packets: half.packets,
        bytes: half.bytes,
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::image;
    use super::*;

    #[test]
    fn a_session_comes_back_as_it_went() {
        let Image::V4(v4) = image(7) else { panic!("IPv4") };
        let wide = |tuple: Tuple<u32>| Tuple {
            source: V6::from_bits(u128::from(tuple.source) << 64 | 1),
            destination: V6::from_bits(u128::MAX - u128::from(tuple.destination)),
            source_port: tuple.source_port,
            destination_port: tuple.destination_port,
            protocol: tuple.protocol,
        };
        let v6 = Image::V6(ImageOf {
            fate: Fate::Ended,
            direction: Direction::Inbound,
            origin: wide(v4.origin),
            translated: wide(v4.translated),
            halves: v4.halves,
        });
        for image in [Image::V4(v4), v6] {
            assert_eq!(decode(&encode(&image)), Ok(Some(image)));
        }
    }

    #[test]
    fn what_has_no_word_here_is_passed_over_and_nonsense_is_not() {
        let session = encode(&image(1));
        assert_eq!(decode(&proto::Session { fate: 77, ..session.clone() }), Ok(None));
        assert_eq!(decode(&proto::Session { direction: 9, ..session.clone() }), Ok(None));
        assert!(decode(&proto::Session { origin: vec![0; 12], ..session }).is_err());
    }
}
