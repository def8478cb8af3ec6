//! Buffer of fragments that wait for the first fragment of their datagram: per-datagram FIFO queues in a fixed number
//! of slots.

use bytemuck::{Pod, Zeroable};

use crate::io::Received;

/// FIFO queue of one datagram's fragments: the numbers of the first and the last slot, from 1; 0 if empty.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct FragmentQueue {
    head: u32,
    tail: u32,
}

#[derive(Debug)]
pub enum BufferedFragment {
    /// A frame, stored when its batch ended.
    Frame(Received),
    /// A packet of the current batch, by its number there. Its frame hasn't been moved yet.
    InBatch(u8),
}

#[derive(Debug)]
struct Slot {
    waiting: Option<BufferedFragment>,
    /// The next slot of the same queue, or the next free one; from 1.
    next: u32,
}

/// All buffered frames; those of dropped datagrams are in the `lost` queue until they are returned.
#[derive(Debug)]
pub(super) struct FragmentBuffer {
    slots: Vec<Slot>,
    free: u32,
    frames: u32,
    lost: FragmentQueue,
}

impl FragmentBuffer {
    /// Capacity for `count` frames.
    pub(super) fn new(count: u32) -> Self {
        let slot = |number| Slot { waiting: None, next: if number == count { 0 } else { number + 1 } };
        Self { slots: (1..=count).map(slot).collect(), free: count.min(1), frames: 0, lost: FragmentQueue::default() }
    }

    /// Frames in the buffer, including lost ones.
    pub(super) fn frames(&self) -> u32 {
        self.frames
    }

    #[inline]
    fn slot(&mut self, number: u32) -> Option<&mut Slot> {
        self.slots.get_mut((number as usize).checked_sub(1)?)
    }

    /// Appends a slot to a queue, for a packet of the current batch; `None` if all slots are in use.
    pub(super) fn reserve(&mut self, chain: &mut FragmentQueue, packet: u8) -> Option<u32> {
        let number = self.free;
        let slot = self.slot(number)?;
        let next_free = slot.next;
        *slot = Slot { waiting: Some(BufferedFragment::InBatch(packet)), next: 0 };
        self.free = next_free;
        self.append(chain, FragmentQueue { head: number, tail: number });
        Some(number)
    }

    /// Stores the frame in its reserved slot; its datagram may have been dropped meanwhile.
    pub(super) fn fill(&mut self, number: u32, received: Received) {
        let Some(slot) = self.slot(number) else { unreachable!("slot {number} wasn't reserved") };
        debug_assert!(matches!(slot.waiting, Some(BufferedFragment::InBatch(_))), "slot filled twice");
        slot.waiting = Some(BufferedFragment::Frame(received));
        self.frames += 1;
    }

    /// Takes the first fragment out of a queue.
    pub(super) fn pop(&mut self, chain: &mut FragmentQueue) -> Option<BufferedFragment> {
        let number = chain.head;
        let free = self.free;
        let slot = self.slot(number)?;
        let waiting = slot.waiting.take();
        chain.head = std::mem::replace(&mut slot.next, free);
        if chain.head == 0 {
            chain.tail = 0;
        }
        self.free = number;
        self.frames -= u32::from(matches!(waiting, Some(BufferedFragment::Frame(_))));
        waiting
    }

    /// Moves the queue of a dropped datagram to the lost frames, which [`FragmentBuffer::pop_lost`] returns.
    pub(super) fn lose(&mut self, chain: FragmentQueue) {
        let mut lost = self.lost;
        self.append(&mut lost, chain);
        self.lost = lost;
    }

    /// Takes out the oldest lost frame; `None` while that is still in the current batch.
    pub(super) fn pop_lost(&mut self) -> Option<Received> {
        let mut lost = self.lost;
        if matches!(self.slot(lost.head)?.waiting, Some(BufferedFragment::InBatch(_))) {
            return None;
        }
        let waiting = self.pop(&mut lost);
        self.lost = lost;
        match waiting? {
            BufferedFragment::Frame(received) => Some(received),
            BufferedFragment::InBatch(_) => None,
        }
    }

