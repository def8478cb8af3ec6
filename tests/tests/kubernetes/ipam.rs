//! Addresses of Services from AddressPools, written to their status by the leader of the policy servers.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vipgate_tests::kubernetes::{ApiServer, POLICYD};
use vipgate_tests::policyd::{Policyd, PolicydConfig};
use vipgate_tests::{Testbed, wait_for};

use crate::access::grant_all_but;
use crate::fixture::{source, start_gateway, start_policyd, wait_in_step, wait_seen_as};

/// Pools of the testbed's outside networks, without quarantine. The second one is only for those that name it.
const POOLS: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: tenant-a}
---
apiVersion: vipgate.io/v1alpha1
kind: AddressPool
metadata: {name: public}
spec: {ranges: [203.0.113.30-203.0.113.31, \"2001:db8:113::30-2001:db8:113::31\"], reuseAfter: 0s}
---
apiVersion: vipgate.io/v1alpha1
kind: AddressPool
metadata: {name: reserved}
spec: {ranges: [203.0.113.40-203.0.113.44], autoAssign: false, reuseAfter: 0s}
";

/// Endpoints of the Service `web`, pod p3.
const ENDPOINTS: &str = "
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web, namespace: tenant-a, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: http, port: 8080}]
endpoints: [{addresses: [10.1.0.21], conditions: {ready: true}}]
";

/// A Service of vipgate's: 1.20 has no classes, so an annotation says so.
pub(crate) fn service(name: &str, annotations: &str, spec: &str) -> String {
    format!(
        "---\napiVersion: v1\nkind: Service\n\
         metadata: {{name: {name}, namespace: tenant-a, annotations: {{vipgate.io/egress: \"true\"{annotations}}}}}\n\
         spec: {{type: LoadBalancer, ports: [{{name: http, port: 80, targetPort: 8080}}]{spec}}}\n"
    )
}

/// The addresses in the status of a Service.
fn addresses_of(service: &Value) -> Vec<String> {
    let ingress = service["status"]["loadBalancer"]["ingress"].as_array().cloned().unwrap_or_default();
    ingress.iter().map(|ingress| ingress["ip"].as_str().unwrap_or_default().to_owned()).collect()
}

pub(crate) fn addresses(api: &ApiServer, name: &str) -> Vec<String> {
    addresses_of(&api.get("service", "tenant-a", name))
}

#[track_caller]
pub(crate) fn wait_addresses(api: &ApiServer, policyd: &Policyd, name: &str, expected: &[&str]) {
    let has = || addresses(api, name) == expected;
    assert!(wait_for(Duration::from_secs(15), has), "{name}: {:?}\n{}", addresses(api, name), policyd.log());
}

/// The addresses of all Services, by name.
fn all_addresses(api: &ApiServer) -> BTreeMap<String, Vec<String>> {
    let list: Value = serde_json::from_str(&api.kubectl(&["get", "services", "-n", "tenant-a", "-o", "json"])).unwrap();
    let name = |service: &Value| service["metadata"]["name"].as_str().unwrap_or_default().to_owned();
    list["items"].as_array().unwrap().iter().map(|service| (name(service), addresses_of(service))).collect()
}

/// Replaces the ranges of the pool `public`.
fn set_ranges(api: &ApiServer, ranges: &[&str]) {
    let patch = json!({"spec": {"ranges": ranges}}).to_string();
    api.kubectl(&["patch", "addresspool", "public", "--type=merge", "-p", &patch]);
}

/// Resource versions of all Services: they change with each write.
fn versions(api: &ApiServer) -> String {
    let path = "-o=jsonpath={range .items[*]}{.metadata.name} {.metadata.resourceVersion}{\"\\n\"}{end}";
    api.kubectl(&["get", "services", "-n", "tenant-a", path])
}

