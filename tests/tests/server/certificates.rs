//! TLS between gateway and policy server: authentication, the reported reasons of rejections, certificate rotation.

use std::time::{Duration, SystemTime};

use vipgate_lab::reflector::query_udp;
use vipgate_tests::policyd::{Policyd, PolicydConfig};
use vipgate_tests::tls::{Certificate, CertificateAuthority, tomorrow};
use vipgate_tests::traffic::Traffic;
use vipgate_tests::{EXTRA_ENDPOINT, SERVER, Testbed, VIP_B, wait_for};

/// Names of the server's host.
const HERE: [&str; 2] = ["127.0.0.1", "localhost"];

fn tls(ca: &CertificateAuthority, own: &Certificate) -> String {
    format!("tls: {{ca: {}, cert: {}, key: {}}}", ca.ca_file, own.cert, own.key)
}

const NOT_AFTER: &str = "vipgate_certificate_not_after_timestamp_seconds";
const OWN: &str = "certificate=\"own\"";

/// Whether a value of this metric is over.
fn is_over(seconds: f64) -> bool {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    seconds < now.as_secs_f64()
}

/// The gateway's policy configuration: server URL, CA and client certificate.
fn policy(testbed: &Testbed, url: &str, ca: Option<&CertificateAuthority>, own: Option<&Certificate>) -> String {
    let cache = testbed.folder.path().join("policy.cache").display().to_string();
    let ca = ca.map(|ca| format!(", ca: {}", ca.ca_file)).unwrap_or_default();
    let own = own.map(|own| format!(", cert: {}, key: {}", own.cert, own.key)).unwrap_or_default();
    format!("policy: {{server: {{url: \"{url}\", cache: {cache}{ca}{own}}}}}")
}

/// A gateway, and `vipgate policy status`, with this URL, CA and certificate: the server rejects both, and both sides
/// report the reason.
fn check_rejection(
    testbed: &mut Testbed,
    server: &Policyd,
    (url, ca, own): (&str, Option<&CertificateAuthority>, Option<&Certificate>),
    gateway_error: &str,
    server_error: &str,
) {
    let before = server.metric("vipgate_policyd_tls_refused_total", "");
    testbed.spawn_gateway(&policy(testbed, url, ca, own));
    let has_tried = || testbed.log().contains("policy_server_unreachable");
    assert!(wait_for(Duration::from_secs(20), has_tried), "{}", testbed.log());
    let status = testbed.policy_server_status();
    let error = status["error"].as_str().unwrap();
    assert!(status["connected"] == false && error.contains(gateway_error), "{url}, {gateway_error}: {status}");
    server.wait_for_log(&["client_refused", "127.0.0.1:", server_error]);
    assert!(server.metric("vipgate_policyd_tls_refused_total", "") > before);
    // The command line reports the same error.
    let mut arguments = vec!["--server", url];
    arguments.extend(ca.iter().flat_map(|ca| ["--ca", &ca.ca_file]));
    arguments.extend(own.iter().flat_map(|own| ["--cert", &own.cert, "--key", &own.key]));
    let (code, _, stderr) = testbed.policy_status(&arguments);
    assert!(code == 1 && stderr.contains(url) && stderr.contains(gateway_error), "{stderr}");
    assert!(!stderr.contains("tonic") && !error.contains("tonic") && !testbed.log().contains("tonic::"), "{stderr}");
    if gateway_error == "CertificateRequired" {
        assert!(stderr.contains("the server requires a client certificate"), "{stderr}");
    }
    testbed.stop("KILL");
}

#[test]
fn a_rejected_client_gets_the_reason_and_the_server_logs_it() {
    let mut testbed = Testbed::new("refused");
    let folder = testbed.folder.path().to_owned();
    let (ours, theirs) = (CertificateAuthority::new(&folder, "ours"), CertificateAuthority::new(&folder, "theirs"));
    let long_ago = SystemTime::now() - Duration::from_hours(1);
    let good = ours.sign("gateway", &["gw-test"], tomorrow());
    let unknown_ca = theirs.sign("foreign", &["gw-test"], tomorrow());
    let start = |name: &str, n: u16, own: Certificate| {
        let (listen, more) = (format!("127.0.0.1:{}", 18000 + n), tls(&ours, &own));
        Policyd::start(
            &testbed.gateway,
            &folder,
            PolicydConfig { name, listen: &listen, metrics: 9470 + n, extra: &more },
        )
    };
    let servers = [
        start("good", 0, ours.sign("server", &HERE, tomorrow())),
        start("misnamed", 1, ours.sign("misnamed", &["policy.example"], tomorrow())),
        start("expired", 2, ours.sign("expired", &HERE, long_ago)),
    ];
    let [a, b, c] = [0, 1, 2].map(|n| format!("https://127.0.0.1:{}", 18000 + n));
    let plain = a.replace("https", "http");
    // URL, the gateway's CA and certificate, the server's index, the error at the gateway, the error in the server's
    // log.
    let cases = [
        (a.as_str(), Some(&ours), None, 0, "CertificateRequired", "presents no certificate"),
        (a.as_str(), Some(&ours), Some(&unknown_ca), 0, "UnknownCA", "isn't signed by `tls.ca`"),
        (a.as_str(), Some(&theirs), Some(&good), 0, "UnknownIssuer", "doesn't trust this server's certificate"),
        (b.as_str(), Some(&ours), Some(&good), 1, "not valid for name", "BadCertificate"),
        (c.as_str(), Some(&ours), Some(&good), 2, "expired", "CertificateExpired"),
        (plain.as_str(), None, None, 0, "must begin with https://", "doesn't speak TLS"),
    ];
    for (url, ca, own, server, gateway_error, server_error) in cases {
        check_rejection(&mut testbed, &servers[server], (url, ca, own), gateway_error, server_error);
    }
    // The certificate of another gateway: TLS succeeds, but the name is rejected.
    let other = ours.sign("other", &["gw-other"], tomorrow());
    testbed.spawn_gateway(&policy(&testbed, &a, Some(&ours), Some(&other)));
    let is_rejected = || testbed.log().contains("policy_server_refuses");
    assert!(wait_for(Duration::from_secs(20), is_rejected), "{}", testbed.log());
    let status = testbed.policy_server_status();
    let error = status["error"].as_str().unwrap();
    let expected = "is valid for gw-other, other, not for gateway gw-test";
    assert!(status["connected"] == false && error.contains(expected), "{status}");
    servers[0].wait_for_log(&["gateway_refused", "\"gateway\":\"gw-test\"", "127.0.0.1:", "gw-other"]);
    // Status queries are allowed with any name.
    let arguments = ["--server", &a, "--ca", &ours.ca_file, "--cert", &other.cert, "--key", &other.key, "-o", "json"];
    let (code, stdout, stderr) = testbed.policy_status(&arguments);
    assert!(code == 0 && !stdout.contains("gw-test"), "{stdout}{stderr}");
    testbed.stop("KILL");
    testbed.start_gateway(&policy(&testbed, &a, Some(&ours), Some(&good)));
    let arguments = ["--server", &a, "--ca", &ours.ca_file, "--cert", &good.cert, "--key", &good.key, "--wait", "5"];
    let (code, _, stderr) = testbed.policy_status(&arguments);
    assert_eq!(code, 0, "{stderr}");
}

