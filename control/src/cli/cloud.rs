//! `vipgate cloud`: public addresses of cloud providers, at a policy server.

use std::fmt::Write;

use clap::{Args, Subcommand};

use super::Format;
use super::policy::{self, Server, StatusClient};
use super::show::block_on;
use super::table::{Table, number, word};
use crate::command_error::CommandError;
use crate::output;
use crate::output::{format_duration, sanitize};
use crate::xds::proto::{CloudPool, CloudReply, CloudRequest};

#[derive(Debug, Subcommand)]
pub(super) enum CloudAction {
    /// Show addresses and gateways: where each address is attached, and where it is to be
    #[command(after_help = "Example:\n  vipgate cloud status --server http://127.0.0.1:18000")]
    Status(CloudArgs),
    /// Show what would be done next, and what failed
    #[command(after_help = "Example:\n  vipgate cloud plan --server http://127.0.0.1:18000")]
    Plan(CloudArgs),
}

/// Arguments of `vipgate cloud`.
#[derive(Clone, Debug, Args)]
pub(super) struct CloudArgs {
    #[command(flatten)]
    server: Server,
    /// Output format
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
}

pub(super) fn run(action: &CloudAction) -> Result<(), CommandError> {
    let (args, render): (_, fn(&CloudReply) -> String) = match action {
        CloudAction::Status(args) => (args, status),
        CloudAction::Plan(args) => (args, plan),
    };
    let request = async |mut client: StatusClient| client.cloud(CloudRequest {}).await;
    let reply = block_on(policy::call(&args.server.server, &args.server.files, request))?;
    match args.output {
        Format::Json => output::json(&reply),
        Format::Table => output::print(&sanitize(&render(&reply))),
    }
}

/// The server's part, and a line for each pool.
fn render_server(out: &mut String, reply: &CloudReply) {
    let role = match (reply.cluster.is_empty(), reply.dry_run, reply.leads) {
        (true, ..) => "not configured (`cloud.cluster`): nothing is observed",
        (_, true, _) => "dry run: nothing is changed",
        (.., true) => "this server makes the changes",
        (.., false) => "another server makes the changes",
    };
    // Writing to a String can't fail.
    let _ = writeln!(out, "cluster   {}, {role}", if reply.cluster.is_empty() { "-" } else { &reply.cluster });
    if reply.pools.is_empty() {
        let _ = writeln!(out, "pools     no AddressPool has a provider");
    }
}

fn render_pool(out: &mut String, pool: &CloudPool) {
    let age = if pool.observed {
        format!("observed {} ago", format_duration(pool.age_seconds * 1000))
    } else {
        "not observed yet".to_owned()
    };
    // Writing to a String can't fail.
    let _ = writeln!(out, "\npool {} ({}), {age}", pool.name, pool.provider);
    if !pool.error.is_empty() {
        let _ = writeln!(out, "  ERROR: {}", pool.error);
    }
}

fn status(reply: &CloudReply) -> String {
    let mut out = String::new();
    render_server(&mut out, reply);
    for pool in &reply.pools {
        render_pool(&mut out, pool);
        let mut table = Table::new([
            word("address"),
            word("state"),
            word("gateway"),
            word("attached to"),
            word("private"),
            word("owner"),
            word("id"),
            word("notes"),
        ]);
        for it in &pool.addresses {
            let state = if it.state == "pending" { "PENDING".to_owned() } else { it.state.clone() };
            table.row([
                it.address.clone(),
                state,
                it.gateway.clone(),
                it.attached_to.clone(),
                it.private.clone(),
                it.owner.clone(),
                it.id.clone(),
                it.problem.clone(),
            ]);
        }
        out += &table.take();
        let [v4, v6] = ["capacity", "capacity6"].map(number);
        let mut table = Table::new([word("gateway"), word("zone"), v4, v6, word("nic"), word("notes")]);
        for nic in &pool.nics {
            let (v4, v6) = (nic.capacity.to_string(), nic.ipv6_capacity.to_string());
            table.row([nic.gateway.clone(), nic.zone.clone(), v4, v6, nic.id.clone(), nic.missing.join("; ")]);
        }
        out.push('\n');
        out += &table.take();
    }
    out
}

fn plan(reply: &CloudReply) -> String {
    let mut out = String::new();
    render_server(&mut out, reply);
    for pool in &reply.pools {
        render_pool(&mut out, pool);
        if pool.actions.is_empty() && pool.observed {
            out.push_str("  nothing to do\n");
        }
        // Writing to a String can't fail.
        for action in &pool.actions {
            let _ = writeln!(out, "  {:<10}{}", action.kind, action.description);
        }
        for failure in &pool.failures {
            let _ = writeln!(out, "  FAILED: {}: {}: {}", failure.kind, failure.code, failure.message);
        }
        for it in pool.addresses.iter().filter(|it| !it.problem.is_empty()) {
            let _ = writeln!(out, "  PROBLEM: {}: {}", it.address, it.problem);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::xds::proto::{CloudAction, CloudAddress, CloudFailure, CloudNic};

    fn reply() -> CloudReply {
        let address = |address: &str, state: &str, problem: &str| CloudAddress {
            address: address.to_owned(),
            id: "eipalloc-1".to_owned(),
            state: state.to_owned(),
            owner: "Service default/web".to_owned(),
            gateway: "gw-a".to_owned(),
            attached_to: "gw-a".to_owned(),
            private: "10.0.0.5".to_owned(),
            problem: problem.to_owned(),
        };
        let pool = CloudPool {
            name: "public".to_owned(),
            provider: "aws".to_owned(),
            error: String::new(),
            observed: true,
            age_seconds: 4,
            addresses: vec![address("203.0.113.1", "attached", ""), address("203.0.113.2", "pending", "no room")],
            nics: vec![CloudNic {
                gateway: "gw-a".to_owned(),
                id: "eni-1".to_owned(),
                capacity: 14,
                ipv6_capacity: 15,
                ..CloudNic::default()
            }],
            actions: vec![CloudAction { kind: "attach".to_owned(), description: "203.0.113.2 to gw-a".to_owned() }],
            failures: vec![CloudFailure {
                kind: "attach".to_owned(),
                code: "RequestLimitExceeded".to_owned(),
                message: "slow down".to_owned(),
            }],
        };
        CloudReply { cluster: "prod".to_owned(), dry_run: false, leads: true, pools: vec![pool] }
    }

    #[test]
    fn status_shows_each_address_and_gateway() {
        let text = status(&reply());
        for part in [
            "this server makes the changes",
            "pool public (aws)",
            "203.0.113.1",
            "PENDING",
            "no room",
            "eni-1",
            "14",
            "15",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn plan_shows_what_would_be_done_and_what_failed() {
        let mut reply = reply();
        let text = plan(&reply);
        for part in ["attach    203.0.113.2 to gw-a", "RequestLimitExceeded", "PROBLEM: 203.0.113.2: no room"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        reply.dry_run = true;
        reply.pools[0].actions.clear();
        let text = plan(&reply);
        assert!(text.contains("dry run: nothing is changed") && text.contains("nothing to do"), "{text}");
        let none = CloudReply::default();
        assert!(plan(&none).contains("not configured") && plan(&none).contains("no AddressPool has a provider"));
    }
}
