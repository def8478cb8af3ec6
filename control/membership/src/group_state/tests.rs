//! Decisions of the group state as peers join, leave and release shards.

use super::*;
use crate::fixtures::policy_peer;

const TTL: Duration = Duration::from_millis(600);

fn member(name: &str, serving: bool) -> Member {
    let peer = Some("10.2.0.1:4790".parse().unwrap());
    Member { serving, incarnation: 7, fingerprint: Some([1; 32]), peer, ..Member::new(name.into(), 1) }
}

struct Fixture {
    state: GroupState,
    start: Instant,
    is_granted: bool,
}

impl Fixture {
    fn new() -> Self {
        let mut state = GroupState::new("a".into(), Some("10.2.0.1:4790".parse().unwrap()), MembershipSource::Server);
        state.set_policy(&[policy_peer("a"), policy_peer("b"), policy_peer("c")], &"".into(), Instant::now());
        Self { state, start: Instant::now(), is_granted: true }
    }

    fn view(&mut self, number: u64, at: u64, members: Vec<Member>) {
        self.view_with(number, at, members, None);
    }

    fn view_with(&mut self, number: u64, at: u64, members: Vec<Member>, drain_block: Option<DrainBlock>) {
        let (view, now) = (Arc::new(MembershipView { number, members, ..MembershipView::default() }), self.at(at));
        let (authority, is_ttl_confirmed) = (Authority::Reachable, self.is_granted);
        self.state.set_status(&MembershipStatus { authority, view, ttl: TTL, is_ttl_confirmed, drain_block }, now);
    }

    fn at(&self, ms: u64) -> Instant {
        self.start + Duration::from_millis(ms)
    }

    fn links(&mut self, peers: &[(&str, PeerState)]) {
        self.state.set_links(peers.iter().map(|(name, status)| ((*name).into(), status.clone())).collect());
    }

    fn released(&mut self, gateway: &str, view: u64) {
        self.state.mark_released(gateway.into(), &Release { view, ..Release::default() });
    }

    fn desired_state(&self) -> DesiredState {
        self.state.desired_state(self.start)
    }

    /// What the engine knows of releases by policy of `b` and `c`.
    fn policy_releases(&mut self, at: u64) -> Vec<String> {
        let now = self.at(at);
        let text = |it: &MemberSpec| match &it.policy_release {
            PolicyRelease::NotAwaited => "not awaited".to_owned(),
            PolicyRelease::Version(version) => version.to_string(),
        };
        self.state.spec(now, Tick(5_000 + at as u32)).gateways.iter().skip(1).map(text).collect()
    }

    /// The peers that a full sync is requested from.
    fn overdue(&mut self, at: u64) -> Vec<String> {
        let now = self.at(at);
        self.state.sync_targets(now).iter().map(ToString::to_string).collect()
    }

    /// For each gateway: whether it is active, and whether `a` may open sessions in its home shards.
    fn spec(&mut self, at: u64) -> Vec<(bool, bool)> {
        let now = self.at(at);
        self.state.spec(now, Tick(5_000 + at as u32)).gateways.iter().map(|it| (it.active, it.may_open)).collect()
    }
}

fn linked(in_sync_from: bool, in_sync_to: bool) -> PeerState {
    PeerState { linked: true, sync_view: in_sync_from.then_some(7), in_sync_to, ..PeerState::default() }
}

#[test]
fn without_a_membership_authority_all_gateways_are_active() {
    let mut state = GroupState::new("a".into(), None, MembershipSource::Fixed);
    assert_eq!(state.spec(Instant::now(), Tick(0)), MembersSpec::default(), "policy names no gateway");
    state.set_policy(&[policy_peer("a"), policy_peer("b")], &"".into(), Instant::now());
    let spec = state.spec(Instant::now(), Tick(0));
    assert!(
        spec.this.as_deref() == Some("a") && spec.gateways.iter().all(|it| it.active && it.may_open && !it.connected)
    );
    assert!(!state.needs_lease());
}

#[test]
fn no_gateway_is_active_before_the_first_view() {
    let mut fixture = Fixture::new();
    assert!(fixture.state.is_authority_unknown() && fixture.state.needs_lease());
    assert_eq!(fixture.spec(0), []);
    assert_eq!(fixture.desired_state(), DesiredState::Joining);
}

