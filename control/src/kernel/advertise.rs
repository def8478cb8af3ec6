//! Routes for a BGP daemon: one for each VIP that this gateway serves and that BGP announces, in a table of the
//! kernel's that no packet is routed by. A daemon on the same host takes them from there and withdraws what is gone.
//!
//! They are of type blackhole, which needs no interface and which all daemons take; a VIP still is on no interface.
//! What daemons need (`conf/bgp` has whole configurations, the tests run them):
//! - BIRD 2: `protocol kernel { kernel table 179; learn; ipv4 { table vips4; import all; export none; }; }`, and the
//!   same for IPv6. It hears of a change at once.
//! - FRR (8.4): `redistribute kernel` sees only the main table: `bgp: {table: 254}`, with a route map that lets through
//!   nothing but VIPs. `ip import-table 179` exists for IPv4 alone, and zebra copies what it imports into the
//!   main table.
//!
//! In the main table a route concerns only what the host itself or an interface without gateway sends to a VIP, which
//! then ends here instead of going in circles.
//!
//! A killed gateway must not leave routes behind: routers would go on sending to it. So before the first route a process
//! starts that only waits for the gateway's end (`watchdog`). What it can't do, because it was killed too or the host lost power,
//! the next start does, and `vipgate detach`.

mod entry;
mod watchdog;

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use rtnetlink::packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval};
use tracing::{info, warn};

use super::error::NetworkError;
use super::socket::Client;
use entry::Entry;
use watchdog::Watchdog;

pub use watchdog::{SUBCOMMAND as WITHDRAW, wait_and_withdraw};

/// How often the table is read again, should somebody else have changed it.
const LOOK_AGAIN: Duration = Duration::from_secs(3);
/// Readings of the table while it changes under the reader.
const DUMP_TRIES: usize = 4;

/// Where the routes stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The kernel's table.
    pub table: u32,
    /// Their metric; `None`: what the kernel gives them.
    pub metric: Option<u32>,
}

/// The way to the task that keeps the routes. Dropped, it withdraws them, if the runtime still runs for it;
/// [`Advertiser::close`] waits for that.
#[derive(Debug)]
pub struct Advertiser {
    wanted: watch::Sender<BTreeSet<IpAddr>>,
    standing: watch::Receiver<BTreeSet<IpAddr>>,
    task: JoinHandle<()>,
}

impl Advertiser {
    /// Removes what an earlier process has left, in whatever table, and starts the task in the current runtime and in this
    /// thread's network namespace. `program` is vipgate itself, which withdraws the routes when this process is killed.
    ///
    /// # Errors
    /// The process may not change routes, or netlink can't be used.
    pub async fn open(place: Place, program: PathBuf) -> Result<Self, NetworkError> {
        let error = |source| NetworkError::new("removing routes that an earlier process has advertised", source);
        let mut client = Client::strict().map_err(error)?;
        let removed = remove_all(&mut client).await.map_err(error)?;
        if removed > 0 {
            info!(event = "bgp_routes_stale", removed, "removed routes that an earlier process has advertised");
        }
        let (wanted, asked) = watch::channel(BTreeSet::new());
        let (told, standing) = watch::channel(BTreeSet::new());
        let there = BTreeSet::new();
        let keeper = Keeper { place, program, client, wanted: asked, told, there, watchdog: None, complaint: None };
        Ok(Self { wanted, standing, task: tokio::spawn(keeper.run()) })
    }

    /// Says which VIPs are to be advertised: these and no others. Returns at once; the same set again costs nothing.
    pub fn set(&self, vips: BTreeSet<IpAddr>) {
        self.wanted.send_if_modified(|wanted| {
            let changed = *wanted != vips;
            *wanted = vips;
            changed
        });
    }

    /// The VIPs whose routes stand in the kernel.
    pub fn standing(&self) -> BTreeSet<IpAddr> {
        self.standing.borrow().clone()
    }

    /// Waits until the routes in the kernel are those that were set last.
    pub async fn settled(&self) {
        let wanted = self.wanted.borrow().clone();
        // Fails only when the task is gone, which then has withdrawn everything or never will.
        let _ = self.standing.clone().wait_for(|standing| *standing == wanted).await;
    }

    /// Withdraws all routes and waits until they are gone.
    pub async fn close(self) {
        drop(self.wanted);
        if let Err(error) = self.task.await {
            warn!(%error, "routes may still be advertised: the task that keeps them ended early");
        }
    }
}

/// Removes all routes of ours. Returns how many there were.
///
/// # Errors
/// The process may not change routes, or netlink can't be used.
pub async fn withdraw_all() -> Result<usize, NetworkError> {
    let error = |source| NetworkError::new("withdrawing advertised routes", source);
    let mut client = Client::strict().map_err(error)?;
    remove_all(&mut client).await.map_err(error)
}

async fn remove_all(client: &mut Client) -> io::Result<usize> {
    let there = read(client, None).await?;
    for entry in &there {
        remove(client, *entry).await?;
    }
    Ok(there.len())
}

