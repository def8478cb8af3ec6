//! Status of vipgate's objects and Events, written by the leader of the policy servers.

use std::time::Duration;

use serde_json::{Value, json};
use vipgate_tests::cluster::Cluster;
use vipgate_tests::kubernetes::{ApiServer, POLICYD};
use vipgate_tests::policyd::Policyd;
use vipgate_tests::{Testbed, wait_for};

use crate::access::grant_all_but;
use crate::fixture::{BATCH_POD, BATCH_POLICY, P4, source, start_gateway, start_policyd, wait_in_step, wait_seen_as};

/// A gateway, and pools.
const OBJECTS: &str = "
apiVersion: vipgate.io/v1alpha1
kind: VipGateway
metadata: {name: gw-test}
spec: {node: node-1}
---
apiVersion: vipgate.io/v1alpha1
kind: AddressPool
metadata: {name: public}
spec: {ranges: [203.0.113.30-203.0.113.33], autoAssign: false}
---
apiVersion: vipgate.io/v1alpha1
kind: AddressPool
metadata: {name: small}
spec: {ranges: [203.0.113.40/32], reuseAfter: 0s}
";

/// A policy whose VIP another one has.
const CONFLICTING: &str = "
apiVersion: vipgate.io/v1alpha1
kind: EgressPolicy
metadata: {name: second, namespace: tenant-c}
spec:
  selectors: [{podSelector: {matchLabels: {app: second}}}]
  addresses: [203.0.113.30]
";

fn create(api: &ApiServer) {
    grant_all_but(api, None);
    create_objects(api, OBJECTS);
}

/// Creates these objects, and a policy with the pod that it covers.
fn create_objects(api: &ApiServer, objects: &str) {
    for manifests in [objects, BATCH_POLICY, BATCH_POD] {
        api.apply(manifests);
    }
    let address = json!({"status": {"phase": "Running", "podIP": P4, "podIPs": [{"ip": P4}]}});
    api.patch_status("pod", "tenant-c", "batch-0", &address);
}

/// A condition as `status reason`, such as `True Programmed`; empty if there is none.
fn condition(object: &Value, kind: &str) -> String {
    let conditions = object["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let found = conditions.iter().find(|it| it["type"] == kind);
    found
        .map_or_else(String::new, |it| format!("{} {}", it["status"].as_str().unwrap(), it["reason"].as_str().unwrap()))
}

/// Waits until conditions of an object are as expected, of its present generation; returns the object.
#[track_caller]
fn wait_conditions(
    api: &ApiServer,
    policyd: &Policyd,
    (resource, namespace, name): (&str, &str, &str),
    expected: &[(&str, &str)],
) -> Value {
    let object = || api.get(resource, namespace, name);
    let is_as_expected = || {
        let object = object();
        let all = object["status"]["conditions"].as_array().cloned().unwrap_or_default();
        all.iter().all(|it| it["observedGeneration"] == object["metadata"]["generation"])
            && expected.iter().all(|(kind, expected)| condition(&object, kind) == *expected)
    };
    assert!(wait_for(Duration::from_secs(20), is_as_expected), "{:#}\n{}", object(), policyd.log());
    object()
}

/// Resource versions of all objects with a status: they change with each write.
fn versions(api: &ApiServer) -> String {
    let path = "-o=jsonpath={range .items[*]}{.kind}/{.metadata.name} {.metadata.resourceVersion}{\"\\n\"}{end}";
    api.kubectl(&["get", "egresspolicies,clusteregresspolicies,vipgateways,addresspools,overlaynodes", "-A", path])
}

/// Events of an object as `reason count`.
fn events(api: &ApiServer, kind: &str, name: &str) -> Vec<String> {
    let selector = format!("involvedObject.kind={kind},involvedObject.name={name}");
    let list = api.kubectl(&["get", "events", "-A", "--field-selector", &selector, "-o", "json"]);
    let list: Value = serde_json::from_str(&list).unwrap();
    let text = |event: &Value| format!("{} {}", event["reason"].as_str().unwrap(), event["count"]);
    let mut all: Vec<String> = list["items"].as_array().unwrap().iter().map(text).collect();
    all.sort();
    all
}

#[track_caller]
fn wait_events(api: &ApiServer, policyd: &Policyd, (kind, name): (&str, &str), expected: &[&str]) {
    let has = || events(api, kind, name) == expected;
    assert!(wait_for(Duration::from_secs(15), has), "{:?}\n{}", events(api, kind, name), policyd.log());
}

/// The row of an object in a table of `kubectl get`, by heading. Cells are aligned, and may be empty.
fn row(api: &ApiServer, arguments: &[&str]) -> Vec<(String, String)> {
    let table = api.kubectl(&[&["get"], arguments].concat());
    let mut lines = table.lines();
    let (headings, values) = (lines.next().unwrap(), lines.next().unwrap());
    let is_start = |at: &usize| !headings[*at..].starts_with(' ') && (*at == 0 || headings[..*at].ends_with(' '));
    let starts: Vec<usize> = (0..headings.len()).filter(is_start).collect();
    let ends = starts[1..].iter().copied().chain([usize::MAX]);
    let part = |line: &str, start: usize, end: usize| {
        line.get(start..end.min(line.len())).unwrap_or_default().trim().to_owned()
    };
    starts.iter().zip(ends).map(|(start, end)| (part(headings, *start, end), part(values, *start, end))).collect()
}

fn cell<'a>(row: &'a [(String, String)], heading: &str) -> &'a str {
    let found = row.iter().find(|(name, _)| name == heading);
    found.map_or_else(|| panic!("no {heading} in {row:?}"), |(_, value)| value)
}

