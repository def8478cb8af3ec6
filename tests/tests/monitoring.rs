//! `conf/monitoring` against a gateway and Prometheus: alert rules fire when they must and are inactive otherwise,
//! and every dashboard panel has data.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use vipgate_lab::{Process, output};
use vipgate_tests::{EXCLUDED, SERVER, Testbed, VIP_A, VIP_B, binary, wait_for};

const PROMETHEUS: &str = "http://127.0.0.1:9090";
const PROMETHEUS_TIMEOUT: Duration = Duration::from_secs(20);
/// Panels that may be empty with a single gateway, and what they need.
const MAY_BE_EMPTY: [(&str, &str); 19] = [
    ("Oldest policy", "policy from a server"),
    ("Age of policy", "policy from a server"),
    ("Policy servers: gateways", "a policy server"),
    ("Manifests not in force as written", "a policy server, for diagnostics"),
    ("Manifests: source connected and healthy", "a policy server, for its connection"),
    ("Policy servers: publications", "a policy server"),
    ("Policy servers: compilation", "a policy server"),
    ("Links", "other gateways"),
    ("Lease", "other gateways"),
    ("Session records sent and applied", "other gateways"),
    ("Replication queue", "other gateways"),
    ("Full syncs", "other gateways"),
    ("NAT log", "a NAT log"),
    ("Pods of nodes", "an agent"),
    ("Packets of nodes to gateways", "an agent"),
    ("Drops of nodes", "an agent"),
    ("Gateways of nodes", "an agent"),
    ("Held packets of nodes", "an agent"),
    ("Repairs of nodes", "an agent"),
];

/// Path of a file of `conf/monitoring`.
fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../conf/monitoring").join(name)
}

/// Starts Prometheus on the gateway's host with the shipped configuration and a scrape interval of 1 s.
fn start_prometheus(testbed: &Testbed) -> Process {
    let shipped = fs::read_to_string(file("prometheus.yaml")).unwrap();
    let rules = format!("- {}", file("alerts.yaml").display());
    assert!(shipped.contains("interval: 15s") && shipped.contains("- alerts.yaml"), "{shipped}");
    let config = testbed.folder.path().join("prometheus.yaml");
    fs::write(&config, shipped.replace("interval: 15s", "interval: 1s").replace("- alerts.yaml", &rules)).unwrap();
    let config = format!("--config.file={}", config.display());
    let storage = format!("--storage.tsdb.path={}", testbed.folder.path().join("prometheus").display());
    let command = ["prometheus", &config, &storage, "--web.listen-address=127.0.0.1:9090"];
    testbed.gateway.spawn(&command, &testbed.folder.path().join("prometheus.log")).unwrap()
}

/// Response of Prometheus' HTTP API; none while it doesn't listen.
fn query_api(testbed: &Testbed, arguments: &[&str]) -> Option<Value> {
    let response = testbed.gateway.output(&[&["curl", "-sS", "--max-time", "10"], arguments].concat()).ok()?;
    serde_json::from_str(&response).ok()
}

/// Result of an expression.
fn evaluate(testbed: &Testbed, expression: &str) -> Option<Value> {
    let query = format!("query={expression}");
    query_api(testbed, &["-G", "--data-urlencode", &query, &format!("{PROMETHEUS}/api/v1/query")])
}

/// Number of series of an expression.
fn series_count(testbed: &Testbed, expression: &str) -> usize {
    let response = evaluate(testbed, expression).expect("Prometheus answers");
    assert_eq!(response["status"], "success", "{expression}: {response}");
    response["data"]["result"].as_array().unwrap().len()
}

/// Waits until an expression has at least one series.
fn wait_for_series(testbed: &Testbed, expression: &str) {
    let has_some = |response: Value| response["data"]["result"].as_array().is_some_and(|series| !series.is_empty());
    let found = wait_for(PROMETHEUS_TIMEOUT, || evaluate(testbed, expression).is_some_and(has_some));
    let log = fs::read_to_string(testbed.folder.path().join("prometheus.log")).unwrap_or_default();
    assert!(found, "no series of {expression}; Prometheus' log:\n{log}");
}

/// All rules that Prometheus has loaded.
fn rules(testbed: &Testbed) -> Vec<Value> {
    let response = query_api(testbed, &[&format!("{PROMETHEUS}/api/v1/rules")]).expect("Prometheus answers");
    let groups = response["data"]["groups"].as_array().unwrap();
    groups.iter().flat_map(|group| group["rules"].as_array().unwrap().clone()).collect()
}

