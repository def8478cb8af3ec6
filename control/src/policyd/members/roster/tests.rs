//! What is promised of views and leases: by example here, against whole worlds in `model`.

mod able;

use super::*;
use crate::members::{Secret, Wish};

const TTL: Duration = Duration::from_millis(600);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn secret(process: u8) -> Secret {
    Secret::from_slice(&[process; 32]).unwrap()
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
        self.take(&Beat { view: view.cloned(), ..Beat::bare(name, incarnation, wish, seen_view) })
    }

    /// One in which all of these serve, each by its own secret.
    fn serving_with_secrets(names: &[&str]) -> Self {
        let mut office = Self::new(names);
        for wish in [Wish::Joining, Wish::Ready] {
            for name in names {
                office.shows(name, 1, None, wish).unwrap();
            }
        }
        assert_eq!(office.serving_now(), names);
        office
    }

    /// A beat of the process with this secret, which has seen the current view.
    fn beat_of(&self, name: &str, process: u8, before: Option<u8>, wish: Wish) -> Beat {
        Beat {
            commitment: Some(secret(process).commitment()),
            predecessor: before.map(|before| Box::new(secret(before).commitment())),
            ..Beat::bare(name, secret(process).incarnation(), wish, self.roster.view().number)
        }
    }

    fn shows(&mut self, name: &str, process: u8, before: Option<u8>, wish: Wish) -> Result<Heard, Refusal> {
        self.take(&self.beat_of(name, process, before, wish))
    }

    fn shows_view(&mut self, name: &str, process: u8, view: &Arc<View>) -> Result<Heard, Refusal> {
        self.take(&Beat { view: Some(view.clone()), ..self.beat_of(name, process, None, Wish::Ready) })
    }

    fn take(&mut self, beat: &Beat) -> Result<Heard, Refusal> {
        let heard = self.roster.beat(self.now, beat);
        self.roster.decide(self.now);
        heard
    }

    /// A beat of one that has seen the current view, and can't do what it serves for.
    fn hears_unable(&mut self, name: &str) {
        let heard = self.take(&Beat {
            unable: Some("interface gw-out has no carrier".into()),
            ..Beat::bare(name, 1, Wish::Draining, self.roster.view().number)
        });
        assert_eq!(heard, Ok(Heard::Counts));
    }

    /// For as long as it takes for what gateways say to count, some can't do what they serve for, and others can.
    fn stays(&mut self, unable: &[&str], able: &[&str]) {
        for pause in [TTL / 4, TTL / 4, Duration::ZERO] {
            for name in unable {
                self.hears_unable(name);
            }
            for name in able {
                self.hears(name, 1, Wish::Ready).unwrap();
            }
            self.wait(pause);
        }
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
    let mut office = Office::serving_with_secrets(&["a", "b"]);
    let counted = |office: &Office| (office.roster.view().number, office.roster.view().serving_changes);
    let (mut number, mut changes) = counted(&office);
    assert!(0 < changes && changes <= number);
    for process in 2..5 {
        // Stopped as another process, described, and ready again.
        office.roster.left("b", secret(process - 1).incarnation());
        office.shows("b", process, Some(process - 1), Wish::Joining).unwrap();
        (number, changes) = (number + 1, changes + 1);
        assert_eq!((counted(&office), office.serving_now()), ((number, changes), vec!["a"]));
        office.roster.set_policy(["a", "b", "c"].map(Arc::from));
        office.roster.decide(office.now);
        number += u64::from(process == 2);
        assert_eq!(counted(&office), (number, changes), "c is new, and serves nobody");
        office.shows("b", process, None, Wish::Ready).unwrap();
        (number, changes) = (number + 1, changes + 1);
        assert_eq!((counted(&office), office.serving_now()), ((number, changes), vec!["a", "b"]));
        office.shows("a", 1, None, Wish::Ready).unwrap();
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
fn a_new_process_has_the_name_when_the_stream_of_the_old_one_has_ended_and_its_lease_is_over() {
    let mut office = Office::serving(&["a", "b"]);
    let before = office.member("a");
    office.roster.left("a", 1);
    office.wait(ms(1));
    assert_eq!(office.serving_now(), ["a", "b"], "a stream may end and begin again");
    assert_eq!(office.hears("a", 2, Wish::Ready), Ok(Heard::Waits), "the old one may have a lease");
    office.wait(ms(538));
    office.hears("b", 1, Wish::Ready).unwrap();
    assert_eq!(office.hears("a", 2, Wish::Ready), Ok(Heard::Waits));
    office.wait(ms(1));
    assert_eq!(office.hears("a", 2, Wish::Ready), Ok(Heard::Counts));
    assert_eq!(office.serving_now(), ["b"]);
    let after = office.member("a");
    assert_eq!((after.incarnation, after.epoch > before.epoch), (2, true));
    // One that doesn't serve has no lease.
    office.roster.left("a", 2);
    assert_eq!(office.hears("a", 3, Wish::Joining), Ok(Heard::Counts));
}

#[test]
fn a_new_process_waits_for_a_ttl_when_nobody_saw_the_old_one_end() {
    let mut office = Office::serving(&["a", "b"]);
    for _ in 0..5 {
        assert_eq!(office.hears("a", 2, Wish::Joining), Ok(Heard::Waits));
        office.hears("b", 1, Wish::Ready).unwrap();
        office.wait(TTL / 5);
    }
    office.wait(ms(1));
    assert_eq!(office.hears("a", 2, Wish::Joining), Ok(Heard::Counts));
    assert_eq!(office.serving_now(), ["b"]);
}

#[test]
fn a_process_that_knows_the_secret_of_the_one_before_waits_for_no_lease() {
    for (is_seen, wait) in [(true, ms(0)), (false, TTL / 2)] {
        let mut office = Office::serving_with_secrets(&["a", "b"]);
        if is_seen {
            office.roster.left("a", secret(1).incarnation());
        } else {
            assert_eq!(office.shows("a", 2, Some(1), Wish::Joining), Ok(Heard::Waits));
        }
        assert_eq!(office.shows("a", 3, None, Wish::Joining), Ok(Heard::Waits));
        assert_eq!(office.shows("a", 3, Some(9), Wish::Joining), Ok(Heard::Waits), "that isn't a's secret");
        assert!(office.shows("a", 2, Some(1), Wish::Joining).is_ok());
        office.wait(wait);
        assert_eq!(office.shows("a", 2, Some(1), Wish::Joining), Ok(Heard::Counts), "{is_seen}");
        assert_eq!(office.serving_now(), ["b"]);
    }
    // While the one before lives, that helps nobody.
    let mut office = Office::serving_with_secrets(&["a", "b"]);
    office.shows("a", 2, Some(1), Wish::Joining).unwrap();
    office.wait(ms(150));
    office.shows("a", 1, None, Wish::Ready).unwrap();
    assert!(office.shows("a", 2, Some(1), Wish::Joining).is_err());
}

#[test]
fn who_repeats_an_incarnation_without_its_secret_is_refused() {
    let mut office = Office::serving_with_secrets(&["a", "b"]);
    let before = office.roster.view().clone();
    let incarnation = secret(1).incarnation();
    let forged = Err(Refusal::Forged { gateway: "a".into(), incarnation });
    for gone in [false, true] {
        assert_eq!(office.hears("a", incarnation, Wish::Ready), forged);
        let beat = Beat { incarnation, ..office.beat_of("a", 2, None, Wish::Ready) };
        assert_eq!(office.roster.beat(office.now, &beat), forged, "another secret's commitment");
        assert_eq!(*office.roster.view(), before);
        if !gone {
            office.roster.left("a", incarnation);
        }
    }
    // A server that has only heard the view of others knows it as well.
    let mut next = Office::new(&["a", "b"]);
    next.shows_view("b", 1, &before).unwrap();
    assert_eq!(next.hears("a", incarnation, Wish::Ready), forged);
    assert_eq!(next.shows("a", 1, None, Wish::Ready), Ok(Heard::Counts));
    assert_eq!(next.member("a"), *before.member("a").unwrap());
}

#[test]
fn who_is_faster_to_reach_a_server_without_a_memory_takes_no_name_from_those_that_serve() {
    let before = Office::serving_with_secrets(&["a", "b"]).roster.view().clone();
    let mut next = Office::new(&["a", "b"]);
    next.shows("a", 9, None, Wish::Ready).unwrap();
    next.shows_view("b", 1, &before).unwrap();
    assert_eq!(*next.roster.view(), before, "a has not spoken itself");
    next.wait(ms(100));
    assert_eq!(next.shows_view("a", 1, &before), Ok(Heard::Counts));
    assert!(next.has_lease("a", secret(1).incarnation()) && !next.has_lease("a", secret(9).incarnation()));
    assert_eq!(next.shows("a", 9, None, Wish::Ready), Ok(Heard::Waits));
    next.wait(ms(100));
    next.shows("a", 1, None, Wish::Ready).unwrap();
    assert!(next.shows("a", 9, None, Wish::Ready).is_err());
    assert_eq!(*next.roster.view(), before);
}

#[test]
fn a_server_of_before_there_were_secrets_makes_nobody_forget_them() {
    let mut office = Office::serving_with_secrets(&["a", "b"]);
    let (incarnation, number) = (secret(1).incarnation(), office.roster.view().number);
    // What it writes down of a's process has no commitment.
    let kept = Beat { commitment: None, ..office.beat_of("a", 1, None, Wish::Ready) };
    office.roster.observe(office.now, &kept);
    office.wait(ms(1));
    assert_eq!(office.roster.view().number, number);
    assert!(office.hears("a", incarnation, Wish::Ready).is_err());
    // A gateway that was heard without one by such a server shows it to this one.
    let mut office = Office::new(&["a"]);
    office.roster.observe(office.now, &Beat { commitment: None, ..office.beat_of("a", 1, None, Wish::Joining) });
    assert_eq!(office.shows("a", 1, None, Wish::Joining), Ok(Heard::Counts));
    assert!(office.hears("a", incarnation, Wish::Joining).is_err());
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
fn nobody_takes_a_name_since_the_server_did_not_listen() {
    let mut office = Office::serving_with_secrets(&["a"]);
    office.now += TTL * 5;
    office.roster.was_deaf(office.now);
    assert_eq!(office.shows("a", 9, None, Wish::Ready), Ok(Heard::Waits));
    office.now += ms(1);
    assert_eq!(office.shows("a", 1, None, Wish::Ready), Ok(Heard::Counts));
    assert!(office.shows("a", 9, None, Wish::Ready).is_err());
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

#[test]
fn a_gateway_that_claims_the_last_number_does_not_use_numbers_up() {
    for settled in [false, true] {
        let mut office = if settled { Office::serving(&["a", "b"]) } else { Office::new(&["a", "b"]) };
        let last = Arc::new(View { number: (1 << 62) - 1, ..View::default() });
        office.tell("a", 1, Wish::Ready, 0, Some(&last)).unwrap();
        office.wait(TTL * 3);
        office.hears("b", 1, Wish::Joining).unwrap();
        let view = office.roster.view();
        let message = crate::xds::proto::View::from(&**view);
        assert_eq!(View::try_from(message).as_ref(), Ok(&**view), "gateways understand what comes after it");
    }
}

#[test]
fn what_somebody_says_of_views_whom_the_policy_does_not_know_changes_nothing() {
    let mut office = Office::serving(&["a", "b"]);
    let before = office.roster.view().clone();
    let claimed = Arc::new(View { number: before.number + 7, ..View::clone(&before) });
    assert_eq!(office.tell("x", 5, Wish::Ready, 0, Some(&claimed)), Ok(Heard::Stranger));
    assert_eq!(*office.roster.view(), before);
    // Nor at a server without a memory.
    let mut next = Office::new(&["a", "b"]);
    next.tell("x", 5, Wish::Ready, 0, Some(&claimed)).unwrap();
    assert_eq!(next.roster.view().number, 0);
    next.tell("a", 1, Wish::Ready, before.number, Some(&before)).unwrap();
    assert_eq!(*next.roster.view(), before);
}

/// A gateway of the policy lies to a server without a memory of another one's process.
#[test]
fn a_view_that_lies_of_a_secret_locks_nobody_out() {
    let before = Office::serving_with_secrets(&["a", "b"]).roster.view().clone();
    let mut lies = View::clone(&before);
    let commitment = lies.members[0].commitment.as_mut().unwrap();
    commitment[31] ^= 1;
    let mut next = Office::new(&["a", "b"]);
    next.shows_view("b", 1, &Arc::new(lies)).unwrap();
    assert_eq!(next.shows_view("a", 1, &before), Ok(Heard::Counts));
    assert_eq!(next.member("a").commitment, before.member("a").unwrap().commitment);
    assert!(
        next.hears("a", secret(1).incarnation(), Wish::Ready).is_err(),
        "without the secret it is forged all the same"
    );
}
