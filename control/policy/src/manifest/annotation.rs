//! vipgate's annotations of Services and Pods.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::diagnostic::{Code, Report, Severity};
use crate::yaml::closest_match;

/// Prefix of all of them.
const PREFIX: &str = "vipgate.io/";
/// Service: makes it an egress policy, too.
pub(super) const EGRESS: &str = "vipgate.io/egress";
pub(crate) const EGRESS_FIELD: &str = "metadata.annotations[vipgate.io/egress]";
/// Service: announce mode of its VIPs.
pub(super) const ANNOUNCE: &str = "vipgate.io/announce";
pub(crate) const ANNOUNCE_FIELD: &str = "metadata.annotations[vipgate.io/announce]";
/// Service: slots of its Maglev table.
pub(super) const TABLE_SIZE: &str = "vipgate.io/maglev-table-size";
pub(crate) const TABLE_SIZE_FIELD: &str = "metadata.annotations[vipgate.io/maglev-table-size]";
/// Service: the addresses that it is to get, separated by commas.
pub(super) const ADDRESSES: &str = "vipgate.io/addresses";
/// Service: the AddressPool of its addresses.
pub(super) const POOL: &str = "vipgate.io/pool";
/// Service: Services of one namespace with the same key may share an address.
pub(super) const SHARING_KEY: &str = "vipgate.io/sharing-key";
/// Pod: relative weight for new sessions.
pub(super) const WEIGHT: &str = "vipgate.io/weight";

pub(super) const SERVICE_ANNOTATIONS: [&str; 6] = [EGRESS, ANNOUNCE, TABLE_SIZE, ADDRESSES, POOL, SHARING_KEY];
pub(super) const POD_ANNOTATIONS: [&str; 1] = [WEIGHT];

/// Whether an object has an annotation of vipgate, known or not.
pub(super) fn has_any(metadata: &ObjectMeta) -> bool {
    metadata.annotations.iter().flat_map(|annotations| annotations.keys()).any(|name| name.starts_with(PREFIX))
}

/// Warns of unknown annotations of group `vipgate.io`: they are misspelled and have no effect.
pub(super) fn warn_about_unknown(metadata: &ObjectMeta, known: &[&str], report: &mut Report<'_>) {
    let names = metadata.annotations.iter().flat_map(|annotations| annotations.keys());
    for name in names.filter(|name| name.starts_with(PREFIX) && !known.contains(&name.as_str())) {
        let hint = closest_match(name, known).map(|similar| format!(", did you mean {similar}?")).unwrap_or_default();
        report(Severity::Warning, Code::UnknownAnnotation, &field(name), format!("unknown annotation{hint}"));
    }
}

/// Reads an annotation with an enumerated value.
pub(super) fn enum_value<T: Copy>(
    metadata: &ObjectMeta,
    name: &str,
    values: &[(&str, T)],
    report: &mut Report<'_>,
) -> Option<T> {
    let text = text(metadata, name)?;
    let value = values.iter().find(|(name, _)| *name == text).map(|(_, value)| *value);
    if value.is_none() {
        let expected = values.iter().map(|(name, _)| format!("\"{name}\"")).collect::<Vec<_>>().join(" or ");
        report(Severity::Error, Code::UnknownValue, &field(name), format!("must be {expected}, is \"{text}\""));
    }
    value
}

/// Reads a numeric annotation; `expected` describes the valid values in errors.
pub(super) fn number(
    metadata: &ObjectMeta,
    name: &str,
    is_valid: impl Fn(u32) -> bool,
    expected: &str,
    report: &mut Report<'_>,
) -> Option<u32> {
    let text = text(metadata, name)?;
    let value = text.parse().ok().filter(|number| is_valid(*number));
    if value.is_none() {
        report(Severity::Error, Code::OutOfRange, &field(name), format!("must be {expected}, is \"{text}\""));
    }
    value
}

/// The text of an annotation.
pub(super) fn text<'a>(metadata: &'a ObjectMeta, name: &str) -> Option<&'a str> {
    metadata.annotations.as_ref()?.get(name).map(String::as_str)
}

/// The field of an annotation.
pub(super) fn field(name: &str) -> String {
    format!("metadata.annotations[{name}]")
}