#[test]
fn a_new_shard_is_opened_after_its_release_or_the_ttl() {
    let (active, inactive) = (|name| member(name, true), |name| member(name, false));
    let mut fixture = Fixture::new();
    fixture.view(5, 0, vec![active("a"), active("b"), active("c")]);
    assert_eq!(fixture.spec(0)[0], (true, false), "others may have owned it");
    assert_eq!(fixture.spec(600)[0], (true, false), "by another policy they may own it still");
    assert_eq!(fixture.spec(3000)[0], (true, true), "a peer that never answers");
    // b becomes inactive but is alive: it has to release first.
    fixture.view(6, 4000, vec![active("a"), inactive("b"), active("c")]);
    assert_eq!(fixture.spec(4000), [(true, true), (false, false), (true, false)], "the own shard stays open");
    fixture.released("c", 6);
    assert_eq!(fixture.spec(4001)[1], (false, false));
    fixture.released("b", 6);
    assert_eq!(fixture.spec(4002)[1], (false, true));
    // c has died.
    fixture.view(7, 5000, vec![active("a"), inactive("b"), Member { lease_expired: true, ..inactive("c") }]);
    fixture.released("b", 7);
    assert_eq!(fixture.spec(5000)[2], (false, true), "its lease has expired");
    // a becomes inactive and active again: the gateways that took over have to release first.
    fixture.view(8, 6000, vec![inactive("a"), active("b"), active("c")]);
    fixture.view(9, 7000, vec![active("a"), active("b"), active("c")]);
    assert_eq!(fixture.spec(7000)[0], (true, false));
    fixture.released("b", 9);
    fixture.released("c", 9);
    assert_eq!(fixture.spec(7001)[0], (true, true));
}

#[test]
fn an_active_gateway_awaits_releases_only_of_peers_that_were_deactivated() {
    let (active, inactive) = (|name| member(name, true), |name| member(name, false));
    let mut fixture = Fixture::new();
    fixture.view(5, 0, vec![active("a"), active("b"), active("c")]);
    fixture.released("b", 5);
    fixture.released("c", 5);
    assert_eq!(fixture.spec(0)[0], (true, true));
    fixture.view(6, 1000, vec![active("a"), Member { lease_expired: true, ..inactive("b") }, active("c")]);
    assert_eq!(fixture.spec(1000)[1], (false, true), "b is dead, and c owns no shard of b");
    // b was active again in views that this gateway missed: only its epoch shows that.
    fixture.view(9, 2000, vec![active("a"), Member { epoch: 9, ..inactive("b") }, active("c")]);
    assert_eq!(fixture.spec(2000)[1], (false, false));
    fixture.released("b", 9);
    assert_eq!(fixture.spec(2001)[1], (false, true));
    // c was inactive in missed views and is active again; it may have taken over b's shards meanwhile.
    let returned = Member { epoch: 11, ..active("c") };
    fixture.view(12, 3000, vec![active("a"), Member { epoch: 9, ..inactive("b") }, returned]);
    assert_eq!(fixture.spec(3000)[1], (false, false));
    fixture.released("c", 12);
    assert_eq!(fixture.spec(3001)[1], (false, true));
    // A release for an earlier view doesn't count for this one.
    let gone = Member { epoch: 13, ..inactive("c") };
    fixture.view(13, 4000, vec![active("a"), Member { epoch: 9, ..inactive("b") }, gone]);
    assert_eq!(fixture.spec(4000)[2], (false, false));
    assert_eq!(fixture.spec(4600)[2], (false, true), "its last lease has expired");
}

#[test]
fn the_ttl_counts_only_once_a_lease_was_granted() {
    let mut fixture = Fixture::new();
    fixture.is_granted = false;
    let serving = || vec![member("a", true), member("b", true)];
    fixture.view(5, 0, serving());
    assert_eq!(fixture.spec(10_000)[0], (true, false), "the TTL of b's lease is unknown");
    fixture.is_granted = true;
    fixture.view(5, 10_000, serving());
    assert_eq!(fixture.spec(10_001)[0], (true, true));
}

