//! Time to program endpoints into the kernel: first, with one changed, with all of them steered to another gateway, and
//! without any change.

use std::io::Write;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use vipgate_node::nft::script::{Before, change, replacement};

use super::policy::{BenchNode, MTU};
use crate::netns::Namespace;
use crate::path::{median, round2};

/// Times in milliseconds.
#[derive(Clone, Copy, Debug, Default)]
struct Step {
    /// From policy to plan.
    plan: f64,
    /// From plan to a kernel that is programmed and compared: what the agent waits for.
    apply: f64,
    /// The transactions of `nft` alone, which is what packets wait for; and the length of its script.
    commit: f64,
    script: usize,
}

/// The report, printed as JSON.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    benchmark: &'static str,
    endpoints: u32,
    rounds: u32,
    first: Change,
    one_changed: Change,
    gateway_lost: Change,
    /// The agent's comparison of the kernel with its plan.
    check_ms: f64,
}

/// Medians of one kind of change.
#[derive(Debug, Serialize)]
struct Change {
    plan_ms: f64,
    apply_ms: f64,
    apply_worst_ms: f64,
    nft_ms: f64,
    script_kb: f64,
}

/// Measures this many endpoints.
pub(super) fn measure(endpoints: u32, rounds: u32, core: usize) -> Result<Report> {
    let (mut steps, mut checks) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let (changes, check) = round(endpoints, core)?;
        steps.push(changes);
        checks.push(check);
    }
    let change = |at: usize| {
        let all = |value: fn(&Step) -> f64| steps.iter().map(|changes| value(&changes[at])).collect::<Vec<_>>();
        let apply = all(|step| step.apply);
        Change {
            plan_ms: round2(median(all(|step| step.plan))),
            apply_worst_ms: round2(apply.iter().copied().fold(0.0, f64::max)),
            apply_ms: round2(median(apply)),
            nft_ms: round2(median(all(|step| step.commit))),
            script_kb: round2(median(all(|step| step.script as f64 / 1e3))),
        }
    };
    Ok(Report {
        benchmark: "node_programming",
        endpoints,
        rounds,
        first: change(0),
        one_changed: change(1),
        gateway_lost: change(2),
        check_ms: round2(median(checks)),
    })
}

/// The steps of one round, and the time of a comparison.
fn round(endpoints: u32, core: usize) -> Result<([Step; 3], f64)> {
    let [node, other] = [Namespace::create("node")?, Namespace::create("other")?];
    for host in [&node, &other] {
        host.exec(&["sysctl", "-q", "-w", "net.ipv6.conf.default.disable_ipv6=0"])?;
    }
    let mut plans = Vec::new();
    let (mut steps, check) = BenchNode::new(endpoints).with_kernel(&node, core, async |bench, kernel| {
        let mut steps = [Step::default(); 3];
        for (number, step) in steps.iter_mut().enumerate() {
            match number {
                1 => bench.uncover_one(),
                2 => bench.lose_gateway(),
                _ => {}
            }
            let began = Instant::now();
            let plan = bench.plan();
            step.plan = ms_since(began);
            let began = Instant::now();
            kernel.apply(&plan, MTU).await?;
            step.apply = ms_since(began);
            plans.push(plan);
        }
        let began = Instant::now();
        let repairs = kernel.check(&plans[2], MTU).await?;
        let check = ms_since(began);
        ensure!(repairs.is_empty(), "the kernel differs from what was programmed: {repairs:?}");
        Ok((steps, check))
    })?;
    // The same transactions in another namespace, without what the agent does besides.
    other.run(core, || {
        let mut before = None;
        for (plan, step) in plans.iter().zip(&mut steps) {
            let (prepare, switch) = match before {
                None => (String::new(), replacement(&plan.table)),
                Some(old) => {
                    let change = change(Before::Exactly(old), &plan.table);
                    (change.prepare, change.switch)
                }
            };
            step.script = prepare.len() + switch.len();
            let began = Instant::now();
            if !prepare.is_empty() {
                run_nft(&prepare)?;
            }
            run_nft(&switch)?;
            step.commit = ms_since(began);
            before = Some(&plan.table);
        }
        Ok(())
    })?;
    Ok((steps, check))
}

fn run_nft(script: &str) -> Result<()> {
    let mut child = Command::new("nft").args(["-f", "-"]).stdin(Stdio::piped()).spawn().context("cannot run nft")?;
    child.stdin.take().context("nft has no stdin")?.write_all(script.as_bytes())?;
    ensure!(child.wait()?.success(), "nft refused the script");
    Ok(())
}

fn ms_since(began: Instant) -> f64 {
    began.elapsed().as_secs_f64() * 1e3
}