/// Sends packets in every direction of a single gateway, and some that it drops.
fn make_traffic(testbed: &Testbed) {
    testbed.check_source_addresses(&testbed.pods[0], SERVER, VIP_A);
    testbed.check_source_addresses(&testbed.pods[2], SERVER, VIP_B);
    testbed.check_source_addresses(&testbed.pods[2], EXCLUDED, ["10.1.0.21", "fd00:1::21"]);
    // A VIP doesn't reply to pings.
    testbed.accounting.expect_exactly([("no_service", 5)]);
    assert!(testbed.server.output(&["ping", "-c", "5", "-i", "0.2", "-W", "1", VIP_A[0]]).is_err());
}

/// Asserts that every panel has series for each of its expressions, except those that may be empty.
fn check_dashboard(testbed: &Testbed) {
    let dashboard: Value = serde_json::from_str(&fs::read_to_string(file("dashboard.json")).unwrap()).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let mut titles = BTreeSet::new();
    let mut empty = Vec::new();
    for panel in panels {
        let title = panel["title"].as_str().unwrap();
        assert!(titles.insert(title), "duplicate panel {title}");
        // Rows have no targets.
        let Some(targets) = panel["targets"].as_array() else { continue };
        for target in targets {
            assert_eq!(target["datasource"]["uid"], "${datasource}", "{title}");
            let expression = target["expr"].as_str().unwrap();
            let expression =
                expression.replace("$instance", ".*").replace("$__rate_interval", "1m").replace("$__range", "1m");
            assert!(!expression.contains('$'), "{title} has an unknown variable: {expression}");
            let may_be_empty = MAY_BE_EMPTY.iter().any(|(panel, _)| *panel == title);
            if series_count(testbed, &expression) == 0 && !may_be_empty {
                empty.push(format!("{title}: {expression}"));
            }
        }
    }
    assert_eq!(empty, Vec::<String>::new(), "panels without data");
    for (title, needs) in MAY_BE_EMPTY {
        assert!(titles.contains(title), "no panel {title}, which needs {needs}");
    }
}

/// Asserts that every rule can be evaluated, and no alert is pending or firing.
fn check_rules(testbed: &Testbed) {
    let evaluated = || rules(testbed).iter().all(|rule| rule["health"] == "ok");
    assert!(wait_for(PROMETHEUS_TIMEOUT, evaluated), "rules fail: {:#?}", rules(testbed));
    let rules = rules(testbed);
    assert!(rules.iter().any(|rule| rule["type"] == "alerting"), "there are no alerts");
    for rule in rules {
        series_count(testbed, rule["query"].as_str().unwrap());
        if rule["type"] == "alerting" {
            assert_eq!(rule["state"], "inactive", "false alarm: {rule:#}");
        }
    }
}

#[test]
fn alert_rules_pass_their_unit_tests() {
    let path = |name: &str| file(name).display().to_string();
    output(&["promtool", "check", "config", &path("prometheus.yaml")]).unwrap();
    output(&["promtool", "check", "rules", &path("alerts.yaml")]).unwrap();
    output(&["promtool", "test", "rules", &path("alerts_test.yaml")]).unwrap();
}

#[test]
fn commands_named_in_alerts_exist() {
    let alerts = fs::read_to_string(file("alerts.yaml")).unwrap();
    let word = |text: &str| text.chars().take_while(char::is_ascii_lowercase).collect::<String>();
    let commands: BTreeSet<String> = alerts.split("`vipgate ").skip(1).map(word).collect();
    assert!(commands.contains("status"), "{commands:?}");
    for command in commands {
        let help = Command::new(binary()).args([command.as_str(), "--help"]).output().unwrap();
        assert!(help.status.success(), "alerts.yaml names `vipgate {command}`, which doesn't exist");
    }
}

#[test]
fn every_dashboard_panel_has_data() {
    let testbed = Testbed::with_gateway("monitor");
    let _prometheus = start_prometheus(&testbed);
    wait_for_series(&testbed, r#"count_over_time(vipgate_build_info{job="vipgate"}[1m]) >= 2"#);
    make_traffic(&testbed);
    // Rates need counters from before and after the traffic.
    wait_for_series(&testbed, r#"increase(vipgate_drops_total{reason="no_service"}[1m]) > 0"#);
    wait_for_series(&testbed, r#"increase(vipgate_packets_total{direction="reply"}[1m]) > 0"#);
    let check = "set -o pipefail; curl -sS http://127.0.0.1:9469/metrics | promtool check metrics";
    testbed.gateway.output(&["bash", "-c", check]).unwrap();
    check_dashboard(&testbed);
    check_rules(&testbed);
}
