//! The server is gone, or the network to it.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use vipgate::lab::peers::ask_udp;
use vipgate_tests::policyd::{Plan, Policyd};
use vipgate_tests::traffic::Traffic;
use vipgate_tests::{MORE, SERVER, VIP_A, VIP_B, World, state, wait_for};

/// What p2 leaves with, and what p4 does.
fn identities(world: &World) -> [String; 2] {
    [1, 3].map(|pod| ask_udp(&world.pods[pod], SERVER[0].parse().unwrap()).unwrap())
}

/// The gateway says in every way that it has lost its server, and how old its policy is.
fn says_it_is_alone(world: &World, reason: &str) {
    assert_eq!(world.server_status()["has_policy"], true);
    // At first it says how the connection was lost, then why there is no other.
    let says = || world.server_status()["error"].as_str().unwrap().contains(reason);
    assert!(wait_for(Duration::from_secs(5), says), "{}", world.server_status());
    let socket = world.folder.path().join("gateway.sock").display().to_string();
    let (_, shown, _) = world.command(&["status", "--socket", &socket]);
    let line = shown.lines().find(|line| line.contains("NOT CONNECTED")).unwrap_or_else(|| panic!("{shown}"));
    assert!(line.contains(reason) && line.contains("the policy in force was the server's"), "{line}");
    assert!(world.metric("vipgate_policy_connected", "") < 0.5);
}

#[test]
fn a_server_that_is_killed_costs_nothing_and_what_it_missed_comes_when_it_is_back() {
    let (_folder, more) = state();
    let mut world = World::new("killed");
    world.served = true;
    world.start(&more);
    assert!(world.metric("vipgate_policy_connected", "") > 0.5);
    let vips = world.vips();
    let traffic = Traffic::start(&world);
    world.policyd.take().unwrap().kill();
    world.wait_connected(false, Duration::from_secs(5));
    says_it_is_alone(&world, "refused");
    assert!(world.log().contains("policy_server_lost"), "{}", world.log());
    let older = || world.metric("vipgate_policy_age_seconds", "") >= 2.0;
    assert!(wait_for(Duration::from_secs(10), older), "the policy grows old");
    traffic.end();

    // Without the server the gateway comes back with what it had.
    let traffic = Traffic::start(&world);
    world.end("KILL");
    let begun = Instant::now();
    world.start_alone(&more);
    assert!(begun.elapsed() < Duration::from_secs(8), "{:?}", begun.elapsed());
    assert!(!world.log().contains("no_policy"), "it had a policy at once: {}", world.log());
    assert_eq!(world.vips(), vips);
    let unreachable = || world.log().contains("policy_server_unreachable");
    assert!(wait_for(Duration::from_secs(5), unreachable), "{}", world.log());
    says_it_is_alone(&world, "refused");
    assert!(world.metric("vipgate_policy_age_seconds", "") >= 2.0, "the age outlives the process");
    assert_eq!(world.answer("/readyz"), 200);

    // Changed meanwhile: p4 is tenant B's, and p2 is nobody's.
    world.write_policy("more.yaml", MORE);
    let tenant_a = world.policy("tenant-a.yaml");
    world.write_policy("tenant-a.yaml", &tenant_a.replace("[10.1.0.12]", "[10.1.0.99]"));
    assert_eq!(identities(&world), [VIP_A[0], "10.1.0.31"], "nobody has told the gateway");
    world.start_policyd("");
    world.wait_connected(true, Duration::from_secs(15));
    world.wait_in_force();
    traffic.end_after_absence();
    assert_eq!(identities(&world), ["10.1.0.12", VIP_B[0]]);
    assert!(world.metric("vipgate_policy_connected", "") > 0.5);
    assert!(world.metric("vipgate_policy_updates_total", "result=\"applied\"") >= 2.0);
    assert!(world.metric("vipgate_policy_updates_total", "result=\"rejected\"") < 0.5);
    world.check_frames();
}

#[test]
fn a_name_that_nobody_resolves_keeps_nobody_from_ending() {
    let mut world = World::new("unnamed");
    // The resolver asks somebody who never answers, for ten seconds.
    let rules = "add table inet dns; add chain inet dns in { type filter hook input priority 0; }; \
                 add rule inet dns in udp dport 53 drop";
    world.router.output(&["nft", rules]).unwrap();
    let folder = Path::new("/etc/netns").join(world.gateway.netns());
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("resolv.conf"), "nameserver 203.0.113.254\n").unwrap();
    let cache = world.folder.path().join("policy.cache").display().to_string();
    let url = "http://policy.example:18000";
    world.launch(&format!("policy: {{server: {{url: \"{url}\", cache: {cache}}}}}"));
    let tried = wait_for(Duration::from_secs(15), || world.log().contains("policy_server_unreachable"));
    let begun = Instant::now();
    world.end("TERM");
    let took = begun.elapsed();
    let begun = Instant::now();
    let (code, _, stderr) = world.policy_status(&["--server", url]);
    let asked = begun.elapsed();
    fs::remove_dir_all(&folder).unwrap();
    assert!(tried, "{}", world.log());
    assert!(took < Duration::from_secs(1), "{took:?}");
    // It says so after five, and then it ends.
    assert!(
        code == 1 && stderr.contains("no connection within 5 s") && asked < Duration::from_secs(7),
        "{asked:?} {stderr}"
    );
}

/// The policy server's port at the router, closed to everybody: packets vanish.
const CUT: &str = "add table inet cut; add chain inet cut in { type filter hook input priority 0; }; \
                   add rule inet cut in tcp dport 18000 drop";

#[test]
fn a_network_that_is_cut_is_noticed_and_healed() {
    const URL: &str = "http://203.0.113.254:18000";
    let mut world = World::new("cut");
    let plan = Plan { listen: "203.0.113.254:18000", ..Plan::default() };
    let policyd = Policyd::start(&world.router, world.folder.path(), plan);
    let cache = world.folder.path().join("policy.cache").display().to_string();
    world.start_alone(&format!("policy: {{server: {{url: \"{URL}\", cache: {cache}}}}}"));
    let traffic = Traffic::start(&world);
    world.router.output(&["nft", CUT]).unwrap();
    let begun = Instant::now();
    world.wait_connected(false, Duration::from_secs(15));
    let noticed = begun.elapsed();
    assert!(noticed < Duration::from_secs(12), "{noticed:?}");
    says_it_is_alone(&world, "");
    assert_ne!(world.server_status()["error"], "");
    // The server notices as well, and says so.
    policyd.wait_for_log(&["gateway_lost", "gw-test"]);
    world.write_policy("more.yaml", MORE);
    thread::sleep(Duration::from_millis(500));
    assert_eq!(identities(&world)[1], "10.1.0.31", "nobody has told the gateway");
    world.router.output(&["nft", "delete table inet cut"]).unwrap();
    world.wait_connected(true, Duration::from_secs(30));
    let told = || identities(&world)[1] == VIP_B[0];
    assert!(wait_for(Duration::from_secs(10), told), "{}", world.log());
    traffic.end();
    let (code, shown, _) = world.policy_status(&["--server", URL, "-o", "json", "--wait", "5"]);
    let shown: Value = serde_json::from_str(&shown).unwrap();
    assert!(code == 0 && shown["gateways"][0]["in_step"] == true, "{shown}");
    world.check_frames();
}
