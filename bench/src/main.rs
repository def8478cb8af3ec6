//! `vipgate-bench`: the packet path alone, without sockets, and whole gateways over veth. Each result is one JSON object on a line.
#![expect(clippy::cast_precision_loss, reason = "nanoseconds and counts are far below 2^52")]

mod open;
mod packets;
mod path;
mod rig;
mod wire;

use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};

/// Measures the packet path that the gateway runs, on packets in memory, and whole gateways.
#[derive(Debug, Parser)]
#[command(name = "vipgate-bench", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Packets of open sessions, in random order: parse, look up, rewrite, checksums, timers, statistics
    Path {
        /// Sessions that are open; several, separated by commas, are measured one after the other
        #[arg(long, value_delimiter = ',', default_values_t = [1000, 65_536, 1_048_576])]
        sessions: Vec<u32>,
        /// Which way packets go
        #[arg(long, value_enum, default_value_t = Direction::Mix)]
        direction: Direction,
        /// Bytes of a frame, without its checksum
        #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u16).range(60..=1514))]
        size: u16,
        /// Measured rounds; the median is reported
        #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
        rounds: u32,
        /// Results are JSON in any case
        #[arg(long)]
        json: bool,
    },
    /// New sessions, from an empty table
    Open {
        /// Sessions to open; several, separated by commas, are measured one after the other
        #[arg(long, value_delimiter = ',', default_values_t = [1_048_576])]
        sessions: Vec<u32>,
        /// Results are JSON in any case
        #[arg(long)]
        json: bool,
    },
    /// Whole gateways over veth, vipgate and others in one run: packets a second, loss, delay; needs root
    Wire(wire::Options),
}

/// Which way packets go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Direction {
    /// Pods' packets.
    Forward,
    /// Answers.
    Reply,
    /// Half and half.
    Mix,
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Path { sessions, direction, size, rounds, json: _ } => path::run(&sessions, direction, size, rounds),
        Command::Open { sessions, json: _ } => open::run(&sessions),
        Command::Wire(options) => wire::run(&options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vipgate-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}
