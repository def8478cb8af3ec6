//! Addresses of pools whose provider was observed: claims, and what can be allocated.

use super::*;

/// The plan for Services, with a pool whose provider has these addresses.
fn plan(provider: &str, addresses: &[(&str, Option<&str>)], services: &str) -> AllocationPlan {
    let pool = format!(
        "apiVersion: vipgate.io/v1alpha1\nkind: AddressPool\nmetadata: {{name: public}}\nspec: {{provider: {provider}}}\n"
    );
    let mut snapshot = snapshot(&format!("{pool}{services}"));
    for object in &mut snapshot.objects {
        Arc::make_mut(object).observe_addresses(addresses);
    }
    plan_of(&snapshot)
}

const AWS: &str = "{aws: {region: eu-west-1, tags: {a: b}}, ownership: reserve, max: 4}";
const AZURE: &str = "{azure: {subscription: s, resourceGroup: g, tags: {a: b}}, ownership: reserve, max: 4}";

fn addresses(plan: &AllocationPlan) -> Vec<String> {
    plan.decisions.iter().flat_map(|decision| &decision.addresses).map(ToString::to_string).collect()
}

fn shortages(plan: &AllocationPlan) -> Vec<(&str, Family)> {
    assert!(plan.shortages.iter().all(|it| it.pool == "public" && it.wanted == 1));
    plan.shortages.iter().map(|it| (it.owner.as_str(), it.family)).collect()
}

#[test]
fn a_service_gets_what_is_claimed_for_it_and_nothing_that_is_claimed_for_others() {
    let observed =
        [("203.0.113.1", Some("EgressPolicy x/p")), ("203.0.113.2", None), ("203.0.113.3", Some("Service x/a"))];
    let plan = plan(AWS, &observed, &(service("a", "", "") + &service("b", "", "") + &service("c", "", "")));
    assert_eq!(addresses(&plan), ["203.0.113.3", "203.0.113.2"]);
    assert_eq!(shortages(&plan), [("Service x/c", Family::V4)]);
}

#[test]
fn a_service_lacks_an_address_of_an_empty_pool() {
    assert_eq!(shortages(&plan(AWS, &[], &service("a", "", ""))), [("Service x/a", Family::V4)]);
    let existing = AWS.replace(", ownership: reserve, max: 4", "");
    let plan = plan(&existing, &[], &service("a", "", ""));
    assert_eq!((shortages(&plan), plan.decisions[0].refusal.as_ref().unwrap().reason), (vec![], Reason::NoPool));
}

#[test]
fn a_family_is_lacking_only_where_it_can_be_allocated() {
    let v6 = service("a", "", ", ipFamilies: [IPv6]");
    assert_eq!(shortages(&plan(AWS, &[], &v6)), []);
    assert_eq!(shortages(&plan(AZURE, &[], &v6)), [("Service x/a", Family::V6)]);
    let both = service("a", "", ", ipFamilyPolicy: RequireDualStack");
    assert_eq!(shortages(&plan(AZURE, &[], &both)), [("Service x/a", Family::V4), ("Service x/a", Family::V6)]);
    let preferred = service("a", "", ", ipFamilyPolicy: PreferDualStack");
    assert_eq!(shortages(&plan(AZURE, &[], &preferred)), [("Service x/a", Family::V4)]);
    let with_one = plan(AZURE, &[("203.0.113.1", None)], &preferred);
    assert_eq!((addresses(&with_one).len(), shortages(&with_one)), (1, vec![]));
}
