//! The client against a real membership authority in this process, which can be stopped and restarted.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::Mutex;
use std::thread;

use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::Code;
use tonic::service::Routes;
use tonic::transport::Server as Tonic;
use vipgate_policy::compiler::Placement;

use super::*;
use crate::membership::status::Authority;
use crate::policyd::membership;
use crate::policyd::stats::Stats;
use crate::xds::fixtures::peer;
use crate::xds::proto;
use crate::xds::proto::membership_client::MembershipClient;
use crate::xds::publication::Publication;

/// Timeout of everything, with a wide margin for slow machines.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Long enough for a loaded machine.
const TTL: Duration = Duration::from_millis(800);

/// A server in a thread of its own, so that it can end like a killed process.
struct Server {
    port: u16,
    /// The record, which outlives it.
    record: membership::FakeStore,
    policy: watch::Sender<Option<Arc<Publication>>>,
    stop: oneshot::Sender<()>,
    thread: thread::JoinHandle<()>,
}

impl Server {
    fn start(names: &'static [&str]) -> Self {
        Self::at(0, Some(names))
    }

    /// A server without a record yet, or without the membership service.
    fn at(port: u16, names: Option<&'static [&str]>) -> Self {
        Self::with_record(port, names, membership::FakeStore::default())
    }

    fn with_record(port: u16, names: Option<&'static [&str]>, record: membership::FakeStore) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let port = listener.local_addr().unwrap().port();
        let (stop, stopped) = oneshot::channel();
        let (policy, published) = watch::channel(names.map(published));
        let store = record.clone();
        let thread = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async move {
                let incoming = TcpListenerStream::new(tokio::net::TcpListener::from_std(listener).unwrap());
                let routes = match names {
                    Some(_) => {
                        let stats = Arc::<Stats>::default();
                        let membership = membership::start(TTL, &store, published, stats);
                        Routes::new(membership::server(membership, Arc::default(), Arc::default()))
                    }
                    None => Routes::default(),
                };
                tokio::select! {
                    result = Tonic::builder().add_routes(routes).serve_with_incoming(incoming) => result.unwrap(),
                    _ = stopped => {}
                }
            });
        });
        Self { port, record, policy, stop, thread }
    }

    /// Stops it; returns its port.
    fn kill(self) -> u16 {
        drop(self.stop);
        self.thread.join().unwrap();
        self.port
    }
}

fn ready(seen_view: u64) -> ReportedState {
    ReportedState { desired_state: DesiredState::Ready, seen_view, ..ReportedState::default() }
}

fn published(names: &'static [&str]) -> Arc<Publication> {
    let placement = Placement { peers: names.iter().map(|name| peer(name)).collect(), ..Placement::default() };
    Arc::new(Publication::default().next(Arc::new(placement)).unwrap())
}

/// A clock that starts at creation, and the end of the lease.
struct Clock {
    start: Instant,
    until: Mutex<Option<Tick>>,
}

impl LeaseClock for Clock {
    fn now(&self) -> Tick {
        Tick(self.start.elapsed().as_millis() as u32)
    }

    fn extend(&self, until: Tick) {
        let mut latest = self.until.lock().unwrap();
        *latest = Some(latest.map_or(until, |latest| latest.later(until)));
    }
}

fn secret(process: u8) -> Secret {
    Secret::from_slice(&[process; 32]).unwrap()
}

struct Gateway {
    clock: Arc<Clock>,
    handle: ClientHandle,
    task: JoinHandle<()>,
}

impl Gateway {
    /// A process with a secret derived from this number.
    fn start(name: &str, process: u8, port: u16) -> Self {
        Self::successor(name, process, None, port)
    }

    /// A process that knows its predecessor's secret.
    fn successor(name: &str, process: u8, predecessor: Option<u8>, port: u16) -> Self {
        Self::start_with(name, process, predecessor, &[port])
    }

