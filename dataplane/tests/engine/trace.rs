//! A trace predicts what then happens to the packet: over random packets, policies, tables and times, with several
//! workers and gateways. (Every packet of the other tests is predicted, too: see `Gateway::receive`.)

use std::cell::RefCell;
use std::collections::BTreeSet;

use proptest::test_runner::{Config, FileFailurePersistence, TestRunner};
use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::flow::verdict::Verdict;
use vipgate_dataplane::stage::trace::{PacketClass, SessionOutcome, TraceResult};

use vipgate_testkit::{Protocol, at, ip};

use crate::scenario::{Scenario, Step, steps};

/// Outcomes of all traces, to check the coverage.
#[derive(Default)]
struct Coverage {
    reasons: BTreeSet<DropReason>,
    classes: BTreeSet<String>,
    outcomes: BTreeSet<String>,
    verdicts: BTreeSet<&'static str>,
}

impl Coverage {
    fn add(&mut self, found: &TraceResult) {
        if let Verdict::Drop(reason) = found.verdict {
            self.reasons.insert(reason);
        }
        self.verdicts.insert(match found.verdict {
            Verdict::Forward(_) => "forwarded",
            Verdict::Hairpin => "hairpinned",
            Verdict::AwaitNeighbor(_) => "awaiting a neighbor",
            Verdict::Drop(_) => "dropped",
            _ => "other",
        });
        self.classes.extend(found.class.map(|class| format!("{class:?}")));
        self.classes.extend(found.uses_reserve.then(|| "reserved".to_owned()));
        self.outcomes
            .extend(found.session.map(|(_, outcome)| format!("{outcome:?}").split('(').next().unwrap().to_owned()));
    }
}

fn run_scenario(mut scenario: Scenario, steps: &[Step], coverage: &RefCell<Coverage>) {
    for step in steps {
        let Some((worker, interface, packet)) = scenario.packet(step) else { continue };
        if let Some(found) = scenario.gateway.predict(worker, interface, &packet) {
            coverage.borrow_mut().add(&found);
        }
        // Traces it once more, and compares.
        let sent = scenario.gateway.receive(worker, interface, &packet);
        scenario.sent.extend(sent);
    }
}

#[test]
fn a_trace_counts_the_workers_blocks_within_its_shard() {
    use vipgate_testkit::cluster::{REMOTE, three_gateways};
    use vipgate_testkit::{INSIDE, packet};
    let mut cluster = three_gateways();
    let request = |port: u16| packet(Protocol::Udp, (ip("10.244.1.5"), port).into(), at(REMOTE));
    cluster.receive(0, INSIDE, &request(4000));
    let found = cluster.gateways[0].predict(0, INSIDE, &request(4001)).unwrap();
    let snat = found.snat.unwrap();
    // Every third block of the port range.
    assert_eq!(snat.blocks, Some(336));
    assert!((1..=336).contains(&snat.owned), "{} of 336", snat.owned);
    cluster.assert_delta(&["egress 1, created 1", "", ""]);
}

/// Three flows of a pod to one remote; the VIP has two ports.
fn more_sessions_than_ports() -> Vec<Step> {
    let flow = |port: u16| Step::Packet {
        protocol: Protocol::Udp,
        flags: "",
        ends: ((ip("10.244.1.5"), port).into(), at("198.51.100.10:53")),
        worker: 0,
        inside: true,
        ttl: 64,
    };
    [1000, 1001, 80].map(flow).into()
}

#[test]
fn packets_are_processed_as_traced() {
    let seeds = FileFailurePersistence::Direct("tests/engine/trace.regressions");
    let config = Config { cases: 2000, failure_persistence: Some(Box::new(seeds)), ..Config::default() };
    let coverage = RefCell::new(Coverage::default());
    for (workers, in_group) in [(1, false), (2, false), (1, true), (2, true)] {
        // Random steps seldom use the same remote three times, and leave the lease alone.
        let scenario = Scenario::new(workers, in_group);
        run_scenario(scenario, &more_sessions_than_ports(), &coverage);
        let scenario = Scenario::new(workers, in_group);
        scenario.gateway.lease.renew(scenario.gateway.now);
        run_scenario(scenario, &more_sessions_than_ports(), &coverage);
    }
    let outcome = TestRunner::new(config).run(&steps(), |(steps, workers, in_group)| {
        run_scenario(Scenario::new(workers, in_group), &steps, &coverage);
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
    let coverage = coverage.into_inner();
    let reasons = [
        DropReason::NoService,
        DropReason::NoBackend,
        DropReason::NoPolicy,
        DropReason::NoSession,
        DropReason::PortsExhausted,
        DropReason::Quota,
        DropReason::SessionTableFull,
        DropReason::SpoofedSource,
        DropReason::Martian,
        DropReason::Ttl,
        DropReason::SourceRange,
        DropReason::NoLease,
    ];
    for reason in reasons {
        assert!(coverage.reasons.contains(&reason), "{reason:?} was never predicted: {:?}", coverage.reasons);
    }
    for class in [
        PacketClass::Session,
        PacketClass::Egress { reopens: false },
        PacketClass::Egress { reopens: true },
        PacketClass::Inbound,
        PacketClass::StatelessReply,
        PacketClass::Unchanged,
        PacketClass::ForwardToOwner,
    ] {
        assert!(coverage.classes.contains(&format!("{class:?}")), "{class:?} never: {:?}", coverage.classes);
    }
    assert!(coverage.classes.contains("reserved"), "reserved capacity never: {:?}", coverage.classes);
    for outcome in [SessionOutcome::Valid, SessionOutcome::Revalidated, SessionOutcome::Ended] {
        assert!(coverage.outcomes.contains(&format!("{outcome:?}")), "{outcome:?} never: {:?}", coverage.outcomes);
    }
    for verdict in ["forwarded", "hairpinned", "awaiting a neighbor", "dropped"] {
        assert!(coverage.verdicts.contains(verdict), "{verdict} never: {:?}", coverage.verdicts);
    }
}
