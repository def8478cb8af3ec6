use std::collections::{BTreeMap, VecDeque};

use prost::Message;

use super::super::inbound::{Inbound, Step};
use super::super::rounds::Rounds;
use super::*;
use crate::peer::proto::Frame;
use crate::peer::tests::image;
use vipgate_dataplane::session::image::{Fate, ImageOf};

const WORKERS: u32 = 2;
/// Rows of a table that a worker looks at for one answer.
const SLICE: usize = 3;

fn kind(bytes: &[u8]) -> Kind {
    Frame::decode(&bytes[4..]).unwrap().kind.unwrap()
}

/// Frames as words.
fn say(outbound: &mut Outbound) -> Vec<String> {
    std::iter::from_fn(|| outbound.frame())
        .map(|bytes| match kind(&bytes) {
            Kind::Sessions(frame) => format!("{} sessions", frame.sessions.len()),
            Kind::SyncBegin(_) => "begin".to_owned(),
            Kind::SyncEnd(_) => "end".to_owned(),
            Kind::Released(frame) => format!("released {}", frame.view),
            other => panic!("{other:?}"),
        })
        .collect()
}

/// Answers all questions with these sessions, by the first worker.
fn tell_all(outbound: &mut Outbound, images: &[Image]) {
    while let Some(question) = outbound.question() {
        outbound.asked();
        outbound.answer(question, if question.worker == 0 { images } else { &[] }, None);
    }
}

fn linked() -> Outbound {
    let mut outbound = Outbound::new(WORKERS as usize, 0);
    outbound.up();
    tell_all(&mut outbound, &[]);
    assert_eq!(say(&mut outbound), ["begin", "end"]);
    assert_eq!(outbound.acknowledged(2), Ok(vec![0, 0]));
    assert!(outbound.in_sync());
    outbound
}

#[test]
fn news_travel_together_and_are_acknowledged_by_worker() {
    let mut outbound = linked();
    outbound.news(0, 7, &image(1));
    outbound.news(1, 3, &image(2));
    outbound.news(0, 8, &image(3));
    assert_eq!(say(&mut outbound), ["3 sessions"]);
    assert_eq!(outbound.acknowledged(3), Ok(vec![8, 3]));
    assert!(outbound.acknowledged(4).is_err(), "it was never sent");
}

#[test]
fn no_more_is_on_its_way_than_may_be() {
    let mut outbound = linked();
    (0..10_000).for_each(|number| outbound.news(0, number, &image(number as u32)));
    assert_eq!(say(&mut outbound).len(), WINDOW);
    assert_eq!(outbound.acknowledged(5).unwrap()[0], 3 * MOST_TAKEN as u64 - 1);
    assert_eq!(say(&mut outbound).len(), 3);
}

#[test]
fn what_does_not_fit_is_dropped_and_all_is_told() {
    let mut outbound = linked();
    let mut most = 0;
    for number in 1..=100_000 {
        outbound.news(0, number, &image(number as u32));
        most = most.max(outbound.queued());
    }
    assert!(most > MOST_QUEUED / 2 && most < MOST_QUEUED + frame::LONGEST, "{most}");
    assert!(!outbound.in_sync());
    tell_all(&mut outbound, &[image(1)]);
    assert_eq!(say(&mut outbound), ["begin", "1 sessions", "end"]);
    // With the end, it has what was dropped as well.
    assert_eq!(outbound.acknowledged(outbound.next - 1), Ok(vec![100_000, 0]));
    assert!(outbound.in_sync());
}

#[test]
fn letting_go_is_said_last_and_again_if_it_was_not_heard() {
    let mut outbound = linked();
    outbound.news(0, 1, &image(1));
    outbound.release(9);
    assert_eq!(say(&mut outbound), ["1 sessions"], "not before all news are taken up");
    outbound.news(0, 2, &image(2));
    outbound.drained();
    assert_eq!(say(&mut outbound), ["1 sessions", "released 9"]);
    outbound.up();
    outbound.drained();
    assert_eq!(say(&mut outbound), Vec::<String>::new(), "not before all is told");
    tell_all(&mut outbound, &[]);
    outbound.drained();
    assert_eq!(say(&mut outbound), ["begin", "end", "released 9"]);
    assert_eq!((outbound.acknowledged(3), outbound.released), (Ok(vec![2, 0]), Some(9)));
    outbound.release(9);
    outbound.drained();
    assert_eq!(say(&mut outbound), Vec::<String>::new(), "it knows");
}

