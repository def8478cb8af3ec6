//! When this gateway may do what, as others come, go and let go.

use super::*;
use crate::peer::{CopiesStatus, Echoed, PeerStatus};

const TTL: Duration = Duration::from_millis(600);

fn member(name: &str, serving: bool) -> Member {
    let peer = Some("10.2.0.1:4790".parse().unwrap());
    Member { serving, incarnation: 7, fingerprint: Some([1; 32]), peer, ..Member::new(name.into(), 1) }
}

fn named(name: &str) -> policy::Peer {
    policy::Peer {
        name: name.into(),
        node: name.into(),
        zone: "".into(),
        address: None,
        pods: [].into(),
        uncovered: None,
    }
}

struct Scene {
    standing: Standing,
    begun: Instant,
    is_granted: bool,
}

impl Scene {
    fn new() -> Self {
        let mut standing =
            Standing::new("a".into(), Some("10.2.0.1:4790".parse().unwrap()), Source::Server, Tunnels::default());
        standing.set_policy(&[named("a"), named("b"), named("c")]);
        Self { standing, begun: Instant::now(), is_granted: true }
    }

    fn view(&mut self, number: u64, at: u64, members: Vec<Member>) {
        let (view, now) = (Arc::new(View { number, members, ..View::default() }), self.at(at));
        let status = Status { authority: Authority::Present, view, ttl: TTL, is_granted: self.is_granted };
        self.standing.set_status(&status, now);
    }

    fn at(&self, ms: u64) -> Instant {
        self.begun + Duration::from_millis(ms)
    }

    fn links(&mut self, peers: &[(&str, PeerStatus)]) {
        let peers = peers.iter().map(|(name, status)| ((*name).into(), status.clone())).collect();
        self.standing.set_links(Arc::new(PeersStatus { peers, strangers: 0 }));
    }

    fn released(&mut self, gateway: &str, view: u64) {
        self.standing.release(gateway.into(), view);
    }

    /// Who is asked for all sessions.
    fn overdue(&mut self, at: u64) -> Vec<String> {
        let now = self.at(at);
        self.standing.overdue(now).iter().map(ToString::to_string).collect()
    }

    /// For each gateway: whether it serves, and whether we may open in what is its home's.
    fn spec(&mut self, at: u64) -> Vec<(bool, bool)> {
        let now = self.at(at);
        self.standing.spec(now, Tick(5_000)).gateways.iter().map(|it| (it.serving, it.may_open)).collect()
    }
}

fn linked(in_sync_from: bool, in_sync_to: bool) -> PeerStatus {
    let copies = CopiesStatus { in_sync_from, synced_by: 7, in_sync_to, ..CopiesStatus::default() };
    PeerStatus { linked: true, copies, ..PeerStatus::default() }
}

#[test]
fn without_anybody_who_decides_all_serve_and_alone_all_is_ours() {
    let mut standing = Standing::new("a".into(), None, Source::Static, Tunnels::default());
    assert_eq!(standing.spec(Instant::now(), Tick(0)), MembersSpec::default(), "no gateway is named");
    standing.set_policy(&[named("a"), named("b")]);
    let spec = standing.spec(Instant::now(), Tick(0));
    assert!(
        spec.this.as_deref() == Some("a") && spec.gateways.iter().all(|it| it.serving && it.may_open && !it.linked)
    );
    assert!(!standing.needs_lease());
}

#[test]
fn before_anybody_has_spoken_nobody_serves() {
    let mut scene = Scene::new();
    assert!(scene.standing.is_unknown() && scene.standing.needs_lease());
    assert_eq!(scene.spec(0), []);
    assert_eq!(scene.standing.wish(), Wish::Joining);
}

