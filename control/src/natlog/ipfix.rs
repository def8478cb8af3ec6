//! NAT events as IPFIX messages (RFC 7011, RFC 8158): events in, bytes out; without socket and clock. One encoder
//! belongs to one transport session: it counts the records for the sequence number.
//!
//! ```text
//!  message  version 10 (2) | length (2) | export time in s (4) | sequence number (4) | observation domain (4) | sets
//!  set      set id: 2 for templates, else the id of a template (2) | length (2) | records, not padded
//! ```

use std::net::{IpAddr, SocketAddr};

/// Version in the message header.
const VERSION: u16 = 10;
/// Length of the message header, bytes.
const HEADER: usize = 16;
/// Length of a set header, bytes.
const SET_HEADER: usize = 4;
/// Set ID of a template set (RFC 7011, 3.3.2).
const TEMPLATES: u16 = 2;
/// Field length of a variable-length information element (RFC 7011, 7).
const VARIABLE: u16 = 0xffff;
/// Maximum length of a tenant's name, bytes: the most that a length of one byte can encode.
const MAX_NAME: usize = 254;
/// Maximum length of a record: an IPv6 session with the longest name.
const MAX_RECORD: usize = fixed_length(Template::SessionV6) + 1 + MAX_NAME;
/// Minimum message limit: each record fits into a message of its own.
const MIN_MESSAGE: usize = HEADER + SET_HEADER + MAX_RECORD;
const _: () = assert!(MIN_MESSAGE == 358);

/// A field specifier: information element ID and length in bytes.
type Field = (u16, u16);

// Information elements of the IANA IPFIX registry.
const PROTOCOL: Field = (4, 1);
const SOURCE_PORT: Field = (7, 2);
const SOURCE_V4: Field = (8, 4);
const DESTINATION_PORT: Field = (11, 2);
const DESTINATION_V4: Field = (12, 4);
const SOURCE_V6: Field = (27, 16);
const DESTINATION_V6: Field = (28, 16);
const POST_SOURCE_V4: Field = (225, 4);
const POST_DESTINATION_V4: Field = (226, 4);
const POST_SOURCE_PORT: Field = (227, 2);
const POST_DESTINATION_PORT: Field = (228, 2);
const ORIGINATING_REALM: Field = (229, 1);
const NAT_EVENT: Field = (230, 1);
const POST_SOURCE_V6: Field = (281, 16);
const POST_DESTINATION_V6: Field = (282, 16);
const TIME_MILLISECONDS: Field = (323, 8);
const RANGE_START: Field = (361, 2);
const RANGE_END: Field = (362, 2);
const RANGE_STEP: Field = (363, 2);
const RANGE_PORTS: Field = (364, 2);
const USER_NAME: Field = (371, VARIABLE);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NatEvent<'a> {
    /// A port block of a VIP was allocated to an endpoint, or de-allocated.
    Block {
        /// Allocated, else de-allocated.
        allocated: bool,
        /// The endpoint that uses the ports.
        endpoint: IpAddr,
        /// The VIP; of the endpoint's address family.
        vip: IpAddr,
        /// The first port.
        first: u16,
        /// The last port.
        last: u16,
        /// The number of ports.
        ports: u16,
        /// The tenant of the endpoint; truncated to 254 bytes.
        tenant: &'a str,
    },
    /// A session was created or deleted.
    Session {
        /// Created, else deleted.
        created: bool,
        /// Opened from outside.
        inbound: bool,
        /// IP protocol number. For ICMP, the ports are the identifier.
        protocol: u8,
        /// Source and destination of the first packet before translation.
        original: (SocketAddr, SocketAddr),
        /// And after translation; all of one address family.
        translated: (SocketAddr, SocketAddr),
        /// The tenant of the endpoint; truncated to 254 bytes.
        tenant: &'a str,
    },
}

