//! `vipgate placement --dry-run`: what a change of manifests would move between the gateways of a group.
//!
//! The manifests are compiled here, and compared with the placement in force at a running gateway. Which gateways are
//! active doesn't matter.

use std::fmt::Write;
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;
use vipgate_policy::compiler::{
    GatewayChanges, Homes, PlacementDiff, PortChanges, Tenancy, VipChanges, placement_diff,
};

use super::show::ask;
use super::table::{Table, number, word};
use super::{Format, QueryArgs, TenancyArg};
use crate::admin::Request;
use crate::check;
use crate::command_error::CommandError;
use crate::output;
use crate::output::sanitize;

/// Arguments of `vipgate placement`.
#[derive(Clone, Debug, Args)]
pub(super) struct Placement {
    /// Files or directories with all manifests of the changed policy
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,
    /// Show what would move; required, since nothing but the policy places VIPs and endpoints
    #[arg(long)]
    dry_run: bool,
    /// Tenancy to compile the manifests for; default: that of the configuration files at the paths, else strict
    #[arg(long, value_enum)]
    tenancy: Option<TenancyArg>,
    #[command(flatten)]
    gateway: QueryArgs,
}

/// JSON form.
#[derive(Debug, Serialize)]
struct Output<'a> {
    #[serde(flatten)]
    diff: &'a PlacementDiff,
    totals: Totals,
}

/// Sums of what both placements have.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Totals {
    moves_anything: bool,
    /// VIPs that one gateway owns as a whole, and those of them that move.
    vips: usize,
    vips_moved: usize,
    /// VIPs with distributed ports, and the fraction of their ports that moves, 0 to 1.
    distributed_vips: usize,
    ports_moved: f64,
    endpoints: usize,
    endpoints_moved: usize,
}

impl Totals {
    fn of(diff: &PlacementDiff) -> Self {
        Self {
            moves_anything: diff.moves_anything(),
            vips: diff.vips.kept - diff.ports.vips,
            vips_moved: diff.vips.moved.len(),
            distributed_vips: diff.ports.vips,
            ports_moved: fraction(diff.moved_blocks(), diff.ports.blocks),
            endpoints: diff.endpoints.kept,
            endpoints_moved: diff.moved_endpoints(),
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "numbers of port blocks are far below 2^52")]
fn fraction(part: usize, whole: usize) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

pub(super) fn run(args: &Placement) -> Result<(), CommandError> {
    if !args.dry_run {
        let reason = "placement follows from the policy, so there is nothing else to change: use --dry-run to see what \
                      a change of manifests would move";
        return Err(CommandError::usage(reason));
    }
    let (report, placement) = check::run_with_placement(&args.paths, args.tenancy.map(Tenancy::from));
    for diagnostic in &report.diagnostics {
        output::print_error(diagnostic);
    }
    super::check_errors(&report)?;
    let placement = placement.ok_or_else(|| CommandError::usage("there are no manifests at these paths"))?;
    let before: Homes = ask(&args.gateway, &Request::Placement)?;
    let diff = placement_diff(&before, &Homes::from(&placement));
    match args.gateway.output {
        Format::Json => output::json(&Output { diff: &diff, totals: Totals::of(&diff) }),
        Format::Table => output::print(&sanitize(&render(&diff))),
    }
}

/// A gateway, or that none in particular is meant.
fn name(name: &str) -> String {
    if name.is_empty() { "ANY".to_owned() } else { name.to_owned() }
}

fn percent(fraction: f64) -> String {
    format!("{:.1}%", fraction * 100.0)
}

fn render(diff: &PlacementDiff) -> String {
    let mut out = String::new();
    for mut table in [gateways(&diff.gateways), vips(&diff.vips), ports(&diff.ports), endpoints(diff)] {
        if !table.is_empty() {
            out += &table.take();
            out.push('\n');
        }
    }
    out + &totals(diff)
}

fn gateways(changes: &GatewayChanges) -> Table {
    let mut table = Table::new([word("gateway"), word("change")]);
    for (names, change) in [(&changes.added, "added"), (&changes.removed, "removed"), (&changes.changed, "changed")] {
        for name in names {
            table.row([name.clone(), change.to_owned()]);
        }
    }
    table
}

fn vips(changes: &VipChanges) -> Table {
    let mut table = Table::new([word("vip"), word("change"), word("from"), word("to")]);
    for it in &changes.moved {
        table.row([it.vip.to_string(), "would move".to_owned(), name(&it.from), name(&it.to)]);
    }
    let home = |it: &vipgate_policy::compiler::PlacedVip| {
        if it.distributed { "all its gateways".to_owned() } else { name(&it.home) }
    };
    for it in &changes.added {
        table.row([it.vip.to_string(), "added".to_owned(), "-".to_owned(), home(it)]);
    }
    for it in &changes.removed {
        table.row([it.vip.to_string(), "removed".to_owned(), home(it), "-".to_owned()]);
    }
    table
}

fn ports(changes: &PortChanges) -> Table {
    let mut table = Table::new([word("ports from"), word("to"), number("share"), number("vips")]);
    for it in &changes.moved {
        let share = percent(fraction(it.blocks, changes.blocks));
        table.row([name(&it.from), name(&it.to), share, it.vips.to_string()]);
    }
    table
}

fn endpoints(diff: &PlacementDiff) -> Table {
    let mut table = Table::new([word("endpoints from"), word("to"), number("endpoints")]);
    for it in &diff.endpoints.moved {
        table.row([name(&it.from), name(&it.to), it.endpoints.to_string()]);
    }
    table
}

fn totals(diff: &PlacementDiff) -> String {
    let mut out = String::new();
    let (added, removed) = (diff.endpoints.added, diff.endpoints.removed);
    if (added, removed) != (0, 0) {
        // Writing to a String can't fail.
        let _ = writeln!(out, "{added} endpoints would be added, {removed} removed");
    }
    if !diff.moves_anything() {
        out += "nothing would move\n";
    }
    let Totals { vips, vips_moved, distributed_vips, ports_moved, endpoints, endpoints_moved, .. } = Totals::of(diff);
    let _ = writeln!(
        out,
        "of what stays: {vips_moved} of {vips} VIPs, {} of the ports of {distributed_vips} distributed VIPs, \
         {endpoints_moved} of {endpoints} endpoints would move; nothing was changed",
        percent(ports_moved)
    );
    out
}

#[cfg(test)]
mod tests {
    use vipgate_policy::compiler::{BlockMoves, EndpointChanges, EndpointMoves, PlacedVip, VipMove};

