//! Limits of status requests and replies.

use tokio::sync::{mpsc, watch};
use tonic::Code;
use vipgate_policy::diagnostic;

use super::*;
use crate::listener::{ConnectionLimiter, Limits};
use crate::policyd::cloud::CloudState;
use crate::policyd::identity::{PodRole, VerifiedPod};
use crate::policyd::listen::ConnectionInfo;
use crate::policyd::membership;
use crate::policyd::registry::Process;
use crate::policyd::set_aside::Refused;
use crate::policyd::stats::Stats;
use crate::source::ingest::SourceIngester;
use crate::source::store::{CompileOutcome, ManifestStore};
use crate::xds::fixtures::sample_placement;
use crate::xds::proto::SetAside;
use crate::xds::resource::Key;

/// A status service whose policy has this many endpoints, from `10.0.0.1` on, and the sender of publications.
fn service(endpoints: u8) -> (Service, watch::Sender<Option<Arc<Publication>>>) {
    let publication = Publication::default().next(Arc::new(sample_placement(endpoints)));
    let (publish, published) = watch::channel(publication.map(Arc::new));
    let stats = Arc::<Stats>::default();
    let membership = membership::start(
        Duration::from_millis(300),
        &membership::FakeStore::default(),
        published.clone(),
        stats.clone(),
    );
    let room = ConnectionLimiter::new("test", Limits { connections: 1, per_address: 1 });
    let state = ServerState {
        source: SourceIngester::new("files test".to_owned(), ManifestStore::new(false)).status(),
        accept_empty: mpsc::channel(1).0,
        published,
        nodes: Arc::default(),
        registry: Arc::default(),
        membership,
        kubernetes: None,
        cloud: Arc::new(CloudState::new(None)),
        certificates: None,
        stats,
        listeners: [room.clone(), room],
        budget: Arc::default(),
        admins: Vec::new(),
    };
    (Service { state: Arc::new(state), rejections: Arc::default() }, publish)
}

async fn query(service: &Service, endpoints: Vec<String>) -> Result<StatusReply, Status> {
    service.status(Request::new(StatusRequest { endpoints })).await.map(Response::into_inner)
}

/// The address with this number, from `10.0.0.0` on.
fn address(n: u32) -> String {
    IpAddr::from((0x0a00_0000 + n).to_be_bytes()).to_string()
}

/// A request of a client that has shown no certificate where these identify clients, but perhaps its pod's token.
fn without_certificate<T>(message: T, pod: Option<VerifiedPod>) -> Request<T> {
    let mut request = Request::new(message);
    let certificates = Some([].into());
    request.extensions_mut().insert(ConnectionInfo {
        remote: None,
        local: None,
        certificates,
        activity: Arc::default(),
    });
    if let Some(pod) = pod {
        request.extensions_mut().insert(pod);
    }
    request
}

#[tokio::test]
async fn where_clients_have_certificates_nobody_without_one_reads_anything() {
    let (service, _publish) = service(1);
    let pod = |role| Some(VerifiedPod { role, node: "n1".into() });
    for pod in [None, pod(PodRole::Gateway), pod(PodRole::Agent)] {
        let status = service.status(without_certificate(StatusRequest::default(), pod.clone())).await.unwrap_err();
        assert_eq!(status.code(), Code::PermissionDenied, "{status}");
        let status = service.cloud(without_certificate(CloudRequest::default(), pod)).await.unwrap_err();
        assert_eq!(status.code(), Code::PermissionDenied, "{status}");
    }
    assert_eq!(service.state.stats.commands_denied.get(), 6);
}

#[tokio::test]
async fn a_reply_has_each_endpoint_once_and_at_most_a_thousand() {
    let (service, _publish) = service(4);
    let reply = query(&service, [vec![address(2); 50_000], vec![address(1), address(2)]].concat()).await.unwrap();
    let addresses: Vec<&str> = reply.endpoints.iter().map(|it| &*it.address).collect();
    assert_eq!(addresses, ["10.0.0.2", "10.0.0.1"]);
    assert!(reply.endpoints.iter().all(|it| it.policy == "EgressPolicy a/p"), "{:?}", reply.endpoints);
    let reply = query(&service, (0..1000).map(address).collect()).await.unwrap();
    assert_eq!(reply.endpoints.len(), MAX_ENDPOINTS);
    let error = query(&service, (0..=1000).map(address).collect()).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    assert!(error.message().contains("more than 1000 endpoints"), "{error}");
    let error = query(&service, vec!["x".repeat(1 << 20)]).await.unwrap_err();
    assert_eq!((error.code(), error.message().len()), (Code::InvalidArgument, 66));
}

