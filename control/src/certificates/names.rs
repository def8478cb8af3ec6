//! Names in certificates: DNS names of the policy server, and names of gateways, which are their nodes'.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;
use vipgate_policy::manifest::is_object_name;

/// Longest DNS name, and longest label of it (RFC 1035 section 2.3.4).
const MAX_NAME: usize = 253;
const MAX_LABEL: usize = 63;
/// What stands for a gateway's name in a pattern.
const PLACEHOLDER: &str = "{name}";

/// Why a name is invalid.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(crate) enum NameError {
    /// It is no DNS name.
    #[error("`{0}` is no DNS name: labels of lower case letters, digits and `-`, at most {MAX_LABEL} each")]
    NotDns(String),
    /// It is too long.
    #[error("`{0}` is longer than {1} characters")]
    TooLong(String, usize),
    /// All gateways would have the same.
    #[error("`{0}` would be one object for all gateways: it must contain `{PLACEHOLDER}`, such as `{0}-{PLACEHOLDER}`")]
    NoPlaceholder(String),
}

/// A DNS name in lower case.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct DnsName(String);

/// Names of gateways, separated by commas. None are an empty text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct GatewayNames(pub(crate) Vec<DnsName>);

/// Names of objects, one for each gateway, with its name at `{name}`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NamePattern {
    before: String,
    after: String,
}

impl DnsName {
    pub(super) fn as_str(&self) -> &str {
        &self.0
    }
}

impl NamePattern {
    pub(super) fn name_of(&self, gateway: &DnsName) -> String {
        format!("{}{gateway}{}", self.before, self.after)
    }
}

impl FromStr for DnsName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        if text.len() > MAX_NAME {
            return Err(NameError::TooLong(text.to_owned(), MAX_NAME));
        }
        if is_object_name(text) && text.split('.').all(|label| label.len() <= MAX_LABEL) {
            Ok(Self(text.to_owned()))
        } else {
            Err(NameError::NotDns(text.to_owned()))
        }
    }
}

impl FromStr for NamePattern {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        match text.split_once(PLACEHOLDER) {
            Some((before, after)) => Ok(Self { before: before.to_owned(), after: after.to_owned() }),
            None => Err(NameError::NoPlaceholder(text.to_owned())),
        }
    }
}

impl FromStr for GatewayNames {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
        names.map(str::parse).collect::<Result<_, _>>().map(Self)
    }
}

impl fmt::Display for DnsName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
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
            assert_eq!(valid.parse::<DnsName>().unwrap().to_string(), valid);
        }
        let label = "x".repeat(64);
        for invalid in ["", "a..b", ".a", "a.", "-a", "a-", "a.-b", "A", "a_b", "a b", "*.a", "ä", "a/b", "a\n", &label]
        {
            assert_eq!(invalid.parse::<DnsName>(), Err(NameError::NotDns(invalid.to_owned())));
        }
        assert!(matches!(long(254).parse::<DnsName>(), Err(NameError::TooLong(_, 253))));
    }

    #[test]
    fn each_gateway_has_an_object_of_its_own() {
        let node = "node-1".parse().unwrap();
        for (pattern, name) in
            [("gateway-{name}-tls", "gateway-node-1-tls"), ("{name}", "node-1"), ("a.{name}", "a.node-1")]
        {
            assert_eq!(pattern.parse::<NamePattern>().unwrap().name_of(&node), name);
        }
        for without in ["gateway-tls", "", "{node}", "name"] {
            assert_eq!(without.parse::<NamePattern>(), Err(NameError::NoPlaceholder(without.to_owned())));
        }
    }

    #[test]
    fn a_list_may_be_empty() {
        let names = |text: &str| text.parse::<GatewayNames>().map(|it| it.0.iter().map(ToString::to_string).collect());
        assert_eq!(names(""), Ok(Vec::new()));
        assert_eq!(names("node-1, node-2,"), Ok(vec!["node-1".to_owned(), "node-2".to_owned()]));
        assert_eq!(names("node-1,node_2"), Err(NameError::NotDns("node_2".to_owned())));
    }
}
