//! The cluster's own addresses: what goes there stays as it is, and from a pod that no policy covers nothing goes anywhere else.

use std::net::SocketAddr;

use crossbeam::channel::bounded;
use vipgate_dataplane::command::{Command, DropChunk};
use vipgate_dataplane::counters::DropReason;
use vipgate_dataplane::snapshot::spec::*;
use vipgate_dataplane::time::Tick;
use vipgate_dataplane::watch::drops::MOST;

use crate::support::services::*;
use crate::support::*;

/// A pod that no policy covers, in each family, and the far side.
const UNCOVERED_AND_FAR: [(&str, &str); 2] =
    [("10.244.1.7:4000", "198.51.100.10:443"), ("[fd00:244:1::7]:4000", "[2001:db8:51::10]:443")];

fn cluster(drop_uncovered: bool) -> ClusterSpec {
    let nets = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
    ClusterSpec {
        pods: nets(&["10.244.0.0/16", "fd00:244::/32"]),
        others: nets(&["10.96.0.0/12", "2001:db8:96::/108"]),
        drop_uncovered,
    }
}

fn gateway(cluster: ClusterSpec) -> Gateway {
    Gateway::with(&Setup::default(), network(), &PolicySet { cluster, ..policy() })
}

/// A packet arrives inside; what leaves, and how it was counted.
fn inside(gateway: &mut Gateway, packet: &[u8]) -> Vec<(SocketAddr, SocketAddr)> {
    gateway.arrives(0, INSIDE, packet).iter().map(|(_, bytes)| ends(bytes)).collect()
}

#[test]
fn nothing_of_an_uncovered_pod_leaves_and_drops_say_whose_it_was() {
    for (pod, far) in UNCOVERED_AND_FAR {
        for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Echo] {
            let mut gateway = gateway(cluster(true));
            assert_eq!(inside(&mut gateway, &packet(protocol, at(pod), at(far))), []);
            assert_eq!(gateway.drops(), [(DropReason::NoPolicy, 1)].into());
            let (reply, answer) = bounded(1);
            let chunk = DropChunk { now: Tick(0), last: Default::default(), records: Vec::with_capacity(MOST) };
            gateway.commands[0].send(Command::Drops { chunk: Box::new(chunk), reply }).unwrap();
            gateway.turn();
            let by: Vec<_> = answer.recv().unwrap().records.iter().map(|it| (it.reason, it.address)).collect();
            assert_eq!(by, [(DropReason::NoPolicy, at(pod).ip())]);
            gateway.assert_delta("drop no_policy 1");
        }
    }
}

#[test]
fn an_uncovered_pods_packet_goes_on_where_that_is_wanted() {
    for (pod, far) in UNCOVERED_AND_FAR {
        let mut gateway = gateway(cluster(false));
        assert_eq!(inside(&mut gateway, &packet(Protocol::Udp, at(pod), at(far))), [(at(pod), at(far))]);
        gateway.assert_delta("unchanged 1");
    }
}

#[test]
fn what_stays_inside_the_cluster_is_not_translated() {
    for (from, to) in [
        ("10.244.1.5:4000", "10.244.1.7:53"),
        ("10.244.1.5:4000", "10.96.0.10:53"),
        ("[fd00:244:1::5]:4000", "[fd00:244:2::9]:53"),
        ("[fd00:244:1::5]:4000", "[2001:db8:96::10]:53"),
        // Who isn't covered goes there, too.
        ("10.244.1.7:4000", "10.244.1.5:53"),
        ("10.244.1.7:4000", "10.96.0.10:53"),
    ] {
        let mut gateway = gateway(cluster(true));
        assert_eq!(inside(&mut gateway, &packet(Protocol::Udp, at(from), at(to))), [(at(from), at(to))]);
        gateway.assert_delta("unchanged 1");
        // And its answer comes back so, from wherever that is.
        if at(from).ip() != ip("10.244.1.7") {
            let side = if to.contains("244:") || to.contains("244.") { INSIDE } else { OUTSIDE };
            let sent = gateway.arrives(0, side, &packet(Protocol::Udp, at(to), at(from)));
            let sent: Vec<_> = sent.iter().map(|(out, bytes)| (*out, ends(bytes))).collect();
            assert_eq!(sent, [(INSIDE, (at(to), at(from)))], "{to} to {from}: {:?}", gateway.drops());
            gateway.assert_delta("unchanged 1");
        }
    }
}

#[test]
fn a_destination_that_a_policy_names_as_closely_is_translated() {
    for (named, excluded, is_translated) in [
        ("10.96.0.0/12", None, true),
        ("10.96.0.0/16", None, true),
        ("10.96.0.0/11", None, false),
        ("10.96.0.0/16", Some("10.96.0.0/16"), false),
        ("10.96.0.0/16", Some("10.96.0.0/12"), true),
    ] {
        let mut set = PolicySet { cluster: cluster(true), ..policy() };
        set.policies[0].destinations.push(named.parse().unwrap());
        set.policies[0].excluded = excluded.iter().map(|net| net.parse().unwrap()).collect();
        let mut gateway = Gateway::with(&Setup::default(), network(), &set);
        let (pod, service) = (at("10.244.1.5:4000"), at("10.96.0.10:53"));
        let sent = inside(&mut gateway, &packet(Protocol::Udp, pod, service));
        assert_eq!(sent.len(), 1);
        let as_whom = if is_translated { ip("192.0.2.10") } else { pod.ip() };
        assert_eq!((sent[0].0.ip(), sent[0].1), (as_whom, service), "{named}, without {excluded:?}");
        gateway.assert_delta(if is_translated { "egress 1, created 1" } else { "unchanged 1" });
    }
}

