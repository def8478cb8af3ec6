//! Capture filter expressions: `host 10.1.0.11 and tcp and port 443 and dropped`.

use std::num::NonZeroU16;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use vipgate_dataplane::flow::direction::Direction;
use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::observe::capture::{CaptureFilter, OutcomeFilter};
use vipgate_dataplane::policy::spec::NetworkSpec;

use super::filter::{FilterError, protocol};

/// Syntax of a filter, for error messages.
pub const GRAMMAR: &str = "host ADDR, net CIDR, port N, proto NAME (or just tcp, udp, sctp, icmp, icmpv6), \
                           in INTERFACE, dropped, dropped REASON, passed, or a direction (egress, \
                           reply, inbound, service_reply, unchanged, peer_out, peer_in), joined by `and`";

/// Keywords that match any of a packet's addresses; they are synonyms.
const HOST: [&str; 4] = ["host", "endpoint", "vip", "remote"];
const DROPPED: &str = "dropped";
const PASSED: &str = "passed";

/// A filter expression: every criterion that is given must match.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Expression {
    /// Each must contain one of the packet's addresses, before or after translation.
    pub nets: Vec<IpNet>,
    /// One of its ports, before or after translation.
    pub port: Option<NonZeroU16>,
    /// IP protocol number.
    pub protocol: Option<u8>,
    /// Ingress interface.
    pub interface: Option<String>,
    /// dropped, passed, a drop reason or a direction.
    pub outcome: Option<String>,
}

/// Parses a filter; an empty one matches all packets.
///
/// # Errors
/// When the filter is invalid.
pub fn parse(text: &str) -> Result<Expression, FilterError> {
    use FilterError::{InvalidArgument, MissingArgument, UnknownKeyword};
    let mut filter = Expression::default();
    let mut words = text.split_whitespace().filter(|word| !matches!(*word, "and" | "&&")).peekable();
    while let Some(word) = words.next() {
        let mut argument = |what| words.next().ok_or_else(|| MissingArgument(word.to_owned(), what));
        let invalid =
            |text: &str, expected| InvalidArgument { keyword: word.to_owned(), text: text.to_owned(), expected };
        match word {
            _ if HOST.contains(&word) => {
                let text = argument("an address")?;
                let address: std::net::IpAddr = text.parse().map_err(|_| invalid(text, "IP address"))?;
                filter.nets.push(address.into());
            }
            "net" => {
                let text = argument("a prefix")?;
                filter.nets.push(text.parse().map_err(|_| invalid(text, "prefix, such as 10.1.0.0/24"))?);
            }
            "port" => {
                let text = argument("a number")?;
                once(&mut filter.port, text.parse().map_err(|_| invalid(text, "port"))?, "the port")?;
            }
            "proto" => {
                once(&mut filter.protocol, protocol(argument("a name")?)?, "the protocol")?;
            }
            "tcp" | "udp" | "sctp" | "icmp" | "icmpv6" => once(&mut filter.protocol, protocol(word)?, "the protocol")?,
            "in" => {
                let name = argument("an interface's name")?.to_owned();
                once(&mut filter.interface, name, "the interface")?;
            }
            DROPPED => {
                let reason = words.next_if(|next| reason(next).is_some()).unwrap_or(DROPPED);
                once(&mut filter.outcome, reason.to_owned(), "the outcome")?;
            }
            PASSED => once(&mut filter.outcome, PASSED.to_owned(), "the outcome")?,
            _ if reason(word).is_some() || direction(word).is_some() => {
                once(&mut filter.outcome, word.to_owned(), "the outcome")?;
            }
            _ => return Err(UnknownKeyword(word.to_owned())),
        }
    }
    Ok(filter)
}

fn once<T>(field: &mut Option<T>, value: T, what: &'static str) -> Result<(), FilterError> {
    match field.replace(value) {
        None => Ok(()),
        Some(_) => Err(FilterError::Duplicate(what)),
    }
}

fn reason(word: &str) -> Option<DropReason> {
    DropReason::ALL.into_iter().find(|reason| reason.name() == word)
}

