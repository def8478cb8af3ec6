//! `vipgate-bench`: the packet path alone, without sockets; whole gateways over veth, killed ones among them; and what changes of
//! policy cost. Each result is one JSON object on a line.
#![expect(clippy::cast_precision_loss, reason = "nanoseconds and counts are far below 2^52")]

mod failover;
mod flood;
mod group;
mod load;
mod neighbor;
mod netns;
mod open;
mod order;
mod packets;
mod path;
mod policy;
mod process;
mod rig;
mod usage;
mod watch;
mod wire;
mod yardstick;

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
    /// Packets of open sessions: parse, look up, rewrite, checksums, timers, statistics
    Path(path::Options),
    /// New sessions: from an empty table, with as many ending, and at a share of a far side's ports
    Open(open::Options),
    /// Whole gateways over veth, vipgate and others in one run: packets a second, loss, delay; needs root
    Wire(wire::Options),
    /// Gateways that are killed while a pod sends: how soon the next process forwards, and what it takes up; needs root
    Restart(wire::restart::Options),
    /// First packets to a next hop that the kernel doesn't know, vipgate and nftables in one run: delay, and how many of a burst are kept; needs root
    Neighbor(neighbor::Options),
    /// Several gateways, one of which is killed under connections that stand, and comes back: survival and outage; needs root
    Failover(failover::Options),
    /// One tenant's connections while another tenant's VIP is flooded, each kind of flood in turn: goodput, delay, new connections; needs root
    Flood(flood::Options),
    /// What it costs packets to be watched: captures, the log of sessions, `top`
    Watch(watch::Options),
    /// Changes of policy: until they are in force, under packets, and at a server of many gateways
    Policy(policy::Options),
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
    /// Clients' packets to a Service, and what its backends answer, half and half.
    Inbound,
    /// Answers that another gateway has the session of: into the tunnel to it, at one that knows nothing of the session.
    Tunnel,
    /// The same, at the gateway that has a copy of the session.
    TunnelCopy,
    /// Answers as they come out of the tunnel at the gateway that has the session.
    TunnelIn,
}

impl Direction {
    /// Whether it takes another gateway.
    fn is_between_gateways(self) -> bool {
        matches!(self, Self::Tunnel | Self::TunnelCopy | Self::TunnelIn)
    }
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Path(options) => path::run(&options),
        Command::Open(options) => open::run(&options),
        Command::Wire(options) => wire::run(&options),
        Command::Restart(options) => wire::restart::run(&options),
        Command::Neighbor(options) => neighbor::run(&options),
        Command::Failover(options) => failover::run(&options),
        Command::Flood(options) => flood::run(&options),
        Command::Watch(options) => watch::run(&options),
        Command::Policy(options) => policy::run(&options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vipgate-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}
