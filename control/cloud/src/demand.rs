//! Which addresses to allocate for objects that lack some. Pure.
//!
//! Reads lag behind, and a server may die after a request. So what is allocated has a token that follows from the object and
//! from what is observed: another attempt for the same object finds the address of the first.

use std::collections::{BTreeMap, BTreeSet};

use crate::name;
use crate::plan::Desired;
use crate::provider::{Allocation, Claim, Observation, PublicAddress, Tags};

/// An object that has fewer addresses of a pool than it asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// The owner in the claim, as of a VIP.
    pub owner: String,
    /// IPv6.
    pub is_ipv6: bool,
    /// Addresses that it asks for, with those that it has.
    pub wanted: usize,
}

/// A pool that may allocate addresses.
#[derive(Clone, Copy, Debug)]
pub struct Reserve<'a> {
    /// Name of the pool.
    pub pool: &'a str,
    /// Tags of its addresses.
    pub tags: &'a Tags,
    /// Addresses that vipgate may have allocated at most.
    pub max: usize,
}

/// What to allocate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Demand {
    /// One for each address that is missing, as far as the limit allows.
    pub allocations: Vec<Allocation>,
    /// Addresses that are missing beyond the limit.
    pub beyond_limit: usize,
}

/// What to allocate for shortages, the first ones first. `issued`: tokens that aren't observed, of allocations that may have
/// been carried out; they count.
pub fn demand(
    reserve: &Reserve<'_>,
    shortages: &[Shortage],
    desired: &Desired,
    observed: &Observation,
    issued: &BTreeSet<String>,
) -> Demand {
    let tokens: BTreeSet<&str> = observed.addresses.iter().filter_map(|address| address.token.as_deref()).collect();
    // More than tokens if a request was carried out twice.
    let allocated = observed.addresses.iter().filter(|address| address.token.is_some()).count();
    let mut unseen: BTreeSet<&str> = issued.iter().map(String::as_str).collect();
    let is_free = |address: &&PublicAddress| {
        address.claim.is_none() && address.attachment.is_none() && !desired.vips.contains_key(&address.address)
    };
    let mut free: BTreeMap<bool, usize> = BTreeMap::new();
    for address in observed.addresses.iter().filter(|address| address.has_tags).filter(is_free) {
        *free.entry(address.address.is_ipv6()).or_default() += 1;
    }
    let mut demand = Demand::default();
    for Shortage { owner, is_ipv6, wanted } in shortages {
        let claim = Claim { cluster: desired.cluster.clone(), owner: owner.clone() };
        let is_its = |address: &&PublicAddress| {
            address.address.is_ipv6() == *is_ipv6 && address.claim.as_ref().is_some_and(|it| is_for(it, &claim))
        };
        let missing = wanted.saturating_sub(observed.addresses.iter().filter(is_its).count());
        let left = free.entry(*is_ipv6).or_default();
        let taken = missing.min(*left);
        *left -= taken;
        let slots = (0..).map(|slot| name::token(&desired.cluster, reserve.pool, owner, *is_ipv6, slot));
        for token in slots.filter(|token| !tokens.contains(token.as_str())).take(missing - taken) {
            // One that was asked for before counts already.
            let is_counted = unseen.remove(token.as_str());
            let count = allocated + unseen.len() + demand.allocations.len();
            if count >= reserve.max && !is_counted {
                demand.beyond_limit += 1;
                continue;
            }
            let (tags, claim) = (reserve.tags.clone(), claim.clone());
            demand.allocations.push(Allocation { tags, claim, is_ipv6: *is_ipv6, zone: None, token });
        }
    }
    demand
}

