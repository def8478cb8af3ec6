//! `vipgate-bench`: benchmarks of the packet path in memory, of gateways over veth (with restart and failover), and of
//! policy updates. Each result is one JSON object per line; `plot` draws them.
#![forbid(unsafe_code)]
#![expect(clippy::cast_precision_loss, reason = "nanoseconds and counts are far below 2^52")]

mod baseline;
mod failover;
mod load;
mod machine;
mod open;
mod packet_order;
mod packets;
mod path;
mod peer_gateway;
mod plot;
mod policy;
mod rig;
mod usage;
mod wire;

use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};

/// Benchmarks of vipgate: the packet path in memory, gateways over veth, and policy updates
#[derive(Debug, Parser)]
#[command(name = "vipgate-bench", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Packet path of established sessions: parse, lookup, rewrite, checksums, timers, statistics
    Path(path::Options),
    /// New sessions per second: empty table, steady churn, and near port exhaustion
    Open(open::Options),
    /// Gateways over veth, vipgate against others in one run: throughput, loss, latency; needs root
    Wire(wire::Options),
    /// Restart after SIGKILL under traffic: time to forward again, and sessions restored; needs root
    Restart(wire::restart::Options),
    /// Failover between several gateways under established connections: survival and outage; needs root
    Failover(failover::Options),
    /// Draws SVGs from the output of `path`, `wire --loads` and `failover`
    Plot(plot::Options),
    /// Policy updates: time to effect, a group that shares all VIPs, a server of many gateways
    Policy(policy::Options),
}

/// Direction of packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Direction {
    /// From pods.
    Forward,
    /// Replies to pods.
    Reply,
    /// Half forward, half reply.
    Mix,
    /// Inbound to a Service, and the backends' replies, half and half.
    Inbound,
    /// Replies of sessions owned by another gateway, forwarded to it by a tunnel; without a standby session.
    Tunnel,
    /// The same, with a standby session.
    TunnelStandby,
    /// Replies received from the tunnel by the owner of the session.
    TunnelIn,
}

impl Direction {
    /// Whether a peer gateway is involved.
    fn involves_peer(self) -> bool {
        matches!(self, Self::Tunnel | Self::TunnelStandby | Self::TunnelIn)
    }
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Path(options) => path::run(&options),
        Command::Open(options) => open::run(&options),
        Command::Wire(options) => wire::run(&options),
        Command::Restart(options) => wire::restart::run(&options),
        Command::Failover(options) => failover::run(&options),
        Command::Plot(options) => plot::run(&options),
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
