//! AWS: boto3 against the fake, and our provider against moto.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use vipgate_cloud::aws::Aws;
use vipgate_cloud::{
    Allocation, Associate, Binding, Claim, ErrorKind, GatewayNic, Nic, Provider, PublicAddress, Scope,
};
use vipgate_cloud_testkit::aws::FakeAws;
use vipgate_cloud_testkit::{FakeServer, RecordedRequest};

use crate::aws::world::{keys, provider};
use crate::calls::Calls;
use crate::contract::vendor_client::{Service, assert_golden, run};

/// Parameters of a request.
type Parameters = BTreeSet<(String, String)>;

const PRIVATE: [&str; 2] = ["10.0.0.77", "10.0.1.77"];

/// A region with two instances and an address.
async fn region() -> (FakeServer<FakeAws>, Value) {
    let mut cloud = FakeAws::new();
    let (first, a) = cloud.add_instance("c7gn.xlarge", "eu-west-1a");
    let (second, b) = cloud.add_instance("c7gn.xlarge", "eu-west-1b");
    let allocation = cloud.add_address([203, 0, 113, 1].into(), &[("vipgate", "public")]);
    let state = json!({"allocation": allocation, "enis": [a, b], "instances": [first, second], "private": PRIVATE});
    (FakeServer::start(cloud).await.unwrap(), state)
}

fn scope(instances: &Value) -> Scope {
    let gateway = |(name, instance): (&str, &Value)| GatewayNic {
        gateway: name.to_owned(),
        instance: instance.as_str().unwrap().to_owned(),
        nic: None,
    };
    let gateways = ["a", "b"].into_iter().zip(instances.as_array().unwrap()).map(gateway).collect();
    Scope { tags: [("vipgate".to_owned(), "public".to_owned())].into(), prefixes: vec![], gateways }
}

/// The life of a VIP by our provider, as in `aws.py`.
async fn flow(aws: &Aws, scope: &Scope) {
    let address = async |aws: &Aws| aws.observe(scope).await.unwrap().addresses.remove(0);
    let observed = aws.observe(scope).await.unwrap();
    let nics: Vec<Nic> = observed.nics;
    let claim = Claim { cluster: "prod".to_owned(), owner: "Service default/web".to_owned() };
    aws.claim(&observed.addresses[0], &claim).await.unwrap();
    for (nic, private) in nics.iter().zip(PRIVATE) {
        let candidate = format!("{private}/32").parse().unwrap();
        aws.prepare(nic, &[address(aws).await], &[candidate]).await.unwrap();
    }
    let prepared: PublicAddress = address(aws).await;
    let binding = |nic: &Nic| Binding { address: prepared.clone(), private: prepared.private[&nic.id] };
    aws.attach(&nics[0], &[binding(&nics[0])]).await.unwrap();
    aws.move_from_dead(&nics[0].id, &nics[1], &[binding(&nics[1])]).await.unwrap();
    aws.detach(&nics[1].id, std::slice::from_ref(&prepared)).await.unwrap();
    for nic in &nics {
        aws.unprepare(nic, &[binding(nic)]).await.unwrap();
    }
    aws.unclaim(&prepared).await.unwrap();
    let claim = Claim { cluster: "prod".to_owned(), owner: "Service default/new".to_owned() };
    let (tags, token) = (scope.tags.clone(), "token".to_owned());
    let new = aws.allocate(&Allocation { tags, claim, is_ipv6: false, zone: None, token }).await.unwrap();
    aws.unclaim(&new).await.unwrap();
    aws.release(&new).await.unwrap();
    ipv6(aws, scope, &nics[0]).await;
}

async fn ipv6(aws: &Aws, scope: &Scope, nic: &Nic) {
    let scope = Scope { prefixes: vec!["2001:db8::40/128".parse().unwrap()], tags: [].into(), ..scope.clone() };
    let six = aws.observe(&scope).await.unwrap().addresses.remove(0);
    let binding = Binding { address: six.clone(), private: six.address };
    aws.attach(nic, &[binding]).await.unwrap();
    aws.detach(&nic.id, &[six]).await.unwrap();
}

/// Requests by action, each as a set of parameters, and each once.
fn requests(log: &[RecordedRequest]) -> BTreeMap<String, BTreeSet<Parameters>> {
    let mut requests: BTreeMap<String, BTreeSet<_>> = BTreeMap::new();
    for request in log {
        assert_eq!((&*request.method, &*request.path), ("POST", "/"));
        let form = request.form();
        let action = form.iter().find(|(name, _)| name == "Action").unwrap().1.clone();
        requests.entry(action).or_default().insert(form.into_iter().collect());
    }
    requests
}

