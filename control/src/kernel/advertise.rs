//! BGP advertisement: installs one host route per active VIP with BGP announcement, in a kernel routing table that no
//! packet is routed by. A BGP daemon on the same host redistributes these routes and withdraws the removed ones.
//!
//! The routes are of type blackhole, which needs no interface and is accepted by all daemons; a VIP is on no interface.
//! Daemon configuration (`conf/bgp` has complete files, the tests run them):
//! - BIRD 2: `protocol kernel { kernel table 179; learn; ipv4 { table vips4; import all; export none; }; }`, and the
//!   same for IPv6. Changes are learned at once.
//! - FRR (8.4): `redistribute kernel` sees only the main table: `bgp: {table: 254}`, with a route map that permits only
//!   VIPs. `ip import-table 179` exists for IPv4 only, and zebra copies imported routes into the main table.
//!
//! In the main table a route matches only packets to a VIP that the host itself sends or that arrive on an interface
//! without a gateway; they are dropped here instead of looping.
//!
//! A killed gateway must not leave routes behind, since routers would keep sending to it. Before the first route is
//! installed, a process starts that waits for the gateway's end and withdraws the routes (`watchdog`). If that process
//! was killed too, or the host lost power, the next start withdraws them, or `vipgate detach`.

mod entry;
mod watchdog;

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use entry::AdvertisedRoute;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval};
use tracing::{info, warn};
use vipgate_common::LoggedErrors;
use vipgate_netlink::protocols::NETLINK_ROUTE;
use vipgate_netlink::{Client, NLM_F_CREATE, NLM_F_EXCL, NetworkEvent};
use watchdog::Watchdog;
pub use watchdog::{SUBCOMMAND as WITHDRAW, wait_and_withdraw};

use super::error::NetworkError;

/// Interval of rereading the table, in case another process has changed it.
const REREAD_INTERVAL: Duration = Duration::from_secs(3);

/// The table and metric of the advertised routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteTable {
    /// The kernel routing table.
    pub table: u32,
    /// The metric; `None`: the kernel's default.
    pub metric: Option<u32>,
}

/// Handle of the task that reconciles the routes. Dropping it withdraws them if the runtime is still running;
/// [`Advertiser::close`] waits until they are withdrawn.
#[derive(Debug)]
pub struct Advertiser {
    desired: watch::Sender<BTreeSet<IpAddr>>,
    installed: watch::Receiver<BTreeSet<IpAddr>>,
    task: JoinHandle<()>,
}

impl Advertiser {
    /// Removes stale routes of earlier processes from all tables, and starts the task in the current runtime and in
    /// this thread's network namespace. `program` is the vipgate binary, run as the watchdog.
    ///
    /// # Errors
    /// Changing routes isn't permitted, or netlink failed.
    pub async fn open(table: RouteTable, program: PathBuf) -> Result<Self, NetworkError> {
        let error = |source| NetworkError::new("removing stale BGP routes", source);
        let mut client = open_client().map_err(error)?;
        let removed = remove_all(&mut client).await.map_err(error)?;
        if removed > 0 {
            info!(event = "bgp_routes_stale", removed, "removed stale BGP routes of an earlier process");
        }
        let (desired, desired_receiver) = watch::channel(BTreeSet::new());
        let (published, installed) = watch::channel(BTreeSet::new());
        let reconciler = Reconciler {
            table,
            program,
            client,
            desired: desired_receiver,
            published,
            installed: BTreeSet::new(),
            watchdog: None,
            logged: LoggedErrors::default(),
        };
        // Not ended by its handle: it withdraws the routes then.
        Ok(Self { desired, installed, task: tokio::spawn(reconciler.run()) })
    }

    /// Sets the VIPs to advertise, replacing the previous set. Returns at once; an unchanged set is a no-op.
    pub fn set(&self, vips: BTreeSet<IpAddr>) {
        self.desired.send_if_modified(|desired| {
            let changed = *desired != vips;
            *desired = vips;
            changed
        });
    }

    /// The VIPs whose routes are installed in the kernel.
    pub fn installed(&self) -> BTreeSet<IpAddr> {
        self.installed.borrow().clone()
    }

    /// Waits until the installed routes match the last [`Advertiser::set`].
    pub async fn wait_installed(&self) {
        let desired = self.desired.borrow().clone();
        // Fails only when the task has ended.
        let _ = self.installed.clone().wait_for(|installed| *installed == desired).await;
    }

    /// Withdraws all routes and waits until they are removed.
    pub async fn close(self) {
        drop(self.desired);
        if let Err(error) = self.task.await {
            warn!(%error, "routes may still be advertised: the task that withdraws them has ended early");
        }
    }
}

/// Removes all routes that vipgate has installed. Returns their number.
///
/// # Errors
/// Changing routes isn't permitted, or netlink failed.
pub async fn withdraw_all() -> Result<usize, NetworkError> {
    let error = |source| NetworkError::new("withdrawing advertised routes", source);
    let mut client = open_client().map_err(error)?;
    remove_all(&mut client).await.map_err(error)
}

fn open_client() -> io::Result<Client> {
    Client::open(NETLINK_ROUTE)?.with_strict_checks()
}

async fn remove_all(client: &mut Client) -> io::Result<usize> {
    let installed = read(client, None).await?;
    for entry in &installed {
        remove(client, *entry).await?;
    }
    Ok(installed.len())
}

