//! Which packets, as people write it: `host 10.1.0.11 and tcp and port 443 and dropped`.

use ipnet::IpNet;
use thiserror::Error;
use vipgate_dataplane::counters::{Direction, DropReason};
use vipgate_dataplane::snapshot::spec::NetworkSpec;
use vipgate_dataplane::watch::tap::{Outcome, TapFilter};

use super::filter::{FilterError, protocol};
use super::proto::CaptureFilter;

/// What a filter may say.
pub const GRAMMAR: &str = "host ADDR, net CIDR, port N, proto NAME (or just tcp, udp, sctp, icmp, icmpv6), in INTERFACE, \
                           dropped, dropped REASON, passed, or a direction (egress, reply, inbound, service_reply, \
                           unchanged, peer_out, peer_in), joined by `and`";

/// Words for one of a packet's addresses: which one it is, is the same question.
const HOST: [&str; 4] = ["host", "endpoint", "vip", "remote"];
const DROPPED: &str = "dropped";
const PASSED: &str = "passed";

/// A filter that means nothing.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum CaptureFilterError {
    /// A word that nobody knows.
    #[error("\"{0}\" means nothing here: {GRAMMAR}")]
    Word(String),
    /// A word that needs another one behind it.
    #[error("\"{0}\" needs {1} behind it")]
    Alone(String, &'static str),
    /// Not what a word needs behind it.
    #[error("{word} \"{text}\": that is no {wanted}")]
    Argument {
        /// The word.
        word: String,
        /// What is behind it.
        text: String,
        /// What should be.
        wanted: &'static str,
    },
    /// Something that can be said once.
    #[error("{0} is said twice, and one packet can't be both")]
    Twice(&'static str),
    /// No interface of the gateway.
    #[error("in \"{name}\": this gateway has {known}")]
    Interface {
        /// What was said.
        name: String,
        /// What there is.
        known: String,
    },
    /// Not a protocol.
    #[error(transparent)]
    Protocol(#[from] FilterError),
}

/// Reads a filter; an empty one is for all packets.
///
/// # Errors
/// When it means nothing.
pub fn parse(text: &str) -> Result<CaptureFilter, CaptureFilterError> {
    use CaptureFilterError::{Alone, Argument, Word};
    let mut filter = CaptureFilter::default();
    let mut words = text.split_whitespace().filter(|word| !matches!(*word, "and" | "&&")).peekable();
    while let Some(word) = words.next() {
        let mut behind = |what| words.next().ok_or_else(|| Alone(word.to_owned(), what));
        let wrong = |text: &str, wanted| Argument { word: word.to_owned(), text: text.to_owned(), wanted };
        match word {
            _ if HOST.contains(&word) => {
                let text = behind("an address")?;
                let address: std::net::IpAddr = text.parse().map_err(|_| wrong(text, "IP address"))?;
                filter.nets.push(IpNet::from(address).to_string());
            }
            "net" => {
                let text = behind("a prefix")?;
                let net: IpNet = text.parse().map_err(|_| wrong(text, "prefix, such as 10.1.0.0/24"))?;
                filter.nets.push(net.to_string());
            }
            "port" => {
                let text = behind("a number")?;
                let port: u16 = text.parse().ok().filter(|port| *port > 0).ok_or_else(|| wrong(text, "port"))?;
                once(&mut filter.port, port.into(), "the port")?;
            }
            "proto" => {
                let text = behind("a name")?;
                protocol(text)?;
                once(&mut filter.protocol, text.to_owned(), "the protocol")?;
            }
            "tcp" | "udp" | "sctp" | "icmp" | "icmpv6" => once(&mut filter.protocol, word.to_owned(), "the protocol")?,
            "in" => {
                let name = behind("an interface's name")?.to_owned();
                once(&mut filter.interface, name, "the interface")?;
            }
            DROPPED => {
                let reason = words.next_if(|next| reason(next).is_some()).unwrap_or(DROPPED);
                once(&mut filter.outcome, reason.to_owned(), "how its way ends")?;
            }
            PASSED => once(&mut filter.outcome, PASSED.to_owned(), "how its way ends")?,
            _ if reason(word).is_some() || direction(word).is_some() => {
                once(&mut filter.outcome, word.to_owned(), "how its way ends")?;
            }
            _ => return Err(Word(word.to_owned())),
        }
    }
    Ok(filter)
}

fn once<T: Default + PartialEq>(place: &mut T, value: T, what: &'static str) -> Result<(), CaptureFilterError> {
    if *place != T::default() {
        return Err(CaptureFilterError::Twice(what));
    }
    *place = value;
    Ok(())
}

fn reason(word: &str) -> Option<DropReason> {
    DropReason::ALL.into_iter().find(|reason| reason.name() == word)
}

fn direction(word: &str) -> Option<Direction> {
    Direction::ALL.into_iter().find(|direction| direction.name() == word)
}

/// A filter for workers.
///
/// # Errors
/// When it means nothing.
pub fn compile(filter: &CaptureFilter, network: &NetworkSpec) -> Result<TapFilter, CaptureFilterError> {
    let nets = filter.nets.iter().map(|text| {
        let net = text.parse::<IpNet>().ok().or_else(|| text.parse::<std::net::IpAddr>().ok().map(IpNet::from));
        let wrong = || CaptureFilterError::Argument { word: "net".to_owned(), text: text.clone(), wanted: "prefix" };
        net.ok_or_else(wrong)
    });
    let interface = match filter.interface.as_str() {
        "" => None,
        name => {
            let found = network.interfaces.iter().find(|it| it.name == name);
            let known = || network.interfaces.iter().map(|it| it.name.as_str()).collect::<Vec<_>>().join(", ");
            let wrong = || CaptureFilterError::Interface { name: name.to_owned(), known: known() };
            Some(found.ok_or_else(wrong)?.id)
        }
    };
    let outcome = match filter.outcome.as_str() {
        "" => Outcome::Any,
        DROPPED => Outcome::Dropped,
        PASSED => Outcome::Passed,
        word => match (reason(word), direction(word)) {
            (Some(reason), _) => Outcome::DroppedFor(reason),
            (None, Some(direction)) => Outcome::Sent(direction),
            (None, None) => return Err(CaptureFilterError::Word(word.to_owned())),
        },
    };
    let port = u16::try_from(filter.port).map_err(|_| CaptureFilterError::Argument {
        word: "port".to_owned(),
        text: filter.port.to_string(),
        wanted: "port",
    })?;
    let number = if filter.protocol.is_empty() { None } else { Some(protocol(&filter.protocol)?) };
    Ok(TapFilter {
        nets: nets.collect::<Result<_, _>>()?,
        port: (port > 0).then_some(port),
        protocol: number,
        interface,
        outcome,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_people_write_is_understood() {
        let filter = parse("host 10.1.0.11 and tcp and port 443 and dropped no_session").unwrap();
        assert_eq!(filter.nets, ["10.1.0.11/32"]);
        assert_eq!((filter.protocol.as_str(), filter.port, filter.outcome.as_str()), ("tcp", 443, "no_session"));
        let filter = parse("vip 2001:db8::1 net 10.0.0.0/8 proto 47 in gw-in passed").unwrap();
        assert_eq!(filter.nets, ["2001:db8::1/128", "10.0.0.0/8"]);
        assert_eq!((filter.protocol.as_str(), filter.interface.as_str()), ("47", "gw-in"));
        assert_eq!(filter.outcome, "passed");
        assert_eq!(parse("dropped and udp").unwrap().outcome, "dropped");
        assert_eq!(parse("egress").unwrap().outcome, "egress");
        assert_eq!(parse("  ").unwrap(), CaptureFilter::default());
    }

    #[test]
    fn what_means_nothing_is_named() {
        for (text, error) in [
            ("hots 10.1.0.11", "\"hots\" means nothing here: host ADDR"),
            ("host", "\"host\" needs an address behind it"),
            ("host ten", "host \"ten\": that is no IP address"),
            ("net 10.0.0.0/33", "net \"10.0.0.0/33\": that is no prefix, such as 10.1.0.0/24"),
            ("port 0", "port \"0\": that is no port"),
            ("tcp udp", "the protocol is said twice, and one packet can't be both"),
            ("proto gre", "\"gre\" is no protocol"),
            ("dropped passed", "how its way ends is said twice"),
        ] {
            let said = parse(text).unwrap_err().to_string();
            assert!(said.starts_with(error), "{text}: {said}");
        }
        let network = NetworkSpec::default();
        let filter = CaptureFilter { interface: "eth7".to_owned(), ..CaptureFilter::default() };
        assert_eq!(compile(&filter, &network).unwrap_err().to_string(), "in \"eth7\": this gateway has ");
    }

    #[test]
    fn every_reason_and_direction_can_be_asked_for() {
        let network = NetworkSpec::default();
        for reason in DropReason::ALL {
            let filter = compile(&parse(reason.name()).unwrap(), &network).unwrap();
            assert_eq!(filter.outcome, Outcome::DroppedFor(reason));
        }
        for direction in Direction::ALL {
            let filter = compile(&parse(direction.name()).unwrap(), &network).unwrap();
            assert_eq!(filter.outcome, Outcome::Sent(direction));
        }
    }
}
