//! `vipgate demo`: small clusters and external hosts in network namespaces, real gateways between them, and a report in
//! which every line is checked.
//!
//! The first scenario has one gateway: translation and load balancing. The second has two, one of which is killed:
//! failover. The third has a node, too, whose agent steers pods' packets to the gateways. `--kubernetes` runs the first
//! one with a Kubernetes API server in place of files.

mod checks;
mod connections;
mod daemon;
mod downloads;
mod failover;
mod group;
mod keep;
mod kubernetes;
mod leaks;
mod nodes;
mod report;
mod topology;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use report::Report;
use topology::Topology;
use vipgate_lab::Lab;
use vipgate_lab::api_server::ADMIN;

use self::failover::FailoverTopology;
use self::nodes::NodeTopology;
use crate::command_error::CommandError;
use crate::output;

/// Limit of the time until something has started, or is as it should be.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Runs all scenarios, reports, cleans up. With `keep`, their topologies stay until the user presses Enter.
///
/// # Errors
/// When the setup fails, a check of the report fails, or the demo is interrupted.
pub fn run(keep: bool) -> Result<(), CommandError> {
    let labs = [new_lab("demo")?, new_lab("group")?, new_lab("nodes")?];
    run_in(&labs, || run_scenarios(labs.each_ref(), keep))
}

/// Runs the first scenario with a Kubernetes API server in place of files.
///
/// # Errors
/// As [`run`], and when `kube-apiserver`, `etcd` or `kubectl` is missing.
pub fn run_kubernetes(keep: bool) -> Result<(), CommandError> {
    let lab = new_lab("cluster")?;
    run_in(std::slice::from_ref(&lab), || run_cluster(&lab, keep))
}

fn new_lab(tag: &str) -> Result<Arc<Lab>, CommandError> {
    Lab::new(tag).map(Arc::new).map_err(CommandError::runtime)
}

/// Runs scenarios, and removes their labs.
fn run_in(labs: &[Arc<Lab>], scenarios: impl FnOnce() -> Result<(), CommandError>) -> Result<(), CommandError> {
    let interrupted = Arc::new(AtomicBool::new(false));
    clean_up_on_signals(labs.to_owned(), interrupted.clone())?;
    let result = scenarios();
    remove(labs);
    if interrupted.load(Ordering::Relaxed) {
        return Err(CommandError::runtime("interrupted; everything is cleaned up"));
    }
    result
}

fn run_cluster(lab: &Lab, keep: bool) -> Result<(), CommandError> {
    let mut topology = Topology::build(lab)?;
    Report::cluster_title();
    let mut report = Report::new();
    let mut plane = kubernetes::run(lab, &mut topology, &mut report)?;
    if keep {
        keep::print_cluster_commands(&topology, &plane.api.kubectl_command(ADMIN));
        wait_for_enter()?;
    }
    topology.stop_gateway(&mut report)?;
    plane.stop(&mut report)?;
    report.finish()
}

fn wait_for_enter() -> Result<(), CommandError> {
    std::io::stdin().read_line(&mut String::new()).map(drop).map_err(CommandError::runtime)
}

fn run_scenarios([first, second, third]: [&Arc<Lab>; 3], keep: bool) -> Result<(), CommandError> {
    let mut topology = Topology::build(first)?;
    Report::title();
    let mut report = Report::new();
    topology.start_gateway(&topology.policy_files()?)?;
    checks::run(&topology, &mut report)?;
    if !keep {
        topology.stop_gateway(&mut report)?;
        first.remove();
    }

    let mut failover = FailoverTopology::build(second)?;
    Report::failover_title();
    failover::run(&mut failover, &mut report)?;
    if !keep {
        failover::stop(&mut failover, &mut report)?;
        second.remove();
    }

    let mut nodes = NodeTopology::build(third)?;
    Report::node_title();
    nodes::run(&mut nodes, &mut report)?;
    if keep {
        keep::print_commands(&topology, &failover, &nodes);
        wait_for_enter()?;
        topology.stop_gateway(&mut report)?;
        failover::stop(&mut failover, &mut report)?;
    }
    nodes::stop(&mut nodes, &mut report)?;
    report.finish()
}

fn remove(labs: &[Arc<Lab>]) {
    for lab in labs {
        lab.remove();
    }
}

/// Removes the labs on a signal. Whatever the demo waits for ends with them.
fn clean_up_on_signals(labs: Vec<Arc<Lab>>, interrupted: Arc<AtomicBool>) -> Result<(), CommandError> {
    let clean_up = move || {
        interrupted.store(true, Ordering::Relaxed);
        remove(&labs);
        // The main thread fails soon without its labs; if it hangs, this thread exits.
        thread::sleep(Duration::from_secs(3));
        vipgate_lab::remove_own();
        output::print_error("vipgate: interrupted; everything is cleaned up");
        std::process::exit(1);
    };
    vipgate_lab::on_signals(clean_up).map_err(CommandError::runtime)
}

/// Polls a condition; false on timeout.
fn wait_for(condition: impl FnMut() -> bool) -> bool {
    vipgate_lab::wait_for(TIMEOUT, condition)
}
