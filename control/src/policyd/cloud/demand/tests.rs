use std::net::IpAddr;

use vipgate_cloud::plan::DesiredVip;
use vipgate_cloud::{Claim, PublicAddress};
use vipgate_policy::manifest::AwsSpec;

use super::*;

const VIP: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(203, 0, 113, 1));
const OWNER: &str = "EgressPolicy a/p";

fn spec() -> ProviderSpec {
    let tags = Tags::from([("pool".to_owned(), "public".to_owned())]);
    let aws = Some(AwsSpec { region: "eu-west-1".to_owned(), tags });
    let max = std::num::NonZeroU32::new(2);
    ProviderSpec { aws, ownership: Ownership::Reserve, max, ..ProviderSpec::default() }
}

fn shortages(wanted: usize) -> Vec<Shortage> {
    let shortage = |pool: &str| Shortage { pool: pool.to_owned(), owner: OWNER.to_owned(), family: Family::V4, wanted };
    vec![shortage("other"), shortage("public")]
}

fn observed(token: &str, owner: Option<&str>) -> Observation {
    let address = PublicAddress {
        id: AddressId("eipalloc-1".to_owned()),
        address: VIP,
        zone: None,
        has_tags: true,
        claim: owner.map(|owner| Claim { cluster: "prod".to_owned(), owner: owner.to_owned() }),
        token: Some(token.to_owned()),
        attachment: None,
        private: BTreeMap::new(),
        version: String::new(),
    };
    Observation { addresses: vec![address], nics: vec![] }
}

/// A tracker and the time.
struct Fixture {
    tracker: DemandTracker,
    now: Instant,
}

impl Fixture {
    fn new() -> Self {
        Self { tracker: DemandTracker::default(), now: Instant::now() }
    }

    fn update(&mut self, shortages: &[Shortage], vips: &[IpAddr], observed: &Observation) -> (Desired, usize) {
        let vips = vips.iter().map(|vip| (*vip, DesiredVip::default())).collect();
        let mut desired = Desired { cluster: "prod".to_owned(), vips, ..Desired::default() };
        let lacking = self.tracker.update("public", &spec(), shortages, &mut desired, observed, self.now);
        (desired, lacking)
    }
}

#[test]
fn what_a_policy_lacks_is_allocated_with_the_tags_of_the_pool() {
    let mut fixture = Fixture::new();
    let (desired, lacking) = fixture.update(&shortages(3), &[], &Observation::default());
    assert_eq!((desired.allocations.len(), lacking), (2, 1), "the limit is two");
    assert!(desired.allocations.iter().all(|it| it.tags["pool"] == "public" && it.claim.owner == OWNER));
}

#[test]
fn what_may_have_been_allocated_counts_until_it_must_have_been_observed() {
    let mut fixture = Fixture::new();
    fixture.update(&shortages(2), &[], &Observation::default());
    let others = vec![Shortage { owner: "Service b/s".to_owned(), ..shortages(1)[1].clone() }];
    assert_eq!(fixture.update(&others, &[], &Observation::default()).1, 1);
    fixture.now += MAX_READ_LAG;
    let (desired, lacking) = fixture.update(&others, &[], &Observation::default());
    assert_eq!((desired.allocations.len(), lacking), (1, 0));
}

#[test]
fn an_allocated_address_keeps_its_claim_while_its_vip_is_awaited_and_is_released_later() {
    let mut fixture = Fixture::new();
    let observed = observed("t", Some(OWNER));
    let id: BTreeSet<AddressId> = [observed.addresses[0].id.clone()].into();
    let lists = |desired: Desired| (desired.expected, desired.releasable);
    assert_eq!(lists(fixture.update(&[], &[], &observed).0), (id.clone(), BTreeSet::new()));
    fixture.now += RELEASE_TIME;
    assert_eq!(lists(fixture.update(&shortages(1), &[], &observed).0), (id.clone(), BTreeSet::new()), "awaited");
    assert_eq!(lists(fixture.update(&[], &[], &observed).0), (BTreeSet::new(), id.clone()));
    let others = vec![Shortage { owner: "Service b/s".to_owned(), ..shortages(1)[1].clone() }];
    assert_eq!(lists(fixture.update(&others, &[], &observed).0), Default::default(), "free for the other one");
    assert_eq!(lists(fixture.update(&[], &[VIP], &observed).0), Default::default(), "in use");
    assert_eq!(lists(fixture.update(&[], &[], &observed).0), Default::default(), "given up at once after use");
    fixture.now += RELEASE_TIME;
    assert_eq!(lists(fixture.update(&[], &[], &observed).0), (BTreeSet::new(), id), "the time has begun anew");
}

#[test]
fn nothing_is_allocated_or_released_in_a_pool_of_existing_addresses() {
    let mut tracker = DemandTracker::default();
    let mut desired = Desired::default();
    let spec = ProviderSpec { ownership: Ownership::Pool, ..spec() };
    let observed = observed("t", None);
    for time in [Duration::ZERO, RELEASE_TIME] {
        let now = Instant::now() + time;
        assert_eq!(tracker.update("public", &spec, &shortages(1), &mut desired, &observed, now), 0);
    }
    assert_eq!(desired, Desired::default());
}
