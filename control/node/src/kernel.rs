//! The kernel of the node: brings devices, nftables, routes and rules in line with a plan, and keeps them so.

mod conntrack;
mod devices;
mod events;
mod iptables;
mod nft;
mod routes;
mod rules;
mod sysctls;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use vipgate_netlink::Client;
use vipgate_netlink::protocols::NETLINK_ROUTE;

pub use self::events::{ChangeNotice, Events};
pub use self::nft::Counter;
use self::nft::Nft;
use self::sysctls::Sysctls;
use crate::error::NodeError;
use crate::mark_users::MarkUsers;
use crate::marks::{Action, RoutingNumbers};
use crate::plan::{NodePlan, Settings, Steering};

/// What was out of line, and isn't any more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Repairs {
    /// The nftables table differed.
    pub table: bool,
    /// Devices that were created or changed.
    pub devices: usize,
    /// Routes and rules that were added or removed.
    pub routes: usize,
}

impl Repairs {
    /// Whether nothing was.
    pub fn is_empty(self) -> bool {
        self == Self::default()
    }
}

/// The kernel of this thread's network namespace.
#[derive(Debug)]
pub struct Kernel {
    settings: Settings,
    numbers: RoutingNumbers,
    client: Client,
    nft: Nft,
    sysctls: Sysctls,
}

impl Kernel {
    /// Opens a netlink socket; `nft` is the program.
    ///
    /// # Errors
    /// Netlink isn't available.
    pub fn open(settings: Settings, numbers: RoutingNumbers, nft: std::path::PathBuf) -> Result<Self, NodeError> {
        let client = Client::open(NETLINK_ROUTE).map_err(NodeError::of("netlink"))?;
        Ok(Self { settings, numbers, client, nft: Nft::new(nft), sysctls: Sysctls::default() })
    }

    /// Sets the directory of the settings of devices. Default: `/proc/sys/net`.
    #[must_use]
    pub fn with_sysctls(mut self, directory: std::path::PathBuf) -> Self {
        self.sysctls = Sysctls(directory);
        self
    }

    /// Programs the kernel: what would let packets pass comes last.
    ///
    /// # Errors
    /// The kernel refused something; what was programmed before stays.
    pub async fn apply(&mut self, plan: &NodePlan, mtu: u32) -> Result<Repairs, NodeError> {
        // The table refers to devices by name, so it can be first: it closes.
        let table = self.nft.apply(&plan.table).await?;
        self.ensure_paths(plan, mtu, table).await
    }

    /// Compares the kernel with the plan that was applied last, and repairs what others have changed.
    ///
    /// # Errors
    /// As for [`Kernel::apply`].
    pub async fn check(&mut self, plan: &NodePlan, mtu: u32) -> Result<Repairs, NodeError> {
        let table = self.nft.check(&plan.table).await?;
        self.ensure_paths(plan, mtu, table).await
    }

    /// Devices, routes and rules; `table` says whether the table was changed.
    async fn ensure_paths(&mut self, plan: &NodePlan, mtu: u32, table: bool) -> Result<Repairs, NodeError> {
        let devices = self.ensure_devices(plan, mtu).await?;
        let routes = self.ensure_routes(plan).await?;
        Ok(Repairs { table, devices, routes })
    }

    async fn ensure_devices(&mut self, plan: &NodePlan, mtu: u32) -> Result<usize, NodeError> {
        let mut changed = 0;
        if let Some(tunnel) = &plan.tunnel {
            let name = &self.settings.tunnel_device;
            changed += devices::ensure_tunnel(&mut self.client, name, tunnel, mtu, &self.sysctls).await?;
        }
        changed += devices::ensure_hold(&mut self.client, &self.settings.hold_device, &self.sysctls).await?;
        Ok(changed)
    }

    async fn ensure_routes(&mut self, plan: &NodePlan) -> Result<usize, NodeError> {
        let rules = self.rules(plan);
        let tunnel = devices::index(&mut self.client, &self.settings.tunnel_device).await?;
        let hold = devices::index(&mut self.client, &self.settings.hold_device).await?;
        let mut routes = BTreeSet::new();
        if let (Some(device), Some(own)) = (tunnel, plan.tunnel) {
            for (index, address) in &plan.tunnels {
                let table = self.numbers.table(*index);
                routes.extend(routes::Route::into_tunnel(table, device, own, *address));
            }
        }
        if let Some(device) = hold {
            routes.extend(routes::Route::to_hold(self.numbers.first_table, device));
        }
        let tables = self.numbers.first_table..=self.numbers.first_table + self.settings.mask.max_gateways();
        let changed = routes::ensure(&mut self.client, &routes, &tables).await?;
        Ok(changed + rules::ensure(&mut self.client, &rules, self.numbers.rule_priority).await?)
    }

