//! Routing rules: which mark leads to which routing table.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use vipgate_netlink::packet_route::route::RouteProtocol;
use vipgate_netlink::packet_route::rule::{RuleAction, RuleAttribute, RuleMessage};
use vipgate_netlink::packet_route::{AddressFamily, RouteNetlinkMessage};
use vipgate_netlink::{Client, FAMILIES, NLM_F_CREATE, NLM_F_EXCL, PROTOCOL};

use crate::error::{NodeError, is_errno};
use crate::mark_users::MarkRule;

/// linux/rtnetlink.h: `RT_TABLE_MAIN`.
const MAIN: u32 = 254;
/// How many priorities are used.
const PRIORITIES: u32 = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rule {
    pub(super) priority: u32,
    pub(super) is_ipv6: bool,
    /// Prefix of the destination.
    pub(super) destination: Option<IpNet>,
    /// Mark and mask.
    pub(super) mark: Option<(u32, u32)>,
    pub(super) verdict: Verdict,
}

/// What becomes of packets that a rule matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Verdict {
    /// Routed by the main table.
    Main,
    /// Routed by this table; if it has no route, the next rule decides.
    Table(u32),
    /// Dropped, with an ICMP error.
    Unreachable,
    /// Dropped.
    Blackhole,
}

/// Adds and removes rules until these, and no others of vipgate's at its priorities, are there; how many.
pub(super) async fn ensure(client: &mut Client, desired: &BTreeSet<Rule>, first: u32) -> Result<usize, NodeError> {
    let mut changed = 0;
    for family in FAMILIES {
        let is_ipv6 = family == AddressFamily::Inet6;
        let messages = client.rules(family).await.map_err(NodeError::of("listing rules"))?;
        let mut missing: BTreeSet<Rule> = desired.iter().filter(|rule| rule.is_ipv6 == is_ipv6).copied().collect();
        let mut stale = Vec::new();
        for message in messages.into_iter().filter(|message| is_ours(message, first)) {
            // A second one of the same kind is stale, too.
            if !parse(&message).is_some_and(|rule| missing.remove(&rule)) {
                stale.push(message);
            }
        }
        changed += stale.len();
        for rule in &missing {
            changed += usize::from(add(client, rule).await?);
        }
        for message in stale {
            match client.set(RouteNetlinkMessage::DelRule(message), 0).await {
                Err(error) if is_errno(&error, libc::ENOENT) => {}
                result => result.map_err(NodeError::of("removing a rule"))?,
            }
        }
    }
    Ok(changed)
}

/// Rules of others that match a mark.
pub(super) async fn of_others(client: &mut Client) -> Result<Vec<MarkRule>, NodeError> {
    let mut rules = Vec::new();
    for family in FAMILIES {
        let messages = client.rules(family).await.map_err(NodeError::of("listing rules"))?;
        rules.extend(messages.iter().filter_map(|message| mark_of(message, family == AddressFamily::Inet6)));
    }
    Ok(rules)
}

/// The mark that a rule matches; `None`: it matches none, or is vipgate's.
fn mark_of(message: &RuleMessage, is_ipv6: bool) -> Option<MarkRule> {
    let (mut priority, mut value, mut mask) = (0, 0, None);
    for attribute in &message.attributes {
        match attribute {
            RuleAttribute::Protocol(protocol) if *protocol == RouteProtocol::from(PROTOCOL) => return None,
            RuleAttribute::Priority(number) => priority = *number,
            RuleAttribute::FwMark(number) => value = *number,
            RuleAttribute::FwMask(number) => mask = Some(*number),
            _ => {}
        }
    }
    mask.map(|mask| MarkRule { is_ipv6, priority, mark: (value, mask) })
}

/// Adds a rule; whether it is there now.
async fn add(client: &mut Client, rule: &Rule) -> Result<bool, NodeError> {
    let mut message = RuleMessage::default();
    message.header.family = if rule.is_ipv6 { AddressFamily::Inet6 } else { AddressFamily::Inet };
    let protocol = RuleAttribute::Protocol(RouteProtocol::from(PROTOCOL));
    message.attributes = vec![RuleAttribute::Priority(rule.priority), protocol];
    if let Some(destination) = rule.destination {
        message.header.dst_len = destination.prefix_len();
        message.attributes.push(RuleAttribute::Destination(destination.network()));
    }
    if let Some((mark, mask)) = rule.mark {
        message.attributes.extend([RuleAttribute::FwMark(mark), RuleAttribute::FwMask(mask)]);
    }
    let (action, table) = match rule.verdict {
        Verdict::Main => (RuleAction::ToTable, MAIN),
        Verdict::Table(table) => (RuleAction::ToTable, table),
        Verdict::Unreachable => (RuleAction::Unreachable, 0),
        Verdict::Blackhole => (RuleAction::Blackhole, 0),
    };
    message.header.action = action;
    // The header's field has 8 bits.
    message.header.table = u8::try_from(table).unwrap_or(0);
    if table != 0 {
        message.attributes.push(RuleAttribute::Table(table));
    }
    match client.set(RouteNetlinkMessage::NewRule(message), NLM_F_CREATE | NLM_F_EXCL).await {
        Err(error) if is_errno(&error, libc::EEXIST) => Ok(true),
        // IPv6 is disabled.
        Err(error) if rule.is_ipv6 && is_errno(&error, libc::EAFNOSUPPORT) => Ok(false),
        result => result.map(|()| true).map_err(NodeError::of(format!("adding {rule:?}"))),
    }
}

/// Whether a rule is vipgate's, at one of its priorities.
fn is_ours(message: &RuleMessage, first: u32) -> bool {
    let is_protocol = |attribute: &RuleAttribute| *attribute == RuleAttribute::Protocol(RouteProtocol::from(PROTOCOL));
    let is_priority = |attribute: &RuleAttribute| matches!(attribute, RuleAttribute::Priority(priority) if (first..first + PRIORITIES).contains(priority));
    message.attributes.iter().any(is_protocol) && message.attributes.iter().any(is_priority)
}

/// A rule as the kernel lists it; `None`: none that could be ours.
fn parse(message: &RuleMessage) -> Option<Rule> {
    let is_ipv6 = message.header.family == AddressFamily::Inet6;
    let (mut priority, mut mark, mut mask, mut destination) = (0, 0, 0, None);
    let mut table = u32::from(message.header.table);
    for attribute in &message.attributes {
        match attribute {
            RuleAttribute::Priority(number) => priority = *number,
            RuleAttribute::Destination(address) => destination = Some(net(*address, message.header.dst_len)?),
            RuleAttribute::FwMark(number) => mark = *number,
            RuleAttribute::FwMask(number) => mask = *number,
            RuleAttribute::Table(number) => table = *number,
            // The last two by default: no suppression.
            RuleAttribute::Protocol(_)
            | RuleAttribute::SuppressPrefixLen(u32::MAX)
            | RuleAttribute::SuppressIfGroup(u32::MAX) => {}
            _ => return None,
        }
    }
    let verdict = match message.header.action {
        RuleAction::ToTable if table == MAIN => Verdict::Main,
        RuleAction::ToTable => Verdict::Table(table),
        RuleAction::Unreachable => Verdict::Unreachable,
        RuleAction::Blackhole => Verdict::Blackhole,
        _ => return None,
    };
    let mark = (mask != 0).then_some((mark, mask));
    Some(Rule { priority, is_ipv6, destination, mark, verdict })
}

fn net(address: IpAddr, length: u8) -> Option<IpNet> {
    IpNet::new(address, length).ok()
}
