//! Which addresses are accepted where: forged sources, the VIP itself outside, VIPs inside.

use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::observe::capture::CaptureFilter;
use vipgate_dataplane::observe::packet_summary::PacketSummary;
use vipgate_testkit::services::*;
use vipgate_testkit::*;

use super::{PODS, PRIVATE, REMOTES, VIP, gateway, in_cloud};
use crate::health_checks::{probe, with_health_check};
use crate::sctp;

/// The other tenant's VIP and its private address.
const OTHER: [&str; 2] = ["192.0.2.11", "172.31.0.11"];

/// Two VIPs with private addresses, and a Service.
fn two_vips() -> Gateway {
    let mut set = with_services(&[service(&both_pods())]);
    super::add_private(&mut set, "gw-a", OTHER[0], OTHER[1]);
    in_cloud(set)
}

#[test]
fn forged_sources_are_dropped_whether_vip_or_private_address() {
    for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Echo] {
        for source in OTHER {
            for port in [80, 53, 30_000, 40_000] {
                for to in [VIP[0], PRIVATE[0]] {
                    let mut gateway = two_vips();
                    let forged = on_link(OUTSIDE, packet(protocol, (ip(source), 4000).into(), (ip(to), port).into()));
                    assert_eq!(gateway.receive(0, OUTSIDE, &forged), [], "{source} -> {to}:{port}");
                    gateway.assert_delta("drop spoofed_source 1");
                }
            }
        }
        for (i, to) in [(0, VIP[0]), (0, PRIVATE[0]), (1, VIP[1]), (1, PRIVATE[1])] {
            for source in [VIP[i], PRIVATE[i]] {
                let mut gateway = two_vips();
                let forged = on_link(OUTSIDE, packet(protocol, (ip(source), 4000).into(), (ip(to), 80).into()));
                assert_eq!(gateway.receive(0, OUTSIDE, &forged), [], "{source} -> {to}");
                gateway.assert_delta("drop martian 1");
            }
        }
    }
}

#[test]
fn a_forged_private_source_reaches_no_hairpin_session() {
    let mut gateway = two_vips();
    let (a, b) = (at("10.244.1.5:4000"), at("10.244.1.21:5000"));
    let opened = gateway.pod_sends(&packet(Protocol::Udp, b, at(REMOTES[0])));
    let b_vip = (ip(OTHER[0]), ends(&opened).0.port()).into();
    // B's port is open for its remote alone; A's packet opens a session of A, and is dropped at B.
    assert_eq!(gateway.receive(0, INSIDE, &packet(Protocol::Udp, a, b_vip)), []);
    assert_eq!(gateway.sessions(), 2);
    for source in OTHER {
        for port in 1024..1034 {
            let forged = on_link(
                OUTSIDE,
                packet(Protocol::Udp, (ip(source), b_vip.port()).into(), (ip(PRIVATE[0]), port).into()),
            );
            assert_eq!(gateway.receive(0, OUTSIDE, &forged), []);
        }
    }
    assert_eq!(gateway.drops().get(&DropReason::SpoofedSource), Some(&20));
    gateway.skip_counter_check();
}

/// The same connections and rejections, and replies from the private address.
#[test]
fn the_vip_itself_is_no_way_around_the_policy() {
    let api = vipgate_dataplane::policy::spec::ServiceSpec {
        source_ranges: vec!["198.51.100.0/28".parse().unwrap(), "2001:db8:51::/64".parse().unwrap()],
        ..service(&both_pods())
    };
    for i in 0..2 {
        for (client, port) in
            [(CLIENTS[i], 80), (CLIENTS[i], 81), (["203.0.113.5:4000", "[2001:db8:66::1]:4000"][i], 80)]
        {
            let [one, other] = [PRIVATE[i], VIP[i]].map(|to| {
                let mut gateway = in_cloud(with_services(std::slice::from_ref(&api)));
                let received = gateway.receive(0, OUTSIDE, &tcp(at(client), (ip(to), port).into(), "S", 1000, 0));
                let answered = received.first().map(|(_, bytes)| {
                    let backend = ends(bytes).1;
                    gateway.backend_sends(0, &tcp(backend, at(client), "SA", 5000, 1001)).0
                });
                (received, answered, gateway.take_delta())
            });
            assert_eq!(one, other);
            assert_eq!(one.1.map(|it| it.ip()), one.0.first().map(|_| ip(PRIVATE[i])));
        }
    }
    // A reply to the VIP itself is one to the session.
    let mut gateway = gateway();
    let sent = gateway.pod_sends(&packet(Protocol::Udp, at(PODS[0]), at(REMOTES[0])));
    let (source, destination) = ends(&sent);
    gateway.remote_sends(&packet(Protocol::Udp, destination, (ip(VIP[0]), source.port()).into()));
    assert_eq!(
        gateway.receive(0, OUTSIDE, &packet(Protocol::Udp, at("198.51.100.8:1"), (ip(VIP[0]), source.port()).into())),
        []
    );
    gateway.assert_delta("egress 1, reply 1, drop no_service 1, created 1");
}

