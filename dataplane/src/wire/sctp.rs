//! SCTP packets (RFC 9260): common header, chunks, and CRC32c.
//!
//! A CRC is linear: the CRCs of two packets of equal length differ by the CRC of their difference. New ports change
//! only the first four bytes, so the CRC changes by that difference multiplied by a power of x that depends on the
//! packet's length, not on its content. No pass over the payload is needed, and a checksum that was wrong stays wrong.

use std::iter;

use super::set_u16;

/// Length of the common header.
pub const HEADER: usize = 12;
/// Offset of the checksum; little-endian (RFC 9260 appendix A).
pub const CHECKSUM: usize = 8;

/// Length of a chunk header: type, flags, length.
const CHUNK_HEADER: usize = 4;
/// Chunks are padded to a multiple of this.
const CHUNK_ALIGNMENT: usize = 4;
/// Chunks of a packet that are read at most: nearly as many of user data as fit into 1500 bytes.
const MAX_CHUNKS: usize = 64;

/// The type of a chunk (RFC 9260 section 3.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ChunkType {
    /// User data.
    Data,
    /// Initiates an association.
    Init,
    /// Reply to [`Self::Init`], with a state cookie.
    InitAck,
    /// Acknowledges data.
    Sack,
    /// Tests the reachability of the peer.
    Heartbeat,
    /// Reply to [`Self::Heartbeat`].
    HeartbeatAck,
    /// Aborts an association.
    Abort,
    /// Initiates the shutdown of an association.
    Shutdown,
    /// Reply to [`Self::Shutdown`].
    ShutdownAck,
    /// Reports an error to the peer.
    Error,
    /// Returns the state cookie.
    CookieEcho,
    /// Acknowledges the state cookie: the association is established.
    CookieAck,
    ShutdownComplete,
    /// Any other.
    #[default]
    Other,
}

impl ChunkType {
    fn of(kind: u8) -> Self {
        match kind {
            0 => Self::Data,
            1 => Self::Init,
            2 => Self::InitAck,
            3 => Self::Sack,
            4 => Self::Heartbeat,
            5 => Self::HeartbeatAck,
            6 => Self::Abort,
            7 => Self::Shutdown,
            8 => Self::ShutdownAck,
            9 => Self::Error,
            10 => Self::CookieEcho,
            11 => Self::CookieAck,
            14 => Self::ShutdownComplete,
            _ => Self::Other,
        }
    }

    /// Whether it must be the only chunk of its packet (section 6.10).
    fn must_be_alone(self) -> bool {
        matches!(self, Self::Init | Self::InitAck | Self::ShutdownComplete)
    }
}

/// The fields of an SCTP packet that connection tracking needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CommonHeader {
    /// Source port.
    pub source: u16,
    /// Destination port.
    pub destination: u16,
    /// Verification tag of the receiver; 0 only with [`ChunkType::Init`].
    pub verification_tag: u32,
    /// Type of the first chunk: those of a handshake come first, or alone. [`ChunkType::Other`] if it must be alone, but
    /// isn't: receivers discard such a packet.
    pub first_chunk: ChunkType,
    /// The chunk that ends the association, in any place: [`ChunkType::Abort`], else [`ChunkType::ShutdownAck`] or
    /// [`ChunkType::ShutdownComplete`].
    pub closing_chunk: Option<ChunkType>,
    /// Initiate tag of [`ChunkType::Init`] and [`ChunkType::InitAck`] (section 3.3.2): the sender's verification tag; 0
    /// if there is none.
    pub initiate_tag: u32,
}

/// Parses the common header and the headers of the chunks; `None` if the packet is truncated or has no chunk, or if the
/// first chunk's length is inconsistent with the packet's.
#[inline]
pub fn parse(payload: &[u8]) -> Option<CommonHeader> {
    let (fixed, rest) = payload.split_first_chunk::<HEADER>()?;
    let mut following = chunks(rest);
    let (kind, value) = following.next()?;
    let is_alone = rest.len() < padded_length(value) + CHUNK_HEADER;
    let first_chunk = if is_alone || !kind.must_be_alone() { kind } else { ChunkType::Other };
    let initiate_tag = match first_chunk {
        ChunkType::Init | ChunkType::InitAck => value.first_chunk(),
        _ => None,
    };
    let closing_chunk = if first_chunk == ChunkType::ShutdownComplete {
        Some(first_chunk)
    } else {
        closing_chunk(iter::once(kind).chain(following.map(|(kind, _)| kind)))
    };
    Some(CommonHeader {
        source: u16::from_be_bytes([fixed[0], fixed[1]]),
        destination: u16::from_be_bytes([fixed[2], fixed[3]]),
        verification_tag: u32::from_be_bytes([fixed[4], fixed[5], fixed[6], fixed[7]]),
        first_chunk,
        closing_chunk,
        initiate_tag: initiate_tag.map_or(0, |tag| u32::from_be_bytes(*tag)),
    })
}