    /// The same with several servers.
    fn start_with(name: &str, process: u8, predecessor: Option<u8>, ports: &[u16]) -> Self {
        Self::start_from(name, process, predecessor, ports, None)
    }

    /// The same with the membership that the predecessor has left.
    fn start_from(
        name: &str,
        process: u8,
        predecessor: Option<u8>,
        ports: &[u16],
        former: Option<FormerMembership>,
    ) -> Self {
        let clock = Arc::new(Clock { start: Instant::now(), until: Mutex::default() });
        let mut urls = ports.iter().map(|port| format!("http://127.0.0.1:{port}"));
        let (url, other_urls) = (urls.next().unwrap(), urls.collect());
        let cache = "unused".into();
        let server = PolicyServer { url, other_urls, ca: None, cert: None, key: None, token: None, cache };
        let (client, handle) = HeartbeatClient::open(ClientConfig {
            name: name.into(),
            secret: secret(process),
            predecessor: predecessor.map(secret),
            server,
            fingerprint: [process; 32],
            tunnel_key: [process + 100; 32],
            peer: Some("192.0.2.1:4790".parse().unwrap()),
            overlay: Some("192.0.2.2:8472".parse().unwrap()),
            former,
            lease: clock.clone(),
        });
        Self { clock, handle, task: tokio::spawn(client.run()) }
    }

    /// Applies each view until a status meets the condition: a process that was stalled for longer than its lease becomes
    /// active again by that.
    async fn wait_for(&mut self, is_met: impl Fn(&MembershipStatus) -> bool) -> MembershipStatus {
        loop {
            let status = self.handle.status.borrow_and_update().clone();
            self.apply_view();
            if is_met(&status) {
                return status;
            }
            timeout(TIMEOUT, self.handle.status.changed()).await.expect("a status in time").unwrap();
        }
    }

    /// Reports the last view as applied: only then a lease is valid.
    fn apply_view(&self) {
        let number = self.handle.status.borrow().view.number;
        self.handle.reported.send_if_modified(|reported| std::mem::replace(&mut reported.seen_view, number) != number);
    }

    /// Reports that it is ready under each new view, until it is active.
    async fn become_active(&mut self, name: &str) -> MembershipStatus {
        loop {
            let status = self.handle.status.borrow_and_update().clone();
            if status.view.member(name).is_some_and(|member| member.serving) {
                self.apply_view();
                return status;
            }
            self.handle.reported.send_replace(ready(status.view.number));
            timeout(TIMEOUT, self.handle.status.changed()).await.expect("a status in time").unwrap();
        }
    }

    fn has_lease(&self) -> bool {
        self.clock.until.lock().unwrap().is_some_and(|until| !self.clock.now().reached(until))
    }

    /// Waits for a lease.
    async fn wait_for_lease(&self) {
        self.wait_until(|| self.has_lease()).await;
    }

    /// Waits for a lease by a heartbeat that is sent from now on.
    async fn wait_for_new_lease(&self) {
        let before = self.clock.now().plus(TTL.as_millis() as u32);
        let is_new = |until: Tick| until != before && until.later(before) == until;
        self.wait_until(|| self.clock.until.lock().unwrap().is_some_and(is_new)).await;
    }