#[test]
fn pods_reach_each_other_and_services_at_vips_that_stay_vips_inside() {
    let mut gateway = two_vips();
    for (i, pod, own) in [(0, "10.244.1.21:3000", OTHER[0]), (1, "[fd00:244:1::5]:3000", VIP[1])] {
        let frontend = (ip(VIP[i]), 80).into();
        let sent = gateway.receive(0, INSIDE, &tcp(at(pod), frontend, "S", 1000, 0));
        let (caller, backend) = ends(&sent[0].1);
        assert_eq!((sent[0].0, caller.ip()), (INSIDE, ip(own)));
        let sent = gateway.receive(0, INSIDE, &tcp(backend, caller, "SA", 5000, 1001));
        assert_eq!((sent[0].0, ends(&sent[0].1)), (INSIDE, (frontend, at(pod))));
    }
    gateway.assert_delta("egress 2, reply 2, inbound 2, service_reply 2, created 4");
}

#[test]
fn captures_and_their_filters_know_vips_alone() {
    for (net, count) in [(VIP[0], 2), (PRIVATE[0], 0), (VIP[1], 2), (PRIVATE[1], 0)] {
        let mut gateway = gateway();
        let filter = CaptureFilter { nets: vec![ip(net).into()], ..CaptureFilter::default() };
        gateway.capture(&filter, 2048, u32::MAX);
        let mut captured = Vec::new();
        for (pod, remote) in PODS.into_iter().zip(REMOTES) {
            let sent = gateway.pod_sends(&packet(Protocol::Udp, at(pod), at(remote)));
            captured.extend(gateway.captured());
            gateway.remote_sends(&reply_to(&sent, Protocol::Udp));
            captured.extend(gateway.captured());
        }
        assert_eq!(captured.len(), count, "{net}");
        for it in captured {
            let vip = [ends(&it.after).0.ip(), ends(&it.before).1.ip()];
            assert!(vip.contains(&ip(net)), "{vip:?}");
        }
        gateway.assert_delta("egress 2, reply 2, created 2");
    }
}

/// Probes of a cloud's load balancer are for the private address, too.
#[test]
fn health_checks_at_the_private_address_are_answered_from_it() {
    let mut gateway = in_cloud(with_services(&[with_health_check(2)]));
    for (client, private) in CLIENTS.into_iter().zip(PRIVATE) {
        let response = probe(&mut gateway, OUTSIDE, at(client), (ip(private), 30_000).into());
        assert!(response.starts_with("HTTP/1.1 200 OK\r\n"), "{response}");
    }
    gateway.assert_delta("replies sent 6, consumed 2");
}

/// The checksum of SCTP covers no addresses.
#[test]
fn sctp_associations_pass_both_ways_with_their_checksum() {
    let mut gateway = in_cloud(with_services(&[service(&both_pods())]));
    for (i, (pod, remote)) in PODS.into_iter().zip(REMOTES).enumerate() {
        let sent = gateway.receive(0, INSIDE, &sctp::packet(at(pod), at(remote), 0, sctp::INIT)).remove(0).1;
        let source = PacketSummary::of(&sent).unwrap();
        assert_eq!(source.source, ip(PRIVATE[i]));
        let own = (source.source, source.ports.unwrap()[0]).into();
        let received = gateway.receive(0, OUTSIDE, &sctp::packet(at(remote), own, 0x0707_0707, sctp::INIT_ACK));
        assert_eq!(PacketSummary::of(&received[0].1).unwrap().destination, at(pod).ip());
        let to_service = sctp::packet(at(CLIENTS[i]), (ip(PRIVATE[i]), 3868).into(), 0, sctp::INIT);
        let received = gateway.receive(0, OUTSIDE, &to_service);
        assert_eq!(PacketSummary::of(&received[0].1).unwrap().source, at(CLIENTS[i]).ip());
    }
    gateway.assert_delta("egress 2, reply 2, inbound 2, created 4");
}