/// Whether the pool records when `address` got free. Its counts follow what is recorded.
fn is_free_and_counted(api: &ApiServer, address: &str) -> bool {
    let pool = api.get("addresspool", "", "public");
    let mut record = pool["status"]["addresses"].as_array().unwrap().iter().map(|line| line.as_str().unwrap());
    let is_recorded = record.any(|line| line.starts_with(&format!("{address} ")) && line.ends_with('Z'));
    is_recorded && (&pool["status"]["used"], &pool["status"]["quarantined"]) == (&json!(1), &json!(1))
}

const POLICY: (&str, &str, &str) = ("egresspolicy", "tenant-c", "batch");
const IN_FORCE: [(&str, &str); 2] = [("Accepted", "True Accepted"), ("Programmed", "True Programmed")];

#[test]
fn a_policy_is_programmed_once_the_gateway_has_it_and_nothing_is_written_twice() {
    let mut testbed = Testbed::new("k8s-status");
    let api = ApiServer::new(&testbed.gateway);
    create(&api);
    let mut policyd = start_policyd(&testbed, &source(&api, POLICYD, ""));
    let no_gateway = [("Accepted", "True Accepted"), ("Programmed", "False NoGateway")];
    wait_conditions(&api, &policyd, POLICY, &no_gateway);
    start_gateway(&mut testbed, "");
    wait_seen_as(&testbed, 3, "203.0.113.30");
    let object = wait_conditions(&api, &policyd, POLICY, &IN_FORCE);
    let status = &object["status"];
    assert_eq!((&status["addresses"], &status["endpoints"]), (&json!(["203.0.113.30"]), &json!(1)));
    assert_eq!((&status["gateways"], &status["gatewayCount"]), (&json!(["gw-test"]), &json!(1)));
    let gateway = wait_conditions(
        &api,
        &policyd,
        ("vipgateway", "", "gw-test"),
        &[("Accepted", "True Accepted"), ("Ready", "True Active"), ("Draining", "False NotDraining")],
    );
    assert_eq!((&gateway["status"]["vips"], &gateway["status"]["version"]), (&json!(1), &json!("0.1.0")));

    // What a person asks first.
    let table = row(&api, &["egresspolicies", "-n", "tenant-c"]);
    assert_eq!((cell(&table, "ADDRESSES"), cell(&table, "ENDPOINTS")), ("[\"203.0.113.30\"]", "1"));
    assert_eq!((cell(&table, "ACCEPTED"), cell(&table, "PROGRAMMED")), ("True", "True"));
    let table = row(&api, &["vipgateways"]);
    assert_eq!((cell(&table, "READY"), cell(&table, "DRAINING"), cell(&table, "VIPS")), ("True", "False", "1"));
    let table = row(&api, &["addresspools", "public"]);
    assert_eq!((cell(&table, "CAPACITY"), cell(&table, "USED")), ("4", "1"));

    // Another generation is observed; the condition's time stays, since its status does.
    let since = |object: &Value| object["status"]["conditions"][0]["lastTransitionTime"].clone();
    let patch = json!({"spec": {"addresses": ["203.0.113.31"]}}).to_string();
    api.kubectl(&["patch", "egresspolicy", "-n", "tenant-c", "batch", "--type=merge", "-p", &patch]);
    let changed = wait_conditions(&api, &policyd, POLICY, &IN_FORCE);
    assert_eq!(
        (&changed["metadata"]["generation"], &changed["status"]["addresses"][0]),
        (&json!(2), &json!("203.0.113.31"))
    );
    assert_eq!(since(&changed), since(&object));
    wait_seen_as(&testbed, 3, "203.0.113.31");

    // A status is no change of policy, and nothing is written while nothing changes. A server that leads for a few seconds
    // only doesn't record yet that an address is free.
    let is_free = || is_free_and_counted(&api, "203.0.113.30");
    assert!(wait_for(Duration::from_secs(15), is_free), "{}", policyd.log());
    let (before, version) = (versions(&api), wait_in_step(&testbed));
    std::thread::sleep(Duration::from_secs(4));
    assert_eq!((versions(&api), wait_in_step(&testbed)), (before.clone(), version.clone()));
    // Nor by another leader, which the gateway reconnects to.
    policyd.process().signal("TERM").unwrap();
    policyd.wait_for_log(&["leader_released"]);
    drop(policyd);
    let policyd = start_policyd(&testbed, &source(&api, POLICYD, ""));
    policyd.wait_for_log(&["leader_elected"]);
    wait_in_step(&testbed);
    std::thread::sleep(Duration::from_secs(13));
    assert_eq!((versions(&api), wait_in_step(&testbed)), (before, version), "{}", policyd.log());
    assert!(policyd.metric("vipgate_policyd_writes_total", "of=\"status\"") < 0.5);
    assert!(policyd.metric("vipgate_policyd_status_pending", "") < 0.5);
    // But for the number of sessions, after a while.
    let sessions = || api.get("vipgateway", "", "gw-test")["status"]["sessions"].as_u64();
    assert!(wait_for(Duration::from_secs(35), || sessions().is_some()), "{}", policyd.log());
    testbed.accounting.allow(["no_policy", "no_service"]);
    policyd.kill();
    testbed.stop("TERM");
}

