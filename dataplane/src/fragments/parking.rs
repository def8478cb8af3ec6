//! Frames that wait for the first fragment of their datagram, in chains through a fixed number of places.

use bytemuck::{Pod, Zeroable};

use crate::io::Received;

/// The frames of one datagram, in the order of their arrival: the numbers of the first and the last place, from 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Chain {
    head: u32,
    tail: u32,
}

/// What waits in a place.
#[derive(Debug)]
pub enum Waiting {
    /// A frame that was parked in an earlier turn, or in this one when its batch was over.
    Frame(Received),
    /// A packet of the batch in hand: its number there. Its frame hasn't been moved yet.
    InBatch(u8),
}

#[derive(Debug)]
struct Place {
    waiting: Option<Waiting>,
    /// The next place of the same chain, or the next free one; from 1.
    next: u32,
}

/// All frames that wait, and those that have waited in vain and must be fetched.
#[derive(Debug)]
pub(super) struct Parking {
    places: Vec<Place>,
    free: u32,
    held: u32,
    lost: Chain,
}

impl Parking {
    /// Places for `count` frames.
    pub(super) fn new(count: u32) -> Self {
        let place = |number| Place { waiting: None, next: if number == count { 0 } else { number + 1 } };
        Self { places: (1..=count).map(place).collect(), free: count.min(1), held: 0, lost: Chain::default() }
    }

    /// Frames here, waiting or lost.
    pub(super) fn held(&self) -> u32 {
        self.held
    }

    #[inline]
    fn place(&mut self, number: u32) -> Option<&mut Place> {
        self.places.get_mut((number as usize).checked_sub(1)?)
    }

    /// Appends a place to a chain, for a packet of the batch in hand; `None` when every place is taken.
    pub(super) fn reserve(&mut self, chain: &mut Chain, packet: u8) -> Option<u32> {
        let number = self.free;
        let place = self.place(number)?;
        let next_free = place.next;
        *place = Place { waiting: Some(Waiting::InBatch(packet)), next: 0 };
        self.free = next_free;
        self.append(chain, Chain { head: number, tail: number });
        Some(number)
    }

    /// Puts the frame into the place that was reserved for it, which may be a lost one by now.
    pub(super) fn fill(&mut self, number: u32, received: Received) {
        let Some(place) = self.place(number) else { unreachable!("nothing was reserved") };
        debug_assert!(matches!(place.waiting, Some(Waiting::InBatch(_))), "filled once");
        place.waiting = Some(Waiting::Frame(received));
        self.held += 1;
    }

    /// Takes the first one out of a chain.
    pub(super) fn pop(&mut self, chain: &mut Chain) -> Option<Waiting> {
        let number = chain.head;
        let free = self.free;
        let place = self.place(number)?;
        let waiting = place.waiting.take();
        chain.head = std::mem::replace(&mut place.next, free);
        if chain.head == 0 {
            chain.tail = 0;
        }
        self.free = number;
        self.held -= u32::from(matches!(waiting, Some(Waiting::Frame(_))));
        waiting
    }

    /// Gives a chain up; its frames are to be fetched with [`Parking::pop_lost`].
    pub(super) fn lose(&mut self, chain: Chain) {
        let mut lost = self.lost;
        self.append(&mut lost, chain);
        self.lost = lost;
    }

    /// Takes out the frame that was given up first; none while it is in the batch in hand.
    pub(super) fn pop_lost(&mut self) -> Option<Received> {
        let mut lost = self.lost;
        if matches!(self.place(lost.head)?.waiting, Some(Waiting::InBatch(_))) {
            return None;
        }
        let waiting = self.pop(&mut lost);
        self.lost = lost;
        match waiting? {
            Waiting::Frame(received) => Some(received),
            Waiting::InBatch(_) => None,
        }
    }

