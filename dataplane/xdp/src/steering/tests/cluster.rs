//! Cluster prefixes: capture of uncovered pods' traffic, and destinations in the cluster.

use std::collections::BTreeSet;

use super::*;

const ADDRESSES: [[&str; 4]; 2] = [
    // An uncovered pod, a local address of the gateway, a Service's cluster IP, and a remote address.
    ["10.244.1.7", "10.244.1.1", "10.96.0.10", "198.51.100.9"],
    ["fd00:244:1::7", "fd00:244:1::1", "fd00:96::10", "2001:db8:51::9"],
];

fn nets(texts: &[&str]) -> BTreeSet<IpNet> {
    texts.iter().map(|text| text.parse().expect("a net")).collect()
}

fn cluster(drop_uncovered: bool) -> SteeringTables {
    let pods = nets(&["10.244.0.0/16", "fd00:244::/32"]);
    let inside = &pods | &nets(&["10.96.0.0/12", "fd00:96::/108", "10.244.1.0/24", "fd00:244:1::/64"]);
    let locals = ADDRESSES.map(|[_, local, ..]| ip(local)).into();
    SteeringTables {
        pod_cidrs: if drop_uncovered { pods } else { nets(&[]) },
        cluster_cidrs: inside,
        local_addresses: locals,
        ..Default::default()
    }
}

/// The verdict for a packet of an uncovered pod to outside of the cluster, in both families.
fn uncovered_verdict(steering: &mut Steering) -> Verdict {
    let [v4, v6] = ADDRESSES.map(|[pod, .., remote]| verdict(steering, &packet(ip(pod), ip(remote))));
    assert_eq!(v4, v6);
    v4
}

#[test]
fn packets_of_uncovered_pods_to_outside_are_captured_on_inside_interfaces() {
    for [pod, local, service, remote] in ADDRESSES {
        let group = if remote.contains('.') { "224.0.0.5" } else { "ff02::5" };
        let other_pod = pod.replace('7', "8");
        let mut steering = loaded(&cluster(true));
        for (source, destination, expected) in [
            (pod, remote, Socket),
            (pod, service, Kernel),
            (pod, other_pod.as_str(), Kernel),
            (pod, local, Kernel),
            (pod, group, Kernel),
            (service, remote, Kernel),
            (remote, pod, Kernel),
            (remote, service, Kernel),
        ] {
            let frame = packet(ip(source), ip(destination));
            assert_eq!(verdict(&mut steering, &frame), expected, "{source} to {destination}");
        }
        // Not on outside interfaces.
        steering.add_interface(LOOPBACK, InterfaceId(0), false).expect("an interface ID");
        assert_eq!(uncovered_verdict(&mut steering), Kernel);
    }
}

/// A recreated device whose ifindex isn't in the map yet: whether it is inside is unknown.
#[test]
fn packets_of_uncovered_pods_to_outside_are_captured_on_unknown_interfaces() {
    for is_inside in [true, false] {
        let mut steering = loaded(&cluster(true));
        steering.add_interface(LOOPBACK + 1, InterfaceId(0), is_inside).expect("an interface ID");
        assert_eq!(uncovered_verdict(&mut steering), Socket);
        for [pod, local, service, remote] in ADDRESSES {
            for (source, destination) in [(pod, local), (pod, service), (remote, service)] {
                assert_eq!(verdict(&mut steering, &packet(ip(source), ip(destination))), Kernel, "{destination}");
            }
        }
    }
}

#[test]
fn new_sessions_of_an_uncovered_backend_are_captured() {
    for (mut tables, expected) in [(cluster(true), Socket), (cluster(false), Kernel)] {
        tables.listeners = [(ip("10.244.1.7"), 8080, 6), (ip("fd00:244:1::7"), 8080, 6)].into();
        let mut steering = loaded(&tables);
        for [pod, .., remote] in ADDRESSES {
            assert_eq!(verdict(&mut steering, &from_port(pod, remote, 6, 8080)), Socket, "a reply");
            assert_eq!(verdict(&mut steering, &from_port(pod, remote, 6, 40_000)), expected, "a new session");
        }
    }
}

