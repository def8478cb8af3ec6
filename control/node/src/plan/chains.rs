//! The nftables table of a plan.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;

use super::steering::{Selection, Steering, Target};
use super::{Inputs, NodePlan};
use crate::destinations::{AddressRange, Family, unchanged as unchanged_ranges, union};
use crate::drops::Reason;
use crate::echo::ETHERTYPE;
use crate::marks::{Action, GatewayIndex};
use crate::nft::table::{Chain, Map, Set, Table};
use crate::tunnel::gateway_mac;

/// Base chains: type, hook, priority.
const RAW: &str = "filter hook prerouting priority raw";
/// After the destination NAT of kube-proxy and others, so that the destination is the one of the packet on the wire.
const PREROUTING: &str = "filter hook prerouting priority filter + 10";
/// What IPVS has translated, for a Service whose address the node has, leaves by here alone. The kernel routes a packet
/// again whose mark this chain changes.
const OUTPUT: &str = "route hook output priority filter + 10";
const RAW_OUTPUT: &str = "filter hook output priority raw";
const FORWARD: &str = "filter hook forward priority mangle";
const INPUT: &str = "filter hook input priority filter - 10";
/// Before source NAT: the source is the pod's.
const GUARD: &str = "filter hook postrouting priority srcnat - 20";
/// Before the source NAT of CNIs and kube-proxy: the first that decides, decides for the connection.
const KEEP_SOURCE: &str = "nat hook postrouting priority srcnat - 10";

/// Destinations on the pod's own link or at its node, such as a cloud's metadata service: gateways drop packets to them
/// (RFC 3927 section 7, RFC 4291 section 2.5.6).
const LINK_LOCAL: &str = "fe80::/10";
const LINK_LOCAL_V4: &str = "169.254.0.0/16";

/// By policy, the ranges that are routed unchanged.
pub(super) fn unchanged(inputs: &Inputs<'_>, inside: &[IpNet]) -> Vec<Vec<AddressRange>> {
    let policies = inputs.policy.map(|policy| policy.policies.as_slice()).unwrap_or_default();
    let ranges = |policy: &crate::policy::EgressPolicy| {
        let of = |family| unchanged_ranges(family, &policy.destinations, &policy.excluded, inside);
        Family::ALL.into_iter().flat_map(of).collect()
    };
    policies.iter().map(ranges).collect()
}

/// The table of a plan, whose other fields are complete.
pub(super) fn table(inputs: &Inputs<'_>, plan: &NodePlan) -> Table {
    let mut builder = Builder { inputs, plan, table: Table::default() };
    builder.prefixes();
    builder.policies();
    builder.gateways();
    builder.endpoints();
    builder.base_chains();
    builder.table
}

struct Builder<'a> {
    inputs: &'a Inputs<'a>,
    plan: &'a NodePlan,
    table: Table,
}

/// Protocol and suffix of each family.
fn families() -> [(&'static str, &'static str); 2] {
    Family::ALL.map(|family| (protocol(family), suffix(family)))
}

/// `ip` or `ip6`.
fn protocol(family: Family) -> &'static str {
    match family {
        Family::V4 => "ip",
        Family::V6 => "ip6",
    }
}

/// The suffix of a family's sets and maps.
fn suffix(family: Family) -> &'static str {
    match family {
        Family::V4 => "4",
        Family::V6 => "6",
    }
}

/// The type of a family's addresses in nftables.
fn address_type(family: Family) -> &'static str {
    match family {
        Family::V4 => "ipv4_addr",
        Family::V6 => "ipv6_addr",
    }
}