#[test]
#[expect(clippy::too_many_lines, reason = "one sequence of states, in which each step needs those before it")]
fn a_service_gets_an_address_and_its_pods_leave_with_it() {
    let mut testbed = Testbed::new("k8s-ipam");
    let api = ApiServer::new(&testbed.gateway);
    grant_all_but(&api, None);
    api.apply(POOLS);
    api.apply(&(service("web", "", "") + "---" + ENDPOINTS));
    let mut policyd = start_policyd(&testbed, &source(&api, POLICYD, ""));
    wait_addresses(&api, &policyd, "web", &["203.0.113.30"]);
    policyd.wait_for_log(&["address_assigned", "tenant-a/web", "203.0.113.30"]);
    start_gateway(&mut testbed, "");
    wait_seen_as(&testbed, 2, "203.0.113.30");
    wait_in_step(&testbed);

    // Both families, a certain address, a certain pool.
    let both = ", ipFamilyPolicy: RequireDualStack, ipFamilies: [IPv6, IPv4]";
    api.apply(&service("both", "", both));
    wait_addresses(&api, &policyd, "both", &["2001:db8:113::30", "203.0.113.31"]);
    api.apply(&service("named", ", vipgate.io/addresses: 203.0.113.44", ""));
    wait_addresses(&api, &policyd, "named", &["203.0.113.44"]);
    api.apply(&service("field", "", ", loadBalancerIP: 203.0.113.43"));
    wait_addresses(&api, &policyd, "field", &["203.0.113.43"]);
    api.apply(&service("pooled", ", vipgate.io/pool: reserved", ""));
    wait_addresses(&api, &policyd, "pooled", &["203.0.113.40"]);

    // An address for several Services with other ports.
    let shared = ", vipgate.io/pool: reserved, vipgate.io/sharing-key: k";
    api.apply(&service("shared-1", shared, ""));
    wait_addresses(&api, &policyd, "shared-1", &["203.0.113.41"]);
    api.apply(&service("shared-2", shared, "").replace("port: 80,", "port: 81,"));
    wait_addresses(&api, &policyd, "shared-2", &["203.0.113.41"]);
    api.apply(&service("shared-3", shared, "").replace("port: 80,", "port: 81,"));
    wait_addresses(&api, &policyd, "shared-3", &["203.0.113.42"]);

    // None is left, and then one is.
    api.apply(&service("next", "", ""));
    policyd.wait_for_log(&[
        "address_refused",
        "tenant-a/next",
        "exhausted",
        "no IPv4 address is free in AddressPool public",
    ]);
    assert!(policyd.metric("vipgate_ipam_refused", "reason=\"exhausted\"") > 0.5);
    assert!((policyd.metric("vipgate_ipam_addresses", "pool=\"reserved\",state=\"service\"") - 5.0).abs() < 0.1);
    api.delete("service", "tenant-a", "both");
    wait_addresses(&api, &policyd, "next", &["203.0.113.31"]);
    policyd.wait_for_log(&["address_released", "tenant-a/both"]);

    // Another address on request.
    api.kubectl(&[
        "annotate",
        "-n",
        "tenant-a",
        "service",
        "shared-3",
        "vipgate.io/addresses=203.0.113.44",
        "--overwrite",
    ]);
    policyd.wait_for_log(&["address_refused", "in use by Service tenant-a/named"]);
    assert_eq!(addresses(&api, "shared-3"), ["203.0.113.42"]);
    api.delete("service", "tenant-a", "named");
    wait_addresses(&api, &policyd, "shared-3", &["203.0.113.44"]);

    // A restart changes nothing, nor does a pool without addresses that are in use.
    std::thread::sleep(Duration::from_millis(500));
    let (before, written) = (versions(&api), addresses(&api, "web"));
    policyd.process().signal("TERM").unwrap();
    policyd.wait_for_log(&["leader_released"]);
    drop(policyd);
    let policyd = start_policyd(&testbed, &source(&api, POLICYD, ""));
    policyd.wait_for_log(&["leader_elected"]);
    set_ranges(&api, &["203.0.113.50/32"]);
    policyd.wait_for_log(&["address_outside_pools", "tenant-a/web", "203.0.113.30"]);
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!((versions(&api), addresses(&api, "web")), (before, written));
    wait_seen_as(&testbed, 2, "203.0.113.30");

    // No load balancer any more: no address. What another controller has written stays.
    api.kubectl(&[
        "patch",
        "service",
        "-n",
        "tenant-a",
        "pooled",
        "--type=merge",
        "-p",
        "{\"spec\": {\"type\": \"ClusterIP\"}}",
    ]);
    wait_addresses(&api, &policyd, "pooled", &[]);
    api.apply(&service("foreign", ", vipgate.io/pool: none", ""));
    crate::fixture::set_ingress(&api, "tenant-a", "foreign", &["203.0.113.60"]);
    api.kubectl(&["annotate", "-n", "tenant-a", "service", "foreign", "vipgate.io/pool=reserved", "--overwrite"]);
    api.apply(&service("last", ", vipgate.io/pool: reserved", ""));
    // The one that is free for longest.
    wait_addresses(&api, &policyd, "last", &["203.0.113.42"]);
    assert_eq!(addresses(&api, "foreign"), ["203.0.113.60"]);
    testbed.accounting.allow(["no_policy", "no_service"]);
    policyd.kill();
    testbed.stop("TERM");
}