#[tokio::test]
async fn a_reply_over_the_size_limit_is_an_error_and_counted() {
    let (service, _publish) = service(255);
    // Half a megabyte of names for each endpoint.
    for n in 0..2000 {
        service.state.registry.connect(&format!("{n:0253}"), Process::Unknown, None).unwrap();
    }
    let error = query(&service, (1..=255).map(address).collect()).await.unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted);
    assert!(error.message().contains("request fewer endpoints"), "{error}");
    assert_eq!(service.state.budget.refused.get(), 1);
    let reply = query(&service, (1..=10).map(address).collect()).await.unwrap();
    assert!(reply.endpoints.iter().all(|it| it.pending.len() == 2000));
}

#[tokio::test]
async fn what_is_set_aside_is_named_with_its_gateway_its_policy_and_the_reason() {
    let (service, _publish) = service(3);
    let registry = &service.state.registry;
    for name in ["gw-a", "gw-b"] {
        registry.connect(name, Process::Unknown, None).unwrap();
        registry.acknowledge(name, 1, true);
    }
    let published = service.state.published.borrow().clone().unwrap();
    let key = Key { kind: Kind::Vip, name: "203.0.113.1".into() };
    let refused = Refused { key, number: 1, is_closed: false };
    assert!(registry.refuse("gw-a", &refused, "resource Vip 203.0.113.1: not here", &published));
    let reply = query(&service, vec![address(1)]).await.unwrap();
    let named = |it: &SetAside| format!("{}: {}: {}", it.gateway, it.resource, it.reason);
    let expected = ["gw-a: Vip 203.0.113.1: not here"];
    assert_eq!(reply.set_aside.iter().map(named).collect::<Vec<_>>(), expected);
    // Both the policy and the Service have this VIP.
    let of = |name: &str| reply.policies.iter().find(|it| it.name == name).unwrap();
    for name in ["EgressPolicy a/p", "Service a/s"] {
        assert_eq!(of(name).set_aside.iter().map(named).collect::<Vec<_>>(), expected, "{name}");
    }
    let policy = of("EgressPolicy a/p");
    assert_eq!((&*policy.in_force, &*policy.pending), (&["gw-b".to_owned()][..], &[][..]));
    let endpoint = &reply.endpoints[0];
    assert_eq!((&*endpoint.in_force, &*endpoint.pending), (&["gw-b".to_owned()][..], &["gw-a".to_owned()][..]));
    let mut connected = reply.gateways.iter().filter(|it| it.connected);
    assert!(connected.all(|it| it.in_step), "it has all the rest in force");
}

#[tokio::test]
async fn diagnostics_over_the_size_limit_are_left_out_with_a_note() {
    let (service, _publish) = service(1);
    let diagnostic = diagnostic::Diagnostic::for_file("a.yaml", diagnostic::Code::Unreadable, "x".repeat(1000));
    let diagnostics = vec![diagnostic; 20_000];
    service.state.source.compiled.store(Arc::new(CompileOutcome { diagnostics, ..CompileOutcome::default() }));
    service.state.registry.connect("gw-1", Process::Unknown, None).unwrap();
    service.state.registry.reject("gw-1", "y".repeat(1 << 20));
    let reply = query(&service, Vec::new()).await.unwrap();
    assert!((10_000..20_000).contains(&reply.diagnostics.len()), "{}", reply.diagnostics.len());
    let last = reply.diagnostics.last().unwrap();
    let note = "further diagnostics are left out: the reply would be too long";
    assert_eq!((&*last.file, &*last.reason), ("files test", note));
    let gateway = reply.gateways.iter().find(|it| it.name == "gw-1").unwrap();
    assert_eq!(gateway.error.len(), MAX_ERROR);
}

#[tokio::test]
async fn a_source_whose_slices_are_not_verified_is_reported_until_they_are() {
    let (service, _publish) = service(1);
    for slices_unverified in [true, false] {
        let outcome = CompileOutcome { slices_unverified, ..CompileOutcome::default() };
        service.state.source.compiled.store(Arc::new(outcome));
        let reply = query(&service, Vec::new()).await.unwrap();
        assert_eq!(reply.source.unwrap().slices_unverified, slices_unverified);
    }
}

#[tokio::test]
async fn the_permit_of_a_cancelled_request_is_held_until_its_work_ends() {
    let permits: &'static Semaphore = Box::leak(Box::new(Semaphore::new(1)));
    let (end, ended) = std::sync::mpsc::channel::<()>();
    let first = tokio::spawn(run_blocking(permits, move || ended.recv().is_err()));
    while permits.available_permits() > 0 {
        tokio::task::yield_now().await;
    }
    first.abort();
    assert!(first.await.unwrap_err().is_cancelled());
    let error = run_blocking(permits, || ()).await.unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted, "{error}");
    drop(end);
    run_blocking(permits, || ()).await.unwrap();
}