impl Builder<'_> {
    fn add_set(&mut self, name: String, element: &'static str, is_interval: bool, elements: BTreeSet<String>) {
        self.table.sets.insert(name, Set { element, is_interval, elements });
    }

    fn add_chain(&mut self, name: impl Into<String>, chain: Chain) {
        self.table.chains.insert(name.into(), chain);
    }

    fn base_chain(&mut self, name: &str, hook: &'static str, rules: Vec<String>) {
        self.add_chain(name, Chain { hook: Some(hook), ..Chain::new(rules) });
    }

    /// `meta mark set` for an action: other bits stay.
    fn set_mark(&self, action: Action) -> String {
        let mask = self.inputs.settings.mask;
        format!("meta mark set meta mark & {:#010x} | {:#010x}", !mask.bits(), mask.mark(action))
    }

    /// `meta mark set` for packets as without vipgate: other bits stay.
    fn clear_mark(&self) -> String {
        format!("meta mark set meta mark & {:#010x}", !self.inputs.settings.mask.bits())
    }

    /// The bits of a packet's or a connection's mark that are ours.
    fn masked(&self, key: &str) -> String {
        format!("{key} & {:#010x}", self.inputs.settings.mask.bits())
    }

    fn counter(&mut self, name: &str) -> String {
        self.table.counters.insert(name.to_owned());
        format!("counter name \"{name}\"")
    }

    /// Prefixes of pods and of the cluster, and addresses of pods that policy knows.
    fn prefixes(&mut self) {
        for family in Family::ALL {
            let texts = |nets| union(family, nets).iter().map(ToString::to_string).collect();
            let known = self.plan.endpoints.keys().filter(|address| Family::of(**address) == family);
            let known = known.map(ToString::to_string).collect();
            let (suffix, element) = (suffix(family), address_type(family));
            self.add_set(format!("pods{suffix}"), element, true, texts(&self.plan.pod_prefixes));
            self.add_set(format!("own{suffix}"), element, true, texts(&self.plan.own_prefixes));
            self.add_set(format!("cluster{suffix}"), element, true, texts(&self.plan.inside));
            self.add_set(format!("known{suffix}"), element, false, known);
        }
    }

    /// A set of unchanged destinations for each policy and family.
    fn policies(&mut self) {
        for (policy, ranges) in self.plan.unchanged.iter().enumerate() {
            for family in Family::ALL {
                let of_family = ranges.iter().filter(|range| Family::of(range.first) == family);
                let elements = of_family.map(ToString::to_string).collect();
                self.add_set(format!("unchanged{}_{policy}", suffix(family)), address_type(family), true, elements);
            }
        }
    }

    /// A chain for each gateway, and the maps from MAC addresses and connection marks to them.
    fn gateways(&mut self) {
        let selection = Selection::new(self.inputs, &self.plan.gateways);
        let (mut senders, mut replies) = (BTreeMap::new(), BTreeMap::new());
        let (mut tunnel_addresses, mask) = (BTreeSet::new(), self.inputs.settings.mask);
        for (state, index) in &self.plan.gateways {
            let Some(index) = *index else { continue };
            let (name, action) = (label(index, &state.name), Action::Gateway(index));
            let counter = self.counter(&format!("to_{name}"));
            let mark = self.set_mark(action);
            self.add_chain(via(index), Chain::new([counter, mark]).with_comment(&state.name));
            // Replies of connections that came from a gateway that is gone go to another one.
            let chain = target_chain(selection.target(std::slice::from_ref(&state.name)));
            replies.insert(format!("{:#010x}", mask.mark(action)), format!("goto {chain}"));
            let Some(address) = self.plan.tunnels.get(&index) else { continue };
            tunnel_addresses.insert(address.to_string());
            let mac = gateway_mac(*address).map(|byte| format!("{byte:02x}")).join(":");
            let counter = self.counter(&format!("from_{name}"));
            let mark = format!("ct mark set ct mark & {:#010x} | {:#010x}", !mask.bits(), mask.mark(action));
            self.add_chain(
                from(index),
                Chain::new([counter, format!("ct direction original {mark}"), "accept".to_owned()])
                    .with_comment(&state.name),
            );
            senders.entry(mac).or_insert_with(|| format!("goto {}", from(index)));
        }
        self.table.maps.insert("senders".to_owned(), Map { types: "ether_addr : verdict", elements: senders });
        self.table.maps.insert("replies".to_owned(), Map { types: "mark : verdict", elements: replies });
        let family = tunnel_family(self.plan).unwrap_or(Family::V4);
        self.add_set("gateways".to_owned(), address_type(family), false, tunnel_addresses);
        let (clear, unreachable) = (self.clear_mark(), self.set_mark(Action::Unreachable));
        self.add_chain("pass", Chain::new([clear]));
        let counter = self.counter(Reason::Unreachable.as_str());
        self.add_chain("unreachable", Chain::new([counter, unreachable]));
        let counter = self.counter(Reason::NoVip.as_str());
        self.add_chain("no_vip", Chain::new([counter, "drop".to_owned()]));
    }

    /// The pods, and a chain for each policy and target that one of them needs.
    fn endpoints(&mut self) {
        let mut maps = [BTreeMap::new(), BTreeMap::new()];
        let mut needed = BTreeMap::new();
        for (address, steering) in &self.plan.endpoints {
            let chain = match *steering {
                Steering::Pass => "pass".to_owned(),
                Steering::NoVip { policy } => {
                    let chain = format!("policy_{policy}_no_vip");
                    needed.insert(chain.clone(), (policy, "no_vip".to_owned()));
                    chain
                }
                Steering::Covered { policy, target } => {
                    let (chain, target) = (policy_chain(policy, target), target_chain(target));
                    needed.insert(chain.clone(), (policy, target));
                    chain
                }
            };
            maps[usize::from(address.is_ipv6())].insert(address.to_string(), format!("goto {chain}"));
        }
        let policies = self.inputs.policy.map(|policy| policy.policies.as_slice()).unwrap_or_default();
        for (chain, (policy, target)) in needed {
            let mut rules: Vec<String> = Family::ALL.map(|family| unchanged_rule(family, policy)).into();
            rules.push(format!("goto {target}"));
            let comment = policies.get(policy).map(|policy| &*policy.name).unwrap_or_default();
            self.add_chain(chain, Chain::new(rules).with_comment(comment));
        }
        for (family, elements) in Family::ALL.into_iter().zip(maps) {
            let types = match family {
                Family::V4 => "ipv4_addr : verdict",
                Family::V6 => "ipv6_addr : verdict",
            };
            self.table.maps.insert(format!("endpoints{}", suffix(family)), Map { types, elements });
        }
    }

    /// Outer packets have no connections: the inner ones do. Echo requests do: a firewall may accept replies by them.
    fn outgoing_tunnel_rules(&self) -> Vec<String> {
        let Some(own) = self.plan.tunnel else { return Vec::new() };
        let (ip, port) = (protocol(Family::of(own.address.ip())), own.address.port());
        let [high, low] = ETHERTYPE;
        // The EtherType of the inner frame.
        vec![format!("{ip} daddr @gateways udp dport {port} @th,224,16 != 0x{high:02x}{low:02x} notrack")]
    }

    fn base_chains(&mut self) {
        self.raw_chains();
        self.steer_chains();
        let tunnel = &self.inputs.settings.tunnel_device;
        let counter = self.counter(Reason::UnknownGateway.as_str());
        let prerouting = vec![
            format!("iifname \"{tunnel}\" ether saddr vmap @senders"),
            format!("iifname \"{tunnel}\" {counter} drop"),
            "goto steer".to_owned(),
        ];
        self.base_chain("prerouting", PREROUTING, prerouting);
        // The node itself may have an address in a pod prefix: that of the pods' bridge.
        let of_pods = |(ip, suffix)| format!("{ip} saddr @pods{suffix} fib saddr type != local goto steer");
        self.base_chain("output", OUTPUT, families().map(of_pods).into());
        let counter = self.counter(Reason::ToNode.as_str());
        let mut input = vec![format!("iifname \"{tunnel}\" {counter} drop")];
        // IPVS comes next: `output` must find a mark that differs from the one that it sets.
        let own = self.masked("meta mark");
        input.extend(families().map(|(ip, suffix)| format!("{own} != 0 {ip} saddr @pods{suffix} goto pass")));
        self.base_chain("input", INPUT, input);
        self.forward_chain(tunnel);
        self.guard_chain(tunnel);
        let keep = |(ip, _)| format!("oifname \"{tunnel}\" snat {ip} to {ip} saddr");
        self.base_chain("keep_source", KEEP_SOURCE, families().map(keep).into());
    }

    /// Before connection tracking: tunnels, and packets of unknown pods that are to be held.
    fn raw_chains(&mut self) {
        let (tunnel, hold) = (&self.inputs.settings.tunnel_device, &self.inputs.settings.hold_device);
        let mut raw = self.tunnel_rules();
        raw.push(format!("iifname {{ \"{tunnel}\", \"{hold}\" }} accept"));
        for (ip, suffix) in families() {
            raw.push(format!("{ip} saddr @pods{suffix} {ip} saddr != @known{suffix} goto unknown"));
        }
        self.base_chain("raw", RAW, raw);
        let raw_output = self.outgoing_tunnel_rules();
        self.base_chain("raw_output", RAW_OUTPUT, raw_output);
        // Inside the cluster, policy decides nothing; where a Service leads is known later.
        let mut unknown = vec!["fib daddr type { local, broadcast, multicast } accept".to_owned()];
        unknown.push(format!("ip daddr {LINK_LOCAL_V4} accept"));
        unknown.push(format!("ip6 daddr {LINK_LOCAL} accept"));
        unknown.extend(families().map(|(ip, suffix)| format!("{ip} daddr @cluster{suffix} accept")));
        unknown.extend([self.counter("held"), self.set_mark(Action::Hold), "notrack".to_owned()]);
        self.add_chain("unknown", Chain::new(unknown));
    }

    /// The decision on a packet, by its final destination.
    fn steer_chains(&mut self) {
        let marked = self.masked("ct mark");
        let mut steer = vec![format!("ct direction reply {marked} vmap @replies")];
        // Through a gateway whose number is gone: not by the node.
        steer.push(format!("ct direction reply {marked} != 0 goto unreachable"));
        let held = self.inputs.settings.mask.mark(Action::Hold);
        let own = self.masked("meta mark");
        steer.push(format!("{own} == {held:#010x} accept"));
        for (ip, suffix) in families() {
            // A client that reaches the pod directly gets its replies directly.
            steer.push(format!("ct direction reply {ip} saddr @pods{suffix} goto pass"));
        }
        // With br_netfilter, also what a bridge forwards between pods comes by here, such as neighbor discovery.
        steer.push(format!("ip daddr {{ {LINK_LOCAL_V4}, 224.0.0.0/4, 255.255.255.255 }} goto pass"));
        steer.push(format!("ip6 daddr {{ ff00::/8, {LINK_LOCAL} }} goto pass"));
        for (ip, suffix) in families() {
            steer.push(format!("{ip} saddr vmap @endpoints{suffix}"));
            steer.push(format!("{ip} saddr @pods{suffix} goto unknown_pod"));
        }
        self.add_chain("steer", Chain::new(steer));
        // To a Service, or it would be held: it can't be any more, since its destination is another one already.
        let mut unknown = vec!["fib daddr type { local, broadcast, multicast } goto pass".to_owned()];
        unknown.extend(families().map(|(ip, suffix)| format!("{ip} daddr @cluster{suffix} goto pass")));
        unknown.push(format!("{} drop", self.counter(Reason::UnknownPod.as_str())));
        self.add_chain("unknown_pod", Chain::new(unknown));
    }

    /// Tunnel packets: from gateways only, and untracked.
    fn tunnel_rules(&mut self) -> Vec<String> {
        let Some(own) = self.plan.tunnel else { return Vec::new() };
        let (ip, address, port) = (protocol(Family::of(own.address.ip())), own.address.ip(), own.address.port());
        let counter = self.counter(Reason::TunnelUnknown.as_str());
        vec![
            format!("{ip} daddr {address} udp dport {port} {ip} saddr != @gateways {counter} drop"),
            format!("{ip} daddr {address} udp dport {port} notrack accept"),
        ]
    }

    /// Lowers the MSS in SYNs that come out of the tunnel (`iifname`), or go into it (`oifname`).
    fn clamp_rules(&self, interface: &str) -> [String; 2] {
        let (tunnel, mtu) = (&self.inputs.settings.tunnel_device, self.inputs.mtu);
        [("ipv4", 40), ("ipv6", 60)].map(|(version, headers)| {
            let mss = mtu.saturating_sub(headers);
            format!(
                "{interface} \"{tunnel}\" meta nfproto {version} tcp flags & syn == syn tcp option maxseg size set {mss}"
            )
        })
    }

    fn forward_chain(&mut self, tunnel: &str) {
        let mut rules = Vec::from(self.clamp_rules("iifname"));
        let counter = self.counter(Reason::NotAPod.as_str());
        for (ip, suffix) in families() {
            rules.push(format!("iifname \"{tunnel}\" {ip} daddr != @own{suffix} {counter} drop"));
        }
        self.base_chain("forward", FORWARD, rules);
    }

    fn guard_chain(&mut self, tunnel: &str) {
        // Here and not in `forward`: what IPVS has translated isn't forwarded.
        let mut rules = Vec::from(self.clamp_rules("oifname"));
        // Other rules and routes must not see a mark that has had its effect: the packet around it is routed, too.
        rules.push(format!("oifname \"{tunnel}\" {} accept", self.clear_mark()));
        rules.push(format!("oifname \"{}\" accept", self.inputs.settings.hold_device));
        let (own, counter) = (self.masked("meta mark"), self.counter(Reason::Guard.as_str()));
        // The node's own packets may have a mark with these bits: that of a socket.
        rules.extend(families().map(|(ip, suffix)| format!("{own} != 0 {ip} saddr @pods{suffix} {counter} drop")));
        self.base_chain("guard", GUARD, rules);
    }
}

