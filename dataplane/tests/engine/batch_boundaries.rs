//! Batch boundaries don't affect the output: packets that arrive one by one, 64 at a time, or in random batches with
//! any number of turns between are forwarded the same: the same packets for each one received, in the order of their
//! flow, with the same drops by reason. Ports and identifications are random, so they are compared up to a one-to-one
//! mapping.
//!
//! Not compared: the order across flows, and between a hairpinned reply and the packet that reopens its session. With
//! several workers also the order of a datagram's fragments relative to other packets of their flow, since they are
//! reassembled at another worker; and which of the flows that compete for ports or a quota comes first: so scenarios
//! with several workers have enough of both, and the two directions of a flow wait for each other, as between hosts.

pub(crate) mod run;
pub(crate) mod script;

use std::collections::{BTreeMap, HashMap};

use proptest::prelude::*;
use proptest::test_runner::{FileFailurePersistence, RngSeed};
use vipgate_coverage::{Coverage, property};

use self::run::{Batches, ScenarioRun, Sent, Setting, is_icmp_error};
use self::script::{Action, GatewayEvent, scenarios};

/// SNAT ports, the widest range of the runs: so wide that two random ones are hardly ever the same.
const PORTS: std::ops::RangeInclusive<u16> = 20_000..=27_999;

/// First bytes of the VIPs, whose Services have ports below 1024.
const VIP_PREFIXES: [&[u8]; 2] = [&[192, 0, 2], &[0x20, 0x01, 0x0d, 0xb8, 0, 0]];

/// Random values of a packet: context (the same in both runs) and value.
type RandomValues = Vec<(Vec<u8>, u32)>;

/// A packet with its random values and checksums masked, and the random values.
fn without_random_values(sent: &Sent) -> (Vec<u8>, RandomValues) {
    let (mut bytes, mut random_values) = (sent.bytes.clone(), Vec::new());
    mask(&mut bytes, 14, sent, &mut random_values);
    (bytes, random_values)
}

/// Masks the packet that begins at `at`, and the one that it quotes.
fn mask(bytes: &mut [u8], at: usize, sent: &Sent, random_values: &mut RandomValues) {
    let v4 = bytes[at] >> 4 == 4;
    let (protocol, l4, is_first) = if v4 {
        let ends = [&[4, bytes[at + 9], sent.process as u8], &bytes[at + 12..at + 20]].concat();
        random_values.push((ends, u16::from_be_bytes([bytes[at + 4], bytes[at + 5]]).into()));
        bytes[at + 4..at + 6].fill(0);
        bytes[at + 10..at + 12].fill(0);
        (bytes[at + 9], at + 20, u16::from_be_bytes([bytes[at + 6], bytes[at + 7]]) << 3 == 0)
    } else if bytes[at + 6] == 44 {
        let ends = [&[6, sent.process as u8][..], &bytes[at + 8..at + 40]].concat();
        random_values.push((ends, u32::from_be_bytes(bytes[at + 44..at + 48].try_into().unwrap())));
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
        // A pod's connections to two frontends of one backend would be one there, with the same port: then it gets another.
        let half = addresses.len() / 2;
        let is_vip =
            VIP_PREFIXES.iter().any(|prefix| addresses[if *port == 0 { 0 } else { half }..].starts_with(prefix));
        if PORTS.contains(&number) || (*port < 4 && is_vip && number >= 1024) {
            bytes[l4 + port..l4 + port + 2].fill(0xff);
            let other = bytes[l4 + (2 - port.min(&2))..][..2].to_vec();
            random_values.push(([&[protocol, sent.epoch as u8], &addresses[..], &other].concat(), number.into()));
        }
    }
    if is_quote {
        mask(bytes, l4 + 8, sent, random_values);
    }
}

/// A packet sent: epoch, interface, masked bytes, random values.
type SentPacket = (usize, u8, Vec<u8>, RandomValues);

/// What was sent for each packet received, and in what order within each flow; tag 0: sent by the gateway on its own.
struct Output {
    by_tag: BTreeMap<u32, Vec<SentPacket>>,
    order: BTreeMap<(u32, u32), Vec<u32>>,
}

