//! In which order packets of open sessions come.

use clap::ValueEnum;
use vipgate_dataplane::session::tuple::HashKey;

/// Packets of one flow in a row, in a train.
const TRAIN: u64 = 8;

/// The order of packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Order {
    /// Each packet of any session: the hardest
    Uniform,
    /// The n-th most popular session gets 1/n of what the first one gets
    Zipf,
    /// Eight packets of a session in a row
    Train,
}

/// Draws packets.
#[derive(Debug)]
pub(crate) struct Draw {
    order: Order,
    sessions: u32,
    drawn: u64,
    random: HashKey,
}

impl Draw {
    pub(crate) fn new(order: Order, sessions: u32) -> Self {
        Self { order, sessions, drawn: 0, random: HashKey::fixed() }
    }

    /// The session of the next packet, and a random number for whatever else.
    pub(crate) fn next(&mut self) -> (u32, u64) {
        self.drawn += 1;
        let fresh = self.random.draw(self.drawn);
        let sessions = u64::from(self.sessions);
        let number = match self.order {
            Order::Uniform => ((fresh & 0xffff_ffff) * sessions) >> 32,
            Order::Zipf => {
                let share = (fresh & 0xffff_ffff) as f64 / f64::from(u32::MAX);
                let rank = ((sessions as f64 + 1.0).powf(share).floor() as i64).cast_unsigned().clamp(1, sessions) - 1;
                // Popular sessions are not neighbours in the table; whether two share a number matters little.
                ((self.random.draw(!rank) & 0xffff_ffff) * sessions) >> 32
            }
            Order::Train => ((self.random.draw(self.drawn / TRAIN) & 0xffff_ffff) * sessions) >> 32,
        };
        (number as u32, fresh)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_order_has_its_shape() {
        let mut counts = [0_u32; 1000];
        for order in [Order::Uniform, Order::Zipf, Order::Train] {
            counts.fill(0);
            let mut draw = Draw::new(order, 1000);
            let all: Vec<u32> = (0..100_000).map(|_| draw.next().0).collect();
            for &number in &all {
                counts[number as usize] += 1;
            }
            let most = counts.iter().max().copied().unwrap_or_default();
            let repeats = all.windows(2).filter(|pair| pair[0] == pair[1]).count();
            match order {
                Order::Uniform => assert!(most < 200 && repeats < 1000),
                Order::Zipf => assert!(most > 5000, "{most}"),
                Order::Train => assert!(repeats > 80_000, "{repeats}"),
            }
        }
    }
}
