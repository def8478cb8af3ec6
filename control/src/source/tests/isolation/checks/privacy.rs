//! Privacy: what a tenant's diagnostics say of other namespaces.

use std::collections::BTreeSet;
use std::net::IpAddr;

use vipgate_policy::diagnostic::{Code, Diagnostic};

use super::Observation;

/// Codes of contention: their messages name the rival, and no other object.
pub(super) const NAMES_RIVAL: [Code; 10] = [
    Code::PortConflict,
    Code::AnnounceConflict,
    Code::VipOfTwoNamespaces,
    Code::HealthCheckPortConflict,
    Code::VipOfTwoPolicies,
    Code::VipOfOtherNamespace,
    Code::VipInUse,
    Code::DuplicatePodAddress,
    Code::PoliciesOverlap,
    Code::DuplicateObject,
];

pub(super) fn check(observation: &Observation<'_>) {
    let (pipeline, outcome) = observation.whole;
    let history = observation.history;
    let tenants: Vec<&str> = std::iter::once(history.protected).chain(history.others.iter().copied()).collect();
    for diagnostic in &outcome.diagnostics {
        let Some(id) = pipeline.entries.object_of(diagnostic) else { continue };
        if !tenants.contains(&id.namespace.as_str()) {
            continue;
        }
        let others = tenants.iter().filter(|other| **other != id.namespace);
        let mut named: BTreeSet<String> = others.flat_map(|other| objects_of(other, &diagnostic.reason)).collect();
        named.retain(|path| !is_written(observation, &id.namespace, path));
        let max = usize::from(NAMES_RIVAL.contains(&diagnostic.code));
        assert!(named.len() <= max, "{id} learns of {named:?}: {diagnostic}");
        // What the reader rejects has its addresses in a text that isn't among the readable ones, or in an earlier one.
        let has_last_good = outcome.faulty.get(id).is_some_and(|faulty| faulty.has_last_good);
        if max == 0 && pipeline.entries.is_readable(id) && !has_last_good {
            check_addresses(observation, &id.namespace, diagnostic);
        }
    }
}

/// Whether a tenant's own objects name another one.
fn is_written(observation: &Observation<'_>, namespace: &str, path: &str) -> bool {
    let Some((of, name)) = path.split_once('/') else { return false };
    let own = observation.objects.iter().filter(|(id, _)| id.namespace == namespace);
    let mut texts = own.map(|(_, object)| object.to_string());
    texts.any(|text| text.contains(&format!("\"{of}\"")) && text.contains(&format!("\"{name}\"")))
}

/// The objects of a namespace that a text names, as `namespace/name`.
fn objects_of(namespace: &str, text: &str) -> Vec<String> {
    let is_of_name = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
    let path = format!("{namespace}/");
    let starts = text.match_indices(&path).map(|(at, _)| at);
    // Whose path it is ends before the name: `Service bravo/web`, `Pod/bravo/web`.
    let starts = starts.filter(|at| text[..*at].chars().next_back().is_none_or(|before| !is_of_name(before)));
    let name = |at: usize| -> String {
        let end = text[at + namespace.len() + 1..].chars().take_while(|c| is_of_name(*c)).count();
        text[at..at + namespace.len() + 1 + end].trim_end_matches('.').to_owned()
    };
    starts.map(name).collect()
}

/// Whether a text has an address, in whatever form.
pub(super) fn is_in_text(text: &str, address: IpAddr) -> bool {
    let words = text.split(|c: char| !(c.is_ascii_hexdigit() || c == '.' || c == ':'));
    words.filter_map(|word| word.parse::<IpAddr>().ok()).any(|word| word == address)
}

/// Every address that a message names is one that the tenant has written itself, or got.
fn check_addresses(observation: &Observation<'_>, namespace: &str, diagnostic: &Diagnostic) {
    let is_of_address = |c: char| c.is_ascii_hexdigit() || c == '.' || c == ':';
    let words = diagnostic.reason.split(|c: char| !is_of_address(c)).map(|word| word.trim_end_matches([':', '.']));
    for address in words.filter_map(|word| word.parse::<IpAddr>().ok()) {
        let text = address.to_string();
        let is_written = |namespace: &str| {
            let own = observation.objects.iter().filter(|(id, _)| id.namespace == namespace);
            own.into_iter().any(|(_, object)| is_in_text(&object.to_string(), address))
        };
        let is_got = || {
            let vip = observation.placement().vips.get(&address);
            vip.is_some_and(|vip| vip.name.contains(&format!(" {namespace}/")))
        };
        // One that the reader rejects has no readable version.
        let is_rejected =
            || observation.whole.1.faulty.values().any(|faulty| faulty.reasons.iter().any(|it| it.contains(&text)));
        assert!(is_written(namespace) || is_got() || is_rejected(), "{namespace} learns of {address}: {diagnostic}");
    }
}
