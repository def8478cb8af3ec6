//! Cluster-internal destinations and uncovered pods: packets to cluster addresses are not translated, and an uncovered
//! pod reaches nothing else.

use std::net::SocketAddr;

use crossbeam::channel::bounded;
use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::flow::time::Tick;
use vipgate_dataplane::observe::drops::MAX_RECORDS;
use vipgate_dataplane::policy::spec::*;
use vipgate_dataplane::worker::command::{Command, DropChunk};
use vipgate_testkit::services::*;
use vipgate_testkit::*;

/// A pod that no policy covers, and a remote, in each address family.
const UNCOVERED_AND_REMOTE: [(&str, &str); 2] =
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

/// Receives a packet inside; returns source and destination of the packets sent.
fn receive_inside(gateway: &mut Gateway, packet: &[u8]) -> Vec<(SocketAddr, SocketAddr)> {
    gateway.receive(0, INSIDE, packet).iter().map(|(_, bytes)| ends(bytes)).collect()
}

#[test]
fn uncovered_pods_are_dropped_and_attributed() {
    for (pod, remote) in UNCOVERED_AND_REMOTE {
        for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Echo] {
            let mut gateway = gateway(cluster(true));
            assert_eq!(receive_inside(&mut gateway, &packet(protocol, at(pod), at(remote))), []);
            assert_eq!(gateway.drops(), [(DropReason::NoPolicy, 1)].into());
            let (reply, response) = bounded(1);
            let chunk = DropChunk { now: Tick(0), last: Default::default(), records: Vec::with_capacity(MAX_RECORDS) };
            gateway.commands[0].send(Command::Drops { chunk: Box::new(chunk), reply }).unwrap();
            gateway.turn();
            let attribution: Vec<_> =
                response.recv().unwrap().records.iter().map(|it| (it.reason, it.address)).collect();
            assert_eq!(attribution, [(DropReason::NoPolicy, at(pod).ip())]);
            gateway.assert_delta("drop no_policy 1");
        }
    }
}

#[test]
fn uncovered_pods_are_forwarded_unchanged_if_configured() {
    for (pod, remote) in UNCOVERED_AND_REMOTE {
        let mut gateway = gateway(cluster(false));
        assert_eq!(receive_inside(&mut gateway, &packet(Protocol::Udp, at(pod), at(remote))), [(at(pod), at(remote))]);
        gateway.assert_delta("unchanged 1");
    }
}

#[test]
fn cluster_internal_packets_are_not_translated() {
    for (from, to) in [
        ("10.244.1.5:4000", "10.244.1.7:53"),
        ("10.244.1.5:4000", "10.96.0.10:53"),
        ("[fd00:244:1::5]:4000", "[fd00:244:2::9]:53"),
        ("[fd00:244:1::5]:4000", "[2001:db8:96::10]:53"),
        // Also from uncovered pods.
        ("10.244.1.7:4000", "10.244.1.5:53"),
        ("10.244.1.7:4000", "10.96.0.10:53"),
    ] {
        let mut gateway = gateway(cluster(true));
        assert_eq!(receive_inside(&mut gateway, &packet(Protocol::Udp, at(from), at(to))), [(at(from), at(to))]);
        gateway.assert_delta("unchanged 1");
        // The reply is not translated either, from whichever side.
        if at(from).ip() != ip("10.244.1.7") {
            let side = if to.contains("244:") || to.contains("244.") { INSIDE } else { OUTSIDE };
            let sent = gateway.receive(0, side, &packet(Protocol::Udp, at(to), at(from)));
            let sent: Vec<_> = sent.iter().map(|(out, bytes)| (*out, ends(bytes))).collect();
            assert_eq!(sent, [(INSIDE, (at(to), at(from)))], "{to} to {from}: {:?}", gateway.drops());
            gateway.assert_delta("unchanged 1");
        }
    }
}

#[test]
fn an_equally_specific_policy_destination_takes_precedence() {
    for (destination_cidr, excluded, is_translated) in [
        ("10.96.0.0/12", None, true),
        ("10.96.0.0/16", None, true),
        ("10.96.0.0/11", None, false),
        ("10.96.0.0/16", Some("10.96.0.0/16"), false),
        ("10.96.0.0/16", Some("10.96.0.0/12"), true),
    ] {
        let mut set = PolicySet { cluster: cluster(true), ..policy() };
        set.policies[0].destinations.push(destination_cidr.parse().unwrap());
        set.policies[0].excluded = excluded.iter().map(|net| net.parse().unwrap()).collect();
        let mut gateway = Gateway::with(&Setup::default(), network(), &set);
        let (pod, service) = (at("10.244.1.5:4000"), at("10.96.0.10:53"));
        let sent = receive_inside(&mut gateway, &packet(Protocol::Udp, pod, service));
        assert_eq!(sent.len(), 1);
        let translated_source = if is_translated { ip("192.0.2.10") } else { pod.ip() };
        assert_eq!(
            (sent[0].0.ip(), sent[0].1),
            (translated_source, service),
            "{destination_cidr}, without {excluded:?}"
        );
        gateway.assert_delta(if is_translated { "egress 1, created 1" } else { "unchanged 1" });
    }
}

