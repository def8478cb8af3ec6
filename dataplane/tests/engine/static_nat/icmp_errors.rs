//! ICMP errors of others and of the gateway: outside they quote the private address.

use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::policy::spec::NetworkSpec;
use vipgate_dataplane::wire::checksum::checksum;
use vipgate_dataplane::wire::icmp_error::IcmpError;
use vipgate_testkit::services::*;
use vipgate_testkit::*;

use super::{PODS, PRIVATE, REMOTES, VIP, gateway, in_cloud};
use crate::icmp::{error_about, quoted, type_and_code, with_addresses};

const ROUTERS: [&str; 2] = ["203.0.113.77", "2001:db8:77::1"];

/// A packet's UDP checksum set to 0: none was computed.
fn without_udp_checksum(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes[40..42].fill(0);
    bytes
}

/// An IPv4 error whose quote is cut off after this many bytes.
fn cut(mut error: Vec<u8>, quote: usize) -> Vec<u8> {
    error.truncate(14 + 20 + 8 + quote);
    let length = (error.len() - 14) as u16;
    error[16..18].copy_from_slice(&length.to_be_bytes());
    update_header_checksum(&mut error);
    error[36..38].fill(0);
    let sum = checksum(0, &error[34..]);
    error[36..38].copy_from_slice(&sum.to_be_bytes());
    error
}

/// What the quote of a packet is to be: that packet, but for its TTL and identification, which the gateway has changed.
fn assert_quotes(quote: &[u8], original: &[u8], case: &str) {
    let (mut quote, mut original) = (quote[14..].to_vec(), original[14..].to_vec());
    if quote[0] >> 4 == 4 {
        assert_eq!(checksum(0, &quote[..20]), 0, "{case}: header checksum");
        for bytes in [&mut quote, &mut original] {
            bytes[4..6].fill(0);
            bytes[8] = 0;
            bytes[10..12].fill(0);
        }
    } else {
        (quote[7], original[7]) = (0, 0);
    }
    assert_eq!(quote, original[..quote.len()], "{case}");
}

#[test]
fn an_error_about_a_pods_packet_reaches_the_pod_with_its_packet_as_it_sent_it() {
    for (i, (pod, remote)) in PODS.into_iter().zip(REMOTES).enumerate() {
        for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Echo] {
            for error in [IcmpError::TtlExceeded, IcmpError::PacketTooBig { mtu: 1400 }, IcmpError::HostUnreachable] {
                let case = format!("{protocol:?} {error:?}");
                let mut gateway = gateway();
                let original = packet(protocol, at(pod), at(remote));
                let sent = gateway.pod_sends(&original);
                assert_eq!(ends(&sent).0.ip(), ip(PRIVATE[i]));
                let received = gateway.receive(0, OUTSIDE, &error_about(&sent, ROUTERS[i], error, false));
                let (source, destination, quote) = quoted(&received[0].1);
                assert_eq!((source, destination), (ip(ROUTERS[i]), at(pod).ip()), "{case}");
                assert_quotes(&quote, &original, &case);
                gateway.assert_delta("egress 1, reply 1, created 1");
            }
        }
    }
}

#[test]
fn quotes_without_a_udp_checksum_or_cut_off_are_translated_as_far_as_they_reach() {
    let mut gateway = gateway();
    let udp = without_udp_checksum(packet(Protocol::Udp, at(PODS[0]), at(REMOTES[0])));
    let tcp = packet(Protocol::Tcp, at(PODS[0]), at(REMOTES[0]));
    for original in [&udp, &tcp] {
        let sent = gateway.pod_sends(original);
        if original == &udp {
            assert_eq!(sent[40..42], [0, 0], "none stays none");
        }
        let whole = error_about(&sent, ROUTERS[0], IcmpError::HostUnreachable, false);
        // RFC 792: 8 bytes of the transport header; and up to the middle of the checksum of TCP.
        for length in [28, 29, 36, 37, 38, 39, 40].into_iter().filter(|length| 42 + length <= whole.len()) {
            let received = gateway.receive(0, OUTSIDE, &cut(whole.clone(), length));
            assert_eq!(received.len(), 1, "{length}: {:?}", gateway.drops());
            let quote = quoted(&received[0].1).2;
            let mut expected = original.clone();
            if length == 37 {
                // Half of a checksum is none: it stays as it was quoted.
                expected[50] = quote[50];
            }
            assert_quotes(&quote, &expected, &length.to_string());
        }
    }
    gateway.skip_counter_check();
}

#[test]
fn an_error_that_quotes_another_private_address_or_the_vip_is_dropped() {
    let mut gateway = gateway();
    let sent = gateway.pod_sends(&packet(Protocol::Udp, at(PODS[0]), at(REMOTES[0])));
    let port = ends(&sent).0.port();
    // For the private address, about a packet of the VIP; and for the VIP, about one of the private address.
    for (quoted_source, to) in [(VIP[0], PRIVATE[0]), (PRIVATE[0], VIP[0])] {
        let about = packet(Protocol::Udp, (ip(quoted_source), port).into(), at(REMOTES[0]));
        let mut error = error_about(&about, ROUTERS[0], IcmpError::HostUnreachable, false);
        let to: std::net::Ipv4Addr = to.parse().unwrap();
        error[30..34].copy_from_slice(&to.octets());
        update_header_checksum(&mut error);
        let received = gateway.receive(0, OUTSIDE, &error);
        assert_eq!(received.len(), usize::from(quoted_source == VIP[0]), "{quoted_source}: {:?}", gateway.drops());
    }
    gateway.skip_counter_check();
}

