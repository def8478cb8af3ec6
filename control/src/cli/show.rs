//! The commands that ask a running gateway for a list: its VIPs, its endpoints.

use super::output::{harmless, json, print};
use super::table::{Table, number, word};
use super::{Ask, Format};
use crate::admin::Client;
use crate::admin::proto::Share;
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
    let outcome = runtime.block_on(future);
    // A name that is still being resolved holds nobody up.
    runtime.shutdown_background();
    outcome
}

pub(super) fn vips(asked: &Ask) -> Result<(), Failure> {
    let reply = block_on(async { Ok(connect(asked).await?.vips().await?) })?;
    if asked.output == Format::Json {
        return json(&reply);
    }
    let is_dealt = reply.vips.iter().any(|vip| !vip.shares.is_empty());
    let mut columns = vec![
        word("vip"),
        word("announce"),
        number("endpoints"),
        number("sessions"),
        number("in table"),
        word("name"),
        word("reserved ports"),
    ];
    columns.splice(2..2, is_dealt.then(|| word("owner")));
    let mut table = Table::new(columns);
    for vip in &reply.vips {
        let mut ports: Vec<String> = vip.reserved_ports.iter().take(PORTS_SHOWN).map(u32::to_string).collect();
        if let Some(more @ 1..) = vip.reserved_ports.len().checked_sub(PORTS_SHOWN) {
            ports.push(format!("and {more} more"));
        }
        let (address, announce) = (vip.address.clone(), vip.announce.clone());
        let [endpoints, used, sessions] = [vip.endpoints, vip.sessions, vip.table_sessions].map(|it| it.to_string());
        let mut row = vec![address, announce, endpoints, used, sessions, vip.name.clone(), ports.join(" ")];
        row.splice(2..2, is_dealt.then(|| owners(&vip.shares)));
        table.row(row);
    }
    show(table, "no VIPs")?;
    for (vip, conflict) in reply.vips.iter().filter_map(|vip| Some((vip, vip.conflict.as_ref()?))) {
        let (address, mac, age) = (&vip.address, &conflict.mac, conflict.age_seconds);
        print(&format!("{address} is claimed by another host: {mac}, heard {age} s ago\n"))?;
    }
    Ok(())
}

/// Who has a VIP; of one in parts, how many blocks each. Where it isn't home, for whom.
pub(super) fn owners(shares: &[Share]) -> String {
    if let [only] = shares {
        return owner(&only.owner, &only.home);
    }
    let mut sums: Vec<(&str, u32)> = Vec::new();
    for share in shares {
        match sums.iter_mut().find(|(owner, _)| *owner == share.owner) {
            Some((_, blocks)) => *blocks += share.blocks,
            None => sums.push((&share.owner, share.blocks)),
        }
    }
    let sums: Vec<String> = sums.into_iter().map(|(name, blocks)| format!("{} {blocks}", owner(name, name))).collect();
    sums.join(", ")
}

/// Who has something that is another one's at home.
pub(super) fn owner(owner: &str, home: &str) -> String {
    let name = if owner.is_empty() { "NOBODY" } else { owner };
    if owner == home { name.to_owned() } else { format!("{name} for {home}") }
}

pub(super) fn endpoints(asked: &Ask) -> Result<(), Failure> {
    let reply = block_on(async { Ok(connect(asked).await?.endpoints().await?) })?;
    if asked.output == Format::Json {
        return json(&reply);
    }
    let is_dealt = reply.endpoints.iter().any(|endpoint| !endpoint.home.is_empty());
    let mut columns =
        vec![word("endpoint"), word("pod"), number("sessions"), number("refused"), word("vips"), word("policy")];
    columns.splice(2..2, is_dealt.then(|| word("gateway")));
    let mut table = Table::new(columns);
    for endpoint in &reply.endpoints {
        let vips = if endpoint.vips.is_empty() { "none (dropped)".to_owned() } else { endpoint.vips.join(" ") };
        let pod = if endpoint.name.is_empty() { "-".to_owned() } else { endpoint.name.clone() };
        let (sessions, refused) = (endpoint.sessions.to_string(), endpoint.refused.to_string());
        let mut row = vec![endpoint.address.clone(), pod, sessions, refused, vips, endpoint.policy.clone()];
        let whose = || {
            if endpoint.home.is_empty() { "any".to_owned() } else { owner(&endpoint.owner, &endpoint.home) }
        };
        row.splice(2..2, is_dealt.then(whose));
        table.row(row);
    }
    show(table, "no endpoints")
}

pub(super) fn show(mut table: Table, nothing: &str) -> Result<(), Failure> {
    if table.is_empty() {
        return print(&format!("{nothing}\n"));
    }
    print(&harmless(&table.take()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_are_named_with_what_they_have_and_for_whom() {
        let share = |home: &str, owner: &str, blocks| Share {
            home: home.to_owned(),
            owner: owner.to_owned(),
            blocks,
            ..Share::default()
        };
        let of = |shares: &[Share]| owners(shares);
        assert_eq!(of(&[share("a", "a", 1008)]), "a");
        assert_eq!(of(&[share("a", "b", 1008)]), "b for a");
        assert_eq!(of(&[share("a", "", 1008)]), "NOBODY for a");
        assert_eq!(of(&[share("a", "a", 300), share("b", "a", 300), share("c", "c", 408)]), "a 600, c 408");
        assert_eq!(of(&[share("a", "", 300), share("b", "b", 300)]), "NOBODY 300, b 300");
    }
}