/// The routes of ours in a table, or in all tables.
async fn read(client: &mut Client, table: Option<u32>) -> io::Result<BTreeSet<Entry>> {
    let mut there = BTreeSet::new();
    for v4 in [true, false] {
        for _ in 0..DUMP_TRIES {
            let found = client.dump(entry::list(v4, table), |event| there.extend(Entry::of(&event))).await;
            match found {
                Ok(true) => break,
                Ok(false) => {}
                // There is no such table, or no IPv6.
                Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EOPNOTSUPP)) => break,
                Err(error) => return Err(error),
            }
        }
    }
    // A kernel that can't choose lists other tables too.
    there.retain(|entry: &Entry| table.is_none_or(|table| entry.is_in(table)));
    Ok(there)
}

async fn remove(client: &mut Client, entry: Entry) -> io::Result<()> {
    match client.set(entry.remove(), 0).await {
        // Gone already.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ESRCH | libc::ENOENT)) => Ok(()),
        result => result,
    }
}

/// Keeps the routes as they are wanted.
struct Keeper {
    place: Place,
    program: PathBuf,
    client: Client,
    wanted: watch::Receiver<BTreeSet<IpAddr>>,
    told: watch::Sender<BTreeSet<IpAddr>>,
    /// What stands in the kernel, as far as is known.
    there: BTreeSet<Entry>,
    watchdog: Option<Watchdog>,
    /// What was last complained of.
    complaint: Option<String>,
}

impl Keeper {
    /// Runs until nobody wants anything any more, and leaves no route behind.
    async fn run(mut self) {
        let mut look_again = interval(LOOK_AGAIN);
        look_again.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut goes_on = true;
        while goes_on {
            // A gateway without such VIPs asks the kernel nothing.
            let looks = !self.there.is_empty() || !self.wanted.borrow().is_empty();
            let mut outcome = Ok(());
            tokio::select! {
                changed = self.wanted.changed() => goes_on = changed.is_ok(),
                _ = look_again.tick(), if looks => outcome = self.look().await,
            }
            let vips = if goes_on { self.wanted.borrow_and_update().clone() } else { BTreeSet::new() };
            if outcome.is_ok() {
                outcome = self.settle(&vips).await;
            }
            self.tell();
            self.complain(outcome);
        }
        if let Some(watchdog) = self.watchdog {
            watchdog.release().await;
        }
    }

    /// Reads the table, and sees that the process that withdraws still lives.
    async fn look(&mut self) -> io::Result<()> {
        self.there = read(&mut self.client, Some(self.place.table)).await?;
        if self.watchdog.as_mut().is_some_and(|watchdog| !watchdog.is_alive()) {
            self.watchdog = None;
            self.watch().await?;
        }
        Ok(())
    }

    async fn settle(&mut self, vips: &BTreeSet<IpAddr>) -> io::Result<()> {
        let wanted = vips.iter().map(|address| Entry::new(self.place, *address)).collect();
        let (less, more) = entry::difference(&wanted, &self.there);
        if less.is_empty() && more.is_empty() {
            return Ok(());
        }
        for entry in &less {
            remove(&mut self.client, *entry).await?;
            self.there.remove(entry);
        }
        if !more.is_empty() {
            self.watch().await?;
        }
        let (before, mut outcome) = (self.there.len(), Ok(()));
        for entry in &more {
            match self.client.set(entry.add(), NLM_F_CREATE | NLM_F_EXCL).await {
                Ok(()) => drop(self.there.insert(*entry)),
                // Somebody else's, which is no reason to leave out the others.
                Err(error) if error.raw_os_error() == Some(libc::EEXIST) => outcome = Err(error),
                Err(error) => return Err(error),
            }
        }
        let (advertised, withdrawn, standing) = (self.there.len() - before, less.len(), self.there.len());
        if advertised + withdrawn > 0 {
            info!(event = "bgp_routes", table = self.place.table, advertised, withdrawn, standing, "routes for BGP");
        }
        outcome
    }

    /// No route without a process that withdraws it.
    async fn watch(&mut self) -> io::Result<()> {
        if self.watchdog.is_none() {
            let failed = |error| io::Error::other(format!("the process that withdraws routes does not start: {error}"));
            self.watchdog = Some(Watchdog::start(&self.program).await.map_err(failed)?);
        }
        Ok(())
    }

    fn tell(&self) {
        let standing: BTreeSet<IpAddr> = self.there.iter().map(|entry| entry.address).collect();
        self.told.send_if_modified(|told| {
            let changed = *told != standing;
            *told = standing;
            changed
        });
    }

    /// Says once what goes wrong; it is tried again with every look.
    fn complain(&mut self, outcome: io::Result<()>) {
        let complaint = outcome.err().map(|error| match error.raw_os_error() {
            Some(libc::EEXIST) => "another route to a VIP stands there already".to_owned(),
            _ => error.to_string(),
        });
        if let Some(reason) = complaint.as_ref().filter(|reason| self.complaint.as_ref() != Some(reason)) {
            warn!(event = "bgp_routes_failed", table = self.place.table, reason, "not all VIPs are advertised by BGP");
        }
        self.complaint = complaint;
    }
}