#[test]
fn a_pods_error_about_a_reply_or_a_clients_packet_leaves_from_and_about_the_private_address() {
    let mut gateway = in_cloud(with_services(&[service(&both_pods())]));
    for (i, (pod, remote)) in PODS.into_iter().zip(REMOTES).enumerate() {
        let sent = gateway.pod_sends(&packet(Protocol::Udp, at(pod), at(remote)));
        let reply = reply_to(&sent, Protocol::Udp);
        let to_service = packet(Protocol::Udp, at(CLIENTS[i]), (ip(PRIVATE[i]), 53).into());
        for original in [reply, to_service] {
            let received = gateway.remote_sends(&original);
            let own = ends(&received).1.ip().to_string();
            let error = error_about(&received, &own, IcmpError::PortUnreachable, true);
            let sent = gateway.receive(0, INSIDE, &error);
            let (source, destination, quote) = quoted(&sent[0].1);
            assert_eq!((source, destination), (ip(PRIVATE[i]), ends(&original).0.ip()));
            assert_quotes(&quote, &original, &format!("{i}"));
        }
    }
    gateway.assert_delta("egress 4, reply 2, inbound 2, service_reply 2, created 4");
}

/// A gateway with addresses of its own, which sends errors.
fn with_errors(network: NetworkSpec, set: &PolicySet) -> Gateway {
    let mut gateway = Gateway::new(&Setup { reject: true, ..Setup::default() });
    gateway.set_network(network);
    gateway.set_policy(&super::with_private(set.clone(), "gw-a", PRIVATE));
    gateway
}

#[test]
fn the_gateways_own_errors_to_clients_quote_the_private_address() {
    let mut network = with_addresses();
    network.interfaces[0].mtu = 1300;
    let own = ["192.0.2.1", "2001:db8::1"];
    for i in 0..2 {
        let mut gateway = with_errors(network.clone(), &with_services(&[service(&both_pods())]));
        let client = at(CLIENTS[i]);
        let to = |port: u16| (ip(PRIVATE[i]), port).into();
        let no_service = packet(Protocol::Udp, client, to(9999));
        let mut expired = packet(Protocol::Udp, client, to(53));
        set_ttl(&mut expired, 1);
        let unreachable = if i == 0 { (3, 3) } else { (1, 4) };
        let time_exceeded = if i == 0 { (11, 0) } else { (3, 0) };
        let mut cases = vec![(no_service, PRIVATE[i], unreachable), (expired, own[i], time_exceeded)];
        if i == 0 {
            cases.push((large_reply(client, to(53), false), own[i], (3, 4)));
        }
        for (original, source, kind) in cases {
            let sent = gateway.receive(0, OUTSIDE, &original);
            assert_eq!((sent.len(), sent[0].0), (1, OUTSIDE), "{:?}", gateway.drops());
            assert_eq!(type_and_code(&sent[0].1), kind);
            let (from, destination, quote) = quoted(&sent[0].1);
            assert_eq!((from, destination), (ip(source), client.ip()));
            assert_quotes(&quote, &original, &format!("{kind:?}"));
        }
        gateway.skip_counter_check();
    }
}

#[test]
fn a_reset_for_a_closed_port_comes_from_the_private_address() {
    let mut gateway = with_errors(with_addresses(), &policy());
    for i in 0..2 {
        let to = (ip(PRIVATE[i]), 81).into();
        let sent = gateway.receive(0, OUTSIDE, &tcp(at(CLIENTS[i]), to, "S", 1000, 0));
        assert_eq!(ends(&sent[0].1), (to, at(CLIENTS[i])));
    }
    gateway.assert_delta("drop no_service 2, replies sent 2");
}

#[test]
fn the_gateways_own_errors_to_pods_show_the_vip_of_another_pod() {
    let mut gateway = with_errors(with_addresses(), &policy());
    // Another tenant's VIP, at a port without a Service: hairpinned, and rejected there.
    let original = packet(Protocol::Udp, at("10.244.1.21:4000"), (ip(VIP[0]), 9999).into());
    let sent = gateway.receive(0, INSIDE, &original);
    assert_eq!(sent.len(), 1, "{:?}", gateway.drops());
    let (source, destination, quote) = quoted(&sent[0].1);
    assert_eq!((source, destination), (ip(VIP[0]), ip("10.244.1.21")));
    assert_quotes(&quote, &original, "hairpin");
    gateway.skip_counter_check();
}

#[test]
fn an_echo_request_to_a_private_address_is_treated_like_one_to_the_vip() {
    for i in 0..2 {
        let mut one = Gateway::new(&Setup::default());
        let mut other = gateway();
        let ping = |to: &str| packet(Protocol::Echo, at(CLIENTS[i]), (ip(to), 7).into());
        let plain = one.receive(0, OUTSIDE, &ping(VIP[i]));
        let translated = other.receive(0, OUTSIDE, &ping(PRIVATE[i]));
        assert_eq!((plain.len(), translated.len()), (0, 0));
        assert_eq!(one.drops(), [(DropReason::NoService, 1)].into());
        assert_eq!(one.take_delta(), other.take_delta());
    }
}