/// The chunks of a packet, types and values, up to one whose length is inconsistent with the packet's.
fn chunks(mut rest: &[u8]) -> impl Iterator<Item = (ChunkType, &[u8])> {
    iter::from_fn(move || {
        let header: &[u8; CHUNK_HEADER] = rest.first_chunk()?;
        let length = usize::from(u16::from_be_bytes([header[2], header[3]]));
        let value = rest.get(CHUNK_HEADER..length)?;
        rest = rest.get(padded_length(value)..).unwrap_or_default();
        Some((ChunkType::of(header[0]), value))
    })
    .take(MAX_CHUNKS)
}

/// Length of a chunk with its header and its padding, which its length field doesn't count.
fn padded_length(value: &[u8]) -> usize {
    (CHUNK_HEADER + value.len()).next_multiple_of(CHUNK_ALIGNMENT)
}

/// The chunk that ends the association, as a receiver handles the chunks: in order, up to ABORT, or to a chunk that
/// must be alone.
fn closing_chunk(kinds: impl Iterator<Item = ChunkType>) -> Option<ChunkType> {
    let mut closing = None;
    for kind in kinds {
        match kind {
            ChunkType::Abort => return Some(kind),
            ChunkType::ShutdownAck => closing = Some(kind),
            _ if kind.must_be_alone() => break,
            _ => {}
        }
    }
    closing
}

/// Rewrites both ports of a packet of at most 64 KiB and updates its checksum. Does nothing if the packet is shorter
/// than the common header.
#[inline]
pub fn update_ports(payload: &mut [u8], source: u16, destination: u16) {
    let length = payload.len();
    let Some(header) = payload.first_chunk_mut::<HEADER>() else { return };
    let old = u32::from_le_bytes([header[0], header[1], header[2], header[3]]);
    set_u16(header, 0, source);
    set_u16(header, 2, destination);
    let new = u32::from_le_bytes([header[0], header[1], header[2], header[3]]);
    let checksum = u32::from_le_bytes([header[8], header[9], header[10], header[11]]);
    let updated = checksum ^ shift_by_bytes(old ^ new, length);
    header[CHECKSUM..].copy_from_slice(&updated.to_le_bytes());
}

/// Computes the checksum of a packet that has none; returns whether it had none.
pub fn complete(payload: &mut [u8]) -> bool {
    let Some(header) = payload.first_chunk::<HEADER>() else { return false };
    if header[CHECKSUM..] != [0; 4] {
        return false;
    }
    let sum = (!crc(u32::MAX, payload)).to_le_bytes();
    payload[CHECKSUM..HEADER].copy_from_slice(&sum);
    true
}

/// Whether the checksum of a packet is valid. It reads every byte, about 2 ns each: for tests and slow paths.
pub fn verify(payload: &[u8]) -> bool {
    let Some((header, rest)) = payload.split_first_chunk::<HEADER>() else { return false };
    let crc = crc(crc(crc(u32::MAX, &header[..CHECKSUM]), &[0; 4]), rest);
    header[CHECKSUM..] == (!crc).to_le_bytes()
}

// Polynomials over GF(2) in the bit order of CRC32c: the highest bit is the coefficient of x^0.

/// The Castagnoli polynomial, without x^32.
const CASTAGNOLI: u32 = 0x82f6_3b78;
/// x^0.
const ONE: u32 = 1 << 31;

/// The table of the bytewise CRC: each byte multiplied by x^8 and reduced.
static CRC_TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut rest = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            rest = rest >> 1 ^ (CASTAGNOLI & (rest & 1).wrapping_neg());
            bit += 1;
        }
        table[byte] = rest;
        byte += 1;
    }
    table
};

