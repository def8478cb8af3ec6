//! Where batches begin decides nothing: a story of packets that comes one by one, 64 at a time, or in any batches with any number
//! of turns between, leaves the same: for every packet the same ones, in the order of their flow, with the same drops by reason. Ports
//! and identifications are drawn, so they are compared as relations: one for one.
//!
//! What is free: the order of different flows, and that of an answer that comes around and what opens its session anew. With several
//! workers also the order of a datagram's fragments among what else there is of their flow, for they meet at another worker; and where
//! flows compete, for ports or a quota, who comes first: so stories with several workers have enough of both, and the two directions of
//! a flow wait for each other, as they do between hosts.

mod run;
mod script;

use std::collections::{BTreeMap, HashMap};

use proptest::prelude::*;
use proptest::test_runner::{FileFailurePersistence, RngSeed};

use self::run::{Cuts, Run, Sent, is_error};
use self::script::{Action, Event, stories};
use crate::tally::{Tally, property};

/// SNAT ports, as the runs have them at most.
const PORTS: std::ops::RangeInclusive<u16> = 20_000..=20_255;

/// What was drawn: where (so that it is the same for both), and the number.
type Drawn = Vec<(Vec<u8>, u32)>;

/// A packet without what is drawn and what follows from that, and what was drawn.
fn without_draws(sent: &Sent) -> (Vec<u8>, Drawn) {
    let (mut bytes, mut drawn) = (sent.bytes.clone(), Vec::new());
    blank(&mut bytes, 14, sent, &mut drawn);
    (bytes, drawn)
}

/// Blanks the packet that begins at `at`, and what it quotes.
fn blank(bytes: &mut [u8], at: usize, sent: &Sent, drawn: &mut Drawn) {
    let v4 = bytes[at] >> 4 == 4;
    let (protocol, l4, is_first) = if v4 {
        let ends = [&[4, bytes[at + 9], sent.process as u8], &bytes[at + 12..at + 20]].concat();
        drawn.push((ends, u16::from_be_bytes([bytes[at + 4], bytes[at + 5]]).into()));
        bytes[at + 4..at + 6].fill(0);
        bytes[at + 10..at + 12].fill(0);
        (bytes[at + 9], at + 20, u16::from_be_bytes([bytes[at + 6], bytes[at + 7]]) << 3 == 0)
    } else if bytes[at + 6] == 44 {
        let ends = [&[6, sent.process as u8][..], &bytes[at + 8..at + 40]].concat();
        drawn.push((ends, u32::from_be_bytes(bytes[at + 44..at + 48].try_into().unwrap())));
        bytes[at + 44..at + 48].fill(0);
        (bytes[at + 40], at + 48, u16::from_be_bytes([bytes[at + 42], bytes[at + 43]]) & 0xfff8 == 0)
    } else {
        (bytes[at + 6], at + 40, true)
    };
    if !is_first || bytes.len() < l4 + 8 {
        return;
    }
    let addresses = if v4 { bytes[at + 12..at + 20].to_vec() } else { bytes[at + 8..at + 40].to_vec() };
    let is_quote = matches!((protocol, bytes[l4]), (1, 3 | 11 | 12) | (58, 1..=4));
    let (sum, ports): (usize, &[usize]) = match protocol {
        6 => (16, &[0, 2]),
        17 => (6, &[0, 2]),
        _ if is_quote => (2, &[]),
        _ => (2, &[4]),
    };
    if bytes.len() >= l4 + sum + 2 {
        bytes[l4 + sum..l4 + sum + 2].fill(0);
    }
    for port in ports {
        let number = u16::from_be_bytes([bytes[l4 + port], bytes[l4 + port + 1]]);
        if PORTS.contains(&number) {
            bytes[l4 + port..l4 + port + 2].fill(0xff);
            let other = bytes[l4 + (2 - port.min(&2))..][..2].to_vec();
            drawn.push(([&[protocol, sent.epoch as u8], &addresses[..], &other].concat(), number.into()));
        }
    }
    if is_quote {
        blank(bytes, l4 + 8, sent, drawn);
    }
}

/// A packet that left: the part of the story, the interface, the bytes without what is random, and that.
type Left = (usize, u8, Vec<u8>, Drawn);

/// What left because of each packet, and in what order for each flow; what has no tag is the gateway's own.
struct Seen {
    by_tag: BTreeMap<u32, Vec<Left>>,
    order: BTreeMap<(u32, u32), Vec<u32>>,
}

fn seen(run: &Run, workers: u8) -> Seen {
    let mut seen = Seen { by_tag: BTreeMap::new(), order: BTreeMap::new() };
    for sent in &run.sent {
        let (bytes, drawn) = without_draws(sent);
        let tag = u32::from_be_bytes(*sent.bytes.last_chunk().unwrap());
        let place = run.places.get(&tag).copied();
        seen.by_tag.entry(place.map_or(0, |it| it.tag)).or_default().push((sent.epoch, sent.interface.0, bytes, drawn));
        if let Some(place) = place.filter(|_| !is_error(&sent.bytes)) {
            let datagram = if workers == 1 { 0 } else { place.datagram };
            seen.order.entry((place.flow, datagram)).or_default().push(place.tag);
        }
    }
    seen.by_tag.values_mut().for_each(|all| all.sort_by(|a, b| (a.0, a.1, &a.2).cmp(&(b.0, b.1, &b.2))));
    seen
}