    fn append(&mut self, chain: &mut FragmentQueue, more: FragmentQueue) {
        if more.head == 0 {
            return;
        }
        match self.slot(chain.tail) {
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
    use crate::flow::ids::InterfaceId;

    fn frames(count: u8) -> impl Iterator<Item = Received> {
        let frames = Arena::allocate(count.into(), 256).unwrap().frames();
        frames.into_iter().zip(0..).map(|(frame, n)| Received::new(frame, InterfaceId(n)))
    }

    fn pop(buffer: &mut FragmentBuffer, chain: &mut FragmentQueue) -> Option<Received> {
        buffer.pop(chain).map(|waiting| match waiting {
            BufferedFragment::Frame(received) => received,
            BufferedFragment::InBatch(packet) => panic!("packet {packet} was parked"),
        })
    }

    fn drain(buffer: &mut FragmentBuffer, chain: &mut FragmentQueue) -> Vec<u8> {
        std::iter::from_fn(|| pop(buffer, chain)).map(|received| received.interface.0).collect()
    }

    fn push(buffer: &mut FragmentBuffer, chain: &mut FragmentQueue, received: Received) -> Result<(), Received> {
        match buffer.reserve(chain, 0) {
            Some(slot) => buffer.fill(slot, received),
            None => return Err(received),
        }
        Ok(())
    }

    #[test]
    fn queues_keep_their_order_and_every_frame_is_returned_once() {
        let mut buffer = FragmentBuffer::new(6);
        let mut chains = [FragmentQueue::default(); 2];
        let mut more = frames(7);
        for i in 0..6 {
            push(&mut buffer, &mut chains[i % 2], more.next().unwrap()).unwrap();
        }
        let rejected = push(&mut buffer, &mut chains[0], more.next().unwrap()).unwrap_err();
        assert_eq!((rejected.interface.0, buffer.frames()), (6, 6));
        assert_eq!(drain(&mut buffer, &mut chains[1]), [1, 3, 5]);
        assert_eq!((chains[1], buffer.frames()), (FragmentQueue::default(), 3));
        push(&mut buffer, &mut chains[1], rejected).unwrap();
        buffer.lose(chains[0]);
        buffer.lose(FragmentQueue::default());
        buffer.lose(chains[1]);
        assert_eq!(buffer.frames(), 4, "lost frames stay in the buffer until they are popped");
        let lost: Vec<u8> = std::iter::from_fn(|| buffer.pop_lost()).map(|received| received.interface.0).collect();
        assert_eq!(lost, [0, 2, 4, 6]);
        assert_eq!(buffer.frames(), 0);
    }

    #[test]
    fn slots_are_reused() {
        let mut buffer = FragmentBuffer::new(2);
        let mut chain = FragmentQueue::default();
        let mut received = frames(1).next().unwrap();
        for _ in 0..100 {
            push(&mut buffer, &mut chain, received).unwrap();
            received = pop(&mut buffer, &mut chain).unwrap();
        }
        assert!(push(&mut FragmentBuffer::new(0), &mut chain, received).is_err());
    }

    #[test]
    fn a_packet_of_the_batch_keeps_its_queue_position_and_is_not_expired_before_its_frame_is_stored() {
        let mut buffer = FragmentBuffer::new(4);
        let (mut chain, mut other) = (FragmentQueue::default(), FragmentQueue::default());
        let mut more = frames(4);
        push(&mut buffer, &mut chain, more.next().unwrap()).unwrap();
        assert!(buffer.reserve(&mut chain, 9).is_some());
        let slot = buffer.reserve(&mut other, 10).unwrap();
        assert_eq!(buffer.frames(), 1);
        assert!(matches!(buffer.pop(&mut chain), Some(BufferedFragment::Frame(_))));
        assert!(matches!(buffer.pop(&mut chain), Some(BufferedFragment::InBatch(9))));
        buffer.lose(other);
        assert!(buffer.pop_lost().is_none());
        buffer.fill(slot, more.next().unwrap());
        assert_eq!((buffer.pop_lost().unwrap().interface.0, buffer.frames()), (1, 0));
    }
}
