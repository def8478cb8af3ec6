use proptest::prelude::*;
use proptest::test_runner::Config;
use vipgate_coverage::property;

use super::*;
use crate::membership::DesiredState;
use crate::policyd::object_status::fixtures::{connected, inputs, with_faulty};
use crate::policyd::object_status::inputs::GatewayFacts;

const NAME: &str = "EgressPolicy/a/p";

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// The policy as observed.
fn policy(uid: &str, generation: i64, status: Option<&Value>) -> ObservedObject {
    ObservedObject::sample(uid, generation, status.map(|it| Arc::new(it.clone())))
}

/// The condition `Programmed` of a written status, and its generation.
fn programmed(write: &StatusWrite) -> (&str, i64) {
    let condition = condition_of(&write.status, "Programmed").unwrap();
    (condition["status"].as_str().unwrap(), condition["observedGeneration"].as_i64().unwrap())
}

fn events(write: &StatusWrite) -> Vec<String> {
    write.events.iter().map(ObjectEvent::text).collect()
}

#[test]
fn a_status_is_written_once_and_not_by_a_new_leader() {
    let mut planner = Planner::default();
    let before = inputs(&[(NAME, policy("u", 3, None))], vec![connected("g1", 1)]);
    let mut plan = planner.plan(&before, seconds(0), "t0");
    assert_eq!((plan.writes.len(), plan.is_waiting), (1, false));
    let write = plan.writes.remove(0);
    assert_eq!(programmed(&write), ("True", 3));
    assert!(events(&write).is_empty(), "nothing that people must look at");
    let status = write.status.clone();
    planner.written(write);
    assert!(planner.plan(&before, seconds(1), "t1").writes.is_empty(), "it isn't observed yet");
    let after = inputs(&[(NAME, policy("u", 3, Some(&status)))], vec![connected("g1", 1)]);
    assert!(planner.plan(&after, seconds(2), "t2").writes.is_empty());
    let plan = Planner::default().plan(&after, seconds(0), "t3");
    assert_eq!((plan.writes.len(), plan.is_waiting), (0, false));
}

#[test]
fn a_generation_that_is_not_compiled_yet_waits_for_its_compilation() {
    let mut newer = policy("u", 4, None);
    newer.revision = 2;
    let plan = Planner::default().plan(&inputs(&[(NAME, newer)], vec![connected("g1", 1)]), seconds(0), "t");
    assert_eq!((plan.writes.len(), plan.is_waiting), (0, false));
}

#[test]
fn a_gateway_that_lags_for_a_moment_changes_nothing() {
    let mut planner = Planner::default();
    let first = planner.plan(&inputs(&[(NAME, policy("u", 1, None))], vec![connected("g1", 1)]), seconds(0), "t0");
    let status = first.writes[0].status.clone();
    let lagging = inputs(&[(NAME, policy("u", 1, Some(&status)))], vec![connected("g1", 0)]);
    for at in [0, 5, 9] {
        let plan = planner.plan(&lagging, seconds(at), "t");
        assert_eq!((plan.writes.len(), plan.is_waiting), (0, true), "{at} s");
    }
    let plan = planner.plan(&lagging, seconds(10), "t10");
    assert_eq!(programmed(&plan.writes[0]).0, "False");
    // Another generation is reported soon, acknowledged or not.
    let mut planner = Planner::default();
    let changed = inputs(&[(NAME, policy("u", 2, Some(&status)))], vec![connected("g1", 0)]);
    assert!(planner.plan(&changed, seconds(0), "t").writes.is_empty());
    let plan = planner.plan(&changed, seconds(2), "t12");
    assert_eq!(programmed(&plan.writes[0]), ("False", 2));
}

#[test]
fn a_rejection_is_an_event_once_and_so_is_its_end() {
    let mut planner = Planner::default();
    let rejected = with_faulty(inputs(&[(NAME, policy("u", 1, None))], vec![connected("g1", 1)]), false);
    let plan = planner.plan(&rejected, seconds(0), "t");
    let expected = "Warning Rejected EgressPolicy/p: it is invalid; it is not in force";
    assert_eq!(events(&plan.writes[0]), [expected]);
    let status = plan.writes[0].status.clone();
    let object = policy("u", 1, Some(&status));
    let still = with_faulty(inputs(&[(NAME, object.clone())], vec![connected("g1", 1)]), false);
    assert!(Planner::default().plan(&still, seconds(0), "t").writes.is_empty());
    let plan = planner.plan(&inputs(&[(NAME, object)], vec![connected("g1", 1)]), seconds(1), "t");
    assert_eq!(events(&plan.writes[0]), ["Normal Accepted EgressPolicy/p: in force as written"]);
}

