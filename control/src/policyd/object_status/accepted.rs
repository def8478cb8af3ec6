//! The condition `Accepted`: whether an object is in force as written, and if not, why.

use std::collections::BTreeMap;

use vipgate_policy::diagnostic::{Code, Diagnostic};
use vipgate_policy::manifest::ObjectId;

use super::condition::Condition;
use crate::source::store::{CompileOutcome, Faulty};

/// The condition's type.
pub(super) const ACCEPTED: &str = "Accepted";
/// The reason of a rejected object whose address another one has.
pub(super) const ADDRESS_CONFLICT: &str = "AddressConflict";
/// Maximum diagnostics in a message.
const MAX_LISTED: usize = 5;

/// What a compilation says of each object.
#[derive(Debug)]
pub(super) struct Acceptance<'a> {
    /// By the name of the manifest.
    diagnostics: BTreeMap<&'a str, Vec<&'a Diagnostic>>,
    faulty: BTreeMap<String, &'a Faulty>,
}

/// The name of an object's manifest, `Kind/namespace/name`.
pub(super) fn manifest_name(id: &ObjectId) -> String {
    format!("{}/{}", id.kind.as_str(), id.path())
}

impl<'a> Acceptance<'a> {
    pub(super) fn of(outcome: &'a CompileOutcome) -> Self {
        let mut diagnostics: BTreeMap<&str, Vec<&Diagnostic>> = BTreeMap::new();
        for diagnostic in &outcome.diagnostics {
            diagnostics.entry(&diagnostic.file).or_default().push(diagnostic);
        }
        let faulty = outcome.faulty.iter().map(|(id, faulty)| (manifest_name(id), faulty)).collect();
        Self { diagnostics, faulty }
    }

    /// Whether an object isn't in force as written.
    pub(super) fn fault(&self, name: &str) -> Option<&'a Faulty> {
        self.faulty.get(name).copied()
    }

    /// Whether an object gets an address once it is recorded: in moments.
    pub(super) fn is_pending(&self, name: &str) -> bool {
        let all = self.diagnostics.get(name).map_or(&[][..], Vec::as_slice);
        all.iter().any(|it| it.code == Code::AddressPending)
    }

    /// The condition of an object.
    pub(super) fn condition(&self, name: &str) -> Condition {
        let all = self.diagnostics.get(name).map_or(&[][..], Vec::as_slice);
        let of_severity = |is_error: bool| all.iter().copied().filter(move |it| it.is_error() == is_error);
        let Some(fault) = self.fault(name) else {
            let warnings = summary(of_severity(false).map(text));
            return match of_severity(false).next() {
                None => Condition::new(ACCEPTED, true, ACCEPTED, "in force as written"),
                Some(first) => {
                    Condition::new(ACCEPTED, true, &format!("{:?}", first.code), &format!("warning: {warnings}"))
                }
            };
        };
        let effect = if fault.has_last_good { "it stays in force as it was last read" } else { "it is not in force" };
        let (reason, why) = match of_severity(true).next() {
            Some(first) => (reason_of(first.code), summary(of_severity(true).map(text))),
            None => ("NotRead".to_owned(), summary(fault.reasons.iter().cloned())),
        };
        Condition::new(ACCEPTED, false, &reason, &format!("{why}; {effect}"))
    }
}

fn text(diagnostic: &Diagnostic) -> String {
    let Diagnostic { field, reason, code, .. } = diagnostic;
    let at = if field.is_empty() { String::new() } else { format!("{field}: ") };
    format!("{at}{reason} [{code}]")
}

fn summary(texts: impl Iterator<Item = String>) -> String {
    let mut all: Vec<String> = texts.collect();
    let more = all.len().saturating_sub(MAX_LISTED);
    all.truncate(MAX_LISTED);
    if more > 0 {
        all.push(format!("and {more} more"));
    }
    all.join("; ")
}

/// The reason in a condition: the name of the diagnostic's code, and one for all conflicts about addresses.
fn reason_of(code: Code) -> String {
    match code {
        Code::VipInUse | Code::VipOfTwoPolicies | Code::VipOfOtherNamespace | Code::VipOfTwoNamespaces => {
            ADDRESS_CONFLICT.to_owned()
        }
        code => format!("{code:?}"),
    }
}

#[cfg(test)]
mod tests;
