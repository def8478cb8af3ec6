//! VIPs with L2 announcement: one gateway owns each, and another one announces them at failover.

use std::fs;
use std::time::Duration;

use vipgate_tests::cluster::{
    ClientConfig, Clients, Cluster, Gateway, HTTP_PORT, L2_VIPS, LINE_PORT, LineServer, SERVER, sleep_ms, sources_b,
    unix_time,
};
use vipgate_tests::verifier::{AddressClaim, ClaimKind, Frame, address_claims};

use crate::scenario::{
    MAX_OUTAGE, RETRANSMISSION_DELAY, allow_shard_moves, kill_gateway, restart_gateway, source_addresses,
};

const ARP_AND_ND: &str = "arp or icmp6";

fn outside_macs(cluster: &Cluster) -> Vec<[u8; 6]> {
    cluster.gateways.iter().map(|gateway| gateway.mac("gw-out")).collect()
}

/// Makes the outside router resolve a VIP of each family; returns the gateways' claims.
fn resolve_vips(cluster: &Cluster, vips: [&str; 2]) -> [Vec<AddressClaim>; 2] {
    let capture = cluster.capture_outside(ARP_AND_ND);
    // A VIP doesn't reply to pings.
    cluster.accounting.expect_exactly([("no_service", 6)]);
    for _ in 0..3 {
        for (flag, vip) in [("-4", vips[0]), ("-6", vips[1])] {
            let _ = cluster.outside.ip(&[flag, "neigh", "del", vip, "dev", "public"]);
            let _ = cluster.outside.output(&["ping", "-c", "1", "-W", "0.2", vip]);
        }
    }
    let frames = capture.end();
    vips.map(|vip| address_claims(&frames, vip, &outside_macs(cluster)))
}

/// The gateway that owns each of both VIPs.
fn owners(cluster: &Cluster, vips: [&str; 2]) -> [usize; 2] {
    let vip_claims = resolve_vips(cluster, vips);
    let owners = [0, 1].map(|family| {
        let mut captures: Vec<usize> = vip_claims[family].iter().map(|claim| claim.capture).collect();
        assert!(!captures.is_empty(), "no gateway replies for {}", vips[family]);
        captures.dedup();
        assert_eq!(captures.len(), 1, "several gateways reply for {}: {:?}", vips[family], vip_claims[family]);
        captures[0]
    });
    let replies = vip_claims[0].iter().filter(|claim| claim.kind == ClaimKind::Reply).count();
    assert_eq!(replies, 3, "one reply for each request: {:?}", vip_claims[0]);
    owners
}

/// Time in seconds from `after` to the first announcement of a VIP by a gateway other than `old`, and the number of
/// its announcements.
fn announcements(frames: &[Frame], cluster: &Cluster, vip: &str, (old, after): (usize, f64)) -> (f64, usize) {
    let start = Duration::from_secs_f64(after).as_nanos() as u64;
    let vip_claims = address_claims(frames, vip, &outside_macs(cluster));
    let announced: Vec<&AddressClaim> = vip_claims
        .iter()
        .filter(|it| it.kind == ClaimKind::Announcement && it.capture != old && it.time > start)
        .collect();
    let first = announced.first().unwrap_or_else(|| panic!("no announcement of {vip}: {vip_claims:?}"));
    let count = announced.iter().filter(|it| it.capture == first.capture).count();
    (Duration::from_nanos(first.time - start).as_secs_f64(), count)
}

