//! The agent's loop: follows policy, view and echoes, keeps the kernel in line, and holds packets of unknown pods.

mod counters;
mod echoes;
mod status;

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{MissedTickBehavior, interval, sleep_until};

use self::counters::Counters;
use self::echoes::Echoes;
pub use self::status::{GatewayStatus, Status};
use crate::error::NodeError;
use crate::hold::HoldDevice;
use crate::hold::queue::HoldQueue;
use crate::indices::Indices;
use crate::kernel::{ChangeNotice, Events, Kernel, Repairs};
use crate::marks::RoutingNumbers;
use crate::plan::{Gateway, Inputs, NodePlan, Settings};
use crate::policy::{Cluster, NodePolicy};

/// How often the kernel is compared with the plan, whether or not it has reported changes.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// How often counters are read.
const COUNTER_INTERVAL: Duration = Duration::from_secs(5);
/// Capacity of the queue of commands.
const COMMANDS: usize = 16;
/// From the kernel's report of a change to the comparison: reports come in bursts, also of the agent's own changes.
const CHECK_DELAY: Duration = Duration::from_millis(20);
/// When a failed change is tried again.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Tunnel headers with an outer IPv4 or IPv6 header, bytes.
const OVERHEAD: (u32, u32) = (50, 70);
/// MTU of Ethernet.
const DEFAULT_MTU: u32 = 1500;

/// A membership view.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// Its number; 0: none.
    pub number: u64,
    /// The gateways.
    pub members: Vec<ViewMember>,
}

/// A gateway in a view.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ViewMember {
    pub name: Arc<str>,
    /// Whether it is active.
    pub is_active: bool,
    /// Its tunnel endpoint for nodes.
    pub endpoint: Option<SocketAddr>,
}

/// What the agent follows.
#[derive(Debug)]
pub struct Sources {
    /// The node's policy; `None`: none yet.
    pub policy: watch::Receiver<Option<Arc<NodePolicy>>>,
    /// What is inside the cluster.
    pub cluster: watch::Receiver<Arc<Cluster>>,
    /// The membership view.
    pub view: watch::Receiver<Arc<View>>,
}

/// Configuration of the agent.
#[derive(Clone, Debug)]
pub struct Config {
    /// Settings of plans.
    pub settings: Settings,
    /// Priorities and tables.
    pub numbers: RoutingNumbers,
    /// The program `nft`.
    pub nft: PathBuf,
    /// Directory of the settings of devices: `/proc/sys/net`.
    pub sysctls: PathBuf,
    /// MTU inside the tunnel; `None`: that of the interface toward the gateways, less the headers.
    pub mtu: Option<u32>,
    /// Interval of echo requests.
    pub echo_interval: Duration,
    /// Numbers of gateways from an earlier process.
    pub indices: Indices,
}

/// Compares the kernel with the plan and reads the counters; the reply says what was out of line, or why that is unknown.
pub type CheckCommand = oneshot::Sender<Result<Repairs, String>>;

/// Handle of an agent.
#[derive(Clone, Debug)]
pub struct AgentHandle {
    /// Its state.
    pub status: watch::Receiver<Arc<Status>>,
    /// Takes commands.
    pub commands: mpsc::Sender<CheckCommand>,
}

#[derive(Debug)]
pub struct Agent {
    config: Config,
    sources: Sources,
    kernel: Kernel,
    events: Events,
    hold: HoldDevice,
    held: HoldQueue,
    echoes: Echoes,
    indices: Indices,
    local_addresses: BTreeSet<IpAddr>,
    /// What the kernel has.
    plan: Option<(Arc<NodePlan>, u32)>,
    /// The plan must be made again.
    is_stale: bool,
    /// When the kernel is compared with the plan, or a failed change is tried again.
    check_at: Instant,
    error: Option<String>,
    repairs: u64,
    counters: Counters,
    commands: mpsc::Receiver<CheckCommand>,
    status: watch::Sender<Arc<Status>>,
}

impl Agent {
    /// Programs the kernel so that pods' packets are held back, as far as their prefixes are known. In the network
    /// namespace of this thread.
    ///
    /// # Errors
    /// The kernel can't be programmed.
    pub async fn start(config: Config, sources: Sources) -> Result<(Self, AgentHandle), NodeError> {
        let kernel = Kernel::open(config.settings.clone(), config.numbers, config.nft.clone())?;
        let mut kernel = kernel.with_sysctls(config.sysctls.clone());
        let events = Events::open().map_err(NodeError::of("netlink"))?;
        let name = config.settings.hold_device.clone();
        let hold = HoldDevice::create(&name).map_err(NodeError::of(format!("device {name}")))?;
        let local_addresses = kernel.local_addresses().await?;
        let (status, receiver) = watch::channel(Arc::default());
        let (command_sender, commands) = mpsc::channel(COMMANDS);
        let indices = config.indices.clone();
        let mut agent = Self {
            echoes: Echoes::default(),
            config,
            sources,
            kernel,
            events,
            hold,
            held: HoldQueue::default(),
            indices,
            local_addresses,
            plan: None,
            is_stale: true,
            check_at: Instant::now() + CHECK_INTERVAL,
            error: None,
            repairs: 0,
            counters: Counters::default(),
            commands,
            status,
        };
        agent.reconcile().await?;
        Ok((agent, AgentHandle { status: receiver, commands: command_sender }))
    }

