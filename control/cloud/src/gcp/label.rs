//! Claims as labels. Values of labels have at most 63 characters of `[a-z0-9_-]`
//! (<https://cloud.google.com/compute/docs/labeling-resources>): a longer text is escaped and cut into several labels, so that
//! different texts never have the same labels, and the text can be read back.
//!
//! ```text
//!   vipgate-cluster    prod-eu                     letters, digits and hyphens as they are
//!   vipgate-vip        shop_-web__front            "/" is "_-", "." is "__", any other byte "_" and two hexadecimal digits
//!   vipgate-vip-1      ...                         what is beyond 63 characters
//!   vipgate-allocated  token
//! ```

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::provider::Claim;

const CLUSTER: &str = "vipgate-cluster";
const VIP: &str = "vipgate-vip";
const ALLOCATED: &str = "vipgate-allocated";
/// Prefix of all labels of ours.
const PREFIX: &str = "vipgate-";
/// Maximum length of a value.
const MAX_VALUE: usize = 63;
/// Maximum number of labels of one text; a resource has 64 at most.
const MAX_PARTS: usize = 16;

type Labels = BTreeMap<String, String>;

/// Whether a key and a value of a pool can be a label.
pub(super) fn is_label(key: &str, value: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-_".contains(&byte);
    let is_part = |text: &str| text.len() <= MAX_VALUE && text.bytes().all(is_allowed);
    key.starts_with(|it: char| it.is_ascii_lowercase()) && is_part(key) && is_part(value)
}

/// The claim that labels have.
pub(super) fn claim_of(labels: &Labels) -> Option<Claim> {
    if !labels.contains_key(CLUSTER) && !labels.contains_key(VIP) {
        return None;
    }
    // Half a claim is somebody's: it equals none of ours, and the address isn't free.
    let part = |key| read(labels, key).unwrap_or_default();
    Some(Claim { cluster: part(CLUSTER), owner: part(VIP) })
}

/// The token of an address that vipgate allocated.
pub(super) fn token_of(labels: &Labels) -> Option<String> {
    read(labels, ALLOCATED)
}

/// Labels with another claim; `None` if it is too long for labels.
pub(super) fn with_claim(labels: &Labels, claim: Option<&Claim>) -> Option<Labels> {
    let is_of =
        |key: &str, name: &str| key.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'));
    let mut changed = labels.clone();
    changed.retain(|key, _| !is_of(key, CLUSTER) && !is_of(key, VIP));
    if let Some(claim) = claim {
        write_parts(&mut changed, CLUSTER, &claim.cluster)?;
        write_parts(&mut changed, VIP, &claim.owner)?;
    }
    Some(changed)
}

/// Labels of an address that vipgate allocates; `None` if something is too long.
pub(super) fn allocated(tags: &Labels, claim: &Claim, token: &str) -> Option<Labels> {
    let mut labels = tags.clone();
    labels.retain(|key, _| !key.starts_with(PREFIX));
    write_parts(&mut labels, ALLOCATED, token)?;
    with_claim(&labels, Some(claim))
}

fn part_key(key: &str, at: usize) -> String {
    if at == 0 { key.to_owned() } else { format!("{key}-{at}") }
}

fn write_parts(labels: &mut Labels, key: &str, text: &str) -> Option<()> {
    let escaped = escape(text);
    let count = escaped.len().div_ceil(MAX_VALUE).max(1);
    if count > MAX_PARTS {
        return None;
    }
    for at in 0..count {
        let end = escaped.len().min((at + 1) * MAX_VALUE);
        labels.insert(part_key(key, at), escaped[at * MAX_VALUE..end].to_owned());
    }
    Some(())
}

fn read(labels: &Labels, key: &str) -> Option<String> {
    let mut escaped = labels.get(key)?.clone();
    for at in 1..MAX_PARTS {
        let Some(part) = labels.get(&part_key(key, at)) else { break };
        escaped.push_str(part);
    }
    unescape(&escaped)
}

fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len() + 2);
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'0'..=b'9' | b'-' => escaped.push(char::from(byte)),
            b'/' => escaped.push_str("_-"),
            b'.' => escaped.push_str("__"),
            _ => {
                // Writing to a String can't fail.
                let _ = write!(escaped, "_{byte:02x}");
            }
        }
    }
    escaped
}

fn unescape(escaped: &str) -> Option<String> {
    let mut bytes = escaped.bytes();
    let mut text = Vec::with_capacity(escaped.len());
    while let Some(byte) = bytes.next() {
        if byte != b'_' {
            text.push(byte);
            continue;
        }
        match bytes.next()? {
            b'-' => text.push(b'/'),
            b'_' => text.push(b'.'),
            high => {
                let digit = |byte: u8| char::from(byte).to_digit(16);
                text.push(u8::try_from(digit(high)? << 4 | digit(bytes.next()?)?).ok()?);
            }
        }
    }
    String::from_utf8(text).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn claims_are_read_back_and_other_labels_stay(cluster in ".{0,40}", owner in ".{0,80}", token in "[a-zA-Z0-9-]{1,70}") {
            let claim = Claim { cluster, owner };
            let tags = Labels::from([("team".to_owned(), "edge".to_owned())]);
            let labels = allocated(&tags, &claim, &token).expect("short enough");
            prop_assert!(labels.iter().all(|(key, value)| is_label(key, value)), "{:?}", labels);
            prop_assert_eq!(claim_of(&labels), Some(claim));
            prop_assert_eq!(token_of(&labels), Some(token));
            let unclaimed = with_claim(&labels, None).expect("nothing to write");
            prop_assert_eq!(claim_of(&unclaimed), None);
            prop_assert_eq!(unclaimed.get("team"), tags.get("team"));
        }
    }

    #[test]
    fn a_shorter_claim_leaves_no_part_of_the_longer_one() {
        let long = Claim { cluster: "c".to_owned(), owner: "n/".to_owned() + &"x".repeat(250) };
        let short = Claim { cluster: "c".to_owned(), owner: "n/x".to_owned() };
        let labels = with_claim(&Labels::new(), Some(&long)).expect("short enough");
        assert_eq!(labels.len(), 1 + 5);
        let labels = with_claim(&labels, Some(&short)).expect("short enough");
        assert_eq!(labels.len(), 2);
        assert_eq!(labels["vipgate-vip"], "n_-x");
        let endless = Claim { cluster: "c".to_owned(), owner: "x".repeat(2000) };
        assert_eq!(with_claim(&Labels::new(), Some(&endless)), None);
    }

    #[test]
    fn half_a_claim_is_not_free() {
        let labels = Labels::from([("vipgate-vip".to_owned(), "_".to_owned())]);
        assert_eq!(claim_of(&labels), Some(Claim { cluster: String::new(), owner: String::new() }));
    }
}
