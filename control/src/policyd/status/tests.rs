//! What a question may ask for, and what its answer may cost.

use tokio::sync::{mpsc, watch};
use tonic::Code;

use super::*;
use crate::listener::{Limits, Room};
use crate::policyd::figures::Figures;
use crate::policyd::members;
use crate::policyd::registry::Process;
use crate::source::intake::Intake;
use crate::source::store::{Outcome, Store};
use crate::xds::fixtures::deal;

/// A server with a policy of so many endpoints, `10.0.0.1` and so on, and what publishes it.
fn service(endpoints: u8) -> (Service, watch::Sender<Option<Arc<Publication>>>) {
    let publication = Publication::default().next(Arc::new(deal(endpoints)));
    let (publish, published) = watch::channel(publication.map(Arc::new));
    let figures = Arc::<Figures>::default();
    let members = members::start(Duration::from_millis(300), members::Memory, published.clone(), figures.clone());
    let room = Room::new("test", Limits { connections: 1, per_address: 1 });
    let state = State {
        source: Intake::new("files test".to_owned(), Store::new(false)).status(),
        accept_empty: mpsc::channel(1).0,
        published,
        registry: Arc::default(),
        members,
        figures,
        rooms: [room.clone(), room],
        budget: Arc::default(),
        admins: Vec::new(),
    };
    (Service { state: Arc::new(state), refusals: Arc::default() }, publish)
}

async fn ask(service: &Service, endpoints: Vec<String>) -> Result<StatusReply, Status> {
    service.status(Request::new(StatusRequest { endpoints })).await.map(Response::into_inner)
}

/// The address with this number, from `10.0.0.0` on.
fn address(n: u32) -> String {
    IpAddr::from((0x0a00_0000 + n).to_be_bytes()).to_string()
}

#[tokio::test]
async fn each_endpoint_is_answered_once_and_a_thousand_at_most() {
    let (service, _publish) = service(4);
    let reply = ask(&service, [vec![address(2); 50_000], vec![address(1), address(2)]].concat()).await.unwrap();
    let told: Vec<&str> = reply.endpoints.iter().map(|it| &*it.address).collect();
    assert_eq!(told, ["10.0.0.2", "10.0.0.1"]);
    assert!(reply.endpoints.iter().all(|it| it.policy == "EgressPolicy a/p"), "{:?}", reply.endpoints);
    let reply = ask(&service, (0..1000).map(address).collect()).await.unwrap();
    assert_eq!(reply.endpoints.len(), MAX_ENDPOINTS);
    let refusal = ask(&service, (0..=1000).map(address).collect()).await.unwrap_err();
    assert_eq!(refusal.code(), Code::InvalidArgument);
    assert!(refusal.message().contains("more than 1000 endpoints"), "{refusal}");
    let refusal = ask(&service, vec!["x".repeat(1 << 20)]).await.unwrap_err();
    assert_eq!((refusal.code(), refusal.message().len()), (Code::InvalidArgument, 66));
}

#[tokio::test]
async fn an_answer_that_would_be_too_long_is_refused_and_counted() {
    let (service, _publish) = service(255);
    // Half a megabyte of names for each endpoint.
    for n in 0..2000 {
        service.state.registry.comes(&format!("{n:0253}"), Process::Unknown, None).unwrap();
    }
    let refusal = ask(&service, (1..=255).map(address).collect()).await.unwrap_err();
    assert_eq!(refusal.code(), Code::ResourceExhausted);
    assert!(refusal.message().contains("ask for fewer endpoints"), "{refusal}");
    assert_eq!(service.state.budget.refused.get(), 1);
    let reply = ask(&service, (1..=10).map(address).collect()).await.unwrap();
    assert!(reply.endpoints.iter().all(|it| it.pending.len() == 2000));
}

#[tokio::test]
async fn complaints_beyond_what_an_answer_has_space_for_are_left_out_and_that_is_said() {
    let (service, _publish) = service(1);
    let complaint = crate::complaint::Complaint::about_file("a.yaml", "x".repeat(1000));
    let complaints = vec![complaint; 20_000];
    service.state.source.compiled.store(Arc::new(Outcome { complaints, ..Outcome::default() }));
    service.state.registry.comes("gw-1", Process::Unknown, None).unwrap();
    service.state.registry.refused("gw-1", "y".repeat(1 << 20));
    let reply = ask(&service, Vec::new()).await.unwrap();
    assert!((10_000..20_000).contains(&reply.complaints.len()), "{}", reply.complaints.len());
    let last = reply.complaints.last().unwrap();
    assert_eq!((&*last.file, &*last.reason), ("files test", "more is wrong than an answer has space for"));
    let gateway = reply.gateways.iter().find(|it| it.name == "gw-1").unwrap();
    assert_eq!(gateway.error.len(), MAX_ERROR);
}

#[tokio::test]
async fn the_turn_of_a_request_that_was_cancelled_ends_with_its_work() {
    let turns: &'static Semaphore = Box::leak(Box::new(Semaphore::new(1)));
    let (end, ended) = std::sync::mpsc::channel::<()>();
    let first = tokio::spawn(apart(turns, move || ended.recv().is_err()));
    while turns.available_permits() > 0 {
        tokio::task::yield_now().await;
    }
    first.abort();
    assert!(first.await.unwrap_err().is_cancelled());
    let refusal = apart(turns, || ()).await.unwrap_err();
    assert_eq!(refusal.code(), Code::ResourceExhausted, "{refusal}");
    drop(end);
    apart(turns, || ()).await.unwrap();
}
