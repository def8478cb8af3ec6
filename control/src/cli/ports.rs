//! `vipgate ports`: what of each VIP's ports is in use.

use super::output::{harmless, json, print};
use super::show::{block_on, connect, show};
use super::table::{Table, number, word};
use super::{Ask, Format};
use crate::admin::ports::shortage;
use crate::failure::Failure;

pub(super) fn run(asked: &Ask) -> Result<(), Failure> {
    let reply = block_on(async { Ok(connect(asked).await?.ports().await?) })?;
    if asked.output == Format::Json {
        return json(&reply);
    }
    let is_shared = reply.vips.iter().any(|vip| vip.blocks_elsewhere > 0);
    let mut columns = vec![word("vip"), number("sessions"), number("blocks"), number("claimed"), number("used")];
    columns.splice(3..3, is_shared.then(|| number("elsewhere")));
    let has_refused = reply.vips.iter().any(|vip| vip.refused + vip.refused_in_shard > 0);
    columns.extend(has_refused.then(|| number("refused")));
    columns.extend([number("reserved").optional(), number("guaranteed").optional(), word("name")]);
    let mut table = Table::new(columns);
    for vip in &reply.vips {
        let mut row: Vec<String> = vec![vip.address.clone(), vip.sessions.to_string()];
        row.push(vip.blocks.to_string());
        row.extend(is_shared.then(|| vip.blocks_elsewhere.to_string()));
        row.extend([vip.blocks_claimed, vip.blocks_used].map(|count| count.to_string()));
        row.extend(has_refused.then(|| (vip.refused + vip.refused_in_shard).to_string()));
        row.extend([vip.reserved, vip.guaranteed].map(|count| count.to_string()));
        row.push(if vip.retired { format!("{} (retired)", vip.name) } else { vip.name.clone() });
        table.row(row);
    }
    let is_empty = table.is_empty();
    show(table, "no VIPs")?;
    if is_empty {
        return Ok(());
    }
    for note in reply.vips.iter().flat_map(shortage) {
        print(&format!("{}\n", harmless(&note)))?;
    }
    print(&format!(
        "ports {}-{}, in blocks of 64; one port can stand for many sessions, toward as many destinations\n",
        reply.first, reply.last
    ))
}
