//! Random sessions of some workers are migrated to the tables of others: what fits is migrated unchanged, and nothing
//! else is.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::PathBuf;

use proptest::prelude::*;
use vipgate_coverage::{Coverage, property};
use vipgate_mem::Region;

use super::*;
use crate::flow::tuple::HashKey;
use crate::session::persistence::{FormerError, Identity, Unusable, open_former};
use crate::session::timeout::Timeouts;
use crate::session::{Draft, tests};

const NOW: Tick = Tick(5_000);

/// A random session; its tuples follow from its index.
#[derive(Clone, Debug)]
struct Spec {
    is_v6: bool,
    is_inbound: bool,
    block: u16,
    role: u8,
    idle: u16,
}

fn spec() -> impl Strategy<Value = Spec> {
    (any::<bool>(), prop::bool::weighted(0.2), 16_u16..40, 0_u8..4, any::<u16>())
        .prop_map(|(is_v6, is_inbound, block, role, idle)| Spec { is_v6, is_inbound, block, role, idle: idle % 4_000 })
}

/// The index gives the pod's port and, toward a remote of its own, a port in the block.
fn draft<A: SessionFamily>(n: u16, spec: &Spec, address: fn(u16) -> A) -> Draft<A> {
    let tuple = |source, destination, source_port, destination_port| crate::flow::tuple::Tuple {
        source,
        destination,
        source_port,
        destination_port,
        protocol: 6,
    };
    let [pod, vip, remote] = [address(1), address(2), address(1000 + n)];
    let (origin, translated, direction, reply_direction) = if spec.is_inbound {
        let (from, to) = (tuple(remote, vip, n, 80), tuple(remote, pod, n, 8080));
        (from, to, Direction::Inbound, Direction::ServiceReply)
    } else {
        let port = spec.block << 6 | n & 63;
        (tuple(pod, remote, n, 53), tuple(vip, remote, port, 53), Direction::Egress, Direction::Reply)
    };
    Draft {
        origin,
        translated,
        direction,
        reply_direction,
        origin_side: 1,
        reply_side: 2,
        next_hop: None,
        generation: 3,
    }
}

fn v4(n: u16) -> u32 {
    0x0a00_0000 + u32::from(n)
}

fn v6(n: u16) -> V6 {
    let ip: IpAddr = format!("fd00::{n:x}").parse().unwrap();
    V6::from_ip(ip).unwrap()
}

fn role(spec: &Spec) -> Role {
    match spec.role {
        0 | 1 => Role::Active,
        2 => Role::Standby,
        _ => Role::Quarantined,
    }
}

fn open<A: SessionFamily>(sessions: &mut Sessions, draft: &Draft<A>, spec: &Spec) {
    let slot = sessions.commit(draft, NOW).unwrap();
    match role(spec) {
        Role::Active => {}
        Role::Standby => sessions.demote::<A>(slot, NOW),
        Role::Quarantined => drop(sessions.end::<A>(slot, NOW)),
    }
    A::table_mut(sessions).entry_mut(slot).set_last_seen(Tick(NOW.0 - u32::from(spec.idle)));
    let twin = A::table(sessions).entry(slot).twin();
    A::table_mut(sessions).entry_mut(twin).set_last_seen(Tick(NOW.0 - 4_000));
}

/// The worker that has a session, complete and unchanged, if one has.
fn owner<A: SessionFamily>(into: &[Sessions], draft: &Draft<A>, spec: &Spec) -> Option<usize> {
    let find = |sessions: &Sessions, tuple| sessions.find::<A>(sessions.hash(&tuple), &tuple);
    let mut owners = Vec::new();
    for (worker, sessions) in into.iter().enumerate() {
        let slots = (find(sessions, draft.origin), find(sessions, draft.translated.reversed()));
        let (Some(origin), Some(twin)) = slots else {
            assert_eq!(slots, (None, None), "incomplete session");
            continue;
        };
        let table = A::table(sessions);
        assert_eq!((table.entry(origin).twin(), table.entry(twin).twin()), (twin, origin));
        assert_eq!(
            (table.entry(origin).translated(), table.entry(twin).translated()),
            (draft.translated, draft.origin.reversed())
        );
        assert_eq!(Role::of(table, origin, twin), role(spec));
        assert_eq!(NOW.since(table.entry(origin).last_seen()), u32::from(spec.idle));
        owners.push(worker);
    }
    assert!(owners.len() < 2, "a session has two workers: {owners:?}");
    owners.pop()
}