#[test]
fn a_vip_is_a_vip_wherever_it_lies() {
    let vips = ClusterSpec { others: vec!["192.0.2.0/24".parse().unwrap()], ..cluster(true) };
    let serving = |cluster| {
        let set = PolicySet { cluster, ..with_services(&[service(&both_pods())]) };
        Gateway::with(&Setup::default(), network(), &set)
    };
    let mut outcomes = vec![];
    for mut gateway in [serving(ClusterSpec::default()), serving(vips.clone())] {
        // A pod by way of a Service's VIP, and a client from outside.
        let pod = inside(&mut gateway, &packet(Protocol::Udp, at("10.244.1.21:4000"), vip(53)));
        assert_eq!(pod[0].0.ip(), ip("192.0.2.11"), "as its own VIP");
        let backend = gateway.client_sends(&packet(Protocol::Udp, client(4000), vip(53)));
        outcomes.push((pod[0].1, backend, gateway.sessions()));
        gateway.assert_delta("egress 1, inbound 2, created 3");
    }
    assert_eq!(outcomes[0], outcomes[1]);
    // Whoever isn't covered reaches it as a client.
    let mut gateway = serving(vips);
    let pod = inside(&mut gateway, &packet(Protocol::Udp, at("10.244.1.7:4000"), vip(53)));
    assert_eq!((pod.len(), pod[0].0), (1, at("10.244.1.7:4000")));
    gateway.assert_delta("inbound 1, created 1");
}

#[test]
fn an_uncovered_backend_answers_its_clients_and_begins_nothing() {
    let backend_at = "10.244.1.7";
    for (wanted, own) in [(ClusterSpec::default(), 1), (cluster(true), 0), (cluster(false), 1)] {
        let set = PolicySet { cluster: wanted, ..with_services(&[service(&[backend(backend_at)])]) };
        let mut gateway = Gateway::with(&Setup::default(), network(), &set);
        let backend = gateway.client_sends(&packet(Protocol::Tcp, client(4000), vip(80)));
        assert_eq!(backend, at("10.244.1.7:8080"));
        let answer = tcp(backend, client(4000), "SA", 5000, 1001);
        assert_eq!(gateway.backend_sends(0, &answer), (vip(80), client(4000)));
        // Without a session, too.
        let answer = tcp(backend, client(4001), "A", 5000, 1001);
        assert_eq!(gateway.backend_sends(0, &answer), (vip(80), client(4001)));
        let begun = packet(Protocol::Udp, at("10.244.1.7:40000"), at("198.51.100.10:53"));
        assert_eq!(inside(&mut gateway, &begun).len(), own);
        gateway.assert_delta(if own == 0 {
            "inbound 1, service_reply 2, drop no_policy 1, created 1"
        } else {
            "inbound 1, service_reply 2, unchanged 1, created 1"
        });
    }
}

#[test]
fn a_pod_that_policy_covers_no_more_is_silent_and_its_sessions_end() {
    for (pod, far) in POD_AND_FAR {
        let mut set = PolicySet { cluster: cluster(true), ..policy() };
        let mut gateway = Gateway::with(&Setup::default(), network(), &set);
        let question = packet(Protocol::Udp, at(pod), at(far));
        gateway.pod_sends(&question);
        set.endpoints.retain(|endpoint| endpoint.address != at(pod).ip());
        gateway.set_policy(&set);
        for _ in 0..2 {
            assert_eq!(inside(&mut gateway, &question), []);
        }
        gateway.assert_delta("egress 1, drop no_policy 2, ended policy 1, created 1");
    }
}

#[test]
fn sessions_to_what_is_known_to_be_inside_end_with_the_change_that_says_so() {
    let mut gateway = gateway(ClusterSpec::default());
    let (pod, service) = (at("10.244.1.5:4000"), at("10.96.0.10:53"));
    let question = packet(Protocol::Udp, pod, service);
    assert_eq!(inside(&mut gateway, &question)[0].0.ip(), ip("192.0.2.10"), "nothing is known to be inside");
    gateway.set_policy(&PolicySet { cluster: cluster(true), ..policy() });
    assert_eq!(inside(&mut gateway, &question), [(pod, service)]);
    assert_eq!(gateway.sessions(), 0);
    gateway.set_policy(&policy());
    assert_eq!(inside(&mut gateway, &question)[0].0.ip(), ip("192.0.2.10"));
    gateway.assert_delta("egress 2, unchanged 1, ended policy 1, created 2");
}