#[test]
fn an_answer_to_a_round_that_is_over_is_passed_over() {
    let mut outbound = Outbound::new(1, 0);
    outbound.up();
    let old = outbound.question().unwrap();
    outbound.asked();
    outbound.owe();
    let new = outbound.question().unwrap();
    outbound.asked();
    outbound.answer(old, &[image(1)], None);
    outbound.answer(new, &[image(2), image(3)], None);
    assert_eq!(say(&mut outbound), ["begin", "2 sessions", "end"]);
}

type Key = (u32, u32);
type Answer = (Question, Vec<Image>, Option<u64>);

/// A gateway that tells, one that hears, and what is between them, step by step.
struct World {
    random: u64,
    own: BTreeMap<Key, Image>,
    outlets: Vec<VecDeque<(u64, Image)>>,
    lost: bool,
    told: Vec<u64>,
    acknowledged: Vec<u64>,
    asked: Vec<Option<Answer>>,
    outbound: Outbound,
    wire: VecDeque<Vec<u8>>,
    acks: VecDeque<u64>,
    again: bool,
    rounds: Rounds,
    inbound: Inbound,
    copies: BTreeMap<u32, (Image, u8)>,
}

impl World {
    fn new(seed: u64) -> Self {
        let rounds = Rounds::default();
        let workers = WORKERS as usize;
        Self {
            random: seed,
            own: BTreeMap::new(),
            outlets: vec![VecDeque::new(); workers],
            lost: false,
            told: vec![0; workers],
            acknowledged: vec![0; workers],
            asked: vec![None; workers],
            outbound: Outbound::new(workers, 0),
            wire: VecDeque::new(),
            acks: VecDeque::new(),
            again: false,
            inbound: Inbound::new("a".into(), rounds.clone()),
            rounds,
            copies: BTreeMap::new(),
        }
    }

    fn draw(&mut self, below: u32) -> u32 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) as u32 % below
    }

    /// A session opens, changes or ends.
    fn live(&mut self) {
        let number = self.draw(40);
        let worker = number % WORKERS;
        let place = worker as usize;
        self.told[place] += 1;
        let Image::V4(mut news) = image(number) else { panic!("IPv4") };
        news.halves[0].packets = self.told[place] as u32;
        if self.own.contains_key(&(worker, number)) && self.draw(3) == 0 {
            self.own.remove(&(worker, number));
            news = ImageOf { fate: Fate::Ended, ..news };
        } else {
            self.own.insert((worker, number), Image::V4(news));
        }
        if self.draw(50) == 0 {
            self.lost = true;
        } else {
            self.outlets[place].push_back((self.told[place], Image::V4(news)));
        }
    }

    fn drain(&mut self) {
        if std::mem::take(&mut self.lost) {
            self.outbound.owe();
        }
        for worker in 0..WORKERS as usize {
            while self.asked[worker].is_none()
                && let Some((number, image)) = self.outlets[worker].pop_front()
            {
                self.outbound.news(worker, number, &image);
            }
        }
    }

    /// The worker answers at once; that is heard later.
    fn ask(&mut self) {
        let Some(question) = self.outbound.question() else { return };
        if self.asked[question.worker].is_some() {
            return;
        }
        self.outbound.asked();
        let worker = question.worker as u32;
        let rows = self.own.range((worker, question.cursor as u32)..(worker + 1, 0)).take(SLICE);
        let rows: Vec<_> = rows.map(|((_, number), image)| (*number, *image)).collect();
        let cursor = (rows.len() == SLICE).then(|| u64::from(rows[SLICE - 1].0) + 1);
        self.asked[question.worker] = Some((question, rows.iter().map(|(_, image)| *image).collect(), cursor));
    }

    fn answer(&mut self) {
        let worker = self.draw(WORKERS) as usize;
        if let Some((question, images, cursor)) = self.asked[worker].take() {
            self.outbound.answer(question, &images, cursor);
        }
    }

    fn hear(&mut self) {
        let Some(bytes) = self.wire.pop_front() else { return };
        let (number, step) = self.inbound.frame(&kind(&bytes)).unwrap();
        match step {
            Step::Begin { .. } | Step::Released { .. } => {}
            Step::Take { images, round } => {
                for image in images {
                    let Image::V4(v4) = image else { panic!("IPv4") };
                    match v4.fate {
                        Fate::Open => self.copies.insert(v4.origin.source - 0x0a00_0000, (image, round)),
                        Fate::Ended => self.copies.remove(&(v4.origin.source - 0x0a00_0000)),
                    };
                }
            }
            Step::Purge { round, again, .. } => {
                self.copies.retain(|_, (_, named)| *named == round);
                self.inbound.purged(round);
                self.again |= again;
            }
        }
        self.acks.push_back(number);
    }

    fn acknowledge(&mut self) {
        if std::mem::take(&mut self.again) {
            self.outbound.owe();
        }
        if let Some(number) = self.acks.pop_front() {
            let marks = self.outbound.acknowledged(number).unwrap();
            raise(&mut self.acknowledged, &marks);
        }
    }

    fn step(&mut self) {
        match self.draw(120) {
            0 => {
                self.outbound.down();
                self.cut();
            }
            1..=3 => self.reconnect(),
            4..=30 => self.live(),
            31..=45 => self.drain(),
            46..=60 => self.ask(),
            61..=75 => self.answer(),
            76..=90 => self.wire.extend(self.outbound.frame()),
            91..=105 => self.hear(),
            _ => self.acknowledge(),
        }
    }

    fn reconnect(&mut self) {
        self.cut();
        self.outbound.up();
        self.inbound = Inbound::new("a".into(), self.rounds.clone());
    }

    fn cut(&mut self) {
        self.wire.clear();
        self.acks.clear();
    }

    /// Nothing new comes, and all that is under way arrives.
    fn settle(&mut self) {
        self.reconnect();
        for _ in 0..2000 {
            self.drain();
            self.ask();
            self.answer();
            self.wire.extend(self.outbound.frame());
            self.hear();
            self.acknowledge();
        }
    }
}

