//! Session affinity: clients keep their backends when backends are added, whatever else they send, at whichever worker
//! and gateway their next connection arrives, and after a restart.

use std::net::{IpAddr, SocketAddr};

use vipgate_dataplane::flow::time::Tick;
use vipgate_dataplane::policy::spec::{BackendSpec, ServiceSpec};
use vipgate_dataplane::replication::queue::FirstRecord;
use vipgate_testkit::cluster::*;
use vipgate_testkit::services::*;
use vipgate_testkit::*;

use crate::restarts::{Folder, NOW, migrate_files};

/// The VIP of one gateway, number 1; next is number 2.
const VIP_OF_ONE: &str = "192.0.2.11";

/// So many clients in each address family, each with the VIP that it uses.
fn clients(count: u16) -> Vec<(IpAddr, IpAddr)> {
    let of = |n: u16| {
        let addresses = [format!("198.51.100.{n}"), format!("2001:db8:51::{n}")];
        addresses.into_iter().zip(VIPS).map(|(client, vip)| (ip(&client), ip(vip)))
    };
    (1..=count).flat_map(of).collect()
}

fn few() -> Vec<BackendSpec> {
    ["10.244.1.5", "10.244.1.6", "fd00:244:1::5"].map(backend).into()
}

/// One more in each family, which nearly all clients would get by their addresses.
fn more() -> Vec<BackendSpec> {
    let new = ["10.244.1.7", "fd00:244:1::6"].map(|address| BackendSpec { weight: 50, ..backend(address) });
    few().into_iter().chain(new).collect()
}

fn sticky(backends: &[BackendSpec]) -> ServiceSpec {
    ServiceSpec { affinity: Some(60), ..service(backends) }
}

/// The backend of a client's new connection from this port, received by this worker.
fn connect(gateway: &mut Gateway, worker: usize, (client, vip): (IpAddr, IpAddr), port: u16) -> SocketAddr {
    let sent = gateway.receive(worker, OUTSIDE, &packet(Protocol::Tcp, (client, port).into(), (vip, 80).into()));
    assert_eq!(sent.len(), 1, "{client}: {:?}", gateway.drops());
    ends(&sent[0].1).1
}

/// The backends of new connections of all clients, from this port, received by one worker after the other.
fn connect_all(gateway: &mut Gateway, clients: &[(IpAddr, IpAddr)], port: u16) -> Vec<SocketAddr> {
    let workers = gateway.workers.len();
    let queues = (usize::from(port)..).map(|n| n % workers);
    clients.iter().zip(queues).map(|(client, worker)| connect(gateway, worker, *client, port)).collect()
}

/// What clients get by their addresses alone after the scale-up.
fn by_address(clients: &[(IpAddr, IpAddr)]) -> Vec<SocketAddr> {
    let mut gateway = Gateway::with_service(&Setup::default(), &sticky(&more()));
    gateway.skip_counter_check();
    connect_all(&mut gateway, clients, 1000)
}

#[test]
fn traffic_at_another_port_leaves_a_clients_backend() {
    for workers in [1, 2, 3] {
        let setup = Setup { workers, ..Setup::default() };
        let web = few().into_iter().map(|it| BackendSpec { ports: vec![8080, 0, 0], ..it });
        let dns = |ports: [u16; 3], weight| {
            ["10.244.1.7", "fd00:244:1::6"].map(|it| BackendSpec { ports: ports.into(), weight, ..backend(it) })
        };
        let backends: Vec<_> = web.clone().chain(dns([0, 5353, 0], 1)).collect();
        let mut gateway = Gateway::with_service(&setup, &sticky(&backends));
        // The number of hand-offs depends on the number of workers.
        gateway.skip_counter_check();
        let clients = clients(20);
        let before = connect_all(&mut gateway, &clients, 1000);
        for (client, vip) in &clients {
            let query = packet(Protocol::Udp, (*client, 1000).into(), (*vip, 53).into());
            assert_eq!(gateway.receive(0, OUTSIDE, &query).len(), 1);
        }
        // Most of the table goes to the other backends, which now have this port, too.
        let backends: Vec<_> = web.chain(dns([8080, 5353, 0], 50)).collect();
        gateway.set_service(&sticky(&backends));
        assert_eq!(connect_all(&mut gateway, &clients, 2001), before, "{workers} workers");
    }
}

