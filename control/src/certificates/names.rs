//! Names in certificates: DNS names of the policy server, and names of gateways, which are their nodes'.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;
use vipgate_policy::manifest::is_object_name;

/// Longest DNS name, and longest label of it (RFC 1035 section 2.3.4).
const MAX_NAME: usize = 253;
const MAX_LABEL: usize = 63;
/// Longest key of a Secret, without the ending `.crt` or `.key`.
const MAX_GATEWAY: usize = 253 - ".crt".len();
/// Gateways' names whose files in a Secret have another meaning: the CA, and the certificate of all nodes.
const RESERVED: [&str; 2] = ["ca", "tls"];

/// Why a name is invalid.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(crate) enum NameError {
    /// It is no DNS name.
    #[error("`{0}` is no DNS name: labels of lower case letters, digits and `-`, at most {MAX_LABEL} each")]
    NotDns(String),
    /// It is too long.
    #[error("`{0}` is longer than {1} characters")]
    TooLong(String, usize),
    /// It means something else in a Secret.
    #[error("a gateway can't be named `{0}`: Secrets have other certificates by that name")]
    Reserved(String),
}

/// A DNS name in lower case.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct DnsName(String);

/// A gateway's name: a DNS name that a Secret can have as a key.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct GatewayName(DnsName);

/// Names of gateways, separated by commas. None are an empty text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct GatewayNames(pub(crate) Vec<GatewayName>);

impl DnsName {
    pub(super) fn as_str(&self) -> &str {
        &self.0
    }
}

impl GatewayName {
    pub(super) fn as_dns(&self) -> &DnsName {
        &self.0
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

impl FromStr for GatewayName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let name: DnsName = text.parse()?;
        if text.len() > MAX_GATEWAY {
            return Err(NameError::TooLong(text.to_owned(), MAX_GATEWAY));
        }
        if RESERVED.contains(&text) {
            return Err(NameError::Reserved(text.to_owned()));
        }
        Ok(Self(name))
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

impl fmt::Display for GatewayName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
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
    fn names_are_those_of_dns_that_are_keys_of_secrets() {
        for valid in ["node-1", "1", "a.b.example", "ip-10-0-0-1.eu-west-1.compute.internal", &long(249)] {
            assert_eq!(valid.parse::<GatewayName>().unwrap().to_string(), valid);
        }
        let label = "x".repeat(64);
        for invalid in ["", "a..b", ".a", "a.", "-a", "a-", "a.-b", "A", "a_b", "a b", "*.a", "ä", "a/b", "a\n", &label]
        {
            assert_eq!(invalid.parse::<DnsName>(), Err(NameError::NotDns(invalid.to_owned())));
        }
        assert!(long(253).parse::<DnsName>().is_ok());
        assert!(matches!(long(254).parse::<DnsName>(), Err(NameError::TooLong(_, 253))));
        assert!(matches!(long(250).parse::<GatewayName>(), Err(NameError::TooLong(_, 249))));
        for reserved in ["ca", "tls"] {
            assert_eq!(reserved.parse::<GatewayName>(), Err(NameError::Reserved(reserved.to_owned())));
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
