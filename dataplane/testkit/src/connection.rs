//! A TCP connection through a gateway.

use std::net::SocketAddr;

use crate::{Gateway, at, ends, tcp};

/// A connection through a gateway; the test controls both endpoints.
#[derive(Debug)]
pub struct Connection {
    pub gateway: Gateway,
    /// The pod's address and port.
    pub pod: SocketAddr,
    /// The remote's address and port.
    pub remote: SocketAddr,
    /// The pod's external address and port.
    pub vip: SocketAddr,
}

impl Connection {
    /// After the pod's SYN.
    pub fn syn_sent(mut gateway: Gateway, (pod, remote): (&str, &str)) -> Self {
        let vip = ends(&gateway.pod_sends(&tcp(at(pod), at(remote), "S", 1000, 0))).0;
        Self { gateway, pod: at(pod), remote: at(remote), vip }
    }

    /// After the three-way handshake: the pod continues at 1001, the remote at 5001.
    pub fn established(gateway: Gateway, ends: (&str, &str)) -> Self {
        let mut this = Self::syn_sent(gateway, ends);
        this.remote_sends("SA", 5000, 1001);
        this.pod_sends("A", 1001, 5001);
        this
    }

    /// The pod sends a segment, which must be forwarded.
    pub fn pod_sends(&mut self, flags: &str, sequence: u32, ack: u32) {
        let sent = self.gateway.pod_sends(&tcp(self.pod, self.remote, flags, sequence, ack));
        assert_eq!(ends(&sent), (self.vip, self.remote));
    }

    /// The remote sends a segment, which must be forwarded.
    pub fn remote_sends(&mut self, flags: &str, sequence: u32, ack: u32) {
        let received = self.gateway.remote_sends(&tcp(self.remote, self.vip, flags, sequence, ack));
        assert_eq!(ends(&received), (self.remote, self.pod));
    }
}
