//! The API as the policy source: the same policy as from files, and its faults interrupt nothing.

use std::time::Duration;

use serde_json::{Value, json};
use vipgate_tests::kubernetes::{ADMIN, ApiServer};
use vipgate_tests::policyd::{Policyd, PolicydConfig};
use vipgate_tests::traffic::Traffic;
use vipgate_tests::{EXTRA_ENDPOINT, Testbed, VIP_B, wait_for};

use crate::fixture::{
    create_tenants, is_seen_as, set_ingress, source, start_gateway, start_policyd, status, wait_health, wait_in_step,
    wait_seen_as,
};

const P4: &str = "10.1.0.31";

fn version_from_files(testbed: &Testbed) -> String {
    let server = Policyd::start(&testbed.gateway, testbed.folder.path(), PolicydConfig::default());
    let (code, stdout, stderr) = testbed.policy_status(&["-o", "json"]);
    assert_eq!(code, 0, "{stderr}");
    server.kill();
    let status: Value = serde_json::from_str(&stdout).unwrap();
    status["version"].as_str().unwrap().to_owned()
}

#[test]
fn the_api_and_files_give_the_same_policy_and_the_api_may_fail() {
    let mut testbed = Testbed::new("k8s-source");
    let mut api = ApiServer::new(&testbed.gateway);
    create_tenants(&testbed, &api);
    let policyd = start_policyd(&testbed, &source(&api, ADMIN, ""));
    start_gateway(&mut testbed, "");
    let version = wait_in_step(&testbed);
    assert_eq!(version, version_from_files(&testbed));
    wait_health(&testbed, &policyd, None);

    let traffic = Traffic::start(&testbed);
    api.apply(EXTRA_ENDPOINT);
    wait_seen_as(&testbed, 3, VIP_B[0]);
    assert_ne!(wait_in_step(&testbed), version);
    // An endpoint that isn't ready calls out, too.
    let not_ready = json!({"endpoints": [{"addresses": [P4], "conditions": {"ready": false}}]}).to_string();
    api.kubectl(&["patch", "-n", "tenant-b", "endpointslices", "more", "--type=merge", "-p", &not_ready]);
    std::thread::sleep(Duration::from_millis(500));
    assert!(is_seen_as(&testbed, 3, VIP_B[0]));

    // The API server is killed: reported, without other effects.
    api.stop();
    wait_health(&testbed, &policyd, Some("can't read the Kubernetes API"));
    policyd.wait_for_log(&["source_lost"]);
    assert!(is_seen_as(&testbed, 3, VIP_B[0]));
    // Its history is gone when it is back.
    api.start();
    wait_health(&testbed, &policyd, None);
    api.delete("endpointslices", "tenant-b", "more");
    testbed.wait_uncovered(&testbed.pods[3], vipgate_tests::SERVER[0], P4);
    assert_eq!(wait_in_step(&testbed), version, "the same version again");
    traffic.end();
    policyd.kill();
    testbed.stop("TERM");
}

#[test]
fn changes_during_an_outage_and_a_restored_backup_are_found() {
    let mut testbed = Testbed::new("k8s-backup");
    let mut api = ApiServer::new(&testbed.gateway);
    create_tenants(&testbed, &api);
    let policyd = start_policyd(&testbed, &source(&api, ADMIN, ""));
    start_gateway(&mut testbed, "");
    let version = wait_in_step(&testbed);
    let traffic = Traffic::start(&testbed);

    let folder = tempfile::tempdir().unwrap();
    let snapshot = folder.path().join("snapshot");
    api.save_snapshot(&snapshot);
    api.apply(EXTRA_ENDPOINT);
    wait_seen_as(&testbed, 3, VIP_B[0]);
    // Watches go on from a version that the restored history doesn't have yet, and no event says so.
    api.restore_snapshot(&snapshot);
    testbed.wait_uncovered(&testbed.pods[3], vipgate_tests::SERVER[0], P4);
    assert_eq!(wait_in_step(&testbed), version);
    wait_health(&testbed, &policyd, None);
    traffic.end();
    policyd.kill();
    testbed.stop("TERM");
}