/// The rule for destinations of a policy that are routed unchanged.
fn unchanged_rule(family: Family, policy: usize) -> String {
    format!("{} daddr @unchanged{}_{policy} goto pass", protocol(family), suffix(family))
}

/// The chain that marks packets for a gateway.
fn via(GatewayIndex(index): GatewayIndex) -> String {
    format!("via_{index}")
}

/// The chain of packets from a gateway.
fn from(GatewayIndex(index): GatewayIndex) -> String {
    format!("from_{index}")
}

fn target_chain(target: Target) -> String {
    match target {
        Target::Gateway(index) => via(index),
        Target::Unreachable => "unreachable".to_owned(),
    }
}

fn policy_chain(policy: usize, target: Target) -> String {
    format!("policy_{policy}_{}", target_chain(target))
}

/// A name for counters of a gateway: identifiers have no dashes.
pub fn label(GatewayIndex(index): GatewayIndex, name: &str) -> String {
    let name: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).take(64).collect();
    format!("{index}_{name}")
}

/// The family of the tunnel addresses.
fn tunnel_family(plan: &NodePlan) -> Option<Family> {
    let first: Option<IpAddr> = plan.tunnels.values().next().copied();
    plan.tunnel.map(|own| own.address.ip()).or(first).map(Family::of)
}
