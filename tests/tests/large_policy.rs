//! Large policies: thousands of Services are loaded and changed while the gateway stays responsive. Special files
//! among the manifests.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fmt::Write as _;
use std::time::{Duration, Instant};
use std::{fs, thread};

use vipgate_lab as lab;
use vipgate_tests::policyd::{Policyd, PolicydConfig};
use vipgate_tests::{EXTRA_ENDPOINT, Testbed, wait_for};

/// Endpoints per Service of the large policy.
const ENDPOINTS: u32 = 10;
/// Maximum stall of the control thread, seconds.
const MAX_STALL: f64 = 0.1;

/// Number of Services of the large policy: `VIPGATE_SERVICES`, default 2000.
fn services() -> u32 {
    std::env::var("VIPGATE_SERVICES").ok().and_then(|text| text.parse().ok()).unwrap_or(2_000)
}

/// Manifests of `services` Services, whose endpoint addresses begin at the number `first`.
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

fn endpoint_count(testbed: &Testbed) -> f64 {
    testbed.metric("vipgate_endpoints", "")
}

#[test]
fn the_control_thread_stays_responsive_during_large_policy_updates() {
    let mut testbed = Testbed::with_gateway("large");
    let (base, count) = (endpoint_count(&testbed), services());
    // Twice: the policy is added, then all of its endpoints are replaced.
    for first in [1, 1 + count * ENDPOINTS] {
        let before = testbed.metric("vipgate_policy_updates_total", "result=\"applied\"");
        testbed.write_policy("large.yaml", &manifests(count, first));
        let (mut queries, mut slowest) = (0, Duration::ZERO);
        let is_applied = || {
            let started = Instant::now();
            testbed.query(&["status"]);
            slowest = slowest.max(started.elapsed());
            queries += 1;
            testbed.metric("vipgate_policy_updates_total", "result=\"applied\"") > before
        };
        assert!(wait_for(Duration::from_secs(90), is_applied), "{}", testbed.log());
        assert!(queries > 1, "applied before the second query: the policy is too small for this test");
        assert!(
            (endpoint_count(&testbed) - base - f64::from(count * ENDPOINTS)).abs() < 0.5,
            "{}",
            endpoint_count(&testbed)
        );
        for command in ["endpoints", "services", "vips", "ports"] {
            testbed.query(&[command]);
        }
        // By now the old tables have been freed.
        thread::sleep(Duration::from_millis(1500));
        let stall = |time| testbed.metric("vipgate_control_loop_stall_seconds", time);
        let (worked, elapsed) = (stall("time=\"worked\""), stall("time=\"elapsed\""));
        println!("stalls: worked {worked}, elapsed {elapsed}; slowest command {slowest:?} of {queries}");
        assert!(worked < MAX_STALL, "the control thread worked for {worked} s without a pause, {elapsed} s elapsed");
    }
    // SIGTERM while it compiles.
    testbed.write_policy("large.yaml", &manifests(count, 1));
    thread::sleep(Duration::from_millis(400));
    let started = Instant::now();
    testbed.process().signal("TERM").unwrap();
    testbed.wait_exit();
    let took = started.elapsed();
    println!("exited {took:?} after SIGTERM");
    assert!(took < Duration::from_secs(1), "{took:?}: {}", testbed.log());
    assert!(testbed.log().contains("\"event\":\"stopped\""), "{}", testbed.log());
}

#[test]
fn special_files_do_not_block_other_manifests() {
    let mut testbed = Testbed::new("pipes");
    let policy = testbed.folder.path().join("policy");
    lab::run(&["mkfifo", &policy.join("pipe.yaml").display().to_string()]).unwrap();
    std::os::unix::fs::symlink("/dev/zero", policy.join("device.yaml")).unwrap();
    let mut server = Policyd::start(&testbed.gateway, testbed.folder.path(), PolicydConfig::default());
    testbed.start_gateway(&format!("policy: {{files: [{}]}}", policy.display()));
    let before = (endpoint_count(&testbed), server.metric("vipgate_policyd_resources", ""));
    testbed.write_policy("more.yaml", EXTRA_ENDPOINT);
    let follows = || endpoint_count(&testbed) > before.0 && server.metric("vipgate_policyd_resources", "") > before.1;
    assert!(wait_for(Duration::from_secs(10), follows), "{}\n{}", testbed.log(), server.log());
    let (_, stdout, stderr) = testbed.command(&["check", &policy.display().to_string()]);
    for words in ["it is a pipe, not a regular file", "it is a device, not a regular file"] {
        assert!(stdout.contains(words) || stderr.contains(words), "{stdout}{stderr}");
    }
    let started = Instant::now();
    server.process().signal("TERM").unwrap();
    testbed.process().signal("TERM").unwrap();
    server.process().wait(Duration::from_secs(2)).expect("the policy server exits");
    testbed.wait_exit();
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
}

#[test]
fn a_pipe_as_policy_cache_is_rejected() {
    let mut testbed = Testbed::new("cache");
    let pipe = testbed.folder.path().join("pipe").display().to_string();
    lab::run(&["mkfifo", &pipe]).unwrap();
    let extra = format!("policy: {{server: {{url: \"http://127.0.0.1:18000\", cache: {pipe}}}}}");
    testbed.spawn_gateway(&extra);
    let is_rejected = || testbed.log().contains("it is a pipe, not a regular file");
    let rejected = wait_for(Duration::from_secs(10), is_rejected);
    assert!(rejected, "{}", testbed.log());
    fs::remove_file(&pipe).unwrap();
}