#[test]
fn it_is_ready_once_synced_and_drains_once_replicated() {
    let mut fixture = Fixture::new();
    fixture.view(5, 0, vec![member("a", false), member("b", true), member("c", false)]);
    assert_eq!(fixture.desired_state(), DesiredState::Joining);
    fixture.links(&[("b", linked(false, true)), ("c", PeerState::default())]);
    assert_eq!(fixture.desired_state(), DesiredState::Joining);
    fixture.links(&[("b", linked(true, false))]);
    assert_eq!(fixture.desired_state(), DesiredState::Ready);
    fixture.view(6, 1, vec![member("a", true), member("b", true), member("c", false)]);
    fixture.state.set_draining(true);
    assert_eq!(fixture.desired_state(), DesiredState::Ready, "not yet replicated to b");
    fixture.links(&[("b", linked(true, true))]);
    assert_eq!(fixture.desired_state(), DesiredState::Draining);
    fixture.view(7, 2, vec![member("a", false), member("b", true), member("c", false)]);
    fixture.links(&[("b", linked(true, false))]);
    assert_eq!(fixture.desired_state(), DesiredState::Draining, "it is inactive");
}

#[test]
fn it_is_ready_after_full_syncs_under_the_current_active_members() {
    let synced = |view| {
        let mut peer = linked(true, true);
        peer.sync_view = Some(view);
        peer
    };
    let mut fixture = Fixture::new();
    fixture.view(5, 0, vec![member("a", false), member("b", true), member("c", true)]);
    fixture.links(&[("b", synced(5)), ("c", synced(5))]);
    assert_eq!(fixture.desired_state(), DesiredState::Ready);
    // c owns b's shards now, and has not synced them.
    fixture.view(6, 100, vec![member("a", false), member("b", false), member("c", true)]);
    assert_eq!(fixture.desired_state(), DesiredState::Joining);
    assert_eq!(fixture.overdue(1_099), [""; 0], "c starts a sync by itself");
    assert_eq!(fixture.overdue(1_100), ["c"]);
    assert_eq!((fixture.overdue(1_101), fixture.overdue(2_099)), (vec![], vec![]));
    assert_eq!(fixture.overdue(2_100), ["c"], "requested again");
    fixture.links(&[("b", synced(5)), ("c", linked(false, true))]);
    assert_eq!(fixture.overdue(9_000), [""; 0], "the sync is in progress");
    fixture.links(&[("b", synced(5)), ("c", synced(6))]);
    assert_eq!((fixture.desired_state(), fixture.overdue(9_000)), (DesiredState::Ready, vec![]));
    // A view with the same active members changes nothing.
    fixture.view(7, 9_000, vec![member("a", false), member("b", false), member("c", true)]);
    assert_eq!(fixture.desired_state(), DesiredState::Ready);
    // c was inactive in views that this gateway missed.
    fixture.view(10, 9_100, vec![member("a", false), member("b", false), Member { epoch: 9, ..member("c", true) }]);
    assert_eq!(fixture.desired_state(), DesiredState::Joining);
    fixture.links(&[("c", synced(11))]);
    assert_eq!(fixture.desired_state(), DesiredState::Ready);
    // No other gateway is active, so no sync is needed.
    fixture.view(12, 9_200, vec![member("a", false), member("b", false), member("c", false)]);
    assert_eq!((fixture.desired_state(), fixture.overdue(20_000)), (DesiredState::Ready, vec![]));
}

#[test]
fn an_unable_gateway_drains_at_once_and_reports_the_fault() {
    let mut fixture = Fixture::new();
    fixture.view(6, 1, vec![member("a", true), member("b", true), member("c", false)]);
    fixture.links(&[("b", linked(true, false))]);
    fixture.state.set_unable(Some("an interface is down".into()));
    assert_eq!(fixture.desired_state(), DesiredState::Draining, "sessions that b lacks are lost in any case");
    assert_eq!(fixture.state.unable().map(|it| &**it), Some("an interface is down"));
    fixture.state.set_unable(None);
    assert_eq!((fixture.desired_state(), fixture.state.unable()), (DesiredState::Ready, None));
}

