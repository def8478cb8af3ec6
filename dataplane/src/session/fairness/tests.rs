use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

fn is_below(fairness: &mut Fairness, holder: Holder, ended: Option<Holder>) -> bool {
    fairness.invalidate_levels();
    fairness.is_below_share(holder, ended)
}

fn is_over(fairness: &mut Fairness, holder: Holder) -> bool {
    fairness.invalidate_levels();
    fairness.is_over_share(holder)
}

#[test]
fn members_beyond_the_table_count_for_their_vip_only() {
    let key = HashKey::new([11, 22, 33, 44]);
    let mut fairness = Fairness::new(4).unwrap();
    fairness.set_shared(4);
    let pod = |n: u32| Holder::new(7, 100 + n, &key);
    (0..5).for_each(|n| fairness.open(pod(n)));
    assert_eq!(
        (fairness.vip_sessions(7, &key), fairness.member_sessions(pod(3)), fairness.member_sessions(pod(4))),
        (5, (1, 4), (0, 4))
    );
    assert!(!is_below(&mut fairness, pod(4), None) && is_over(&mut fairness, pod(4)), "counted for its VIP only");
    assert!(is_over(&mut fairness, pod(3)), "five members can't have one of four sessions each");
    fairness.set_shared(5);
    assert!(!is_over(&mut fairness, pod(3)));
    (0..5).rev().for_each(|n| fairness.close(pod(n)));
    assert_eq!((fairness.vip_sessions(7, &key), fairness.vips(), fairness.members.used()), (0, 0, 0));
}

#[test]
fn one_vip_may_have_all_three_a_third_each_and_a_new_one_its_share() {
    let key = HashKey::new([11, 22, 33, 44]);
    let mut fairness = Fairness::new(1000).unwrap();
    fairness.set_shared(900);
    let [one, two, three] = [1, 2, 3].map(|vip| Holder::new(vip, vip, &key));
    let it = &mut fairness;
    (0..899).for_each(|_| it.open(one));
    assert!(is_below(it, one, None) && !is_over(it, one));
    it.open(one);
    assert!(!is_below(it, one, None) && !is_over(it, one), "its share is the whole capacity");
    assert!(is_below(it, one, Some(one)), "its own session is replaced");
    it.open(two);
    assert!(is_below(it, two, None) && is_over(it, one), "half each");
    (0..448).for_each(|_| it.open(two));
    assert!(is_below(it, two, None) && !is_over(it, two));
    assert!(is_below(it, three, None));
    it.open(three);
    assert!(!is_below(it, two, None) && !is_over(it, two), "unused shares go to the others");
    assert!(is_over(it, one));
    (0..299).for_each(|_| it.open(three));
    assert!(!is_below(it, three, None) && !is_over(it, three), "a third each");
    assert!(is_over(it, two) && is_over(it, one));
    let pod = Holder::new(1, 99, &key);
    assert!(is_below(it, pod, None), "its VIP is above its share, but the pod has no session");
}

/// Reference model: counts by holder, and shares by their definition: the largest level below which all fits.
#[derive(Default)]
struct Model(BTreeMap<(u32, u32), u64>);

impl Model {
    fn vips(&self) -> BTreeMap<u32, u64> {
        let mut vips = BTreeMap::new();
        self.0.iter().for_each(|((vip, _), count)| *vips.entry(*vip).or_default() += count);
        vips
    }

    /// Whether a member or its VIP is within its share.
    fn is_within(&self, vip: u32, member: u32, shared: u64) -> bool {
        let level = |counts: &[u64], limit: u64| {
            let fits = |level: u64| counts.iter().map(|count| *count.min(&level)).sum::<u64>() <= limit;
            (0..400).rev().find(|level| fits(*level)).unwrap()
        };
        let vips = self.vips();
        let share = level(&vips.values().copied().collect::<Vec<_>>(), shared);
        let siblings: Vec<u64> = self.0.iter().filter(|(other, _)| other.0 == vip).map(|(_, count)| *count).collect();
        vips[&vip] <= share || self.0[&(vip, member)] <= level(&siblings, share)
    }

    /// The model with one session of a member more or less.
    fn with(&self, vip: u32, member: u32, more: i64) -> Self {
        let mut counts = self.0.clone();
        let own = counts.entry((vip, member)).or_default();
        *own = own.checked_add_signed(more).unwrap();
        counts.retain(|_, count| *count > 0);
        Self(counts)
    }
}

proptest! {
    #[test]
    fn shares_are_max_min_fair_at_both_levels_for_any_sequence(
        steps in prop::collection::vec((0..4_u32, 0..4_u32, 1..12_u32, prop::bool::weighted(0.7)), 1..60),
        shared in 10..60_u32,
    ) {
        let key = HashKey::new([11, 22, 33, 44]);
        let mut fairness = Fairness::new(400).unwrap();
        fairness.set_shared(shared);
        let shared = u64::from(shared);
        let mut model = Model::default();
        let holder = |(vip, member): (u32, u32)| Holder::new(vip, 10 * vip + member, &key);
        for (vip, member, count, opens) in steps {
            for _ in 0..count {
                if opens && model.0.values().sum::<u64>() < 300 {
                    fairness.open(holder((vip, member)));
                    model = model.with(vip, member, 1);
                } else if !opens && model.0.contains_key(&(vip, member)) {
                    // With and without a cached level, which the end of a session may invalidate.
                    if count % 2 == 0 {
                        fairness.is_over_share(holder((vip, member)));
                    }
                    fairness.close(holder((vip, member)));
                    model = model.with(vip, member, -1);
                }
            }
            if opens {
                fairness.invalidate_levels();
            }
            for &(vip, member) in model.0.keys() {
                prop_assert_eq!(fairness.is_over_share(holder((vip, member))), !model.is_within(vip, member, shared));
            }
            for of in (0..4).flat_map(|vip| (0..4).map(move |member| (vip, member))) {
                let with_one_more = model.with(of.0, of.1, 1);
                let actual = fairness.is_below_share(holder(of), None);
                prop_assert_eq!(actual, with_one_more.is_within(of.0, of.1, shared), "{:?}", of);
                for ended in model.0.keys() {
                    // The end of another VIP's session may raise the level of VIPs by one for members above it: that
                    // isn't predicted.
                    let replaced = with_one_more.with(ended.0, ended.1, -1);
                    let expected = replaced.is_within(of.0, of.1, shared);
                    let actual = fairness.is_below_share(holder(of), Some(holder(*ended)));
                    let is_predicted = ended.0 == of.0 || actual;
                    prop_assert!(actual == expected || !is_predicted, "{:?} in place of {:?}", of, ended);
                }
            }
        }
    }
}