impl NatEvent<'_> {
    /// The natEvent value (RFC 8158, 4.3). The registry has no value for IPv6-to-IPv6 sessions, so those use the
    /// generic ones (1, 2).
    fn number(&self) -> u8 {
        match (self, self.template()) {
            (Self::Block { allocated: true, .. }, _) => 16,
            (Self::Block { allocated: false, .. }, _) => 17,
            (Self::Session { created: true, .. }, Template::SessionV6) => 1,
            (Self::Session { created: false, .. }, Template::SessionV6) => 2,
            (Self::Session { created: true, .. }, _) => 4,
            (Self::Session { created: false, .. }, _) => 5,
        }
    }

    /// The template. Mixed address families use IPv6 with IPv4-mapped addresses.
    fn template(&self) -> Template {
        match self {
            Self::Block { endpoint: IpAddr::V4(_), vip: IpAddr::V4(_), .. } => Template::BlockV4,
            Self::Block { .. } => Template::BlockV6,
            Self::Session { original: before, translated: after, .. } => {
                let all = [before.0, before.1, after.0, after.1];
                if all.iter().all(SocketAddr::is_ipv4) { Template::SessionV4 } else { Template::SessionV6 }
            }
        }
    }
}

/// The templates; the value is the template ID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
enum Template {
    BlockV4 = 256,
    BlockV6 = 257,
    SessionV4 = 258,
    SessionV6 = 259,
}

impl Template {
    const ALL: [Self; 4] = [Self::BlockV4, Self::BlockV6, Self::SessionV4, Self::SessionV6];

    /// The fields, in the order that [`record`] writes them.
    const fn fields(self) -> &'static [Field] {
        match self {
            Self::BlockV4 => const { &block(SOURCE_V4, POST_SOURCE_V4) },
            Self::BlockV6 => const { &block(SOURCE_V6, POST_SOURCE_V6) },
            Self::SessionV4 => const { &session(SOURCE_V4, DESTINATION_V4, POST_SOURCE_V4, POST_DESTINATION_V4) },
            Self::SessionV6 => const { &session(SOURCE_V6, DESTINATION_V6, POST_SOURCE_V6, POST_DESTINATION_V6) },
        }
    }
}

const fn block(source: Field, post: Field) -> [Field; 9] {
    [TIME_MILLISECONDS, NAT_EVENT, source, post, RANGE_START, RANGE_END, RANGE_STEP, RANGE_PORTS, USER_NAME]
}

const fn session(source: Field, destination: Field, post_source: Field, post_destination: Field) -> [Field; 13] {
    [
        TIME_MILLISECONDS,
        NAT_EVENT,
        ORIGINATING_REALM,
        PROTOCOL,
        source,
        SOURCE_PORT,
        destination,
        DESTINATION_PORT,
        post_source,
        POST_SOURCE_PORT,
        post_destination,
        POST_DESTINATION_PORT,
        USER_NAME,
    ]
}

/// The length of a record without its name, bytes.
const fn fixed_length(template: Template) -> usize {
    let (fields, mut length, mut index) = (template.fields(), 0, 0);
    while index < fields.len() {
        if fields[index].1 != VARIABLE {
            length += fields[index].1 as usize;
        }
        index += 1;
    }
    length
}

/// Encodes the messages of one transport session. Records are buffered until a message is full, or [`Encoder::finish`].
#[derive(Debug)]
pub(super) struct Encoder {
    domain: u32,
    /// Number of records in all finished messages, modulo 2^32.
    sequence: u32,
    max_message: usize,
    /// The unfinished message, including its header.
    message: Vec<u8>,
    /// Its number of records.
    records: u32,
    /// Its last set: the template, and the offset of the set.
    set: Option<(Template, usize)>,
}

impl Encoder {
    /// For an observation domain, which distinguishes exporting processes at one address. `max_message` is the maximum
    /// message size in bytes, raised to 358 if smaller, so that the longest record fits.
    pub(super) fn new(domain: u32, max_message: usize) -> Self {
        let max_message = max_message.clamp(MIN_MESSAGE, usize::from(u16::MAX));
        Self { domain, sequence: 0, max_message, message: vec![0; HEADER], records: 0, set: None }
    }

    /// A message with all templates. Has to be sent before any other message, and repeatedly over UDP (RFC 7011, 8.4).
    /// Contains no buffered records.
    pub(super) fn templates(&self, now_secs: u32) -> Vec<u8> {
        let mut message = vec![0; HEADER];
        put(&mut message, TEMPLATES);
        put(&mut message, 0);
        for template in Template::ALL {
            put(&mut message, template as u16);
            put(&mut message, template.fields().len() as u16);
            for &(element, length) in template.fields() {
                put(&mut message, element);
                put(&mut message, length);
            }
        }
        close(&mut message, HEADER);
        self.write_header(&mut message, now_secs);
        message
    }

