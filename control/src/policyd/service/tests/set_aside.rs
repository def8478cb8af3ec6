//! A resource that one gateway refuses: it lacks there, and everything else goes on, there and elsewhere.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

use envoy_types::pb::google::protobuf::value::Kind as ValueKind;
use envoy_types::pb::google::protobuf::{Struct, Value};
use envoy_types::pb::google::rpc;
use vipgate_dataplane::policy::change::PolicyChange;
use vipgate_dataplane::policy::spec::{Announce, EgressSpec, VipSpec};

use super::*;
use crate::policyd::set_aside::MAX_SET_ASIDE;
use crate::xds::client::{Effect, Rejection};
use crate::xds::resource::{INCARNATION, Key};

/// What a gateway has in force, by tenant: the VIPs, and those of each endpoint.
#[derive(Debug, Default)]
struct InForce {
    vips: BTreeMap<IpAddr, Arc<VipSpec>>,
    endpoints: BTreeMap<IpAddr, Arc<EndpointSpec>>,
    policies: BTreeMap<Arc<str>, Arc<EgressSpec>>,
}

impl InForce {
    fn apply(&mut self, change: &PolicyChange) {
        change.vips.apply_to(&mut self.vips);
        change.endpoints.apply_to(&mut self.endpoints);
        change.policies.apply_to(&mut self.policies);
    }
}

/// A gateway that rejects updates as `refuse` says.
struct Refusing {
    in_force: Arc<Mutex<InForce>>,
    task: JoinHandle<()>,
    _folder: TempDir,
}

impl Drop for Refusing {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Refusing {
    fn start(
        name: &str,
        server: &Server,
        refuse: impl Fn(&PolicyChange) -> Option<(Kind, String)> + Send + Sync + 'static,
    ) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (sender, mut events) = mpsc::channel(4);
        let (client, _) = Client::open(GatewayLocality::named(name), server.client_config(None, &folder), sender);
        let in_force = Arc::<Mutex<InForce>>::default();
        let state = in_force.clone();
        let task = tokio::spawn(async move {
            let gateway = async {
                while let Some(event) = events.recv().await {
                    let ClientEvent::Update(update, reply) = event else { continue };
                    let rejected = refuse(&update.change).map(|(kind, name)| Rejection {
                        resource: Some(Key { kind, name: name.into() }),
                        reason: "not here".to_owned(),
                    });
                    if rejected.is_none() {
                        state.lock().unwrap().apply(&update.change);
                    }
                    // Fails if the connection has ended.
                    let _ = reply.send(rejected.map_or(Ok(Effect::InForce), Err));
                }
            };
            tokio::join!(client.run(), gateway);
        });
        Self { in_force, task, _folder: folder }
    }

    fn in_force(&self) -> MutexGuard<'_, InForce> {
        self.in_force.lock().unwrap()
    }

    fn vips_of(&self, tenant: u8) -> Option<Vec<IpAddr>> {
        self.in_force().endpoints.get(&endpoint(tenant)).map(|it| it.vips.clone())
    }
}

fn endpoint(tenant: u8) -> IpAddr {
    [10, 0, 0, tenant].into()
}

fn vip(last: u8) -> IpAddr {
    [203, 0, 113, last].into()
}

/// A policy of these tenants: each has an endpoint with a VIP, by its last byte.
fn tenants(all: &[(u8, u8)]) -> Placement {
    let sample = sample_placement(1);
    let name = |tenant: u8| Arc::<str>::from(format!("EgressPolicy t{tenant}/p"));
    let policy = |(tenant, _): &(u8, u8)| EgressSpec { name: name(*tenant), ..sample.policies[0].clone() };
    let vip_spec = |(_, last): &(u8, u8)| VipSpec { address: vip(*last), ..sample.vips[0].clone() };
    let covered = |(tenant, last): &(u8, u8)| EndpointSpec {
        address: endpoint(*tenant),
        policy: name(*tenant),
        vips: vec![vip(*last)],
        ..sample.endpoints[0].clone()
    };
    Placement {
        policies: all.iter().map(policy).collect(),
        vips: all.iter().map(vip_spec).collect(),
        endpoints: all.iter().map(covered).collect(),
        services: [].into_iter().collect(),
        ..sample
    }
}

/// The last byte of the VIP that gateways refuse.
const BAD: u8 = 99;

fn has_bad(change: &PolicyChange) -> Option<(Kind, String)> {
    let bad = change.vips.changed().find(|it| it.address == vip(BAD) && it.announce == Announce::L2)?;
    Some((Kind::Vip, bad.address.to_string()))
}

fn refused(server: &Server, gateway: &str) -> Vec<String> {
    let all = server.service.registry.list();
    all.get(gateway).iter().flat_map(|it| it.refusals.active()).map(|(key, _)| key.to_string()).collect()
}

fn is_in_sync(server: &Server, gateway: &str, number: u64) -> bool {
    let all = server.service.registry.list();
    all.get(gateway).is_some_and(|it| it.in_force == number && it.error.is_none())
}