#[test]
fn policies_outlive_the_definition_of_their_kind() {
    let mut testbed = Testbed::new("k8s-crd");
    let api = ApiServer::new(&testbed.gateway);
    create_tenants(&testbed, &api);
    let policyd = start_policyd(&testbed, &source(&api, ADMIN, ""));
    start_gateway(&mut testbed, "");
    let version = wait_in_step(&testbed);
    let traffic = Traffic::start(&testbed);

    api.kubectl(&["delete", "crd", "egresspolicies.vipgate.io", "--timeout=20s"]);
    wait_health(&testbed, &policyd, Some("EgressPolicy"));
    assert!(policyd.log().contains("apply vipgate's CustomResourceDefinitions"), "{}", policyd.log());
    assert_eq!(status(&testbed)["version"], version.as_str());

    // The definition is back, without objects.
    api.apply_unvalidated(include_str!("../../../conf/crds.yaml"));
    wait_health(&testbed, &policyd, Some("EgressPolicy/tenant-b/web"));
    assert_eq!(status(&testbed)["version"], version.as_str());

    let tenant = testbed.read_policy("tenant-b.yaml");
    let policy = tenant.split("---\n").find(|document| document.contains("kind: EgressPolicy")).unwrap();
    api.apply(policy);
    wait_health(&testbed, &policyd, None);
    assert_eq!(wait_in_step(&testbed), version);
    traffic.end();

    // A policy that somebody deletes is gone.
    api.delete("egresspolicies", "tenant-b", "web");
    assert!(wait_for(Duration::from_secs(10), || status(&testbed)["version"] != version.as_str()));
    policyd.kill();
    testbed.stop("TERM");
}

#[test]
fn policies_are_kept_while_the_definition_of_their_kind_is_being_deleted() {
    const DEFINITION: &str = "egresspolicies.vipgate.io";
    let mut testbed = Testbed::new("k8s-term");
    let mut api = ApiServer::new(&testbed.gateway);
    create_tenants(&testbed, &api);
    let mut policyd = start_policyd(&testbed, &source(&api, ADMIN, ""));
    start_gateway(&mut testbed, "");
    let version = wait_in_step(&testbed);

    // Its objects are gone when the server reads them next, by a list: no watch says that they were deleted.
    policyd.process().signal("STOP").unwrap();
    let finalizers = |list: &str| {
        let patch = format!("{{\"metadata\": {{\"finalizers\": {list}}}}}");
        api.kubectl(&["patch", "crd", DEFINITION, "--type=merge", "-p", &patch]);
    };
    finalizers("[\"example.com/hold\", \"customresourcecleanup.apiextensions.k8s.io\"]");
    api.kubectl(&["delete", "crd", DEFINITION, "--wait=false"]);
    let is_empty = || api.kubectl(&["get", "egresspolicies", "-A", "-o", "name"]).is_empty();
    assert!(wait_for(Duration::from_secs(20), is_empty));
    api.restart();
    policyd.process().signal("CONT").unwrap();
    wait_health(&testbed, &policyd, Some("EgressPolicy"));
    assert_eq!(wait_in_step(&testbed), version, "{}", policyd.log());

    api.kubectl(&["patch", "crd", DEFINITION, "--type=merge", "-p", "{\"metadata\": {\"finalizers\": null}}"]);
    api.kubectl(&["wait", "--for=delete", "--timeout=20s", "crd", DEFINITION]);
    api.apply_unvalidated(include_str!("../../../conf/crds.yaml"));
    wait_health(&testbed, &policyd, Some("EgressPolicy/tenant-b/web"));
    assert_eq!(wait_in_step(&testbed), version, "{}", policyd.log());
    policyd.kill();
    testbed.stop("TERM");
}

#[test]
fn only_services_of_ours_are_served_unless_configured() {
    const OTHER: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: other}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: other}
spec: {type: LoadBalancer, ports: [{port: 80}]}
";
    let mut testbed = Testbed::new("k8s-class");
    let api = ApiServer::new(&testbed.gateway);
    create_tenants(&testbed, &api);
    api.apply(OTHER);
    set_ingress(&api, "other", "web", &["203.0.113.40"]);
    let policyd = start_policyd(&testbed, &source(&api, ADMIN, ""));
    start_gateway(&mut testbed, "");
    wait_in_step(&testbed);
    assert!(!testbed.vips().to_string().contains("203.0.113.40"), "another load balancer's address");
    policyd.kill();
    let policyd = start_policyd(&testbed, &source(&api, ADMIN, ", services: {unclassed: serve}"));
    let is_served = || testbed.vips().to_string().contains("203.0.113.40");
    assert!(wait_for(Duration::from_secs(15), is_served), "{}", testbed.vips());
    policyd.kill();
    testbed.stop("TERM");
}

#[test]
fn with_namespaces_only_those_are_read() {
    let mut testbed = Testbed::new("k8s-ns");
    let api = ApiServer::new(&testbed.gateway);
    create_tenants(&testbed, &api);
    let policyd = start_policyd(&testbed, &source(&api, ADMIN, ", namespaces: [tenant-a]"));
    start_gateway(&mut testbed, "");
    wait_in_step(&testbed);
    let vips = testbed.vips().to_string();
    assert!(vips.contains("203.0.113.10") && !vips.contains("203.0.113.20"), "{vips}");
    policyd.kill();
    testbed.stop("TERM");
}
