//! Health checks of Services: one HTTP request, one answer, as kube-proxy gives it. The answer of a connection needs no state:
//! its first sequence number is computed from who asks, and all others follow from what is acknowledged. Whatever gets lost is
//! sent again by who asks, and answered again.

use super::segment::{self, Said};
use super::tcp::{Flags, Segment};

/// PSH: there is no more for now.
const PUSH: u8 = 0x08;
/// More than a request that anybody sends; there is no buffer that could fill.
const WINDOW: u16 = 16_384;
/// What ends a request without a body.
const END: &[u8] = b"\r\n\r\n";

/// The whole answer to an HTTP request for the health of a Service with so many ready backends on the node.
pub fn http_answer(namespace: &str, name: &str, local_endpoints: u32) -> Vec<u8> {
    let status = if local_endpoints > 0 { "200 OK" } else { "503 Service Unavailable" };
    // Names of Kubernetes need no escapes.
    let body = format!(
        "{{\"service\":{{\"namespace\":\"{namespace}\",\"name\":\"{name}\"}},\"localEndpoints\":{local_endpoints},\"serviceProxyHealthy\":true}}"
    );
    let length = body.len();
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nX-Content-Type-Options: nosniff\r\n\
         X-Load-Balancing-Endpoint-Weight: {local_endpoints}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )
    .into_bytes()
}

/// Writes the IP packet that answers a segment of a health check, and returns its length. `cookie` is the first sequence number of
/// whoever is asked, always the same for the same connection, and nobody else's to know; `http` is the answer to every request.
///
/// `None` if there is nothing to say, or the packet is nothing that [`segment::answer`] answers.
pub fn answer(into: &mut [u8], original: &[u8], cookie: u32, http: &[u8]) -> Option<usize> {
    segment::answer(into, original, |asked, data| decide(asked, data, cookie, http))
}

fn decide<'a>(asked: &Segment, data: &[u8], cookie: u32, http: &'a [u8]) -> Option<Said<'a>> {
    let say = |sequence, acknowledgement, flags, data| {
        Some(Said { sequence, acknowledgement, flags: flags | Flags::ACK.0, window: WINDOW, data })
    };
    if asked.flags.has(Flags::RST) {
        return None;
    }
    if asked.flags.opens() {
        // Data with it is sent again behind the handshake.
        return say(cookie, asked.sequence.wrapping_add(1), Flags::SYN.0, &[]);
    }
    let (first, behind) = (cookie.wrapping_add(1), cookie.wrapping_add(http.len() as u32 + 2));
    let heard = asked.acknowledgement.wrapping_sub(first);
    if !asked.flags.has(Flags::ACK) || asked.flags.has(Flags::SYN) || heard > http.len() as u32 + 1 {
        // Of no connection that began with the cookie (RFC 9293 section 3.10.7.4).
        let reset =
            Said { sequence: asked.acknowledgement, acknowledgement: 0, flags: Flags::RST.0, window: 0, data: &[] };
        return asked.flags.has(Flags::ACK).then_some(reset);
    }
    let end = asked.sequence.wrapping_add(asked.space);
    match asked.space {
        0 => None,
        // It has heard of the answer already.
        _ if heard > 0 => say(behind, end, 0, &[]),
        _ if data.windows(END.len()).any(|part| part == END) => say(first, end, PUSH | Flags::FIN.0, http),
        _ if asked.flags.has(Flags::FIN) => say(first, end, Flags::FIN.0, &[]),
        // The rest of the request is still to come.
        _ => say(first, end, 0, &[]),
    }
}

#[cfg(test)]
mod tests {
    use etherparse::{PacketBuilder, SlicedPacket, TransportSlice};

    use super::*;

    const COOKIE: u32 = u32::MAX - 3;
    const CLIENT: [u8; 4] = [198, 51, 100, 10];
    const VIP: [u8; 4] = [203, 0, 113, 10];

    /// What is said to a segment: sequence, acknowledgement, flags as letters, data.
    fn said(sequence: u32, ack: Option<u32>, flags: &str, data: &[u8]) -> Option<(u32, u32, String, Vec<u8>)> {
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
        let (mut into, http) = ([0; 1280], http_answer("tenant-a", "api", 1));
        let length = answer(&mut into, &packet, COOKIE, &http)?;
        let parsed = SlicedPacket::from_ip(&into[..length]).unwrap();
        let Some(TransportSlice::Tcp(tcp)) = parsed.transport else { panic!("no TCP") };
        assert_eq!((tcp.source_port(), tcp.destination_port()), (30_000, 40_000));
        let letters = [(tcp.syn(), 'S'), (tcp.ack(), 'A'), (tcp.psh(), 'P'), (tcp.fin(), 'F'), (tcp.rst(), 'R')];
        let flags = letters.iter().filter(|(set, _)| *set).map(|(_, letter)| *letter).collect();
        Some((tcp.sequence_number(), tcp.acknowledgment_number(), flags, tcp.payload().to_vec()))
    }

    #[test]
    fn a_probe_gets_its_answer_segment_by_segment() {
        let http = http_answer("tenant-a", "api", 1);
        let length = http.len() as u32;
        let first = COOKIE.wrapping_add(1);
        assert_eq!(said(100, None, "S", b""), Some((COOKIE, 101, "SA".into(), vec![])));
        assert_eq!(said(101, Some(first), "", b""), None, "the handshake is done");
        let request = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n";
        let answered = Some((first, 101 + request.len() as u32, "APF".to_owned(), http.clone()));
        assert_eq!(said(101, Some(first), "", request), answered);
        assert_eq!(said(101, Some(first), "", request), answered, "again, when it was lost");
        let behind = first.wrapping_add(length + 1);
        assert_eq!(said(140, Some(behind), "F", b""), Some((behind, 141, "A".into(), vec![])));
    }

    #[test]
    fn a_request_in_two_parts_is_answered_with_the_second() {
        let first = COOKIE.wrapping_add(1);
        assert_eq!(said(101, Some(first), "", b"GET / HTTP/1.0\r\n"), Some((first, 117, "A".into(), vec![])));
        let (.., data) = said(117, Some(first), "", b"\r\n\r\n").unwrap();
        assert!(data.starts_with(b"HTTP/1.1 200 OK\r\n"));
        assert_eq!(said(117, Some(first), "F", b""), Some((first, 118, "AF".into(), vec![])), "it gave up");
    }

    #[test]
    fn what_began_with_no_cookie_is_reset_and_a_reset_is_not_answered() {
        assert_eq!(said(7, Some(12_345), "", b"GET"), Some((12_345, 0, "R".into(), vec![])));
        assert_eq!(said(7, None, "", b"GET"), None);
        assert_eq!(said(7, Some(COOKIE), "R", b""), None);
    }

    #[test]
    fn without_backends_it_is_503() {
        let text = String::from_utf8(http_answer("default", "web", 0)).unwrap();
        assert!(text.starts_with("HTTP/1.1 503 Service Unavailable\r\n"), "{text}");
        assert!(text.contains("X-Load-Balancing-Endpoint-Weight: 0\r\n"), "{text}");
        let (_, body) = text.split_once("\r\n\r\n").unwrap();
        assert_eq!(
            body,
            r#"{"service":{"namespace":"default","name":"web"},"localEndpoints":0,"serviceProxyHealthy":true}"#
        );
    }
}