#[test]
fn what_is_not_in_force_says_why_and_is_an_event_once() {
    let testbed = Testbed::new("k8s-rejected");
    let api = ApiServer::new(&testbed.gateway);
    create(&api);
    let mut policyd = start_policyd(&testbed, &source(&api, POLICYD, ""));
    wait_conditions(&api, &policyd, POLICY, &[("Accepted", "True Accepted")]);
    api.apply(CONFLICTING);
    let second = ("egresspolicy", "tenant-c", "second");
    let conflict = [("Accepted", "False AddressConflict"), ("Programmed", "False NotAccepted")];
    let object = wait_conditions(&api, &policyd, second, &conflict);
    let message = object["status"]["conditions"][0]["message"].as_str().unwrap();
    assert!(message.contains("EgressPolicy tenant-c/batch") && message.contains("VG0410"), "{message}");
    wait_events(&api, &policyd, ("EgressPolicy", "second"), &["AddressConflict 1"]);
    assert_eq!(events(&api, "EgressPolicy", "batch"), [""; 0]);
    let described = api.kubectl(&["describe", "egresspolicy", "-n", "tenant-c", "second"]);
    assert!(described.contains("vipgate-policyd"), "{described}");

    // What says something else isn't in force, and nor is what it said before.
    let outside = json!({"spec": {"addresses": ["203.0.114.1"]}}).to_string();
    api.kubectl(&["patch", "egresspolicy", "-n", "tenant-c", "batch", "--type=merge", "-p", &outside]);
    let object = wait_conditions(&api, &policyd, POLICY, &[("Accepted", "False AddressOutsidePools")]);
    assert_eq!(object["status"]["addresses"], json!([]));
    wait_events(&api, &policyd, ("EgressPolicy", "batch"), &["Rejected 1"]);

    // Another leader repeats no Event, and a deleted object that is created again is another one.
    policyd.process().signal("TERM").unwrap();
    policyd.wait_for_log(&["leader_released"]);
    drop(policyd);
    let policyd = start_policyd(&testbed, &source(&api, POLICYD, ""));
    policyd.wait_for_log(&["leader_elected"]);
    std::thread::sleep(Duration::from_secs(4));
    assert_eq!(events(&api, "EgressPolicy", "second"), ["AddressConflict 1"]);
    api.delete("egresspolicy", "tenant-c", "second");
    api.apply(&CONFLICTING.replace("203.0.113.30", "203.0.113.32"));
    let object = wait_conditions(&api, &policyd, second, &[("Accepted", "True NoPodSelected")]);
    assert_eq!(object["metadata"]["generation"], 1);
    api.delete("egresspolicy", "tenant-c", "second");
    std::thread::sleep(Duration::from_secs(2));
    assert!(
        policyd.metric("vipgate_policyd_writes_total", "of=\"status\",result=\"failed\"") < 0.5,
        "{}",
        policyd.log()
    );
    policyd.kill();
}