/// One of several policy servers on the testbed's gateway.
fn start_server(testbed: &Testbed, api: &ApiServer, n: u16) -> Policyd {
    let (name, listen) = (format!("policyd-{n}"), format!("127.0.0.1:{}", 18010 + n));
    let source = source(api, POLICYD, "");
    let settings = PolicydConfig { name: &name, listen: &listen, metrics: 9480 + n, extra: &source };
    Policyd::start(&testbed.gateway, testbed.folder.path(), settings)
}

fn leads(policyd: &Policyd) -> bool {
    policyd.metric("vipgate_policyd_leader", "") > 0.5
}

/// Services from `first` on, of which every fifth has a sharing key.
fn services(first: u32, count: u32) -> String {
    let mut text = String::new();
    for n in first..first + count {
        let key = if n % 5 == 0 { ", vipgate.io/sharing-key: k" } else { "" };
        let service = service(&format!("s{n}"), key, "").replace("port: 80,", &format!("port: {},", 1000 + n));
        let _ = write!(text, "{service}");
    }
    text
}

/// Waits until all Services have an address, and checks that no two have one without the key.
#[track_caller]
fn check_all_assigned(api: &ApiServer, servers: &[&Policyd], count: usize) {
    let is_done = || all_addresses(api).values().filter(|addresses| addresses.len() == 1).count() == count;
    let log = || servers.iter().map(|server| server.log()).collect::<Vec<_>>().join("\n---\n");
    assert!(wait_for(Duration::from_secs(30), is_done), "{:?}\n{}", all_addresses(api), log());
    let mut users: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (name, addresses) in all_addresses(api) {
        users.entry(addresses[0].clone()).or_default().push(name);
    }
    let has_key = |name: &String| name[1..].parse::<u32>().unwrap().is_multiple_of(5);
    for (address, names) in users.iter().filter(|(_, names)| names.len() > 1) {
        assert!(names.iter().all(has_key), "{address}: {names:?}");
    }
}

#[test]
fn of_two_servers_one_leads_and_the_other_takes_over_within_five_seconds() {
    let testbed = Testbed::new("k8s-leader");
    let api = ApiServer::new(&testbed.gateway);
    grant_all_but(&api, None);
    api.apply(&POOLS.replace("203.0.113.30-203.0.113.31", "203.0.113.64/26"));
    let mut servers = [start_server(&testbed, &api, 0), start_server(&testbed, &api, 1)];
    api.apply(&services(0, 30));
    check_all_assigned(&api, &[&servers[0], &servers[1]], 30);
    assert_eq!(servers.iter().filter(|server| leads(server)).count(), 1);

    for round in 1..=3 {
        let leader = usize::from(leads(&servers[1]));
        // New Services come while the leader dies.
        let before = all_addresses(&api);
        api.apply(&services(30 * round, 5));
        servers[leader].process().signal("KILL").unwrap();
        let died = Instant::now();
        assert!(wait_for(Duration::from_secs(10), || leads(&servers[1 - leader])), "{}", servers[1 - leader].log());
        let elected = died.elapsed();
        api.apply(&services(30 * round + 5, 25));
        check_all_assigned(&api, &[&servers[1 - leader]], 30 * (usize::try_from(round).unwrap() + 1));
        println!("round {round}: another server leads after {elected:?}, all assigned after {:?}", died.elapsed());
        assert!(elected < Duration::from_secs(5), "{elected:?}");
        let after = all_addresses(&api);
        assert!(before.iter().all(|(name, addresses)| after.get(name) == Some(addresses)), "{before:?}\n{after:?}");
        servers[leader] = start_server(&testbed, &api, u16::try_from(leader).unwrap());
        if round == 1 {
            // 26 addresses more than 64 are needed from here on.
            set_ranges(&api, &["203.0.113.64/26", "203.0.113.128/26"]);
        }
    }

    // A clean end: the other one leads at once.
    let leader = usize::from(leads(&servers[1]));
    servers[leader].process().signal("TERM").unwrap();
    let ended = Instant::now();
    assert!(wait_for(Duration::from_secs(10), || leads(&servers[1 - leader])));
    println!("after a clean end: {:?}", ended.elapsed());
    assert!(ended.elapsed() < Duration::from_secs(2), "{:?}", ended.elapsed());
}
