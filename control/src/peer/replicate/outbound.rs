//! What one gateway is told: news of sessions as they come, and all of them again when something could be missing. Bounded: what
//! doesn't fit is dropped, and told again by telling all.
//!
//! Telling all begins when little is on its way, and asks worker after worker for slices. What a worker says while it is asked must
//! be taken up after its answer: an answer that came behind later news would undo it.

use std::collections::VecDeque;

use vipgate_dataplane::command::MOST_TAKEN;
use vipgate_dataplane::session::image::Image;

use super::WINDOW;
use crate::peer::frame::{self, Broken};
use crate::peer::proto::frame::Kind;
use crate::peer::proto::{Released, Session, Sessions, SyncBegin, SyncEnd};
use crate::peer::session;

/// Bytes that wait for a gateway at most.
pub(super) const MOST_QUEUED: usize = 4 << 20;
/// Slices of all sessions are asked for while no more than this waits, so that news find room.
const ROOM: usize = 1 << 20;

/// The highest number of each worker that something is about; 0: none.
type Marks = Vec<u64>;

/// How far telling all sessions is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sync {
    /// It has to be done.
    Owed,
    /// Slices are asked for.
    Telling { worker: usize, cursor: u64, asked: bool },
    /// All is queued or on its way, up to the end of this round.
    Told,
    /// The other gateway has everything.
    Done,
}

/// A frame that waits or is on its way.
#[derive(Debug)]
struct Entry {
    number: u64,
    /// Its bytes, until they are sent.
    bytes: Vec<u8>,
    what: What,
}

#[derive(Debug)]
enum What {
    Sessions {
        marks: Marks,
        count: u64,
    },
    Begin,
    /// Of the round that began with the frame `begin`.
    End {
        round: u32,
        begin: u64,
        epoch: u64,
        marks: Marks,
    },
    Released {
        view: u64,
    },
}

/// What is asked of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Question {
    pub(super) round: u32,
    pub(super) worker: usize,
    pub(super) cursor: u64,
    /// The view by which this round began, and the replication epoch of the answers before.
    pub(super) begun_by: (u64, Option<u64>),
}

/// One gateway, as one that is told.
#[derive(Debug)]
pub(super) struct Outbound {
    workers: usize,
    linked: bool,
    /// The number of the next frame; they begin anew with each link.
    next: u64,
    gathered: Vec<Session>,
    gathered_marks: Marks,
    queue: VecDeque<Entry>,
    queued: usize,
    on_the_way: VecDeque<Entry>,
    sync: Sync,
    round: u32,
    /// The view that we go by.
    view: u64,
    /// The one by which this round began.
    begun_by: u64,
    /// One that workers go by already, before a round did that had begun by an older one: none begins before that.
    ahead: u64,
    /// The replication epoch by which workers have told of this round, once one has.
    epoch: Option<u64>,
    /// That of the last round that it has all of: what it was to have by then, it has. Less where it may lack something.
    pub(super) told_by: u64,
    /// What it was when there was nothing but what a former process had told: it never falls below that, since of what that process has left
    /// nobody knows what has become. What is this process's own has come to it in a later epoch.
    told_before: u64,
    /// The number of the frame by which this round began, and of the last one that it had no place for.
    begin: u64,
    last_refused: u64,
    /// Numbers of what was dropped: the next end of a round makes up for it.
    missed: Marks,
    /// The same of the round that is being told.
    covered: Marks,
    /// What is to be released: the view, and whether it is queued.
    release: Option<(u64, bool)>,
    pub(super) released: Option<u64>,
    pub(super) sent: u64,
    pub(super) resyncs: u64,
}

impl Outbound {
    /// Nothing was told yet but what a former process of this gateway told, in this replication epoch at the latest.
    pub(super) fn new(workers: usize, told_by: u64) -> Self {
        Self {
            workers,
            linked: false,
            next: 1,
            gathered: Vec::new(),
            gathered_marks: vec![0; workers],
            queue: VecDeque::new(),
            queued: 0,
            on_the_way: VecDeque::new(),
            sync: Sync::Owed,
            round: 0,
            view: 0,
            begun_by: 0,
            ahead: 0,
            epoch: None,
            told_by,
            told_before: told_by,
            begin: 0,
            last_refused: 0,
            missed: vec![0; workers],
            covered: vec![0; workers],
            release: None,
            released: None,
            sent: 0,
            resyncs: 0,
        }
    }

    /// The view that we go by from now on.
    pub(super) fn go_by(&mut self, view: u64) {
        self.view = view;
    }

    /// Bytes that wait.
    pub(super) fn queued(&self) -> usize {
        self.queued
    }