#[test]
fn promises_of_all_peers_are_a_lease_while_the_server_is_unreachable() {
    let mut fixture = Fixture::new();
    fixture.view(5, 0, vec![member("a", true), member("b", true), member("c", false)]);
    let echoed =
        |sent: u32, view| PeerState { last_echo: Some(ReceivedEcho { sent: Tick(sent), view }), ..linked(true, true) };
    fixture.links(&[("b", echoed(1000, 5)), ("c", echoed(900, 5))]);
    assert_eq!(fixture.state.lease_from_peers(), None, "the server is reachable");
    fixture.state.authority = Authority::Unreachable;
    assert_eq!(fixture.state.lease_from_peers(), Some(Tick(1500)), "the promise that expires first");
    fixture.links(&[("b", echoed(1000, 5)), ("c", echoed(900, 4))]);
    assert_eq!(fixture.state.lease_from_peers(), None, "c uses another view");
    fixture.links(&[("b", echoed(1000, 5))]);
    assert_eq!(fixture.state.lease_from_peers(), None, "no promise of c");
}

impl Fixture {
    /// A view that names process 7 of each gateway; this one is process 8, and has succeeded it.
    fn successor(authority: Authority) -> Self {
        let mut fixture = Self::new();
        fixture.state.set_claim(Claim::new(8, vec![6, 7]));
        fixture.status(authority, 5, vec![member("a", true), member("b", true), member("c", false)]);
        fixture
    }

    fn status(&mut self, authority: Authority, number: u64, members: Vec<Member>) {
        let view = Arc::new(MembershipView { number, members, ..MembershipView::default() });
        let status = MembershipStatus { authority, view, ttl: TTL, is_ttl_confirmed: true, drain_block: None };
        self.state.set_status(&status, self.start);
    }

    fn promised(&mut self, view: u64) {
        let echo = Some(ReceivedEcho { sent: Tick(1000), view });
        let peer = PeerState { last_echo: echo, sync_view: None, ..linked(true, true) };
        self.links(&[("b", peer.clone()), ("c", peer)]);
    }
}

#[test]
fn a_successor_has_the_lease_of_its_predecessors_place_without_the_server() {
    let mut fixture = Fixture::successor(Authority::Unreachable);
    fixture.promised(5);
    assert_eq!(fixture.state.lease_from_peers(), Some(Tick(1600)));
    // The server is back, and has not named it yet: it can't grant it a lease.
    let members = || vec![member("a", true), member("b", true), member("c", false)];
    fixture.status(Authority::Reachable, 5, members());
    assert_eq!(fixture.state.lease_from_peers(), Some(Tick(1600)));
    let named = |incarnation| vec![Member { incarnation, ..member("a", true) }, member("b", true), member("c", false)];
    fixture.status(Authority::Reachable, 6, named(8));
    fixture.promised(6);
    assert_eq!(fixture.state.lease_from_peers(), None, "leases are the server's by now");
    fixture.status(Authority::Unreachable, 6, named(8));
    assert_eq!(fixture.state.lease_from_peers(), Some(Tick(1600)));
    fixture.status(Authority::Unreachable, 6, named(9));
    assert_eq!(fixture.state.lease_from_peers(), None, "another process has the name, and may have a lease");
}

#[test]
fn a_restarted_gateway_that_the_server_has_answered_takes_no_place_by_itself() {
    let mut fixture = Fixture::successor(Authority::Reachable);
    fixture.promised(5);
    assert_eq!(fixture.state.lease_from_peers(), None);
}

#[test]
fn a_successor_opens_sessions_once_it_has_those_of_all_active_members() {
    let mut fixture = Fixture::successor(Authority::Unreachable);
    fixture.promised(5);
    for peer in ["b", "c"] {
        fixture.released(peer, 5);
    }
    assert_eq!(fixture.spec(3_000)[0], (true, false), "also when releases have timed out");
    assert_eq!(fixture.overdue(1_000), Vec::<String>::new(), "b's full sync has begun under no older view");
    fixture.links(&[("b", PeerState { sync_view: Some(4), ..linked(true, true) })]);
    assert_eq!((fixture.overdue(999), fixture.overdue(1_000)), (vec![], vec!["b".to_owned()]));
    assert_eq!(fixture.spec(3_000)[0], (true, false));
    fixture.links(&[("b", PeerState { sync_view: Some(5), ..linked(true, true) })]);
    assert_eq!(fixture.spec(3_000)[0], (true, true));
    fixture.links(&[("b", PeerState { sync_view: None, ..linked(true, true) })]);
    assert_eq!(fixture.spec(3_000)[0], (true, true), "another round begins");
}

