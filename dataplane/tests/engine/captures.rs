//! Packet capture doesn't change forwarding: over random scenarios, a gateway that captures everything and one with a
//! capture filter send the same packets, and the filtered capture is the matching subset.

use std::cell::Cell;
use std::net::IpAddr;

use etherparse::{NetSlice, SlicedPacket, TransportSlice};
use proptest::prelude::*;
use proptest::test_runner::{Config, FileFailurePersistence, TestRunner};
use vipgate_dataplane::flow::direction::Direction;
use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::flow::verdict::Verdict;
use vipgate_dataplane::observe::capture::{CaptureFilter, CapturedPacket, OutcomeFilter};
use vipgate_testkit::{INSIDE, OUTSIDE, addresses};

use crate::scenario::{Scenario, Step, steps};

/// Pods, VIPs, remotes, the gateway itself and unused addresses; as hosts and as prefixes.
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
    let net = packet.net?;
    let protocol = match &net {
        NetSlice::Ipv4(v4) => v4.header().protocol().0,
        NetSlice::Ipv6(v6) => v6.header().next_header().0,
        NetSlice::Arp(_) => return None,
    };
    Some((addresses(&net).into(), protocol, ports))
}

/// Whether a filter matches a packet before or after processing; in a tunnel, the inner packet counts, too.
fn matches(filter: &CaptureFilter, it: &CapturedPacket) -> bool {
    let outcome_matches = match filter.outcome {
        OutcomeFilter::Any => true,
        OutcomeFilter::Dropped => matches!(it.verdict, Verdict::Drop(_)),
        OutcomeFilter::DroppedWith(reason) => it.verdict == Verdict::Drop(reason),
        OutcomeFilter::Passed => !matches!(it.verdict, Verdict::Drop(_)),
        OutcomeFilter::Forwarded(direction) => {
            let is_forwarded = !it.after.is_empty() && !matches!(it.verdict, Verdict::Reply(_));
            assert_eq!(it.direction.is_some(), is_forwarded, "{it:02x?}");
            it.direction == Some(direction)
        }
    };
    // The inner packet follows the tunnel headers, with its length unchanged.
    let inner = it.after.len().checked_sub(it.before.len()).map(|start| &it.after[start..]);
    let packets = [Some(&it.before[..]), Some(&it.after), inner.filter(|_| !matches!(it.verdict, Verdict::Reply(_)))];
    let all: Vec<_> = packets.into_iter().flatten().filter_map(ends).collect();
    outcome_matches
        && filter.interface.is_none_or(|interface| interface == it.interface)
        && filter.nets.iter().all(|net| all.iter().any(|(addresses, ..)| addresses.iter().any(|one| net.contains(one))))
        && filter.protocol.is_none_or(|wanted| all.iter().any(|(_, protocol, _)| *protocol == wanted))
        && filter.port.is_none_or(|port| all.iter().any(|(.., ports)| ports.is_some_and(|ports| ports.contains(&port))))
}

fn filters() -> impl Strategy<Value = CaptureFilter> {
    let net = prop::sample::select(NETS.to_vec()).prop_map(|net| net.parse().unwrap());
    let maybe = |all: Vec<_>| prop_oneof![3 => Just(None), 2 => prop::sample::select(all).prop_map(Some)];
    let interface = prop_oneof![4 => Just(None), 1 => prop::sample::select(vec![INSIDE, OUTSIDE]).prop_map(Some)];
    let outcome = prop::sample::select(vec![
        OutcomeFilter::Any,
        OutcomeFilter::Any,
        OutcomeFilter::Dropped,
        OutcomeFilter::DroppedWith(DropReason::NoSession),
        OutcomeFilter::Passed,
        OutcomeFilter::Forwarded(Direction::Egress),
        OutcomeFilter::Forwarded(Direction::Reply),
    ]);
    let ports = vec![1000_u16, 80, 8080, 53, 20_000, 20_001, 4790];
    let protocols = vec![6, 17, 1];
    (prop::collection::vec(net, 0..3), maybe(ports), maybe(protocols), interface, outcome).prop_map(
        |(nets, port, protocol, interface, outcome)| CaptureFilter {
            nets,
            port,
            protocol: protocol.map(|protocol| protocol as u8),
            interface,
            outcome,
        },
    )
}

/// Runs packets of a scenario; returns what was sent and captured.
fn run_packets(
    scenario: &mut Scenario,
    packets: &[(usize, InterfaceId, Vec<u8>)],
) -> (Vec<(InterfaceId, Vec<u8>)>, Vec<CapturedPacket>) {
    for (worker, interface, packet) in packets {
        assert!(scenario.gateway.workers[*worker].io().inject(*interface, packet));
    }
    let sent = scenario.gateway.run();
    scenario.sent.extend(sent.clone());
    (sent, scenario.gateway.captured())
}

/// In order within each flow. The order across flows is free: a SYN that reopens a connection waits for packets before
/// it on the slow path, but not for those on the fast path, which captured packets don't take.
fn by_flow(mut sent: Vec<(InterfaceId, Vec<u8>)>) -> Vec<(InterfaceId, Vec<u8>)> {
    sent.sort_by_key(|(interface, bytes)| (interface.0, ends(bytes)));
    sent
}

#[derive(Default)]
struct Counts {
    matching: Cell<u32>,
    excluded: Cell<u32>,
    replied: Cell<u32>,
}

fn compare(steps: &[Step], workers: u8, in_group: bool, filter: &CaptureFilter, at_once: usize, counts: &Counts) {
    let filters = [CaptureFilter::default(), filter.clone()];
    let mut scenarios = filters.map(|filter| {
        let mut scenario = Scenario::new(workers, in_group);
        scenario.gateway.capture(&filter, 2048, u32::MAX);
        scenario
    });
    for steps in steps.chunks(at_once) {
        let packets = scenarios
            .each_mut()
            .map(|scenario| steps.iter().filter_map(|step| scenario.packet(step)).collect::<Vec<_>>());
        assert_eq!(packets[0], packets[1]);
        let [(sent, all), (sent_filtered, some)] =
            [0, 1].map(|which| run_packets(&mut scenarios[which], &packets[which]));
        assert_eq!(by_flow(sent), by_flow(sent_filtered), "a capture doesn't change what is sent");
        let (wanted, rest): (Vec<_>, Vec<_>) = all.iter().partition(|it| matches(filter, it));
        assert_eq!(format!("{wanted:02x?}"), format!("{some:02x?}"), "{filter:?}");
        let replied = wanted.iter().filter(|it| matches!(it.verdict, Verdict::Reply(_))).count();
        for (count, more) in
            [(&counts.matching, wanted.len()), (&counts.excluded, rest.len()), (&counts.replied, replied)]
        {
            count.set(count.get() + more as u32);
        }
    }
}

#[test]
fn a_filtered_capture_is_the_matching_subset_of_a_full_capture() {
    let seeds = FileFailurePersistence::Direct("tests/engine/captures.regressions");
    let config = Config { cases: 1000, failure_persistence: Some(Box::new(seeds)), ..Config::default() };
    let counts = Counts::default();
    let outcome = TestRunner::new(config).run(
        &(steps(), filters(), 1..6_usize),
        |((steps, workers, in_group), filter, at_once)| {
            compare(&steps, workers, in_group, &filter, at_once, &counts);
            Ok(())
        },
    );
    if let Err(error) = outcome {
        panic!("{error}");
    }
    let [matching, excluded, replied] = [counts.matching, counts.excluded, counts.replied].map(Cell::into_inner);
    assert!(matching > 1000 && excluded > 1000 && replied > 100, "{matching}, {excluded}, {replied}");
}
