//! `vipgate ports`: port usage of each VIP.

use super::show::{ask, print_table};
use super::table::{Table, number, word};
use super::{Format, QueryArgs};
use crate::admin::Request;
use crate::admin::ports::{PortsReply, exhaustion_notes};
use crate::command_error::CommandError;
use crate::output::{json, print, sanitize};

pub(super) fn run(args: &QueryArgs) -> Result<(), CommandError> {
    let reply: PortsReply = ask(args, &Request::Ports)?;
    if args.output == Format::Json {
        return json(&reply);
    }
    let is_sharded = reply.vips.iter().any(|vip| vip.blocks_elsewhere > 0);
    let mut columns = vec![word("vip"), number("sessions"), number("blocks"), number("claimed"), number("used")];
    columns.splice(3..3, is_sharded.then(|| number("elsewhere")));
    let has_refused = reply.vips.iter().any(|vip| vip.refused + vip.refused_in_shard > 0);
    columns.extend(has_refused.then(|| number("refused")));
    columns.extend([number("reserved").optional(), number("guaranteed").optional(), word("name")]);
    let mut table = Table::new(columns);
    for vip in &reply.vips {
        let mut row: Vec<String> = vec![vip.address.clone(), vip.sessions.to_string()];
        row.push(vip.blocks.to_string());
        row.extend(is_sharded.then(|| vip.blocks_elsewhere.to_string()));
        row.extend([vip.blocks_claimed, vip.blocks_used].map(|count| count.to_string()));
        row.extend(has_refused.then(|| (vip.refused + vip.refused_in_shard).to_string()));
        row.extend([vip.reserved, vip.guaranteed].map(|count| count.to_string()));
        row.push(if vip.retired { format!("{} (retired)", vip.name) } else { vip.name.clone() });
        table.row(row);
    }
    let is_empty = table.is_empty();
    print_table(table, "no VIPs")?;
    if is_empty {
        return Ok(());
    }
    for note in reply.vips.iter().flat_map(exhaustion_notes) {
        print(&format!("{}\n", sanitize(&note)))?;
    }
    print(&format!(
        "ports {}-{}, in blocks of 64; sessions to different destinations can share a port\n",
        reply.first, reply.last
    ))
}
