//! Hostile clients: idle connections don't block commands, and admin commands require authorization.

use std::io;
use std::net::TcpStream;
use std::process::Command;
use std::time::Instant;

use vipgate::listener::raise_descriptor_limit;
use vipgate_tests::Testbed;
use vipgate_tests::policyd::{Policyd, PolicydConfig};
use vipgate_tests::tls::{Certificate, CertificateAuthority, tomorrow};

#[test]
fn idle_metrics_connections_do_not_block_commands() {
    raise_descriptor_limit();
    let testbed = Testbed::with_gateway("idle");
    // The default descriptor limit of most systems.
    let limit = ["--pid", &testbed.process().id().to_string(), "--nofile=1024:1024"].map(str::to_owned);
    assert!(Command::new("prlimit").args(limit).status().unwrap().success());
    let started = Instant::now();
    let connect = || (0..2000).map(|_| TcpStream::connect("127.0.0.1:9469")).collect::<io::Result<Vec<_>>>();
    let idle = testbed.gateway.run(connect).join().unwrap().unwrap();
    assert_eq!(testbed.query(&["status"])["ready"], true);
    assert_eq!([testbed.http_status("/readyz"), testbed.http_status("/healthz")], [200, 200]);
    let open = testbed.metric("vipgate_connections", "listener=\"metrics\"");
    assert!((1.0..=64.0).contains(&open), "{open} connections of one address");
    assert!(testbed.metric("vipgate_connections_refused_total", "superseded") > 1900.0);
    // One log line at once, and one every ten seconds.
    let log_lines = testbed.log().matches("\"event\":\"connections_refused\"").count() as u64;
    assert!((1..=1 + started.elapsed().as_secs() / 10).contains(&log_lines), "{}", testbed.log());
    drop(idle);
}

#[test]
fn admin_commands_require_authorization() {
    const URL: &str = "https://127.0.0.1:18000";
    let mut testbed = Testbed::new("orders");
    let folder = testbed.folder.path().to_owned();
    let ours = CertificateAuthority::new(&folder, "ours");
    let server = ours.sign("server", &["127.0.0.1", "localhost"], tomorrow());
    let gateway = ours.sign("gateway", &["gw-test"], tomorrow());
    let operator = ours.sign("operator", &["operator"], tomorrow());
    let tls = format!("tls: {{ca: {}, cert: {}, key: {}}}", ours.ca_file, server.cert, server.key);
    let rejected_command = |testbed: &Testbed, own: &Certificate| {
        let arguments = ["--server", URL, "--ca", &ours.ca_file, "--cert", &own.cert, "--key", &own.key];
        let (code, _, stderr) = testbed.command(&[&["policy", "accept-empty"], &arguments[..]].concat());
        assert_eq!(code, 1, "{stderr}");
        stderr
    };
    testbed.start_policyd(&tls);
    let cache = folder.join("policy.cache").display().to_string();
    let files = format!("ca: {}, cert: {}, key: {}", ours.ca_file, gateway.cert, gateway.key);
    testbed.start_gateway(&format!("policy: {{server: {{url: \"{URL}\", cache: {cache}, {files}}}}}"));
    let stderr = rejected_command(&testbed, &gateway);
    assert!(stderr.contains("is that of gateway gw-test, and gateways may not do this"), "{stderr}");
    testbed.policyd().wait_for_log(&["order_refused", "accept-empty", "gw-test", "127.0.0.1:"]);
    assert!(testbed.policyd().metric("vipgate_policyd_orders_refused_total", "") > 0.0);
    // The operator is authorized, but no source is empty.
    let stderr = rejected_command(&testbed, &operator);
    assert!(!stderr.contains("may do this") && stderr.contains("empty"), "{stderr}");
    testbed.stop("TERM");
    testbed.policyd.take().unwrap().kill();
    testbed.start_policyd(&format!("{tls}\nadmins: [root]"));
    let stderr = rejected_command(&testbed, &operator);
    assert!(stderr.contains("is valid for operator, none of which is in the server's `admins`"), "{stderr}");
    testbed.policyd.take().unwrap().kill();

    // Without certificates, the server's own host is authorized by its address.
    let listen = "203.0.113.1:18000";
    let policyd = Policyd::start(&testbed.gateway, &folder, PolicydConfig { listen, ..PolicydConfig::default() });
    let arguments = ["policy", "accept-empty", "--server", &format!("http://{listen}")].map(str::to_owned);
    let arguments = arguments.each_ref().map(String::as_str);
    let (code, _, stderr) = testbed.command(&arguments);
    assert!(code == 1 && stderr.contains("empty") && !stderr.contains("own host only"), "{stderr}");
    let program = vipgate_tests::binary().display().to_string();
    let error = testbed.router.output(&[&[program.as_str()], &arguments[..]].concat()).unwrap_err().to_string();
    assert!(error.contains("from the server's own host only"), "{error}");
    policyd.wait_for_log(&["order_refused", "203.0.113.254:"]);
}