#[tokio::test]
async fn a_refused_vip_lacks_at_its_gateway_alone_while_everything_else_goes_on() {
    let server = Server::start(None);
    let first = server.publish(tenants(&[(1, BAD), (2, 2)]));
    let refusing = Refusing::start("gw-a", &server, has_bad);
    let other = Refusing::start("gw-b", &server, |_| None);
    // It is part of the first policy already.
    server.wait("the first policy", |it| ["gw-a", "gw-b"].iter().all(|name| is_in_sync(it, name, first))).await;
    assert_eq!((refused(&server, "gw-a"), refused(&server, "gw-b")), (vec!["Vip 203.0.113.99".to_owned()], vec![]));
    assert_eq!((refusing.vips_of(1), refusing.vips_of(2)), (Some(vec![]), Some(vec![vip(2)])), "covered, without VIP");
    assert_eq!(other.vips_of(1), Some(vec![vip(BAD)]));
    // Another tenant's changes are in force on both.
    for last in 3..10 {
        let nacks = server.service.stats.nacks.get();
        let number = server.publish(tenants(&[(1, BAD), (2, last)]));
        server.wait("a change", |it| ["gw-a", "gw-b"].iter().all(|name| is_in_sync(it, name, number))).await;
        assert_eq!((refusing.vips_of(2), other.vips_of(2)), (Some(vec![vip(last)]), Some(vec![vip(last)])));
        assert_eq!(refusing.in_force().vips.keys().copied().collect::<Vec<_>>(), [vip(last)]);
        assert_eq!(server.service.stats.nacks.get(), nacks, "the gateway isn't sent it again");
    }
    // Its content changes: the gateway gets it.
    let mut changed = tenants(&[(1, BAD), (2, 2)]);
    let bgp = |vip: &VipSpec| VipSpec { announce: Announce::Bgp, ..vip.clone() };
    changed.vips = changed.vips.iter().map(bgp).collect();
    let number = server.publish(changed);
    server.wait("the changed VIP", |it| is_in_sync(it, "gw-a", number) && refused(it, "gw-a").is_empty()).await;
    assert_eq!(refusing.vips_of(1), Some(vec![vip(BAD)]));
    assert_eq!(refusing.in_force().vips[&vip(BAD)].announce, Announce::Bgp);
}

#[tokio::test]
async fn a_resource_that_is_refused_later_goes_away_with_its_last_good_version() {
    let server = Server::start(None);
    let mut accepted = tenants(&[(1, BAD), (2, 2)]);
    accepted.vips = accepted.vips.iter().map(|vip| VipSpec { announce: Announce::Bgp, ..vip.clone() }).collect();
    let first = server.publish(accepted);
    let refusing = Refusing::start("gw-a", &server, has_bad);
    server.wait("the first policy", |it| is_in_sync(it, "gw-a", first)).await;
    assert_eq!(refusing.vips_of(1), Some(vec![vip(BAD)]));
    let second = server.publish(tenants(&[(1, BAD), (2, 3)]));
    server.wait("the rest", |it| is_in_sync(it, "gw-a", second)).await;
    assert_eq!((refusing.vips_of(1), refusing.vips_of(2)), (Some(vec![]), Some(vec![vip(3)])));
    assert!(!refusing.in_force().vips.contains_key(&vip(BAD)));
    // The object is gone, and so is what is remembered of it.
    let third = server.publish(tenants(&[(2, 3)]));
    server.wait("without it", |it| is_in_sync(it, "gw-a", third) && refused(it, "gw-a").is_empty()).await;
    assert_eq!(refusing.vips_of(1), None);
}

/// A gateway of an older version, which can't decode something.
#[tokio::test]
async fn a_first_policy_that_a_gateway_cannot_decode_comes_without_what_is_invalid() {
    let server = Server::start(None);
    let mut placement = tenants(&[(1, 1), (2, 2)]);
    let invalid = |it: &EndpointSpec| {
        let copies = if it.address == endpoint(1) { 2 } else { 1 };
        EndpointSpec { vips: it.vips.repeat(copies), ..it.clone() }
    };
    placement.endpoints = placement.endpoints.iter().map(invalid).collect();
    let last = server.service.published.borrow().clone().unwrap();
    let next = last.next_unchecked(Arc::new(placement.clone())).unwrap();
    let number = next.number;
    server.published.send_replace(Some(Arc::new(next)));
    let gateway = Refusing::start("gw-a", &server, |_| None);
    let started = Instant::now();
    server.wait("the rest of it", |it| is_in_sync(it, "gw-a", number)).await;
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    assert_eq!(refused(&server, "gw-a"), ["Endpoint 10.0.0.1"]);
    assert_eq!((gateway.vips_of(1), gateway.vips_of(2)), (Some(vec![]), Some(vec![vip(2)])));
    // A server that decodes it itself leaves it out for all.
    let published = server.service.published.borrow().clone().unwrap();
    let again = |it: &EndpointSpec| EndpointSpec { name: "a/again".into(), ..it.clone() };
    let mut changed = placement;
    changed.endpoints = changed.endpoints.iter().map(again).collect();
    changed.vips = tenants(&[(1, 1), (2, 2), (3, 3)]).vips;
    let checked = published.next(Arc::new(changed)).unwrap();
    let left_out: Vec<String> = checked.left_out.iter().map(|(key, why)| format!("{key}: {why}")).collect();
    assert_eq!(left_out, ["Endpoint 10.0.0.1: vips[1]: 203.0.113.1 is a duplicate"]);
    assert!(checked.endpoint(endpoint(1)).unwrap().vips.is_empty());
    let number = checked.number;
    server.published.send_replace(Some(Arc::new(checked)));
    server
        .wait("what is left out for all", |it| is_in_sync(it, "gw-a", number) && refused(it, "gw-a").is_empty())
        .await;
}