#[test]
fn pools_say_what_is_used_and_services_why_they_have_no_address() {
    let testbed = Testbed::new("k8s-usage");
    let api = ApiServer::new(&testbed.gateway);
    create(&api);
    let policyd = start_policyd(&testbed, &source(&api, POLICYD, ""));
    let service = |name: &str| {
        format!(
            "apiVersion: v1\nkind: Service\n\
             metadata: {{name: {name}, namespace: tenant-c, annotations: {{vipgate.io/announce: L2}}}}\n\
             spec: {{type: LoadBalancer, ports: [{{port: 80}}]}}\n"
        )
    };
    let small = ("addresspool", "", "small");
    wait_conditions(&api, &policyd, small, &[("Accepted", "True Accepted"), ("Exhausted", "False AddressesFree")]);
    api.apply(&service("first"));
    let pool = wait_conditions(&api, &policyd, small, &[("Exhausted", "True NoAddressFree")]);
    let expected = [
        ("capacity", json!(1)),
        ("used", json!(1)),
        ("quarantined", json!(0)),
        ("namespaces", json!([{"name": "tenant-c", "used": 1}])),
        ("addresses", json!(["203.0.113.40 Service tenant-c/first"])),
    ];
    for (field, value) in expected {
        assert_eq!(pool["status"][field], value, "{field}");
    }
    wait_events(&api, &policyd, ("AddressPool", "small"), &["PoolExhausted 1"]);
    wait_events(&api, &policyd, ("Service", "first"), &["AddressAssigned 1"]);
    api.apply(&service("next"));
    wait_events(&api, &policyd, ("Service", "next"), &["AddressRefused 1"]);
    let described = api.kubectl(&["describe", "service", "-n", "tenant-c", "next"]);
    assert!(described.contains("no IPv4 address is free in AddressPool small"), "{described}");
    api.delete("service", "tenant-c", "first");
    wait_events(&api, &policyd, ("Service", "next"), &["AddressAssigned 1", "AddressRefused 1"]);
    wait_events(&api, &policyd, ("Service", "first"), &["AddressAssigned 1", "AddressReleased 1"]);
    policyd.kill();
}

#[test]
fn the_end_of_a_gateway_is_shown_and_is_an_event() {
    let mut testbed = Testbed::new("k8s-failover");
    let api = ApiServer::new(&testbed.gateway);
    create(&api);
    let policyd = start_policyd(&testbed, &source(&api, POLICYD, ""));
    start_gateway(&mut testbed, "");
    wait_seen_as(&testbed, 3, "203.0.113.30");
    let gateway = ("vipgateway", "", "gw-test");
    wait_conditions(&api, &policyd, gateway, &[("Ready", "True Active")]);
    testbed.accounting.allow(["no_policy", "no_service"]);
    testbed.stop("KILL");
    wait_conditions(&api, &policyd, gateway, &[("Ready", "False NotConnected")]);
    wait_events(&api, &policyd, ("VipGateway", "gw-test"), &["Failover 1"]);
    wait_conditions(&api, &policyd, POLICY, &[("Accepted", "True Accepted"), ("Programmed", "False NoGateway")]);
    policyd.kill();
}

