//! Echo requests to gateways, in their tunnels: VXLAN packets from an ordinary UDP socket, whose inner frame has an
//! EtherType for experiments. So an answer says that the gateway's packet path takes this node's packets.
//!
//! ```text
//!   VXLAN header   0x08, 3 bytes 0, VNI, 0                      RFC 7348 section 5
//!   inner frame    MAC addresses, 0x88b5                        IEEE 802 local experimental EtherType 1
//!   payload        "vgecho" 0 1 (request) or 0 2 (reply), 16 bytes nonce
//! ```

use std::io;
use std::net::{IpAddr, SocketAddr};

use tokio::net::UdpSocket;

use crate::liveness::Nonce;
use crate::policy::TunnelEndpoint;
use crate::tunnel::gateway_mac;

const REQUEST: [u8; 8] = *b"vgecho\x00\x01";
const REPLY: [u8; 8] = *b"vgecho\x00\x02";
/// EtherType of the inner frame.
pub const ETHERTYPE: [u8; 2] = [0x88, 0xb5];
/// Offsets: the inner frame, its EtherType, magic and nonce.
const FRAME: usize = 8;
const ETHERTYPE_AT: usize = FRAME + 12;
const MAGIC_AT: usize = ETHERTYPE_AT + 2;
const NONCE_AT: usize = MAGIC_AT + 8;
/// Length of the packet: the inner frame has the 60 bytes that every Ethernet frame has.
const LENGTH: usize = FRAME + 60;

/// A request to a gateway with this tunnel address.
pub fn request(own: &TunnelEndpoint, gateway: IpAddr, nonce: Nonce) -> [u8; LENGTH] {
    let mut packet = [0; LENGTH];
    packet[0] = 0x08;
    packet[4..8].copy_from_slice(&(own.vni << 8).to_be_bytes());
    packet[FRAME..FRAME + 6].copy_from_slice(&gateway_mac(gateway));
    packet[FRAME + 6..ETHERTYPE_AT].copy_from_slice(&own.mac);
    packet[ETHERTYPE_AT..MAGIC_AT].copy_from_slice(&ETHERTYPE);
    packet[MAGIC_AT..NONCE_AT].copy_from_slice(&REQUEST);
    packet[NONCE_AT..NONCE_AT + 16].copy_from_slice(&nonce);
    packet
}

/// The nonce of a reply; `None`: it is none.
pub fn reply(packet: &[u8]) -> Option<Nonce> {
    let is_reply = packet.first() == Some(&0x08)
        && packet.get(ETHERTYPE_AT..MAGIC_AT) == Some(&ETHERTYPE)
        && packet.get(MAGIC_AT..NONCE_AT) == Some(&REPLY);
    packet.get(NONCE_AT..)?.first_chunk().copied().filter(|_| is_reply)
}

/// The socket of requests and replies.
#[derive(Debug)]
pub struct EchoSocket {
    socket: UdpSocket,
    own: TunnelEndpoint,
}

impl EchoSocket {
    /// Binds a socket to the node's tunnel address, at any port.
    ///
    /// # Errors
    /// The address isn't this node's.
    pub async fn bind(own: TunnelEndpoint) -> io::Result<Self> {
        let socket = UdpSocket::bind(SocketAddr::new(own.address.ip(), 0)).await?;
        Ok(Self { socket, own })
    }

    /// The node's end of the tunnels.
    pub fn own(&self) -> TunnelEndpoint {
        self.own
    }

    /// Sends a request. One that can't be sent is one without an answer.
    pub fn send(&self, gateway: SocketAddr, nonce: Nonce) {
        let packet = request(&self.own, gateway.ip(), nonce);
        let _ = self.socket.try_send_to(&packet, gateway);
    }

    /// The nonce of the next reply. Cancel-safe. An error is a gateway's port that is closed: nothing to report.
    pub async fn receive(&self) -> Nonce {
        let mut buffer = [0; 256];
        loop {
            if let Ok((length, _)) = self.socket.recv_from(&mut buffer).await
                && let Some(nonce) = reply(&buffer[..length])
            {
                return nonce;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_has_the_documented_bytes_and_is_no_reply() {
        let own =
            TunnelEndpoint { address: "192.0.2.101:8473".parse().unwrap(), vni: 7, mac: [0x0a, 0x76, 1, 2, 3, 4] };
        let packet = request(&own, "192.0.2.11".parse().unwrap(), [0xee; 16]);
        let head = [
            0x08, 0, 0, 0, 0, 0, 7, 0, // VXLAN
            0x0a, 0x76, 192, 0, 2, 11, 0x0a, 0x76, 1, 2, 3, 4, 0x88, 0xb5, // Ethernet
            b'v', b'g', b'e', b'c', b'h', b'o', 0, 1,
        ];
        assert_eq!(packet[..30], head);
        assert_eq!((&packet[30..46], &packet[46..]), (&[0xee; 16][..], &[0; 22][..]));
        assert_eq!(reply(&packet), None);
        let mut answer = packet;
        answer[29] = 2;
        assert_eq!(reply(&answer), Some([0xee; 16]));
        assert!((0..46).all(|length| reply(&answer[..length]).is_none()));
        for at in (0..1).chain(20..30) {
            let mut other = answer;
            other[at] ^= 1;
            assert_eq!(reply(&other), None, "byte {at}");
        }
    }
}
