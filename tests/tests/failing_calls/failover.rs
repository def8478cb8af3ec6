//! The long form's failover: calls of a gateway fail while it takes the place of another one that was killed.

use std::time::{Duration, Instant};

use vipgate_tests::cluster::{BGP_VIPS, Cluster, L2_VIPS, POD_FILTER, SERVER, sleep_ms};
use vipgate_tests::failing_calls::{Fault, Flow, Injector, Probes, Report, is_ready};
use vipgate_tests::flood::Random;

use crate::TRACER;
use crate::draws::{Draws, Scenario};

/// How long calls fail, milliseconds.
const WINDOW: u64 = 3_000;
/// When all is as if no call had failed.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(10);
/// The gateway whose calls fail, and the one that is killed.
const FAILING: usize = 0;
const KILLED: usize = 1;

/// Starts the gateway whose calls fail, without waiting.
fn spawn(cluster: &mut Cluster, injector: &mut Injector) {
    let gateway = &mut cluster.gateways[FAILING];
    gateway.spawn("");
    injector.attach(gateway.pid().unwrap());
}

/// Waits until both tenants' flows are answered that are sent from now on; restarts the gateway, as by systemd.
fn recover(cluster: &mut Cluster, injector: &mut Injector, probes: &Probes, trial: &str) {
    let since = Instant::now();
    let is_answered = |flow| probes.last_answered(flow).is_some_and(|sent| sent > since);
    while !((0..4).all(is_answered) && is_ready(&cluster.gateways[FAILING].host)) {
        let gateway = &mut cluster.gateways[FAILING];
        assert!(since.elapsed() < RECOVERY_TIMEOUT, "not as before: {trial}\n{}", gateway.log());
        if !gateway.is_alive() {
            println!("{trial}: it has ended: {}", gateway.log_tail());
            spawn(cluster, injector);
        }
        sleep_ms(50);
    }
    let wrong = probes.wrong();
    assert!(wrong.is_empty(), "sources: {wrong:?}: {trial}");
}

/// Kills the other gateway while a fault lasts; then all is as before, and the other one starts again.
fn fail_over(cluster: &mut Cluster, injector: &mut Injector, probes: &Probes, fault: Option<&Fault>) -> Report {
    match fault {
        Some(fault) => injector.arm(fault),
        None => injector.count(),
    }
    cluster.gateways[KILLED].kill();
    cluster.route_via(&[FAILING]);
    sleep_ms(WINDOW);
    let report = injector.report();
    let trial = fault.map(Fault::to_string).unwrap_or_default();
    recover(cluster, injector, probes, &format!("{trial}, affected: {:?}", report.affected));
    cluster.gateways[KILLED].start("");
    cluster.route_via(&cluster.indices());
    cluster.wait_converged();
    report
}

/// Tries faults until the time is over, or all have been.
pub(crate) fn try_faults(random: Random, end: Instant) {
    let (mut injector, mut draws) = (Injector::start(TRACER), Draws::new(random));
    let mut cluster = Cluster::new("failing", 2);
    cluster.accounting.allow_all();
    cluster.gateways[FAILING].wrapper = injector.wrapper();
    cluster.start_policyd("");
    spawn(&mut cluster, &mut injector);
    cluster.gateways[KILLED].start("");
    cluster.gateways[FAILING].wait_ready();
    cluster.wait_converged();
    let flow = |pod: usize, server, source| Flow { pod: cluster.pods[pod].clone(), server, source, alternative: None };
    let probes = Probes::start(&[
        flow(0, SERVER[0], BGP_VIPS[0]),
        flow(0, SERVER[1], BGP_VIPS[1]),
        flow(2, SERVER[0], L2_VIPS[0]),
        flow(2, SERVER[1], L2_VIPS[1]),
    ]);
    let capture = cluster.capture_outside(POD_FILTER);
    draws.add(Scenario::Failover, &fail_over(&mut cluster, &mut injector, &probes, None));
    while Instant::now() < end
        && let Some(trial) = draws.draw()
    {
        println!("{trial}");
        let report = fail_over(&mut cluster, &mut injector, &probes, Some(&trial.fault));
        draws.record(&trial, &report);
    }
    println!("{}", draws.coverage());
    let leaks = capture.end();
    assert!(leaks.is_empty(), "a pod's address leaked: {leaks:?}");
}