#[test]
fn a_status_that_is_the_former_one_again_before_it_is_observed_is_replaced_again() {
    let mut planner = Planner::default();
    let as_observed = |status: Option<&Arc<Value>>| {
        inputs(&[(NAME, ObservedObject::sample("u", 1, status.cloned()))], vec![connected("g1", 1)])
    };
    // The status that is written, of which the planner learns.
    let write = |planner: &mut Planner, inputs: &Inputs| {
        let mut writes = planner.plan(inputs, seconds(0), "t").writes;
        assert_eq!(writes.len(), 1);
        let status = writes[0].status.clone();
        planner.written(writes.remove(0));
        status
    };
    let first = write(&mut planner, &as_observed(None));
    let observed = Arc::new(first.clone());
    let accepted = as_observed(Some(&observed));
    let rejected = with_faulty(as_observed(Some(&observed)), false);
    assert!(planner.plan(&accepted, seconds(0), "t").writes.is_empty());
    let second = write(&mut planner, &rejected);
    assert!(planner.plan(&rejected, seconds(0), "t").writes.is_empty());
    assert_eq!(write(&mut planner, &accepted), first);
    assert_eq!(write(&mut planner, &rejected), second);
}

#[test]
fn a_drain_and_a_failover_are_events_of_the_gateway() {
    let gateway = |is_active, state| GatewayFacts { is_active, desired_state: Some(state), ..connected("g1", 1) };
    let object = |status: Option<&Value>| [("VipGateway/g1", policy("u", 1, status))];
    let mut planner = Planner::default();
    let active = planner.plan(&inputs(&object(None), vec![gateway(true, DesiredState::Ready)]), seconds(0), "t");
    assert!(events(&active.writes[0]).is_empty());
    let status = active.writes[0].status.clone();
    let after = |facts| {
        let plan = Planner::default().plan(&inputs(&object(Some(&status)), vec![facts]), seconds(0), "t");
        events(&plan.writes[0])
    };
    assert_eq!(after(gateway(false, DesiredState::Draining)), ["Normal Drained VipGateway/g1: it is drained"]);
    let dead = GatewayFacts { is_connected: false, ..gateway(false, DesiredState::Ready) };
    let failover = "Warning Failover VipGateway/g1: it is not connected; other gateways take over its VIPs";
    assert_eq!(after(dead), [failover]);
}

#[test]
fn changes_of_conditions_come_before_changes_of_counts() {
    let mut planner = Planner::default();
    let gateways = vec![connected("g1", 1)];
    let plan = planner.plan(&inputs(&[(NAME, policy("u", 1, None))], gateways.clone()), seconds(0), "t");
    let mut status = plan.writes[0].status.clone();
    status["endpoints"] = 7.into();
    let objects = [(NAME, policy("u", 1, Some(&status))), ("OverlayNode/n", policy("n", 1, None))];
    let plan = Planner::default().plan(&inputs(&objects, gateways), seconds(0), "t");
    let order: Vec<_> = plan.writes.iter().map(|write| (&*write.object.name, write.is_transition)).collect();
    assert_eq!(order, [("n", true), ("p", false)]);
}

#[test]
fn a_namespace_with_many_changes_delays_no_other() {
    let names: Vec<String> = (0..50).map(|n| format!("EgressPolicy/a/{n:02}")).collect();
    let of_others = ["EgressPolicy/b/p", "VipGateway/g1"];
    let all = names.iter().map(String::as_str).chain(of_others);
    let objects: Vec<_> = all.map(|name| (name, policy("u", 1, None))).collect();
    let (inputs, mut planner) = (inputs(&objects, vec![connected("g1", 1)]), Planner::default());
    // Policies that are in no placement yet wait at first.
    planner.plan(&inputs, seconds(0), "t");
    let plan = planner.plan(&inputs, seconds(2), "t");
    assert_eq!(plan.writes.len(), 52);
    let first: Vec<&str> = plan.writes.iter().take(3).map(|write| &*write.object.name).collect();
    assert_eq!(first, ["00", "p", "g1"]);
}