    /// Whether it has everything.
    pub(super) fn in_sync(&self) -> bool {
        self.sync == Sync::Done
    }

    /// There is a link: all is told, since nobody knows what it has.
    pub(super) fn up(&mut self) {
        self.down();
        self.linked = true;
        (self.next, self.last_refused) = (1, 0);
    }

    /// The other gateway is another process by now: what the former one was told, it may lack.
    pub(super) fn forget_told(&mut self) {
        self.told_by = 0;
    }

    /// There is none any more.
    pub(super) fn down(&mut self) {
        self.owe();
        for entry in std::mem::take(&mut self.on_the_way) {
            self.miss(entry.what);
        }
        self.linked = false;
    }

    /// All must be told again: what waits is told by that.
    pub(super) fn owe(&mut self) {
        if matches!(self.sync, Sync::Telling { .. } | Sync::Told) {
            // Workers take for told what they have listed, and what of it arrives nobody knows before the round's end has.
            self.told_by = self.told_by.min(self.told_before);
        }
        self.sync = Sync::Owed;
        self.gathered.clear();
        let marks = std::mem::replace(&mut self.gathered_marks, vec![0; self.workers]);
        raise(&mut self.missed, &marks);
        let covered = std::mem::replace(&mut self.covered, vec![0; self.workers]);
        raise(&mut self.missed, &covered);
        self.queued = 0;
        for entry in std::mem::take(&mut self.queue) {
            self.miss(entry.what);
        }
    }

    fn miss(&mut self, what: What) {
        match what {
            What::Sessions { marks, .. } | What::End { marks, .. } => raise(&mut self.missed, &marks),
            What::Begin => {}
            What::Released { view } => {
                let view = self.release.map_or(view, |(owed, _)| owed.max(view));
                self.release = Some((view, false));
            }
        }
    }

    /// A worker's news.
    pub(super) fn news(&mut self, worker: usize, number: u64, image: &Image) {
        if !self.linked || self.sync == Sync::Owed {
            self.missed[worker] = self.missed[worker].max(number);
            self.sync = Sync::Owed;
            return;
        }
        self.gathered_marks[worker] = self.gathered_marks[worker].max(number);
        self.gather(image);
        if self.queued > MOST_QUEUED {
            self.owe();
        }
    }

    fn gather(&mut self, image: &Image) {
        self.gathered.push(session::encode(image));
        if self.gathered.len() == MOST_TAKEN {
            self.flush();
        }
    }

    fn flush(&mut self) {
        if self.gathered.is_empty() {
            return;
        }
        let sessions = std::mem::take(&mut self.gathered);
        let count = sessions.len() as u64;
        let marks = std::mem::replace(&mut self.gathered_marks, vec![0; self.workers]);
        self.queue(What::Sessions { marks, count }, |number| Kind::Sessions(Sessions { number, sessions }));
    }

    fn queue(&mut self, what: What, kind: impl FnOnce(u64) -> Kind) {
        let number = self.next;
        self.next += 1;
        let bytes = frame::encode(kind(number));
        self.queued += bytes.len();
        self.queue.push_back(Entry { number, bytes, what });
    }

    /// What to ask a worker for now. Until it is answered, that worker's news must wait.
    pub(super) fn question(&mut self) -> Option<Question> {
        if !self.linked {
            return None;
        }
        if self.sync == Sync::Owed && self.on_the_way.len() < WINDOW / 2 && self.view >= self.ahead {
            self.round = self.round.wrapping_add(1);
            self.resyncs += 1;
            self.covered = std::mem::replace(&mut self.missed, vec![0; self.workers]);
            (self.begun_by, self.epoch, self.begin) = (self.view, None, self.next);
            let (round, view) = (self.round, self.view);
            self.queue(What::Begin, |number| Kind::SyncBegin(SyncBegin { number, round, view }));
            self.sync = Sync::Telling { worker: 0, cursor: 0, asked: false };
            if self.workers == 0 {
                self.end();
            }
        }
        match self.sync {
            Sync::Telling { worker, cursor, asked: false } if self.queued < ROOM => {
                Some(Question { round: self.round, worker, cursor, begun_by: (self.begun_by, self.epoch) })
            }
            Sync::Telling { .. } | Sync::Owed | Sync::Told | Sync::Done => None,
        }
    }

    /// The worker is being asked.
    pub(super) fn asked(&mut self) {
        if let Sync::Telling { asked, .. } = &mut self.sync {
            *asked = true;
        }
    }

