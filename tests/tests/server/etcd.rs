//! etcd as the source: the same as files, and what etcd goes through costs nothing.

use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use vipgate::lab::peers::ask_udp;
use vipgate_tests::etcd::{ENDPOINT, Etcd};
use vipgate_tests::policyd::{Plan, Policyd};
use vipgate_tests::traffic::Traffic;
use vipgate_tests::{MORE, SERVER, VIP_B, World, state, wait_for};

/// URLs of three servers on the gateway's host: one reads files, two read etcd.
const URLS: [&str; 3] = ["http://127.0.0.1:18000", "http://127.0.0.1:18001", "http://127.0.0.1:18002"];

fn start(world: &World, folder: &Path, n: u16) -> Policyd {
    let (name, listen) = (format!("policyd-{n}"), format!("127.0.0.1:{}", 18000 + n));
    let source = format!("source: {{etcd: {{endpoints: [\"{ENDPOINT}\"]}}}}");
    let more = if n == 0 { "" } else { &source };
    Policyd::start(&world.gateway, folder, Plan { name: &name, listen: &listen, metrics: 9470 + n, more })
}

fn follow(world: &World, more: &str, n: usize) -> String {
    let cache = world.folder.path().join("policy.cache").display().to_string();
    format!("{more}\npolicy: {{server: {{url: \"{}\", cache: {cache}}}}}", URLS[n])
}

/// What a server says of itself.
fn status(world: &World, n: usize) -> Value {
    let (code, shown, stderr) = world.policy_status(&["--server", URLS[n], "-o", "json"]);
    assert_eq!(code, 0, "{stderr}");
    serde_json::from_str(&shown).unwrap()
}

/// Waits until a server serves what the gateway has in force; the version.
fn settled(world: &World, n: usize) -> String {
    let in_step = || status(world, n)["gateways"][0]["in_step"] == true;
    assert!(wait_for(Duration::from_secs(15), in_step), "{}", status(world, n));
    let version = status(world, n)["version"].as_str().unwrap().to_owned();
    assert_eq!(world.ask(&["status"])["policy"]["version"], version.as_str());
    version
}

/// What the gateway has in force, without what it counts.
fn in_force(world: &World) -> [Value; 2] {
    let mut endpoints = world.ask(&["endpoints"]);
    for endpoint in endpoints["endpoints"].as_array_mut().unwrap() {
        endpoint["sessions"] = Value::Null;
    }
    [endpoints, world.vips()]
}

fn p4_is_seen_by_its_vip(world: &World) {
    let so = || ask_udp(&world.pods[3], SERVER[0].parse().unwrap()).is_ok_and(|seen| seen == VIP_B[0]);
    assert!(wait_for(Duration::from_secs(15), so), "{}", world.log());
}

fn p4_is_uncovered(world: &World) {
    world.wait_uncovered(&world.pods[3], SERVER[0], "10.1.0.31");
}

#[test]
fn etcd_says_the_same_as_files_and_may_fail() {
    let (_folder, more) = state();
    let mut world = World::new("etcd");
    let folder = world.folder.path().to_owned();
    let mut etcd = Etcd::start(&world.gateway);
    let keys: Vec<String> =
        ["tenant-a.yaml", "tenant-b.yaml"].iter().flat_map(|name| etcd.put(&world.policy(name))).collect();
    assert!(keys.contains(&"/vipgate/EndpointSlice/tenant-a/api-ipv6".to_owned()), "{keys:?}");
    assert!(keys.contains(&"/vipgate/Namespace/tenant-b".to_owned()), "{keys:?}");
    let of_files = start(&world, &folder, 0);
    let first = start(&world, &folder, 1);

    // Files first. Then the gateway moves to etcd, and there is nothing to tell it.
    world.start_alone(&follow(&world, &more, 0));
    let version = settled(&world, 0);
    let by_files = in_force(&world);
    let traffic = Traffic::start(&world);
    world.end("KILL");
    world.start_alone(&follow(&world, &more, 1));
    assert_eq!(settled(&world, 1), version);
    assert_eq!(in_force(&world), by_files);
    let responses = |server: &Policyd| server.metric("vipgate_policyd_responses_total", "");
    // The settings, which say that this is all, and that of gateways, nodes and the cluster's addresses there are none.
    assert!((responses(&first) - 4.0).abs() < 0.5, "what it has is told again: {}", responses(&first));
    of_files.kill();
    traffic.end_after_absence();

    // Put and delete.
    let traffic = Traffic::start(&world);
    let added = etcd.put(MORE).remove(0);
    p4_is_seen_by_its_vip(&world);
    assert_ne!(settled(&world, 1), version);
    etcd.delete(&added);
    p4_is_uncovered(&world);
    assert_eq!(settled(&world, 1), version, "the same again");

    // etcd dies: said, and nothing else happens.
    etcd.kill();
    let lost = || status(&world, 1)["source"]["connected"] == false;
    assert!(wait_for(Duration::from_secs(20), lost), "{}", first.log());
    let source = status(&world, 1)["source"].clone();
    assert!(source["error"].as_str().unwrap().contains(ENDPOINT), "{source}");
    let (_, table, _) = world.policy_status(&["--server", URLS[1]]);
    assert!(table.contains("CAN'T BE ASKED: etcd can't be asked"), "{table}");
    assert!(first.metric("vipgate_policyd_source_connected", "") < 0.5);
    first.wait_for_log(&["source_lost"]);
    assert_eq!(world.server_status()["connected"], true, "the server itself is there");
    assert_eq!(settled(&world, 1), version);

    // It comes back with changes whose history it has forgotten.
    etcd.start_again();
    etcd.put(MORE);
    etcd.put(&MORE.replace("name: more", "name: gone"));
    etcd.delete("/vipgate/EndpointSlice/tenant-b/gone");
    etcd.compact();
    p4_is_seen_by_its_vip(&world);
    assert!(wait_for(Duration::from_secs(10), || status(&world, 1)["source"]["connected"] == true));
    first.wait_for_log(&["source_found"]);
    etcd.delete(&added);
    p4_is_uncovered(&world);
    assert_eq!(settled(&world, 1), version);
    traffic.end();

    // A second server on the same etcd; the gateway moves to it, and the first one dies.
    let second = start(&world, &folder, 2);
    assert_eq!(status(&world, 2)["version"], version.as_str());
    let traffic = Traffic::start(&world);
    world.end("KILL");
    world.start_alone(&follow(&world, &more, 2));
    assert_eq!(settled(&world, 2), version);
    assert!((responses(&second) - 4.0).abs() < 0.5, "what it has is told again: {}", responses(&second));
    traffic.end_after_absence();
    let traffic = Traffic::start(&world);
    first.kill();
    etcd.put(MORE);
    p4_is_seen_by_its_vip(&world);
    settled(&world, 2);
    traffic.end();
    world.check_frames();
}
