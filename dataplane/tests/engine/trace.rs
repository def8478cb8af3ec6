//! A trace predicts what then happens to the packet: over random packets, policies, tables and times, with several
//! workers and gateways. (Every packet of the other tests is predicted, too: see `Gateway::receive`.)

use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use vipgate_coverage::{Coverage, property};
use vipgate_dataplane::flow::verdict::Verdict;
use vipgate_dataplane::stage::trace::TraceResult;
use vipgate_testkit::{Protocol, at, ip};

use crate::scenario::{Scenario, Step, steps};

/// Counts the outcome of a trace.
fn count(found: &TraceResult, coverage: &Coverage) {
    coverage.count(match found.verdict {
        Verdict::Forward(_) => "forwarded",
        Verdict::Hairpin => "hairpinned",
        Verdict::AwaitNeighbor(_) => "awaiting a neighbor",
        Verdict::Drop(reason) => reason.name(),
        _ => "other",
    });
    if let Some(class) = found.class {
        coverage.count(format!("{class:?}"));
    }
    if let Some((_, outcome)) = found.session {
        coverage.count(format!("{outcome:?}").split('(').next().unwrap());
    }
    coverage.add("reserved", found.uses_reserve.into());
}

fn run_scenario(mut scenario: Scenario, steps: &[Step], coverage: &Coverage) {
    for step in steps {
        let Some((worker, interface, packet)) = scenario.packet(step) else { continue };
        if let Some(found) = scenario.gateway.predict(worker, interface, &packet) {
            count(&found, coverage);
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

const CLASSES: [&str; 24] = [
    "no_service",
    "no_backend",
    "no_policy",
    "no_session",
    "quota",
    "session_table_full",
    "spoofed_source",
    "martian",
    "ttl",
    "source_range",
    "Session",
    "Egress { reopens: false }",
    "Egress { reopens: true }",
    "Inbound",
    "StatelessReply",
    "Unchanged",
    "ForwardToOwner",
    "reserved",
    "Valid",
    "Revalidated",
    "Ended",
    "forwarded",
    "hairpinned",
    "awaiting a neighbor",
];

#[test]
fn packets_are_processed_as_traced() {
    // Random steps seldom use the same remote three times, and leave the lease alone.
    let coverage = Coverage::default();
    for (workers, in_group) in [(1, false), (2, false), (1, true), (2, true)] {
        let scenario = Scenario::new(workers, in_group);
        run_scenario(scenario, &more_sessions_than_ports(), &coverage);
        let scenario = Scenario::new(workers, in_group);
        scenario.gateway.lease.renew(scenario.gateway.now);
        run_scenario(scenario, &more_sessions_than_ports(), &coverage);
    }
    coverage.assert_reached(&["ports_exhausted", "no_lease"]);
    let seeds = FileFailurePersistence::Direct("tests/engine/trace.regressions");
    let failure_persistence = Some(Box::new(seeds) as _);
    let config = ProptestConfig { cases: 2000, failure_persistence, ..ProptestConfig::default() };
    property(config, &steps(), &CLASSES, |(steps, workers, in_group), coverage| {
        run_scenario(Scenario::new(workers, in_group), &steps, coverage);
        Ok(())
    });
}