#[tokio::test]
async fn a_gateway_that_refuses_everything_costs_others_nothing_and_the_server_little() {
    let server = Server::start(None);
    let all: Vec<(u8, u8)> = (1..=200).map(|n| (n, n)).collect();
    server.publish(tenants(&all));
    let hostile = Refusing::start("gw-x", &server, |change| {
        let of_vip = change.vips.changed().next().map(|it| (Kind::Vip, it.address.to_string()));
        let of_endpoint = change.endpoints.changed().next().map(|it| (Kind::Endpoint, it.address.to_string()));
        let of_policy = change.policies.changed().next().map(|it| (Kind::EgressPolicy, it.name.to_string()));
        of_vip.or(of_endpoint).or(of_policy).or(Some((Kind::Cluster, "cluster".to_owned())))
    });
    let other = Refusing::start("gw-b", &server, |_| None);
    server.wait("as many as are allowed", |it| refused(it, "gw-x").len() == MAX_SET_ASIDE).await;
    // What it still rejects is sent again from time to time, not at once.
    sleep(Duration::from_secs(1)).await;
    let responses = server.service.stats.responses.get();
    sleep(Duration::from_millis(1500)).await;
    assert!(server.service.stats.responses.get() <= responses + 3 * Kind::OF_GATEWAYS.len() as u64);
    for last in 201..=205 {
        let changed: Vec<(u8, u8)> = all.iter().map(|(n, vip)| (*n, if *n == 7 { last } else { *vip })).collect();
        let number = server.publish(tenants(&changed));
        server.wait("a change", |it| is_in_sync(it, "gw-b", number)).await;
        assert_eq!(other.vips_of(7), Some(vec![vip(last)]));
    }
    assert_eq!(other.in_force().vips.len(), 200);
    assert!(refused(&server, "gw-b").is_empty() && refused(&server, "gw-x").len() <= MAX_SET_ASIDE);
    assert!(hostile.in_force().endpoints.is_empty());
}

/// A request of a process.
fn of_process(incarnation: u64, kind: Kind) -> DeltaDiscoveryRequest {
    let incarnation = Value { kind: Some(ValueKind::StringValue(format!("{incarnation:016x}"))) };
    let metadata = Some(Struct { fields: [(INCARNATION.to_owned(), incarnation)].into() });
    DeltaDiscoveryRequest {
        node: Some(Node { id: "gw-a".to_owned(), metadata, ..Node::default() }),
        type_url: kind.type_url().to_owned(),
        ..DeltaDiscoveryRequest::default()
    }
}

#[tokio::test]
async fn a_refused_resource_stays_away_from_a_process_that_reconnects_but_not_from_another() {
    let server = Server::start(None);
    server.publish(tenants(&[(1, BAD), (2, 2)]));
    let mut client = AggregatedDiscoveryServiceClient::connect(server.url.clone()).await.unwrap();
    let mut vips = async |incarnation: u64, nack: bool| {
        let (requests, outgoing) = mpsc::channel(4);
        requests.send(of_process(incarnation, Kind::Vip)).await.unwrap();
        let responses = client.delta_aggregated_resources(ReceiverStream::new(outgoing)).await.unwrap();
        let mut responses = responses.into_inner();
        let mut received = Vec::new();
        for _ in 0..=u32::from(nack) {
            let response = timeout(TIMEOUT, responses.message()).await.unwrap().unwrap().unwrap();
            let names = response.resources.iter().map(|it| format!("+{}", it.name));
            received
                .push(names.chain(response.removed_resources.iter().map(|it| format!("-{it}"))).collect::<Vec<_>>());
            let message = "resource Vip 203.0.113.99: not here".to_owned();
            let error = (nack && received.len() == 1).then(|| rpc::Status { code: 3, message, details: vec![] });
            let answer = DeltaDiscoveryRequest {
                response_nonce: response.nonce,
                error_detail: error,
                ..of_process(incarnation, Kind::Vip)
            };
            requests.send(answer).await.unwrap();
        }
        drop((requests, responses));
        server.wait("the stream ends", |it| it.registered("gw-a").is_some_and(|(streams, _)| streams == 0)).await;
        received
    };
    let both = ["+203.0.113.2", "+203.0.113.99"];
    assert_eq!(vips(1, true).await, [both.to_vec(), vec!["+203.0.113.2", "-203.0.113.99"]]);
    assert_eq!(vips(1, false).await, [["+203.0.113.2"]]);
    assert_eq!(vips(2, false).await, [both]);
    assert_eq!(vips(1, false).await, [both]);
}
