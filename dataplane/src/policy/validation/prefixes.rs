//! Validation of egress policies' prefixes: as many as the steering program holds.

use foldhash::HashSet;
use ipnet::IpNet;

use crate::policy::change::PolicyChange;
use crate::policy::limits::MAX_EGRESS_PREFIXES;
use crate::policy::references::References;
use crate::policy::spec::EgressSpec;
use crate::policy::validation::BuildError;

/// Distinct prefixes of a policy, of IPv4 and of IPv6.
pub(in crate::policy) fn count(spec: &EgressSpec) -> [usize; 2] {
    let distinct: HashSet<IpNet> = spec.destinations.iter().chain(&spec.excluded).map(IpNet::trunc).collect();
    let v4 = distinct.iter().filter(|net| net.addr().is_ipv4()).count();
    [v4, distinct.len() - v4]
}

pub(super) fn check<'a>(
    references: &References,
    change: &PolicyChange,
    spec_of: impl Fn(&str) -> Option<&'a EgressSpec>,
) -> Result<(), BuildError> {
    let mut counts = references.prefixes();
    for spec in change.policies.keys().filter_map(|name| spec_of(name)) {
        std::iter::zip(&mut counts, count(spec)).for_each(|(sum, of_policy)| *sum -= of_policy);
    }
    for spec in change.policies.changed() {
        std::iter::zip(&mut counts, count(spec)).for_each(|(sum, of_policy)| *sum += of_policy);
        if let Some(&count) = counts.iter().find(|count| **count > MAX_EGRESS_PREFIXES) {
            return Err(BuildError::TooManyPrefixes { policy: spec.name.clone(), count });
        }
    }
    Ok(())
}
