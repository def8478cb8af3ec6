//! What is promised of views and leases: by example here, against whole worlds in `model`.

use super::*;
use crate::members::{Member, Wish};

const TTL: Duration = Duration::from_millis(600);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A roster and the time.
struct Office {
    roster: Roster,
    now: Instant,
}

impl Office {
    fn new(names: &[&str]) -> Self {
        let mut roster = Roster::new(TTL);
        roster.set_policy(names.iter().map(|name| Arc::from(*name)));
        Self { roster, now: Instant::now() }
    }

    /// One in which all of these serve.
    fn serving(names: &[&str]) -> Self {
        let mut office = Self::new(names);
        for name in names {
            office.hears(name, 1, Wish::Joining).unwrap();
        }
        for name in names {
            office.hears(name, 1, Wish::Ready).unwrap();
        }
        assert_eq!(office.serving_now(), names);
        office
    }

    fn tell(
        &mut self,
        name: &str,
        incarnation: u64,
        wish: Wish,
        seen_view: u64,
        view: Option<&Arc<View>>,
    ) -> Result<Heard, Refusal> {
        let (fingerprint, peer, view) = (None, None, view.cloned());
        let beat = Beat { gateway: name.into(), incarnation, wish, seen_view, fingerprint, peer, view };
        let heard = self.roster.beat(self.now, &beat);
        self.roster.decide(self.now);
        heard
    }

    /// A beat of one that has seen the current view.
    fn hears(&mut self, name: &str, incarnation: u64, wish: Wish) -> Result<Heard, Refusal> {
        self.tell(name, incarnation, wish, self.roster.view().number, None)
    }

    fn wait(&mut self, by: Duration) {
        self.now += by;
        self.roster.decide(self.now);
    }

    fn serving_now(&self) -> Vec<&str> {
        self.roster.view().serving().map(|member| &*member.name).collect()
    }

    fn member(&self, name: &str) -> Member {
        self.roster.view().member(name).unwrap().clone()
    }

    fn has_lease(&mut self, name: &str, incarnation: u64) -> bool {
        self.roster.grant(self.now, name, incarnation).is_some()
    }
}

#[test]
fn who_is_ready_under_the_current_view_serves_and_gets_leases() {
    let mut office = Office::new(&["a", "b"]);
    assert_eq!(office.hears("a", 1, Wish::Joining), Ok(Heard::Counts));
    assert_eq!(office.roster.view().number, 0, "b may know more");
    office.hears("b", 1, Wish::Joining).unwrap();
    let number = office.roster.view().number;
    assert_eq!(number, 1);
    office.tell("a", 1, Wish::Ready, number - 1, None).unwrap();
    assert!(office.serving_now().is_empty(), "it was ready for something else");
    assert!(!office.has_lease("a", 1));
    office.hears("a", 1, Wish::Ready).unwrap();
    assert_eq!(office.serving_now(), ["a"]);
    assert!(office.has_lease("a", 1) && !office.has_lease("b", 1) && !office.has_lease("a", 2));
    office.tell("b", 1, Wish::Ready, number, None).unwrap();
    assert_eq!(office.serving_now(), ["a"], "b has not seen that a serves");
}

#[test]
fn silence_ends_serving_after_a_ttl_and_not_before() {
    let mut office = Office::serving(&["a", "b"]);
    let before = office.member("b");
    office.wait(TTL);
    assert_eq!(office.serving_now(), ["a", "b"]);
    office.hears("a", 1, Wish::Ready).unwrap();
    assert_eq!(office.roster.due(), Some(office.now + ms(1)));
    office.wait(ms(1));
    assert_eq!(office.serving_now(), ["a"]);
    assert_eq!(office.member("b").epoch, office.roster.view().number);
    assert!(office.member("b").epoch > before.epoch);
    assert!(lease(TTL) < TTL);
}

#[test]
fn of_all_changes_of_a_view_those_of_who_serves_are_counted() {
    let mut office = Office::serving(&["a", "b"]);
    let counted = |office: &Office| (office.roster.view().number, office.roster.view().serving_changes);
    let (mut number, mut changes) = counted(&office);
    assert!(0 < changes && changes <= number);
    for process in 2..5 {
        // Stopped as another process, described, and ready again.
        office.roster.left("b", process - 1);
        office.hears("b", process, Wish::Joining).unwrap();
        (number, changes) = (number + 1, changes + 1);
        assert_eq!((counted(&office), office.serving_now()), ((number, changes), vec!["a"]));
        office.roster.set_policy(["a", "b", "c"].map(Arc::from));
        office.roster.decide(office.now);
        number += u64::from(process == 2);
        assert_eq!(counted(&office), (number, changes), "c is new, and serves nobody");
        office.hears("b", process, Wish::Ready).unwrap();
        (number, changes) = (number + 1, changes + 1);
        assert_eq!((counted(&office), office.serving_now()), ((number, changes), vec!["a", "b"]));
        office.hears("a", 1, Wish::Ready).unwrap();
    }
}

