//! A capture shows what it is asked for, and changes nothing: over random stories, of two gateways that live through the same one, the
//! one that captures everything and the one that captures by a filter see the same packets and send the same.

use std::cell::Cell;
use std::net::IpAddr;

use etherparse::{NetSlice, SlicedPacket, TransportSlice};
use proptest::prelude::*;
use proptest::test_runner::{Config, FileFailurePersistence, TestRunner};
use vipgate_dataplane::counters::{Direction, DropReason};
use vipgate_dataplane::io::InterfaceId;
use vipgate_dataplane::verdict::Verdict;
use vipgate_dataplane::watch::tap::{Captured, Outcome, TapFilter};

use crate::story::{Step, Story, steps};
use crate::support::{INSIDE, OUTSIDE};

/// Pods, VIPs, far sides, the gateway itself, and nobody; alone, with neighbours, and all.
const NETS: [&str; 14] = [
    "10.244.1.5/32",
    "10.244.1.6/32",
    "10.244.1.4/30",
    "10.244.1.0/24",
    "192.0.2.10/32",
    "192.0.2.11/32",
    "192.0.2.1/32",
    "198.51.100.10/32",
    "198.51.100.0/24",
    "0.0.0.0/0",
    "172.16.0.0/12",
    "fd00:244:1::5/128",
    "2001:db8::/64",
    "2001:db8:51::/48",
];

/// Addresses, protocol and ports of a packet.
fn ends(packet: &[u8]) -> Option<([IpAddr; 2], u8, Option<[u16; 2]>)> {
    let packet = SlicedPacket::from_ethernet(packet).ok()?;
    let ports = match packet.transport {
        Some(TransportSlice::Udp(udp)) => Some([udp.source_port(), udp.destination_port()]),
        Some(TransportSlice::Tcp(tcp)) => Some([tcp.source_port(), tcp.destination_port()]),
        _ => None,
    };
    match packet.net? {
        NetSlice::Ipv4(v4) => {
            let header = v4.header();
            Some(([header.source_addr().into(), header.destination_addr().into()], header.protocol().0, ports))
        }
        NetSlice::Ipv6(v6) => {
            let header = v6.header();
            Some(([header.source_addr().into(), header.destination_addr().into()], header.next_header().0, ports))
        }
        NetSlice::Arp(_) => None,
    }
}

/// What is asked of the packet and of what it became; in a tunnel, of both.
fn is_wanted(filter: &TapFilter, it: &Captured) -> bool {
    let by_outcome = match filter.outcome {
        Outcome::Any => true,
        Outcome::Dropped => matches!(it.verdict, Verdict::Drop(_)),
        Outcome::DroppedFor(reason) => it.verdict == Verdict::Drop(reason),
        Outcome::Passed => !matches!(it.verdict, Verdict::Drop(_)),
        Outcome::Sent(direction) => {
            let is_on_its_way = !it.after.is_empty() && !matches!(it.verdict, Verdict::Answer(_));
            assert_eq!(it.direction.is_some(), is_on_its_way, "{it:02x?}");
            it.direction == Some(direction)
        }
    };
    // Behind the headers of a tunnel the packet stands as it is long.
    let inside = it.after.len().checked_sub(it.before.len()).map(|start| &it.after[start..]);
    let packets = [Some(&it.before[..]), Some(&it.after), inside.filter(|_| !matches!(it.verdict, Verdict::Answer(_)))];
    let all: Vec<_> = packets.into_iter().flatten().filter_map(ends).collect();
    by_outcome
        && filter.interface.is_none_or(|interface| interface == it.interface)
        && filter.nets.iter().all(|net| all.iter().any(|(addresses, ..)| addresses.iter().any(|one| net.contains(one))))
        && filter.protocol.is_none_or(|wanted| all.iter().any(|(_, protocol, _)| *protocol == wanted))
        && filter.port.is_none_or(|port| all.iter().any(|(.., ports)| ports.is_some_and(|ports| ports.contains(&port))))
}

