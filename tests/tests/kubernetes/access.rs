//! Rights of the policy server's account: exactly those that it needs, and each that it lacks is named.

use std::fmt::Write as _;
use std::time::Duration;

use vipgate_tests::kubernetes::{ADMIN, ApiServer, POLICYD};
use vipgate_tests::{Testbed, wait_for};

use crate::fixture::{POOL, create_tenants, source, start_policyd_with};

const RIGHTS: [(&str, &str, &str); 20] = [
    ("", "services", "list, watch"),
    ("", "pods", "list, watch"),
    ("", "nodes", "list, watch"),
    ("", "namespaces", "get, list, watch"),
    ("discovery.k8s.io", "endpointslices", "list, watch"),
    ("networking.k8s.io", "servicecidrs", "list, watch"),
    ("vipgate.io", "egresspolicies", "list, watch"),
    ("vipgate.io", "clusteregresspolicies", "list, watch"),
    ("vipgate.io", "vipgateways", "list, watch"),
    ("vipgate.io", "addresspools", "list, watch"),
    ("vipgate.io", "overlaynodes", "list, watch"),
    ("", "services/status", "patch"),
    ("coordination.k8s.io", "leases", "get, create, update"),
    ("", "configmaps", "get, create, update"),
    ("", "events", "create, patch"),
    ("vipgate.io", "egresspolicies/status", "patch"),
    ("vipgate.io", "clusteregresspolicies/status", "patch"),
    ("vipgate.io", "vipgateways/status", "patch"),
    ("vipgate.io", "addresspools/status", "patch"),
    ("vipgate.io", "overlaynodes/status", "patch"),
];

/// Whether nothing is published without the right to this. Pods are read only for policies that select some, 1.20 has no
/// ServiceCIDRs, and others are for writing.
fn is_required(resource: &str) -> bool {
    !["pods", "servicecidrs", "leases", "configmaps", "events"].contains(&resource) && !resource.ends_with("/status")
}

/// Grants the policy server's account all rights, except those on one resource.
pub(crate) fn grant_all_but(api: &ApiServer, without: Option<&str>) {
    let mut role = "
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: policyd}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: policyd}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: policyd}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: policyd}
rules:
  - {apiGroups: [apiextensions.k8s.io], resources: [customresourcedefinitions], verbs: [get]}
"
    .to_owned();
    for (group, resource, verbs) in RIGHTS.iter().filter(|(_, resource, _)| Some(*resource) != without) {
        writeln!(role, "  - {{apiGroups: [\"{group}\"], resources: [{resource}], verbs: [{verbs}]}}").unwrap();
    }
    api.apply(&role);
}

#[test]
fn each_missing_right_is_named_and_nothing_is_published_without_it() {
    let testbed = Testbed::new("k8s-access");
    let api = ApiServer::new(&testbed.gateway);
    create_tenants(&testbed, &api);
    for (_, resource, _) in RIGHTS.iter().filter(|(_, resource, _)| is_required(resource)) {
        grant_all_but(&api, Some(resource));
        let denied = || api.try_kubectl(POLICYD, &["get", resource, "-A"]).is_err();
        assert!(wait_for(Duration::from_secs(10), denied), "{resource}");
        let policyd = start_policyd_with(&testbed, &source(&api, POLICYD, ""), false);
        policyd.wait_for_log(&["source_lost", resource, "forbidden"]);
        assert!(!policyd.log().contains("\"event\":\"policy\""), "{resource}: {}", policyd.log());
        // Granted while it runs, it goes on.
        grant_all_but(&api, None);
        policyd.wait_for_log(&["\"event\":\"ready\""]);
        policyd.kill();
    }
}

#[test]
fn without_rights_to_write_policy_is_in_force_and_the_missing_right_is_named() {
    const SERVICE: &str = "
apiVersion: v1
kind: Service
metadata: {name: new, namespace: tenant-a, annotations: {vipgate.io/announce: L2}}
spec: {type: LoadBalancer, ports: [{port: 80}]}
";
    let testbed = Testbed::new("k8s-write");
    let api = ApiServer::new(&testbed.gateway);
    create_tenants(&testbed, &api);
    api.apply(POOL);
    api.apply(SERVICE);
    for (resource, event) in
        [("leases", "lease_failed"), ("configmaps", "leases_stopped"), ("services/status", "address_failed")]
    {
        grant_all_but(&api, Some(resource));
        let policyd = start_policyd_with(&testbed, &source(&api, POLICYD, ""), true);
        policyd.wait_for_log(&[event, resource, "forbidden"]);
        policyd.kill();
    }
    let policyd = start_policyd_with(&testbed, &source(&api, POLICYD, ""), true);
    policyd.wait_for_log(&["address_failed", "forbidden"]);
    grant_all_but(&api, None);
    policyd.wait_for_log(&["address_assigned", "tenant-a/new", "203.0.113.30"]);
    policyd.kill();
}

#[test]
fn a_kubeconfig_that_cannot_be_used_is_reported_until_it_can() {
    let testbed = Testbed::new("k8s-kubeconfig");
    let api = ApiServer::new(&testbed.gateway);
    create_tenants(&testbed, &api);
    let path = testbed.folder.path().join("kubeconfig");
    let source = format!("source: {{kubernetes: {{kubeconfig: {}}}}}", path.display());
    let policyd = start_policyd_with(&testbed, &source, false);
    policyd.wait_for_log(&["source_lost", "kubeconfig"]);
    std::fs::write(&path, "not: [yaml").unwrap();
    policyd.wait_for_log(&["source_lost", "parse"]);
    std::fs::copy(api.kubeconfig(ADMIN), &path).unwrap();
    policyd.wait_for_log(&["\"event\":\"ready\""]);
    policyd.kill();
}