fn start(setup: &Setup, backends: &[BackendSpec], now: Tick) -> Gateway {
    let mut gateway = Gateway::starting_at(setup, network(), &with_services(&[sticky(backends)]), now);
    gateway.skip_counter_check();
    gateway
}

#[test]
fn clients_keep_their_backends_over_restarts_with_other_worker_counts() {
    let folder = Folder::new("affinity");
    let setup = |run, workers| Setup { workers, state: Some(folder.of_run(run)), ..Setup::default() };
    let clients = clients(20);
    let mut last = setup(0, 2);
    let before = connect_all(&mut start(&last, &few(), NOW), &clients, 1000);
    assert_ne!(by_address(&clients), before);
    for (run, workers) in [(0, 2), (1, 1), (2, 3), (3, 2)] {
        let next = setup(run, workers);
        if run > 0 {
            migrate_files(last.state.as_ref().unwrap(), next.state.as_ref().unwrap(), &next);
        }
        let mut gateway = start(&next, &more(), NOW);
        assert_eq!(connect_all(&mut gateway, &clients, 2000 + u16::from(run)), before, "{workers} workers");
        last = next;
    }
    // The affinity timeout goes on while no process is there.
    let mut gateway = start(&last, &more(), NOW.plus(50_000));
    assert_eq!(connect_all(&mut gateway, &clients[..10], 3000), before[..10]);
    drop(gateway);
    let mut gateway = start(&last, &more(), NOW.plus(70_000));
    assert_eq!(connect_all(&mut gateway, &clients[..10], 4000), before[..10]);
    assert_eq!(connect_all(&mut gateway, &clients[10..], 4000), by_address(&clients)[10..]);
}

fn sticky_cluster(setup: &Setup, service: &ServiceSpec) -> Cluster {
    let mut cluster = Cluster::new(3, setup);
    // Each test states where connections go.
    cluster.skip_counter_check();
    cluster.change_policy(|set| set.services = vec![service.clone()]);
    cluster
}

/// A client opens a connection at a gateway; returns its backend.
fn open(cluster: &mut Cluster, number: GatewayIndex, (client, vip): (IpAddr, IpAddr), port: u16) -> SocketAddr {
    let (client, vip): (SocketAddr, SocketAddr) = ((client, port).into(), (vip, 80).into());
    let backend = ends(&cluster.remote_sends(number, number, &tcp(client, vip, "S", 1000, 0))).1;
    cluster.pod_sends(number, number, &tcp(backend, client, "SA", 5000, 1001));
    cluster.remote_sends(number, number, &tcp(client, vip, "A", 1001, 5001));
    backend
}

fn open_all(cluster: &mut Cluster, number: GatewayIndex, clients: &[(IpAddr, IpAddr)], port: u16) -> Vec<SocketAddr> {
    clients.iter().map(|client| open(cluster, number, *client, port)).collect()
}

#[test]
fn every_gateway_knows_the_backends_of_confirmed_clients() {
    let clients = clients(10);
    for workers in [1, 2, 3] {
        let mut cluster = sticky_cluster(&Setup { workers, ..Setup::default() }, &sticky(&few()));
        let before = open_all(&mut cluster, 0, &clients, 1000);
        cluster.advance(300);
        cluster.change_policy(|set| set.services = vec![sticky(&more())]);
        assert_ne!(by_address(&clients), before);
        for (number, port) in [(1, 2000), (2, 3000), (0, 4000)] {
            assert_eq!(open_all(&mut cluster, number, &clients, port), before, "gateway {number}");
        }
    }
}

