//! The cluster's own addresses: what is captured of pods that nothing covers, and what of policies' destinations stays inside.

use super::*;

const OWN: [[&str; 4]; 2] = [
    // A pod that nothing covers, the gateway's own address, a Service's in the cluster, and somebody outside.
    ["10.244.1.7", "10.244.1.1", "10.96.0.10", "198.51.100.9"],
    ["fd00:244:1::7", "fd00:244:1::1", "fd00:96::10", "2001:db8:51::9"],
];

fn nets(texts: &[&str]) -> BTreeSet<IpNet> {
    texts.iter().map(|text| text.parse().expect("a net")).collect()
}

fn cluster(drops: bool) -> SteeringTables {
    let pods = nets(&["10.244.0.0/16", "fd00:244::/32"]);
    let inside = &pods | &nets(&["10.96.0.0/12", "fd00:96::/108", "10.244.1.0/24", "fd00:244:1::/64"]);
    let locals = OWN.map(|[_, own, ..]| ip(own)).into();
    SteeringTables { pods: if drops { pods } else { nets(&[]) }, inside, locals, ..Default::default() }
}

/// What becomes of a packet from a pod that nothing covers to the outside, in both families.
fn leaves(steering: &mut Steering) -> Verdict {
    let [v4, v6] = OWN.map(|[pod, .., far]| verdict(steering, &packet(ip(pod), ip(far))));
    assert_eq!(v4, v6);
    v4
}

#[test]
fn what_comes_from_a_pod_that_nothing_covers_stays_inside() {
    for [pod, own, service, far] in OWN {
        let group = if far.contains('.') { "224.0.0.5" } else { "ff02::5" };
        let other = pod.replace('7', "8");
        let mut steering = loaded(cluster(true));
        for (from, to, expected) in [
            (pod, far, Socket),
            (pod, service, Kernel),
            (pod, other.as_str(), Kernel),
            (pod, own, Kernel),
            (pod, group, Kernel),
            (service, far, Kernel),
            (far, pod, Kernel),
            (far, service, Kernel),
        ] {
            assert_eq!(verdict(&mut steering, &packet(ip(from), ip(to))), expected, "{from} to {to}");
        }
        // Outside, nobody is a pod.
        steering.add_interface(LOOPBACK, InterfaceId(0), false).expect("an interface's number");
        assert_eq!(leaves(&mut steering), Kernel);
    }
}

#[test]
fn a_backend_that_nothing_covers_begins_nothing() {
    for (mut tables, own) in [(cluster(true), Socket), (cluster(false), Kernel)] {
        tables.listeners = [(ip("10.244.1.7"), 8080, 6), (ip("fd00:244:1::7"), 8080, 6)].into();
        let mut steering = loaded(tables);
        for [pod, .., far] in OWN {
            assert_eq!(verdict(&mut steering, &from_port(pod, far, 6, 8080)), Socket, "an answer");
            assert_eq!(verdict(&mut steering, &from_port(pod, far, 6, 40_000)), own, "its own");
        }
    }
}

#[test]
fn pods_are_captured_and_let_go_by_what_changes() {
    let mut steering = loaded(cluster(false));
    assert_eq!(leaves(&mut steering), Kernel);
    let pods = || SteeringTables { pods: cluster(true).pods, ..Default::default() };
    steering.extend(pods()).expect("more");
    assert_eq!(leaves(&mut steering), Socket, "also where a longer prefix that isn't only pods' lies in theirs");
    steering.reduce(pods()).expect("less");
    assert_eq!(leaves(&mut steering), Kernel);
    for (drops, expected) in [(true, Socket), (true, Socket), (false, Kernel)] {
        steering.apply(cluster(drops)).expect("tables");
        assert_eq!(leaves(&mut steering), expected);
    }
    // Whoever doesn't know the policy is closed, whatever is known of the cluster.
    for [pod, _, service, _] in OWN {
        steering.close(true).expect("the switch");
        assert_eq!(verdict(&mut steering, &packet(ip(pod), ip(service))), Socket);
        steering.close(false).expect("the switch");
        assert_eq!(verdict(&mut steering, &packet(ip(pod), ip(service))), Kernel);
    }
    steering.apply(cluster(true)).expect("tables");
    steering.close(false).expect("the switch");
    assert_eq!(leaves(&mut steering), Socket, "the switch is no reason to forget it");
    steering.apply(SteeringTables::default()).expect("tables");
    assert_eq!(leaves(&mut steering), Kernel);
}

#[test]
fn an_endpoint_hears_from_the_cluster_unchanged_unless_its_policy_says_otherwise_as_closely() {
    for ([_, _, service, _], endpoint, named) in [
        (OWN[0], "10.244.1.5", ["0.0.0.0/0", "10.96.0.0/11", "10.96.0.0/12", "10.96.0.0/16"]),
        (OWN[1], "fd00:244:1::5", ["::/0", "fd00:96::/107", "fd00:96::/108", "fd00:96::/112"]),
    ] {
        for (at, net) in named.iter().enumerate() {
            let cidrs = [((7, net.parse().expect("a net")), true)].into();
            let mut tables = SteeringTables { cidrs, ..cluster(true) };
            describe(&mut tables, ip(endpoint), ENDPOINT);
            let mut steering = loaded(tables.clone());
            let answer = packet(ip(service), ip(endpoint));
            let expected = if at < 2 { Socket } else { Kernel };
            assert_eq!(verdict(&mut steering, &answer), expected, "{net} in {tables:?}");
            assert_eq!(verdict(&mut steering, &packet(ip(endpoint), ip(service))), Socket, "its worker says how");
        }
    }
}

/// Prints what the program takes: `cargo test .. how_long -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn how_long_a_packet_takes() {
    let at = |n: u32| IpAddr::from((0x0af4_0000 + n).to_be_bytes());
    let covered = (0..50_000).map(|n| (at(n), n % 100)).collect();
    let wide = "0.0.0.0/0".parse().expect("a net");
    let base = SteeringTables {
        endpoints: covered,
        vips: [ip("203.0.113.1")].into(),
        cidrs: (0..100).map(|n| ((n, wide), true)).collect(),
        ..Default::default()
    };
    for (name, ranges) in [("nothing known", SteeringTables::default()), ("pods known", cluster(true))] {
        let mut steering = loaded(SteeringTables { pods: ranges.pods, inside: ranges.inside, ..base.clone() });
        for (what, frame) in [
            ("a reply", packet(ip("198.51.100.9"), ip("203.0.113.1"))),
            ("a pod's", packet(at(77), ip("198.51.100.9"))),
            ("the kernel's", packet(ip("192.0.2.77"), ip("198.51.100.9"))),
            ("an uncovered pod's", packet(at(60_000), ip("198.51.100.9"))),
            ("an uncovered pod's, inside", packet(at(60_000), at(60_001))),
        ] {
            let program = steering.program_mut().expect("a loaded program");
            let mut runs: Vec<u128> = (0..9)
                .map(|_| {
                    let options = TestRunOptions { data_in: Some(&frame), repeat: 1_000_000, ..Default::default() };
                    program.test_run(options).expect("a run").duration.as_nanos()
                })
                .collect();
            runs.sort_unstable();
            println!("{name}, {what}: {} ns", runs[runs.len() / 2]);
        }
    }
}
