//! Several policy servers that share one API server: the leader decides membership, and its death costs nothing.

use std::time::{Duration, Instant};

use serde_json::Value;
use vipgate_tests::cluster::{
    BGP_VIPS, ClientConfig, Clients, Cluster, Gateway, L2_VIPS, LineServer, PEER_PORT, SERVER, sleep_ms, sources_a,
};
use vipgate_tests::kubernetes::{ApiServer, POLICYD};
use vipgate_tests::policyd::{Policyd, PolicydConfig};
use vipgate_tests::wait_for;

use crate::access::grant_all_but;
use crate::fixture::{set_ingress, source};

/// The host of the servers, as gateways reach it.
const HOST: &str = "10.3.0.254";
/// The time in which the next leader decides.
const ELECTION: Duration = Duration::from_secs(5);
/// Longer than by default, as is the heartbeat interval between gateways: several gateways, two servers and an API server
/// on a small machine delay each other, and a view may change only for the reasons under test.
const TTL: Duration = Duration::from_secs(2);

/// Gateways, an API server with their policy, and policy servers that read it.
struct Group {
    servers: [Option<Policyd>; 2],
    api: ApiServer,
    cluster: Cluster,
}

impl Group {
    fn new(tag: &str, gateways: usize) -> Self {
        let cluster = Cluster::new(tag, gateways);
        let api = ApiServer::new(&cluster.management);
        grant_all_but(&api, None);
        for file in ["tenants.yaml", "gateways.yaml"] {
            let text = std::fs::read_to_string(cluster.folder.path().join("policy").join(file)).unwrap();
            api.apply_unvalidated(&text);
        }
        set_ingress(&api, "tenant-a", "api", &BGP_VIPS);
        set_ingress(&api, "tenant-b", "web", &L2_VIPS);
        let mut group = Self { servers: [None, None], api, cluster };
        group.start_server(0);
        group.start_server(1);
        group
    }

    fn start_server(&mut self, n: u16) {
        let (name, listen) = (format!("policyd-{n}"), format!("{HOST}:{}", 18000 + n));
        let source = source(&self.api, POLICYD, "") + &format!("\nleases: {{ttl: {}s}}", TTL.as_secs());
        let settings = PolicydConfig { name: &name, listen: &listen, metrics: 9470 + n, extra: &source };
        let server = Policyd::start(&self.cluster.management, self.cluster.folder.path(), settings);
        self.servers[usize::from(n)] = Some(server);
    }

    fn server(&self, n: usize) -> &Policyd {
        self.servers[n].as_ref().expect("it runs")
    }

    fn kill_server(&mut self, n: usize) {
        self.servers[n].take().expect("it runs").kill();
    }

    fn start_gateway(&mut self, number: usize) {
        let folder = self.cluster.folder.path().display().to_string();
        let gateway = &mut self.cluster.gateways[number];
        let cache = format!("{folder}/{}/policy.cache", gateway.name);
        let urls = format!("url: \"http://{HOST}:18000\", other_urls: [\"http://{HOST}:18001\"]");
        let peer = format!("address: {}, port: {PEER_PORT}, heartbeat: 400ms", gateway.peer_address);
        gateway.spawn(&format!("policy: {{server: {{{urls}, cache: {cache}}}}}\npeer: {{{peer}}}"));
    }

    fn start_gateways(&mut self) {
        self.cluster.indices().into_iter().for_each(|number| self.start_gateway(number));
        self.cluster.gateways.iter_mut().for_each(Gateway::wait_ready);
        self.cluster.wait_converged();
    }

    /// The server that leads.
    fn leader(&self) -> usize {
        let leads = |n: &usize| {
            self.servers[*n].as_ref().is_some_and(|server| server.metric("vipgate_policyd_leader", "") > 0.5)
        };
        let mut leaders = (0..2).filter(leads);
        let leader = leaders.next().expect("a leader");
        assert_eq!(leaders.next(), None, "two lead");
        leader
    }

    fn running(&self) -> impl Iterator<Item = &Gateway> {
        self.cluster.gateways.iter().filter(|gateway| gateway.is_running())
    }

    /// How often an event was logged by all running gateways.
    fn count(&self, event: &str) -> Vec<usize> {
        let event = format!("\"event\":\"{event}\"");
        self.running().map(|gateway| gateway.log().matches(&event).count()).collect()
    }