#[test]
fn a_connection_reaches_its_backend_through_any_gateway_after_a_scale_up() {
    let clients = clients(10);
    let mut cluster = sticky_cluster(&Setup::default(), &sticky(&few()));
    let before = open_all(&mut cluster, 0, &clients, 1000);
    cluster.advance(300);
    cluster.change_policy(|set| set.services = vec![sticky(&more())]);
    for (&(client, vip), backend) in clients.iter().zip(&before) {
        let segment = tcp((client, 1000).into(), (vip, 80).into(), "A", 1001, 5001);
        assert_eq!(ends(&cluster.remote_sends(1, 1, &segment)).1, *backend);
    }
}

#[test]
fn spoofed_clients_are_unknown_to_other_gateways() {
    let clients = clients(10);
    let mut cluster = sticky_cluster(&Setup::default(), &sticky(&few()));
    connect_all(&mut cluster.gateways[0], &clients, 1000);
    cluster.gateways[0].advance(2_000);
    assert!(cluster.gateways[0].replication_senders[0].pop().is_none());
    assert_eq!(cluster.full_sync(0, 1), 0);
}

#[test]
fn a_gateway_that_connects_later_gets_the_backends_of_clients_with_the_full_round() {
    let clients = clients(20);
    let mut cluster = sticky_cluster(&Setup::default(), &sticky(&few()));
    cluster.members[1].connected = false;
    cluster.publish_views();
    let before = open_all(&mut cluster, 0, &clients, 1000);
    // Their sessions end: 30 s here.
    cluster.advance(35_000);
    assert_eq!(cluster.gateways[0].sessions(), 0);
    cluster.members[1].connected = true;
    cluster.publish_views();
    assert_eq!(cluster.full_sync(0, 1), clients.len());
    cluster.change_policy(|set| set.services = vec![sticky(&more())]);
    assert_eq!(open_all(&mut cluster, 1, &clients, 2000), before);
}

/// IPv4 clients of the VIP of one gateway.
fn clients_of_one() -> Vec<(IpAddr, IpAddr)> {
    clients(10).into_iter().map(|(client, _)| (client, ip(VIP_OF_ONE))).filter(|(client, _)| client.is_ipv4()).collect()
}

fn sticky_at_one(backends: &[BackendSpec]) -> ServiceSpec {
    ServiceSpec { vips: vec![ip(VIP_OF_ONE)], ..sticky(backends) }
}

#[test]
fn the_next_owner_of_a_vip_knows_the_backends_of_its_clients() {
    let clients = clients_of_one();
    for first_record in [FirstRecord::AtAge(100), FirstRecord::WithReply] {
        for workers in [1, 2] {
            let setup = Setup { workers, first_record, ..Setup::default() };
            let mut cluster = sticky_cluster(&setup, &sticky_at_one(&few()));
            let before = open_all(&mut cluster, 1, &clients, 1000);
            // Their sessions end: 30 s here.
            cluster.advance(35_000);
            assert_eq!((cluster.gateways[1].sessions(), cluster.standby_sessions(2)), (0, 0));
            cluster.change_policy(|set| set.services = vec![sticky_at_one(&more())]);
            cluster.kill(1);
            assert_eq!(open_all(&mut cluster, 2, &clients, 2000), before, "{first_record:?}, {workers} workers");
        }
    }
}

#[test]
fn a_client_that_is_confirmed_late_is_sent_later() {
    let (client, vip) = (at("198.51.100.10:1000"), (ip(VIP_OF_ONE), 53).into());
    let query = |port: u16| packet(Protocol::Udp, (client.ip(), port).into(), vip);
    let mut cluster = sticky_cluster(&Setup::default(), &sticky_at_one(&few()));
    let backend = ends(&cluster.remote_sends(1, 1, &query(1000))).1;
    // Its session is replicated meanwhile.
    cluster.advance(400);
    cluster.pod_sends(1, 1, &packet(Protocol::Udp, backend, client));
    cluster.remote_sends(1, 1, &query(1000));
    cluster.advance(2_000);
    cluster.change_policy(|set| set.services = vec![sticky_at_one(&more())]);
    cluster.kill(1);
    assert_eq!(ends(&cluster.remote_sends(2, 2, &query(2000))).1, backend);
}