/// Counters without what is a matter of queues. A pod's packet that is refused for want of a port may come around behind another flow's,
/// whose session uses up the pod's quota: then that is the reason of its second refusal, so both count together.
fn counters(run: &Run) -> Vec<String> {
    let scarce = |counted: &str| counted.starts_with("drop ports_exhausted ") || counted.starts_with("drop quota ");
    let number = |counted: &str| counted.rsplit(' ').next().and_then(|it| it.parse::<u64>().ok()).unwrap_or_default();
    let known = |counted: &String| {
        let all: Vec<&str> = counted.split(", ").filter(|it| !it.starts_with("handed")).collect();
        let refused: u64 = all.iter().filter(|it| scarce(it)).map(|it| number(it)).sum();
        let others: Vec<&str> = all.into_iter().filter(|it| !scarce(it)).collect();
        format!("{}, refused {refused}", others.join(", "))
    };
    run.counted.iter().map(known).collect()
}

/// Both have sent the same.
fn compare(one: &Run, other: &Run, workers: u8) -> Result<(), TestCaseError> {
    prop_assert_eq!(counters(one), counters(other));
    let (one, other) = (seen(one, workers), seen(other, workers));
    let (mut there, mut back) = (HashMap::new(), HashMap::new());
    prop_assert_eq!(
        one.by_tag.keys().collect::<Vec<_>>(),
        other.by_tag.keys().collect::<Vec<_>>(),
        "packets that left"
    );
    for ((tag, all), others) in one.by_tag.iter().zip(other.by_tag.values()) {
        prop_assert_eq!(all.len(), others.len(), "packet {}", tag);
        for (a, b) in all.iter().zip(others) {
            prop_assert_eq!((a.0, a.1, &a.2), (b.0, b.1, &b.2), "packet {}", tag);
            prop_assert_eq!(a.3.len(), b.3.len(), "packet {}", tag);
            // Own packets have none that tells them apart.
            for ((place, a), (same, b)) in a.3.iter().zip(&b.3).filter(|_| *tag != 0) {
                prop_assert_eq!(place, same, "packet {}", tag);
                prop_assert_eq!(there.entry((place, a)).or_insert(b), &b, "packet {}", tag);
                prop_assert_eq!(back.entry((place, b)).or_insert(a), &a, "packet {}", tag);
            }
        }
    }
    prop_assert_eq!(one.order, other.order, "the order of flows");
    Ok(())
}

fn note(story: &[Action], run: &Run, tally: &Tally) {
    for action in story {
        match action {
            Action::Packet { class, .. } => tally.count(*class),
            Action::Answer { place, piece, .. } if run.places.contains_key(&place.tag) => {
                tally.count(if piece.is_some() { "answer in fragments" } else { "answer" });
            }
            Action::Error { place, .. } if run.places.contains_key(&place.tag) => tally.count("error"),
            Action::Event(Event::Policy(change)) => tally.count(format!("{change:?}")),
            Action::Event(Event::Pass(_)) => tally.count("time"),
            Action::Event(event) => tally.count(format!("{event:?}")),
            Action::Answer { .. } | Action::Error { .. } => {}
        }
    }
    for counted in run.counted.iter().flat_map(|counted| counted.split(", ")).filter(|it| !it.is_empty()) {
        tally.count(counted.rsplit_once(' ').map_or(counted, |(name, _)| name));
    }
}

/// All classes of packets and events that stories have, whoever handles them.
const EVERYWHERE: [&str; 24] = [
    "whole",
    "first one first",
    "first one later",
    "overlap",
    "answer",
    "answer in fragments",
    "error",
    "time",
    "Whole",
    "NoPod",
    "OtherVip",
    "Excluded",
    "NoBackend",
    "Flush",
    "Restart",
    "egress",
    "reply",
    "inbound",
    "service_reply",
    "created",
    "drop fragment",
    "drop no_session",
    "ended idle",
    "ended flushed",
];

fn config(cases: u32, kept: &'static str) -> ProptestConfig {
    let kept = FileFailurePersistence::Direct(kept);
    let default = ProptestConfig::default();
    // The same stories in every run; PROPTEST_RNG_SEED draws others.
    let rng_seed = if default.rng_seed == RngSeed::Random { RngSeed::Fixed(1) } else { default.rng_seed };
    ProptestConfig { cases, failure_persistence: Some(Box::new(kept)), max_shrink_iters: 4_000, rng_seed, ..default }
}

fn cuts() -> impl Strategy<Value = Cuts> {
    prop::collection::vec((1..24_usize, 0..4_usize), 1..6).prop_map(Cuts)
}

fn all_the_same(story: &[Action], cuts: &Cuts, workers: u8, narrow: bool, tally: &Tally) -> Result<(), TestCaseError> {
    let one_by_one = Run::of(story, &Cuts(vec![(1, 0)]), workers, narrow);
    note(story, &one_by_one, tally);
    for cuts in [&Cuts(vec![(64, 0)]), cuts] {
        compare(&one_by_one, &Run::of(story, cuts, workers, narrow), workers)?;
    }
    Ok(())
}

#[test]
fn one_worker_sends_the_same_whatever_the_batches() {
    let classes = [
        &EVERYWHERE[..],
        &[
            "served",
            "foreseen error",
            "unchanged",
            "ended policy",
            "drop no_policy",
            "Limited",
            "drop quota",
            "drop ports_exhausted",
        ],
    ]
    .concat();
    let strategy = (stories(true), cuts(), any::<bool>());
    property(config(350, "tests/engine/cuts.regressions"), &strategy, &classes, |(story, cuts, narrow), tally| {
        all_the_same(&story, &cuts, 1, narrow, tally)
    });
}

#[test]
fn two_workers_send_the_same_whatever_the_batches() {
    let strategy = (stories(false), cuts());
    let classes: Vec<_> = EVERYWHERE.into_iter().chain(["handed over"]).collect();
    property(config(200, "tests/engine/cuts_of_two.regressions"), &strategy, &classes, |(story, cuts), tally| {
        all_the_same(&story, &cuts, 2, false, tally)
    });
}