    fn append(&mut self, chain: &mut Chain, more: Chain) {
        if more.head == 0 {
            return;
        }
        match self.place(chain.tail) {
            Some(last) => last.next = more.head,
            None => chain.head = more.head,
        }
        chain.tail = more.tail;
    }
}

#[cfg(test)]
mod tests {
    use vipgate_mem::Arena;

    use super::*;
    use crate::io::InterfaceId;

    fn frames(count: u8) -> impl Iterator<Item = Received> {
        let frames = Arena::allocate(count.into(), 256).unwrap().frames();
        frames.into_iter().zip(0..).map(|(frame, n)| Received::new(frame, InterfaceId(n)))
    }

    fn pop(parking: &mut Parking, chain: &mut Chain) -> Option<Received> {
        parking.pop(chain).map(|waiting| match waiting {
            Waiting::Frame(received) => received,
            Waiting::InBatch(packet) => panic!("packet {packet} was parked"),
        })
    }

    fn drain(parking: &mut Parking, chain: &mut Chain) -> Vec<u8> {
        std::iter::from_fn(|| pop(parking, chain)).map(|received| received.interface.0).collect()
    }

    fn push(parking: &mut Parking, chain: &mut Chain, received: Received) -> Result<(), Received> {
        match parking.reserve(chain, 0) {
            Some(place) => parking.fill(place, received),
            None => return Err(received),
        }
        Ok(())
    }

    #[test]
    fn chains_keep_their_order_and_every_frame_comes_out_once() {
        let mut parking = Parking::new(6);
        let mut chains = [Chain::default(); 2];
        let mut more = frames(7);
        for i in 0..6 {
            push(&mut parking, &mut chains[i % 2], more.next().unwrap()).unwrap();
        }
        let refused = push(&mut parking, &mut chains[0], more.next().unwrap()).unwrap_err();
        assert_eq!((refused.interface.0, parking.held()), (6, 6));
        assert_eq!(drain(&mut parking, &mut chains[1]), [1, 3, 5]);
        assert_eq!((chains[1], parking.held()), (Chain::default(), 3));
        push(&mut parking, &mut chains[1], refused).unwrap();
        parking.lose(chains[0]);
        parking.lose(Chain::default());
        parking.lose(chains[1]);
        assert_eq!(parking.held(), 4, "a frame that is lost has still to be fetched");
        let lost: Vec<u8> = std::iter::from_fn(|| parking.pop_lost()).map(|received| received.interface.0).collect();
        assert_eq!(lost, [0, 2, 4, 6]);
        assert_eq!(parking.held(), 0);
    }

    #[test]
    fn a_place_is_used_again_and_again() {
        let mut parking = Parking::new(2);
        let mut chain = Chain::default();
        let mut received = frames(1).next().unwrap();
        for _ in 0..100 {
            push(&mut parking, &mut chain, received).unwrap();
            received = pop(&mut parking, &mut chain).unwrap();
        }
        assert!(push(&mut Parking::new(0), &mut chain, received).is_err());
    }

    #[test]
    fn what_is_in_the_batch_has_its_place_among_those_that_wait_and_is_not_swept_before_it_is_there() {
        let mut parking = Parking::new(4);
        let (mut chain, mut other) = (Chain::default(), Chain::default());
        let mut more = frames(4);
        push(&mut parking, &mut chain, more.next().unwrap()).unwrap();
        assert!(parking.reserve(&mut chain, 9).is_some());
        let place = parking.reserve(&mut other, 10).unwrap();
        assert_eq!(parking.held(), 1);
        assert!(matches!(parking.pop(&mut chain), Some(Waiting::Frame(_))));
        assert!(matches!(parking.pop(&mut chain), Some(Waiting::InBatch(9))));
        parking.lose(other);
        assert!(parking.pop_lost().is_none());
        parking.fill(place, more.next().unwrap());
        assert_eq!((parking.pop_lost().unwrap().interface.0, parking.held()), (1, 0));
    }
}