fn direction(word: &str) -> Option<Direction> {
    Direction::ALL.into_iter().find(|direction| direction.name() == word)
}

/// Compiles a filter for the workers.
///
/// # Errors
/// When the filter is invalid.
pub fn compile(filter: &Expression, network: &NetworkSpec) -> Result<CaptureFilter, FilterError> {
    let interface = |name: &String| {
        let found = network.interfaces.iter().find(|it| it.name == *name);
        let known = || network.interfaces.iter().map(|it| it.name.as_str()).collect::<Vec<_>>().join(", ");
        let unknown = || FilterError::UnknownInterface { name: name.clone(), known: known() };
        found.map(|it| it.id).ok_or_else(unknown)
    };
    let outcome = match filter.outcome.as_deref() {
        None => OutcomeFilter::Any,
        Some(DROPPED) => OutcomeFilter::Dropped,
        Some(PASSED) => OutcomeFilter::Passed,
        Some(word) => match (reason(word), direction(word)) {
            (Some(reason), _) => OutcomeFilter::DroppedWith(reason),
            (None, Some(direction)) => OutcomeFilter::Forwarded(direction),
            (None, None) => return Err(FilterError::UnknownKeyword(word.to_owned())),
        },
    };
    Ok(CaptureFilter {
        nets: filter.nets.clone(),
        port: filter.port.map(NonZeroU16::get),
        protocol: filter.protocol,
        interface: filter.interface.as_ref().map(interface).transpose()?,
        outcome,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_expressions_are_parsed() {
        let nets = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<IpNet>>();
        let filter = parse("host 10.1.0.11 and tcp and port 443 and dropped no_session").unwrap();
        assert_eq!(filter.nets, nets(&["10.1.0.11/32"]));
        assert_eq!((filter.protocol, filter.port), (Some(6), NonZeroU16::new(443)));
        assert_eq!(filter.outcome.as_deref(), Some("no_session"));
        let filter = parse("vip 2001:db8::1 net 10.0.0.0/8 proto 47 in gw-in passed").unwrap();
        assert_eq!(filter.nets, nets(&["2001:db8::1/128", "10.0.0.0/8"]));
        assert_eq!((filter.protocol, filter.interface.as_deref()), (Some(47), Some("gw-in")));
        assert_eq!(filter.outcome.as_deref(), Some("passed"));
        assert_eq!(parse("dropped and udp").unwrap().outcome.as_deref(), Some("dropped"));
        assert_eq!(parse("egress").unwrap().outcome.as_deref(), Some("egress"));
        assert_eq!(parse("  ").unwrap(), Expression::default());
    }

    #[test]
    fn errors_name_the_invalid_part() {
        for (text, error) in [
            ("hots 10.1.0.11", "unknown keyword \"hots\"; expected host ADDR"),
            ("host", "\"host\" requires an address"),
            ("host ten", "host \"ten\": not a valid IP address"),
            ("net 10.0.0.0/33", "net \"10.0.0.0/33\": not a valid prefix, such as 10.1.0.0/24"),
            ("port 0", "port \"0\": not a valid port"),
            ("tcp udp", "the protocol is given more than once"),
            ("proto gre", "\"gre\" is not a protocol"),
            ("dropped passed", "the outcome is given more than once"),
        ] {
            let message = parse(text).unwrap_err().to_string();
            assert!(message.starts_with(error), "{text}: {message}");
        }
        let network = NetworkSpec::default();
        let filter = Expression { interface: Some("eth7".to_owned()), ..Expression::default() };
        assert_eq!(compile(&filter, &network).unwrap_err().to_string(), "in \"eth7\": this gateway has ");
    }

    #[test]
    fn every_reason_and_direction_is_a_keyword() {
        let network = NetworkSpec::default();
        for reason in DropReason::ALL {
            let filter = compile(&parse(reason.name()).unwrap(), &network).unwrap();
            assert_eq!(filter.outcome, OutcomeFilter::DroppedWith(reason));
        }
        for direction in Direction::ALL {
            let filter = compile(&parse(direction.name()).unwrap(), &network).unwrap();
            assert_eq!(filter.outcome, OutcomeFilter::Forwarded(direction));
        }
    }
}
