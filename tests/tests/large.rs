//! A policy of thousands of Services comes and changes while the gateway has other things to do; and files that are none.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fmt::Write as _;
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use vipgate::lab;
use vipgate_tests::policyd::{Plan, Policyd};
use vipgate_tests::{MORE, World, wait_for};

/// Endpoints of each Service of the large policy.
const ENDPOINTS: u32 = 10;
/// As long as the control thread may work without looking up.
const STALL: f64 = 0.1;

/// Services of the large policy: `VIPGATE_SERVICES`, or so many.
fn services() -> u32 {
    std::env::var("VIPGATE_SERVICES").ok().and_then(|text| text.parse().ok()).unwrap_or(2_000)
}

/// Manifests of so many Services, whose endpoints begin at another number.
fn manifests(services: u32, first: u32) -> String {
    let mut text = "apiVersion: v1\nkind: Namespace\nmetadata: {name: large}\n".to_owned();
    let address = |net: u32, n: u32| format!("{net}.{}.{}.{}", n >> 16 & 255, n >> 8 & 255, n & 255);
    for service in 0..services {
        write!(
            text,
            "---\napiVersion: v1\nkind: Service\n\
             metadata: {{name: s{service}, namespace: large, annotations: {{vipgate.io/egress: \"true\"}}}}\n\
             spec: {{type: LoadBalancer, ports: [{{name: http, port: 80, targetPort: 8080, protocol: TCP}}]}}\n\
             status: {{loadBalancer: {{ingress: [{{ip: {}}}]}}}}\n\
             ---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
             metadata: {{name: s{service}-0, namespace: large, labels: {{kubernetes.io/service-name: s{service}}}}}\n\
             addressType: IPv4\nports: [{{name: http, port: 8080, protocol: TCP}}]\nendpoints:\n",
            address(100, 1 + service),
        )
        .unwrap();
        for endpoint in service * ENDPOINTS..(service + 1) * ENDPOINTS {
            writeln!(text, "  - {{addresses: [{}], conditions: {{ready: true}}}}", address(101, first + endpoint))
                .unwrap();
        }
    }
    text
}

fn endpoints(world: &World) -> f64 {
    world.metric("vipgate_endpoints", "")
}

#[test]
fn the_control_thread_goes_on_while_a_large_policy_comes_and_changes() {
    let mut world = World::with_gateway("large");
    let (few, count) = (endpoints(&world), services());
    // Twice: it comes, and each of its endpoints becomes another one.
    for first in [1, 1 + count * ENDPOINTS] {
        let before = world.metric("vipgate_policy_updates_total", "result=\"applied\"");
        world.write_policy("large.yaml", &manifests(count, first));
        let (mut asked, mut slowest) = (0, Duration::ZERO);
        let is_there = || {
            let begun = Instant::now();
            world.ask(&["status"]);
            slowest = slowest.max(begun.elapsed());
            asked += 1;
            world.metric("vipgate_policy_updates_total", "result=\"applied\"") > before
        };
        assert!(wait_for(Duration::from_secs(90), is_there), "{}", world.log());
        assert!(asked > 1, "it comes at once: too small to show anything");
        assert!((endpoints(&world) - few - f64::from(count * ENDPOINTS)).abs() < 0.5, "{}", endpoints(&world));
        for command in ["endpoints", "services", "vips", "ports"] {
            world.ask(&[command]);
        }
        // Old tables are freed by now.
        thread::sleep(Duration::from_millis(1500));
        let stall = |time| world.metric("vipgate_control_loop_stall_seconds", time);
        let (worked, elapsed) = (stall("time=\"worked\""), stall("time=\"elapsed\""));
        println!("stalls: worked {worked}, elapsed {elapsed}; slowest command {slowest:?} of {asked}");
        assert!(worked < STALL, "the control thread worked for {worked} s at a stretch, {elapsed} s in all");
    }
    // It is told to stop while it compiles.
    world.write_policy("large.yaml", &manifests(count, 1));
    thread::sleep(Duration::from_millis(400));
    let begun = Instant::now();
    world.process().signal("TERM").unwrap();
    world.wait_end();
    let took = begun.elapsed();
    println!("ended {took:?} after it was told to");
    assert!(took < Duration::from_secs(1), "{took:?}: {}", world.log());
    assert!(world.log().contains("\"event\":\"stopped\""), "{}", world.log());
}

#[test]
fn what_is_no_file_keeps_nobody_from_following_the_others() {
    let mut world = World::new("pipes");
    let policy = world.folder.path().join("policy");
    lab::run(&["mkfifo", &policy.join("pipe.yaml").display().to_string()]).unwrap();
    std::os::unix::fs::symlink("/dev/zero", policy.join("device.yaml")).unwrap();
    let mut server = Policyd::start(&world.gateway, world.folder.path(), Plan::default());
    world.start_alone(&format!("policy: {{files: [{}]}}", policy.display()));
    let before = (endpoints(&world), server.metric("vipgate_policyd_resources", ""));
    world.write_policy("more.yaml", MORE);
    let follows = || endpoints(&world) > before.0 && server.metric("vipgate_policyd_resources", "") > before.1;
    assert!(wait_for(Duration::from_secs(10), follows), "{}\n{}", world.log(), server.log());
    let (_, stdout, stderr) = world.command(&["check", &policy.display().to_string()]);
    for words in ["it is a pipe, not a regular file", "it is a device, not a regular file"] {
        assert!(stdout.contains(words) || stderr.contains(words), "{stdout}{stderr}");
    }
    let begun = Instant::now();
    server.process().signal("TERM").unwrap();
    world.process().signal("TERM").unwrap();
    server.process().wait(Duration::from_secs(2)).expect("it ends");
    world.wait_end();
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
}

#[test]
fn a_cache_that_is_a_pipe_is_refused() {
    let mut world = World::new("cache");
    let pipe = world.folder.path().join("pipe").display().to_string();
    lab::run(&["mkfifo", &pipe]).unwrap();
    let more = format!("policy: {{server: {{url: \"http://127.0.0.1:18000\", cache: {pipe}}}}}");
    world.launch(&more);
    let refused = || world.log().contains("it is a pipe, not a regular file");
    let is_refused = wait_for(Duration::from_secs(10), refused);
    assert!(is_refused, "{}", world.log());
    fs::remove_file(&pipe).unwrap();
}
