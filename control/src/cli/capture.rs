//! `vipgate capture`: packets as they come and go, to a file for Wireshark or as lines for people.
//!
//! It always ends: after a number of packets, a time, or a size; and whoever stops it, or loses it, ends it at the gateway, too.

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
use super::output::{self, complain};
use super::show::block_on;
use crate::admin::capture_filter::parse;
use crate::admin::proto::{CaptureReply, CaptureRequest, CapturedPacket};
use crate::admin::{Client, Packets};
use crate::config::units::parse_duration;
use crate::failure::Failure;

/// What to capture.
#[derive(Clone, Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct Capture {
    /// Admin socket of the gateway
    #[arg(long, value_name = "PATH", default_value = "/run/vipgate/gateway.sock")]
    socket: PathBuf,
    /// Which packets; see below. Default: all
    #[arg(long, value_name = "F", default_value = "")]
    filter: String,
    /// Write a pcapng file, both sides of each packet with the verdict as a comment; `-` is stdout. Without it, a line for each packet
    #[arg(short, long, value_name = "FILE")]
    write: Option<PathBuf>,
    /// End after so many packets
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    count: u64,
    /// End after so long
    #[arg(long = "for", value_name = "TIME", default_value = "60s", value_parser = parse_duration)]
    time: Duration,
    /// End when the file is so long, MiB
    #[arg(long, value_name = "MIB", default_value_t = 100)]
    size: u64,
    /// Bytes of each packet
    #[arg(long, value_name = "BYTES", default_value_t = 256, value_parser = clap::value_parser!(u32).range(14..=2048))]
    snap_length: u32,
    /// Packets a second of each worker; what comes beyond is counted and left out
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    rate: u32,
    /// How to show packets where they aren't written to a file; json: one object a line
    #[arg(short, long, value_enum, default_value_t = super::Format::Table)]
    output: super::Format,
}

const AFTER_HELP: &str = "\
FILTERS are joined by `and`:
  host ADDR, net CIDR        one of its addresses, before or after translation, or of its tunnel
  port N                     one of its ports, before or after translation
  proto NAME                 or just tcp, udp, sctp, icmp, icmpv6
  in INTERFACE               where it came in
  dropped [REASON]           it was dropped, for this reason
  passed                     it wasn't dropped
  egress, reply, inbound, service_reply, unchanged, peer_out, peer_in
                             it was sent on in this direction
Example: vipgate capture --filter 'host 10.1.0.11 and tcp and dropped' -w drops.pcapng";

/// Why a capture ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Count,
    Time,
    Size,
    Asked,
    NobodyReads,
    Gateway,
}

/// What was captured.
#[derive(Debug, Default)]
struct Sums {
    packets: u64,
    missed: u64,
}

pub(super) fn run(asked: &Capture) -> Result<(), Failure> {
    let filter = parse(&asked.filter).map_err(|error| Failure::usage(format_args!("--filter: {error}")))?;
    let request = CaptureRequest { filter: Some(filter), snap_length: asked.snap_length, rate: asked.rate };
    let mut paper = Paper::new(asked)?;
    let mut sums = Sums::default();
    let outcome = block_on(async {
        let client = Client::connect(&asked.socket).await?;
        let packets = client.capture(request).await?;
        follow(packets, asked, &mut paper, &mut sums).await
    });
    let (end, closed) = (outcome, paper.close());
    let said = end.as_ref().ok().map(|end| summary(*end, asked, &sums));
    if let Some(said) = said {
        complain(format_args!("vipgate: {said}"));
    }
    end.and(closed)
}

/// Takes packets until it has to end.
async fn follow(mut packets: Packets, asked: &Capture, paper: &mut Paper, sums: &mut Sums) -> Result<End, Failure> {
    let no_signals = |error| Failure::runtime(format_args!("cannot listen to signals: {error}"));
    let mut interrupt = signal(SignalKind::interrupt()).map_err(no_signals)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(no_signals)?;
    let until = Instant::now() + asked.time;
    let mut interfaces = Vec::new();
    loop {
        let reply = tokio::select! {
            reply = packets.next() => reply?,
            () = sleep_until(until) => return Ok(End::Time),
            _ = interrupt.recv() => return Ok(End::Asked),
            _ = terminate.recv() => return Ok(End::Asked),
        };
        let Some(CaptureReply { interfaces: names, packets: new, missed }) = reply else { return Ok(End::Gateway) };
        if !names.is_empty() {
            paper.begin(&names)?;
            interfaces = names;
        }
        sums.missed = missed;
        for packet in new {
            if sums.packets >= asked.count {
                return Ok(End::Count);
            }
            if paper.written() >= asked.size << 20 {
                return Ok(End::Size);
            }
            if !paper.put(&packet, &interfaces)? {
                return Ok(End::NobodyReads);
            }
            sums.packets += 1;
        }
        if sums.packets >= asked.count {
            return Ok(End::Count);
        }
        if !paper.flush()? {
            return Ok(End::NobodyReads);
        }
    }
}