#[test]
fn a_gateway_forwards_only_with_a_view_and_an_active_one_only_with_a_lease() {
    let mut fixture = Fixture::new();
    assert!(!fixture.state.forwards(false), "it knows no view");
    let active = || vec![member("a", true), member("b", true)];
    fixture.status(Authority::Reachable, 5, vec![member("a", false), member("b", true)]);
    assert!(fixture.state.forwards(false), "to the owners");
    fixture.status(Authority::Unreachable, 5, vec![member("a", false), member("b", true)]);
    assert!(fixture.state.forwards(false));
    fixture.status(Authority::Unreachable, 6, active());
    assert_eq!([false, true].map(|has_lease| fixture.state.forwards(has_lease)), [false, true]);
    let mut alone = GroupState::new("a".into(), None, MembershipSource::Server);
    assert!(alone.forwards(false), "policy names no gateway");
    alone.set_policy(&[policy_peer("a")], &"".into(), Instant::now());
    assert!(alone.forwards(false), "no other one could own its shards");
}

#[test]
fn a_gateway_is_ready_once_its_peers_have_sent_their_sessions_by_its_policy() {
    let mut fixture = Fixture::new();
    fixture.view(7, 0, vec![member("a", false), member("b", true), member("c", false)]);
    let mut peer = linked(true, true);
    fixture.links(&[("b", peer.clone())]);
    assert_eq!(fixture.desired_state(), DesiredState::Ready);
    let gateways = [policy_peer("a"), policy_peer("b"), policy_peer("c")];
    fixture.state.set_policy(&gateways, &"v2".into(), fixture.start);
    for (version, ready) in [("", false), ("v1", false), ("v2", true)] {
        peer.released = Some(Release { view: 7, policy: version.into(), applied: 1, seen: 1 });
        fixture.links(&[("b", peer.clone())]);
        let expected = if ready { DesiredState::Ready } else { DesiredState::Joining };
        assert_eq!(fixture.desired_state(), expected, "{version}");
    }
    // A peer that has rejected the policy doesn't keep it from joining for ever.
    fixture.state.set_policy(&gateways, &"v3".into(), fixture.start);
    assert_eq!(fixture.desired_state(), DesiredState::Joining);
    assert_eq!(fixture.state.desired_state(fixture.at(3_000)), DesiredState::Ready);
}

#[test]
fn a_removed_gateway_leaves_once_its_peers_have_got_and_released_what_the_policy_has_moved() {
    let mut fixture = Fixture::new();
    let members = |serving| vec![member("a", serving), member("b", true), member("c", false)];
    fixture.view(7, 0, members(true));
    let mut peer = linked(true, true);
    fixture.state.set_policy(&[policy_peer("b"), policy_peer("c")], &"v2".into(), fixture.start);
    let release = |policy: &str| Some(Release { view: 7, policy: policy.into(), applied: 1, seen: 1 });
    let cases = [(None, "", false), (Some("v1"), "v2", false), (Some("v2"), "v1", false), (Some("v2"), "v2", true)];
    for (acknowledged, of_peer, is_done) in cases {
        (peer.acknowledged_policy, peer.released) = (acknowledged.map(Arc::from), release(of_peer));
        fixture.links(&[("b", peer.clone())]);
        let expected = if is_done { DesiredState::Draining } else { DesiredState::Ready };
        assert_eq!(fixture.desired_state(), expected, "{acknowledged:?} {of_peer}");
    }
    fixture.view(8, 100, members(false));
    fixture.links(&[]);
    assert_eq!(fixture.desired_state(), DesiredState::Draining, "it doesn't become active again");
}