#[test]
fn a_view_that_nobody_counted_for_may_have_changed_each_time() {
    let mut office = Office::serving(&["a", "b"]);
    let old = View { serving_changes: 0, ..View::clone(office.roster.view()) };
    office.roster = Roster::new(TTL);
    office.roster.set_policy(["a", "b"].map(Arc::from));
    office.roster.load(office.now, Some(Arc::new(old.clone())));
    for name in ["a", "b"] {
        office.tell(name, 1, Wish::Ready, old.number, None).unwrap();
    }
    office.hears("b", 1, Wish::Draining).unwrap();
    assert_eq!(office.serving_now(), ["a"]);
    assert_eq!(office.roster.view().serving_changes, old.number + 1);
}

#[test]
fn what_was_our_own_deafness_is_nobodys_silence() {
    let mut office = Office::serving(&["a"]);
    office.now += TTL * 5;
    office.roster.was_deaf(office.now);
    office.wait(TTL);
    assert_eq!(office.serving_now(), ["a"]);
    office.wait(ms(1));
    assert!(office.serving_now().is_empty());
}

#[test]
fn the_last_one_that_drains_stays() {
    let mut office = Office::serving(&["a", "b"]);
    office.hears("a", 1, Wish::Draining).unwrap();
    assert_eq!(office.serving_now(), ["b"]);
    office.hears("b", 1, Wish::Draining).unwrap();
    assert_eq!(office.serving_now(), ["b"]);
    assert!(office.has_lease("b", 1));
    office.hears("a", 1, Wish::Ready).unwrap();
    assert_eq!(office.serving_now(), ["a"], "one comes as the other goes");
}

#[test]
fn a_new_process_takes_the_name_at_once_when_the_stream_of_the_old_one_has_ended() {
    let mut office = Office::serving(&["a", "b"]);
    let before = office.member("a");
    office.roster.left("a", 1);
    office.wait(ms(1));
    assert_eq!(office.serving_now(), ["a", "b"], "a stream may end and begin again");
    assert_eq!(office.hears("a", 2, Wish::Ready), Ok(Heard::Counts));
    assert_eq!(office.serving_now(), ["b"]);
    let after = office.member("a");
    assert_eq!((after.incarnation, after.epoch > before.epoch), (2, true));
}

#[test]
fn a_new_process_waits_a_moment_when_nobody_saw_the_old_one_end() {
    let mut office = Office::serving(&["a", "b"]);
    assert_eq!(office.hears("a", 2, Wish::Joining), Ok(Heard::Waits));
    office.wait(ms(150));
    assert_eq!(office.hears("a", 2, Wish::Joining), Ok(Heard::Waits));
    office.wait(ms(150));
    assert_eq!(office.hears("a", 2, Wish::Joining), Ok(Heard::Counts));
    assert_eq!(office.serving_now(), ["b"]);
}

#[test]
fn of_two_living_processes_with_one_name_the_newer_is_refused() {
    let mut office = Office::serving(&["a"]);
    assert_eq!(office.hears("a", 2, Wish::Ready), Ok(Heard::Waits));
    for _ in 0..20 {
        office.wait(ms(150));
        assert_eq!(office.hears("a", 1, Wish::Ready), Ok(Heard::Counts));
        let refusal = office.hears("a", 2, Wish::Ready).unwrap_err();
        assert_eq!(refusal, Refusal::UsedTwice { gateway: "a".into(), incarnation: 1 });
        assert!(office.has_lease("a", 1) && !office.has_lease("a", 2));
    }
    office.wait(TTL + ms(1));
    assert_eq!(office.hears("a", 2, Wish::Joining), Ok(Heard::Counts), "the older one is gone");
}

#[test]
fn a_stranger_gets_nothing() {
    let mut office = Office::serving(&["a"]);
    assert_eq!(office.hears("x", 1, Wish::Ready), Ok(Heard::Stranger));
    assert!(!office.has_lease("x", 1));
    assert_eq!(office.roster.view().member("x"), None);
}

#[test]
fn who_leaves_the_policy_goes_when_its_lease_is_over() {
    let mut office = Office::serving(&["a", "b"]);
    let epoch = office.member("b").epoch;
    office.roster.set_policy([Arc::from("a")]);
    office.hears("a", 1, Wish::Ready).unwrap();
    office.hears("b", 1, Wish::Ready).unwrap();
    assert!(office.member("b").serving && !office.has_lease("b", 1));
    office.wait(TTL);
    office.hears("a", 1, Wish::Ready).unwrap();
    office.wait(ms(1));
    assert_eq!(office.roster.view().member("b"), None);
    office.roster.set_policy(["a", "b"].map(Arc::from));
    office.wait(ms(1));
    assert!(office.member("b").epoch > epoch, "it is not taken for what it was");
}

