//! NAT events as IPFIX messages (RFC 7011, NAT logging as RFC 8158 has it): events in, bytes out; whoever has the socket and the
//! clock stands outside. One encoder belongs to one transport session: it counts the records that went into it.
//!
//! ```text
//!  message  version 10 (2) | length (2) | export time in s (4) | sequence number (4) | observation domain (4) | sets
//!  set      set id: 2 for templates, else the id of a template (2) | length (2) | records, not padded
//! ```

use std::net::{IpAddr, SocketAddr};

/// The version in each message.
const VERSION: u16 = 10;
/// Bytes of a message before its first set.
const HEADER: usize = 16;
/// Bytes of a set before its first record.
const SET_HEADER: usize = 4;
/// The id of a set of templates (RFC 7011, 3.3.2).
const TEMPLATES: u16 = 2;
/// The length that a template gives to what has its length before it in each record (RFC 7011, 7).
const VARIABLE: u16 = 0xffff;
/// The most bytes of a tenant's name: as many as a length of one byte can tell.
const LONGEST_NAME: usize = 254;
/// The longest record: a session over IPv6 with the longest name.
const LONGEST_RECORD: usize = fixed(Template::SessionV6) + 1 + LONGEST_NAME;
/// The least that a message may hold, so that each record fits into one.
const LEAST: usize = HEADER + SET_HEADER + LONGEST_RECORD;
const _: () = assert!(LEAST == 358);

/// A field of a record: the number of its information element and its bytes.
type Field = (u16, u16);

// The information elements, as IANA's registry has them.
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

/// What the NAT has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event<'a> {
    /// An endpoint got a block of ports of its VIP, or gave it back.
    Block {
        /// Got, else given back.
        allocated: bool,
        /// Whose sessions the ports are for.
        endpoint: IpAddr,
        /// Whose ports they are; of the endpoint's family.
        vip: IpAddr,
        /// The first of them.
        first: u16,
        /// The last of them.
        last: u16,
        /// How many they are.
        ports: u16,
        /// Whose the endpoint is. Of a long name the first 254 bytes are told.
        tenant: &'a str,
    },
    /// A session began or ended.
    Session {
        /// Began, else ended.
        created: bool,
        /// Its first packet came from outside.
        inbound: bool,
        /// The IP protocol. ICMP has its identifier for ports.
        protocol: u8,
        /// Source and destination of its first packet, as it came.
        before: (SocketAddr, SocketAddr),
        /// And as it left; all of one family.
        after: (SocketAddr, SocketAddr),
        /// Whose the endpoint is. Of a long name the first 254 bytes are told.
        tenant: &'a str,
    },
}

impl Event<'_> {
    /// The value of natEvent (RFC 8158, 4.3). Of sessions that stay IPv6 the registry knows nothing but the translation in general.
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

    /// How it is written. Should families be mixed, it is as IPv6, with IPv4 mapped.
    fn template(&self) -> Template {
        match self {
            Self::Block { endpoint: IpAddr::V4(_), vip: IpAddr::V4(_), .. } => Template::BlockV4,
            Self::Block { .. } => Template::BlockV6,
            Self::Session { before, after, .. } => {
                let all = [before.0, before.1, after.0, after.1];
                if all.iter().all(SocketAddr::is_ipv4) { Template::SessionV4 } else { Template::SessionV6 }
            }
        }
    }
}

/// The forms of a record; the number is the template's id.
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

    /// The fields in their order, which is that of [`record`].
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

/// The bytes of a record without its name.
const fn fixed(template: Template) -> usize {
    let (fields, mut sum, mut at) = (template.fields(), 0, 0);
    while at < fields.len() {
        if fields[at].1 != VARIABLE {
            sum += fields[at].1 as usize;
        }
        at += 1;
    }
    sum
}

/// Writes the messages of one transport session. What has been pushed waits until a message is full, or asked for.
#[derive(Debug)]
pub(super) struct Encoder {
    domain: u32,
    /// The records in all messages that were returned, modulo 2^32.
    sequence: u32,
    longest: usize,
    /// The message that is being written, from its header on.
    message: Vec<u8>,
    /// Its records.
    records: u32,
    /// Its last set: the template, and where the set starts.
    set: Option<(Template, usize)>,
}