#[test]
fn pod_prefixes_can_be_added_and_removed() {
    let mut steering = loaded(&cluster(false));
    assert_eq!(uncovered_verdict(&mut steering), Kernel);
    let pods = || SteeringTables { pod_cidrs: cluster(true).pod_cidrs, ..Default::default() };
    steering.extend(&only_added(pods())).expect("additions");
    assert_eq!(uncovered_verdict(&mut steering), Socket, "including a longer cluster prefix within a pod prefix");
    steering.reduce(&only_removed(pods())).expect("removals");
    assert_eq!(uncovered_verdict(&mut steering), Kernel);
    for (drop_uncovered, expected) in [(true, Socket), (true, Socket), (false, Kernel)] {
        steering.apply(&cluster(drop_uncovered)).expect("tables");
        assert_eq!(uncovered_verdict(&mut steering), expected);
    }
    // A closed program captures traffic within the cluster, too.
    for [pod, _, service, _] in ADDRESSES {
        steering.set_closed(true).expect("the flags");
        assert_eq!(verdict(&mut steering, &packet(ip(pod), ip(service))), Socket);
        steering.set_closed(false).expect("the flags");
        assert_eq!(verdict(&mut steering, &packet(ip(pod), ip(service))), Kernel);
    }
    steering.apply(&cluster(true)).expect("tables");
    steering.set_closed(false).expect("the flags");
    assert_eq!(uncovered_verdict(&mut steering), Socket, "opening the program keeps the other flag");
    steering.apply(&SteeringTables::default()).expect("tables");
    assert_eq!(uncovered_verdict(&mut steering), Kernel);
}

#[test]
fn destinations_in_the_cluster_are_translated_only_by_prefixes_of_the_same_length_or_longer() {
    for ([_, _, service, _], endpoint, policy_cidrs) in [
        (ADDRESSES[0], "10.244.1.5", ["0.0.0.0/0", "10.96.0.0/11", "10.96.0.0/12", "10.96.0.0/16"]),
        (ADDRESSES[1], "fd00:244:1::5", ["::/0", "fd00:96::/107", "fd00:96::/108", "fd00:96::/112"]),
    ] {
        for (at, net) in policy_cidrs.iter().enumerate() {
            let cidrs = [((7, net.parse().expect("a net")), true)].into();
            let mut tables = SteeringTables { policy_cidrs: cidrs, ..cluster(true) };
            add_address(&mut tables, ip(endpoint), ENDPOINT);
            let mut steering = loaded(&tables);
            let reply = packet(ip(service), ip(endpoint));
            let expected = if at < 2 { Socket } else { Kernel };
            assert_eq!(verdict(&mut steering, &reply), expected, "{net} in {tables:?}");
            assert_eq!(verdict(&mut steering, &packet(ip(endpoint), ip(service))), Socket, "its worker decides");
        }
    }
}

/// Prints the run time of the program: `cargo test .. measure_run_time -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn measure_run_time() {
    let at = |n: u32| IpAddr::from((0x0af4_0000 + n).to_be_bytes());
    let covered = (0..50_000).map(|n| (at(n), n % 100)).collect();
    let wide = "0.0.0.0/0".parse().expect("a net");
    let base = SteeringTables {
        endpoints: covered,
        vips: [ip("203.0.113.1")].into(),
        policy_cidrs: (0..100).map(|n| ((n, wide), true)).collect(),
        ..Default::default()
    };
    for (name, prefixes) in [("no cluster prefixes", SteeringTables::default()), ("pod prefixes", cluster(true))] {
        let mut steering = loaded(&SteeringTables {
            pod_cidrs: prefixes.pod_cidrs,
            cluster_cidrs: prefixes.cluster_cidrs,
            ..base.clone()
        });
        for (case, frame) in [
            ("a reply", packet(ip("198.51.100.9"), ip("203.0.113.1"))),
            ("from a covered pod", packet(at(77), ip("198.51.100.9"))),
            ("not captured", packet(ip("192.0.2.77"), ip("198.51.100.9"))),
            ("from an uncovered pod", packet(at(60_000), ip("198.51.100.9"))),
            ("from an uncovered pod within the cluster", packet(at(60_000), at(60_001))),
        ] {
            let program = steering.program_mut().expect("a loaded program");
            let mut runs: Vec<u128> = (0..9)
                .map(|_| {
                    let options = TestRunOptions { data_in: Some(&frame), repeat: 1_000_000, ..Default::default() };
                    program.test_run(options).expect("a run").duration.as_nanos()
                })
                .collect();
            runs.sort_unstable();
            println!("{name}, {case}: {} ns", runs[runs.len() / 2]);
        }
    }
}