    fn object(&self) -> Value {
        self.api.get("configmap", "default", "vipgate-policyd-membership")
    }

    fn stored_number(&self) -> u64 {
        self.object()["data"]["number"].as_str().unwrap().parse().unwrap()
    }

    /// Number of the view that a gateway has.
    fn view(&self, number: usize) -> u64 {
        self.cluster.gateways[number].query(&["status"])["group"]["view"].as_u64().unwrap()
    }

    fn logs(&self) -> String {
        let servers = self.servers.iter().flatten().map(Policyd::log);
        servers.chain(self.running().map(Gateway::log_tail)).collect::<Vec<_>>().join("\n---\n")
    }

    /// Waits until every running gateway has found the authority once more than `before`; the time since `began` at which
    /// the first one and all of them had.
    fn wait_found(&self, before: &[usize], began: Instant) -> [Duration; 2] {
        let mut first = None;
        loop {
            let found = self.count("authority_found");
            let count = found.iter().zip(before).filter(|(now, before)| now > before).count();
            if count > 0 {
                first.get_or_insert(began.elapsed());
            }
            if count == found.len() {
                return [first.unwrap_or_default(), began.elapsed()];
            }
            assert!(began.elapsed() < Duration::from_secs(20), "{}", self.logs());
            sleep_ms(10);
        }
    }
}

fn start_held(cluster: &Cluster) -> Clients {
    let traffic = ClientConfig::held_connections(SERVER[0], sources_a(0), 400);
    let mut held = cluster.start_clients("held", 1_000_000, &traffic);
    held.wait_established(Duration::from_secs(30));
    held
}

#[test]
fn a_killed_leader_costs_no_connection_and_no_lease_and_the_next_one_decides_within_five_seconds() {
    let mut group = Group::new("k8s-members", 3);
    group.start_gateways();
    let monitor = group.cluster.start_monitor();
    let held = start_held(&group.cluster);
    let probes = group.cluster.start_clients("probes", 2_000_000, &ClientConfig::probes(SERVER[0], sources_a(0), 20));

    // Heartbeats, four per TTL and gateway, write nothing.
    let before = group.object();
    sleep_ms(10_000);
    assert_eq!(group.object(), before);

    let expired = group.count("lease_expired");
    for round in 1..=2 {
        let (leader, number, found) = (group.leader(), group.stored_number(), group.count("authority_found"));
        group.kill_server(leader);
        let [first, all] = group.wait_found(&found, Instant::now());
        println!(
            "round {round}: leader killed, first heartbeat answered after {first:?}, each gateway's after {all:?}"
        );
        assert!(all < ELECTION, "{all:?}\n{}", group.logs());
        assert_eq!(group.leader(), 1 - leader);
        // It decides the same.
        sleep_ms(2_000);
        assert_eq!(group.stored_number(), number, "{}", group.logs());
        assert_eq!(group.count("lease_expired"), expired, "{}", group.logs());
        group.start_server(u16::try_from(leader).unwrap());
    }

    // What the next leader decides: another gateway's death, at once.
    let (number, leader) = (group.stored_number(), group.leader());
    group.cluster.accounting.allow(["no_lease", "no_owner", "no_service", "no_session", "too_big"]);
    group.cluster.gateways[2].kill();
    let died = Instant::now();
    let is_decided = || group.server(leader).metric("vipgate_policyd_members_serving", "") < 2.5;
    assert!(wait_for(2 * TTL, is_decided), "{}", group.logs());
    println!("a gateway's death was decided after {:?}", died.elapsed());
    group.cluster.route_via(&[0, 1]);
    assert!(group.stored_number() > number);
    // The other server knows it, too.
    let follows = || group.server(1 - leader).metric("vipgate_policyd_members_serving", "") < 2.5;
    assert!(wait_for(Duration::from_secs(5), follows), "{}", group.logs());
    sleep_ms(1_000);
    let held = held.end();
    println!("held: {}", held.summary());
    held.check_survived(99);
    println!("probes: {}", probes.end().summary());
    monitor.verify_with_more_hops(&group.cluster);
}