/// Reads vipgate's routes of a table, or of all tables.
async fn read(client: &mut Client, table: Option<u32>) -> io::Result<BTreeSet<AdvertisedRoute>> {
    let mut installed = BTreeSet::new();
    for v4 in [true, false] {
        let request = entry::dump_request(v4, table);
        let routes = client.dump(request, |message| match NetworkEvent::decode(message)? {
            Some(NetworkEvent::Route(_, route)) => Ok(AdvertisedRoute::from_route(&route)),
            _ => Ok(None),
        });
        match routes.await {
            Ok(routes) => installed.extend(routes),
            // The table doesn't exist, or IPv6 is disabled.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EOPNOTSUPP)) => {}
            Err(error) => return Err(error),
        }
    }
    // A kernel without strict checking lists other tables too.
    installed.retain(|entry: &AdvertisedRoute| table.is_none_or(|table| entry.is_in(table)));
    Ok(installed)
}

async fn remove(client: &mut Client, entry: AdvertisedRoute) -> io::Result<()> {
    match client.set(entry.remove_request(), 0).await {
        // Already removed.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ESRCH | libc::ENOENT)) => Ok(()),
        result => result,
    }
}

/// Reconciles the installed routes with the desired ones.
struct Reconciler {
    table: RouteTable,
    program: PathBuf,
    client: Client,
    desired: watch::Receiver<BTreeSet<IpAddr>>,
    /// Publishes the installed VIPs.
    published: watch::Sender<BTreeSet<IpAddr>>,
    /// The last known installed routes.
    installed: BTreeSet<AdvertisedRoute>,
    watchdog: Option<Watchdog>,
    logged: LoggedErrors,
}

impl Reconciler {
    /// Runs until the handle is dropped, then withdraws all routes.
    async fn run(mut self) {
        let mut reread = interval(REREAD_INTERVAL);
        reread.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut is_open = true;
        while is_open {
            // Without BGP VIPs the kernel isn't queried.
            let has_routes = !self.installed.is_empty() || !self.desired.borrow().is_empty();
            let mut result = Ok(());
            tokio::select! {
                changed = self.desired.changed() => is_open = changed.is_ok(),
                _ = reread.tick(), if has_routes => result = self.reread().await,
            }
            let vips = if is_open { self.desired.borrow_and_update().clone() } else { BTreeSet::new() };
            if result.is_ok() {
                result = self.reconcile(&vips).await;
            }
            self.publish();
            self.log_error(result);
        }
        if let Some(watchdog) = self.watchdog {
            watchdog.release().await;
        }
    }

    /// Rereads the table, and restarts the watchdog if it has ended.
    async fn reread(&mut self) -> io::Result<()> {
        self.installed = read(&mut self.client, Some(self.table.table)).await?;
        if self.watchdog.as_mut().is_some_and(|watchdog| !watchdog.is_alive()) {
            self.watchdog = None;
            self.ensure_watchdog().await?;
        }
        Ok(())
    }

    /// Removes and adds routes until the table has the desired ones.
    async fn reconcile(&mut self, vips: &BTreeSet<IpAddr>) -> io::Result<()> {
        let desired = vips.iter().map(|address| AdvertisedRoute::new(self.table, *address)).collect();
        let (removed, added) = entry::difference(&desired, &self.installed);
        if removed.is_empty() && added.is_empty() {
            return Ok(());
        }
        for entry in &removed {
            remove(&mut self.client, *entry).await?;
            self.installed.remove(entry);
        }
        if !added.is_empty() {
            self.ensure_watchdog().await?;
        }
        let (before, mut result) = (self.installed.len(), Ok(()));
        for entry in &added {
            match self.client.set(entry.add_request(), NLM_F_CREATE | NLM_F_EXCL).await {
                Ok(()) => drop(self.installed.insert(*entry)),
                // Another process's route to one VIP must not prevent the others.
                Err(error) if error.raw_os_error() == Some(libc::EEXIST) => result = Err(error),
                Err(error) => return Err(error),
            }
        }
        let (advertised, withdrawn, installed) = (self.installed.len() - before, removed.len(), self.installed.len());
        if advertised + withdrawn > 0 {
            info!(event = "bgp_routes", table = self.table.table, advertised, withdrawn, installed, "routes for BGP");
        }
        result
    }

    /// Starts the watchdog unless it runs: no route is installed without it.
    async fn ensure_watchdog(&mut self) -> io::Result<()> {
        if self.watchdog.is_none() {
            let failed = |error| io::Error::other(format!("the process that withdraws routes does not start: {error}"));
            self.watchdog = Some(Watchdog::start(&self.program).await.map_err(failed)?);
        }
        Ok(())
    }

    fn publish(&self) {
        let installed: BTreeSet<IpAddr> = self.installed.iter().map(|entry| entry.address).collect();
        self.published.send_if_modified(|published| {
            let changed = *published != installed;
            *published = installed;
            changed
        });
    }

    /// Logs an error once; it is retried with every reread.
    fn log_error(&mut self, result: io::Result<()>) {
        let Err(error) = result else {
            self.logged.clear();
            return;
        };
        let reason = match error.raw_os_error() {
            Some(libc::EEXIST) => "another route to a VIP exists already".to_owned(),
            _ => error.to_string(),
        };
        if self.logged.is_new(&reason) {
            warn!(event = "bgp_routes_failed", table = self.table.table, reason, "not all VIPs are advertised by BGP");
        }
    }
}