#[test]
fn vips_within_cluster_addresses_are_still_vips() {
    let vips = ClusterSpec { others: vec!["192.0.2.0/24".parse().unwrap()], ..cluster(true) };
    let serving = |cluster| {
        let set = PolicySet { cluster, ..with_services(&[service(&both_pods())]) };
        Gateway::with(&Setup::default(), network(), &set)
    };
    let mut outcomes = vec![];
    for mut gateway in [serving(ClusterSpec::default()), serving(vips.clone())] {
        // A pod via a Service's VIP, and a client from outside.
        let pod = receive_inside(&mut gateway, &packet(Protocol::Udp, at("10.244.1.21:4000"), vip(53)));
        assert_eq!(pod[0].0.ip(), ip("192.0.2.11"), "translated to its own VIP");
        let backend = gateway.client_sends(&packet(Protocol::Udp, client(4000), vip(53)));
        outcomes.push((pod[0].1, backend, gateway.sessions()));
        gateway.assert_delta("egress 1, inbound 2, created 3");
    }
    assert_eq!(outcomes[0], outcomes[1]);
    // An uncovered pod reaches it as a client.
    let mut gateway = serving(vips);
    let pod = receive_inside(&mut gateway, &packet(Protocol::Udp, at("10.244.1.7:4000"), vip(53)));
    assert_eq!((pod.len(), pod[0].0), (1, at("10.244.1.7:4000")));
    gateway.assert_delta("inbound 1, created 1");
}

#[test]
fn an_uncovered_backend_replies_to_clients_and_opens_nothing() {
    let backend_at = "10.244.1.7";
    for (cluster_spec, forwarded) in [(ClusterSpec::default(), 1), (cluster(true), 0), (cluster(false), 1)] {
        let set = PolicySet { cluster: cluster_spec, ..with_services(&[service(&[backend(backend_at)])]) };
        let mut gateway = Gateway::with(&Setup::default(), network(), &set);
        let backend = gateway.client_sends(&packet(Protocol::Tcp, client(4000), vip(80)));
        assert_eq!(backend, at("10.244.1.7:8080"));
        let reply = tcp(backend, client(4000), "SA", 5000, 1001);
        assert_eq!(gateway.backend_sends(0, &reply), (vip(80), client(4000)));
        // Without a session, too.
        let reply = tcp(backend, client(4001), "A", 5000, 1001);
        assert_eq!(gateway.backend_sends(0, &reply), (vip(80), client(4001)));
        let new_flow = packet(Protocol::Udp, at("10.244.1.7:40000"), at("198.51.100.10:53"));
        assert_eq!(receive_inside(&mut gateway, &new_flow).len(), forwarded);
        gateway.assert_delta(if forwarded == 0 {
            "inbound 1, service_reply 2, drop no_policy 1, created 1"
        } else {
            "inbound 1, service_reply 2, unchanged 1, created 1"
        });
    }
}

#[test]
fn removing_a_pods_policy_ends_its_sessions_and_drops_its_packets() {
    for (pod, remote) in POD_AND_REMOTE {
        let mut set = PolicySet { cluster: cluster(true), ..policy() };
        let mut gateway = Gateway::with(&Setup::default(), network(), &set);
        let request = packet(Protocol::Udp, at(pod), at(remote));
        gateway.pod_sends(&request);
        set.endpoints.retain(|endpoint| endpoint.address != at(pod).ip());
        gateway.set_policy(&set);
        for _ in 0..2 {
            assert_eq!(receive_inside(&mut gateway, &request), []);
        }
        gateway.assert_delta("egress 1, drop no_policy 2, ended policy 1, created 1");
    }
}

#[test]
fn sessions_to_new_cluster_addresses_end_with_the_policy_change() {
    let mut gateway = gateway(ClusterSpec::default());
    let (pod, service) = (at("10.244.1.5:4000"), at("10.96.0.10:53"));
    let request = packet(Protocol::Udp, pod, service);
    assert_eq!(
        receive_inside(&mut gateway, &request)[0].0.ip(),
        ip("192.0.2.10"),
        "no cluster addresses are configured"
    );
    gateway.set_policy(&PolicySet { cluster: cluster(true), ..policy() });
    assert_eq!(receive_inside(&mut gateway, &request), [(pod, service)]);
    assert_eq!(gateway.sessions(), 0);
    gateway.set_policy(&policy());
    assert_eq!(receive_inside(&mut gateway, &request)[0].0.ip(), ip("192.0.2.10"));
    gateway.assert_delta("egress 2, unchanged 1, ended policy 1, created 2");
}