#[test]
fn an_established_connection_outlives_its_certificates() {
    const URL: &str = "https://127.0.0.1:18000";
    let mut testbed = Testbed::new("renewed");
    let folder = testbed.folder.path().to_owned();
    let (ours, next) = (CertificateAuthority::new(&folder, "ours"), CertificateAuthority::new(&folder, "next"));
    let server = ours.sign("server", &HERE, tomorrow());
    let own = ours.sign("gateway", &["gw-test"], tomorrow());
    let operator = ours.sign("operator", &["operator"], tomorrow());
    let query_status = |testbed: &Testbed, ca: &CertificateAuthority| {
        let arguments = ["--server", URL, "--ca", &ca.ca_file, "--cert", &operator.cert, "--key", &operator.key];
        let (code, _, stderr) = testbed.policy_status(&arguments);
        (code, stderr)
    };
    testbed.start_policyd(&tls(&ours, &server));
    testbed.start_gateway(&policy(&testbed, URL, Some(&ours), Some(&own)));
    testbed.wait_connected(true, Duration::from_secs(10));
    let traffic = Traffic::start(&testbed);

    // Both certificates expire in a few seconds; the connection is established before.
    let end = SystemTime::now() + Duration::from_secs(8);
    ours.sign("server", &HERE, end);
    ours.sign("gateway", &["gw-test"], end);
    testbed.policyd.take().unwrap().kill();
    testbed.wait_connected(false, Duration::from_secs(5));
    testbed.start_policyd(&tls(&ours, &server));
    testbed.wait_connected(true, Duration::from_secs(8));
    let expired = || SystemTime::now() > end + Duration::from_secs(1);
    assert!(wait_for(Duration::from_secs(12), expired));
    let (code, stderr) = query_status(&testbed, &ours);
    assert!(code == 1 && stderr.contains("expired"), "new connections are refused: {stderr}");
    assert!(is_over(testbed.policyd().metric(NOT_AFTER, OWN)) && is_over(testbed.metric(NOT_AFTER, OWN)));
    assert!(!is_over(testbed.policyd().metric(NOT_AFTER, "certificate=\"ca\"")));
    testbed.write_policy("more.yaml", EXTRA_ENDPOINT);
    let is_applied = || query_udp(&testbed.pods[3], SERVER[0].parse().unwrap()).is_ok_and(|seen| seen == VIP_B[0]);
    assert!(wait_for(Duration::from_secs(5), is_applied), "over the old connection: {}", testbed.log());

    // Renewed by another authority, so that the new certificate is distinguishable.
    next.sign("server", &HERE, tomorrow());
    testbed.policyd().wait_for_log(&["\"event\":\"certificates\""]);
    assert!(!is_over(testbed.policyd().metric(NOT_AFTER, OWN)));
    let renewed = || query_status(&testbed, &next).0 == 0;
    assert!(wait_for(Duration::from_secs(5), renewed), "{:?}", query_status(&testbed, &next));
    let (code, stderr) = query_status(&testbed, &ours);
    assert!(code == 1 && stderr.contains("UnknownIssuer"), "{stderr}");

    // The old connection is unaffected.
    assert_eq!(testbed.policy_server_status()["connected"], true);
    assert_eq!(testbed.log().matches("policy_server_lost").count(), 1, "{}", testbed.log());
    assert!(!testbed.policyd().log().contains("gateway_lost"), "{}", testbed.policyd().log());
    traffic.end();

    // An invalid certificate file is reported, and the last valid certificate stays in use.
    std::fs::write(&server.cert, "nonsense").unwrap();
    testbed.policyd().wait_for_log(&["certificates_wrong", "server.crt", "holds no certificate"]);
    assert_eq!(query_status(&testbed, &next).0, 0);
    assert!(!is_over(testbed.policyd().metric(NOT_AFTER, OWN)));
}