#[test]
fn leader_and_gateway_killed_together_are_failed_over_by_the_next_leader() {
    let mut group = Group::new("k8s-both", 2);
    group.start_gateways();
    group.cluster.accounting.allow(["no_lease", "no_owner", "no_service", "no_session", "too_big"]);
    let leader = group.leader();
    let serving = || group.server(1 - leader).metric("vipgate_policyd_members_serving", "");
    assert!(wait_for(Duration::from_secs(5), || serving() > 1.5), "{}", group.logs());
    let number = group.stored_number();
    group.cluster.gateways[1].kill();
    group.kill_server(leader);
    let died = Instant::now();
    group.cluster.route_via(&[0]);
    let alone = || group.server(1 - leader).metric("vipgate_policyd_members_serving", "") < 1.5;
    assert!(wait_for(Duration::from_secs(15), alone), "{}", group.logs());
    println!("leader and gateway killed: decided after {:?}", died.elapsed());
    // The Lease, and two TTLs in which the dead gateway could have reported.
    assert!(died.elapsed() < ELECTION + 2 * TTL, "{:?}", died.elapsed());
    assert!(group.stored_number() > number);
    let traffic = ClientConfig::short_connections(SERVER[0], sources_a(0), 100, 200);
    let server = LineServer::start(group.cluster.folder.path(), &group.cluster.server);
    let clients = group.cluster.start_clients("after", 3_000_000, &traffic);
    clients.wait(Duration::from_secs(20)).check_all_succeeded();
    server.end();
}

#[test]
fn without_the_api_server_gateways_go_on_and_the_view_goes_on_from_the_stored_number() {
    let mut group = Group::new("k8s-api-down", 2);
    group.start_gateways();
    let monitor = group.cluster.start_monitor();
    let held = start_held(&group.cluster);
    let (expired, number) = (group.count("lease_expired"), group.stored_number());

    // Nobody can lead: the gateways keep their leases by each other's heartbeats.
    group.api.stop();
    sleep_ms(8_000);
    let decides = |number: usize| group.cluster.gateways[number].query(&["status"])["group"]["decides"].clone();
    assert_eq!([decides(0), decides(1)], ["lost", "lost"], "{}", group.logs());
    assert_eq!(group.count("lease_expired"), expired, "{}", group.logs());
    let found = group.count("authority_found");
    let began = Instant::now();
    group.api.start();
    let [_, all] = group.wait_found(&found, began);
    println!("API server started: each gateway's heartbeat is answered after {all:?}");
    assert_eq!(group.stored_number(), number);

    // Both servers die, and start again.
    group.kill_server(0);
    group.kill_server(1);
    sleep_ms(1_000);
    let found = group.count("authority_found");
    group.start_server(0);
    group.start_server(1);
    group.wait_found(&found, Instant::now());
    sleep_ms(2_000);
    assert_eq!(group.stored_number(), number, "{}", group.logs());
    assert_eq!(group.count("lease_expired"), expired, "{}", group.logs());

    // The object is deleted together with the servers' memory: gateways know the view.
    group.kill_server(0);
    group.kill_server(1);
    group.api.delete("configmap", "default", "vipgate-policyd-membership");
    let found = group.count("authority_found");
    group.start_server(0);
    group.start_server(1);
    group.wait_found(&found, Instant::now());
    let is_stored = || group.stored_number() >= number && group.view(0) >= number;
    assert!(wait_for(Duration::from_secs(10), is_stored), "{}", group.logs());
    let held = held.end();
    println!("held: {}", held.summary());
    held.check_survived(99);
    monitor.verify_with_more_hops(&group.cluster);
}

/// A server that leaves by itself gives the Lease back: the next one leads at once.
#[test]
fn a_leader_that_stops_is_replaced_within_two_seconds() {
    let mut group = Group::new("k8s-stop", 2);
    group.start_gateways();
    let (leader, number) = (group.leader(), group.stored_number());
    let (expired, found) = (group.count("lease_expired"), group.count("authority_found"));
    group.servers[leader].as_mut().unwrap().process().signal("TERM").unwrap();
    let [first, all] = group.wait_found(&found, Instant::now());
    println!("leader stopped: first heartbeat answered after {first:?}, each gateway's after {all:?}");
    assert!(all < Duration::from_secs(2), "{all:?}\n{}", group.logs());
    assert_eq!((group.stored_number(), group.count("lease_expired")), (number, expired), "{}", group.logs());
}
