//! A VIP that one gateway refuses, since it is the gateway's own address: it lacks there, and everything else goes on.

use std::time::Duration;

use serde_json::Value;
use vipgate_lab::reflector::query_udp;
use vipgate_tests::{EXTRA_ENDPOINT, SERVER, Testbed, VIP_B, wait_for};

/// The gateway's own address outside.
const OWN: &str = "203.0.113.1";

/// A third tenant's Service with a VIP, and one pod.
fn tenant_c(vip: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Namespace\nmetadata: {{name: tenant-c}}\n---\n\
         apiVersion: v1\nkind: Service\n\
         metadata: {{name: own, namespace: tenant-c, annotations: {{vipgate.io/egress: \"true\"}}}}\n\
         spec: {{type: LoadBalancer, ports: [{{port: 80}}]}}\n\
         status: {{loadBalancer: {{ingress: [{{ip: {vip}}}]}}}}\n---\n\
         apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
         metadata: {{name: own, namespace: tenant-c, labels: {{kubernetes.io/service-name: own}}}}\n\
         addressType: IPv4\nendpoints: [{{addresses: [10.1.0.77]}}]\n"
    )
}

fn status(testbed: &Testbed) -> Value {
    let (code, json, stderr) = testbed.policy_status(&["-o", "json"]);
    assert_eq!(code, 0, "{stderr}");
    serde_json::from_str(&json).unwrap()
}

fn endpoint(testbed: &Testbed, address: &str) -> Value {
    let all = testbed.query(&["endpoints"])["endpoints"].as_array().unwrap().clone();
    all.into_iter().find(|it| it["address"] == address).unwrap_or_default()
}

#[test]
fn a_vip_that_a_gateway_refuses_stops_no_other_tenants_change() {
    let mut testbed = Testbed::new("aside");
    testbed.uses_policy_server = true;
    // It is part of the gateway's first policy.
    testbed.write_policy("tenant-c.yaml", &tenant_c(OWN));
    testbed.accounting.expect_exactly([("policy_rejected", 1)]);
    testbed.start("");
    let policyd = testbed.policyd();
    policyd.wait_for_log(&["\"event\":\"set_aside\"", "Vip 203.0.113.1", "is a local address of this gateway"]);
    let in_sync = || status(&testbed)["gateways"][0]["in_step"] == true;
    assert!(wait_for(Duration::from_secs(10), in_sync), "{}", policyd.log());

    // Another tenant's change.
    testbed.write_policy("more.yaml", EXTRA_ENDPOINT);
    let covered = || query_udp(&testbed.pods[3], SERVER[0].parse().unwrap()).is_ok_and(|seen| seen == VIP_B[0]);
    assert!(wait_for(Duration::from_secs(10), covered), "{}", policyd.log());
    let vips = testbed.query(&["vips"])["vips"].as_array().unwrap().clone();
    assert!(vips.len() == 4 && vips.iter().all(|vip| vip["address"] != OWN), "{vips:?}");
    // Covered without a VIP.
    let left = endpoint(&testbed, "10.1.0.77");
    assert!(left["policy"] == "Service tenant-c/own" && left["vips"].as_array().is_none_or(Vec::is_empty), "{left}");

    let (_, table, _) = testbed.policy_status(&[]);
    let line = table.lines().find(|line| line.contains("set aside at")).unwrap_or_else(|| panic!("{table}"));
    for word in ["gw-test", "Vip 203.0.113.1", "is a local address of this gateway"] {
        assert!(line.contains(word), "{table}");
    }
    let row = table.lines().find(|line| line.starts_with("gw-test")).unwrap();
    assert!(row.contains("in sync") && row.contains("set aside: Vip 203.0.113.1"), "{table}");
    let json = status(&testbed);
    let named = |name: &str| json["policies"].as_array().unwrap().iter().find(|it| it["name"] == name).unwrap().clone();
    assert_eq!(named("Service tenant-c/own")["set_aside"][0]["gateway"], "gw-test");
    assert_eq!(named("EgressPolicy tenant-b/web")["in_force"][0], "gw-test");
    let (code, _, stderr) = testbed.policy_status(&["--wait", "1"]);
    assert!(code == 1 && stderr.contains("not all of it is in force"), "{stderr}");
    assert!((policyd.metric("vipgate_policyd_set_aside", "for=\"one\"") - 1.0).abs() < 0.5);

    // Another address.
    testbed.write_policy("tenant-c.yaml", &tenant_c("203.0.113.40"));
    testbed.wait_in_force();
    assert_eq!(endpoint(&testbed, "10.1.0.77")["vips"][0], "203.0.113.40");
    assert!(policyd.metric("vipgate_policyd_set_aside", "for=\"one\"") < 0.5);
    testbed.check_frames();
}