    async fn wait_until(&self, is_met: impl Fn() -> bool) {
        let wait = async {
            while !is_met() {
                self.apply_view();
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(TIMEOUT, wait).await.expect("a lease in time");
    }
}

#[tokio::test]
async fn a_ready_gateway_becomes_active_and_its_lease_is_renewed() {
    let server = Server::start(&["a", "b"]);
    let (mut a, mut b) = (Gateway::start("a", 1, server.port), Gateway::start("b", 2, server.port));
    a.become_active("a").await;
    b.become_active("b").await;
    let status = a.wait_for(|status| status.view.active_members().count() == 2).await;
    assert_eq!(status.authority, Authority::Reachable);
    let other = status.view.member("b").unwrap();
    assert_eq!((other.incarnation, other.fingerprint), (secret(2).incarnation(), Some([2; 32])));
    assert_eq!(other.peer, Some("192.0.2.1:4790".parse().unwrap()));
    assert_eq!(other.overlay, Some("192.0.2.2:8472".parse().unwrap()));
    a.wait_for_lease().await;
    b.wait_for_lease().await;
    assert_eq!(a.wait_for(|status| status.ttl < TTL).await.ttl, TTL * 9 / 10);
    sleep(TTL * 2).await;
    assert!(a.has_lease() && b.has_lease());
    // Without its handle the client stops, and its lease expires before the others get a view without it.
    let (clock, stopped) = (a.clock.clone(), Instant::now());
    drop(a.handle);
    timeout(TIMEOUT, a.task).await.unwrap().unwrap();
    b.wait_for(|status| status.view.active_members().count() == 1).await;
    assert!(clock.now().reached(clock.until.lock().unwrap().unwrap()));
    assert!(stopped.elapsed() >= TTL / 2);
}

#[tokio::test]
async fn a_draining_gateway_is_deactivated_at_once() {
    let server = Server::start(&["a", "b"]);
    let (mut a, mut b) = (Gateway::start("a", 1, server.port), Gateway::start("b", 2, server.port));
    a.become_active("a").await;
    b.become_active("b").await;
    let started = Instant::now();
    a.handle.reported.send_modify(|reported| reported.desired_state = DesiredState::Draining);
    b.wait_for(|status| !status.view.member("a").unwrap().serving).await;
    assert!(started.elapsed() < TTL, "without a heartbeat timeout");
}

#[tokio::test]
async fn after_a_restart_the_server_is_reconnected_and_continues_from_the_last_view() {
    let server = Server::start(&["a", "b"]);
    let (mut a, mut b) = (Gateway::start("a", 1, server.port), Gateway::start("b", 2, server.port));
    a.become_active("a").await;
    let view = b.become_active("b").await.view;
    a.wait_for(|status| status.view == view).await;
    let relayed = Arc::new(MembershipView { number: view.number + 1, ..MembershipView::default() });
    assert!(!a.handle.apply_relayed_view(relayed), "not while the server is reachable");
    let record = server.record.clone();
    let port = server.kill();
    a.wait_for(|status| status.authority == Authority::Unreachable).await;
    assert_eq!(a.handle.status.borrow().view, view);
    // Meanwhile other gateways may pass on a later view.
    let later = Arc::new(MembershipView { number: view.number + 3, ..MembershipView::clone(&view) });
    assert!(a.handle.apply_relayed_view(later.clone()) && !a.handle.apply_relayed_view(later.clone()), "applied once");
    assert!(!a.handle.apply_relayed_view(view), "an older view is ignored");
    a.wait_for(|status| status.view == later).await;
    let server = Server::with_record(port, Some(&["a", "b"]), record);
    let started = Instant::now();
    a.wait_for(|status| status.authority == Authority::Reachable).await;
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    a.wait_for_lease().await;
    b.wait_for_lease().await;
    sleep(TTL * 2).await;
    let view = a.handle.status.borrow().view.clone();
    assert!(
        view.number >= later.number && view.members.len() == 2,
        "it continues after the highest view of any gateway: {view:?}"
    );
    // A gateway without that view gets it and applies it.
    a.wait_for_lease().await;
    b.wait_for_lease().await;
    server.kill();
}

#[tokio::test]
async fn without_a_server_the_view_of_the_previous_process_counts() {
    let closed = Server::start(&["a"]).kill();
    let view = Arc::new(MembershipView { number: 7, ..MembershipView::default() });
    let former = Some(FormerMembership { view: view.clone(), ttl: TTL / 2 });
    let mut a = Gateway::start_from("a", 2, Some(1), &[closed, closed], former);
    let status = a.wait_for(|status| status.authority != Authority::Unknown).await;
    assert_eq!((status.authority, &status.view, status.ttl), (Authority::Unreachable, &view, TTL / 2));
    assert!(status.is_ttl_confirmed);
    // From then on it is like one that has lost the server.
    let later = Arc::new(MembershipView { number: 8, ..MembershipView::default() });
    assert!(a.handle.apply_relayed_view(later));
    let server = Server::at(closed, Some(&["a"]));
    a.wait_for(|status| status.authority == Authority::Reachable && status.view.number >= 8).await;
    a.become_active("a").await;
    a.wait_for_lease().await;
    server.kill();
}

#[tokio::test]
async fn a_server_that_answers_decides_in_place_of_the_view_of_the_previous_process() {
    let (closed, server) = (Server::start(&["a"]).kill(), Server::start(&["a"]));
    let view = Arc::new(MembershipView { number: 7_000_000, ..MembershipView::default() });
    let former = Some(FormerMembership { view, ttl: TTL });
    // The first one is unreachable, and there is another one.
    let mut a = Gateway::start_from("a", 2, Some(1), &[closed, server.port], former);
    let status = a.wait_for(|status| status.authority != Authority::Unknown).await;
    assert_eq!(status.authority, Authority::Reachable);
    assert!(status.view.number < 7_000_000, "{:?}", status.view);
    server.kill();
}

#[tokio::test]
async fn of_several_servers_the_next_one_is_tried_until_one_accepts_heartbeats() {
    // Nothing listens there: the port was a server's.
    let [closed, later] = [(); 2].map(|()| Server::start(&["a"]).kill());
    let first = Server::start(&["a"]);
    let mut a = Gateway::start_with("a", 1, None, &[closed, first.port, later]);
    let view = a.become_active("a").await.view;
    a.wait_for_lease().await;
    // It begins to decide from the first one's record, as a server does that is elected.
    let second = Server::with_record(later, Some(&["a"]), first.record.clone());
    first.kill();
    let lost = Instant::now();
    a.wait_for_new_lease().await;
    assert!(lost.elapsed() < TTL, "{:?}", lost.elapsed());
    a.wait_for(|status| status.view.number >= view.number && status.view.member("a").unwrap().serving).await;
    second.kill();
}

#[tokio::test]
async fn with_a_server_that_offers_no_views_the_view_is_fixed() {
    let server = Server::at(0, None);
    let mut a = Gateway::start("a", 1, server.port);
    a.wait_for(|status| status.authority == Authority::Fixed).await;
    let port = server.kill();
    let server = Server::at(port, Some(&["a"]));
    a.wait_for(|status| status.authority == Authority::Reachable).await;
    let port = server.kill();
    // Once there was an authority, it is considered lost: else all gateways would become active.
    let server = Server::at(port, None);
    a.wait_for(|status| status.authority == Authority::Unreachable).await;
    sleep(TTL).await;
    assert_eq!(a.handle.status.borrow().authority, Authority::Unreachable);
    server.kill();
}

#[tokio::test]
async fn the_newer_of_two_processes_with_one_name_gets_no_lease() {
    let server = Server::start(&["a"]);
    let mut older = Gateway::start("a", 1, server.port);
    older.become_active("a").await;
    let mut newer = Gateway::start("a", 2, server.port);
    newer.wait_for(|status| status.authority == Authority::Reachable).await;
    newer.wait_for(|status| status.authority == Authority::Unreachable).await;
    sleep(TTL).await;
    assert!(older.has_lease() && !newer.has_lease());
    assert_eq!(older.handle.status.borrow().view.member("a").unwrap().incarnation, secret(1).incarnation());
}

/// With its predecessor's secret, a restarted gateway doesn't wait for the lease of its predecessor; without it, it
/// does.
#[tokio::test]
async fn after_a_crash_the_next_process_gets_the_name_within_a_ttl_and_on_the_same_host_at_once() {
    let server = Server::start(&["a"]);
    let mut process = Gateway::start("a", 1, server.port);
    for (next, predecessor) in [(2, None), (3, Some(2))] {
        process.become_active("a").await;
        process.wait_for_lease().await;
        process.task.abort();
        let started = Instant::now();
        process = Gateway::successor("a", next, predecessor, server.port);
        let is_member = move |status: &MembershipStatus| {
            status.view.member("a").is_some_and(|member| member.incarnation == secret(next).incarnation())
        };
        process.wait_for(is_member).await;
        let elapsed = started.elapsed();
        println!("process {next} was in the view after {elapsed:?}");
        assert_eq!(elapsed < TTL / 2, predecessor.is_some(), "{elapsed:?}");
    }
}

/// An impostor copies a process's incarnation and commitment from the view.
#[tokio::test]
async fn heartbeats_with_a_copied_incarnation_are_rejected_without_effect_on_the_process() {
    let server = Server::start(&["a", "b"]);
    let (mut a, mut b) = (Gateway::start("a", 1, server.port), Gateway::start("b", 2, server.port));
    a.become_active("a").await;
    let view = b.become_active("b").await.view;
    a.wait_for(|status| *status.view == *view).await;
    let member = view.member("a").unwrap().clone();
    assert_eq!(member.incarnation, secret(1).incarnation());
    let mut client = MembershipClient::connect(format!("http://127.0.0.1:{}", server.port)).await.unwrap();
    let commitment = member.commitment.unwrap().to_vec();
    for secret in [Vec::new(), commitment, vec![9; 32]] {
        let heartbeat = proto::Heartbeat {
            gateway: "a".to_owned(),
            incarnation: member.incarnation,
            sequence: 1,
            desired_state: proto::heartbeat::DesiredState::Ready.into(),
            seen_view: view.number,
            fingerprint: vec![9; 32],
            peer_address: "192.0.2.9".to_owned(),
            peer_port: 4790,
            secret,
            ..proto::Heartbeat::default()
        };
        for _ in 0..3 {
            let heartbeats = tokio_stream::iter([heartbeat.clone()]).chain(tokio_stream::pending());
            let mut notices = client.join(heartbeats).await.unwrap().into_inner();
            let error = timeout(TIMEOUT, notices.message()).await.expect("a reply").expect_err("it isn't a");
            assert!(matches!(error.code(), Code::PermissionDenied | Code::InvalidArgument), "{error}");
        }
    }
    // The end of the impostor's streams isn't taken for the end of a's process: another process is still rejected.
    let mut next = Gateway::start("a", 3, server.port);
    next.wait_for(|status| status.authority == Authority::Unreachable).await;
    sleep(TTL * 2).await;
    assert!(a.has_lease() && b.has_lease() && !next.has_lease());
    assert_eq!(b.handle.status.borrow().view, view, "the view is unchanged");
    assert_eq!(a.handle.status.borrow().view.member("a"), Some(&member));
}

#[tokio::test]
async fn a_gateway_outside_the_policy_gets_views_and_no_lease() {
    let server = Server::start(&["a"]);
    let (mut a, mut x) = (Gateway::start("a", 1, server.port), Gateway::start("x", 2, server.port));
    a.become_active("a").await;
    let number = x.wait_for(|status| status.view.active_members().count() == 1).await.view.number;
    x.handle.reported.send_replace(ready(number));
    sleep(TTL).await;
    assert!(!x.has_lease());
    assert_eq!(x.handle.status.borrow().view.member("x"), None);
}

/// Ignored while the gateway isn't in the policy; afterwards it must count, or view numbers would be reused.
#[tokio::test]
async fn a_number_reported_before_the_gateway_was_in_the_policy_counts_once_it_is() {
    let server = Server::start(&["a"]);
    let mut client = MembershipClient::connect(format!("http://127.0.0.1:{}", server.port)).await.unwrap();
    let (heartbeats, receiver) = mpsc::channel(4);
    let heartbeat = |sequence: u64| proto::Heartbeat {
        gateway: "x".to_owned(),
        incarnation: secret(1).incarnation(),
        secret: secret(1).bytes().to_owned(),
        tunnel_key: vec![1; 32],
        sequence,
        seen_view: 5,
        known_view: 5,
        ..proto::Heartbeat::default()
    };
    heartbeats.send(heartbeat(1)).await.unwrap();
    let mut notices = client.join(ReceiverStream::new(receiver)).await.unwrap().into_inner();
    let notice = timeout(TIMEOUT, notices.message()).await.unwrap().unwrap().unwrap();
    assert_eq!((notice.sequence, notice.view.map(|view| view.number)), (1, Some(0)));
    server.policy.send_replace(Some(published(&["a", "x"])));
    for sequence in 2.. {
        heartbeats.send(heartbeat(sequence)).await.unwrap();
        if let Err(status) = timeout(TIMEOUT, notices.message()).await.unwrap() {
            assert_eq!(status.code(), Code::Unavailable);
            assert!(status.message().contains("older than a view that gateways know"), "{status}");
            break;
        }
        // The heartbeat may be processed before the policy.
        assert!(sequence < 100, "the reported number is lost");
        sleep(TTL / 40).await;
    }
}

#[tokio::test]
async fn with_a_server_that_does_not_respond_the_authority_stays_unknown() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let a = Gateway::start("a", 1, listener.local_addr().unwrap().port());
    sleep(Duration::from_millis(700)).await;
    assert_eq!(a.handle.status.borrow().authority, Authority::Unknown);
    drop(a.handle);
    timeout(TIMEOUT, a.task).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_rejected_rival_is_reported_once_to_the_process_that_has_the_name() {
    let server = Server::start(&["a"]);
    let heartbeat = |process: u8, sequence: u64| proto::Heartbeat {
        gateway: "a".to_owned(),
        incarnation: secret(process).incarnation(),
        secret: secret(process).bytes().to_owned(),
        tunnel_key: vec![1; 32],
        sequence,
        ..proto::Heartbeat::default()
    };
    let open = async |process: u8| {
        let mut client = MembershipClient::connect(format!("http://127.0.0.1:{}", server.port)).await.unwrap();
        let (heartbeats, receiver) = mpsc::channel(4);
        heartbeats.send(heartbeat(process, 1)).await.unwrap();
        (heartbeats, client.join(ReceiverStream::new(receiver)).await.unwrap().into_inner())
    };
    let rival = async |notices: &mut tonic::Streaming<proto::MembershipUpdate>, sequence: u64| loop {
        let notice = timeout(TIMEOUT, notices.message()).await.expect("a notice")?.expect("a notice");
        if notice.sequence == sequence {
            return Ok::<_, tonic::Status>(notice.rival);
        }
    };
    let (first, mut first_notices) = open(1).await;
    assert_eq!(rival(&mut first_notices, 1).await.unwrap(), "");
    let (second, mut second_notices) = open(2).await;
    assert_eq!(rival(&mut second_notices, 1).await.unwrap(), "", "deferred: the first process may have died");
    first.send(heartbeat(1, 2)).await.unwrap();
    assert_eq!(rival(&mut first_notices, 2).await.unwrap(), "");
    second.send(heartbeat(2, 2)).await.unwrap();
    let error = rival(&mut second_notices, 2).await.unwrap_err();
    assert_eq!(error.code(), Code::AlreadyExists);
    assert!(error.message().contains("its address is 127.0.0.1:"), "{error}");
    for (sequence, is_reported) in [(3, true), (4, false)] {
        first.send(heartbeat(1, sequence)).await.unwrap();
        let address = rival(&mut first_notices, sequence).await.unwrap();
        assert_eq!(address.starts_with("127.0.0.1:"), is_reported, "{address}");
    }
}