#[test]
fn a_drained_gateway_has_no_vips_and_says_so() {
    let mut cluster = Cluster::new("k8s-drained", 2);
    let api = ApiServer::new(&cluster.management);
    grant_all_but(&api, None);
    let gateways = "kind: VipGateway\nmetadata: {name: gw-1}\nspec: {peerAddress: 10.2.0.1}\n---\n\
                    apiVersion: vipgate.io/v1alpha1\nkind: VipGateway\nmetadata: {name: gw-2}\n\
                    spec: {peerAddress: 10.2.0.2}\n";
    let gateway = "kind: VipGateway\nmetadata: {name: gw-test}\nspec: {node: node-1}\n";
    create_objects(&api, &OBJECTS.replace(gateway, gateways));
    cluster.start_policyd(&(source(&api, POLICYD, "") + "\nmembership: {max_unavailable: 1}"));
    cluster.start_gateways("");
    let policyd = cluster.policyd.as_ref().unwrap();
    wait_conditions(&api, policyd, POLICY, &IN_FORCE);
    let gateways = [("vipgateway", "", "gw-1"), ("vipgateway", "", "gw-2")];
    for gateway in gateways {
        wait_conditions(&api, policyd, gateway, &[("Ready", "True Active"), ("Draining", "False NotDraining")]);
    }
    let (code, _, stderr) = cluster.gateways[0].command(&["drain", "--wait", "20"]);
    assert_eq!(code, 0, "{stderr}");
    let drained = [("Ready", "False Drained"), ("Draining", "True Drained")];
    let object = wait_conditions(&api, policyd, gateways[0], &drained);
    assert_eq!(object["status"]["vips"], 0);
    let has_vip = || api.get("vipgateway", "", "gw-2")["status"]["vips"] == 1;
    assert!(wait_for(Duration::from_secs(10), has_vip), "{}", policyd.log());
    wait_events(&api, policyd, ("VipGateway", "gw-1"), &["Drained 1"]);
    let object = wait_conditions(&api, policyd, POLICY, &IN_FORCE);
    assert_eq!(object["status"]["gateways"], json!(["gw-1", "gw-2"]), "those that may have a part");
    // The other one must wait for it.
    cluster.gateways[1].command(&["drain", "--wait", "0"]);
    wait_conditions(&api, policyd, gateways[1], &[("Ready", "True Active"), ("Draining", "True Blocked")]);
    cluster.gateways[1].command(&["undrain", "--wait", "0"]);
    wait_conditions(&api, policyd, gateways[1], &[("Ready", "True Active"), ("Draining", "False NotDraining")]);
    let (code, _, stderr) = cluster.gateways[0].command(&["undrain", "--wait", "20"]);
    assert_eq!(code, 0, "{stderr}");
    wait_conditions(&api, policyd, gateways[0], &[("Ready", "True Active"), ("Draining", "False NotDraining")]);
    wait_events(&api, policyd, ("VipGateway", "gw-1"), &["Active 1", "Drained 1"]);
}

/// One of each of the other kinds.
const OTHERS: &str = "
apiVersion: vipgate.io/v1alpha1
kind: ClusterEgressPolicy
metadata: {name: all}
spec:
  selectors: [{podSelector: {matchLabels: {app: none}}}]
  addresses: [203.0.113.33]
---
apiVersion: vipgate.io/v1alpha1
kind: OverlayNode
metadata: {name: node-1}
spec: {address: 192.0.2.1, vni: 1, mac: \"02:00:00:00:00:01\", podCIDRs: [10.244.0.0/24]}
";

#[test]
fn without_rights_to_write_status_everything_else_goes_on() {
    let testbed = Testbed::new("k8s-status-rights");
    let api = ApiServer::new(&testbed.gateway);
    create(&api);
    api.apply(OTHERS);
    for (resource, namespace, name) in [
        ("egresspolicies", "tenant-c", "batch"),
        ("clusteregresspolicies", "", "all"),
        ("vipgateways", "", "gw-test"),
        ("addresspools", "", "public"),
        ("overlaynodes", "", "node-1"),
    ] {
        let right = format!("{resource}/status");
        grant_all_but(&api, Some(&right));
        api.patch_status(resource, namespace, name, &json!({"status": null}));
        let policyd = start_policyd(&testbed, &source(&api, POLICYD, ""));
        policyd.wait_for_log(&["status_failed", &right, "forbidden"]);
        assert!(policyd.metric("vipgate_policyd_writes_total", "of=\"status\",result=\"denied\"") > 0.5);
        std::thread::sleep(Duration::from_secs(2));
        assert_eq!(policyd.log().matches("status_failed").count(), 1, "{}", policyd.log());
        policyd.kill();
    }
    grant_all_but(&api, Some("events"));
    let policyd = start_policyd(&testbed, &source(&api, POLICYD, ""));
    api.apply(CONFLICTING);
    policyd.wait_for_log(&["event_failed", "events", "forbidden"]);
    let second = ("egresspolicy", "tenant-c", "second");
    wait_conditions(&api, &policyd, second, &[("Accepted", "False AddressConflict")]);
    for object in [("overlaynode", "", "node-1"), ("clusteregresspolicy", "", "all"), POLICY] {
        let accepted = |object: &Value| condition(object, "Accepted").starts_with("True");
        let is_accepted = || accepted(&api.get(object.0, object.1, object.2));
        assert!(wait_for(Duration::from_secs(10), is_accepted), "{object:?}\n{}", policyd.log());
    }
    assert_eq!(policyd.log().matches("event_failed").count(), 1, "{}", policyd.log());
    policyd.kill();
}
