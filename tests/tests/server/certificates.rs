//! TLS between gateway and server: who is let in, who isn't and why, and certificates that change.

use std::time::{Duration, SystemTime};

use vipgate::lab::peers::ask_udp;
use vipgate_tests::policyd::{Plan, Policyd};
use vipgate_tests::tls::{Authority, Certificate, tomorrow};
use vipgate_tests::traffic::Traffic;
use vipgate_tests::{MORE, SERVER, VIP_B, World, wait_for};

/// The names of this host.
const HERE: [&str; 2] = ["127.0.0.1", "localhost"];

fn tls(ca: &Authority, own: &Certificate) -> String {
    format!("tls: {{ca: {}, cert: {}, key: {}}}", ca.file, own.cert, own.key)
}

/// The gateway's configuration: where its server is, whom it trusts, what it shows.
fn policy(world: &World, url: &str, ca: Option<&Authority>, own: Option<&Certificate>) -> String {
    let cache = world.folder.path().join("policy.cache").display().to_string();
    let ca = ca.map(|ca| format!(", ca: {}", ca.file)).unwrap_or_default();
    let own = own.map(|own| format!(", cert: {}, key: {}", own.cert, own.key)).unwrap_or_default();
    format!("policy: {{server: {{url: \"{url}\", cache: {cache}{ca}{own}}}}}")
}

#[test]
fn whoever_is_refused_hears_why_and_the_server_says_whom() {
    let mut world = World::new("refused");
    let folder = world.folder.path().to_owned();
    let (ours, theirs) = (Authority::new(&folder, "ours"), Authority::new(&folder, "theirs"));
    let long_ago = SystemTime::now() - Duration::from_hours(1);
    let good = ours.sign("gateway", &["gw-test"], tomorrow());
    let foreign = theirs.sign("foreign", &["gw-test"], tomorrow());
    let start = |name: &str, n: u16, own: Certificate| {
        let (listen, more) = (format!("127.0.0.1:{}", 18000 + n), tls(&ours, &own));
        Policyd::start(&world.gateway, &folder, Plan { name, listen: &listen, metrics: 9470 + n, more: &more })
    };
    let servers = [
        start("good", 0, ours.sign("server", &HERE, tomorrow())),
        start("misnamed", 1, ours.sign("misnamed", &["policy.example"], tomorrow())),
        start("expired", 2, ours.sign("expired", &HERE, long_ago)),
    ];
    let [a, b, c] = [0, 1, 2].map(|n| format!("https://127.0.0.1:{}", 18000 + n));
    let plain = a.replace("https", "http");
    // What the gateway has, what it says, what the server says.
    let cases = [
        (&a, Some(&ours), None, 0, "CertificateRequired", "presents no certificate"),
        (&a, Some(&ours), Some(&foreign), 0, "UnknownCA", "isn't signed by `tls.ca`"),
        (&a, Some(&theirs), Some(&good), 0, "UnknownIssuer", "doesn't trust this server's certificate"),
        (&b, Some(&ours), Some(&good), 1, "not valid for name", "BadCertificate"),
        (&c, Some(&ours), Some(&good), 2, "expired", "CertificateExpired"),
        (&plain, None, None, 0, "must begin with https://", "doesn't speak TLS"),
    ];
    for (url, ca, own, server, gateway_says, server_says) in cases {
        let before = servers[server].metric("vipgate_policyd_tls_refused_total", "");
        world.launch(&policy(&world, url, ca, own));
        let tried = || world.log().contains("policy_server_unreachable");
        assert!(wait_for(Duration::from_secs(20), tried), "{}", world.log());
        let said = world.server_status();
        let error = said["error"].as_str().unwrap();
        assert!(said["connected"] == false && error.contains(gateway_says), "{url}, {gateway_says}: {said}");
        servers[server].wait_for_log(&["client_refused", "127.0.0.1:", server_says]);
        assert!(servers[server].metric("vipgate_policyd_tls_refused_total", "") > before);
        // The command line hears the same.
        let mut ask = vec!["--server", url];
        ask.extend(ca.iter().flat_map(|ca| ["--ca", &ca.file]));
        ask.extend(own.iter().flat_map(|own: &&Certificate| ["--cert", &own.cert, "--key", &own.key]));
        let (code, _, stderr) = world.policy_status(&ask);
        assert!(code == 1 && stderr.contains(url.as_str()) && stderr.contains(gateway_says), "{stderr}");
        assert!(!stderr.contains("tonic") && !error.contains("tonic") && !world.log().contains("tonic::"), "{stderr}");
        if gateway_says == "CertificateRequired" {
            assert!(stderr.contains("only those who present a certificate"), "{stderr}");
        }
        world.end("KILL");
    }
    // Another gateway's certificate: it is let in, but not by this name.
    let other = ours.sign("other", &["gw-other"], tomorrow());
    world.launch(&policy(&world, &a, Some(&ours), Some(&other)));
    let refused = || world.log().contains("policy_server_refuses");
    assert!(wait_for(Duration::from_secs(20), refused), "{}", world.log());
    let said = world.server_status();
    let error = said["error"].as_str().unwrap();
    assert!(said["connected"] == false && error.contains("is of gw-other, other, not of gateway gw-test"), "{said}");
    servers[0].wait_for_log(&["gateway_refused", "\"gateway\":\"gw-test\"", "127.0.0.1:", "gw-other"]);
    // Those who only look may have any name.
    let ask = ["--server", &a, "--ca", &ours.file, "--cert", &other.cert, "--key", &other.key, "-o", "json"];
    let (code, shown, stderr) = world.policy_status(&ask);
    assert!(code == 0 && !shown.contains("gw-test"), "{shown}{stderr}");
    world.end("KILL");
    world.start_alone(&policy(&world, &a, Some(&ours), Some(&good)));
    let ask = ["--server", &a, "--ca", &ours.file, "--cert", &good.cert, "--key", &good.key, "--wait", "5"];
    let (code, _, stderr) = world.policy_status(&ask);
    assert_eq!(code, 0, "{stderr}");
}

