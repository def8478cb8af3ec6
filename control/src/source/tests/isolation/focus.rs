//! Focused worlds: hostile acts in turn, each against a tenant that has whatever acts reach for, and undone before the next one.
//! So three dozen worlds in a row run every act, whatever the dice say. The random worlds between them combine acts.

use vipgate_coverage::Coverage;

use super::Dice;
use super::acts::{Act, at_limits, of_big_worlds, of_kubelets, of_tenants};
use super::history::take_batch;
use super::world::{Age, Batch, Setting, World};

/// Worlds of a round: every second one is random, the last one is big, and the others go through the acts of small worlds.
const ROUND: u64 = 8;
/// Acts of a world.
const ACTS: usize = 6;

/// What a world is about.
pub(super) struct Focus {
    is_big: bool,
    acts: Vec<(&'static str, Act)>,
}

impl Focus {
    /// The focus of the world with a number; `None`: it is a random one.
    pub(super) fn of_world(number: u64) -> Option<Self> {
        let (round, at) = (number / ROUND, number % ROUND);
        if at.is_multiple_of(2) {
            return None;
        }
        if at == ROUND - 1 {
            let big = of_big_worlds();
            let act = big[round as usize % big.len()];
            return Some(Self { is_big: true, acts: [vec![act], at_limits()].concat() });
        }
        let all = [of_tenants(), of_kubelets()].concat();
        let nth = (round * (ROUND / 2 - 1) + at / 2) as usize;
        let acts = (0..ACTS).map(|n| all[(nth * ACTS + n) % all.len()]).collect();
        Some(Self { is_big: false, acts })
    }

    /// The setting that lets acts do what they are about.
    pub(super) fn setting(&self, random: Setting) -> Setting {
        // One gateway may have room for a few VIPs only; the oldest tenant gives way to nobody.
        let gateways = if random.gateways == 1 { 3 } else { random.gateways };
        Setting { age: Age::Oldest, gateways, has_pods: true, is_big: self.is_big, ..random }
    }

    /// The batches: each undoes the act before, and runs the next one.
    pub(super) fn batches(&self, world: &mut World, dice: &mut Dice, coverage: &Coverage) -> Vec<Batch> {
        let (hostile, before) = (world.tenants[1], world.objects.clone());
        let mut batches = Vec::with_capacity(self.acts.len());
        for (class, act) in &self.acts {
            world.restore(&before);
            if act(world, hostile, dice) {
                coverage.count(*class);
            }
            batches.push(take_batch(world, dice, coverage));
        }
        batches
    }
}