/// What happens in the cluster.
#[derive(Clone, Debug)]
enum Happening {
    Acknowledged(bool),
    Rejected(bool),
    SpecChanged,
    CreatedAgain,
    /// The source has observed what is in the API.
    Observed,
    /// Another server leads, which has observed everything.
    NewLeader,
    Time(u64),
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        any::<bool>().prop_map(Happening::Acknowledged),
        any::<bool>().prop_map(Happening::Rejected),
        Just(Happening::SpecChanged),
        Just(Happening::CreatedAgain),
        Just(Happening::Observed),
        Just(Happening::NewLeader),
        (1..8_u64).prop_map(Happening::Time),
    ]
}

/// The cluster of the property test.
struct World {
    is_acknowledged: bool,
    is_rejected: bool,
    /// The object in the API: uid, generation and status; and as it was observed last.
    object: (String, i64, Option<Value>),
    observed: ObservedObject,
    now: u64,
}

impl World {
    fn apply(&mut self, happening: &Happening) {
        match happening {
            Happening::Acknowledged(is_acknowledged) => self.is_acknowledged = *is_acknowledged,
            Happening::Rejected(is_rejected) => self.is_rejected = *is_rejected,
            Happening::SpecChanged => self.object.1 += 1,
            Happening::CreatedAgain => self.object = (format!("{}+", self.object.0), 1, None),
            Happening::Observed | Happening::NewLeader => self.observe(),
            Happening::Time(seconds) => self.now += seconds,
        }
    }

    fn observe(&mut self) {
        let (uid, generation, status) = &self.object;
        let status = status.clone().map(Arc::new);
        // As the source does it.
        let status = if status == self.observed.status { self.observed.status.clone() } else { status };
        self.observed = ObservedObject::sample(uid, *generation, status);
    }

    fn inputs(&self) -> Inputs {
        let gateway = connected("g1", self.is_acknowledged.into());
        let inputs = inputs(&[(NAME, self.observed.clone())], vec![gateway]);
        if self.is_rejected { with_faulty(inputs, true) } else { inputs }
    }

    /// Checks and applies a write as the API server does; returns whether the object is still the same.
    fn write(&mut self, write: &StatusWrite) -> Result<bool, TestCaseError> {
        if *write.object.uid != *self.object.0 {
            return Ok(false);
        }
        let before = self.object.2.clone().unwrap_or_default();
        prop_assert!(differs(Kind::EgressPolicy, &write.status, &before), "written twice: {before}");
        for kind in ["Accepted", "Programmed"] {
            let (old, new) = (condition_of(&before, kind), condition_of(&write.status, kind).unwrap());
            let is_same_time = old.is_none_or(|old| old["lastTransitionTime"] == new["lastTransitionTime"]);
            prop_assert!(is_same_time || old.unwrap()["status"] != new["status"], "{old:?} {new}");
        }
        self.object.2 = Some(write.status.clone());
        Ok(true)
    }
}

#[test]
fn writes_are_never_repeated_and_lead_to_the_truth() {
    let strategy = prop::collection::vec(happening(), 1..60);
    let classes = ["written", "gone", "held", "new leader"];
    property(Config { cases: 300, ..Config::default() }, &strategy, &classes, |steps, coverage| {
        let (object, observed) = (("0".to_owned(), 1, None), policy("0", 1, None));
        let mut world = World { is_acknowledged: true, is_rejected: false, object, observed, now: 0 };
        let mut planner = Planner::default();
        let end = [Happening::Observed, Happening::Time(70), Happening::Observed, Happening::Time(70)];
        let last = steps.len() + end.len();
        for (step, happening) in steps.into_iter().chain(end).enumerate() {
            world.apply(&happening);
            if matches!(happening, Happening::NewLeader) {
                planner.clear();
                coverage.count("new leader");
            }
            let plan = planner.plan(&world.inputs(), seconds(world.now), &format!("t{}", world.now));
            prop_assert!(plan.writes.len() <= 1);
            if plan.is_waiting {
                coverage.count("held");
            }
            for write in plan.writes {
                prop_assert!(step + 1 < last, "it never ends: {}", write.status);
                if world.write(&write)? {
                    coverage.count("written");
                    planner.written(write);
                } else {
                    coverage.count("gone");
                }
            }
        }
        let status = world.object.2.clone().unwrap_or_default();
        let of = |kind| condition_of(&status, kind).cloned().unwrap_or_default();
        let text = |is_true: bool| if is_true { "True" } else { "False" };
        prop_assert_eq!(&of("Accepted")["status"], text(!world.is_rejected));
        prop_assert_eq!(&of("Programmed")["status"], text(world.is_acknowledged && !world.is_rejected));
        prop_assert_eq!(&of("Programmed")["observedGeneration"], world.object.1);
        Ok(())
    });
}
