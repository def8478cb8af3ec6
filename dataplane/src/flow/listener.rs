//! Listeners: the transport address that a packet is for.
/// Where a frontend (at a VIP) or a backend listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Listener<A> {
    pub address: A,
    pub port: u16,
    /// IP protocol number.
    pub protocol: u8,
}
