//! Stateless HTTP responder for health checks of Services: the same replies as kube-proxy's. A connection needs no
//! state: its initial sequence number is a cookie computed from the tuple, and all other numbers follow from the
//! client's acknowledgment. Lost segments are retransmitted by the client, and replied to again.
//!
//! What is asked doesn't change the response, so nobody has to wait for the end of the request: every segment that the
//! client sends before it has the response gets it, whatever part of a request it has. All these replies are the same
//! stream, the response and a FIN, so none contradicts another, and each replaces one that was lost.

use super::tcp::{Flags, Segment};
use crate::wire::tcp_reply;
use crate::wire::tcp_reply::ReplySegment;

/// The PSH flag.
const PUSH: u8 = 0x08;
/// Receive window: larger than any request; nothing is buffered.
const WINDOW: u16 = 16_384;

/// The HTTP response to a health check of a Service with this number of ready backends on the node.
pub fn http_response(namespace: &str, name: &str, local_endpoints: u32) -> Vec<u8> {
    let status = if local_endpoints > 0 { "200 OK" } else { "503 Service Unavailable" };
    // Kubernetes names need no escaping.
    let body = format!(
        "{{\"service\":{{\"namespace\":\"{namespace}\",\"name\":\"{name}\"}},\
         \"localEndpoints\":{local_endpoints},\"serviceProxyHealthy\":true}}"
    );
    let length = body.len();
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nX-Content-Type-Options: nosniff\r\n\
         X-Load-Balancing-Endpoint-Weight: {local_endpoints}\r\nContent-Length: {length}\r\n\
         Connection: close\r\n\r\n{body}"
    )
    .into_bytes()
}

/// Writes the IP packet that replies to a segment of a health check, and returns its length. `cookie` is the server's
/// initial sequence number: constant per connection and secret. `http` is the response to every request.
///
/// `None` if the segment needs no reply, or `tcp_reply::reply` doesn't reply to it.
pub fn reply(into: &mut [u8], original: &[u8], cookie: u32, http: &[u8]) -> Option<usize> {
    tcp_reply::reply(into, original, |received| decide(received, cookie, http))
}

/// Whether a segment belongs to an open connection: it acknowledges the cookie, so its sender has received the SYN-ACK.
pub fn is_open(received: &Segment, cookie: u32, http: &[u8]) -> bool {
    acknowledged(received, cookie, http).is_some()
}

/// How much of the response and its FIN a segment of an open connection acknowledges.
fn acknowledged(received: &Segment, cookie: u32, http: &[u8]) -> Option<u32> {
    let is_behind_syn = received.flags.has(Flags::ACK) && !received.flags.has(Flags::SYN);
    let count = received.acknowledgment.wrapping_sub(cookie.wrapping_add(1));
    (is_behind_syn && count <= http.len() as u32 + 1).then_some(count)
}

fn decide<'a>(received: &Segment, cookie: u32, http: &'a [u8]) -> Option<ReplySegment<'a>> {
    let reply = |sequence, acknowledgement, flags, data| {
        Some(ReplySegment {
            sequence,
            acknowledgment: acknowledgement,
            flags: flags | Flags::ACK.0,
            window: WINDOW,
            data,
        })
    };
    if received.flags.has(Flags::RST) {
        return None;
    }
    if received.flags.is_initial_syn() {
        // Data in the SYN is not acknowledged: the client retransmits it after the handshake.
        return reply(cookie, received.sequence.wrapping_add(1), Flags::SYN.0, &[]);
    }
    let Some(acknowledged) = acknowledged(received, cookie, http) else {
        // Not a connection with this cookie (RFC 9293 section 3.10.7.4).
        let reset = ReplySegment {
            sequence: received.acknowledgment,
            acknowledgment: 0,
            flags: Flags::RST.0,
            window: 0,
            data: &[],
        };
        return received.flags.has(Flags::ACK).then_some(reset);
    };
    let (first, after_fin) = (cookie.wrapping_add(1), cookie.wrapping_add(http.len() as u32 + 2));
    let end = received.sequence.wrapping_add(received.sequence_length);
    match received.sequence_length {
        0 => None,
        // The client has acknowledged data of the response already.
        _ if acknowledged > 0 => reply(after_fin, end, 0, &[]),
        // A part of the request. A FIN alone may be behind one that was lost, or whose response was.
        _ => reply(first, end, PUSH | Flags::FIN.0, http),
    }
}

#[cfg(test)]
mod tests {
    use etherparse::{PacketBuilder, SlicedPacket, TransportSlice};

    use super::*;

    const COOKIE: u32 = u32::MAX - 3;
    const CLIENT: [u8; 4] = [198, 51, 100, 10];
    const VIP: [u8; 4] = [203, 0, 113, 10];

