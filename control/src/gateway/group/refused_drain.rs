//! Why a drain was refused, with the VIPs that would have no active gateway.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use vipgate_policy::compiler::{Placed, shard_moves};

use crate::membership::{DrainBlock, MembershipView};

/// VIPs that are named.
const MAX_NAMED: usize = 5;

/// The reason, for people, with what to do.
pub(super) fn reason(block: &DrainBlock, own: &str, view: &MembershipView, placed: Placed<'_>) -> String {
    let vips = match &*vips_without_owner(own, view, placed) {
        [] => "its shards".to_owned(),
        [only] => format!("the VIP {only}"),
        several => {
            let named: Vec<String> = several.iter().take(MAX_NAMED).map(IpAddr::to_string).collect();
            let more = several.len().checked_sub(MAX_NAMED + 1).map(|more| format!(" and {} more", more + 1));
            format!("{} VIPs ({}{})", several.len(), named.join(", "), more.unwrap_or_default())
        }
    };
    let state = |name: &Arc<str>| match view.member(name) {
        Some(member) if member.serving && member.unable.is_some() => format!("{name} has a fault"),
        _ => format!("{name} is not active"),
    };
    let others: Vec<String> = block.gateways.iter().map(state).collect();
    let others = if others.is_empty() { "its policy permits no other".to_owned() } else { others.join(", ") };
    format!(
        "no other gateway could take over {vips}: {others}; activate another one first (start or undrain it), or \
         permit more gateways in `spec.gateways` of the policy"
    )
}

/// The VIPs of which no shard's candidate would be active without a fault if this gateway were inactive.
fn vips_without_owner(own: &str, view: &MembershipView, placed: Placed<'_>) -> Vec<IpAddr> {
    let able = view.active_members().filter(|member| member.unable.is_none() && *member.name != *own);
    let after: BTreeSet<Arc<str>> = able.map(|member| member.name.clone()).collect();
    let mut before = after.clone();
    before.insert(own.into());
    let moves = shard_moves(placed, &before, &after);
    let lost = moves.into_iter().filter(|it| it.before.is_some() && it.after.is_none()).map(|it| it.vip);
    lost.collect::<BTreeSet<IpAddr>>().into_iter().collect()
}

#[cfg(test)]
mod tests {
    use vipgate_dataplane::policy::spec::{Announce, ShardSpec, VipSpec};

    use super::*;
    use crate::membership::{DrainBlockReason, Member};

    #[test]
    fn a_reason_names_the_vips_and_the_gateways_that_could_take_over() {
        let member = |name: &str, serving| Member { serving, ..Member::new(name.into(), 1) };
        let members = vec![member("gw-a", true), member("gw-b", false), member("gw-c", true)];
        let mut view = MembershipView { number: 1, members, ..MembershipView::default() };
        let vip = |number: u8, backups: &[&str]| VipSpec {
            address: [203, 0, 113, number].into(),
            name: "".into(),
            announce: Announce::L2,
            reserved_ports: vec![],
            shards: vec![ShardSpec {
                gateway: "gw-a".into(),
                blocks: None,
                backups: backups.iter().map(|name| Arc::from(*name)).collect(),
            }],
            shard_map: None,
            private: vec![],
        };
        let block = |gateways: &[&str]| DrainBlock {
            reason: DrainBlockReason::NoBackup,
            gateways: gateways.iter().map(|name| Arc::from(*name)).collect(),
        };
        let mut vips = vec![vip(1, &["gw-b"]), vip(2, &["gw-b", "gw-c"])];
        let reason_of = |block: &DrainBlock, view: &MembershipView, vips: &[VipSpec]| {
            reason(block, "gw-a", view, Placed { vips, shard_maps: &[], endpoints: &[] })
        };
        let text = reason_of(&block(&["gw-b"]), &view, &vips);
        assert!(
            text.starts_with("no other gateway could take over the VIP 203.0.113.1: gw-b is not active;"),
            "{text}"
        );
        view.members[2].unable = Some("link down".into());
        let text = reason_of(&block(&["gw-b", "gw-c"]), &view, &vips);
        assert!(text.contains("2 VIPs (203.0.113.1, 203.0.113.2): gw-b is not active, gw-c has a fault;"), "{text}");
        vips.extend((3..=8).map(|number| vip(number, &[])));
        let text = reason_of(&block(&[]), &view, &vips);
        let expected =
            "8 VIPs (203.0.113.1, 203.0.113.2, 203.0.113.3, 203.0.113.4, 203.0.113.5 and 3 more): its policy";
        assert!(text.contains(expected), "{text}");
    }
}