    /// Runs until `stop` is done. The kernel stays as it is: the next agent goes on from there.
    ///
    /// # Errors
    /// The device of held packets or the kernel's reports have failed: only a restart helps.
    pub async fn run(mut self, stop: impl Future<Output = ()>) -> Result<(), NodeError> {
        let mut echo_timer = interval(self.config.echo_interval);
        echo_timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut counter_timer = interval(COUNTER_INTERVAL);
        counter_timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut buffer = vec![0; usize::from(u16::MAX)];
        let mut stop = std::pin::pin!(stop);
        loop {
            tokio::select! {
                // Answers that have arrived count before the next request makes them late.
                biased;
                () = &mut stop => return Ok(()),
                changed = self.sources.policy.changed() => self.is_stale |= changed.is_ok(),
                changed = self.sources.cluster.changed() => self.is_stale |= changed.is_ok(),
                changed = self.sources.view.changed() => self.is_stale |= changed.is_ok(),
                nonce = self.echoes.receive() => self.is_stale |= self.echoes.answered(nonce, Instant::now()),
                _ = echo_timer.tick() => self.is_stale |= self.echoes.send(Instant::now()),
                event = self.events.next() => self.changed_by_others(event.map_err(NodeError::of("netlink"))?),
                length = self.hold.receive(&mut buffer) => {
                    let length = length.map_err(NodeError::of(format!("device {}", self.config.settings.hold_device)))?;
                    self.held.push(&buffer[..length], Instant::now());
                    self.release_held().await;
                }
                () = sleep_until(self.check_at.into()) => drop(self.check().await),
                Some(command) = self.commands.recv() => {
                    let outcome = self.check().await;
                    self.read_counters().await;
                    // The client may have gone away.
                    let _ = command.send(outcome);
                }
                _ = counter_timer.tick() => self.read_counters().await,
            }
            if self.is_stale
                && let Err(error) = self.reconcile().await
            {
                self.failed(&error);
            }
        }
    }

    /// Somebody has changed something: look soon, or at once if packets aren't steered any more.
    fn changed_by_others(&mut self, notice: ChangeNotice) {
        let delay = if notice == ChangeNotice::TableDeleted { Duration::ZERO } else { CHECK_DELAY };
        self.check_at = self.check_at.min(Instant::now() + delay);
    }

    /// Compares the kernel with the plan, and repairs it.
    async fn check(&mut self) -> Result<Repairs, String> {
        self.check_at = Instant::now() + CHECK_INTERVAL;
        match self.kernel.local_addresses().await {
            Ok(addresses) if addresses != self.local_addresses => {
                self.local_addresses = addresses;
                self.is_stale = true;
            }
            Ok(_) => {}
            Err(error) => return Err(self.failed(&error)),
        }
        let Some((plan, mtu)) = self.plan.clone() else {
            self.is_stale = true;
            return Err(self.error.clone().unwrap_or_else(|| "the kernel isn't programmed yet".to_owned()));
        };
        match self.kernel.check(&plan, mtu).await {
            Ok(repairs) if repairs.is_empty() => {
                self.succeeded();
                Ok(repairs)
            }
            Ok(repairs) => {
                self.repairs += 1;
                let Repairs { table, devices, routes } = repairs;
                tracing::warn!(
                    event = "kernel_repaired",
                    table,
                    devices,
                    routes,
                    "somebody has changed what vipgate had programmed; it is in place again"
                );
                self.succeeded();
                self.publish();
                Ok(repairs)
            }
            Err(error) => Err(self.failed(&error)),
        }
    }

    /// Reads the counters; those that can't be read stay.
    async fn read_counters(&mut self) {
        self.held.expire(Instant::now());
        if let Ok(counters) = self.kernel.counters().await {
            self.counters.update(counters);
            self.publish();
        }
    }