    /// Adds a record with time `at_ms`, in milliseconds since the Unix epoch. If it doesn't fit into the current
    /// message, that one is returned and a new one started.
    pub(super) fn push(&mut self, at_ms: u64, event: &NatEvent<'_>) -> Option<Vec<u8>> {
        let (template, record) = (event.template(), record(at_ms, event));
        let full = if self.message.len() + self.set_overhead(template) + record.len() > self.max_message {
            self.finish((at_ms / 1000) as u32)
        } else {
            None
        };
        if self.set_overhead(template) > 0 {
            self.set = Some((template, self.message.len()));
            put(&mut self.message, template as u16);
            put(&mut self.message, 0);
        }
        self.message.extend_from_slice(&record);
        self.records += 1;
        if let Some((_, start)) = self.set {
            close(&mut self.message, start);
        }
        full
    }

    /// The message with the buffered records, if there are any. `now_secs` is in seconds since the Unix epoch.
    pub(super) fn finish(&mut self, now_secs: u32) -> Option<Vec<u8>> {
        if self.records == 0 {
            return None;
        }
        let mut message = std::mem::replace(&mut self.message, vec![0; HEADER]);
        self.write_header(&mut message, now_secs);
        self.sequence = self.sequence.wrapping_add(self.records);
        self.records = 0;
        self.set = None;
        Some(message)
    }

    /// The length of the set header before a record; 0 if the last set has its template.
    fn set_overhead(&self, template: Template) -> usize {
        if self.set.is_some_and(|(last, _)| last == template) { 0 } else { SET_HEADER }
    }

    /// Writes the message header. The sequence number counts the records before this message (RFC 7011, 3.1).
    fn write_header(&self, message: &mut [u8], now_secs: u32) {
        let length = message.len() as u16;
        message[..2].copy_from_slice(&VERSION.to_be_bytes());
        message[2..4].copy_from_slice(&length.to_be_bytes());
        message[4..8].copy_from_slice(&now_secs.to_be_bytes());
        message[8..12].copy_from_slice(&self.sequence.to_be_bytes());
        message[12..HEADER].copy_from_slice(&self.domain.to_be_bytes());
    }
}

/// portRangeStepSize: the ports of a block are contiguous.
const STEP: u16 = 1;

/// Encodes a record, fields in the order of its template.
fn record(at_ms: u64, event: &NatEvent<'_>) -> Vec<u8> {
    let mut into = Vec::with_capacity(MAX_RECORD);
    into.extend_from_slice(&at_ms.to_be_bytes());
    into.push(event.number());
    let v4 = matches!(event.template(), Template::BlockV4 | Template::SessionV4);
    match *event {
        NatEvent::Block { endpoint, vip, first, last, ports, tenant, allocated: _ } => {
            address(&mut into, v4, endpoint);
            address(&mut into, v4, vip);
            for number in [first, last, STEP, ports] {
                put(&mut into, number);
            }
            name(&mut into, tenant);
        }
        NatEvent::Session { inbound, protocol, original: before, translated: after, tenant, created: _ } => {
            into.push(if inbound { 2 } else { 1 });
            into.push(protocol);
            for socket in [before.0, before.1, after.0, after.1] {
                address(&mut into, v4, socket.ip());
                put(&mut into, socket.port());
            }
            name(&mut into, tenant);
        }
    }
    into
}

fn put(into: &mut Vec<u8>, number: u16) {
    into.extend_from_slice(&number.to_be_bytes());
}

/// Writes an address in the family of the template.
fn address(into: &mut Vec<u8>, v4: bool, address: IpAddr) {
    match address {
        IpAddr::V4(address) if v4 => into.extend_from_slice(&address.octets()),
        IpAddr::V4(address) => into.extend_from_slice(&address.to_ipv6_mapped().octets()),
        IpAddr::V6(address) => into.extend_from_slice(&address.octets()),
    }
}

/// Writes a name with its length; truncated at a character boundary.
fn name(into: &mut Vec<u8>, name: &str) {
    let name = &name[..name.floor_char_boundary(MAX_NAME)];
    into.push(name.len() as u8);
    into.extend_from_slice(name.as_bytes());
}

/// Writes the length of the last set, which starts at `start`.
fn close(message: &mut [u8], start: usize) {
    let length = (message.len() - start) as u16;
    message[start + 2..start + SET_HEADER].copy_from_slice(&length.to_be_bytes());
}

#[cfg(test)]
mod tests;
