//! UDP headers (RFC 768).

/// Length of the header.
pub const HEADER: usize = 8;
/// Offset of the length.
pub const LENGTH: usize = 4;
/// Offset of the checksum; 0 means none.
pub const CHECKSUM: usize = 6;

/// Source and destination port of a datagram; `None` if its length is inconsistent with the packet's.
#[inline]
pub fn parse(payload: &[u8]) -> Option<(u16, u16)> {
    let header: &[u8; HEADER] = payload.first_chunk()?;
    let length = usize::from(u16::from_be_bytes([header[4], header[5]]));
    if length < HEADER || length > payload.len() {
        return None;
    }
    Some((u16::from_be_bytes([header[0], header[1]]), u16::from_be_bytes([header[2], header[3]])))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn datagrams_with_inconsistent_lengths_are_rejected() {
        assert_eq!(parse(&[0x12, 0x34, 0, 53, 0, 8, 0, 0]), Some((0x1234, 53)));
        assert_eq!(parse(&[0x12, 0x34, 0, 53, 0, 8, 0, 0, 9]), Some((0x1234, 53)), "bytes after the datagram");
        assert_eq!(parse(&[0x12, 0x34, 0, 53, 0, 9, 0, 0]), None);
        assert_eq!(parse(&[0x12, 0x34, 0, 53, 0, 7, 0, 0]), None);
        assert_eq!(parse(&[0; 7]), None);
    }
}
