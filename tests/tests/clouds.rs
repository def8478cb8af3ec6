//! VIPs in a cloud: their packets have private addresses outside, another one at each gateway, and a failover is a request to the cloud.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use vipgate_cloud_testkit::aws::{ACCESS_KEY, FakeAws};
use vipgate_tests::cluster::{Captures, Cluster, Download, SERVER, sleep_ms};
use vipgate_tests::fake_cloud::FakeCloud;
use vipgate_tests::verifier::Packet;
use vipgate_tests::wait_for;

/// The VIP, which no interface and no route of the testbed has.
const VIP: &str = "192.0.2.40";
const API: &str = "10.3.0.254:8080";

fn zone(number: usize) -> &'static str {
    ["eu-west-1a", "eu-west-1b"][number]
}

/// A cluster of two gateways in a cloud, whose pod p4 is behind a Service with the VIP.
fn start() -> (Cluster, FakeCloud) {
    start_with("cloud", &[VIP], &pool(AT_NIC), &tenant())
}

/// A cluster of two gateways in a cloud that has these addresses.
fn start_with(tag: &str, addresses: &[&str], pool: &str, tenant: &str) -> (Cluster, FakeCloud) {
    let mut cluster = Cluster::new(tag, 2);
    let mut cloud = FakeAws::new();
    let mut manifests = String::new();
    for number in 0..2 {
        cloud.set_subnet(zone(number), "203.0.113.0/24".parse().unwrap());
        let (instance, eni) = cloud.add_instance("c7gn.xlarge", zone(number));
        // That of the gateway's outside interface.
        cloud.set_primary(&eni, [203, 0, 113, number as u8 + 1].into());
        manifests.push_str(&gateway(number, &instance));
    }
    for address in addresses {
        cloud.add_address(address.parse().unwrap(), &[("vipgate", "public")]);
    }
    manifests.push_str(pool);
    cluster.write_policy("gateways.yaml", &manifests);
    cluster.write_policy("tenants.yaml", tenant);
    let folder = cluster.folder.path().to_owned();
    let cloud = FakeCloud::start(cloud, &cluster.management, API.parse().unwrap(), &cluster.outside, folder);
    let keys = ["env".to_owned(), format!("AWS_ACCESS_KEY_ID={ACCESS_KEY}"), "AWS_SECRET_ACCESS_KEY=secret".to_owned()];
    cluster.start_policyd_with(&keys, &format!("cloud: {{cluster: test, endpoints: {{aws: \"http://{API}\"}}}}"));
    cluster.start_gateways("");
    (cluster, cloud)
}

fn gateway(number: usize, instance: &str) -> String {
    format!(
        "---\napiVersion: vipgate.io/v1alpha1\nkind: VipGateway\nmetadata: {{name: gw-{0}}}\n\
         spec: {{peerAddress: 10.2.0.{0}, providerID: \"aws:///{1}/{instance}\"}}\n",
        number + 1,
        zone(number)
    )
}

/// VIPs have private addresses of their own, of the segment of the gateways' outside interfaces.
const AT_NIC: &str = "private: [203.0.113.128/26]";

fn pool(options: &str) -> String {
    format!(
        "---\napiVersion: vipgate.io/v1alpha1\nkind: AddressPool\nmetadata: {{name: public}}\n\
         spec: {{reuseAfter: 0s, provider: {{aws: {{region: eu-west-1, tags: {{vipgate: public}}}}, {options}}}}}\n"
    )
}

fn tenant() -> String {
    format!(
        "---\napiVersion: v1\nkind: Service\n\
         metadata: {{name: web, namespace: tenant-c, annotations: {{vipgate.io/egress: \"true\"}}}}\n\
         spec: {{type: LoadBalancer, ports: [{{name: tcp, port: 80, targetPort: 7700, protocol: TCP}}]}}\n\
         status: {{loadBalancer: {{ingress: [{{ip: {VIP}}}]}}}}\n\
         ---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
         metadata: {{name: web-1, namespace: tenant-c, labels: {{kubernetes.io/service-name: web}}}}\n\
         addressType: IPv4\nports: [{{name: tcp, port: 7700}}]\n\
         endpoints: [{{addresses: [10.1.0.31], conditions: {{ready: true}}}}]\n"
    )
}

/// A policy for a pod, with an address of the pool.
fn policy(name: &str, pod: &str) -> String {
    format!(
        "---\napiVersion: v1\nkind: Pod\nmetadata: {{name: {name}-0, namespace: tenant-c, labels: {{app: {name}}}}}\n\
         status: {{podIP: {pod}, podIPs: [{{ip: {pod}}}]}}\n\
         ---\napiVersion: vipgate.io/v1alpha1\nkind: EgressPolicy\nmetadata: {{name: {name}, namespace: tenant-c}}\n\
         spec: {{selectors: [{{podSelector: {{matchLabels: {{app: {name}}}}}}}], pools: [{{name: public}}]}}\n"
    )
}

/// The gateway whose NIC has the VIP.
fn home(cloud: &FakeCloud) -> Option<usize> {
    let (eni, _) = cloud.with(|cloud| cloud.routes()).get(&VIP.parse::<IpAddr>().unwrap())?.clone();
    cloud.with(|cloud| (0..2).find(|number| cloud.zone_of(&eni).as_deref() == Some(zone(*number))))
}

fn wait_home(cloud: &FakeCloud, wanted: impl Fn(usize) -> bool) -> usize {
    assert!(wait_for(Duration::from_secs(15), || home(cloud).is_some_and(&wanted)), "at {:?}", home(cloud));
    home(cloud).unwrap()
}