    /// Makes a plan, and programs it if it differs.
    async fn reconcile(&mut self) -> Result<(), NodeError> {
        let policy = self.sources.policy.borrow_and_update().clone();
        let cluster = self.sources.cluster.borrow_and_update().clone();
        let view = self.sources.view.borrow_and_update().clone();
        let tunnel = policy.as_ref().map(|policy| policy.tunnel);
        self.echoes.follow(tunnel, &view).await;
        let mtu = self.mtu(&view).await;
        let gateways = self.gateways(policy.as_deref(), &view);
        let inputs = Inputs {
            settings: &self.config.settings,
            policy: policy.as_deref(),
            cluster: &cluster,
            gateways: &gateways,
            local_addresses: &self.local_addresses,
            mtu,
        };
        let plan = NodePlan::new(&inputs, &mut self.indices);
        if self.plan.as_ref().is_none_or(|(before, before_mtu)| **before != plan || *before_mtu != mtu) {
            let began = Instant::now();
            // Unknown if it fails half way.
            let before = self.plan.take();
            self.kernel.apply(&plan, mtu).await?;
            let before_plan = before.as_ref().map(|(plan, _)| &**plan);
            if plan.changes_connections(before_plan) {
                let deleted = self.kernel.delete_stale_connections(before_plan, &plan).await?;
                if deleted > 0 {
                    tracing::info!(
                        event = "connections_deleted",
                        deleted,
                        "connections from before a policy applied are deleted"
                    );
                }
            }
            let ms = began.elapsed().as_millis();
            log_changes(before.as_ref().map(|(plan, _)| &**plan), &plan, ms as u64);
            self.plan = Some((Arc::new(plan), mtu));
        }
        self.is_stale = false;
        self.succeeded();
        self.release_held().await;
        self.publish();
        Ok(())
    }

    /// The MTU inside the tunnel.
    async fn mtu(&mut self, view: &View) -> u32 {
        if let Some(mtu) = self.config.mtu {
            return mtu;
        }
        let endpoints: Vec<IpAddr> =
            view.members.iter().filter_map(|member| member.endpoint).map(|endpoint| endpoint.ip()).collect();
        let overhead = if endpoints.iter().any(IpAddr::is_ipv6) { OVERHEAD.1 } else { OVERHEAD.0 };
        let mtu = self.kernel.mtu_toward(endpoints.into_iter()).await.unwrap_or(DEFAULT_MTU);
        mtu.saturating_sub(overhead)
    }

    /// The gateways of view and policy, by name.
    fn gateways(&self, policy: Option<&NodePolicy>, view: &View) -> Vec<Gateway> {
        let in_view = |name: &str| view.members.iter().find(|member| *member.name == *name);
        let of_policy = policy.into_iter().flat_map(|policy| &policy.orders).flat_map(|order| order.iter().cloned());
        let names: BTreeSet<Arc<str>> =
            view.members.iter().map(|member| member.name.clone()).chain(of_policy).collect();
        let gateway = |name: Arc<str>| {
            let member = in_view(&name);
            Gateway {
                is_active: (view.number > 0).then(|| member.is_some_and(|member| member.is_active)),
                is_reachable: self.echoes.is_reachable(&name),
                endpoint: member.and_then(|member| member.endpoint),
                name,
            }
        };
        names.into_iter().map(gateway).collect()
    }

    /// Releases held packets of pods that the kernel steers now.
    async fn release_held(&mut self) {
        let Some((plan, _)) = &self.plan else { return };
        for packet in self.held.release(|pod| plan.endpoints.contains_key(pod), Instant::now()) {
            // A full queue drops it, as the network may.
            let _ = self.hold.release(&packet).await;
        }
    }

    fn failed(&mut self, error: &NodeError) -> String {
        self.check_at = Instant::now() + RETRY_INTERVAL;
        // Tried again by the next check.
        self.is_stale = false;
        self.plan = None;
        let text = error.to_string();
        if self.error.as_ref() != Some(&text) {
            tracing::error!(
                event = "kernel_refuses",
                error = text,
                "the kernel can't be programmed; tried again each second"
            );
            self.error = Some(text.clone());
            self.publish();
        }
        text
    }

    fn succeeded(&mut self) {
        if self.error.take().is_some() {
            tracing::info!(event = "kernel_programmed", "the kernel is programmed again");
            self.publish();
        }
    }

    fn publish(&self) {
        let plan = self.plan.as_ref().map(|(plan, _)| plan.clone());
        let policy = self.sources.policy.borrow().clone();
        let (mtu, view) = (self.plan.as_ref().map(|(_, mtu)| *mtu), self.sources.view.borrow().number);
        self.status.send_replace(Arc::new(Status {
            policy,
            plan,
            mtu,
            view,
            indices: self.indices.clone(),
            gateways: self.echoes.status(),
            held: self.held.counts(),
            repairs: self.repairs,
            counters: self.counters.totals().clone(),
            error: self.error.clone(),
        }));
    }
}

/// Logs what has changed for pods.
fn log_changes(before: Option<&NodePlan>, plan: &NodePlan, ms: u64) {
    let changed = |address, steering| before.and_then(|before| before.endpoints.get(address)) != Some(steering);
    let steered = plan.endpoints.iter().filter(|(address, steering)| changed(address, steering)).count();
    let is_gone = |address: &&IpAddr| !plan.endpoints.contains_key(*address);
    let removed = before.into_iter().flat_map(|before| before.endpoints.keys()).filter(is_gone).count();
    let (pods, gateways) = (plan.endpoints.len(), plan.tunnels.len());
    tracing::info!(event = "kernel_programmed", pods, gateways, steered, removed, ms, "kernel programmed");
}
