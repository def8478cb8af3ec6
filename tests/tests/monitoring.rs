//! What `conf/monitoring` has for operators, against a gateway and the Prometheus that scrapes it: rules that fire when they
//! must and are silent while all is well, and a dashboard whose every panel shows something.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use vipgate::lab::{Process, output};
use vipgate_tests::{EXCLUDED, SERVER, VIP_A, VIP_B, World, binary, wait_for};

const PROMETHEUS: &str = "http://127.0.0.1:9090";
const PATIENCE: Duration = Duration::from_secs(20);
/// Panels that one gateway alone may leave empty, and what they need.
const MAY_BE_EMPTY: [(&str, &str); 13] = [
    ("Oldest policy", "policy from a server"),
    ("Age of policy", "policy from a server"),
    ("Policy servers: gateways", "a policy server"),
    ("Manifests that are not in force as written", "a policy server, for complaints"),
    ("Manifests: source reached and healthy", "a policy server, for whether it is reached"),
    ("Policy servers: publications", "a policy server"),
    ("Policy servers: compilation", "a policy server"),
    ("Links", "other gateways"),
    ("Lease", "other gateways"),
    ("Copies sent and taken", "other gateways"),
    ("Copies that wait", "other gateways"),
    ("Sessions told again", "other gateways"),
    ("NAT log", "a NAT log"),
];

/// A file of `conf/monitoring`.
fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../conf/monitoring").join(name)
}

/// Starts Prometheus on the gateway's host with the configuration that we ship, but for its pace.
fn start_prometheus(world: &World) -> Process {
    let shipped = fs::read_to_string(file("prometheus.yaml")).unwrap();
    let rules = format!("- {}", file("alerts.yaml").display());
    assert!(shipped.contains("interval: 15s") && shipped.contains("- alerts.yaml"), "{shipped}");
    let config = world.folder.path().join("prometheus.yaml");
    fs::write(&config, shipped.replace("interval: 15s", "interval: 1s").replace("- alerts.yaml", &rules)).unwrap();
    let config = format!("--config.file={}", config.display());
    let storage = format!("--storage.tsdb.path={}", world.folder.path().join("prometheus").display());
    let command = ["prometheus", &config, &storage, "--web.listen-address=127.0.0.1:9090"];
    world.gateway.spawn(&command, &world.folder.path().join("prometheus.log")).unwrap()
}

/// What Prometheus answers; none while it doesn't listen.
fn ask(world: &World, arguments: &[&str]) -> Option<Value> {
    let answer = world.gateway.output(&[&["curl", "-sS", "--max-time", "10"], arguments].concat()).ok()?;
    serde_json::from_str(&answer).ok()
}

/// The answer to an expression.
fn evaluate(world: &World, expression: &str) -> Option<Value> {
    let query = format!("query={expression}");
    ask(world, &["-G", "--data-urlencode", &query, &format!("{PROMETHEUS}/api/v1/query")])
}

/// How many series an expression has now.
fn series(world: &World, expression: &str) -> usize {
    let answer = evaluate(world, expression).expect("Prometheus answers");
    assert_eq!(answer["status"], "success", "{expression}: {answer}");
    answer["data"]["result"].as_array().unwrap().len()
}

/// Waits until an expression has a series.
fn wait_for_series(world: &World, expression: &str) {
    let has_some = |answer: Value| answer["data"]["result"].as_array().is_some_and(|series| !series.is_empty());
    let come = wait_for(PATIENCE, || evaluate(world, expression).is_some_and(has_some));
    let log = fs::read_to_string(world.folder.path().join("prometheus.log")).unwrap_or_default();
    assert!(come, "nothing for {expression}; Prometheus said:\n{log}");
}

/// All rules as Prometheus has them.
fn rules(world: &World) -> Vec<Value> {
    let answer = ask(world, &[&format!("{PROMETHEUS}/api/v1/rules")]).expect("Prometheus answers");
    let groups = answer["data"]["groups"].as_array().unwrap();
    groups.iter().flat_map(|group| group["rules"].as_array().unwrap().clone()).collect()
}