#[test]
fn a_connection_that_stands_outlives_its_certificates() {
    const URL: &str = "https://127.0.0.1:18000";
    let mut world = World::new("renewed");
    let folder = world.folder.path().to_owned();
    let (ours, next) = (Authority::new(&folder, "ours"), Authority::new(&folder, "next"));
    let server = ours.sign("server", &HERE, tomorrow());
    let own = ours.sign("gateway", &["gw-test"], tomorrow());
    let operator = ours.sign("operator", &["operator"], tomorrow());
    let ask = |world: &World, ca: &Authority| {
        let ask = ["--server", URL, "--ca", &ca.file, "--cert", &operator.cert, "--key", &operator.key];
        let (code, _, stderr) = world.policy_status(&ask);
        (code, stderr)
    };
    world.start_policyd(&tls(&ours, &server));
    world.start_alone(&policy(&world, URL, Some(&ours), Some(&own)));
    world.wait_connected(true, Duration::from_secs(10));
    let traffic = Traffic::start(&world);

    // Both certificates are good for some seconds only, and the connection is made in that time.
    let end = SystemTime::now() + Duration::from_secs(8);
    ours.sign("server", &HERE, end);
    ours.sign("gateway", &["gw-test"], end);
    world.policyd.take().unwrap().kill();
    world.wait_connected(false, Duration::from_secs(5));
    world.start_policyd(&tls(&ours, &server));
    world.wait_connected(true, Duration::from_secs(8));
    let expired = || SystemTime::now() > end + Duration::from_secs(1);
    assert!(wait_for(Duration::from_secs(12), expired));
    let (code, stderr) = ask(&world, &ours);
    assert!(code == 1 && stderr.contains("expired"), "new connections are refused: {stderr}");
    world.write_policy("more.yaml", MORE);
    let told = || ask_udp(&world.pods[3], SERVER[0].parse().unwrap()).is_ok_and(|seen| seen == VIP_B[0]);
    assert!(wait_for(Duration::from_secs(5), told), "over the old connection: {}", world.log());

    // Renewed, by another authority, so that one sees which one it is.
    next.sign("server", &HERE, tomorrow());
    world.policyd().wait_for_log(&["\"event\":\"certificates\""]);
    let renewed = || ask(&world, &next).0 == 0;
    assert!(wait_for(Duration::from_secs(5), renewed), "{:?}", ask(&world, &next));
    let (code, stderr) = ask(&world, &ours);
    assert!(code == 1 && stderr.contains("UnknownIssuer"), "{stderr}");

    // The old connection has seen nothing of it.
    assert_eq!(world.server_status()["connected"], true);
    assert_eq!(world.log().matches("policy_server_lost").count(), 1, "{}", world.log());
    assert!(!world.policyd().log().contains("gateway_lost"), "{}", world.policyd().log());
    traffic.end();

    // What can't be used is said, and the last good one stays.
    std::fs::write(&server.cert, "nonsense").unwrap();
    world.policyd().wait_for_log(&["certificates_wrong", "server.crt", "holds no certificate"]);
    assert_eq!(ask(&world, &next).0, 0);
}
