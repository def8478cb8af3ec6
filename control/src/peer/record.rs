//! Encoding of session replication records as protobuf messages.

use vipgate_dataplane::flow::address::{Address, V6};
use vipgate_dataplane::flow::direction::Direction;
use vipgate_dataplane::flow::tuple::Tuple;
use vipgate_dataplane::session::record::{DirectionRecord, FamilyRecord, RecordState, ReplicationRecord};

use super::frame::LinkError;
use super::proto;

/// Encodes a record.
pub(crate) fn encode(record: &ReplicationRecord) -> proto::Session {
    match record {
        ReplicationRecord::V4(record) => message(record, |address| address.to_be_bytes().to_vec()),
        ReplicationRecord::V6(record) => message(record, |address| address.to_bits().to_be_bytes().to_vec()),
    }
}

/// Decodes a record.
pub(crate) fn decode(session: &proto::Session) -> Result<ReplicationRecord, LinkError> {
    let state = match session.fate() {
        proto::Fate::Open => RecordState::Open,
        proto::Fate::Ended => RecordState::Ended,
        proto::Fate::Affinity => RecordState::Affinity,
        proto::Fate::Unknown => return Err(invalid("of an unknown fate")),
    };
    let direction = match session.direction() {
        proto::Direction::Egress => Direction::Egress,
        proto::Direction::Inbound => Direction::Inbound,
        proto::Direction::Unknown => return Err(invalid("of an unknown direction")),
    };
    if session.origin.len() == 13 {
        return family_record(session, state, direction, u32::from_be_bytes).map(ReplicationRecord::V4);
    }
    let address = |bytes| V6::from_bits(u128::from_be_bytes(bytes));
    family_record(session, state, direction, address).map(ReplicationRecord::V6)
}

fn invalid(what: &str) -> LinkError {
    LinkError::InvalidFrame(format!("a session {what}"))
}

/// The record of one address family, whose addresses have `N` bytes.
fn family_record<A: Address, const N: usize>(
    session: &proto::Session,
    state: RecordState,
    direction: Direction,
    address: impl Fn([u8; N]) -> A,
) -> Result<FamilyRecord<A>, LinkError> {
    let [origin, translated] = [&session.origin, &session.translated].map(|bytes| tuple(bytes, &address));
    let (origin, translated) = origin.zip(translated).ok_or_else(|| invalid("whose tuples have no valid length"))?;
    if !direction.translates(&origin, &translated) {
        return Err(invalid("whose tuples differ in more than one end"));
    }
    let directions = [half(session.first.as_ref()), half(session.second.as_ref())];
    Ok(FamilyRecord { state, direction, origin, translated, directions })
}

fn message<A: Address>(record: &FamilyRecord<A>, bytes: impl Fn(A) -> Vec<u8>) -> proto::Session {
    let fate = match record.state {
        RecordState::Open => proto::Fate::Open,
        RecordState::Ended => proto::Fate::Ended,
        RecordState::Affinity => proto::Fate::Affinity,
    };
    // Sessions are only opened by packets of these two directions.
    let direction =
        if record.direction == Direction::Inbound { proto::Direction::Inbound } else { proto::Direction::Egress };
    let tuple = |tuple: &Tuple<A>| {
        let mut all = bytes(tuple.source);
        all.extend(bytes(tuple.destination));
        all.extend(tuple.source_port.to_be_bytes());
        all.extend(tuple.destination_port.to_be_bytes());
        all.push(tuple.protocol);
        all
    };
    let half = |half: &DirectionRecord| {
        let DirectionRecord { flags, idle_ms, sequence, acknowledged, packets, bytes } = *half;
        Some(proto::Half { flags: u32::from(flags), idle_ms, sequence, acknowledged, packets, bytes })
    };
    proto::Session {
        fate: fate.into(),
        direction: direction.into(),
        origin: tuple(&record.origin),
        translated: tuple(&record.translated),
        first: half(&record.directions[0]),
        second: half(&record.directions[1]),
    }
}

fn tuple<A: Address, const N: usize>(bytes: &[u8], address: impl Fn([u8; N]) -> A) -> Option<Tuple<A>> {
    let (source, rest) = bytes.split_first_chunk::<N>()?;
    let (destination, rest) = rest.split_first_chunk::<N>()?;
    let &[a, b, c, d, protocol] = rest else { return None };
    Some(Tuple {
        source: address(*source),
        destination: address(*destination),
        source_port: u16::from_be_bytes([a, b]),
        destination_port: u16::from_be_bytes([c, d]),
        protocol,
    })
}

fn half(half: Option<&proto::Half>) -> DirectionRecord {
    half.map_or_else(DirectionRecord::default, |half| DirectionRecord {
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
    use super::super::tests::session_record;
    use super::*;

    #[test]
    fn a_record_survives_encoding_and_decoding() {
        let ReplicationRecord::V4(v4) = session_record(7) else { panic!("IPv4") };
        let wide = |tuple: Tuple<u32>| Tuple {
            source: V6::from_bits(u128::from(tuple.source) << 64 | 1),
            destination: V6::from_bits(u128::MAX - u128::from(tuple.destination)),
            source_port: tuple.source_port,
            destination_port: tuple.destination_port,
            protocol: tuple.protocol,
        };
        let v6 = ReplicationRecord::V6(FamilyRecord {
            state: RecordState::Ended,
            direction: Direction::Inbound,
            origin: wide(v4.translated.reversed()),
            translated: wide(v4.origin.reversed()),
            directions: v4.directions,
        });
        let ReplicationRecord::V6(ended) = v6 else { panic!("IPv6") };
        let affinity = ReplicationRecord::V6(FamilyRecord { state: RecordState::Affinity, ..ended });
        for record in [ReplicationRecord::V4(v4), v6, affinity] {
            assert_eq!(decode(&encode(&record)), Ok(record));
        }
    }

    #[test]
    fn unknown_values_and_invalid_tuples_are_errors() {
        let session = encode(&session_record(1));
        assert!(decode(&proto::Session { fate: 77, ..session.clone() }).is_err());
        assert!(decode(&proto::Session { direction: 9, ..session.clone() }).is_err());
        for length in [0, 12, 14, 37] {
            assert!(decode(&proto::Session { origin: vec![0; length], ..session.clone() }).is_err(), "{length}");
        }
    }

    #[test]
    fn tuples_that_differ_in_more_than_one_end_are_errors() {
        let ReplicationRecord::V4(valid) = session_record(1) else { panic!("IPv4") };
        let translated = |translated| decode(&encode(&ReplicationRecord::V4(FamilyRecord { translated, ..valid })));
        assert!(translated(Tuple { source: 1, source_port: 2, ..valid.origin }).is_ok());
        assert!(translated(Tuple { destination: 1, ..valid.translated }).is_err());
        assert!(translated(Tuple { protocol: valid.origin.protocol ^ 1, ..valid.translated }).is_err());
        let inbound = ReplicationRecord::V4(FamilyRecord { direction: Direction::Inbound, ..valid });
        assert!(decode(&encode(&inbound)).is_err(), "the client's address stays");
    }
}