/// Packets in every direction that one gateway has, and some that it drops.
fn make_traffic(world: &World) {
    world.check_identity(&world.pods[0], SERVER, VIP_A);
    world.check_identity(&world.pods[2], SERVER, VIP_B);
    world.check_identity(&world.pods[2], EXCLUDED, ["10.1.0.21", "fd00:1::21"]);
    // A VIP answers no ping.
    world.ledger.expect_exactly([("no_service", 5)]);
    assert!(world.server.output(&["ping", "-c", "5", "-i", "0.2", "-W", "1", VIP_A[0]]).is_err());
}

/// Every panel of the dashboard has series for each of its expressions, but those that may be empty.
fn check_dashboard(world: &World) {
    let dashboard: Value = serde_json::from_str(&fs::read_to_string(file("dashboard.json")).unwrap()).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let mut titles = BTreeSet::new();
    let mut empty = Vec::new();
    for panel in panels {
        let title = panel["title"].as_str().unwrap();
        assert!(titles.insert(title), "two panels are called {title}");
        // Rows only carry a title.
        let Some(targets) = panel["targets"].as_array() else { continue };
        for target in targets {
            assert_eq!(target["datasource"]["uid"], "${datasource}", "{title}");
            let expression = target["expr"].as_str().unwrap();
            let expression =
                expression.replace("$instance", ".*").replace("$__rate_interval", "1m").replace("$__range", "1m");
            assert!(!expression.contains('$'), "{title} has a variable that nobody knows: {expression}");
            let may_be_empty = MAY_BE_EMPTY.iter().any(|(panel, _)| *panel == title);
            if series(world, &expression) == 0 && !may_be_empty {
                empty.push(format!("{title}: {expression}"));
            }
        }
    }
    assert_eq!(empty, Vec::<String>::new(), "these panels show nothing");
    for (title, needs) in MAY_BE_EMPTY {
        assert!(titles.contains(title), "{title}, which needs {needs}, is no panel");
    }
}

/// Every rule can be evaluated, and while all is well no alert is even pending.
fn check_rules(world: &World) {
    let evaluated = || rules(world).iter().all(|rule| rule["health"] == "ok");
    assert!(wait_for(PATIENCE, evaluated), "rules fail: {:#?}", rules(world));
    let rules = rules(world);
    assert!(rules.iter().any(|rule| rule["type"] == "alerting"), "there are no alerts");
    for rule in rules {
        series(world, rule["query"].as_str().unwrap());
        if rule["type"] == "alerting" {
            assert_eq!(rule["state"], "inactive", "a false alarm: {rule:#}");
        }
    }
}

#[test]
fn rules_fire_when_they_must() {
    let path = |name: &str| file(name).display().to_string();
    output(&["promtool", "check", "config", &path("prometheus.yaml")]).unwrap();
    output(&["promtool", "check", "rules", &path("alerts.yaml")]).unwrap();
    output(&["promtool", "test", "rules", &path("alerts_test.yaml")]).unwrap();
}

#[test]
fn commands_that_alerts_name_exist() {
    let alerts = fs::read_to_string(file("alerts.yaml")).unwrap();
    let word = |text: &str| text.chars().take_while(char::is_ascii_lowercase).collect::<String>();
    let commands: BTreeSet<String> = alerts.split("`vipgate ").skip(1).map(word).collect();
    assert!(commands.contains("status"), "{commands:?}");
    for command in commands {
        let asked = Command::new(binary()).args([command.as_str(), "--help"]).output().unwrap();
        assert!(asked.status.success(), "alerts.yaml names `vipgate {command}`, which there isn't");
    }
}

#[test]
fn prometheus_sees_all_that_the_dashboard_shows() {
    let world = World::with_gateway("monitor");
    let _prometheus = start_prometheus(&world);
    wait_for_series(&world, r#"count_over_time(vipgate_build_info{job="vipgate"}[1m]) >= 2"#);
    make_traffic(&world);
    // Rates need the counters from before and after.
    wait_for_series(&world, r#"increase(vipgate_drops_total{reason="no_service"}[1m]) > 0"#);
    wait_for_series(&world, r#"increase(vipgate_packets_total{direction="reply"}[1m]) > 0"#);
    let check = "set -o pipefail; curl -sS http://127.0.0.1:9469/metrics | promtool check metrics";
    world.gateway.output(&["bash", "-c", check]).unwrap();
    check_dashboard(&world);
    check_rules(&world);
}
