//! What one gateway tells: in which order it takes effect, and which round copies are of.

use std::sync::Arc;

use vipgate_dataplane::command::MOST_TAKEN;
use vipgate_dataplane::session::image::Image;

use super::rounds::{Round, Rounds};
use crate::peer::frame::Broken;
use crate::peer::proto::frame::Kind;
use crate::peer::session;

/// What a frame asks for. When it is done, its number is acknowledged.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Nothing: it says that a round begins.
    Begin { view: u64 },
    /// Copies are to be taken in.
    Take { images: Vec<Image>, round: u8 },
    /// Copies that this round, by this view, hasn't named are to be forgotten. Then everything is here, and nothing else, or all must be
    /// told `again`.
    Purge { round: u8, view: u64, again: bool },
    /// The other gateway has let go of what a view takes from it.
    Released { view: u64 },
}

/// One link's sequence of frames.
#[derive(Debug)]
pub(crate) struct Inbound {
    peer: Arc<str>,
    rounds: Rounds,
    last: u64,
    /// The one that copies are marked with: a link begins with one.
    round: Option<Round>,
    /// What the other gateway calls it, until its end, and the view that it goes by.
    telling: Option<(u32, u64)>,
}

impl Inbound {
    pub(crate) fn new(peer: Arc<str>, rounds: Rounds) -> Self {
        Self { peer, rounds, last: 0, round: None, telling: None }
    }

    /// What a frame asks for, and its number.
    pub(crate) fn frame(&mut self, kind: &Kind) -> Result<(u64, Step), Broken> {
        let (number, step) = match kind {
            Kind::Sessions(frame) => {
                if frame.sessions.len() > MOST_TAKEN {
                    return Err(Broken::Protocol("it sends more sessions at a time than it may"));
                }
                let images: Result<Vec<_>, _> = frame.sessions.iter().map(session::decode).collect();
                let images = images?.into_iter().flatten().collect();
                let round = self.round.ok_or(Broken::Protocol("it tells news before it has told all"))?;
                (frame.number, Step::Take { images, round: round.mark })
            }
            Kind::SyncBegin(frame) => {
                self.telling = Some((frame.round, frame.view));
                self.round = Some(self.rounds.begin(&self.peer));
                (frame.number, Step::Begin { view: frame.view })
            }
            Kind::SyncEnd(frame) => {
                let begun = self.telling.take().filter(|(round, _)| *round == frame.round);
                let (Some((_, view)), Some(round)) = (begun, self.round) else {
                    return Err(Broken::Protocol("it ends a round that it didn't begin"));
                };
                (frame.number, Step::Purge { round: round.mark, view, again: round.blurred })
            }
            Kind::Released(frame) => (frame.number, Step::Released { view: frame.view }),
            Kind::Hello(_)
            | Kind::Farewell(_)
            | Kind::Beat(_)
            | Kind::Echo(_)
            | Kind::Ack(_)
            | Kind::Hearsay(_)
            | Kind::SyncRequest(_) => {
                return Err(Broken::Protocol("it numbers what has no number"));
            }
        };
        if number <= self.last {
            return Err(Broken::Protocol("its numbers don't ascend"));
        }
        self.last = number;
        Ok((number, step))
    }

    /// Copies that this round hasn't named are forgotten.
    pub(crate) fn purged(&self, round: u8) {
        self.rounds.end(&self.peer, round);
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::proto::{Sessions, SyncBegin, SyncEnd};
    use super::super::super::tests::image;
    use super::*;

    fn sessions(number: u64) -> Kind {
        Kind::Sessions(Sessions { number, sessions: vec![session::encode(&image(number as u32))] })
    }

    fn inbound() -> Inbound {
        Inbound::new(Arc::from("a"), Rounds::default())
    }

    #[test]
    fn news_within_a_round_are_of_it_and_so_are_those_after_it() {
        let mut inbound = inbound();
        let begin = |number, round| Kind::SyncBegin(SyncBegin { number, round, view: 7 });
        let end = |number, round| Kind::SyncEnd(SyncEnd { number, round });
        let frames = [begin(1, 9), sessions(2), end(5, 9), sessions(6), begin(7, 10), sessions(8), end(9, 10)];
        let steps = frames.map(|kind| {
            let (_, step) = inbound.frame(&kind).unwrap();
            if let Step::Purge { round, .. } = step {
                inbound.purged(round);
            }
            step
        });
        let take = |number, round| Step::Take { images: vec![image(number)], round };
        let purge = |round| Step::Purge { round, view: 7, again: false };
        let begun = || Step::Begin { view: 7 };
        assert_eq!(steps, [begun(), take(2, 1), purge(1), take(6, 1), begun(), take(8, 2), purge(2)]);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let begun = || {
            let mut inbound = inbound();
            inbound.frame(&Kind::SyncBegin(SyncBegin { number: 3, round: 1, view: 0 })).unwrap();
            inbound
        };
        assert!(inbound().frame(&sessions(1)).is_err(), "not all was told yet");
        assert!(begun().frame(&sessions(3)).is_err(), "a number again");
        assert!(begun().frame(&Kind::SyncEnd(SyncEnd { number: 4, round: 2 })).is_err(), "another round");
        let many = vec![session::encode(&image(1)); MOST_TAKEN + 1];
        assert!(begun().frame(&Kind::Sessions(Sessions { number: 4, sessions: many })).is_err(), "too many");
        assert!(begun().frame(&Kind::SyncEnd(SyncEnd { number: 4, round: 1 })).is_ok());
    }
}
