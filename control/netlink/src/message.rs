//! Netlink's framing: requests, the messages of a datagram, attributes.

use netlink_packet_core::{DecodeError, NLA_HEADER_SIZE, NetlinkBuffer, NetlinkMessage, NlasIterator};
use netlink_packet_route::RouteNetlinkMessage;

const HEADER: usize = 16;

/// A request; [`Client`](crate::Client) sets its flags and sequence number.
#[derive(Clone, Debug)]
pub struct Request(pub(crate) Vec<u8>);

impl Request {
    /// A request of this type; `body` follows netlink's header.
    pub fn new(kind: u16, body: &[u8]) -> Self {
        let mut bytes = vec![0; HEADER];
        NetlinkBuffer::new(&mut bytes).set_message_type(kind);
        bytes.extend_from_slice(body);
        Self(bytes)
    }
}

impl From<RouteNetlinkMessage> for Request {
    fn from(message: RouteNetlinkMessage) -> Self {
        let mut message = NetlinkMessage::from(message);
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        Self(bytes)
    }
}

/// One message of a datagram.
#[derive(Clone, Copy, Debug)]
pub struct Message<'a> {
    pub kind: u16,
    /// `NLM_F_*`.
    pub flags: u16,
    pub(crate) sequence: u32,
    /// What follows netlink's header.
    pub body: &'a [u8],
}

/// Iterator over the messages of a datagram; ends at the first truncated one.
#[derive(Debug)]
pub struct Messages<'a>(pub &'a [u8]);

impl<'a> Iterator for Messages<'a> {
    type Item = Result<Message<'a>, DecodeError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let bytes = self.0;
        let header = match NetlinkBuffer::new_checked(bytes) {
            Ok(header) => header,
            Err(error) => {
                self.0 = &[];
                return Some(Err(error));
            }
        };
        let length = header.length() as usize;
        self.0 = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(Ok(Message {
            kind: header.message_type(),
            flags: header.flags(),
            sequence: header.sequence_number(),
            body: &bytes[HEADER..length],
        }))
    }
}

/// The attributes after a fixed header of `header` bytes: type, without its flags, and value.
///
/// # Errors
/// `body` is shorter than its header. An attribute longer than `body` is an error of the iterator.
pub fn attributes(
    body: &[u8],
    header: usize,
) -> Result<impl Iterator<Item = Result<(u16, &[u8]), DecodeError>>, DecodeError> {
    let rest = body.get(header..).ok_or("invalid length of a message")?;
    Ok(NlasIterator::new(rest).map(|attribute| {
        let attribute = attribute?;
        let (kind, length) = (attribute.kind(), usize::from(attribute.length()));
        // The iterator has checked the length.
        Ok((kind, &attribute.into_inner()[NLA_HEADER_SIZE..length]))
    }))
}

/// Appends an attribute to a list of attributes.
pub fn push_attribute(attributes: &mut Vec<u8>, kind: u16, value: &[u8]) {
    let length = (NLA_HEADER_SIZE + value.len()) as u16;
    attributes.extend(length.to_ne_bytes());
    attributes.extend(kind.to_ne_bytes());
    attributes.extend(value);
    attributes.resize(attributes.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_listed_as_they_were_written() {
        let mut bytes = vec![7; 4];
        push_attribute(&mut bytes, 1, &[1, 2, 3, 4, 5]);
        push_attribute(&mut bytes, 0x8000 | 2, &[]);
        let list: Vec<_> = attributes(&bytes, 4).unwrap().map(Result::unwrap).collect();
        assert_eq!(list, [(1, &[1, 2, 3, 4, 5][..]), (2, &[][..])], "without the flag for nested attributes");
        assert!(attributes(&bytes, 4 + bytes.len()).is_err());
        assert!(attributes(&bytes[..10], 4).unwrap().any(|attribute| attribute.is_err()));
    }

    #[test]
    fn the_messages_of_a_datagram_end_at_the_first_truncated_one() {
        let message = |kind, body: &[u8]| {
            let Request(mut bytes) = Request::new(kind, body);
            let length = bytes.len() as u32;
            NetlinkBuffer::new(&mut bytes).set_length(length);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
            bytes
        };
        let datagram = [message(16, &[1, 2, 3]), message(17, &[4])].concat();
        let found: Vec<_> =
            Messages(&datagram).map(Result::unwrap).map(|message| (message.kind, message.body)).collect();
        assert_eq!(found, [(16, &[1, 2, 3][..]), (17, &[4][..])]);
        for end in 0..datagram.len() - 3 {
            let found: Vec<_> = Messages(&datagram[..end]).collect();
            assert!(found.iter().filter(|message| message.is_ok()).count() < 2, "{end}");
            assert!(found.iter().rev().skip(1).all(Result::is_ok), "{end}");
        }
    }
}