    use super::*;

    fn example() -> PlacementDiff {
        let placed = |vip: &str, home: &str, distributed| PlacedVip {
            vip: vip.parse().unwrap(),
            home: home.to_owned(),
            distributed,
        };
        let (from, to) = ("gw-a".to_owned(), "gw-c".to_owned());
        PlacementDiff {
            gateways: GatewayChanges { added: vec!["gw-c".into()], changed: vec!["gw-a".into()], removed: vec![] },
            vips: VipChanges {
                kept: 5,
                added: vec![placed("198.51.100.9", "", true)],
                removed: vec![placed("203.0.113.9", "gw-b", false)],
                moved: vec![VipMove { vip: "203.0.113.1".parse().unwrap(), from: from.clone(), to: to.clone() }],
            },
            ports: PortChanges {
                vips: 2,
                blocks: 2048,
                moved: vec![BlockMoves { from: from.clone(), to: to.clone(), vips: 2, blocks: 512 }],
            },
            endpoints: EndpointChanges {
                kept: 40,
                added: 3,
                removed: 0,
                moved: vec![
                    EndpointMoves { from: String::new(), to: to.clone(), endpoints: 1 },
                    EndpointMoves { from, to, endpoints: 9 },
                ],
            },
        }
    }

    #[test]
    fn a_difference_is_shown_as_tables_with_totals() {
        let expected = "\
GATEWAY  CHANGE
gw-c     added
gw-a     changed

VIP           CHANGE      FROM  TO
203.0.113.1   would move  gw-a  gw-c
198.51.100.9  added       -     all its gateways
203.0.113.9   removed     gw-b  -

PORTS FROM  TO    SHARE  VIPS
gw-a        gw-c  25.0%     2

ENDPOINTS FROM  TO    ENDPOINTS
ANY             gw-c          1
gw-a            gw-c          9

3 endpoints would be added, 0 removed
of what stays: 1 of 3 VIPs, 25.0% of the ports of 2 distributed VIPs, 10 of 40 endpoints would move; nothing was changed
";
        assert_eq!(render(&example()), expected);
        let same = PlacementDiff { vips: VipChanges { kept: 2, ..VipChanges::default() }, ..PlacementDiff::default() };
        assert_eq!(
            render(&same),
            "nothing would move\n\
             of what stays: 0 of 2 VIPs, 0.0% of the ports of 0 distributed VIPs, 0 of 0 endpoints would move; nothing \
             was changed\n"
        );
    }

    /// Scripts read these names.
    #[test]
    fn the_fields_of_the_json_form_are_stable() {
        let diff = example();
        let json = serde_json::to_value(Output { diff: &diff, totals: Totals::of(&diff) }).unwrap();
        let expected = serde_json::json!({
            "gateways": {"added": ["gw-c"], "removed": [], "changed": ["gw-a"]},
            "vips": {
                "kept": 5,
                "added": [{"vip": "198.51.100.9", "home": "", "distributed": true}],
                "removed": [{"vip": "203.0.113.9", "home": "gw-b", "distributed": false}],
                "moved": [{"vip": "203.0.113.1", "from": "gw-a", "to": "gw-c"}],
            },
            "ports": {
                "vips": 2, "blocks": 2048, "moved": [{"from": "gw-a", "to": "gw-c", "vips": 2, "blocks": 512}],
            },
            "endpoints": {
                "kept": 40, "added": 3, "removed": 0, "moved": [
                    {"from": "", "to": "gw-c", "endpoints": 1}, {"from": "gw-a", "to": "gw-c", "endpoints": 9},
                ],
            },
            "totals": {
                "moves_anything": true, "vips": 3, "vips_moved": 1, "distributed_vips": 2, "ports_moved": 0.25,
                "endpoints": 40, "endpoints_moved": 10,
            },
        });
        assert_eq!(json, expected);
    }
}
