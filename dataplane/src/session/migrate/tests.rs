//! Random sessions of so many workers come into the tables of so many others: what fits goes on, whole, and nothing else does.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::PathBuf;

use proptest::prelude::*;

use super::*;
use crate::session::tuple::HashKey;
use crate::session::{Draft, tests};
use crate::tally::{Tally, property};

const NOW: Tick = Tick(5_000);

/// A session of the story: who it is between follows from its number.
#[derive(Clone, Debug)]
struct Story {
    is_v6: bool,
    is_inbound: bool,
    block: u16,
    role: u8,
    idle: u16,
}

fn story() -> impl Strategy<Value = Story> {
    (any::<bool>(), prop::bool::weighted(0.2), 16_u16..40, 0_u8..4, any::<u16>())
        .prop_map(|(is_v6, is_inbound, block, role, idle)| Story { is_v6, is_inbound, block, role, idle: idle % 4_000 })
}

/// The number gives the pod's port and, toward a far side of its own, a port in the block.
fn draft<A: SessionFamily>(n: u16, story: &Story, address: fn(u16) -> A) -> Draft<A> {
    let tuple = |source, destination, source_port, destination_port| crate::session::tuple::Tuple {
        source,
        destination,
        source_port,
        destination_port,
        protocol: 6,
    };
    let [pod, vip, remote] = [address(1), address(2), address(1000 + n)];
    let (origin, translated, direction, reply_direction) = if story.is_inbound {
        let (from, to) = (tuple(remote, vip, n, 80), tuple(remote, pod, n, 8080));
        (from, to, Direction::Inbound, Direction::ServiceReply)
    } else {
        let port = story.block << 6 | n & 63;
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

fn role(story: &Story) -> Role {
    match story.role {
        0 | 1 => Role::Active,
        2 => Role::Standby,
        _ => Role::Quarantined,
    }
}

fn open<A: SessionFamily>(sessions: &mut Sessions, draft: &Draft<A>, story: &Story) {
    let slot = sessions.commit(draft, NOW).unwrap();
    match role(story) {
        Role::Active => {}
        Role::Standby => sessions.demote::<A>(slot, NOW),
        Role::Quarantined => drop(sessions.end::<A>(slot, NOW)),
    }
    A::table_mut(sessions).entry_mut(slot).set_last_seen(Tick(NOW.0 - u32::from(story.idle)));
    let twin = A::table(sessions).entry(slot).twin();
    A::table_mut(sessions).entry_mut(twin).set_last_seen(Tick(NOW.0 - 4_000));
}

/// The worker that has a session, whole and as it was, if one has.
fn owner<A: SessionFamily>(into: &[Sessions], draft: &Draft<A>, story: &Story) -> Option<usize> {
    let find = |sessions: &Sessions, tuple| sessions.find::<A>(sessions.hash(&tuple), &tuple);
    let mut owners = Vec::new();
    for (worker, sessions) in into.iter().enumerate() {
        let slots = (find(sessions, draft.origin), find(sessions, draft.translated.reversed()));
        let (Some(origin), Some(twin)) = slots else {
            assert_eq!(slots, (None, None), "half a session");
            continue;
        };
        let table = A::table(sessions);
        assert_eq!((table.entry(origin).twin(), table.entry(twin).twin()), (twin, origin));
        assert_eq!((table.entry(origin).to(), table.entry(twin).to()), (draft.translated, draft.origin.reversed()));
        assert_eq!(Role::of(table, origin, twin), role(story));
        assert_eq!(NOW.since(table.entry(origin).last_seen()), u32::from(story.idle));
        owners.push(worker);
    }
    assert!(owners.len() < 2, "a session of two workers: {owners:?}");
    owners.pop()
}

fn check(stories: &[Story], workers: usize, into: usize, capacity: u32, tally: &Tally) {
    let key = |n: usize| HashKey::new([11, 22, 33, n as u64]);
    let tables = |count: usize, capacity| -> Vec<Sessions> {
        (0..count).map(|n| Sessions::new(capacity, Timeouts::default(), key(n)).unwrap()).collect()
    };
    let mut former = tables(workers, 400);
    for (n, story) in (0..).zip(stories) {
        // Each block has one owner; a client's session is anybody's.
        let worker = usize::from(if story.is_inbound { n } else { story.block }) % workers;
        if story.is_v6 {
            open(&mut former[worker], &draft(n, story, v6), story);
        } else {
            open(&mut former[worker], &draft(n, story, v4), story);
        }
    }
    let mut new = tables(into, capacity);
    let migrated = migrate(&former, &mut new, NOW);

    let owners: Vec<Option<usize>> = (0..)
        .zip(stories)
        .map(|(n, story)| {
            if story.is_v6 {
                owner(&new, &draft(n, story, v6), story)
            } else {
                owner(&new, &draft(n, story, v4), story)
            }
        })
        .collect();
    let mut of_block: BTreeMap<(bool, u16), BTreeSet<usize>> = BTreeMap::new();
    let mut size: BTreeMap<(bool, u16), usize> = BTreeMap::new();
    let mut kept = [0_u32; 3];
    for (story, owner) in stories.iter().zip(&owners) {
        let block = (story.is_v6, story.block);
        if !story.is_inbound {
            *size.entry(block).or_default() += 1;
            of_block.entry(block).or_default().extend(owner);
        }
        if owner.is_some() {
            kept[role(story) as usize] += 1;
        }
    }
    assert!(of_block.values().all(|workers| workers.len() < 2), "a block has one worker: {of_block:?}");
    assert_eq!(kept, [migrated.active, migrated.standby, migrated.quarantined]);
    assert_eq!(migrated.dropped as usize + owners.iter().flatten().count(), stories.len());
    assert_eq!(new.iter().map(Sessions::open_count).sum::<u32>(), migrated.active);
    assert_eq!(new.iter().map(Sessions::copies).sum::<u32>(), migrated.standby);
    assert_eq!(migrated.torn, 0);
    let largest = size.values().max().copied().unwrap_or(1).max(1);
    let is_at_home = |story: &Story| story.is_inbound && role(story) == Role::Standby;
    for (n, (story, owner)) in stories.iter().zip(&owners).enumerate().filter(|(_, (story, _))| is_at_home(story)) {
        assert!(owner.is_none_or(|owner| owner == n % into), "updates of {story:?} look for it at {}", n % into);
    }
    let at_home = stories.iter().filter(|story| is_at_home(story)).count();
    if stories.len().div_ceil(into) + largest + at_home <= capacity as usize {
        assert_eq!(migrated.dropped, 0, "everything has a place");
    }
    // Whoever went on while another one didn't was seen later, or fits into a worker that the other one doesn't belong to.
    if into == 1 {
        let idle = |is_kept: bool| {
            let of = stories.iter().zip(&owners).filter(move |(_, owner)| owner.is_some() == is_kept);
            of.filter(|(story, _)| role(story) == Role::Active).map(|(story, _)| story.idle)
        };
        assert!(idle(true).max() <= idle(false).min() || idle(false).next().is_none(), "the last seen ones go on");
    }
    for (story, owner) in stories.iter().zip(&owners) {
        let family = if story.is_v6 { "IPv6" } else { "IPv4" };
        let direction = if story.is_inbound { "inbound" } else { "egress" };
        let end = if owner.is_some() { "goes on" } else { "dropped" };
        tally.count(format!("{family} {direction} {:?} {end}", role(story)));
    }
    tally.count(format!("{workers} to {into}"));
}

#[test]
fn what_fits_goes_on_whole_and_each_block_has_one_worker() {
    let mut classes = vec!["1 to 2".to_owned(), "2 to 1".to_owned(), "3 to 2".to_owned(), "2 to 2".to_owned()];
    for family in ["IPv4", "IPv6"] {
        for direction in ["inbound", "egress"] {
            for role in ["Active", "Standby", "Quarantined"] {
                classes.push(format!("{family} {direction} {role} goes on"));
                if role != "Quarantined" {
                    classes.push(format!("{family} {direction} {role} dropped"));
                }
            }
        }
    }
    let classes: Vec<&str> = classes.iter().map(String::as_str).collect();
    let stories = prop::collection::vec(story(), 0..300);
    let cases = (stories, 1_usize..4, 1_usize..4, prop_oneof![20_u32..100, Just(400_u32)]);
    property(ProptestConfig::with_cases(200), &cases, &classes, |(stories, workers, into, capacity), tally| {
        check(&stories, workers, into, capacity, tally);
        Ok(())
    });
}

fn scratch(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("vipgate-migrate-{}-{name}", std::process::id()))
}

const BOOT: [u8; 16] = [7; 16];

fn written(path: &std::path::Path, count: u16) -> Identity {
    let identity = Identity { worker: 0, workers: 3, capacity: 500, boot: BOOT };
    let mut region = Region::open(path).unwrap();
    let key = HashKey::new([11, 22, 33, 44]);
    let (mut sessions, _) = Sessions::in_region(&mut region, identity, Timeouts::default(), key).unwrap();
    for n in 0..count {
        sessions.commit(&tests::draft(n, n), Tick(1000)).unwrap();
    }
    identity
}

#[test]
fn former_tables_are_read_whatever_their_numbers_and_stay_as_they_are() {
    let path = scratch("read");
    let identity = written(&path, 300);
    let before = std::fs::read(&path).unwrap();
    {
        let mut region = Region::open(&path).unwrap();
        let (former, found) = open_former(&mut region, BOOT).unwrap();
        assert_eq!(found, identity);
        let mut into = vec![tests::sessions(500)];
        let migrated = migrate(&[former], &mut into, Tick(2000));
        assert_eq!(migrated, Migrated { active: 300, ..Migrated::default() });
    }
    assert!(std::fs::read(&path).unwrap() == before, "nothing in it is changed");
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn half_a_session_stays_behind() {
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
fn what_cannot_be_read_is_named_and_stays_as_it_is() {
    let path = scratch("unreadable");
    let reason = |boot| {
        let length = std::fs::metadata(&path).unwrap().len();
        let mut region = Region::open(&path).unwrap();
        let Err(FormerError::Unusable(reason)) = open_former(&mut region, boot) else { panic!("it can be read") };
        assert_eq!(region.len(), length);
        reason
    };
    written(&path, 3);
    assert_eq!(reason([8; 16]), Unusable::Boot);
    let mut bytes = std::fs::read(&path).unwrap();
    // The layout stands behind the magic, the capacity behind the numbers of workers.
    for (at, expected) in [(8, Unusable::Layout { found: 77 }), (24, Unusable::Damaged)] {
        let was = bytes[at];
        bytes[at] = 77;
        // Of the capacity, its upper half: more sessions than such a file could hold.
        let upper = bytes[at + 3];
        bytes[at + 3] = if at == 24 { 0x77 } else { upper };
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(reason(BOOT), expected);
        (bytes[at], bytes[at + 3]) = (was, upper);
    }
    std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    assert_eq!(reason(BOOT), Unusable::Damaged, "cut short");
    std::fs::write(&path, b"something else").unwrap();
    assert_eq!(reason(BOOT), Unusable::Damaged);
    std::fs::remove_file(&path).unwrap();
}
