//! The commands that ask a running gateway for a list: its VIPs, its endpoints, its drops.

use std::collections::BTreeMap;

use serde::Serialize;

use super::output::{harmless, json, print};
use super::table::{Table, number, word};
use super::{Ask, Format};
use crate::admin::Client;
use crate::failure::Failure;

/// Reserved ports of a VIP that the table names.
const PORTS_SHOWN: usize = 8;

/// Connects to the gateway that is asked.
pub(super) async fn connect(asked: &Ask) -> Result<Client, Failure> {
    Ok(Client::connect(&asked.socket).await?)
}

/// Runs the future of a command.
pub(super) fn block_on<T>(future: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Failure::runtime)?;
    runtime.block_on(future)
}

pub(super) fn vips(asked: &Ask) -> Result<(), Failure> {
    let reply = block_on(async { Ok(connect(asked).await?.vips().await?) })?;
    if asked.output == Format::Json {
        return json(&reply);
    }
    let mut table =
        Table::new([word("vip"), word("announce"), number("endpoints"), word("name"), word("reserved ports")]);
    for vip in &reply.vips {
        let mut ports: Vec<String> = vip.reserved_ports.iter().take(PORTS_SHOWN).map(u32::to_string).collect();
        if let Some(more @ 1..) = vip.reserved_ports.len().checked_sub(PORTS_SHOWN) {
            ports.push(format!("and {more} more"));
        }
        let (address, announce) = (vip.address.clone(), vip.announce.clone());
        table.row([address, announce, vip.endpoints.to_string(), vip.name.clone(), ports.join(" ")]);
    }
    show(table, "no VIPs")
}

pub(super) fn endpoints(asked: &Ask) -> Result<(), Failure> {
    let reply = block_on(async { Ok(connect(asked).await?.endpoints().await?) })?;
    if asked.output == Format::Json {
        return json(&reply);
    }
    let mut table = Table::new([
        word("endpoint"),
        word("pod"),
        number("sessions"),
        number("refused"),
        word("vips"),
        word("policy"),
    ]);
    for endpoint in &reply.endpoints {
        let vips = if endpoint.vips.is_empty() { "none (dropped)".to_owned() } else { endpoint.vips.join(" ") };
        let pod = if endpoint.name.is_empty() { "-".to_owned() } else { endpoint.name.clone() };
        let (sessions, refused) = (endpoint.sessions.to_string(), endpoint.refused.to_string());
        table.row([endpoint.address.clone(), pod, sessions, refused, vips, endpoint.policy.clone()]);
    }
    show(table, "no endpoints")
}

/// Drops for programs: the count of every reason under its name, and beside them what they mean.
#[derive(Serialize)]
struct Drops<'a> {
    #[serde(flatten)]
    packets: BTreeMap<&'a str, u64>,
    help: BTreeMap<&'a str, &'a str>,
}

pub(super) fn peers(asked: &Ask) -> Result<(), Failure> {
    let reply = block_on(async { Ok(connect(asked).await?.peers().await?) })?;
    if asked.output == Format::Json {
        return json(&reply);
    }
    if reply.peers.is_empty() {
        return print("no Gateway has a manifest: this one is alone and owns everything\n");
    }
    let mut table = Table::new([word("gateway"), word("node"), word("zone"), word("peer address"), word("")]);
    for peer in &reply.peers {
        let own = if peer.own { "this one" } else { "" };
        let cells = [&peer.name, &peer.node, &peer.zone, &peer.address].map(|text| harmless(text));
        let [name, node, zone, address] = cells;
        table.row([name, node, zone, address, own.to_owned()]);
    }
    print(&table.take())
}

pub(super) fn drops(asked: &Ask, all: bool) -> Result<(), Failure> {
    let reply = block_on(async { Ok(connect(asked).await?.drops().await?) })?;
    if asked.output == Format::Json {
        return json(&Drops {
            packets: reply.drops.iter().map(|drop| (drop.reason.as_str(), drop.packets)).collect(),
            help: reply.drops.iter().map(|drop| (drop.reason.as_str(), drop.help.as_str())).collect(),
        });
    }
    let mut table = Table::new([word("reason"), number("packets"), word("meaning").optional()]);
    for drop in reply.drops.iter().filter(|drop| all || drop.packets > 0) {
        table.row([drop.reason.clone(), drop.packets.to_string(), drop.help.clone()]);
    }
    show(table, "no drops")
}

fn show(mut table: Table, nothing: &str) -> Result<(), Failure> {
    if table.is_empty() {
        return print(&format!("{nothing}\n"));
    }
    print(&harmless(&table.take()))
}
