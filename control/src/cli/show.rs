//! `vipgate vips` and `vipgate endpoints`, and what all commands share that query a gateway.

use serde::de::DeserializeOwned;

use super::table::{Table, number, word};
use super::{Format, QueryArgs};
use crate::admin::endpoints::EndpointsReply;
use crate::admin::membership::Share;
use crate::admin::vips::VipsReply;
use crate::admin::{Client, Request};
use crate::command_error::CommandError;
use crate::output::{json, print, sanitize};

/// Limit of reserved ports of a VIP in the table.
const MAX_PORTS_SHOWN: usize = 8;

/// Connects to the gateway at `--socket`.
pub(super) async fn connect(args: &QueryArgs) -> Result<Client, CommandError> {
    Ok(Client::connect(&args.socket).await?)
}

/// The reply of the gateway at `--socket` to a request.
pub(super) fn ask<T: DeserializeOwned>(args: &QueryArgs, request: &Request) -> Result<T, CommandError> {
    block_on(async { Ok(connect(args).await?.ask(request).await?) })
}

/// Runs a command's future to completion.
pub(super) fn block_on<T>(future: impl Future<Output = Result<T, CommandError>>) -> Result<T, CommandError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(CommandError::runtime)?;
    let outcome = runtime.block_on(future);
    // Doesn't wait for a pending DNS lookup.
    runtime.shutdown_background();
    outcome
}

pub(super) fn vips(args: &QueryArgs) -> Result<(), CommandError> {
    let reply: VipsReply = ask(args, &Request::Vips)?;
    if args.output == Format::Json {
        return json(&reply);
    }
    let has_shards = reply.vips.iter().any(|vip| !vip.shares.is_empty());
    let mut columns = vec![
        word("vip"),
        word("announce"),
        number("endpoints"),
        number("sessions"),
        number("in table"),
        word("name"),
        word("reserved ports"),
    ];
    columns.splice(2..2, has_shards.then(|| word("owner")));
    let has_private = reply.vips.iter().any(|vip| !vip.private.is_empty());
    columns.splice(1..1, has_private.then(|| word("private")));
    let mut table = Table::new(columns);
    for vip in &reply.vips {
        let mut ports: Vec<String> = vip.reserved_ports.iter().take(MAX_PORTS_SHOWN).map(u32::to_string).collect();
        if let Some(more @ 1..) = vip.reserved_ports.len().checked_sub(MAX_PORTS_SHOWN) {
            ports.push(format!("and {more} more"));
        }
        let (address, announce) = (vip.address.clone(), vip.announce.clone());
        let [endpoints, used, sessions] = [vip.endpoints, vip.sessions, vip.table_sessions].map(|it| it.to_string());
        let mut row = vec![address, announce, endpoints, used, sessions, vip.name.clone(), ports.join(" ")];
        row.splice(2..2, has_shards.then(|| owners(&vip.shares)));
        row.splice(1..1, has_private.then(|| vip.private.clone()));
        table.row(row);
    }
    print_table(table, "no VIPs")?;
    for (vip, conflict) in reply.vips.iter().filter_map(|vip| Some((vip, vip.conflict.as_ref()?))) {
        let (address, mac, age) = (&vip.address, &conflict.mac, conflict.age_seconds);
        print(&format!("{address} is claimed by another host: {mac}, last seen {age} s ago\n"))?;
    }
    Ok(())
}

/// Owners of a VIP: with their number of blocks if there are several shards, else with the home if that is another
/// gateway.
pub(super) fn owners(shards: &[Share]) -> String {
    if let [only] = shards {
        return owner_text(&only.owner, &only.home);
    }
    let mut sums: Vec<(&str, u32)> = Vec::new();
    for shard in shards {
        match sums.iter_mut().find(|(owner, _)| *owner == shard.owner) {
            Some((_, blocks)) => *blocks += shard.blocks,
            None => sums.push((&shard.owner, shard.blocks)),
        }
    }
    let sums: Vec<String> =
        sums.into_iter().map(|(name, blocks)| format!("{} {blocks}", owner_text(name, name))).collect();
    sums.join(", ")
}

/// An owner, with the home gateway if that is another one.
pub(super) fn owner_text(owner: &str, home: &str) -> String {
    let name = if owner.is_empty() { "NONE" } else { owner };
    if owner == home { name.to_owned() } else { format!("{name} for {home}") }
}

pub(super) fn endpoints(args: &QueryArgs) -> Result<(), CommandError> {
    let reply: EndpointsReply = ask(args, &Request::Endpoints)?;
    if args.output == Format::Json {
        return json(&reply);
    }
    let has_homes = reply.endpoints.iter().any(|endpoint| !endpoint.home.is_empty());
    let mut columns =
        vec![word("endpoint"), word("pod"), number("sessions"), number("refused"), word("vips"), word("policy")];
    columns.splice(2..2, has_homes.then(|| word("owner")));
    let mut table = Table::new(columns);
    for endpoint in &reply.endpoints {
        let vips = if endpoint.vips.is_empty() { "none (dropped)".to_owned() } else { endpoint.vips.join(" ") };
        let pod = if endpoint.name.is_empty() { "-".to_owned() } else { endpoint.name.clone() };
        let (sessions, refused) = (endpoint.sessions.to_string(), endpoint.refused.to_string());
        let mut row = vec![endpoint.address.clone(), pod, sessions, refused, vips, endpoint.policy.clone()];
        let owner_cell = || {
            if endpoint.home.is_empty() { "any".to_owned() } else { owner_text(&endpoint.owner, &endpoint.home) }
        };
        row.splice(2..2, has_homes.then(owner_cell));
        table.row(row);
    }
    print_table(table, "no endpoints")
}

pub(super) fn print_table(mut table: Table, empty_text: &str) -> Result<(), CommandError> {
    if table.is_empty() {
        return print(&format!("{empty_text}\n"));
    }
    print(&sanitize(&table.take()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_are_shown_with_blocks_and_home() {
        let shard = |home: &str, owner: &str, blocks| Share {
            home: home.to_owned(),
            owner: owner.to_owned(),
            blocks,
            ..Share::default()
        };
        let of = |shards: &[Share]| owners(shards);
        assert_eq!(of(&[shard("a", "a", 1008)]), "a");
        assert_eq!(of(&[shard("a", "b", 1008)]), "b for a");
        assert_eq!(of(&[shard("a", "", 1008)]), "NONE for a");
        assert_eq!(of(&[shard("a", "a", 300), shard("b", "a", 300), shard("c", "c", 408)]), "a 600, c 408");
        assert_eq!(of(&[shard("a", "", 300), shard("b", "b", 300)]), "NONE 300, b 300");
    }
}
