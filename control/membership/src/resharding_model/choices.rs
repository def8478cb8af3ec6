//! Choices that a world makes as it runs: at random from a seed, or one after the other of all that there are.

/// A pseudorandom number generator (SplitMix64).
#[derive(Clone, Debug)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    /// A number less than `limit`.
    pub(super) fn below(&mut self, limit: u64) -> u64 {
        ((self.next() >> 32) * limit) >> 32
    }

    /// True this often in a hundred cases.
    pub(super) fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    pub(super) fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize]
    }
}

/// What takes time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Delay {
    /// A message to or from the server.
    Server,
    /// A message between gateways.
    Link,
    /// Until all workers use a snapshot.
    Snapshot,
    /// Until a worker lists sessions.
    Listing,
    /// Until a broken link is detected.
    Detection,
}

/// How choices are made.
#[derive(Clone, Debug)]
pub(super) enum Choices {
    /// At random; whether delays are short, once everything is to converge.
    Random { random: Random, is_quick: bool },
    /// As enumerated.
    Enumerated(Enumeration),
}

/// All sequences of choices, one after the other, like the digits of a number that is counted up. Choices beyond the
/// depth are the first ones.
#[derive(Clone, Debug, Default)]
pub(super) struct Enumeration {
    /// The choices of this run, and of how many each is.
    taken: Vec<(u8, u8)>,
    /// How many were made.
    made: usize,
    depth: usize,
    /// Whether everything is to converge.
    is_over: bool,
}

impl Enumeration {
    pub(super) fn new(depth: usize) -> Self {
        Self { depth, ..Self::default() }
    }

    /// One of `count`.
    pub(super) fn choose(&mut self, count: u8) -> u8 {
        let at = self.made;
        if self.is_over || at >= self.depth {
            return 0;
        }
        self.made += 1;
        if at == self.taken.len() {
            self.taken.push((0, count));
        }
        self.taken[at].0
    }

    /// The next sequence; `None` after the last one.
    pub(super) fn next(mut self) -> Option<Self> {
        self.taken.truncate(self.made);
        while let Some((choice, count)) = self.taken.pop() {
            if choice + 1 < count {
                self.taken.push((choice + 1, count));
                (self.made, self.is_over) = (0, false);
                return Some(self);
            }
        }
        None
    }
}

impl Choices {
    pub(super) fn random(seed: u64) -> Self {
        Self::Random { random: Random::new(seed), is_quick: false }
    }

    /// From here on, everything is quick.
    pub(super) fn become_quick(&mut self) {
        match self {
            Self::Random { is_quick, .. } => *is_quick = true,
            Self::Enumerated(enumeration) => enumeration.is_over = true,
        }
    }

    pub(super) fn delay(&mut self, of: Delay) -> u64 {
        match self {
            Self::Random { random, is_quick: true } => 1 + random.below(4),
            Self::Random { random, .. } => random_delay(random, of),
            Self::Enumerated(enumeration) => match of {
                Delay::Server => 2,
                Delay::Detection => 100,
                Delay::Link => [2, 90][usize::from(enumeration.choose(2))],
                Delay::Snapshot => [1, 40][usize::from(enumeration.choose(2))],
                Delay::Listing => 0,
            },
        }
    }
}

fn random_delay(random: &mut Random, of: Delay) -> u64 {
    match (of, random.below(100)) {
        (Delay::Server | Delay::Link, 0..80) => 1 + random.below(15),
        (Delay::Server | Delay::Link, 80..97) => random.below(100),
        (Delay::Server | Delay::Link, _) => random.below(500),
        (Delay::Snapshot, 0..90) => random.below(10),
        (Delay::Snapshot, _) => random.below(150),
        (Delay::Listing, 0..75) => 0,
        (Delay::Listing, _) => random.below(60),
        (Delay::Detection, 0..50) => random.below(20),
        (Delay::Detection, _) => random.below(400),
    }
}
