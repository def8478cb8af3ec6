//! `vipgate trace`: a synthetic packet through the live tables, step by step.

use std::net::{IpAddr, SocketAddr};

use clap::Args;
use vipgate_dataplane::io::frame_layout::FrameLayout;

use super::show::ask;
use super::{Format, QueryArgs};
use crate::admin::Request;
use crate::admin::filter::protocol;
use crate::admin::trace::{TraceReply, TraceRequest, TraceStep};
use crate::command_error::CommandError;
use crate::output::{json, print, sanitize};

/// The longest packet that any gateway can receive.
const MAX_LENGTH: i64 = FrameLayout::MultiBuffer.max_mtu() as i64;

/// Arguments of `vipgate trace`.
#[derive(Clone, Debug, Args)]
pub(super) struct Trace {
    #[command(flatten)]
    gateway: QueryArgs,
    /// Source; default port: 40000
    #[arg(long, value_name = "ADDR[:PORT]", value_parser = socket_address)]
    from: SocketAddress,
    /// Destination; default port: 443
    #[arg(long, value_name = "ADDR[:PORT]", value_parser = socket_address)]
    to: SocketAddress,
    /// Protocol: tcp, udp, sctp, or icmp (an echo request)
    #[arg(long, value_parser = protocol, default_value = "tcp")]
    proto: u8,
    /// Ingress interface; default: by the source
    #[arg(long, value_name = "INTERFACE")]
    interface: Option<String>,
    /// TCP: a segment of an established connection instead of a SYN
    #[arg(long, alias = "later")]
    established: bool,
    /// Worker that receives the packet
    #[arg(long, value_name = "N", default_value_t = 0)]
    worker: u32,
    /// Length of the IP packet in bytes
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(20..=MAX_LENGTH))]
    length: Option<u32>,
}

/// Address and port of one side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SocketAddress {
    address: IpAddr,
    /// 0: the default.
    port: u16,
}

/// `ADDR`, `ADDR:PORT` or `[ADDR]:PORT`.
fn socket_address(text: &str) -> Result<SocketAddress, &'static str> {
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    if let Ok(address) = bare.parse() {
        return Ok(SocketAddress { address, port: 0 });
    }
    match text.parse::<SocketAddr>() {
        Ok(parsed) if parsed.port() == 0 => Err("port 0 is not a port"),
        Ok(parsed) => Ok(SocketAddress { address: parsed.ip(), port: parsed.port() }),
        Err(_) => Err("expected an address, optionally with a port: 10.1.0.11, 10.1.0.11:4000, [fd00::11]:4000"),
    }
}

pub(super) fn run(args: &Trace) -> Result<(), CommandError> {
    let request = TraceRequest {
        source: args.from.address,
        source_port: args.from.port,
        destination: args.to.address,
        destination_port: args.to.port,
        protocol: args.proto,
        interface: args.interface.clone(),
        established: args.established,
        worker: args.worker,
        length: args.length.unwrap_or(0),
    };
    let reply: TraceReply = ask(&args.gateway, &Request::Trace(request))?;
    match args.gateway.output {
        Format::Json => json(&reply),
        Format::Table => print(&sanitize(&text(&reply))),
    }
}

/// One line per step; with the worker's number if there are several.
fn text(reply: &TraceReply) -> String {
    let several = reply.steps.iter().any(|step| step.worker != reply.worker);
    let line = |step: &TraceStep| {
        let worker = if several { format!("worker {:<3} ", step.worker) } else { String::new() };
        format!("{worker}{:<12} {}\n", step.stage, step.text)
    };
    reply.steps.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct CommandLine {
        #[command(flatten)]
        trace: Trace,
    }

    #[test]
    fn later_is_an_alias_of_established() {
        for (flag, established) in [(None, false), (Some("--established"), true), (Some("--later"), true)] {
            let line = ["trace", "--from", "10.1.0.11", "--to", "198.51.100.10:443"].into_iter().chain(flag);
            assert_eq!(CommandLine::try_parse_from(line).unwrap().trace.established, established, "{flag:?}");
        }
    }

    #[test]
    fn addresses_are_parsed_with_and_without_a_port() {
        let parse = |text: &str| socket_address(text).map(|parsed| (parsed.address.to_string(), parsed.port));
        assert_eq!(parse("10.1.0.11"), Ok(("10.1.0.11".to_owned(), 0)));
        assert_eq!(parse("10.1.0.11:4000"), Ok(("10.1.0.11".to_owned(), 4000)));
        assert_eq!(parse("fd00::11"), Ok(("fd00::11".to_owned(), 0)));
        assert_eq!(parse("[fd00::11]"), Ok(("fd00::11".to_owned(), 0)));
        assert_eq!(parse("[fd00::11]:4000"), Ok(("fd00::11".to_owned(), 4000)));
        for text in ["", "10.1.0", "10.1.0.11:", "10.1.0.11:70000", "pod-a1", "10.1.0.11:0"] {
            assert!(socket_address(text).is_err(), "{text}");
        }
    }
}