#[test]
fn the_next_server_goes_on_from_the_highest_view_that_is_reported() {
    let mut before = Office::serving(&["a", "b", "c"]);
    let old = before.roster.view().clone();
    before.wait(ms(300));
    before.hears("a", 1, Wish::Ready).unwrap();
    before.hears("b", 1, Wish::Ready).unwrap();
    before.wait(ms(301));
    let last = before.roster.view().clone();
    assert_eq!(before.serving_now(), ["a", "b"]);

    let mut office = Office::new(&["a", "b", "c"]);
    office.tell("a", 1, Wish::Ready, old.number, Some(&old)).unwrap();
    office.tell("c", 1, Wish::Ready, old.number, Some(&old)).unwrap();
    assert_eq!(*office.roster.view(), old);
    assert!(!office.has_lease("c", 1), "b may know more");
    office.tell("b", 1, Wish::Ready, last.number, Some(&last)).unwrap();
    assert_eq!(*office.roster.view(), last);
    assert!(!office.has_lease("c", 1) && office.has_lease("a", 1) && office.has_lease("b", 1), "all have spoken");
    office.wait(TTL);
    assert_eq!(office.serving_now(), ["a", "b"]);
}

#[test]
fn the_next_server_changes_nothing_for_two_ttls_while_some_are_silent() {
    let old = Office::serving(&["a", "b"]).roster.view().clone();
    let mut office = Office::new(&["a", "b"]);
    office.tell("a", 1, Wish::Ready, old.number, Some(&old)).unwrap();
    assert!(!office.has_lease("a", 1));
    office.wait(TTL);
    office.hears("a", 1, Wish::Ready).unwrap();
    assert!(office.has_lease("a", 1), "leases of the server before are over");
    office.wait(ms(599));
    assert_eq!(*office.roster.view(), old);
    assert_eq!(office.roster.due(), Some(office.now + ms(1)));
    office.wait(ms(1));
    assert_eq!(office.serving_now(), ["a"]);
}

#[test]
fn a_higher_view_that_comes_late_waits_for_leases_under_the_lower_one() {
    let mut before = Office::serving(&["a", "b", "c"]);
    let old = before.roster.view().clone();
    before.hears("c", 1, Wish::Draining).unwrap();
    let last = before.roster.view().clone();
    let mut office = Office::new(&["a", "b", "c"]);
    office.tell("c", 1, Wish::Ready, old.number, Some(&old)).unwrap();
    office.wait(TTL);
    office.hears("c", 1, Wish::Ready).unwrap();
    assert!(office.has_lease("c", 1));
    office.tell("a", 1, Wish::Ready, last.number, Some(&last)).unwrap();
    assert!(!office.has_lease("a", 1), "c may serve still");
    office.wait(TTL);
    office.hears("a", 1, Wish::Ready).unwrap();
    assert!(office.has_lease("a", 1));
}

#[test]
fn numbers_that_somebody_knows_are_used_up() {
    let mut office = Office::serving(&["a", "b"]);
    let served = vec![Member { serving: true, ..Member::new("b".into(), 39) }];
    let strange = Arc::new(View { number: 40, serving_changes: 12, members: served });
    office.tell("b", 1, Wish::Ready, 40, Some(&strange)).unwrap();
    assert_eq!(office.roster.view().number, 41);
    assert_eq!(office.serving_now(), ["a", "b"], "nobody acts by the other one any more");
    assert_eq!(office.member("b").epoch, 41);
    assert_eq!(office.roster.view().serving_changes, 41, "more than anybody can have counted");
    let twin = Arc::new(View { number: 41, ..View::default() });
    office.tell("b", 1, Wish::Ready, 41, Some(&twin)).unwrap();
    assert_eq!(office.roster.view().number, 42);
}

#[test]
fn a_store_that_has_lost_its_view_is_overtaken() {
    let mut office = Office::serving(&["a"]);
    let number = office.roster.view().number;
    let older = Arc::new(View { number: 1, ..View::default() });
    office.roster.load(office.now, Some(older));
    office.roster.decide(office.now);
    assert_eq!(office.roster.view().number, number + 1);
    assert_eq!(office.serving_now(), ["a"]);
}

#[test]
fn without_a_policy_those_that_are_known_go_on() {
    let old = Office::serving(&["a"]).roster.view().clone();
    let (mut office, roster) = (Office::new(&[]), Roster::new(TTL));
    office.roster = roster;
    office.tell("a", 1, Wish::Ready, old.number, Some(&old)).unwrap();
    office.wait(TTL);
    assert_eq!(office.hears("a", 1, Wish::Ready), Ok(Heard::Counts));
    assert!(office.has_lease("a", 1));
    assert_eq!(office.hears("x", 1, Wish::Ready), Ok(Heard::Stranger));
}