#[test]
fn a_download_goes_on_when_the_cloud_moves_the_vip_of_a_killed_gateway() {
    let (mut cluster, cloud) = start();
    let first = wait_home(&cloud, |_| true);
    // Both gateways have a private address for it, so that the failover is one request.
    assert!(wait_for(Duration::from_secs(10), || cloud.with(|cloud| cloud.prepared(VIP.parse().unwrap())) == 2));
    sleep_ms(1_000);
    let place = (&cluster.server, "eth0".to_owned());
    let capture = Captures::start(cluster.folder.path(), "server", &[place], "ip and tcp");
    let download = Download::start(&cluster.server, SERVER[0], &cluster.pods[3], 20_000_000, 4_000_000);
    sleep_ms(1_500);
    cloud.take_actions();
    let killed = Instant::now();
    cluster.gateways[first].kill();
    cluster.route_via(&cluster.indices_except(first));
    wait_home(&cloud, |number| number != first);
    println!("moved after {:?}", killed.elapsed());
    let actions = cloud.take_actions();
    let gap = download.end();
    println!("longest gap {gap} s; requests: {actions:?}");
    assert!(gap < 4.0, "{gap}");
    let changes = actions.iter().filter(|action| !action.starts_with("Describe"));
    assert_eq!(changes.collect::<Vec<_>>(), ["AssociateAddress"]);
    let frames = capture.end();
    let sources = frames.iter().filter_map(|frame| Some(Packet::in_frame(&frame.bytes)?.addresses[0].to_string()));
    let sources: BTreeSet<String> = sources.collect();
    assert_eq!(sources, [VIP.to_owned(), SERVER[0].to_owned()].into(), "the server sees the VIP alone");
    let attached = cluster.policyd.as_ref().unwrap().metric("vipgate_cloud_attach_seconds", "");
    println!("attached after {attached} s");
    assert!(attached < 1.0, "{attached}");
}

/// Downloads from the server to pod p4; returns the addresses of its packets at the server.
fn addresses_of_download(cluster: &Cluster) -> BTreeSet<String> {
    let place = (&cluster.server, "eth0".to_owned());
    let capture = Captures::start(cluster.folder.path(), "server", &[place], "ip and tcp");
    let download = Download::start(&cluster.server, SERVER[0], &cluster.pods[3], 100_000, 1_000_000);
    download.end();
    let frames = capture.end();
    let sources = frames.iter().filter_map(|frame| Some(Packet::in_frame(&frame.bytes)?.addresses[0].to_string()));
    sources.collect()
}

#[test]
fn a_vip_can_have_the_address_of_the_nic_itself() {
    let (mut cluster, cloud) = start_with("instance", &[VIP], &pool("associate: instance"), &tenant());
    let first = wait_home(&cloud, |_| true);
    sleep_ms(1_000);
    let expected: BTreeSet<String> = [VIP, SERVER[0]].map(str::to_owned).into();
    cluster.route_via(&[first]);
    assert_eq!(addresses_of_download(&cluster), expected);
    // Pods may reach any gateway: the other one tunnels to the VIP's owner.
    cluster.route_via(&cluster.indices_except(first));
    assert_eq!(addresses_of_download(&cluster), expected);
    cluster.gateways[first].kill();
    wait_home(&cloud, |number| number != first);
    sleep_ms(1_000);
    assert_eq!(addresses_of_download(&cluster), expected);
}

/// The first address that the fake allocates.
const ALLOCATED: &str = "192.0.2.100";

#[test]
fn an_address_is_allocated_for_a_policy_that_lacks_one_up_to_the_limit() {
    let reserve = format!("{AT_NIC}, ownership: reserve, max: 1");
    let (cluster, cloud) = start_with("reserve", &[], &pool(&reserve), &policy("first", "10.1.0.31"));
    let policyd = cluster.policyd.as_ref().unwrap();
    let addresses =
        |state: &str| policyd.metric("vipgate_cloud_addresses", &format!("pool=\"public\",state=\"{state}\""));
    assert!(wait_for(Duration::from_secs(20), || addresses("attached") > 0.0), "{}", policyd.log());
    sleep_ms(1_000);
    let place = (&cluster.server, "eth0".to_owned());
    let capture = Captures::start(cluster.folder.path(), "server", &[place], "ip and tcp");
    Download::start(&cluster.server, SERVER[0], &cluster.pods[3], 100_000, 1_000_000).end();
    let frames = capture.end();
    let sources = frames.iter().filter_map(|frame| Some(Packet::in_frame(&frame.bytes)?.addresses[0].to_string()));
    assert_eq!(sources.collect::<BTreeSet<_>>(), [ALLOCATED.to_owned(), SERVER[0].to_owned()].into());
    // A second one is beyond the limit: nothing is allocated, and it is said.
    cluster.write_policy("more.yaml", &policy("second", "10.1.0.21"));
    assert!(wait_for(Duration::from_secs(10), || addresses("lacking") > 0.0), "{}", policyd.log());
    let actions = cloud.take_actions();
    assert_eq!(actions.iter().filter(|action| *action == "AllocateAddress").count(), 1, "{actions:?}");
    // It gets the address when the first one is gone.
    let first = policy("first", "10.1.0.31");
    let (pod, _) = first[4..].split_once("---\n").unwrap();
    cluster.write_policy("tenants.yaml", pod);
    let owner = || cloud.with(|cloud| cloud.owner_of(ALLOCATED.parse().unwrap()));
    let second = Some("EgressPolicy tenant-c/second".to_owned());
    let is_second = || addresses("lacking") == 0.0 && addresses("attached") > 0.0 && owner() == second;
    assert!(wait_for(Duration::from_secs(20), is_second), "{:?}: {}", owner(), policyd.log());
}
