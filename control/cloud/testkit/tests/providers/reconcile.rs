//! Random worlds of the whole reconciler over HTTP: the providers speak to fake clouds, in which gateways die, requests fail, get
//! lost or are answered late, reads are old, servers die, two servers lead at the same time, and people change things by hand. After
//! each request: it harmed nobody. At the end, when all is quiet: everything is as desired, as far as it can be, and stays so.
//!
//! `VIPGATE_RECONCILE_WORLDS` sets how many worlds each provider has, `VIPGATE_RECONCILE_FIRST` the number of the first. A failure
//! prints what happened in its world.

mod aws;
mod azure;
mod checked;
mod clock;
mod cloud;
mod end;
mod event;
mod gcp;
mod log;
mod random;
mod reached;
mod server;
mod watched;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::reconcile::cloud::Cloud;
use crate::reconcile::reached::Reached;
use crate::reconcile::world::World;

/// Worlds of each provider by default.
const WORLDS: u64 = 30;

/// Classes that are reached in the worlds of each provider.
const CLASSES: &[&str] = &[
    // Actions.
    "claim",
    "attach",
    "move",
    "detach",
    "unclaim",
    "allocate",
    "release",
    // Events.
    "service removed",
    "gateway died",
    "gateway returned",
    "instance terminated",
    "server died",
    "leader changed",
    "two leaders",
    "lag",
    "detached by hand",
    "attached elsewhere by hand",
    "attached to a gateway by hand",
    "claim removed by hand",
    "claimed by another cluster",
    "lost to another cluster",
    "deleted by hand",
    "added by hand",
    "repaired",
    // Faults.
    "throttled, Retry-After",
    "throttled",
    "unavailable",
    "internal error",
    "internal error, carried out",
    "lost request",
    "lost reply",
    "slow request",
    "error in_use",
    "error unknown",
    "error not_found",
    // Problems.
    "NoAddress",
    "ClaimedByOtherCluster",
    "AttachedElsewhere",
    "NoNic",
    "NoCapacity",
    "NoGateway",
    // Ends.
    "attached at the end",
    "a problem at the end",
];

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().expect("a number"))
}

async fn one_world<C: Cloud>(number: u64, reached: &Reached, log: &mut Option<log::Log>) {
    let mut world = World::<C>::new(number, reached).await;
    *log = Some(world.common.log.clone());
    world.run().await;
    world.end().await;
}

fn all_worlds<C: Cloud>(classes: &[&str]) {
    let (first, worlds) =
        (number("VIPGATE_RECONCILE_FIRST").unwrap_or(0), number("VIPGATE_RECONCILE_WORLDS").unwrap_or(WORLDS));
    let (reached, provider) = (Reached::default(), std::any::type_name::<C::Provider>());
    for number in first..first + worlds {
        let mut log = None;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
        let runtime = runtime.expect("a runtime");
        let run = AssertUnwindSafe(|| runtime.block_on(one_world::<C>(number, &reached, &mut log)));
        if let Err(panic) = catch_unwind(run) {
            eprintln!("{}", log.map_or_else(String::new, |log| log.text()));
            eprintln!(
                "{provider}, world {number}: VIPGATE_RECONCILE_FIRST={number} VIPGATE_RECONCILE_WORLDS=1 runs it alone"
            );
            resume_unwind(panic);
        }
    }
    println!("{provider}: {worlds} worlds: {reached}");
    if worlds >= WORLDS {
        reached.assert_reached(&[CLASSES, classes].concat());
    }
}

#[test]
fn aws_addresses_are_taken_from_nobody_and_every_vip_gets_home() {
    all_worlds::<aws::AwsCloud>(&["prepare", "unprepare", "private address by hand"]);
}

#[test]
fn azure_addresses_are_taken_from_nobody_and_every_vip_gets_home() {
    all_worlds::<azure::AzureCloud>(&[
        "prepare",
        "unprepare",
        "private address by hand",
        "error busy",
        "error conflict",
        "OtherZone",
    ]);
}

#[test]
fn gcp_addresses_are_taken_from_nobody_and_every_vip_gets_home() {
    all_worlds::<gcp::GcpCloud>(&["error busy", "error conflict"]);
}
