//! A TCP connection through a gateway.

use std::net::SocketAddr;

use super::{Gateway, at, ends, tcp};

/// A connection through a gateway, with both ends in the test's hand.
pub struct Connection {
    pub gateway: Gateway,
    pub pod: SocketAddr,
    pub far: SocketAddr,
    /// Where the far side sees the pod.
    pub vip: SocketAddr,
}

impl Connection {
    /// The pod has said SYN.
    pub fn begun(mut gateway: Gateway, (pod, far): (&str, &str)) -> Self {
        let vip = ends(&gateway.pod_sends(&tcp(at(pod), at(far), "S", 1000, 0))).0;
        Self { gateway, pod: at(pod), far: at(far), vip }
    }

    /// Both handshakes were seen; the pod goes on at 1001, the far side at 5001.
    pub fn established(gateway: Gateway, ends: (&str, &str)) -> Self {
        let mut this = Self::begun(gateway, ends);
        this.far_says("SA", 5000, 1001);
        this.pod_says("A", 1001, 5001);
        this
    }

    pub fn pod_says(&mut self, flags: &str, sequence: u32, ack: u32) {
        let went = self.gateway.pod_sends(&tcp(self.pod, self.far, flags, sequence, ack));
        assert_eq!(ends(&went), (self.vip, self.far));
    }

    pub fn far_says(&mut self, flags: &str, sequence: u32, ack: u32) {
        let came = self.gateway.far_sends(&tcp(self.far, self.vip, flags, sequence, ack));
        assert_eq!(ends(&came), (self.far, self.pod));
    }
}
