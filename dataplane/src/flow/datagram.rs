//! What the fragments of a datagram share: the ports, which only the first one carries, and the identification.

/// Protocol and ports, which only the first fragment carries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransportPorts {
    /// The transport protocol; that of later IPv6 fragments isn't reliable.
    pub protocol: u8,
    /// Source port, as in a [`Tuple`](super::tuple::Tuple).
    pub source: u16,
    /// Destination port, as in a [`Tuple`](super::tuple::Tuple).
    pub destination: u16,
}

/// What later fragments need of the first one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    /// Its protocol and ports before translation.
    pub ports: TransportPorts,
    /// The identification that the datagram's fragments are sent with.
    pub translated_id: u32,
}