#[test]
fn what_was_anothers_is_opened_in_when_that_one_has_let_go_or_its_time_is_over() {
    let (serves, not) = (|name| member(name, true), |name| member(name, false));
    let mut scene = Scene::new();
    scene.view(5, 0, vec![serves("a"), serves("b"), serves("c")]);
    assert_eq!(scene.spec(0)[0], (true, false), "others served before");
    assert_eq!(scene.spec(600)[0], (true, true));
    // One is told to stop: it lives, and has to say so.
    scene.view(6, 1000, vec![serves("a"), not("b"), serves("c")]);
    assert_eq!(scene.spec(1000), [(true, true), (false, false), (true, false)], "our own share stays ours");
    scene.released("c", 6);
    assert_eq!(scene.spec(1001)[1], (false, false));
    scene.released("b", 6);
    assert_eq!(scene.spec(1002)[1], (false, true));
    // One has died.
    scene.view(7, 2000, vec![serves("a"), not("b"), Member { lapsed: true, ..not("c") }]);
    scene.released("b", 7);
    assert_eq!(scene.spec(2000)[2], (false, true), "nobody needs to wait for it");
    // We stop and serve again: whoever stood in has to let go first.
    scene.view(8, 3000, vec![not("a"), serves("b"), serves("c")]);
    scene.view(9, 4000, vec![serves("a"), serves("b"), serves("c")]);
    assert_eq!(scene.spec(4000)[0], (true, false));
    scene.released("b", 9);
    scene.released("c", 9);
    assert_eq!(scene.spec(4001)[0], (true, true));
}

#[test]
fn who_goes_on_needs_no_word_from_others_who_do() {
    let (serves, not) = (|name| member(name, true), |name| member(name, false));
    let mut scene = Scene::new();
    scene.view(5, 0, vec![serves("a"), serves("b"), serves("c")]);
    assert_eq!(scene.spec(600)[0], (true, true));
    scene.view(6, 1000, vec![serves("a"), Member { lapsed: true, ..not("b") }, serves("c")]);
    assert_eq!(scene.spec(1000)[1], (false, true), "b is dead, and c has nothing of b's");
    // b came back and stopped while this gateway saw no view: of that, only its epoch tells.
    scene.view(9, 2000, vec![serves("a"), Member { epoch: 9, ..not("b") }, serves("c")]);
    assert_eq!(scene.spec(2000)[1], (false, false));
    scene.released("b", 9);
    assert_eq!(scene.spec(2001)[1], (false, true));
    // So did c, which serves again, and may have stood in for b meanwhile.
    scene.view(12, 3000, vec![serves("a"), Member { epoch: 9, ..not("b") }, Member { epoch: 11, ..serves("c") }]);
    assert_eq!(scene.spec(3000)[1], (false, false));
    scene.released("c", 12);
    assert_eq!(scene.spec(3001)[1], (false, true));
    // What it let go by an earlier view is not what it has to let go by this one.
    let gone = Member { epoch: 13, ..not("c") };
    scene.view(13, 4000, vec![serves("a"), Member { epoch: 9, ..not("b") }, gone]);
    assert_eq!(scene.spec(4000)[2], (false, false));
    assert_eq!(scene.spec(4600)[2], (false, true), "its last lease is over");
}

#[test]
fn time_lets_nobody_go_before_a_lease_has_said_how_long_one_lasts() {
    let mut scene = Scene::new();
    scene.is_granted = false;
    let serving = || vec![member("a", true), member("b", true)];
    scene.view(5, 0, serving());
    assert_eq!(scene.spec(10_000)[0], (true, false), "b may have a lease of a minute");
    scene.is_granted = true;
    scene.view(5, 10_000, serving());
    assert_eq!(scene.spec(10_001)[0], (true, true));
}

#[test]
fn it_asks_to_serve_when_it_has_all_and_to_stop_when_others_have() {
    let mut scene = Scene::new();
    scene.view(5, 0, vec![member("a", false), member("b", true), member("c", false)]);
    assert_eq!(scene.standing.wish(), Wish::Joining);
    scene.links(&[("b", linked(false, true)), ("c", PeerStatus::default())]);
    assert_eq!(scene.standing.wish(), Wish::Joining);
    scene.links(&[("b", linked(true, false))]);
    assert_eq!(scene.standing.wish(), Wish::Ready);
    scene.view(6, 1, vec![member("a", true), member("b", true), member("c", false)]);
    scene.standing.set_draining(true);
    assert_eq!(scene.standing.wish(), Wish::Ready, "b hasn't all of it yet");
    scene.links(&[("b", linked(true, true))]);
    assert_eq!(scene.standing.wish(), Wish::Draining);
    scene.view(7, 2, vec![member("a", false), member("b", true), member("c", false)]);
    scene.links(&[("b", linked(true, false))]);
    assert_eq!(scene.standing.wish(), Wish::Draining, "it has stopped");
}

