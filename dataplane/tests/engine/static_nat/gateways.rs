//! Gateways of a group: the same VIP has another private address at each of them.

use std::net::{IpAddr, SocketAddr};

use vipgate_dataplane::wire::icmp_error::IcmpError;
use vipgate_testkit::cluster::*;
use vipgate_testkit::services::*;
use vipgate_testkit::*;

use super::{PODS, PRIVATE, REMOTES, with_private};
use crate::icmp::{error_about, quoted};

/// The private addresses at the second gateway.
const OTHERS: [&str; 2] = ["172.31.16.10", "fd31:16::10"];

fn in_cloud(set: PolicySet) -> PolicySet {
    with_private(with_private(set, "gw-0", PRIVATE), "gw-1", OTHERS)
}

/// The same packet to another address.
fn redirected(to: IpAddr, protocol: Protocol, seen: &[u8]) -> Vec<u8> {
    let (source, destination) = ends(seen);
    packet(protocol, destination, SocketAddr::new(to, source.port()))
}

#[test]
fn a_reply_at_a_gateway_with_another_private_address_reaches_the_owner_in_the_tunnel() {
    let mut cluster = Cluster::new(2, &Setup::default());
    cluster.change_policy(|set| *set = in_cloud(set.clone()));
    let request = packet(Protocol::Udp, at(PODS[0]), at(REMOTES[0]));
    let sent = cluster.pod_sends(0, 0, &request);
    assert_eq!(ends(&sent).0.ip(), ip(PRIVATE[0]));
    // The cloud has moved the address to the other gateway.
    let reply = redirected(ip(OTHERS[0]), Protocol::Udp, &sent);
    let received = cluster.remote_sends(1, 0, &reply);
    assert_eq!(ends(&received).1, at(PODS[0]));
    cluster.advance(200);
    cluster.kill(0);
    let again = cluster.pod_sends(1, 1, &request);
    assert_eq!(ends(&again).0, SocketAddr::new(ip(OTHERS[0]), ends(&sent).0.port()), "the session goes on");
    let received = cluster.remote_sends(1, 1, &reply);
    assert_eq!(ends(&received).1, at(PODS[0]));
    cluster.assert_delta(&["egress 1, reply 1, peer_in 1, created 1", "egress 1, reply 1, peer_out 1, failed over 1"]);
}

/// The cloud has moved the address to the other gateway: the error is for that one's private address, and so is the packet quoted in it.
#[test]
fn an_error_at_a_gateway_with_another_private_address_reaches_the_pod() {
    for i in 0..2 {
        let mut cluster = Cluster::new(2, &Setup::default());
        cluster.change_policy(|set| *set = in_cloud(set.clone()));
        let request = packet(Protocol::Udp, at(PODS[i]), at(REMOTES[i]));
        let sent = cluster.pod_sends(0, 0, &request);
        let about = packet(Protocol::Udp, (ip(OTHERS[i]), ends(&sent).0.port()).into(), at(REMOTES[i]));
        let router = ["203.0.113.77", "2001:db8:77::1"][i];
        let error = error_about(&about, router, IcmpError::HostUnreachable, false);
        let received = cluster.remote_sends(1, 0, &error);
        let (source, destination, quote) = quoted(&received);
        assert_eq!((source, destination), (ip(router), at(PODS[i]).ip()));
        assert_eq!(ends(&quote), (at(PODS[i]), at(REMOTES[i])));
        // The first one's private address is nothing to the second one.
        let error = error_about(&sent, router, IcmpError::HostUnreachable, false);
        assert_eq!(cluster.receive(1, OUTSIDE, &error), []);
        cluster.assert_delta(&["egress 1, reply 1, peer_in 1, created 1", "peer_out 1, drop no_policy 1"]);
    }
}

/// A client's connection continues at the standby gateway, with that one's private address.
#[test]
fn a_clients_connection_survives_its_gateway() {
    let mut cluster = Cluster::new(2, &Setup::default());
    let services = vec![service(&both_pods())];
    cluster.change_policy(|set| *set = in_cloud(PolicySet { services, ..set.clone() }));
    for i in 0..2 {
        let client = at(CLIENTS[i]);
        let to = |addresses: [&str; 2]| SocketAddr::new(ip(addresses[i]), 80);
        let sent = cluster.receive(0, OUTSIDE, &tcp(client, to(PRIVATE), "S", 1000, 0));
        assert_eq!(sent.len(), 1, "{:?}", cluster.drops());
        let (backend, owner) = (ends(&sent[0].2).1, sent[0].0);
        let reply = tcp(backend, client, "SA", 5000, 1001);
        let answered = cluster.receive(0, INSIDE, &reply);
        let expected = [PRIVATE, OTHERS][answered[0].0];
        assert_eq!((answered.len(), ends(&answered[0].2)), (1, (to(expected), client)), "owner {owner}");
        let next = tcp(client, to(OTHERS), "A", 1001, 5001);
        let received = cluster.receive(1, OUTSIDE, &next);
        assert_eq!((received.len(), ends(&received[0].2)), (1, (client, backend)), "{:?}", cluster.drops());
    }
    cluster.advance(500);
    cluster.kill(0);
    for i in 0..2 {
        let client = at(CLIENTS[i]);
        let private = SocketAddr::new(ip(OTHERS[i]), 80);
        let received = cluster.remote_sends(1, 1, &tcp(client, private, "PA", 1001, 5001));
        let (source, backend) = ends(&received);
        assert_eq!(source, client);
        let answered = cluster.pod_sends(1, 1, &tcp(backend, client, "A", 5001, 1001));
        assert_eq!(ends(&answered), (private, client));
    }
    cluster.skip_counter_check();
}
