//! ICMP errors of routers inside: captured by the addresses that they quote, if their receiver must not see these.

use super::*;

/// A pod, another pod, a remote, a destination that policy excludes, and a router inside, in both families.
const ADDRESSES: [[&str; 5]; 2] = [
    ["10.244.1.5", "10.244.1.6", "198.51.100.9", "203.0.113.9", "10.99.0.1"],
    ["fd00:244:1::5", "fd00:244:1::6", "2001:db8:51::9", "2001:db8:113::9", "fd00:99::1"],
];

fn nets(texts: &[&str]) -> std::collections::BTreeSet<IpNet> {
    texts.iter().map(|text| text.parse().expect("a net")).collect()
}

/// Both pods are endpoints of policy 7, which translates all but the excluded destination.
fn tables() -> SteeringTables {
    let mut tables = SteeringTables::default();
    for [pod, other, _, excluded, _] in ADDRESSES {
        add_address(&mut tables, ip(pod), ENDPOINT);
        add_address(&mut tables, ip(other), ENDPOINT);
        let excluded: IpNet = ip(excluded).into();
        tables.policy_cidrs.insert((7, excluded), false);
    }
    for wide in nets(&["0.0.0.0/0", "::/0"]) {
        tables.policy_cidrs.insert((7, wide), true);
    }
    tables
}

/// An ICMP error that quotes a datagram between these addresses.
fn error(kind: u8, [source, destination]: [&str; 2], quoted: [&str; 2]) -> Vec<u8> {
    let mut frame = packet(ip(source), ip(destination));
    let (protocol_at, number, message) = if frame[12] == 8 { (23, 1, 34) } else { (20, 58, 54) };
    (frame[protocol_at], frame[message]) = (number, kind);
    frame.extend(&packet(ip(quoted[0]), ip(quoted[1]))[14..]);
    frame
}

/// Time exceeded.
fn exceeded(ends: [&str; 2], quoted: [&str; 2]) -> Vec<u8> {
    error(if ends[0].contains('.') { 11 } else { 3 }, ends, quoted)
}

#[test]
fn errors_from_inside_that_quote_a_hidden_address_are_captured() {
    let mut steering = loaded(&tables());
    for [pod, other, remote, excluded, router] in ADDRESSES {
        for (ends, quoted, expected) in [
            ([router, remote], [remote, pod], Socket),
            ([router, excluded], [excluded, pod], Kernel),
            ([router, remote], [remote, router], Kernel),
            // Not its own packet.
            ([router, remote], [pod, remote], Socket),
            ([router, remote], [pod, excluded], Socket),
            // To the pod itself, and about what it has sent to another one.
            ([router, pod], [pod, remote], Kernel),
            ([router, pod], [pod, other], Socket),
        ] {
            let frame = exceeded(ends, quoted);
            assert_eq!(verdict(&mut steering, &frame), expected, "{ends:?} about {quoted:?}");
        }
        // Not on outside interfaces.
        steering.add_interface(LOOPBACK, InterfaceId(0), false).expect("an interface ID");
        assert_eq!(verdict(&mut steering, &exceeded([router, remote], [remote, pod])), Kernel);
        steering.add_interface(LOOPBACK, InterfaceId(0), true).expect("an interface ID");
    }
}

#[test]
fn every_type_of_error_is_captured_and_no_query() {
    let mut steering = loaded(&tables());
    for ([pod, _, remote, _, router], is_v4) in ADDRESSES.into_iter().zip([true, false]) {
        for kind in 0..=u8::MAX {
            let is_error = if is_v4 { [3, 4, 5, 11, 12].contains(&kind) } else { kind < 128 };
            let frame = error(kind, [router, remote], [remote, pod]);
            let expected = if is_error { Socket } else { Kernel };
            assert_eq!(verdict(&mut steering, &frame), expected, "type {kind}");
        }
    }
}

#[test]
fn the_quote_is_found_behind_options_and_short_extension_headers() {
    let mut steering = loaded(&tables());
    let [pod, _, remote, _, router] = ADDRESSES[0];
    for words in 1..=10 {
        let mut frame = exceeded([router, remote], [remote, pod]);
        frame[14] = 0x45 + words;
        frame.splice(34..34, vec![1; usize::from(words) * 4]);
        assert_eq!(verdict(&mut steering, &frame), Socket, "{words} words of options");
    }
    let mut first_fragment = exceeded([router, remote], [remote, pod]);
    first_fragment[20] = 0x20;
    let mut later_fragment = exceeded([router, remote], [remote, pod]);
    later_fragment[21] = 1;
    assert_eq!(verdict(&mut steering, &first_fragment), Socket, "userspace drops it");
    assert_eq!(verdict(&mut steering, &later_fragment), Kernel);
    let [pod, _, remote, _, router] = ADDRESSES[1];
    for numbers in [&[0][..], &[43], &[44], &[60], &[0, 60], &[60, 44], &[0, 0]] {
        let mut frame = exceeded([router, remote], [remote, pod]);
        for number in numbers.iter().rev() {
            let next = std::mem::replace(&mut frame[20], *number);
            frame.splice(54..54, [next, 0, 0, 1, 0, 0, 0, 0]);
        }
        assert_eq!(verdict(&mut steering, &frame), Socket, "behind {numbers:?}");
    }
}

#[test]
fn an_error_without_a_whole_quoted_header_is_captured() {
    let mut steering = loaded(&tables());
    for ([pod, _, remote, _, router], header) in ADDRESSES.into_iter().zip([20, 40]) {
        let frame = exceeded([router, remote], [remote, pod]);
        for length in 14 + header + 1..frame.len() {
            assert_eq!(verdict(&mut steering, &frame[..length]), Socket, "{length} bytes");
        }
        assert_eq!(verdict(&mut steering, &frame[..14 + header]), Kernel, "no type");
    }
    // Of the other family.
    for ([.., router], [pod, _, remote, ..]) in ADDRESSES.into_iter().zip([ADDRESSES[1], ADDRESSES[0]]) {
        let receiver = if router.contains('.') { ADDRESSES[0][2] } else { ADDRESSES[1][2] };
        assert_eq!(verdict(&mut steering, &exceeded([router, receiver], [remote, pod])), Socket, "{router}");
    }
}

#[test]
fn errors_that_quote_backends_and_uncovered_pods_are_captured() {
    for [pod, _, remote, _, router] in ADDRESSES {
        let internal = if pod.contains('.') { "10.96.0.10" } else { "fd00:96::10" };
        let pods = nets(&["10.244.0.0/16", "fd00:244::/32"]);
        let cluster = &pods | &nets(&["10.96.0.0/12", "fd00:96::/108"]);
        let (about_remote, about_internal) =
            (exceeded([router, remote], [remote, pod]), exceeded([router, internal], [internal, pod]));
        let uncovered = SteeringTables { pod_cidrs: pods, cluster_cidrs: cluster, ..Default::default() };
        let backend = SteeringTables { listeners: [(ip(pod), 8080, 6)].into(), ..Default::default() };
        for (tables, expected) in
            [(SteeringTables::default(), [Kernel, Kernel]), (uncovered, [Socket, Kernel]), (backend, [Socket, Socket])]
        {
            let mut steering = loaded(&tables);
            let actual = [&about_remote, &about_internal].map(|frame| verdict(&mut steering, frame));
            assert_eq!(actual, expected, "{tables:?}");
        }
    }
}