/// x^(8 * n) for n of 0 to 255: a shift by n bytes.
static BYTE_SHIFTS: [u32; 256] = powers(shift_by_byte(ONE));
/// x^(8 * 256 * n) for n of 0 to 255: a shift by n times 256 bytes.
static PAGE_SHIFTS: [u32; 256] = powers(shift_by_byte(BYTE_SHIFTS[255]));

const fn powers(base: u32) -> [u32; 256] {
    let mut powers = [ONE; 256];
    let mut i = 1;
    while i < 256 {
        powers[i] = multiply(powers[i - 1], base);
        i += 1;
    }
    powers
}

#[inline]
const fn shift_by_byte(a: u32) -> u32 {
    a >> 8 ^ CRC_TABLE[(a & 0xff) as usize]
}

/// The CRC of four bytes at the start of `length` zero bytes: `bytes` * x^(8 * length). 20 ns; a bitwise multiplication
/// would take 60 ns.
#[inline]
fn shift_by_bytes(bytes: u32, length: usize) -> u32 {
    multiply(bytes, multiply(BYTE_SHIFTS[length & 0xff], PAGE_SHIFTS[length >> 8 & 0xff]))
}

/// The product of two polynomials.
#[inline]
const fn multiply(a: u32, b: u32) -> u32 {
    // 63 coefficients, shifted left by one: the upper half is below x^32, the lower half is reduced.
    let product = multiply_carryless(a, b) << 1;
    let mut rest = product as u32;
    let mut byte = 0;
    while byte < 4 {
        rest = shift_by_byte(rest);
        byte += 1;
    }
    (product >> 32) as u32 ^ rest
}

/// The product of two polynomials, not reduced (carry-less multiplication). Each factor is split into four numbers with
/// every fourth bit only: at most eight ones meet in a column of their products, so carries stay in the three empty
/// bits next to it and are masked out.
#[inline]
const fn multiply_carryless(a: u32, b: u32) -> u64 {
    const EVERY_FOURTH: u64 = 0x1111_1111_1111_1111;
    let mut product = 0;
    let mut column = 0;
    while column < 4 {
        let mut sum = 0;
        let mut i = 0;
        while i < 4 {
            let from_a = a as u64 & EVERY_FOURTH << i;
            let from_b = b as u64 & EVERY_FOURTH << ((4 + column - i) % 4);
            sum ^= from_a.wrapping_mul(from_b);
            i += 1;
        }
        product |= sum & EVERY_FOURTH << column;
        column += 1;
    }
    product
}