#[tokio::test]
async fn the_vendors_client_accepts_the_fake_and_our_requests_are_its_own() {
    let (fake, state) = region().await;
    let said = run("aws.py", &["flow", &fake.url(), &state.to_string()]).await;
    let vendors = requests(&fake.take_log());
    let codes = json!({
        "stolen": "Resource.AlreadyAssociated",
        "released": "InvalidIPAddress.InUse",
        "gone": "InvalidAssociationID.NotFound",
        "missing": "InvalidAllocationID.NotFound",
    });
    assert_eq!(said["codes"], codes);
    assert_eq!((&said["is_idempotent"], &said["is_new_association"]), (&json!(true), &json!(true)));
    assert_eq!((&said["found"][0], &said["limit"]), (&state["allocation"], &json!(15)));
    assert_eq!(said["primary"], json!(["10.0.0.10", "10.0.1.10"]));
    assert_golden("aws", &json!({"package": said["package"], "requests": vendors}));

    let (fake, state) = region().await;
    flow(&provider(&fake.url(), Associate::Nic, keys()), &scope(&state["instances"])).await;
    let mut ours = requests(&fake.take_log());
    for (action, theirs) in vendors {
        let ours = ours.remove(&action).unwrap_or_default();
        let missing =
            theirs.iter().filter(|request| !ours.contains(*request) && !is_only_theirs(&action, request, &state));
        assert_eq!(
            missing.collect::<Vec<_>>(),
            Vec::<&Parameters>::new(),
            "{action} is sent by the vendor's client alone"
        );
        let more: Vec<_> = ours.iter().filter(|request| !theirs.contains(*request)).collect();
        assert_eq!(more, Vec::<&Parameters>::new(), "{action} is sent by us alone");
    }
    assert_eq!(ours.into_keys().collect::<Vec<_>>(), Vec::<String>::new(), "actions of ours alone");
}

/// What only the vendor's client sends, and why.
fn is_only_theirs(action: &str, request: &Parameters, state: &Value) -> bool {
    let has = |name: &str, value: &Value| request.contains(&(name.to_owned(), value.as_str().unwrap().to_owned()));
    match action {
        // To see that what is attached elsewhere isn't taken, and that what is attached isn't released: we read before.
        "AssociateAddress" => {
            has("NetworkInterfaceId", &state["enis"][1]) && has("AllowReassociation", &json!("false"))
        }
        "ReleaseAddress" => has("AllocationId", &state["allocation"]),
        _ => false,
    }
}

#[tokio::test]
async fn moto_accepts_our_requests_and_does_what_they_say() {
    let (_moto, ready) = Service::start("aws.py", &["moto"]);
    let url = ready["url"].as_str().unwrap();
    let scope = scope(&ready["instances"]);
    // Moto knows the primary address of an association only.
    let aws = provider(url, Associate::Instance, keys());
    let observed = aws.observe(&scope).await.unwrap();
    let ids: Vec<&str> = observed.nics.iter().map(|nic| nic.id.0.as_str()).collect();
    assert_eq!(json!(ids), ready["enis"]);
    assert_eq!(json!(observed.addresses[0].id.0), ready["allocation"]);
    let claim = Claim { cluster: "prod".to_owned(), owner: "Service default/web".to_owned() };
    aws.claim(&observed.addresses[0], &claim).await.unwrap();
    let address = aws.observe(&scope).await.unwrap().addresses.remove(0);
    assert_eq!(address.claim, Some(claim));
    let binding = |nic: &Nic| Binding { address: address.clone(), private: address.private[&nic.id] };
    let [a, b] = [&observed.nics[0], &observed.nics[1]];
    let at = async || {
        let address = aws.observe(&scope).await.unwrap().addresses.remove(0);
        address.attachment.and_then(|attachment| attachment.nic)
    };
    for _ in 0..2 {
        aws.attach(a, &[binding(a)]).await.unwrap();
        assert_eq!(at().await.as_ref(), Some(&a.id));
    }
    assert_eq!(aws.attach(b, &[binding(b)]).await.unwrap_err().kind, ErrorKind::InUse);
    aws.move_from_dead(&a.id, b, &[binding(b)]).await.unwrap();
    assert_eq!(at().await.as_ref(), Some(&b.id));
    aws.detach(&b.id, std::slice::from_ref(&address)).await.unwrap();
    assert_eq!(at().await, None);

    let secondary = provider(url, Associate::Nic, keys());
    secondary.prepare(a, std::slice::from_ref(&address), &[]).await.unwrap();
    let prepared = secondary.observe(&scope).await.unwrap();
    let private = prepared.addresses[0].private[&a.id];
    assert!(prepared.nic_of("a").unwrap().missing.is_empty(), "the source/destination check is off");
    assert_ne!(private, binding(a).private);
    let bound = Binding { address: prepared.addresses[0].clone(), private };
    secondary.unprepare(a, &[bound]).await.unwrap();
    secondary.unclaim(&address).await.unwrap();
    let left = secondary.observe(&scope).await.unwrap().addresses.remove(0);
    assert_eq!((left.claim, left.private.len()), (None, 0));
}
