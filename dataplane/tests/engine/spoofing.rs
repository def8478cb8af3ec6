//! Who says that he is somebody else, or somebody who can't be: dropped by name, with no session and nothing sent. BCP 38,
//! RFC 6890, RFC 1122 section 3.2.1.3.

use std::net::SocketAddr;

use crate::support::*;
use vipgate_dataplane::counters::DropReason;
use vipgate_dataplane::io::InterfaceId;

/// A packet that arrives at an interface with the right link address, whoever its sender says he is.
fn arriving(interface: InterfaceId, protocol: Protocol, source: SocketAddr, destination: SocketAddr) -> Vec<u8> {
    let mut frame = packet(protocol, source, destination);
    let (to, from) = if interface == INSIDE { (INSIDE_MAC, POD_MAC) } else { (OUTSIDE_MAC, ROUTER_MAC) };
    frame[..6].copy_from_slice(&to);
    frame[6..12].copy_from_slice(&from);
    frame
}

/// Each source and destination, at each port that may matter, is dropped for this reason.
fn all_dropped(interface: InterfaceId, ends: &[(&str, &str)], reason: DropReason) {
    for &(source, destination) in ends {
        for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Echo] {
            for port in [80, 30_000, 40_000] {
                let mut gateway = Gateway::new(&Setup::default());
                // A neighbour's session is open meanwhile, and must not notice.
                let question = packet(Protocol::Udp, at("10.244.1.5:4000"), at("198.51.100.10:53"));
                let seen = gateway.pod_sends(&question);
                let frame = arriving(interface, protocol, (ip(source), 4000).into(), (ip(destination), port).into());
                let what = format!("{source} -> {destination}:{port}, {protocol:?}");
                assert_eq!(gateway.arrives(0, interface, &frame), vec![], "{what}");
                assert_eq!(gateway.sessions(), 1, "{what}");
                gateway.far_sends(&answer_to(&seen, Protocol::Udp));
                gateway.assert_delta(&format!("egress 1, reply 1, drop {} 1, created 1", reason.name()));
            }
        }
    }
}

#[test]
fn nobody_is_nowhere_or_everybody() {
    for (interface, v4, v6) in [(INSIDE, "198.51.100.10", "2001:db8:51::10"), (OUTSIDE, "192.0.2.10", "2001:db8::10")] {
        for nobody in ["0.0.0.0", "0.1.2.3", "127.0.0.1", "224.0.0.5", "240.0.0.1", "255.255.255.255"] {
            all_dropped(interface, &[(nobody, v4)], DropReason::Martian);
        }
        for nobody in ["::", "::1", "fe80::5", "ff02::1", "ff0e::1", "::ffff:10.244.1.5"] {
            all_dropped(interface, &[(nobody, v6)], DropReason::Martian);
        }
    }
}

#[test]
fn nobody_is_spoken_to_there() {
    for to in ["0.0.0.0", "127.0.0.1", "224.0.0.5", "240.0.0.1", "255.255.255.255"] {
        all_dropped(INSIDE, &[("10.244.1.5", to)], DropReason::Martian);
    }
    for to in ["::", "::1", "fe80::5", "ff02::fb", "ff0e::1", "::ffff:198.51.100.10"] {
        all_dropped(INSIDE, &[("fd00:244:1::5", to)], DropReason::Martian);
    }
}

#[test]
fn a_pod_is_no_vip_and_no_stranger() {
    all_dropped(
        INSIDE,
        &[
            ("192.0.2.10", "198.51.100.10"),
            ("192.0.2.11", "198.51.100.10"),
            ("192.0.2.10", "192.0.2.11"),
            ("2001:db8::10", "2001:db8:51::10"),
        ],
        DropReason::SpoofedSource,
    );
    all_dropped(
        INSIDE,
        &[("198.51.100.10", "203.0.113.9"), ("10.244.1.99", "198.51.100.10"), ("fd00:244:1::99", "2001:db8:51::10")],
        DropReason::NoPolicy,
    );
}

#[test]
fn nobody_outside_is_a_pod_or_a_vip() {
    all_dropped(
        OUTSIDE,
        &[
            ("10.244.1.5", "198.51.100.10"),
            ("10.244.1.6", "192.0.2.10"),
            ("fd00:244:1::5", "2001:db8::10"),
            ("192.0.2.11", "192.0.2.10"),
            ("192.0.2.10", "198.51.100.10"),
        ],
        DropReason::SpoofedSource,
    );
}

#[test]
fn nobody_talks_to_himself() {
    for (interface, who) in
        [(OUTSIDE, "192.0.2.10"), (OUTSIDE, "2001:db8::10"), (INSIDE, "10.244.1.5"), (INSIDE, "fd00:244:1::5")]
    {
        all_dropped(interface, &[(who, who)], DropReason::Martian);
    }
}

#[test]
fn a_pod_that_says_it_is_another_ones_far_side_reaches_nothing() {
    for (pod, far) in [("10.244.1.5:4000", "198.51.100.10:53"), ("[fd00:244:1::5]:4000", "[2001:db8:51::10]:53")] {
        for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Echo] {
            let mut gateway = Gateway::new(&Setup::default());
            let seen = gateway.pod_sends(&packet(protocol, at(pod), at(far)));
            // Even with the right VIP and port, from inside nobody can be the far side.
            let mut forged = answer_to(&seen, protocol);
            forged[..6].copy_from_slice(&INSIDE_MAC);
            assert_eq!(gateway.arrives(0, INSIDE, &forged), vec![]);
            assert_eq!(gateway.drops(), [(DropReason::SpoofedSource, 1)].into());
            gateway.far_sends(&answer_to(&seen, protocol));
            gateway.assert_delta("egress 1, reply 1, drop spoofed_source 1, created 1");
        }
    }
}

#[test]
fn only_frames_for_the_gateway_are_looked_at() {
    for (pod, far) in [("10.244.1.5:4000", "198.51.100.10:53"), ("[fd00:244:1::5]:4000", "[2001:db8:51::10]:53")] {
        // Somebody else's, everybody's, a group's; and the gateway's own from the wrong interface.
        let cases = [
            ([2, 9, 9, 9, 9, 9], DropReason::NotOurs),
            ([0xff; 6], DropReason::Martian),
            ([1, 0, 0x5e, 0, 0, 5], DropReason::Martian),
            (OUTSIDE_MAC, DropReason::NotOurs),
        ];
        for (link, reason) in cases {
            let mut gateway = Gateway::new(&Setup::default());
            let mut frame = packet(Protocol::Udp, at(pod), at(far));
            frame[..6].copy_from_slice(&link);
            assert_eq!(gateway.arrives(0, INSIDE, &frame), vec![], "{link:x?}");
            gateway.assert_delta(&format!("drop {} 1", reason.name()));
        }
    }
}