/// Whether an address is claimed for an object: alone, or with others that share it.
fn is_for(claim: &Claim, wanted: &Claim) -> bool {
    claim.cluster == wanted.cluster && claim.owner.split(", ").any(|owner| owner == wanted.owner)
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use super::*;
    use crate::plan::DesiredVip;
    use crate::provider::AddressId;

    fn ip(last: u8) -> IpAddr {
        Ipv4Addr::new(203, 0, 113, last).into()
    }

    fn address(last: u8, owner: Option<&str>, token: Option<String>) -> PublicAddress {
        let claim = owner.map(|owner| Claim { cluster: "prod".to_owned(), owner: owner.to_owned() });
        PublicAddress {
            id: AddressId(format!("a-{last}")),
            address: ip(last),
            zone: None,
            has_tags: true,
            claim,
            token,
            attachment: None,
            private: BTreeMap::new(),
            version: String::new(),
        }
    }

    fn desired(vips: &[u8]) -> Desired {
        let vips = vips.iter().map(|last| (ip(*last), DesiredVip::default())).collect();
        Desired { cluster: "prod".to_owned(), vips, ..Desired::default() }
    }

    fn shortage(owner: &str, wanted: usize) -> Shortage {
        Shortage { owner: owner.to_owned(), is_ipv6: false, wanted }
    }

    fn token(owner: &str, slot: usize) -> String {
        name::token("prod", "public", owner, false, slot)
    }

    struct Case<'a> {
        max: usize,
        shortages: &'a [Shortage],
        vips: &'a [u8],
        observed: Vec<PublicAddress>,
        issued: &'a [String],
    }

    fn tokens(case: Case<'_>) -> (Vec<String>, usize) {
        let tags = Tags::from([("pool".to_owned(), "public".to_owned())]);
        let reserve = Reserve { pool: "public", tags: &tags, max: case.max };
        let observed = Observation { addresses: case.observed, nics: vec![] };
        let issued = case.issued.iter().cloned().collect();
        let demand = demand(&reserve, case.shortages, &desired(case.vips), &observed, &issued);
        assert!(demand.allocations.iter().all(|it| it.tags == tags && it.claim.cluster == "prod"));
        (demand.allocations.into_iter().map(|it| it.token).collect(), demand.beyond_limit)
    }

    #[test]
    fn what_is_missing_is_allocated_up_to_the_limit_oldest_first() {
        let shortages = [shortage("a", 2), shortage("b", 2)];
        let case = |max| Case { max, shortages: &shortages, vips: &[], observed: vec![], issued: &[] };
        assert_eq!(tokens(case(3)), (vec![token("a", 0), token("a", 1), token("b", 0)], 1));
        assert_eq!(tokens(case(9)).1, 0);
        assert_eq!(tokens(case(0)), (vec![], 4));
    }

    #[test]
    fn what_is_claimed_for_it_or_free_is_not_allocated() {
        let observed = vec![address(1, Some("c, a"), None), address(2, None, None), address(3, Some("other"), None)];
        let missing = |wanted, vips| {
            let shortages = &[shortage("a", wanted)];
            tokens(Case { max: 9, shortages, vips, observed: observed.clone(), issued: &[] }).0
        };
        assert_eq!(missing(2, &[]), Vec::<String>::new());
        assert_eq!(missing(3, &[]), [token("a", 0)]);
        assert_eq!(missing(2, &[2]), [token("a", 0)], "a VIP whose claim isn't written yet isn't free");
    }

    #[test]
    fn a_free_address_is_counted_for_one_object() {
        let shortages = [shortage("a", 1), shortage("b", 1)];
        let observed = vec![address(1, None, None)];
        assert_eq!(tokens(Case { max: 9, shortages: &shortages, vips: &[], observed, issued: &[] }).0, [token("b", 0)]);
    }

    #[test]
    fn an_address_that_was_allocated_and_went_to_others_is_not_asked_for_again() {
        let observed = vec![address(1, Some("b"), Some(token("a", 0)))];
        let case = Case { max: 2, shortages: &[shortage("a", 1)], vips: &[], observed, issued: &[] };
        assert_eq!(tokens(case), (vec![token("a", 1)], 0));
    }

    #[test]
    fn what_may_be_allocated_without_being_observed_counts() {
        let shortages = [shortage("b", 1)];
        let of =
            |issued: &[String]| tokens(Case { max: 1, shortages: &shortages, vips: &[], observed: vec![], issued });
        assert_eq!(of(&[token("a", 0)]), (vec![], 1));
        assert_eq!(of(&[token("b", 0)]), (vec![token("b", 0)], 0), "it finds the address of the first attempt");
    }
}
