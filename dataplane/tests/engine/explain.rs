//! What the gateway says would become of a packet is what then becomes of it: over random packets, policies, tables and times, with
//! several workers and several gateways. (Each packet of every other test is foretold, too: see `Gateway::arrives`.)

use std::cell::RefCell;
use std::collections::BTreeSet;

use proptest::test_runner::{Config, FileFailurePersistence, TestRunner};
use vipgate_dataplane::counters::DropReason;
use vipgate_dataplane::explain::{Class, Fate, Found};
use vipgate_dataplane::verdict::Verdict;

use crate::story::{Step, Story, steps};

/// What was foretold of all packets: for the question whether the test has asked everything.
#[derive(Default)]
struct Seen {
    reasons: BTreeSet<DropReason>,
    classes: BTreeSet<String>,
    fates: BTreeSet<String>,
    verdicts: BTreeSet<String>,
}

impl Seen {
    fn note(&mut self, found: &Found) {
        if let Verdict::Drop(reason) = found.verdict {
            self.reasons.insert(reason);
        }
        self.verdicts.insert(format!("{:?}", found.verdict).split('(').next().unwrap().to_owned());
        self.classes.extend(found.class.map(|class| format!("{class:?}")));
        self.classes.extend(found.is_reserved.then(|| "reserved".to_owned()));
        self.fates.extend(found.session.map(|(_, fate)| format!("{fate:?}").split('(').next().unwrap().to_owned()));
    }
}

fn play(steps: &[Step], workers: u8, several: bool, seen: &RefCell<Seen>) {
    let mut story = Story::new(workers, several);
    for step in steps {
        let Some((worker, interface, packet)) = story.packet(step) else { continue };
        if let Some(found) = story.gateway.foretell(worker, interface, &packet) {
            seen.borrow_mut().note(&found);
        }
        // Foretells it once more, and compares.
        let sent = story.gateway.arrives(worker, interface, &packet);
        story.sent.extend(sent);
    }
}

#[test]
fn the_blocks_that_a_worker_has_are_counted_among_those_of_its_share() {
    use crate::support::cluster::{FAR, three};
    use crate::support::{INSIDE, Protocol, at, ip, packet};
    let mut cluster = three();
    let question = |port: u16| packet(Protocol::Udp, (ip("10.244.1.5"), port).into(), at(FAR));
    cluster.arrives(0, INSIDE, &question(4000));
    let found = cluster.gateways[0].foretell(0, INSIDE, &question(4001)).unwrap();
    let leaves = found.leaves_with.unwrap();
    // Every third one of those in the range of ports.
    assert_eq!(leaves.blocks, Some(336));
    assert!((1..=336).contains(&leaves.owned), "{} of 336", leaves.owned);
    cluster.assert_delta(&["egress 1, created 1", "", ""]);
}

#[test]
fn what_is_foretold_comes_true() {
    let kept = FileFailurePersistence::Direct("tests/engine/explain.regressions");
    let config = Config { cases: 2000, failure_persistence: Some(Box::new(kept)), ..Config::default() };
    let seen = RefCell::new(Seen::default());
    let outcome = TestRunner::new(config).run(&steps(), |(steps, workers, several)| {
        play(&steps, workers, several, &seen);
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
    let seen = seen.into_inner();
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
        DropReason::NoOwner,
    ];
    for reason in reasons {
        assert!(seen.reasons.contains(&reason), "{reason:?} was never foretold: {:?}", seen.reasons);
    }
    for class in [
        Class::Known,
        Class::Egress { revives: false },
        Class::Egress { revives: true },
        Class::Inbound,
        Class::Stateless,
        Class::Unchanged,
        Class::Peer,
    ] {
        assert!(seen.classes.contains(&format!("{class:?}")), "{class:?} never: {:?}", seen.classes);
    }
    assert!(seen.classes.contains("reserved"), "a place in the reserve: {:?}", seen.classes);
    for fate in [Fate::Known, Fate::Rechecked, Fate::Ended] {
        assert!(seen.fates.contains(&format!("{fate:?}")), "{fate:?} never: {:?}", seen.fates);
    }
    for verdict in ["Forward", "Around", "Wait", "Drop"] {
        assert!(seen.verdicts.contains(verdict), "{verdict} never: {:?}", seen.verdicts);
    }
}