fn output(run: &ScenarioRun, workers: u8) -> Output {
    let mut output = Output { by_tag: BTreeMap::new(), order: BTreeMap::new() };
    for sent in &run.sent {
        let (bytes, random_values) = without_random_values(sent);
        let tag = u32::from_be_bytes(*sent.bytes.last_chunk().unwrap());
        let id = run.packet_ids.get(&tag).copied();
        output.by_tag.entry(id.map_or(0, |it| it.tag)).or_default().push((
            sent.epoch,
            sent.interface.0,
            bytes,
            random_values,
        ));
        if let Some(id) = id.filter(|_| !is_icmp_error(&sent.bytes)) {
            let datagram = if workers == 1 { 0 } else { id.datagram };
            output.order.entry((id.flow, datagram)).or_default().push(id.tag);
        }
    }
    output.by_tag.values_mut().for_each(|all| all.sort_by(|a, b| (a.0, a.1, &a.2).cmp(&(b.0, b.1, &b.2))));
    output
}

/// Counter changes that don't depend on queueing. A pod's packet that found no port may be retried after another
/// flow's, whose session uses up the pod's quota; then the second rejection is a quota drop: both are summed. Beside each,
/// how many sessions policy has ended.
fn counters(run: &ScenarioRun) -> Vec<(String, u64)> {
    let is_exhaustion =
        |counted: &str| counted.starts_with("drop ports_exhausted ") || counted.starts_with("drop quota ");
    let is_ended = |counted: &str| counted.starts_with("ended policy ");
    let number = |counted: &str| counted.rsplit(' ').next().and_then(|it| it.parse::<u64>().ok()).unwrap_or_default();
    let normalize = |counted: &String| {
        let all: Vec<&str> = counted.split(", ").filter(|it| !it.starts_with("handed")).collect();
        let sum = |of: &dyn Fn(&str) -> bool| all.iter().filter(|it| of(it)).map(|it| number(it)).sum::<u64>();
        let (rejected, ended) = (sum(&is_exhaustion), sum(&is_ended));
        let others: Vec<&str> = all.iter().copied().filter(|it| !is_exhaustion(it) && !is_ended(it)).collect();
        (format!("{}, rejected {rejected}", others.join(", ")), ended)
    };
    run.counter_changes.iter().map(normalize).collect()
}

/// Asserts that both runs have sent the same; `workers`: of the run with more.
pub(crate) fn compare(one: &ScenarioRun, other: &ScenarioRun, workers: u8) -> Result<(), TestCaseError> {
    // Which port that takes is random.
    if one.reached_sender || other.reached_sender {
        return Ok(());
    }
    prop_assert_eq!(one.counter_changes.len(), other.counter_changes.len());
    for ((counted, ended), (counted_by_other, ended_by_other)) in counters(one).into_iter().zip(counters(other)) {
        prop_assert_eq!(counted, counted_by_other);
        // A session that policy permits no more ends when its worker sees a packet of it. A packet of a former backend on the
        // queue of another worker is treated the same there, and that session ends by its timeout.
        let are_alike = if workers == 1 { ended == ended_by_other } else { ended >= ended_by_other };
        prop_assert!(are_alike, "sessions ended by policy: {} and {}", ended, ended_by_other);
    }
    let (one, other) = (output(one, workers), output(other, workers));
    let (mut forward, mut backward) = (HashMap::new(), HashMap::new());
    prop_assert_eq!(
        one.by_tag.keys().collect::<Vec<_>>(),
        other.by_tag.keys().collect::<Vec<_>>(),
        "packets that were sent"
    );
    for ((tag, all), others) in one.by_tag.iter().zip(other.by_tag.values()) {
        prop_assert_eq!(all.len(), others.len(), "packet {}", tag);
        for (a, b) in all.iter().zip(others) {
            prop_assert_eq!((a.0, a.1, &a.2), (b.0, b.1, &b.2), "packet {}", tag);
            prop_assert_eq!(a.3.len(), b.3.len(), "packet {}", tag);
            // The gateway's own packets have nothing that identifies them.
            for ((context, a), (other_context, b)) in a.3.iter().zip(&b.3).filter(|_| *tag != 0) {
                prop_assert_eq!(context, other_context, "packet {}", tag);
                prop_assert_eq!(forward.entry((context, a)).or_insert(b), &b, "packet {}", tag);
                prop_assert_eq!(backward.entry((context, b)).or_insert(a), &a, "packet {}", tag);
            }
        }
    }
    prop_assert_eq!(one.order, other.order, "the order of flows");
    Ok(())
}