fn open_all(former: &mut [Sessions], specs: &[Spec]) {
    for (n, spec) in (0..).zip(specs) {
        // Each block has one owner; an inbound session may be at any worker.
        let worker = usize::from(if spec.is_inbound { n } else { spec.block }) % former.len();
        if spec.is_v6 {
            open(&mut former[worker], &draft(n, spec, v6), spec);
        } else {
            open(&mut former[worker], &draft(n, spec, v4), spec);
        }
    }
}

fn count_coverage(specs: &[Spec], owners: &[Option<usize>], coverage: &Coverage) {
    for (spec, owner) in specs.iter().zip(owners) {
        let family = if spec.is_v6 { "IPv6" } else { "IPv4" };
        let direction = if spec.is_inbound { "inbound" } else { "egress" };
        let end = if owner.is_some() { "migrated" } else { "dropped" };
        coverage.count(format!("{family} {direction} {:?} {end}", role(spec)));
    }
}

fn check(specs: &[Spec], workers: usize, into: usize, capacity: u32, coverage: &Coverage) {
    let key = |n: usize| HashKey::new([11, 22, 33, n as u64]);
    let tables = |count: usize, capacity| -> Vec<Sessions> {
        (0..count).map(|n| Sessions::new(capacity, Timeouts::default(), key(n)).unwrap()).collect()
    };
    let mut former = tables(workers, 400);
    open_all(&mut former, specs);
    let mut new = tables(into, capacity);
    let migrated = migrate(&former, &mut new, NOW);

    let owners: Vec<Option<usize>> =
        (0..)
            .zip(specs)
            .map(|(n, spec)| {
                if spec.is_v6 { owner(&new, &draft(n, spec, v6), spec) } else { owner(&new, &draft(n, spec, v4), spec) }
            })
            .collect();
    let mut of_block: BTreeMap<(bool, u16), BTreeSet<usize>> = BTreeMap::new();
    let mut size: BTreeMap<(bool, u16), usize> = BTreeMap::new();
    let mut migrated_by_role = [0_u32; 3];
    for (spec, owner) in specs.iter().zip(&owners) {
        let block = (spec.is_v6, spec.block);
        if !spec.is_inbound {
            *size.entry(block).or_default() += 1;
            of_block.entry(block).or_default().extend(owner);
        }
        if owner.is_some() {
            migrated_by_role[role(spec) as usize] += 1;
        }
    }
    assert!(of_block.values().all(|workers| workers.len() < 2), "a block has one worker: {of_block:?}");
    assert_eq!(migrated_by_role, [migrated.active, migrated.standby, migrated.quarantined]);
    assert_eq!(migrated.dropped as usize + owners.iter().flatten().count(), specs.len());
    assert_eq!(new.iter().map(Sessions::open_count).sum::<u32>(), migrated.active);
    assert_eq!(new.iter().map(Sessions::standby_count).sum::<u32>(), migrated.standby);
    assert_eq!(migrated.torn, 0);
    let largest = size.values().max().copied().unwrap_or(1).max(1);
    let has_fixed_worker = |spec: &Spec| spec.is_inbound && role(spec) == Role::Standby;
    for (n, (spec, owner)) in specs.iter().zip(&owners).enumerate().filter(|(_, (spec, _))| has_fixed_worker(spec)) {
        assert!(owner.is_none_or(|owner| owner == n % into), "updates of {spec:?} go to worker {}", n % into);
    }
    let with_fixed_worker = specs.iter().filter(|spec| has_fixed_worker(spec)).count();
    if specs.len().div_ceil(into) + largest + with_fixed_worker <= capacity as usize {
        assert_eq!(migrated.dropped, 0, "everything fits");
    }
    // A migrated session was seen later than a dropped one, or fits in a worker that the other one isn't assigned to.
    if into == 1 {
        let idle = |is_migrated: bool| {
            let of = specs.iter().zip(&owners).filter(move |(_, owner)| owner.is_some() == is_migrated);
            of.filter(|(spec, _)| role(spec) == Role::Active).map(|(spec, _)| spec.idle)
        };
        assert!(
            idle(true).max() <= idle(false).min() || idle(false).next().is_none(),
            "the last seen ones are migrated"
        );
    }
    count_coverage(specs, &owners, coverage);
    coverage.count(format!("{workers} to {into}"));
}

