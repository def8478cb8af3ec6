//! DNS names of the policy server, as in its certificate.

use std::str::FromStr;

use vipgate_policy::manifest::is_object_name;

/// Longest DNS name, and longest label of it (RFC 1035 section 2.3.4).
const MAX_NAME: usize = 253;
const MAX_LABEL: usize = 63;

/// A DNS name in lower case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DnsName(String);

impl DnsName {
    pub(super) fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for DnsName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.len() > MAX_NAME {
            return Err(format!("`{text}` is longer than {MAX_NAME} characters"));
        }
        if is_object_name(text) && text.split('.').all(|label| label.len() <= MAX_LABEL) {
            Ok(Self(text.to_owned()))
        } else {
            Err(not_dns(text))
        }
    }
}

fn not_dns(text: &str) -> String {
    format!("`{text}` is no DNS name: labels of lower case letters, digits and `-`, at most {MAX_LABEL} each")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A name of this length, of labels of 50.
    fn long(length: usize) -> String {
        let mut name = "x".repeat(length);
        (49..length.saturating_sub(1)).step_by(50).for_each(|at| name.replace_range(at..=at, "."));
        name
    }

    #[test]
    fn names_are_those_of_dns() {
        for valid in ["node-1", "1", "a.b.example", "ip-10-0-0-1.eu-west-1.compute.internal", &long(253)] {
            assert_eq!(valid.parse::<DnsName>().unwrap().as_str(), valid);
        }
        let label = "x".repeat(64);
        for invalid in ["", "a..b", ".a", "a.", "-a", "a-", "a.-b", "A", "a_b", "a b", "*.a", "ä", "a/b", "a\n", &label]
        {
            assert_eq!(invalid.parse::<DnsName>(), Err(not_dns(invalid)));
        }
        assert!(long(254).parse::<DnsName>().is_err_and(|reason| reason.ends_with("` is longer than 253 characters")));
    }
}
