//! `vipgate capture`: packets before and after translation, as a pcapng file for Wireshark or as text lines.
//!
//! A capture always ends: after a number of packets, a time, or a size, or when the client disconnects.

mod lines;
mod pcapng;

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Instant, sleep_until};

use self::pcapng::Pcapng;
use super::show::block_on;
use crate::admin::capture::{CaptureReply, CaptureRequest, CapturedPacket};
use crate::admin::capture_filter::parse;
use crate::admin::{Client, Request};
use crate::command_error::CommandError;
use crate::config::units::parse_duration;
use crate::output;
use crate::output::print_error;

/// Arguments of `vipgate capture`.
#[derive(Clone, Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct Capture {
    /// Admin socket of the gateway
    #[arg(long, value_name = "PATH", default_value = "/run/vipgate/gateway.sock")]
    socket: PathBuf,
    /// Filter expression, see below; default: all packets
    #[arg(long, value_name = "F", default_value = "")]
    filter: String,
    /// Write a pcapng file with each packet before and after translation and its verdict as a comment; `-`: stdout.
    /// Without it, print a line per packet
    #[arg(short, long, value_name = "FILE")]
    write: Option<PathBuf>,
    /// End after this number of packets
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    count: u64,
    /// End after this time
    #[arg(long = "for", value_name = "TIME", default_value = "60s", value_parser = parse_duration)]
    time: Duration,
    /// End at this file size, MiB
    #[arg(long, value_name = "MIB", default_value_t = 100)]
    size: u64,
    /// Captured bytes per packet
    #[arg(long, value_name = "BYTES", default_value_t = 256, value_parser = clap::value_parser!(u32).range(14..=2048))]
    snap_length: u32,
    /// Rate limit in packets per second and worker; packets beyond it are counted as missed
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    rate: u32,
    /// Output format without a file; json: one object per line
    #[arg(short, long, value_enum, default_value_t = super::Format::Table)]
    output: super::Format,
}

const AFTER_HELP: &str = "\
FILTERS are joined by `and`:
  host ADDR, net CIDR        one of its addresses, before or after translation, or of its tunnel
  port N                     one of its ports, before or after translation
  proto NAME                 or just tcp, udp, sctp, icmp, icmpv6
  in INTERFACE               its ingress interface
  dropped [REASON]           dropped, for this reason
  passed                     not dropped
  egress, reply, inbound, service_reply, unchanged, peer_out, peer_in
                             forwarded in this direction

Example:
  vipgate capture --filter 'host 10.1.0.11 and tcp and dropped' -w drops.pcapng";

/// Why a capture ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Count,
    Time,
    Size,
    Stopped,
    OutputClosed,
    GatewayStopped,
}

/// Capture counters.
#[derive(Debug, Default)]
struct Counts {
    packets: u64,
    missed: u64,
}

pub(super) fn run(args: &Capture) -> Result<(), CommandError> {
    let filter = parse(&args.filter).map_err(|error| CommandError::usage(error).context("--filter"))?;
    let request = CaptureRequest { filter, snap_length: args.snap_length, rate: args.rate };
    let mut sink = Sink::new(args)?;
    let mut counts = Counts::default();
    let outcome = block_on(async {
        let mut client = Client::connect(&args.socket).await?;
        client.send(&Request::Capture(request)).await?;
        follow(client, args, &mut sink, &mut counts).await
    });
    let (end, closed) = (outcome, sink.close());
    let summary = end.as_ref().ok().map(|end| summary(*end, args, &counts));
    if let Some(summary) = summary {
        print_error(format_args!("vipgate: {summary}"));
    }
    end.and(closed)
}

/// Writes packets until the capture ends.
async fn follow(mut client: Client, args: &Capture, sink: &mut Sink, counts: &mut Counts) -> Result<End, CommandError> {
    let signal_error = |error| CommandError::runtime(error).context("cannot handle signals");
    let mut interrupt = signal(SignalKind::interrupt()).map_err(signal_error)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(signal_error)?;
    let deadline = Instant::now() + args.time;
    let mut interfaces = Vec::new();
    loop {
        let reply = tokio::select! {
            reply = client.next::<CaptureReply>() => reply?,
            () = sleep_until(deadline) => return Ok(End::Time),
            _ = interrupt.recv() => return Ok(End::Stopped),
            _ = terminate.recv() => return Ok(End::Stopped),
        };
        let Some(CaptureReply { interfaces: names, packets: new, missed }) = reply else {
            return Ok(End::GatewayStopped);
        };
        if !names.is_empty() {
            sink.begin(&names)?;
            interfaces = names;
        }
        counts.missed = missed;
        for packet in new {
            if counts.packets >= args.count {
                return Ok(End::Count);
            }
            if sink.written() >= args.size << 20 {
                return Ok(End::Size);
            }
            if !sink.put(&packet, &interfaces)? {
                return Ok(End::OutputClosed);
            }
            counts.packets += 1;
        }
        if counts.packets >= args.count {
            return Ok(End::Count);
        }
        if !sink.flush()? {
            return Ok(End::OutputClosed);
        }
    }
}

