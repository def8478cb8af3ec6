//! Observation.

use vipgate_cloud::gcp::Gcp;
use vipgate_cloud::{Associate, Attachment, ConfigError, GatewayNic, NicId, Provider};
use vipgate_cloud_testkit::GcpAddress;

use crate::gcp::bench::{Bench, NIC_1, NIC_2, config, ip, our_claim};

#[tokio::test]
async fn addresses_are_those_with_all_labels_and_nics_those_of_gateways() {
    let bench = Bench::new().await;
    let observed = bench.observe().await;
    let names: Vec<&str> = observed.addresses.iter().map(|it| it.id.0.as_str()).collect();
    assert_eq!(names, ["vip-1", "vip-2"]);
    let first = &observed.addresses[0];
    assert_eq!(
        (first.address, &first.claim, &first.token, &first.attachment),
        (ip("203.0.113.1"), &None, &None, &None)
    );
    assert!(first.private.is_empty(), "nobody has claimed it");
    let nics: Vec<_> =
        observed.nics.iter().map(|nic| (nic.id.0.as_str(), nic.capacity.v4, nic.missing.len())).collect();
    assert_eq!(nics, [(NIC_1, 1, 0), (NIC_2, 1, 0)]);
    assert_eq!(observed.free().count(), 2);
    let requests = bench.requests();
    assert_eq!(requests.len(), 3);
    let list = requests.iter().find(|it| it.path.ends_with("/addresses")).expect("a list");
    assert_eq!(list.parameter("filter"), Some(r#"(labels.pool = "edge") AND (labels.team = "net")"#));
}

#[tokio::test]
async fn a_claimed_address_has_the_primary_private_addresses_of_gateways() {
    let bench = Bench::claimed().await;
    let private = bench.address("vip-1").await.private;
    let expected = [(NIC_1, "10.0.0.11"), (NIC_2, "10.0.0.12")];
    assert_eq!(private, expected.map(|(nic, private)| (NicId(nic.to_owned()), ip(private))).into());
}

#[tokio::test]
async fn a_list_is_read_to_its_last_page() {
    let bench = Bench::new().await;
    bench.server.with(|cloud| {
        cloud.page_size = 2;
        for number in 3..=9 {
            let labels = [("pool", "edge"), ("team", "net")];
            cloud.add_address(&format!("vip-{number}"), &format!("203.0.113.1{number}"), &labels);
        }
    });
    assert_eq!(bench.observe().await.addresses.len(), 9);
    let lists = bench.requests().into_iter().filter(|it| it.path.ends_with("/addresses")).count();
    assert_eq!(lists, 5);
}

#[tokio::test]
async fn internal_and_ipv6_addresses_are_left_out() {
    let bench = Bench::new().await;
    bench.server.with(|cloud| {
        let labels = cloud.state.addresses["vip-1"].labels.clone();
        let internal = GcpAddress {
            address: "10.9.9.9".to_owned(),
            address_type: "INTERNAL".to_owned(),
            labels: labels.clone(),
            ..GcpAddress::default()
        };
        let ipv6 = GcpAddress { address: "2001:db8::".to_owned(), labels, ..GcpAddress::default() };
        cloud.state.addresses.insert("internal".to_owned(), internal);
        cloud.state.addresses.insert("ipv6".to_owned(), ipv6);
    });
    assert_eq!(bench.observe().await.addresses.len(), 2);
}

#[tokio::test]
async fn an_attachment_says_whether_a_gateway_an_instance_or_something_else_has_the_address() {
    let bench = Bench::attached().await;
    let rule = "https://www.googleapis.com/compute/v1/projects/p1/regions/europe-west1/forwardingRules/web";
    bench.server.with(|cloud| {
        cloud.change(|state| state.addresses.get_mut("vip-2").expect("there").user = Some(rule.to_owned()));
        cloud.add_address("vip-3", "203.0.113.3", &[("pool", "edge"), ("team", "net")]);
        cloud.attach("203.0.113.3", "other-vm");
    });
    let observed = bench.observe().await;
    let attachments: Vec<_> = observed.addresses.iter().map(|it| it.attachment.clone()).collect();
    let gateway = Attachment {
        nic: Some(NicId(NIC_1.to_owned())),
        private: Some(ip("10.0.0.11")),
        id: Some("vipgate-203-0-113-1".to_owned()),
    };
    let other = Attachment { nic: None, private: None, id: None };
    let foreign = Attachment { nic: Some(NicId("europe-west1-c/other-vm/-".to_owned())), private: None, id: None };
    assert_eq!(attachments, [Some(gateway), Some(other), Some(foreign)]);
    assert_eq!(observed.addresses[0].claim, Some(our_claim()));
}

#[tokio::test]
async fn capacity_counts_no_access_config_of_others() {
    let bench = Bench::attached().await;
    bench.server.with(|cloud| cloud.attach("203.0.113.9", "gw-2"));
    let capacity = |nics: &[vipgate_cloud::Nic]| nics.iter().map(|nic| nic.capacity.v4).collect::<Vec<_>>();
    assert_eq!(capacity(&bench.observe().await.nics), [1, 0]);
    // An address of the pool that somebody attached without a claim isn't ours, either.
    bench.server.with(|cloud| cloud.attach("203.0.113.2", "gw-2"));
    assert_eq!(capacity(&bench.observe().await.nics), [1, 0]);
}

#[tokio::test]
async fn a_nic_that_can_not_serve_says_why() {
    let bench = Bench::new().await;
    bench.server.with(|cloud| {
        cloud.change(|state| state.instances.get_mut("gw-1").expect("there").can_ip_forward = false);
    });
    let mut scope = Bench::scope();
    let gateway = |name: &str, instance: &str, nic: Option<&str>| GatewayNic {
        gateway: name.to_owned(),
        instance: instance.to_owned(),
        nic: nic.map(str::to_owned),
    };
    scope.gateways.truncate(1);
    scope.gateways.push(gateway("gw-2", "gce://p1/europe-west1-c/gw-2", Some("0")));
    scope.gateways.push(gateway("gw-3", "gce://p1/us-east1-b/gw-3", None));
    scope.gateways.push(gateway("gw-4", "gce://p1/europe-west1-b/absent", None));
    scope.gateways.push(gateway("gw-5", "gce://p1/europe-west1-c/gw-2", Some("nic7")));
    scope.gateways.push(gateway("gw-6", "aws:///eu-west-1a/i-1", None));
    let nics = bench.provider.observe(&scope).await.expect("an observation").nics;
    let found: Vec<_> =
        nics.iter().map(|nic| (nic.gateway.as_str(), nic.capacity.v4, nic.missing.join(", "))).collect();
    let region = "to be in the project and the region of the pool".to_owned();
    assert_eq!(found, [("gw-1", 1, "canIpForward".to_owned()), ("gw-2", 1, String::new()), ("gw-3", 0, region)]);
}

#[tokio::test]
async fn a_configuration_that_is_not_possible_is_rejected() {
    let valid = config("http://127.0.0.1:1");
    let reject = |config| Gcp::new(&config, std::sync::Arc::default()).expect_err("rejected");
    let error = reject(vipgate_cloud::gcp::Config { associate: Associate::Nic, ..valid.clone() });
    assert_eq!(error, ConfigError::Associate);
    assert!(error.to_string().contains("use associate: instance"), "{error}");
    let named = vipgate_cloud::gcp::Config { region: "a/b".to_owned(), ..valid.clone() };
    assert!(matches!(reject(named), ConfigError::Name { field: "region", .. }));
    let plain = vipgate_cloud::gcp::Config { endpoint: Some("http://compute.example.com".to_owned()), ..valid };
    assert!(matches!(reject(plain), ConfigError::Endpoint(_)));
}