    /// By which replication epoch a worker answers, and by a view since which the same gateways serve. Whose shares are has to be the same
    /// in all of a round, and as its view says: it would have the other gateway forget what it names by another one. Else all is owed
    /// again.
    pub(super) fn listed_by(&mut self, question: Question, (epoch, since): (u64, u64)) {
        if question.round != self.round || !matches!(self.sync, Sync::Telling { .. }) {
            return;
        }
        let is_whole = *self.epoch.get_or_insert(epoch) == epoch;
        if !is_whole || since > self.begun_by {
            self.ahead = since;
            self.owe();
        }
    }

    /// A worker's answer, and where to go on with it.
    pub(super) fn answer(&mut self, question: Question, images: &[Image], cursor: Option<u64>) {
        let asked = Sync::Telling { worker: question.worker, cursor: question.cursor, asked: true };
        if question.round != self.round || self.sync != asked {
            return;
        }
        // Frames have the order of events: news that came before.
        self.flush();
        for image in images {
            self.gather(image);
        }
        self.flush();
        match cursor {
            Some(cursor) => self.sync = Sync::Telling { worker: question.worker, cursor, asked: false },
            None if question.worker + 1 < self.workers => {
                self.sync = Sync::Telling { worker: question.worker + 1, cursor: 0, asked: false };
            }
            None => self.end(),
        }
    }

    fn end(&mut self) {
        let marks = std::mem::replace(&mut self.covered, vec![0; self.workers]);
        let (round, begin, epoch) = (self.round, self.begin, self.epoch.unwrap_or(0));
        self.queue(What::End { round, begin, epoch, marks }, |number| Kind::SyncEnd(SyncEnd { number, round }));
        self.sync = Sync::Told;
    }

    /// What the view with this number takes from us is to be released, as soon as all is told.
    pub(super) fn release(&mut self, view: u64) {
        if self.released.is_none_or(|released| released < view) && self.release.is_none_or(|(owed, _)| owed < view) {
            self.release = Some((view, false));
        }
    }

    /// All news that there were have been taken up.
    pub(super) fn drained(&mut self) {
        let told = match self.sync {
            Sync::Told | Sync::Done => true,
            Sync::Owed | Sync::Telling { .. } => false,
        };
        if let (true, true, Some((view, false))) = (self.linked, told, self.release) {
            self.flush();
            self.release = Some((view, true));
            self.queue(What::Released { view }, |number| Kind::Released(Released { number, view }));
        }
    }

    /// The next frame to send.
    pub(super) fn frame(&mut self) -> Option<Vec<u8>> {
        if !self.linked || self.on_the_way.len() >= WINDOW {
            return None;
        }
        if self.queue.is_empty() {
            // Only now: while others wait, there is time to gather more.
            self.flush();
        }
        let mut entry = self.queue.pop_front()?;
        let bytes = std::mem::take(&mut entry.bytes);
        self.queued -= bytes.len();
        if let What::Sessions { count, .. } = entry.what {
            self.sent += count;
        }
        self.on_the_way.push_back(entry);
        Some(bytes)
    }

    /// The other gateway had no place for something in the frame with this number. It asks for all again when it may have some; until a
    /// round that began later has come to its end, nobody may rely on its having been told.
    pub(super) fn refused(&mut self, number: u64) {
        self.last_refused = self.last_refused.max(number);
        self.told_by = self.told_by.min(self.told_before);
    }

    /// The other gateway has everything up to a number: says which numbers of which workers these are.
    pub(super) fn acknowledged(&mut self, number: u64) -> Result<Vec<u64>, Broken> {
        if self.on_the_way.back().is_none_or(|last| last.number < number) {
            return Err(Broken::Protocol("it acknowledges what it wasn't sent"));
        }
        let mut all = vec![0; self.workers];
        while let Some(entry) = self.on_the_way.pop_front_if(|entry| entry.number <= number) {
            match entry.what {
                What::Sessions { marks, .. } => raise(&mut all, &marks),
                What::Begin => {}
                What::End { round, begin, epoch, marks } => {
                    raise(&mut all, &marks);
                    // Also if all is owed again: it has what it was to have in that epoch.
                    if self.last_refused < begin {
                        self.told_by = self.told_by.max(epoch);
                    }
                    if round == self.round && self.sync == Sync::Told {
                        self.sync = Sync::Done;
                    }
                }
                What::Released { view } => {
                    self.released = Some(view);
                    self.release = self.release.filter(|(owed, _)| *owed > view);
                }
            }
        }
        Ok(all)
    }
}

fn raise(to: &mut Marks, by: &[u64]) {
    to.iter_mut().zip(by).for_each(|(to, by)| *to = (*to).max(*by));
}

#[cfg(test)]
mod tests;