#[test]
fn it_asks_to_serve_when_it_has_been_told_all_by_the_view_that_stands() {
    let synced = |view| {
        let mut peer = linked(true, true);
        peer.copies.synced_by = view;
        peer
    };
    let mut scene = Scene::new();
    scene.view(5, 0, vec![member("a", false), member("b", true), member("c", true)]);
    scene.links(&[("b", synced(5)), ("c", synced(5))]);
    assert_eq!(scene.standing.wish(), Wish::Ready);
    // What was b's is c's now, which has told nothing of that.
    scene.view(6, 100, vec![member("a", false), member("b", false), member("c", true)]);
    assert_eq!(scene.standing.wish(), Wish::Joining);
    assert_eq!(scene.overdue(1_099), [""; 0], "it begins by itself");
    assert_eq!(scene.overdue(1_100), ["c"]);
    assert_eq!((scene.overdue(1_101), scene.overdue(2_099)), (vec![], vec![]));
    assert_eq!(scene.overdue(2_100), ["c"], "it hasn't heard");
    scene.links(&[("b", synced(5)), ("c", linked(false, true))]);
    assert_eq!(scene.overdue(9_000), [""; 0], "it is at it");
    scene.links(&[("b", synced(5)), ("c", synced(6))]);
    assert_eq!((scene.standing.wish(), scene.overdue(9_000)), (Wish::Ready, vec![]));
    // A view by which the same ones serve changes nothing.
    scene.view(7, 9_000, vec![member("a", false), member("b", false), member("c", true)]);
    assert_eq!(scene.standing.wish(), Wish::Ready);
    // c has stopped and begun again, and this gateway saw neither.
    scene.view(10, 9_100, vec![member("a", false), member("b", false), Member { epoch: 9, ..member("c", true) }]);
    assert_eq!(scene.standing.wish(), Wish::Joining);
    scene.links(&[("c", synced(11))]);
    assert_eq!(scene.standing.wish(), Wish::Ready);
    // Nobody else serves, so there is nothing to wait for.
    scene.view(12, 9_200, vec![member("a", false), member("b", false), member("c", false)]);
    assert_eq!((scene.standing.wish(), scene.overdue(20_000)), (Wish::Ready, vec![]));
}

#[test]
fn who_is_unable_asks_to_stop_at_once_and_says_why() {
    let mut scene = Scene::new();
    scene.view(6, 1, vec![member("a", true), member("b", true), member("c", false)]);
    scene.links(&[("b", linked(true, false))]);
    scene.standing.set_unable(Some("a link is down".into()));
    assert_eq!(scene.standing.wish(), Wish::Draining, "what b hasn't got yet is lost in any case");
    assert_eq!(scene.standing.unable().map(|it| &**it), Some("a link is down"));
    scene.standing.set_unable(None);
    assert_eq!((scene.standing.wish(), scene.standing.unable()), (Wish::Ready, None));
}

#[test]
fn while_the_server_is_away_the_promises_of_all_others_are_a_lease() {
    let mut scene = Scene::new();
    scene.view(5, 0, vec![member("a", true), member("b", true), member("c", false)]);
    let echoed = |sent: u32, view| PeerStatus { echoed: Some(Echoed { sent: Tick(sent), view }), ..linked(true, true) };
    scene.links(&[("b", echoed(1000, 5)), ("c", echoed(900, 5))]);
    assert_eq!(scene.standing.lease_by_peers(), None, "the server is there");
    scene.standing.authority = Authority::Lost;
    assert_eq!(scene.standing.lease_by_peers(), Some(Tick(1500)), "the promise that ends first");
    scene.links(&[("b", echoed(1000, 5)), ("c", echoed(900, 4))]);
    assert_eq!(scene.standing.lease_by_peers(), None, "c goes by another view");
    scene.links(&[("b", echoed(1000, 5))]);
    assert_eq!(scene.standing.lease_by_peers(), None, "nothing is known of c");
}