#[test]
fn an_l2_vip_has_one_owner_and_fails_over_within_a_second() {
    let mut cluster = Cluster::running("claimed", 3);
    let monitor = cluster.start_monitor();
    // The gateway that started first owned the VIPs until their preferred owner started: wait until that was
    // announced.
    sleep_ms(2_000);
    let owners_before = owners(&cluster, L2_VIPS);
    let clients = |name: &str, first: u32, make: fn(&'static str, Vec<String>) -> ClientConfig<'static>| {
        [0, 1].map(|family| {
            let traffic = make(SERVER[family], sources_b(family));
            let mut clients =
                cluster.start_clients(&format!("{name}-{family}"), first + 1_000_000 * family as u32, &traffic);
            clients.wait_established(Duration::from_secs(20));
            clients
        })
    };
    let held = clients("held", 10_000_000, |to, sources| ClientConfig::held_connections(to, sources, 200));
    let probes = clients("probes", 20_000_000, |to, sources| ClientConfig::probes(to, sources, 20));
    sleep_ms(500);
    let capture = cluster.capture_outside(ARP_AND_ND);
    let owner = owners_before[0];
    let died = kill_gateway(&mut cluster, owner);
    sleep_ms(3_000);
    let frames = capture.end();
    for (family, vip) in L2_VIPS.into_iter().enumerate() {
        if owners_before[family] == owner {
            let (first, count) = announcements(&frames, &cluster, vip, (owner, died));
            println!("{vip} announced after {first:.3} s, {count} times");
            assert!(first <= MAX_OUTAGE && count >= 3, "{vip}: after {first} s, {count} times");
        }
    }
    let new_owners = owners(&cluster, L2_VIPS);
    assert!(new_owners.iter().all(|it| *it != owner), "{new_owners:?}");
    restart_gateway(&mut cluster, owner);
    sleep_ms(2_000);
    assert_eq!(owners(&cluster, L2_VIPS), owners_before, "owned by the preferred gateway again");
    for (clients, extra) in [(held, RETRANSMISSION_DELAY), (probes, 0.0)] {
        for outcome in Clients::end_all(clients) {
            println!("{}", outcome.summary());
            outcome.check_no_misdelivery();
            outcome.check_survived(99);
            assert!(outcome.p99_wait(0.2) <= MAX_OUTAGE + extra, "{}", outcome.summary());
        }
    }
    let records = monitor.verify_with_more_hops(&cluster);
    assert!(source_addresses(&records).iter().all(|source| L2_VIPS.contains(source)));
}

/// VIPs of a Service whose clients reach only backends on the gateway's node.
const LOCAL_VIPS: [&str; 2] = ["203.0.113.21", "2001:db8:113::21"];

/// That Service, with p4 as its only backend, on a node.
fn local_service(node: &str) -> String {
    let service = format!(
        "---\napiVersion: v1\nkind: Namespace\nmetadata: {{name: tenant-c}}\n\
         ---\napiVersion: v1\nkind: Service\n\
         metadata: {{name: local, namespace: tenant-c, annotations: {{vipgate.io/egress: \"true\"}}}}\n\
         spec:\n  type: LoadBalancer\n  externalTrafficPolicy: Local\n  ports:\n\
         \x20   - {{name: tcp, port: {HTTP_PORT}, targetPort: {LINE_PORT}, protocol: TCP}}\n\
         status: {{loadBalancer: {{ingress: [{{ip: {}}}, {{ip: \"{}\"}}]}}}}\n",
        LOCAL_VIPS[0], LOCAL_VIPS[1]
    );
    let slice = |family: &str, address: &str| {
        format!(
            "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
             metadata: {{name: local-{}, namespace: tenant-c, labels: {{kubernetes.io/service-name: local}}}}\n\
             addressType: {family}\n\
             ports: [{{name: tcp, port: {LINE_PORT}}}]\n\
             endpoints:\n\
             \x20 - {{addresses: [\"{address}\"], nodeName: {node}, conditions: {{ready: true}}, \
             targetRef: {{kind: Pod, name: p4, namespace: tenant-c}}}}\n",
            family.to_lowercase()
        )
    };
    service + &slice("IPv4", "10.1.0.31") + &slice("IPv6", "fd00:1::31")
}

/// Starts the policy server, and all gateways on nodes of other names than their own.
fn start_on_nodes(cluster: &mut Cluster) {
    let path = cluster.folder.path().join("policy/gateways.yaml");
    let mut manifests = fs::read_to_string(path).unwrap();
    for number in 1..=cluster.gateways.len() {
        let peer = format!("{{peerAddress: 10.2.0.{number}}}");
        assert!(manifests.contains(&peer), "{manifests}");
        manifests = manifests.replace(&peer, &format!("{{peerAddress: 10.2.0.{number}, node: node-{number}}}"));
    }
    cluster.write_policy("gateways.yaml", &manifests);
    cluster.start_policyd("");
    for (index, gateway) in cluster.gateways.iter_mut().enumerate() {
        gateway.spawn(&format!("node: node-{}", index + 1));
    }
    cluster.gateways.iter_mut().for_each(Gateway::wait_ready);
    cluster.wait_converged();
}

/// Asserts that new clients outside are served at each VIP.
fn check_served(cluster: &Cluster, name: &str, first: u32) {
    for (family, vip) in LOCAL_VIPS.into_iter().enumerate() {
        let brief = ClientConfig::short_connections(vip, Vec::new(), 50, 200);
        let traffic = ClientConfig { server: (vip, HTTP_PORT), ..brief };
        let (name, first) = (format!("{name}-{family}"), first + 1_000 * family as u32);
        let clients = Clients::start(cluster.folder.path(), &cluster.server, &name, first, &traffic);
        clients.wait(Duration::from_mins(1)).check_all_succeeded();
    }
}

#[test]
fn a_vip_follows_the_only_backend_that_its_clients_reach() {
    let mut cluster = Cluster::new("local", 2);
    cluster.write_policy("local.yaml", &local_service("node-1"));
    start_on_nodes(&mut cluster);
    let backend = LineServer::start(cluster.folder.path(), &cluster.pods[3]);
    // Whichever gateway started first owned the VIPs until the one with the backend was active.
    sleep_ms(2_000);
    assert_eq!(owners(&cluster, LOCAL_VIPS), [0, 0]);
    check_served(&cluster, "first", 40_000_000);
    let held = [0, 1].map(|family| {
        let held = ClientConfig::held_connections(LOCAL_VIPS[family], Vec::new(), 100);
        let traffic = ClientConfig { server: (LOCAL_VIPS[family], HTTP_PORT), ..held };
        let (name, first) = (format!("held-{family}"), 10_000_000 * (1 + family as u32));
        let mut clients = Clients::start(cluster.folder.path(), &cluster.server, &name, first, &traffic);
        clients.wait_established(Duration::from_secs(20));
        clients
    });
    allow_shard_moves(&cluster);
    // Clients that come before the VIP has followed.
    cluster.accounting.allow(["not_local"]);
    for (turn, owner) in [1, 0].into_iter().enumerate() {
        let capture = cluster.capture_outside(ARP_AND_ND);
        let moved = unix_time();
        cluster.write_policy("local.yaml", &local_service(&format!("node-{}", owner + 1)));
        sleep_ms(4_000);
        let frames = capture.end();
        for vip in LOCAL_VIPS {
            let (first, count) = announcements(&frames, &cluster, vip, (1 - owner, moved));
            println!("{vip} announced after {first:.3} s, {count} times");
            assert!(first <= 3.0, "{vip}: after {first} s");
        }
        assert_eq!(owners(&cluster, LOCAL_VIPS), [owner; 2]);
        check_served(&cluster, &format!("turn-{turn}"), 50_000_000 + 1_000_000 * turn as u32);
    }
    for outcome in Clients::end_all(held) {
        println!("{}", outcome.summary());
        outcome.check_no_misdelivery();
        outcome.check_survived(99);
    }
    assert!(backend.end().iter().all(|record| record.errors == 0));
    cluster.check_frames();
}
