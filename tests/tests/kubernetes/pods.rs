//! Policies that select pods by labels: pods are read while there is one.

use std::time::Duration;

use serde_json::json;
use vipgate_tests::kubernetes::{ApiServer, POLICYD};
use vipgate_tests::{SERVER, Testbed, wait_for};

use crate::access::grant_all_but;
use crate::fixture::{
    BATCH_POD, BATCH_POLICY, P4, POOL, VIP_POOL, create_tenants, source, start_gateway, start_policyd, status,
    wait_health, wait_in_step, wait_seen_as,
};

#[test]
fn pods_are_read_while_a_policy_selects_some() {
    let mut testbed = Testbed::new("k8s-pods");
    let api = ApiServer::new(&testbed.gateway);
    create_tenants(&testbed, &api);
    // Without the right to read pods, which nobody needs yet.
    grant_all_but(&api, Some("pods"));
    // With strict tenancy they are always read: whose an address of a slice is, only pods say.
    let policyd = start_policyd(&testbed, &(source(&api, POLICYD, "") + "\ntenancy: open"));
    start_gateway(&mut testbed, "");
    wait_in_step(&testbed);
    wait_health(&testbed, &policyd, None);

    api.apply(POOL);
    api.apply(BATCH_POLICY);
    wait_health(&testbed, &policyd, Some("Pod: "));
    grant_all_but(&api, None);
    wait_health(&testbed, &policyd, None);
    // A pod exists before it has an address.
    api.apply(BATCH_POD);
    let address = json!({"status": {"phase": "Running", "podIP": P4, "podIPs": [{"ip": P4}]}});
    api.patch_status("pod", "tenant-c", "batch-0", &address);
    wait_seen_as(&testbed, 3, VIP_POOL);

    // Other labels, and it is uncovered; the old ones, and it is covered again.
    api.kubectl(&["label", "-n", "tenant-c", "pod", "batch-0", "app=web", "--overwrite"]);
    testbed.wait_uncovered(&testbed.pods[3], SERVER[0], P4);
    api.kubectl(&["label", "-n", "tenant-c", "pod", "batch-0", "app=batch", "--overwrite"]);
    wait_seen_as(&testbed, 3, VIP_POOL);
    api.delete("egresspolicies", "tenant-c", "batch");
    testbed.wait_uncovered(&testbed.pods[3], SERVER[0], P4);
    let objects = || policyd.metric("vipgate_policy_objects", "state=\"accepted\"");
    let with_pods = objects();
    api.apply(BATCH_POD.replace("batch-0", "batch-1").as_str());
    std::thread::sleep(Duration::from_millis(500));
    assert!((objects() - with_pods).abs() < 0.5, "pods are still read: {}", status(&testbed));
    assert!(wait_for(Duration::from_secs(5), || status(&testbed)["gateways"][0]["in_step"] == true));
    policyd.kill();
    testbed.stop("TERM");
}
