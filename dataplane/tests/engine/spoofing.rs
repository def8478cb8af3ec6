//! Spoofed and martian addresses: dropped with a reason, without a session or a reply. BCP 38, RFC 6890, RFC 1122
//! section 3.2.1.3.

use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_testkit::*;

/// Asserts that packets from each source to each destination, at each relevant port, are dropped for this reason.
fn assert_all_dropped(interface: InterfaceId, ends: &[(&str, &str)], reason: DropReason) {
    for &(source, destination) in ends {
        for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Echo] {
            for port in [80, 30_000, 40_000] {
                let mut gateway = Gateway::new(&Setup::default());
                // Another pod's open session must not be affected.
                let request = packet(Protocol::Udp, at("10.244.1.5:4000"), at("198.51.100.10:53"));
                let seen = gateway.pod_sends(&request);
                let frame =
                    on_link(interface, packet(protocol, (ip(source), 4000).into(), (ip(destination), port).into()));
                let case = format!("{source} -> {destination}:{port}, {protocol:?}");
                assert_eq!(gateway.receive(0, interface, &frame), vec![], "{case}");
                assert_eq!(gateway.sessions(), 1, "{case}");
                gateway.remote_sends(&reply_to(&seen, Protocol::Udp));
                gateway.assert_delta(&format!("egress 1, reply 1, drop {} 1, created 1", reason.name()));
            }
        }
    }
}

#[test]
fn martian_sources_are_dropped() {
    for (interface, v4, v6) in [(INSIDE, "198.51.100.10", "2001:db8:51::10"), (OUTSIDE, "192.0.2.10", "2001:db8::10")] {
        for martian in
            ["0.0.0.0", "0.1.2.3", "127.0.0.1", "169.254.169.254", "224.0.0.5", "240.0.0.1", "255.255.255.255"]
        {
            assert_all_dropped(interface, &[(martian, v4)], DropReason::Martian);
        }
        for martian in ["::", "::1", "fe80::5", "ff02::1", "ff0e::1", "::ffff:10.244.1.5"] {
            assert_all_dropped(interface, &[(martian, v6)], DropReason::Martian);
        }
    }
}

#[test]
fn martian_destinations_are_dropped() {
    for to in ["0.0.0.0", "127.0.0.1", "169.254.169.254", "224.0.0.5", "240.0.0.1", "255.255.255.255"] {
        assert_all_dropped(INSIDE, &[("10.244.1.5", to)], DropReason::Martian);
    }
    for to in ["::", "::1", "fe80::5", "ff02::fb", "ff0e::1", "::ffff:198.51.100.10"] {
        assert_all_dropped(INSIDE, &[("fd00:244:1::5", to)], DropReason::Martian);
    }
}

#[test]
fn pods_must_not_use_vip_or_uncovered_sources() {
    assert_all_dropped(
        INSIDE,
        &[
            ("192.0.2.10", "198.51.100.10"),
            ("192.0.2.11", "198.51.100.10"),
            ("192.0.2.10", "192.0.2.11"),
            ("2001:db8::10", "2001:db8:51::10"),
        ],
        DropReason::SpoofedSource,
    );
    assert_all_dropped(
        INSIDE,
        &[("198.51.100.10", "203.0.113.9"), ("10.244.1.99", "198.51.100.10"), ("fd00:244:1::99", "2001:db8:51::10")],
        DropReason::NoPolicy,
    );
}

#[test]
fn outside_packets_must_not_use_pod_or_vip_sources() {
    assert_all_dropped(
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
fn packets_with_equal_source_and_destination_are_martian() {
    for (interface, address) in
        [(OUTSIDE, "192.0.2.10"), (OUTSIDE, "2001:db8::10"), (INSIDE, "10.244.1.5"), (INSIDE, "fd00:244:1::5")]
    {
        assert_all_dropped(interface, &[(address, address)], DropReason::Martian);
    }
}

#[test]
fn a_pod_spoofing_another_pods_remote_is_dropped() {
    for (pod, remote) in POD_AND_REMOTE {
        for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Echo] {
            let mut gateway = Gateway::new(&Setup::default());
            let seen = gateway.pod_sends(&packet(protocol, at(pod), at(remote)));
            // Even with the right VIP and port, a packet from inside can't come from the remote.
            let forged = on_link(INSIDE, reply_to(&seen, protocol));
            assert_eq!(gateway.receive(0, INSIDE, &forged), vec![]);
            assert_eq!(gateway.drops(), [(DropReason::SpoofedSource, 1)].into());
            gateway.remote_sends(&reply_to(&seen, protocol));
            gateway.assert_delta("egress 1, reply 1, drop spoofed_source 1, created 1");
        }
    }
}

#[test]
fn only_frames_with_the_gateways_mac_are_processed() {
    for (pod, remote) in POD_AND_REMOTE {
        // Another host's MAC address, broadcast, multicast, and the gateway's own at the wrong interface.
        let cases = [
            ([2, 9, 9, 9, 9, 9], DropReason::NotOurs),
            ([0xff; 6], DropReason::Martian),
            ([1, 0, 0x5e, 0, 0, 5], DropReason::Martian),
            (OUTSIDE_MAC, DropReason::NotOurs),
        ];
        for (destination_mac, reason) in cases {
            let mut gateway = Gateway::new(&Setup::default());
            let mut frame = packet(Protocol::Udp, at(pod), at(remote));
            frame[..6].copy_from_slice(&destination_mac);
            assert_eq!(gateway.receive(0, INSIDE, &frame), vec![], "{destination_mac:x?}");
            gateway.assert_delta(&format!("drop {} 1", reason.name()));
        }
    }
}
