//! `vipgate trace`: what would become of a packet, step by step.

use std::net::{IpAddr, SocketAddr};

use clap::Args;

use super::output::{harmless, json, print};
use super::show::{block_on, connect};
use super::{Ask, Format};
use crate::admin::filter::{protocol, protocol_name};
use crate::admin::proto::{TraceReply, TraceRequest};
use crate::failure::Failure;

/// Which packet.
#[derive(Clone, Debug, Args)]
pub(super) struct Trace {
    #[command(flatten)]
    ask: Ask,
    /// Who sends it; without a port, one that clients have is assumed
    #[arg(long, value_name = "ADDR[:PORT]", value_parser = end)]
    from: End,
    /// Whom it is for; without a port, 443 is assumed
    #[arg(long, value_name = "ADDR[:PORT]", value_parser = end)]
    to: End,
    /// tcp, udp, sctp, or icmp: an echo request
    #[arg(long, value_parser = protocol, default_value = "tcp")]
    proto: u8,
    /// Where it comes in; by default where such a packet would, by its sender
    #[arg(long, value_name = "INTERFACE")]
    interface: Option<String>,
    /// TCP: a later segment of a connection, and not the SYN that begins it
    #[arg(long)]
    later: bool,
    /// The worker whose queue it comes in on
    #[arg(long, value_name = "N", default_value_t = 0)]
    worker: u32,
    /// Bytes of the IP packet
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(20..=1500))]
    length: Option<u32>,
}

/// One end of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct End {
    address: IpAddr,
    /// 0: not given.
    port: u16,
}

/// `ADDR`, `ADDR:PORT` or `[ADDR]:PORT`.
fn end(text: &str) -> Result<End, String> {
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    if let Ok(address) = bare.parse() {
        return Ok(End { address, port: 0 });
    }
    match text.parse::<SocketAddr>() {
        Ok(end) if end.port() == 0 => Err("port 0 is no port".to_owned()),
        Ok(end) => Ok(End { address: end.ip(), port: end.port() }),
        Err(_) => {
            Err("expected an address, with a port if it matters: 10.1.0.11, 10.1.0.11:4000, [fd00::11]:4000".to_owned())
        }
    }
}

pub(super) fn run(asked: &Trace) -> Result<(), Failure> {
    let request = TraceRequest {
        source: asked.from.address.to_string(),
        source_port: asked.from.port.into(),
        destination: asked.to.address.to_string(),
        destination_port: asked.to.port.into(),
        protocol: protocol_name(asked.proto),
        interface: asked.interface.clone().unwrap_or_default(),
        later: asked.later,
        worker: asked.worker,
        length: asked.length.unwrap_or(0),
    };
    let reply = block_on(async { Ok(connect(&asked.ask).await?.trace(request).await?) })?;
    match asked.ask.output {
        Format::Json => json(&reply),
        Format::Table => print(&harmless(&text(&reply))),
    }
}

/// A line a step; where several workers have a say, with their number.
fn text(reply: &TraceReply) -> String {
    let several = reply.steps.iter().any(|step| step.worker != reply.worker);
    let line = |step: &crate::admin::proto::TraceStep| {
        let worker = if several { format!("worker {:<3} ", step.worker) } else { String::new() };
        format!("{worker}{:<12} {}\n", step.stage, step.text)
    };
    reply.steps.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_read_as_people_write_them() {
        let read = |text: &str| end(text).map(|end| (end.address.to_string(), end.port));
        assert_eq!(read("10.1.0.11"), Ok(("10.1.0.11".to_owned(), 0)));
        assert_eq!(read("10.1.0.11:4000"), Ok(("10.1.0.11".to_owned(), 4000)));
        assert_eq!(read("fd00::11"), Ok(("fd00::11".to_owned(), 0)));
        assert_eq!(read("[fd00::11]"), Ok(("fd00::11".to_owned(), 0)));
        assert_eq!(read("[fd00::11]:4000"), Ok(("fd00::11".to_owned(), 4000)));
        for text in ["", "10.1.0", "10.1.0.11:", "10.1.0.11:70000", "pod-a1", "10.1.0.11:0"] {
            assert!(end(text).is_err(), "{text}");
        }
    }
}