#[test]
fn copies_are_what_sessions_are_whatever_got_lost() {
    for seed in 0..300 {
        let mut world = World::new(seed);
        for _ in 0..3 {
            (0..1500).for_each(|_| world.step());
            // Of what was lost last, only the next news say that it counts.
            (0..WORKERS as usize).for_each(|worker| world.told[worker] += 1);
            let bye = ImageOf {
                fate: Fate::Ended,
                ..match image(999) {
                    Image::V4(v4) => v4,
                    Image::V6(_) => panic!("IPv4"),
                }
            };
            for worker in 0..WORKERS as usize {
                world.outlets[worker].push_back((world.told[worker], Image::V4(bye)));
            }
            world.settle();
            let own: Vec<Image> = world.own.values().copied().collect();
            let mut copies: Vec<Image> = world.copies.values().map(|(image, _)| *image).collect();
            copies.sort_by_key(|image| own.iter().position(|own| own == image));
            assert_eq!(copies, own, "seed {seed}");
            assert_eq!(world.acknowledged, world.told, "seed {seed}");
            assert!(world.outbound.in_sync(), "seed {seed}");
        }
    }
}

#[test]
fn what_it_was_told_by_is_the_epoch_of_the_last_round_that_it_has_all_of() {
    let mut outbound = Outbound::new(1, 0);
    let round = |outbound: &mut Outbound, epoch| {
        let question = outbound.question().unwrap();
        outbound.asked();
        outbound.listed_by(question, (epoch, 7));
        outbound.answer(question, &[image(1)], None);
        assert_eq!(say(outbound), ["begin", "1 sessions", "end"]);
        outbound.next - 1
    };
    outbound.go_by(7);
    outbound.up();
    let end = round(&mut outbound, 13);
    assert_eq!((outbound.acknowledged(end - 1), outbound.told_by), (Ok(vec![0]), 0), "not its end");
    assert_eq!((outbound.acknowledged(end), outbound.told_by), (Ok(vec![0]), 13));
    // A round comes to no end, since others serve meanwhile.
    outbound.owe();
    let _ = outbound.question().unwrap();
    assert_eq!(say(&mut outbound), ["begin"]);
    let begin = outbound.next - 1;
    outbound.owe();
    let end = round(&mut outbound, 15);
    assert_eq!(
        (outbound.acknowledged(begin), outbound.told_by),
        (Ok(vec![0]), 0),
        "what it was listed by then may be lost"
    );
    // It has this one, though all is to be told again.
    outbound.owe();
    assert_eq!((outbound.acknowledged(end), outbound.told_by), (Ok(vec![0]), 15));
    // What a link has carried stays there; what is on its way when it breaks may not have come.
    let end = round(&mut outbound, 16);
    outbound.up();
    assert!(outbound.acknowledged(end).is_err());
    assert_eq!(outbound.told_by, 0);
}