#[test]
fn what_fits_is_migrated_unchanged_and_each_block_has_one_worker() {
    let mut classes = vec!["1 to 2".to_owned(), "2 to 1".to_owned(), "3 to 2".to_owned(), "2 to 2".to_owned()];
    for family in ["IPv4", "IPv6"] {
        for direction in ["inbound", "egress"] {
            for role in ["Active", "Standby", "Quarantined"] {
                classes.push(format!("{family} {direction} {role} migrated"));
                if role != "Quarantined" {
                    classes.push(format!("{family} {direction} {role} dropped"));
                }
            }
        }
    }
    let classes: Vec<&str> = classes.iter().map(String::as_str).collect();
    let specs = prop::collection::vec(spec(), 0..300);
    let cases = (specs, 1_usize..4, 1_usize..4, prop_oneof![20_u32..100, Just(400_u32)]);
    property(ProptestConfig::with_cases(200), &cases, &classes, |(specs, workers, into, capacity), coverage| {
        check(&specs, workers, into, capacity, coverage);
        Ok(())
    });
}

fn temp_path(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("vipgate-migrate-{}-{name}", std::process::id()))
}

const BOOT: [u8; 16] = [7; 16];

fn write_tables(path: &std::path::Path, count: u16) -> Identity {
    let identity = Identity { worker: 0, workers: 3, capacity: 500, boot: BOOT };
    let region = Region::open(path).unwrap();
    let key = HashKey::new([11, 22, 33, 44]);
    let (mut sessions, _) = Sessions::in_region(region, identity, Timeouts::default(), key).unwrap();
    for n in 0..count {
        sessions.commit(&tests::draft(n, n), Tick(1000)).unwrap();
    }
    identity
}