fn summary(end: End, asked: &Capture, sums: &Sums) -> String {
    let why = match end {
        End::Count => format!("--count {} is reached", asked.count),
        End::Time => format!("--for {} s is over", asked.time.as_secs_f64()),
        End::Size => format!("--size {} MiB is reached", asked.size),
        End::Asked => "stopped".to_owned(),
        End::NobodyReads => "nobody reads any more".to_owned(),
        End::Gateway => "the gateway has stopped".to_owned(),
    };
    let missed = match sums.missed {
        0 => String::new(),
        missed => {
            format!("; {missed} packets came while there were too many (--rate), and were not looked at or left out")
        }
    };
    format!("{} packets captured, {why}{missed}", sums.packets)
}

/// Where packets go.
enum Paper {
    /// A file, or stdout.
    Pcapng { writer: Box<Pcapng<BufWriter<Box<dyn Write>>>>, path: PathBuf },
    /// Lines for people, or for programs.
    Lines { json: bool, written: u64 },
}

impl Paper {
    fn new(asked: &Capture) -> Result<Self, Failure> {
        let Some(path) = &asked.write else {
            return Ok(Self::Lines { json: asked.output == super::Format::Json, written: 0 });
        };
        let file: Box<dyn Write> = if path == Path::new("-") {
            Box::new(io::stdout())
        } else {
            Box::new(File::create(path).map_err(|error| unwritten(path, &error))?)
        };
        Ok(Self::Pcapng { writer: Box::new(Pcapng::new(BufWriter::new(file))), path: path.clone() })
    }

    fn begin(&mut self, interfaces: &[String]) -> Result<(), Failure> {
        match self {
            Self::Pcapng { writer, path } => writer.begin(interfaces).map_err(|error| unwritten(path, &error)),
            Self::Lines { .. } => Ok(()),
        }
    }

    /// Writes a packet; says whether anybody still reads.
    fn put(&mut self, packet: &CapturedPacket, interfaces: &[String]) -> Result<bool, Failure> {
        match self {
            Self::Pcapng { writer, path } => gone(writer.put(packet), path),
            Self::Lines { json, written } => {
                let line = if *json { lines::json(packet, interfaces)? } else { lines::text(packet, interfaces) };
                *written += line.len() as u64;
                output::put(&line)
            }
        }
    }

    /// What was captured so far can be read.
    fn flush(&mut self) -> Result<bool, Failure> {
        match self {
            Self::Pcapng { writer, path } => gone(writer.flush(), path),
            Self::Lines { .. } => Ok(true),
        }
    }

    fn written(&self) -> u64 {
        match self {
            Self::Pcapng { writer, .. } => writer.written(),
            Self::Lines { written, .. } => *written,
        }
    }

    fn close(mut self) -> Result<(), Failure> {
        self.flush().map(drop)
    }
}

/// Somebody who stops reading a pipe is no error; a full disk is.
fn gone(outcome: io::Result<()>, path: &Path) -> Result<bool, Failure> {
    match outcome {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(unwritten(path, &error)),
    }
}

fn unwritten(path: &Path, error: &io::Error) -> Failure {
    let hint = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "; what was captured before is in the file",
        _ => "",
    };
    Failure::runtime(format_args!("cannot write {}: {error}{hint}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::capture_filter::GRAMMAR;

    #[test]
    fn the_help_says_what_the_filter_says() {
        for word in GRAMMAR.split([' ', ',', '(', ')', '`']).filter(|word| word.len() > 2) {
            let is_explained = AFTER_HELP.contains(word) || ["just", "joined", "direction"].contains(&word);
            assert!(is_explained, "{word} is not in the help");
        }
    }
}