    /// The rules of a plan: see [`crate::plan`].
    fn rules(&self, plan: &NodePlan) -> BTreeSet<rules::Rule> {
        let (first, mask) = (self.numbers.rule_priority, self.settings.mask);
        let mut rules = BTreeSet::new();
        let by_mark = |priority, action, verdict| {
            [false, true].map(|is_ipv6| rules::Rule {
                priority,
                is_ipv6,
                destination: None,
                mark: Some((mask.mark(action), mask.bits())),
                verdict,
            })
        };
        // The reverse path filter looks up the way to a pod with the mark of its packet, where `src_valid_mark` is set.
        for prefix in &plan.own_prefixes {
            rules.insert(rules::Rule {
                priority: first,
                is_ipv6: prefix.addr().is_ipv6(),
                destination: Some(*prefix),
                mark: None,
                verdict: rules::Verdict::Main,
            });
        }
        for index in plan.tunnels.keys() {
            let action = Action::Gateway(*index);
            rules.extend(by_mark(first + 1, action, rules::Verdict::Table(self.numbers.table(*index))));
            rules.extend(by_mark(first + 2, action, rules::Verdict::Unreachable));
        }
        rules.extend(by_mark(first + 1, Action::Hold, rules::Verdict::Table(self.numbers.first_table)));
        rules.extend(by_mark(first + 2, Action::Hold, rules::Verdict::Blackhole));
        rules.extend(by_mark(first + 2, Action::Unreachable, rules::Verdict::Unreachable));
        rules
    }

    /// Deletes connections whose source NAT was decided under another plan: those of covered pods that would go into the
    /// tunnel with another source than the pod's, and all that pods have opened whom a policy doesn't cover any more. How
    /// many.
    ///
    /// # Errors
    /// The kernel refused something.
    pub async fn delete_stale_connections(
        &self,
        before: Option<&NodePlan>,
        plan: &NodePlan,
    ) -> Result<usize, NodeError> {
        let is_released = |pod: &IpAddr| {
            let was_covered =
                before.and_then(|before| before.endpoints.get(pod)).is_some_and(|was| *was != Steering::Pass);
            was_covered && plan.endpoints.get(pod).is_none_or(|now| *now == Steering::Pass)
        };
        let is_stale = |connection: &conntrack::Connection| {
            let is_kept = |policy: usize| plan.is_unchanged(policy, connection.remote);
            match plan.endpoints.get(&connection.source) {
                Some(Steering::Covered { policy, .. } | Steering::NoVip { policy }) => {
                    connection.translated != connection.source && !is_kept(*policy)
                }
                _ => is_released(&connection.source),
            }
        };
        conntrack::delete(is_stale).await.map_err(NodeError::of("conntrack"))
    }

    /// The named counters of the table.
    ///
    /// # Errors
    /// `nft` failed.
    pub async fn counters(&self) -> Result<BTreeMap<String, Counter>, NodeError> {
        self.nft.counters().await
    }

    /// Rules of others that use bits of the mask.
    ///
    /// # Errors
    /// `nft` or netlink failed.
    pub async fn mark_users(&mut self) -> Result<MarkUsers, NodeError> {
        let (mask, mut users) = (self.settings.mask, MarkUsers::default());
        users.add_ruleset(mask, &self.nft.ruleset().await?);
        for (family, ruleset) in iptables::rulesets().await {
            users.add_iptables(mask, family, &ruleset);
        }
        for rule in rules::of_others(&mut self.client).await? {
            users.add_rule(mask, rule);
        }
        Ok(users)
    }

    /// Addresses of this node.
    ///
    /// # Errors
    /// Netlink failed.
    pub async fn local_addresses(&mut self) -> Result<BTreeSet<IpAddr>, NodeError> {
        devices::local_addresses(&mut self.client).await
    }

    /// The smallest MTU of the interfaces that lead to these addresses; `None`: none of them has a route.
    pub async fn mtu_toward(&mut self, addresses: impl Iterator<Item = IpAddr>) -> Option<u32> {
        let mut smallest = None;
        for address in addresses {
            let mtu = devices::mtu_toward(&mut self.client, address).await;
            smallest = [smallest, mtu].into_iter().flatten().min();
        }
        smallest
    }

    /// Removes all that vipgate has programmed: pods' packets leave as the CNI has it.
    ///
    /// # Errors
    /// The kernel refused something.
    pub async fn remove(&mut self) -> Result<(), NodeError> {
        rules::ensure(&mut self.client, &BTreeSet::new(), self.numbers.rule_priority).await?;
        let tables = self.numbers.first_table..=self.numbers.first_table + self.settings.mask.max_gateways();
        routes::ensure(&mut self.client, &BTreeSet::new(), &tables).await?;
        devices::remove(&mut self.client, &self.settings.tunnel_device).await?;
        self.nft.remove().await
    }
}