#[test]
fn former_tables_of_any_identity_are_read_and_not_changed() {
    let path = temp_path("read");
    let identity = write_tables(&path, 300);
    let before = std::fs::read(&path).unwrap();
    {
        let (former, found) = open_former(Region::open(&path).unwrap(), BOOT).unwrap();
        assert_eq!(found, identity);
        let mut into = vec![tests::sessions(500)];
        let migrated = migrate(&[former], &mut into, Tick(2000));
        assert_eq!(migrated, Migrated { active: 300, ..Migrated::default() });
    }
    assert!(std::fs::read(&path).unwrap() == before, "the file is unchanged");
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn a_migrated_session_keeps_its_record_and_what_other_gateways_have_of_it() {
    let mut former = tests::sessions(20);
    let slots = [1, 2, 3].map(|n| former.commit(&tests::draft(n, 2000 + n), Tick(1000)).unwrap());
    let [sent, standby, changed] = slots;
    former.demote::<u32>(standby, Tick(1000));
    let table = u32::table_mut(&mut former);
    for (n, slot) in (1..).zip(slots) {
        let twin = table.entry(slot).twin();
        table.entry_mut(slot).count(100 * n, Tick(2000), 3);
        table.entry_mut(twin).count(10 * n, Tick(3000), 3);
    }
    table.entry_mut(sent).note_sent();
    table.entry_mut(sent).note_acknowledged();
    table.entry_mut(standby).set_sync_round(5);
    table.entry_mut(changed).note_acknowledged();

    let mut into = [tests::sessions(20)];
    let migrated = migrate(std::slice::from_ref(&former), &mut into, NOW);
    assert_eq!(migrated, Migrated { active: 2, standby: 1, ..Migrated::default() });
    let [into] = into;
    for (n, slot) in (1..).zip(slots) {
        let origin = tests::draft(n, 2000 + n).origin;
        let found = into.find(into.hash(&origin), &origin).unwrap();
        assert_eq!(into.record::<u32>(found, NOW), former.record::<u32>(slot, NOW));
        let replicated = |sessions: &Sessions, slot| {
            let entry = u32::table(sessions).entry(slot);
            (entry.is_acknowledged(), entry.is_sent(), entry.sync_round(), entry.has_pending_changes())
        };
        assert_eq!(replicated(&into, found), replicated(&former, slot), "session {n}");
    }
}

/// Not even if a damaged table says so: no record has a reply as its original direction.
#[test]
fn a_session_that_begins_with_a_reply_is_not_migrated() {
    let mut former = tests::sessions(20);
    let draft = tests::draft(1, 2001);
    let reply = Draft {
        origin: draft.translated.reversed(),
        translated: draft.origin.reversed(),
        direction: Direction::Reply,
        reply_direction: Direction::Egress,
        ..draft
    };
    former.commit(&reply, Tick(1000)).unwrap();
    let migrated = migrate(&[former], &mut [tests::sessions(20)], NOW);
    assert_eq!(migrated, Migrated { torn: 2, ..Migrated::default() });
}

#[test]
fn an_incomplete_session_is_not_migrated() {
    let mut former = tests::sessions(20);
    for n in 0..10 {
        former.commit(&tests::draft(n, n), Tick(1000)).unwrap();
    }
    let origin = tests::draft(4, 4).origin;
    let slot = former.find(former.hash(&origin), &origin).unwrap();
    let hash = former.hash(&origin);
    u32::table_mut(&mut former).remove(hash, slot);
    let mut into = vec![tests::sessions(20)];
    let migrated = migrate(&[former], &mut into, Tick(2000));
    assert_eq!(migrated, Migrated { active: 9, torn: 1, ..Migrated::default() });
}

#[test]
fn unreadable_tables_are_reported_and_not_changed() {
    let path = temp_path("unreadable");
    let reason = |boot| {
        let length = || std::fs::metadata(&path).unwrap().len();
        let before = length();
        let Err(FormerError::Unusable(reason)) = open_former(Region::open(&path).unwrap(), boot) else {
            panic!("the tables are readable")
        };
        assert_eq!(length(), before);
        reason
    };
    write_tables(&path, 3);
    assert_eq!(reason([8; 16]), Unusable::Boot);
    let mut bytes = std::fs::read(&path).unwrap();
    // The layout is behind the magic, the capacity behind the numbers of workers.
    for (at, expected) in [(8, Unusable::Layout { found: 77 }), (24, Unusable::Damaged)] {
        let was = bytes[at];
        bytes[at] = 77;
        // For the capacity, its upper half, too: more sessions than such a file could hold.
        let upper = bytes[at + 3];
        bytes[at + 3] = if at == 24 { 0x77 } else { upper };
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(reason(BOOT), expected);
        (bytes[at], bytes[at + 3]) = (was, upper);
    }
    std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    assert_eq!(reason(BOOT), Unusable::Damaged, "truncated");
    std::fs::write(&path, b"something else").unwrap();
    assert_eq!(reason(BOOT), Unusable::Damaged);
    std::fs::remove_file(&path).unwrap();
}