fn summary(end: End, args: &Capture, counts: &Counts) -> String {
    let reason = match end {
        End::Count => format!("--count {} is reached", args.count),
        End::Time => format!("--for {} s is over", args.time.as_secs_f64()),
        End::Size => format!("--size {} MiB is reached", args.size),
        End::Stopped => "stopped".to_owned(),
        End::OutputClosed => "output closed".to_owned(),
        End::GatewayStopped => "the gateway has stopped".to_owned(),
    };
    let missed = match counts.missed {
        0 => String::new(),
        missed => format!("; {missed} packets missed beyond the rate limit (--rate)"),
    };
    format!("{} packets captured, {reason}{missed}", counts.packets)
}

/// Destination of captured packets.
enum Sink {
    /// A pcapng file, or stdout.
    Pcapng { writer: Box<Pcapng<BufWriter<Box<dyn Write>>>>, path: PathBuf },
    /// Lines of text or JSON on stdout.
    Lines { json: bool, written: u64 },
}

impl Sink {
    fn new(args: &Capture) -> Result<Self, CommandError> {
        let Some(path) = &args.write else {
            return Ok(Self::Lines { json: args.output == super::Format::Json, written: 0 });
        };
        let file: Box<dyn Write> = if path == Path::new("-") {
            Box::new(io::stdout())
        } else {
            Box::new(File::create(path).map_err(|error| write_error(path, &error))?)
        };
        Ok(Self::Pcapng { writer: Box::new(Pcapng::new(BufWriter::new(file))), path: path.clone() })
    }

    fn begin(&mut self, interfaces: &[String]) -> Result<(), CommandError> {
        match self {
            Self::Pcapng { writer, path } => writer.begin(interfaces).map_err(|error| write_error(path, &error)),
            Self::Lines { .. } => Ok(()),
        }
    }

    /// Writes a packet; false if the reader has closed the pipe.
    fn put(&mut self, packet: &CapturedPacket, interfaces: &[String]) -> Result<bool, CommandError> {
        match self {
            Self::Pcapng { writer, path } => or_closed(writer.put(packet), path),
            Self::Lines { json, written } => {
                let line = if *json { lines::json(packet, interfaces)? } else { lines::text(packet, interfaces) };
                *written += line.len() as u64;
                output::put(&line)
            }
        }
    }

    /// Flushes packets captured so far.
    fn flush(&mut self) -> Result<bool, CommandError> {
        match self {
            Self::Pcapng { writer, path } => or_closed(writer.flush(), path),
            Self::Lines { .. } => Ok(true),
        }
    }

    fn written(&self) -> u64 {
        match self {
            Self::Pcapng { writer, .. } => writer.written(),
            Self::Lines { written, .. } => *written,
        }
    }

    fn close(mut self) -> Result<(), CommandError> {
        self.flush().map(drop)
    }
}

/// False for a closed pipe; an error for anything else, such as a full disk.
fn or_closed(outcome: io::Result<()>, path: &Path) -> Result<bool, CommandError> {
    match outcome {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(write_error(path, &error)),
    }
}

fn write_error(path: &Path, error: &io::Error) -> CommandError {
    let hint = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "; the file has the packets captured before",
        _ => "",
    };
    CommandError::runtime(format!("cannot write {}: {error}{hint}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::capture_filter::GRAMMAR;

    #[test]
    fn the_help_describes_every_filter_keyword() {
        for word in GRAMMAR.split([' ', ',', '(', ')', '`']).filter(|word| word.len() > 2) {
            let is_described = AFTER_HELP.contains(word) || ["just", "joined", "direction"].contains(&word);
            assert!(is_described, "{word} is not in the help");
        }
    }
}
