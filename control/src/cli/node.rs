//! `vipgate node`: runs an agent, or asks one.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use serde::de::DeserializeOwned;

use super::Format;
use super::show::{block_on, print_table};
use super::table::{Table, number, word};
use crate::admin::Client;
use crate::command_error::CommandError;
use crate::node;
use crate::node::admin::{EndpointsReply, MarkUser, Request, StatusReply, TraceReply, Tunnel};
use crate::output::{json, print, sanitize};

/// The agent, or a question to it.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(super) struct Node {
    /// Run an agent with this configuration
    #[arg(long, value_name = "FILE", required = true)]
    config: Option<PathBuf>,
    #[command(subcommand)]
    action: Option<NodeAction>,
}

#[derive(Debug, Subcommand)]
pub(super) enum NodeAction {
    /// Show what is programmed, and whether the kernel agrees
    #[command(after_help = "Example:\n  vipgate node status")]
    Status(NodeArgs),
    /// Remove what the agent has programmed, once it doesn't run any more: pods' packets leave as the CNI has it
    #[command(after_help = "Example:\n  vipgate node detach --config /etc/vipgate/node.yaml")]
    Detach {
        /// Configuration of the agent
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
    /// Print the nftables table of a node without an agent, to be loaded at boot: nothing of pods leaves until the agent runs
    #[command(
        after_help = "Example:\n  vipgate node boot-table --config /etc/vipgate/node.yaml >/etc/nftables.d/vipgate.nft"
    )]
    BootTable {
        /// Configuration of the agent, with `pod_cidrs`
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
    /// Show the node's pods, and where their packets go
    #[command(after_help = "Example:\n  vipgate node endpoints")]
    Endpoints(NodeArgs),
    /// Show what becomes of a pod's packet: which gateway, why, by which rule
    #[command(after_help = "Example:\n  vipgate node trace tenant-a/web-0 198.51.100.10")]
    Trace {
        #[command(flatten)]
        args: NodeArgs,
        /// Address or namespace/name of the pod
        #[arg(value_name = "POD")]
        pod: String,
        /// Address of the destination
        #[arg(value_name = "ADDR")]
        destination: String,
    },
}

#[derive(Debug, Args)]
pub(super) struct NodeArgs {
    /// Admin socket of the agent
    #[arg(long, default_value = "/run/vipgate/node.sock", value_name = "PATH")]
    socket: PathBuf,
    /// Output format
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
}

pub(super) fn run(node: &Node) -> Result<(), CommandError> {
    match (&node.action, &node.config) {
        (None, Some(config)) => node::run(config),
        (None, None) => Err(CommandError::usage("--config FILE is required")),
        (Some(NodeAction::BootTable { config }), _) => print(&node::boot_table(config)?),
        (Some(NodeAction::Status(args)), _) => status(args),
        (Some(NodeAction::Detach { config }), _) => block_on(node::detach(config)),
        (Some(NodeAction::Endpoints(args)), _) => endpoints(args),
        (Some(NodeAction::Trace { args, pod, destination }), _) => trace(args, pod, destination),
    }
}

/// The reply of the agent to a request.
fn ask<T: DeserializeOwned>(args: &NodeArgs, request: &Request) -> Result<T, CommandError> {
    block_on(async { Ok(Client::connect_agent(&args.socket).await?.ask(request).await?) })
}

