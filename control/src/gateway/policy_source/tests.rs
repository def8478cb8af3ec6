//! The policy of manifests in files: the first one, and updates that the gateway rejects.

use std::fs;
use std::os::unix::fs::symlink;

use vipgate_dataplane::policy::change::Entries;

use super::*;
use crate::source::store::ManifestStore;
use crate::xds::fixtures::sample_placement;
use crate::xds::resource::version_of;

/// A Service in a namespace of the same name, with a VIP, an endpoint and the annotation.
fn tenant(name: &str, number: u8) -> String {
    format!(
        "apiVersion: v1\nkind: Service\n\
         metadata: {{name: {name}, namespace: {name}, annotations: {{vipgate.io/egress: \"true\"}}}}\n\
         spec: {{type: LoadBalancer, ports: [{{port: 80}}]}}\n\
         status: {{loadBalancer: {{ingress: [{{ip: 203.0.113.{number}}}]}}}}\n\
         ---\n\
         apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
         metadata: {{name: {name}-1, namespace: {name}, labels: {{kubernetes.io/service-name: {name}}}}}\n\
         addressType: IPv4\nendpoints: [{{addresses: [10.0.0.{number}]}}]\n"
    )
}

/// The gateway's predecessor may have covered the tenant, whose pods would leave with their own addresses.
#[tokio::test]
async fn there_is_no_policy_at_the_start_while_a_file_cannot_be_read_and_then_the_whole_one() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    fs::write(at("a.yaml"), tenant("a", 1)).unwrap();
    // It is there, and gives EIO.
    symlink("/proc/self/mem", at("b.yaml")).unwrap();
    let ingester = SourceIngester::new("files of a test".to_owned(), ManifestStore::new(false));
    let files = WatchedFiles::new(vec![directory.path().to_owned()]);
    let opened = PolicySubscription::files(files, GatewayLocality::named("g1"), ingester).await;
    let (mut subscription, update) = opened.unwrap();
    assert!(update.is_none());
    let status = subscription.files.as_ref().unwrap().status.clone();
    let reason = status.health.load().waiting_reason().unwrap();
    assert!(reason.contains("b.yaml: can't be read: ") && reason.ends_with("it is read again in a moment"), "{reason}");
    fs::write(at("draft"), tenant("b", 2)).unwrap();
    fs::rename(at("draft"), at("b.yaml")).unwrap();
    let event = tokio::time::timeout(Duration::from_secs(5), subscription.next()).await.expect("a policy");
    match event {
        ClientEvent::Update(update, _) => {
            assert_eq!((update.change.vips.len(), update.change.endpoints.len()), (2, 2));
        }
        ClientEvent::Rejected(reason) => panic!("{reason}"),
    }
}

#[test]
fn an_update_contains_what_the_gateway_has_rejected_before_unless_that_is_gone() {
    let mut gateway = Subscriber { locality: GatewayLocality::named("g1"), ..Subscriber::default() };
    let publish = |gateway: &mut Subscriber, endpoints: u8| {
        let update = gateway.publish(Arc::new(sample_placement(endpoints))).unwrap();
        update.map(|update| (update.change, update.peers))
    };
    let (first, peers) = publish(&mut gateway, 2).unwrap();
    assert_eq!((first.vips.len(), first.endpoints.len(), first.services.len()), (1, 2, 1));
    assert_eq!((&first.version, &peers), (&version_of(&sample_placement(2)), &sample_placement(2).peers));
    gateway.record_outcome(true);
    assert!(publish(&mut gateway, 2).is_none(), "it is in force");

    // The second time it is read again without a change.
    for endpoints in [3, 3, 4] {
        let (change, _) = publish(&mut gateway, endpoints).unwrap();
        assert_eq!((change.vips.len(), change.endpoints.len()), (0, usize::from(endpoints) - 2));
        gateway.record_outcome(false);
    }
    let (change, _) = publish(&mut gateway, 2).unwrap();
    assert!(change.is_empty() && change.version == first.version, "it clears the error: {change:?}");
    gateway.record_outcome(true);
    assert!(publish(&mut gateway, 2).is_none());

    let (change, _) = publish(&mut gateway, 1).unwrap();
    assert_eq!(change.endpoints, Entries::default().without(["10.0.0.2".parse().unwrap()]));
    gateway.record_outcome(true);
    assert_eq!(gateway.store.version(), version_of(&sample_placement(1)));
}