    /// The reply to a segment: sequence number, acknowledgment number, flags as letters, data.
    fn reply_to(sequence: u32, ack: Option<u32>, flags: &str, data: &[u8]) -> Option<(u32, u32, String, Vec<u8>)> {
        let mut step = PacketBuilder::ipv4(CLIENT, VIP, 60).tcp(40_000, 30_000, sequence, 64_000);
        if let Some(ack) = ack {
            step = step.ack(ack);
        }
        for flag in flags.chars() {
            step = match flag {
                'S' => step.syn(),
                'F' => step.fin(),
                _ => step.rst(),
            };
        }
        let mut packet = Vec::new();
        step.write(&mut packet, data).unwrap();
        let (mut into, http) = ([0; 1280], http_response("tenant-a", "api", 1));
        let length = reply(&mut into, &packet, COOKIE, &http)?;
        let parsed = SlicedPacket::from_ip(&into[..length]).unwrap();
        let Some(TransportSlice::Tcp(tcp)) = parsed.transport else { panic!("no TCP") };
        assert_eq!((tcp.source_port(), tcp.destination_port()), (30_000, 40_000));
        let letters = [(tcp.syn(), 'S'), (tcp.ack(), 'A'), (tcp.psh(), 'P'), (tcp.fin(), 'F'), (tcp.rst(), 'R')];
        let flags = letters.iter().filter(|(set, _)| *set).map(|(_, letter)| *letter).collect();
        Some((tcp.sequence_number(), tcp.acknowledgment_number(), flags, tcp.payload().to_vec()))
    }

    #[test]
    fn a_health_check_gets_its_response_segment_by_segment() {
        let http = http_response("tenant-a", "api", 1);
        let length = http.len() as u32;
        let first = COOKIE.wrapping_add(1);
        assert_eq!(reply_to(100, None, "S", b""), Some((COOKIE, 101, "SA".into(), vec![])));
        assert_eq!(reply_to(101, Some(first), "", b""), None, "the ACK of the handshake");
        let request = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n";
        let response = Some((first, 101 + request.len() as u32, "APF".to_owned(), http.clone()));
        assert_eq!(reply_to(101, Some(first), "", request), response);
        assert_eq!(reply_to(101, Some(first), "", request), response, "retransmitted");
        let after_fin = first.wrapping_add(length + 1);
        assert_eq!(reply_to(140, Some(after_fin), "F", b""), Some((after_fin, 141, "A".into(), vec![])));
    }

    #[test]
    fn a_request_in_pieces_gets_one_stream_whatever_is_lost_or_repeated() {
        let (http, first) = (http_response("tenant-a", "api", 1), COOKIE.wrapping_add(1));
        let after_fin = first.wrapping_add(http.len() as u32 + 1);
        let request = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n";
        for at in 1..request.len() {
            let (head, tail) = request.split_at(at);
            let (middle, end) = (101 + at as u32, 101 + request.len() as u32);
            let response = |acknowledgment| Some((first, acknowledgment, "APF".to_owned(), http.clone()));
            assert_eq!(reply_to(101, Some(first), "", head), response(middle), "{at}");
            // The client has sent the rest before it received that, or hasn't received it.
            assert_eq!(reply_to(middle, Some(first), "", tail), response(end), "{at}");
            // It half-closes the connection at once.
            assert_eq!(reply_to(middle, Some(first), "F", tail), response(end + 1), "{at}");
            assert_eq!(reply_to(end, Some(first), "F", b""), response(end + 1), "{at}");
            // It has received the response.
            let acknowledgment = |number| Some((after_fin, number, "A".to_owned(), vec![]));
            assert_eq!(reply_to(middle, Some(after_fin), "", tail), acknowledgment(end), "{at}");
            assert_eq!(reply_to(end, Some(after_fin), "F", b""), acknowledgment(end + 1), "{at}");
        }
    }

    #[test]
    fn a_connection_is_open_once_its_cookie_is_acknowledged() {
        let http = http_response("tenant-a", "api", 1);
        let is_open = |flags: u8, acknowledgment: u32| {
            is_open(&Segment { acknowledgment, flags: Flags(flags), ..Segment::default() }, COOKIE, &http)
        };
        let (first, ack) = (COOKIE.wrapping_add(1), Flags::ACK.0);
        let after_fin = first.wrapping_add(http.len() as u32 + 1);
        assert!(is_open(ack, first) && is_open(ack | Flags::RST.0, first) && is_open(ack, after_fin));
        assert!(!is_open(ack, COOKIE) && !is_open(ack, after_fin.wrapping_add(1)));
        assert!(!is_open(0, first) && !is_open(ack | Flags::SYN.0, first) && !is_open(Flags::SYN.0, first));
    }

    #[test]
    fn a_connection_without_the_cookie_is_reset_and_a_reset_gets_no_reply() {
        assert_eq!(reply_to(7, Some(12_345), "", b"GET"), Some((12_345, 0, "R".into(), vec![])));
        assert_eq!(reply_to(7, None, "", b"GET"), None);
        assert_eq!(reply_to(7, Some(COOKIE), "R", b""), None);
    }

    #[test]
    fn without_ready_backends_the_response_is_503() {
        let text = String::from_utf8(http_response("default", "web", 0)).unwrap();
        assert!(text.starts_with("HTTP/1.1 503 Service Unavailable\r\n"), "{text}");
        assert!(text.contains("X-Load-Balancing-Endpoint-Weight: 0\r\n"), "{text}");
        let (_, body) = text.split_once("\r\n\r\n").unwrap();
        assert_eq!(
            body,
            r#"{"service":{"namespace":"default","name":"web"},"localEndpoints":0,"serviceProxyHealthy":true}"#
        );
    }
}