fn crc(before: u32, bytes: &[u8]) -> u32 {
    bytes.iter().fold(before, |crc, byte| crc >> 8 ^ CRC_TABLE[usize::from(crc as u8 ^ byte)])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// CRC32c bit by bit, as RFC 3720 and RFC 9260 appendix A define it.
    fn slow_crc(bytes: &[u8]) -> u32 {
        let mut crc = u32::MAX;
        for byte in bytes {
            crc ^= u32::from(*byte);
            for _ in 0..8 {
                crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
            }
        }
        !crc
    }

    /// `payload` with a valid checksum, computed over all of it.
    fn with_checksum(mut payload: Vec<u8>) -> Vec<u8> {
        payload[8..12].fill(0);
        let crc = slow_crc(&payload);
        payload[8..12].copy_from_slice(&crc.to_le_bytes());
        payload
    }

    fn packet(chunk: &[u8]) -> Vec<u8> {
        with_checksum([&[0x10, 0x92, 0x0b, 0x59, 0xde, 0xad, 0xbe, 0xef, 0, 0, 0, 0], chunk].concat())
    }

    #[test]
    fn the_crc_is_the_one_of_rfc_3720_appendix_b_4() {
        let ascending: Vec<u8> = (0..32).collect();
        let descending: Vec<u8> = (0..32).rev().collect();
        let examples: [(&[u8], u32); 5] = [
            (&[0; 32], 0x8a91_36aa),
            (&[0xff; 32], 0x62a8_ab43),
            (&ascending, 0x46dd_794e),
            (&descending, 0x113f_db5c),
            (b"123456789", 0xe306_9283),
        ];
        for (bytes, expected) in examples {
            assert_eq!((!crc(u32::MAX, bytes), slow_crc(bytes)), (expected, expected));
        }
    }

    #[test]
    fn every_chunk_type_is_parsed() {
        use ChunkType::*;
        let types = [
            Data,
            Init,
            InitAck,
            Sack,
            Heartbeat,
            HeartbeatAck,
            Abort,
            Shutdown,
            ShutdownAck,
            Error,
            CookieEcho,
            CookieAck,
            Other,
            Other,
            ShutdownComplete,
            Other,
        ];
        for (kind, chunk_type) in types.into_iter().enumerate() {
            let payload = packet(&[kind as u8, 0, 0, 4]);
            let expected = CommonHeader {
                source: 4242,
                destination: 2905,
                verification_tag: 0xdead_beef,
                first_chunk: chunk_type,
                closing_chunk: Some(chunk_type).filter(|it| matches!(it, Abort | ShutdownAck | ShutdownComplete)),
                initiate_tag: 0,
            };
            assert_eq!(parse(&payload), Some(expected));
            assert!(verify(&payload));
        }
        assert_eq!(parse(&packet(&[192, 0, 0, 4])).map(|common| common.first_chunk), Some(Other));
    }

    #[test]
    fn the_initiate_tag_is_parsed_from_init_and_init_ack_only() {
        for kind in [1, 2] {
            let tag = |chunk: &[u8]| parse(&packet(&[&[kind, 0], chunk].concat())).map(|common| common.initiate_tag);
            assert_eq!(tag(&[0, 8, 0xca, 0xfe, 0xba, 0xbe]), Some(0xcafe_babe));
            assert_eq!(tag(&[0, 7, 0xca, 0xfe, 0xba, 0xbe]), Some(0), "truncated");
            assert_eq!(tag(&[0, 4]), Some(0));
        }
        assert_eq!(parse(&packet(&[0, 0, 0, 8, 1, 2, 3, 4])).map(|common| common.initiate_tag), Some(0), "DATA chunk");
    }

    /// The first chunk and the closing chunk of a packet of these chunks, four bytes each.
    fn first_and_closing(kinds: &[u8]) -> (ChunkType, Option<ChunkType>) {
        let chunks: Vec<u8> = kinds.iter().flat_map(|&kind| [kind, 0, 0, 4]).collect();
        let parsed = parse(&packet(&chunks)).unwrap();
        (parsed.first_chunk, parsed.closing_chunk)
    }

    #[test]
    fn the_closing_chunk_is_found_behind_others() {
        use ChunkType::*;
        let examples: [(&[u8], ChunkType, Option<ChunkType>); 6] = [
            (&[3, 6], Sack, Some(Abort)),
            (&[10, 0, 6], CookieEcho, Some(Abort)),
            (&[9, 8], Error, Some(ShutdownAck)),
            (&[8, 9, 6], ShutdownAck, Some(Abort)),
            (&[6, 1, 8], Abort, Some(Abort)),
            (&[3, 7], Sack, None),
        ];
        for (kinds, first, closing) in examples {
            assert_eq!(first_and_closing(kinds), (first, closing), "{kinds:?}");
        }
        // A chunk with padding, which its length doesn't count.
        let padded = [9, 0, 0, 5, 77, 0, 0, 0, 6, 0, 0, 4];
        assert_eq!(parse(&packet(&padded)).map(|common| common.closing_chunk), Some(Some(Abort)));
        let many = |count| [vec![3_u8; count], vec![6]].concat();
        assert_eq!(first_and_closing(&many(MAX_CHUNKS - 1)).1, Some(Abort));
        assert_eq!(first_and_closing(&many(MAX_CHUNKS)).1, None, "the walk is bounded");
    }

    #[test]
    fn a_chunk_that_must_be_alone_has_no_effect_among_others() {
        use ChunkType::*;
        for kind in [1, 2, 14] {
            assert_eq!(first_and_closing(&[kind, 3]).0, Other, "{kind} first");
            assert_eq!(first_and_closing(&[kind, 6]), (Other, None), "{kind} first");
            assert_eq!(first_and_closing(&[3, kind, 6]), (Sack, None), "{kind} between others");
            assert_eq!(first_and_closing(&[8, kind]), (ShutdownAck, Some(ShutdownAck)), "{kind} last");
        }
        let init = [1, 0, 0, 9, 0xca, 0xfe, 0xba, 0xbe, 7, 0, 0, 0];
        let is_init = |chunk: &[u8]| parse(&packet(chunk)).is_some_and(|common| common.first_chunk == Init);
        assert!(is_init(&init) && is_init(&[&init[..], &[0, 0, 0]].concat()), "padding and a rest are no chunk");
        assert!(!is_init(&[&init[..], &[3, 0, 0, 4]].concat()));
    }

    #[test]
    fn an_inconsistent_length_ends_the_walk() {
        for length in [0, 3, 5, 255] {
            for closing in [6, 8] {
                let chunk = [3, 0, 0, 4, closing, 0, 0, length];
                let behind = [3, 0, 0, 4, 9, 0, 0, length, closing, 0, 0, 4];
                for chunks in [&chunk[..], &behind] {
                    let parsed = parse(&packet(chunks)).unwrap();
                    assert_eq!((parsed.first_chunk, parsed.closing_chunk), (ChunkType::Sack, None), "{chunks:?}");
                }
            }
        }
        let aborted = packet(&[6, 0, 0, 4, 3, 0, 0, 0]);
        assert_eq!(parse(&aborted).map(|common| common.closing_chunk), Some(Some(ChunkType::Abort)), "before it");
    }

    #[test]
    fn packets_with_inconsistent_lengths_are_rejected() {
        assert_eq!(parse(&packet(&[])), None, "no chunk");
        assert_eq!(parse(&packet(&[3, 0, 0])), None);
        assert_eq!(parse(&packet(&[3, 0, 0, 3])), None, "chunk shorter than its header");
        assert_eq!(parse(&packet(&[3, 0, 0, 5])), None, "chunk longer than the packet");
        assert!(parse(&packet(&[3, 0, 0, 5, 9, 0, 0, 0])).is_some(), "padding is not part of the chunk");
        assert!(parse(&packet(&[3, 0, 0, 4, 0, 0, 0, 4])).is_some(), "followed by another chunk");
    }

    #[test]
    fn the_checksum_is_updated_for_every_packet_length() {
        for length in [12, 16, 255, 256, 257, 1452, 4096, 65_280, 65_535] {
            let mut payload = with_checksum(vec![0x5a; length]);
            update_ports(&mut payload, 1, 2);
            assert!(verify(&payload), "{length}");
        }
    }

    proptest! {
        #[test]
        fn an_update_equals_a_new_computation(
            payload in prop::collection::vec(any::<u8>(), 12..1500), source: u16, destination: u16,
        ) {
            let mut updated = with_checksum(payload.clone());
            update_ports(&mut updated, source, destination);
            let mut expected = payload;
            expected[..2].copy_from_slice(&source.to_be_bytes());
            expected[2..4].copy_from_slice(&destination.to_be_bytes());
            prop_assert!(verify(&updated));
            prop_assert_eq!(updated, with_checksum(expected));
        }

        #[test]
        fn a_wrong_checksum_stays_wrong_and_the_reverse_translation_restores_it(
            payload in prop::collection::vec(any::<u8>(), 12..200), source: u16, destination: u16, flip in 1_u32..,
        ) {
            let mut payload = with_checksum(payload);
            let at = 8;
            let wrong = u32::from_le_bytes([payload[at], payload[9], payload[10], payload[11]]) ^ flip;
            payload[8..12].copy_from_slice(&wrong.to_le_bytes());
            let mut updated = payload.clone();
            update_ports(&mut updated, source, destination);
            prop_assert!(!verify(&updated));
            let (old_source, old_destination) = (super::super::u16_at(&payload, 0), super::super::u16_at(&payload, 2));
            update_ports(&mut updated, old_source, old_destination);
            prop_assert_eq!(updated, payload);
        }

        #[test]
        fn arbitrary_bytes_never_panic(
            mut noise in prop::collection::vec(any::<u8>(), 0..40), source: u16, destination: u16,
        ) {
            let (before, length) = (noise.clone(), noise.len());
            let _ = (parse(&noise), verify(&noise));
            update_ports(&mut noise, source, destination);
            prop_assert!(length >= HEADER || noise == before);
        }
    }
}