#[test]
fn a_round_in_which_shares_move_comes_to_no_end() {
    let mut outbound = Outbound::new(2, 0);
    outbound.go_by(7);
    outbound.up();
    let tell = |outbound: &mut Outbound, listed_by| {
        let question = outbound.question()?;
        outbound.asked();
        outbound.listed_by(question, listed_by);
        outbound.answer(question, &[image(1)], None);
        Some(question)
    };
    // Policy changes who stands in for whom between one worker's answer and the next one's.
    assert!(tell(&mut outbound, (1, 7)).is_some());
    assert!(tell(&mut outbound, (2, 7)).is_some());
    assert_eq!(outbound.sync, Sync::Owed);
    // Workers go by a later view already: it would end what the other gateway has by the earlier one.
    assert!(tell(&mut outbound, (2, 8)).is_some());
    assert_eq!((outbound.sync, outbound.question()), (Sync::Owed, None), "nor does one begin before all go by it");
    outbound.release(8);
    outbound.drained();
    outbound.go_by(8);
    assert!(tell(&mut outbound, (2, 8)).is_some());
    // An answer to what was asked in an earlier round changes nothing.
    outbound.listed_by(Question { round: 1, worker: 1, cursor: 0, begun_by: (7, None) }, (1, 9));
    assert!(tell(&mut outbound, (2, 8)).is_some());
    outbound.drained();
    let said = say(&mut outbound);
    assert_eq!(said[said.len() - 5..], ["begin", "1 sessions", "1 sessions", "end", "released 8"][..]);
    let end = outbound.next - 1;
    assert_eq!((outbound.acknowledged(end).is_ok(), outbound.in_sync(), outbound.told_by), (true, true, 2));
}

/// A round in this epoch with one session; the numbers of its frames.
fn whole_round(outbound: &mut Outbound, epoch: u64) -> [u64; 3] {
    outbound.owe();
    let question = outbound.question().unwrap();
    outbound.asked();
    outbound.listed_by(question, (epoch, 7));
    outbound.answer(question, &[image(1)], None);
    assert_eq!(say(outbound), ["begin", "1 sessions", "end"]);
    let end = outbound.next - 1;
    [end - 2, end - 1, end]
}

/// The other gateway acknowledges a frame; in which epoch it was told all.
fn acknowledge(outbound: &mut Outbound, number: u64, refuses: bool) -> u64 {
    if refuses {
        outbound.refused(number);
    }
    assert!(outbound.acknowledged(number).is_ok());
    outbound.told_by
}

#[test]
fn who_had_no_place_for_something_was_not_told_all_until_a_whole_round_finds_its_place() {
    let mut outbound = Outbound::new(1, 0);
    outbound.go_by(7);
    outbound.up();
    let mut round = |refuses: bool| {
        let numbers = whole_round(&mut outbound, 9);
        numbers.map(|number| acknowledge(&mut outbound, number, refuses && number == numbers[1]))[2]
    };
    assert_eq!([round(false), round(true), round(true), round(false)], [9, 0, 0, 9]);
    // News, too.
    outbound.news(0, 1, &image(2));
    assert_eq!(say(&mut outbound), ["1 sessions"]);
    let last = outbound.next - 1;
    assert_eq!(acknowledge(&mut outbound, last, true), 0);
}

#[test]
fn what_is_refused_counts_for_the_round_that_it_is_of() {
    let mut outbound = Outbound::new(1, 0);
    outbound.go_by(7);
    outbound.up();
    let [begin, session, end] = whole_round(&mut outbound, 8);
    assert_eq!([acknowledge(&mut outbound, begin, false), acknowledge(&mut outbound, session, true)], [0, 0]);
    // The next round has begun before the end of this one is acknowledged.
    let next = whole_round(&mut outbound, 9);
    assert_eq!(acknowledge(&mut outbound, end, false), 0, "it lacks something of that one");
    assert_eq!(next.map(|number| acknowledge(&mut outbound, number, false)), [0, 0, 9]);
}

#[test]
fn of_a_round_that_comes_to_no_end_nobody_knows_what_has_arrived() {
    let mut outbound = Outbound::new(1, 3);
    outbound.go_by(7);
    outbound.up();
    let numbers = whole_round(&mut outbound, 9);
    assert_eq!(numbers.map(|number| acknowledge(&mut outbound, number, false))[2], 9);
    outbound.owe();
    assert_eq!(outbound.told_by, 9, "nothing was on its way");
    assert!(outbound.question().is_some());
    outbound.asked();
    outbound.up();
    assert_eq!(outbound.told_by, 3, "but what a former process has told");
}