#[test]
fn releases_by_policy_are_published_only_while_the_engine_awaits_any() {
    let mut fixture = Fixture::new();
    fixture.view(7, 0, vec![member("a", true), member("b", true), member("c", true)]);
    assert_eq!(fixture.policy_releases(0), ["", ""]);
    let gateways = [policy_peer("a"), policy_peer("b"), policy_peer("c")];
    fixture.state.set_policy(&gateways, &"v1".into(), fixture.start);
    let release = |policy: &str, seen| Release { view: 7, policy: policy.into(), applied: seen, seen };
    fixture.state.mark_released("b".into(), &release("v1", 1));
    assert_eq!(fixture.policy_releases(0), ["", ""], "nothing has moved here");
    fixture.state.set_policy(&gateways, &"v2".into(), fixture.start);
    fixture.state.set_awaits_policy_release(true, fixture.start);
    assert_eq!(fixture.policy_releases(10), ["", ""], "b may not know of v2 yet");
    fixture.state.mark_released("b".into(), &release("v1", 2));
    assert_eq!(fixture.policy_releases(15), ["v1", ""]);
    fixture.state.mark_released("b".into(), &release("v2", 2));
    assert_eq!(fixture.policy_releases(20), ["v2", ""]);
    assert_eq!(fixture.state.next_deadline(fixture.at(2_000)), Some(fixture.at(3_000)));
    assert_eq!(fixture.policy_releases(3_000), ["v2", "v2"], "c never answers");
}

#[test]
fn a_refused_drain_is_given_up_and_one_that_waits_is_not() {
    let block = |reason| Some(DrainBlock { reason, gateways: vec!["b".into()] });
    let members = || vec![member("a", true), member("b", false)];
    let mut fixture = Fixture::new();
    fixture.view(1, 0, members());
    fixture.state.set_draining(true);
    for reason in [DrainBlockReason::BecomingActive, DrainBlockReason::MaxUnavailable(1)] {
        fixture.view_with(1, 10, members(), block(reason));
        assert_eq!(fixture.state.drain_block(), block(reason).as_ref());
        assert_eq!(fixture.state.give_up_refused_drain(), None);
        assert!(fixture.state.is_draining());
    }
    fixture.view_with(1, 20, members(), block(DrainBlockReason::NoBackup));
    assert_eq!(fixture.state.give_up_refused_drain(), block(DrainBlockReason::NoBackup));
    assert_eq!((fixture.state.is_draining(), fixture.desired_state()), (false, DesiredState::Ready));
    // The reply to its next heartbeat is still to come.
    fixture.view_with(1, 30, members(), block(DrainBlockReason::NoBackup));
    assert_eq!((fixture.state.give_up_refused_drain(), fixture.state.drain_block()), (None, None));
}

/// It may be active under a later view, and own shards of this gateway by then.
#[test]
fn peers_extend_no_lease_without_the_promise_of_a_gateway_that_the_view_lacks() {
    let mut fixture = Fixture::new();
    fixture.view(5, 0, vec![member("a", true), member("b", true)]);
    fixture.state.authority = Authority::Unreachable;
    let echo = Some(ReceivedEcho { sent: Tick(1000), view: 5 });
    fixture.links(&[("b", PeerState { last_echo: echo, ..linked(true, true) })]);
    assert_eq!(fixture.state.lease_from_peers(), None, "no promise of c");
    fixture.state.set_policy(&[policy_peer("a"), policy_peer("b")], &"v2".into(), fixture.start);
    assert_eq!(fixture.state.lease_from_peers(), Some(Tick(1600)));
}

#[test]
fn another_process_of_a_peer_has_released_nothing_by_policy() {
    let mut fixture = Fixture::new();
    let view = |incarnation| vec![member("a", true), Member { incarnation, ..member("b", true) }, member("c", true)];
    fixture.view(7, 0, view(1));
    let gateways = [policy_peer("a"), policy_peer("b"), policy_peer("c")];
    fixture.state.set_policy(&gateways, &"v2".into(), fixture.start);
    fixture.state.set_awaits_policy_release(true, fixture.start);
    fixture.state.mark_released("b".into(), &Release { view: 7, policy: "v2".into(), applied: 1, seen: 1 });
    assert_eq!(fixture.policy_releases(10), ["v2", ""]);
    fixture.view(8, 20, view(2));
    assert_eq!(fixture.policy_releases(30), ["", ""]);
}