fn filters() -> impl Strategy<Value = TapFilter> {
    let net = prop::sample::select(NETS.to_vec()).prop_map(|net| net.parse().unwrap());
    let maybe = |all: Vec<_>| prop_oneof![3 => Just(None), 2 => prop::sample::select(all).prop_map(Some)];
    let interface = prop_oneof![4 => Just(None), 1 => prop::sample::select(vec![INSIDE, OUTSIDE]).prop_map(Some)];
    let outcome = prop::sample::select(vec![
        Outcome::Any,
        Outcome::Any,
        Outcome::Dropped,
        Outcome::DroppedFor(DropReason::NoSession),
        Outcome::Passed,
        Outcome::Sent(Direction::Egress),
        Outcome::Sent(Direction::Reply),
    ]);
    let ports = vec![1000_u16, 80, 8080, 53, 20_000, 20_001, 4790];
    let protocols = vec![6, 17, 1];
    (prop::collection::vec(net, 0..3), maybe(ports), maybe(protocols), interface, outcome).prop_map(
        |(nets, port, protocol, interface, outcome)| TapFilter {
            nets,
            port,
            protocol: protocol.map(|protocol| protocol as u8),
            interface,
            outcome,
        },
    )
}

/// What a packet of the story became, and what was seen of it.
fn live(story: &mut Story, packets: &[(usize, InterfaceId, Vec<u8>)]) -> (Vec<(InterfaceId, Vec<u8>)>, Vec<Captured>) {
    for (worker, interface, packet) in packets {
        assert!(story.gateway.workers[*worker].io().inject(*interface, packet));
    }
    let sent = story.gateway.run();
    story.sent.extend(sent.clone());
    (sent, story.gateway.captured())
}

/// In the order of each flow. Among flows it is free: a SYN that begins anew waits for packets before it, unless these took the short
/// way, which is not for those that are looked at.
fn by_flow(mut sent: Vec<(InterfaceId, Vec<u8>)>) -> Vec<(InterfaceId, Vec<u8>)> {
    sent.sort_by_key(|(interface, bytes)| (interface.0, ends(bytes)));
    sent
}

#[derive(Default)]
struct Counts {
    concerned: Cell<u32>,
    left_out: Cell<u32>,
    answered: Cell<u32>,
}

fn compare(steps: &[Step], workers: u8, several: bool, filter: &TapFilter, at_once: usize, counts: &Counts) {
    let filters = [TapFilter::default(), filter.clone()];
    let mut stories = filters.map(|filter| {
        let mut story = Story::new(workers, several);
        story.gateway.capture(&filter, 2048, u32::MAX);
        story
    });
    for steps in steps.chunks(at_once) {
        let packets =
            stories.each_mut().map(|story| steps.iter().filter_map(|step| story.packet(step)).collect::<Vec<_>>());
        assert_eq!(packets[0], packets[1]);
        let [(sent, all), (sent_too, some)] = [0, 1].map(|which| live(&mut stories[which], &packets[which]));
        assert_eq!(by_flow(sent), by_flow(sent_too), "the way of a packet is not for whoever looks on");
        let (wanted, rest): (Vec<_>, Vec<_>) = all.iter().partition(|it| is_wanted(filter, it));
        assert_eq!(format!("{wanted:02x?}"), format!("{some:02x?}"), "{filter:?}");
        let answered = wanted.iter().filter(|it| matches!(it.verdict, Verdict::Answer(_))).count();
        for (count, more) in
            [(&counts.concerned, wanted.len()), (&counts.left_out, rest.len()), (&counts.answered, answered)]
        {
            count.set(count.get() + more as u32);
        }
    }
}

#[test]
fn a_capture_by_a_filter_is_its_part_of_a_capture_of_everything() {
    let kept = FileFailurePersistence::Direct("tests/engine/captures.regressions");
    let config = Config { cases: 1000, failure_persistence: Some(Box::new(kept)), ..Config::default() };
    let counts = Counts::default();
    let outcome = TestRunner::new(config).run(
        &(steps(), filters(), 1..6_usize),
        |((steps, workers, several), filter, at_once)| {
            compare(&steps, workers, several, &filter, at_once, &counts);
            Ok(())
        },
    );
    if let Err(error) = outcome {
        panic!("{error}");
    }
    let [concerned, left_out, answered] = [counts.concerned, counts.left_out, counts.answered].map(Cell::into_inner);
    assert!(concerned > 1000 && left_out > 1000 && answered > 100, "{concerned}, {left_out}, {answered}");
}