fn status(args: &NodeArgs) -> Result<(), CommandError> {
    let reply: StatusReply = ask(args, &Request::Status)?;
    if args.output == Format::Json {
        return json(&reply);
    }
    print(&sanitize(&overview(&reply)))?;
    let mut table = Table::new([
        word("gateway"),
        word("tunnel endpoint"),
        word("mark"),
        number("table"),
        number("pods"),
        number("packets to"),
        number("from"),
        number("rtt us"),
        word("state"),
    ]);
    for gateway in &reply.gateways {
        let or_dash = |text: String, is_there: bool| if is_there { text } else { "-".to_owned() };
        table.row([
            gateway.name.clone(),
            or_dash(gateway.endpoint.clone(), !gateway.endpoint.is_empty()),
            or_dash(format!("{:#x}", gateway.mark), gateway.mark > 0),
            or_dash(gateway.table.to_string(), gateway.table > 0),
            gateway.pods.to_string(),
            gateway.packets_to.to_string(),
            gateway.packets_from.to_string(),
            or_dash(gateway.rtt_us.to_string(), gateway.rtt_us > 0),
            gateway.state.clone(),
        ]);
    }
    print_table(table, "no gateways")?;
    for drop in reply.drops.iter().filter(|drop| drop.packets > 0) {
        print(&format!("dropped: {} {} ({})\n", drop.packets, drop.reason, drop.description))?;
    }
    Ok(())
}

/// What stands above the table of gateways.
fn overview(reply: &StatusReply) -> String {
    let mut lines = Vec::new();
    let StatusReply { pods, held, kernel, .. } = reply;
    let node = if reply.node.is_empty() { "unknown: no policy yet" } else { &reply.node };
    lines.push(format!("node       {node}, vipgate {}", reply.version));
    lines.push(if reply.connected {
        format!("policy     connected, membership view {}", reply.view)
    } else {
        format!("policy     not connected ({}), membership view {}", reply.server_error, reply.view)
    });
    if let Some(tunnel) = &reply.tunnel {
        let Tunnel { device, endpoint, vni, mtu } = tunnel;
        lines.push(format!("tunnel     {device}, {endpoint}, VNI {vni}, MTU {mtu}"));
    }
    lines.push(format!(
        "pods       {} covered, {} uncovered, {} without a VIP, {} without a gateway",
        pods.covered, pods.uncovered, pods.no_vip, pods.unreachable
    ));
    lines.push(format!("held       {} now, {} released, {} dropped", held.now, held.released, held.dropped));
    let state = match (kernel.agrees, kernel.error.as_str()) {
        (true, _) => format!("as programmed; repaired {} times", kernel.repairs),
        (false, "") => format!("somebody had changed {}: repaired now", kernel.repaired),
        (false, error) => format!("not programmed: {error}"),
    };
    lines.push(format!("kernel     {state}"));
    lines.extend(reply.mark_users.iter().map(|user| {
        let MarkUser { place, bits } = user;
        format!("conflict   {place} uses bits {bits:#x} of `mark_mask`")
    }));
    lines.join("\n") + "\n\n"
}

fn endpoints(args: &NodeArgs) -> Result<(), CommandError> {
    let reply: EndpointsReply = ask(args, &Request::Endpoints)?;
    if args.output == Format::Json {
        return json(&reply);
    }
    let mut table = Table::new([word("address"), word("pod"), word("target"), word("gateways"), word("policy")]);
    for endpoint in &reply.endpoints {
        let or_dash = |text: &str| if text.is_empty() { "-".to_owned() } else { text.to_owned() };
        table.row([
            endpoint.address.clone(),
            or_dash(&endpoint.name),
            endpoint.target.clone(),
            or_dash(&endpoint.gateways.join(" ")),
            or_dash(&endpoint.policy),
        ]);
    }
    print_table(table, "no pods")
}

fn trace(args: &NodeArgs, pod: &str, destination: &str) -> Result<(), CommandError> {
    let request = Request::Trace { pod: pod.to_owned(), destination: destination.to_owned() };
    let reply: TraceReply = ask(args, &request)?;
    if args.output == Format::Json {
        return json(&reply);
    }
    let width = reply.steps.iter().map(|step| step.at.len()).max().unwrap_or_default();
    let mut lines: Vec<String> = reply.steps.iter().map(|step| format!("{:width$}  {}", step.at, step.text)).collect();
    lines.push(reply.outcome);
    print(&sanitize(&(lines.join("\n") + "\n")))
}