impl Encoder {
    /// For an observation domain, which tells this process from others at the same address. `longest` is the most bytes of a message;
    /// what is too little for the longest record is taken for what is just enough, 358 bytes.
    pub(super) fn new(domain: u32, longest: usize) -> Self {
        let longest = longest.clamp(LEAST, usize::from(u16::MAX));
        Self { domain, sequence: 0, longest, message: vec![0; HEADER], records: 0, set: None }
    }

    /// A message with all templates. It has to come before any other one, and over UDP again and again (RFC 7011, 8.4). Nothing that
    /// waits goes with it.
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
        self.head(&mut message, now_secs);
        message
    }

    /// Adds a record of what happened at `at_ms`, in milliseconds since 1970. Returns the message before it when it doesn't fit there
    /// any more.
    pub(super) fn push(&mut self, at_ms: u64, event: &Event<'_>) -> Option<Vec<u8>> {
        let (template, record) = (event.template(), record(at_ms, event));
        let full = if self.message.len() + self.opening(template) + record.len() > self.longest {
            self.finish((at_ms / 1000) as u32)
        } else {
            None
        };
        if self.opening(template) > 0 {
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

    /// The message with all that waits, if anything does. `now_secs` is in seconds since 1970.
    pub(super) fn finish(&mut self, now_secs: u32) -> Option<Vec<u8>> {
        if self.records == 0 {
            return None;
        }
        let mut message = std::mem::replace(&mut self.message, vec![0; HEADER]);
        self.head(&mut message, now_secs);
        self.sequence = self.sequence.wrapping_add(self.records);
        self.records = 0;
        self.set = None;
        Some(message)
    }

    /// The bytes that a record needs before itself: none, if the last set is of its template.
    fn opening(&self, template: Template) -> usize {
        if self.set.is_some_and(|(last, _)| last == template) { 0 } else { SET_HEADER }
    }

    /// Writes the header. Its sequence number is of the records before this message (RFC 7011, 3.1).
    fn head(&self, message: &mut [u8], now_secs: u32) {
        let length = message.len() as u16;
        message[..2].copy_from_slice(&VERSION.to_be_bytes());
        message[2..4].copy_from_slice(&length.to_be_bytes());
        message[4..8].copy_from_slice(&now_secs.to_be_bytes());
        message[8..12].copy_from_slice(&self.sequence.to_be_bytes());
        message[12..HEADER].copy_from_slice(&self.domain.to_be_bytes());
    }
}

/// From one port of a block to the next.
const STEP: u16 = 1;

/// A record, its fields in the order of its template.
fn record(at_ms: u64, event: &Event<'_>) -> Vec<u8> {
    let mut into = Vec::with_capacity(LONGEST_RECORD);
    into.extend_from_slice(&at_ms.to_be_bytes());
    into.push(event.number());
    let v4 = matches!(event.template(), Template::BlockV4 | Template::SessionV4);
    match *event {
        Event::Block { endpoint, vip, first, last, ports, tenant, allocated: _ } => {
            address(&mut into, v4, endpoint);
            address(&mut into, v4, vip);
            for number in [first, last, STEP, ports] {
                put(&mut into, number);
            }
            name(&mut into, tenant);
        }
        Event::Session { inbound, protocol, before, after, tenant, created: _ } => {
            into.push(if inbound { 2 } else { 1 });
            into.push(protocol);
            for end in [before.0, before.1, after.0, after.1] {
                address(&mut into, v4, end.ip());
                put(&mut into, end.port());
            }
            name(&mut into, tenant);
        }
    }
    into
}

fn put(into: &mut Vec<u8>, number: u16) {
    into.extend_from_slice(&number.to_be_bytes());
}

/// An address as its template has it.
fn address(into: &mut Vec<u8>, v4: bool, address: IpAddr) {
    match address {
        IpAddr::V4(address) if v4 => into.extend_from_slice(&address.octets()),
        IpAddr::V4(address) => into.extend_from_slice(&address.to_ipv6_mapped().octets()),
        IpAddr::V6(address) => into.extend_from_slice(&address.octets()),
    }
}

/// A name after its length, cut between two characters.
fn name(into: &mut Vec<u8>, name: &str) {
    let name = &name[..name.floor_char_boundary(LONGEST_NAME)];
    into.push(name.len() as u8);
    into.extend_from_slice(name.as_bytes());
}

/// Writes the length of the set that starts at `start` and is the last.
fn close(message: &mut [u8], start: usize) {
    let length = (message.len() - start) as u16;
    message[start + 2..start + SET_HEADER].copy_from_slice(&length.to_be_bytes());
}

#[cfg(test)]
mod tests;
