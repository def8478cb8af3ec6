//! Packet order: distribution of packets over established sessions.

use clap::ValueEnum;
use vipgate_dataplane::flow::tuple::HashKey;

/// Consecutive packets of one session in a train.
const TRAIN_LENGTH: u64 = 8;

/// Distribution of packets over sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Order {
    /// Uniform over all sessions: the worst case for caches
    Uniform,
    /// Zipf: the n-th most popular session gets 1/n of the packets of the first one
    Zipf,
    /// Trains of eight packets of a session
    Train,
}

/// Draws the session of each packet.
#[derive(Debug)]
pub(crate) struct SessionPicker {
    order: Order,
    sessions: u32,
    drawn: u64,
    random: HashKey,
}

impl SessionPicker {
    pub(crate) fn new(order: Order, sessions: u32) -> Self {
        Self { order, sessions, drawn: 0, random: HashKey::fixed() }
    }

    /// The session of the next packet, and a random number for other choices.
    pub(crate) fn next(&mut self) -> (u32, u64) {
        self.drawn += 1;
        let fresh = self.random.draw(self.drawn);
        let sessions = u64::from(self.sessions);
        let number = match self.order {
            Order::Uniform => ((fresh & 0xffff_ffff) * sessions) >> 32,
            Order::Zipf => {
                let share = (fresh & 0xffff_ffff) as f64 / f64::from(u32::MAX);
                let rank = ((sessions as f64 + 1.0).powf(share).floor() as i64).cast_unsigned().clamp(1, sessions) - 1;
                // Hashing the rank spreads popular sessions over the table; collisions of ranks don't matter.
                ((self.random.draw(!rank) & 0xffff_ffff) * sessions) >> 32
            }
            Order::Train => ((self.random.draw(self.drawn / TRAIN_LENGTH) & 0xffff_ffff) * sessions) >> 32,
        };
        (number as u32, fresh)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_order_has_its_distribution() {
        let mut counts = [0_u32; 1000];
        for order in [Order::Uniform, Order::Zipf, Order::Train] {
            counts.fill(0);
            let mut draw = SessionPicker::new(order, 1000);
            let all: Vec<u32> = (0..100_000).map(|_| draw.next().0).collect();
            for &number in &all {
                counts[number as usize] += 1;
            }
            let max_count = counts.iter().max().copied().unwrap_or_default();
            let repeats = all.windows(2).filter(|pair| pair[0] == pair[1]).count();
            match order {
                Order::Uniform => assert!(max_count < 200 && repeats < 1000),
                Order::Zipf => assert!(max_count > 5000, "{max_count}"),
                Order::Train => assert!(repeats > 80_000, "{repeats}"),
            }
        }
    }
}
