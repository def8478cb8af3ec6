//! Heartbeats: what replies and ends of streams mean.

use super::*;

const TTL_MS: u32 = 540;

fn client(former: Option<FormerMembership>) -> (Client, MembershipStatus, Instant) {
    let now = Instant::now();
    let identity = Heartbeat::minimal("a", 1, DesiredState::default(), 0);
    let mut client = Client::new(now, identity, former);
    client.begin_stream(now);
    (client, MembershipStatus::default(), now)
}

fn view(number: u64) -> MembershipView {
    MembershipView { number, ..MembershipView::default() }
}

fn reply(sequence: u64, view: Option<MembershipView>) -> Reply {
    Reply { sequence, lease_ms: TTL_MS, view, drain_block: None }
}

fn disconnected() -> StreamEnd {
    StreamEnd::Disconnected("it is away".to_owned())
}

#[test]
fn a_lease_lasts_from_its_heartbeat_on_and_counts_once_the_view_is_applied() {
    let (mut client, mut status, now) = client(None);
    let mut reported = ReportedState::default();
    let (first, heartbeat) = client.next_heartbeat(now, Tick(10), &reported, &status);
    assert_eq!((first, heartbeat.known_view), (1, 0));
    let accepted = client.reply(now, reply(1, Some(view(7))), &reported, &mut status).unwrap();
    assert_eq!(accepted, Accepted { lease_until: None, is_found: true }, "view 7 isn't applied");
    assert_eq!((status.authority, status.view.number, status.is_ttl_confirmed), (Authority::Reachable, 7, true));
    reported.seen_view = 7;
    for (sequence, tick) in [(2, 20), (3, 30)] {
        assert_eq!(client.next_heartbeat(now, Tick(tick), &reported, &status).0, sequence);
    }
    let accepted = client.reply(now, reply(3, None), &reported, &mut status).unwrap();
    assert_eq!(accepted, Accepted { lease_until: Some(Tick(30 + TTL_MS)), is_found: false });
    let accepted = client.reply(now, reply(2, None), &reported, &mut status).unwrap();
    assert_eq!(accepted.lease_until, None, "a later heartbeat is acknowledged");
    let error = client.reply(now, reply(3, Some(view(6))), &reported, &mut status).unwrap_err();
    assert_eq!(error, UnexpectedView::Old { number: 6, known: 7 });
}

#[test]
fn each_heartbeat_names_the_known_view_and_numbers_begin_again_with_a_stream() {
    let (mut client, mut status, now) = client(None);
    status.view = Arc::new(view(7));
    let reported = ReportedState { seen_view: 7, ..ReportedState::default() };
    let views = |client: &mut Client| {
        let (number, heartbeat) = client.next_heartbeat(now, Tick(10), &reported, &status);
        (number, heartbeat.known_view)
    };
    assert_eq!([(); 2].map(|()| views(&mut client)), [(1, 7), (2, 7)]);
    client.begin_stream(now);
    assert_eq!(views(&mut client), (1, 7));
    // Of the first stream.
    let accepted = client.reply(now, reply(2, None), &reported, &mut status).unwrap();
    assert_eq!(accepted.lease_until, None);
}

#[test]
fn another_view_of_the_known_number_is_refused_and_the_next_heartbeat_says_that_it_is_used() {
    let (mut client, mut status, now) = client(None);
    status.view = Arc::new(view(7));
    let (reported, before) = (ReportedState { seen_view: 7, ..ReportedState::default() }, status.view.clone());
    let other = MembershipView { serving_changes: 1, ..view(7) };
    let error = client.reply(now, reply(0, Some(other)), &reported, &mut status).unwrap_err();
    assert_eq!((error, &status.view), (UnexpectedView::Other(7), &before));
    client.begin_stream(now);
    assert_eq!(client.next_heartbeat(now, Tick(10), &reported, &status).1.known_view, 8);
}

#[test]
fn the_view_of_the_previous_process_counts_once_no_server_is_there() {
    let former = FormerMembership { view: Arc::new(view(7)), ttl: Duration::from_millis(400) };
    let (mut client, mut status, _) = client(Some(former));
    let ended = client.ended(disconnected(), true, &mut status);
    assert_eq!((ended.retry, ended.lost, ended.place_taken), (Retry::NextServer, None, None));
    let ended = client.ended(StreamEnd::Rejected("no".to_owned()), false, &mut status);
    assert_eq!((status.authority, ended.place_taken), (Authority::Unknown, None), "a server that rejects is there");
    let ended = client.ended(disconnected(), false, &mut status);
    assert_eq!((ended.retry, ended.place_taken), (Retry::Backoff, Some(7)));
    assert_eq!(ended.lost.as_deref(), Some("it is away"), "once for both servers");
    assert_eq!((status.authority, status.view.number), (Authority::Unreachable, 7));
    assert!(status.apply_relayed_view(Arc::new(view(8))) && !status.apply_relayed_view(Arc::new(view(8))));
    assert_eq!(client.ended(disconnected(), false, &mut status).place_taken, None, "once");
}

#[test]
fn a_server_without_the_service_is_no_authority_unless_there_was_one() {
    let (mut client, mut status, now) = client(None);
    let ended = client.ended(StreamEnd::NoService, false, &mut status);
    assert!(ended.is_view_fixed && status.authority == Authority::Fixed);
    assert!(!client.ended(StreamEnd::NoService, false, &mut status).is_view_fixed, "known already");
    client.reply(now, reply(1, None), &ReportedState::default(), &mut status).unwrap();
    let ended = client.ended(StreamEnd::NoService, false, &mut status);
    assert_eq!(ended.lost.as_deref(), Some("the server has no membership service any more"));
    assert_eq!(status.authority, Authority::Unreachable);
}

#[test]
fn a_policy_alone_is_no_reason_for_a_heartbeat() {
    let mut reported = ReportedState { sessions: 5, ..ReportedState::default() };
    let next = |seen_view, version: &str| ReportedState {
        seen_view,
        policy_version: Some(version.into()),
        ..ReportedState::default()
    };
    assert!(!reported.update(next(0, "v1")));
    assert!(reported.update(next(1, "v1")));
    assert_eq!((reported.policy_version.as_deref(), reported.sessions), (Some("v1"), 5));
}