pub(crate) fn count_coverage(scenario: &[Action], run: &ScenarioRun, coverage: &Coverage) {
    for action in scenario {
        match action {
            Action::Packet { class, .. } => coverage.count(*class),
            Action::Reply { id, fragment, .. } if run.packet_ids.contains_key(&id.tag) => {
                coverage.count(if fragment.is_some() { "fragmented reply" } else { "reply to a packet" });
            }
            Action::Error { id, .. } if run.packet_ids.contains_key(&id.tag) => coverage.count("error"),
            Action::Event(GatewayEvent::Policy(change)) => coverage.count(format!("{change:?}")),
            Action::Event(GatewayEvent::Advance(_)) => coverage.count("time"),
            Action::Event(event) => coverage.count(format!("{event:?}")),
            Action::Reply { .. } | Action::Error { .. } => {}
        }
    }
    for counted in run.counter_changes.iter().flat_map(|counted| counted.split(", ")).filter(|it| !it.is_empty()) {
        coverage.count(counted.rsplit_once(' ').map_or(counted, |(name, _)| name));
    }
}

/// Classes that scenarios reach with any number of workers.
pub(crate) const COMMON_CLASSES: [&str; 24] = [
    "whole",
    "first fragment first",
    "first fragment later",
    "overlap",
    "reply to a packet",
    "fragmented reply",
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

pub(crate) fn config(cases: u32, seeds: &'static str) -> ProptestConfig {
    let seeds = FileFailurePersistence::Direct(seeds);
    let default = ProptestConfig::default();
    // The same scenarios in every run; PROPTEST_RNG_SEED selects others.
    let rng_seed = if default.rng_seed == RngSeed::Random { RngSeed::Fixed(1) } else { default.rng_seed };
    ProptestConfig { cases, failure_persistence: Some(Box::new(seeds)), max_shrink_iters: 4_000, rng_seed, ..default }
}

pub(crate) fn batches() -> impl Strategy<Value = Batches> {
    prop::collection::vec((1..24_usize, 0..4_usize), 1..6).prop_map(Batches)
}

fn compare_batchings(
    scenario: &[Action],
    batches: &Batches,
    setting: Setting,
    coverage: &Coverage,
) -> Result<(), TestCaseError> {
    let one_by_one = ScenarioRun::play(scenario, &Batches::one_by_one(), setting);
    count_coverage(scenario, &one_by_one, coverage);
    for batches in [&Batches(vec![(64, 0)]), batches] {
        compare(&one_by_one, &ScenarioRun::play(scenario, batches, setting), setting.workers)?;
    }
    Ok(())
}

#[test]
fn one_worker_sends_the_same_for_any_batch_boundaries() {
    let classes = [
        &COMMON_CLASSES[..],
        &[
            "service connection",
            "pipelined error",
            "unchanged",
            "ended policy",
            "drop no_policy",
            "Limited",
            "drop quota",
            "drop ports_exhausted",
        ],
    ]
    .concat();
    let strategy = (scenarios(true), batches(), any::<bool>());
    property(
        config(350, "tests/engine/batch_boundaries.regressions"),
        &strategy,
        &classes,
        |(scenario, batches, scarce_ports), coverage| {
            compare_batchings(&scenario, &batches, Setting { scarce_ports, ..Setting::new(1) }, coverage)
        },
    );
}

#[test]
fn two_workers_send_the_same_for_any_batch_boundaries() {
    let strategy = (scenarios(false), batches());
    let classes: Vec<_> = COMMON_CLASSES.into_iter().chain(["handed off"]).collect();
    property(
        config(200, "tests/engine/batch_boundaries_two_workers.regressions"),
        &strategy,
        &classes,
        |(scenario, batches), coverage| compare_batchings(&scenario, &batches, Setting::new(2), coverage),
    );
}
