//! The annotations that mean something here, on Services and on Pods.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::read::Report;
use crate::complaint::Severity;
use crate::yaml::nearest;

/// On a Service: it is an egress policy too. Then the field that it is.
pub(super) const EGRESS: &str = "vipgate.io/egress";
pub(crate) const EGRESS_FIELD: &str = "metadata.annotations[vipgate.io/egress]";
/// On a Service: how its VIPs are announced. Then the field that it is.
pub(super) const ANNOUNCE: &str = "vipgate.io/announce";
pub(crate) const ANNOUNCE_FIELD: &str = "metadata.annotations[vipgate.io/announce]";
/// On a Service: places in its table of backends. Then the field that it is.
pub(super) const TABLE_SIZE: &str = "vipgate.io/maglev-table-size";
pub(crate) const TABLE_SIZE_FIELD: &str = "metadata.annotations[vipgate.io/maglev-table-size]";
/// On a Pod: its part of new sessions.
pub(super) const WEIGHT: &str = "vipgate.io/weight";

/// Those of Services.
pub(super) const OF_SERVICES: [&str; 3] = [EGRESS, ANNOUNCE, TABLE_SIZE];
/// Those of Pods.
pub(super) const OF_PODS: [&str; 1] = [WEIGHT];

/// An annotation of ours that is unknown is misspelt, and what it asks for would silently not be done.
pub(super) fn complain_about_unknown(metadata: &ObjectMeta, known: &[&str], report: &mut Report<'_>) {
    let names = metadata.annotations.iter().flat_map(|annotations| annotations.keys());
    for name in names.filter(|name| name.starts_with("vipgate.io/") && !known.contains(&name.as_str())) {
        let hint = nearest(name, known).map(|near| format!(", did you mean {near}?")).unwrap_or_default();
        report(Severity::Warning, &field(name), format!("unknown annotation{hint}"));
    }
}

/// What a word of a few means.
pub(super) fn word<T: Copy>(
    metadata: &ObjectMeta,
    name: &str,
    values: &[(&str, T)],
    report: &mut Report<'_>,
) -> Option<T> {
    let text = text(metadata, name)?;
    let value = values.iter().find(|(word, _)| *word == text).map(|(_, value)| *value);
    if value.is_none() {
        let words = values.iter().map(|(word, _)| format!("\"{word}\"")).collect::<Vec<_>>().join(" or ");
        report(Severity::Error, &field(name), format!("must be {words}, is \"{text}\""));
    }
    value
}

/// A number that is one of `wanted`, which `says` what they are.
pub(super) fn number(
    metadata: &ObjectMeta,
    name: &str,
    wanted: impl Fn(u32) -> bool,
    says: &str,
    report: &mut Report<'_>,
) -> Option<u32> {
    let text = text(metadata, name)?;
    let value = text.parse().ok().filter(|number| wanted(*number));
    if value.is_none() {
        report(Severity::Error, &field(name), format!("must be {says}, is \"{text}\""));
    }
    value
}

fn text<'a>(metadata: &'a ObjectMeta, name: &str) -> Option<&'a str> {
    metadata.annotations.as_ref()?.get(name).map(String::as_str)
}

fn field(name: &str) -> String {
    format!("metadata.annotations[{name}]")
}
