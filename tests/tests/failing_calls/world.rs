//! A gateway in its testbed, whose calls fail or those of its policy server, and what holds whichever fail.

use std::process::ExitStatus;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;
use vipgate_tests::etcd::{ENDPOINT, Etcd};
use vipgate_tests::failing_calls::{Fault, Flow, Injector, Probes, Report, is_ready};
use vipgate_tests::policyd::{Policyd, PolicydConfig};
use vipgate_tests::{Capture, EXTRA_ENDPOINT, POD_FILTER, SERVER, Testbed, VIP_A, VIP_B, session_state, wait_for};

use crate::TRACER;
use crate::draws::Scenario;
use crate::ends::{self, Expected};

/// With it, pods are covered by policy, or dropped.
const CLUSTER: &str = "pod_cidrs: [10.1.0.0/16, \"fd00:1::/32\"]\nservice_cidrs: [10.9.0.0/16, \"fd00:9::/32\"]";
/// Manifests of the tenants.
const TENANTS: [&str; 2] = ["tenant-a.yaml", "tenant-b.yaml"];
/// The flow of the pod that a policy change adds; those before it are always answered.
const EXTRA: usize = 4;
/// The pod's address.
const EXTRA_ADDRESS: &str = "10.1.0.31";
/// pcap filter of the pods that are always covered.
const COVERED_FILTER: &str = "(net 10.1.0.0/24 or net fd00:1::/64) and not host 10.1.0.31";
/// Age of an answer of a flow that works.
const RECENT: Duration = Duration::from_millis(400);
/// How long calls fail: in a start, in other scenarios.
const START_WINDOW: Duration = Duration::from_secs(6);
const WINDOW: Duration = Duration::from_secs(2);
/// How long a policy change that is acknowledged may take.
const IN_FORCE_TIMEOUT: Duration = Duration::from_secs(3);
/// `TimeoutStopSec` of the unit.
const STOP_TIMEOUT: Duration = Duration::from_secs(15);
/// When all is as if no call had failed.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for a start without a fault, with everything else that the machine does.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// Time for a process to be reaped.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Whose calls fail, and where policy comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Setup {
    /// A gateway's, with manifests in files.
    Files,
    /// A gateway's, with a policy server.
    Server,
    /// A policy server's that reads files.
    ServerOfFiles,
    /// A policy server's that reads etcd.
    ServerOfEtcd,
}

impl Setup {
    pub(crate) const ALL: [Self; 4] = [Self::Files, Self::Server, Self::ServerOfFiles, Self::ServerOfEtcd];

    /// Its scenarios; a policy change is first one way, then the other.
    pub(crate) fn scenarios(self) -> &'static [Scenario] {
        let all: &'static [Scenario] = &[Scenario::Policy, Scenario::Start, Scenario::Stop, Scenario::Interface];
        if self.fails_server() { &all[..3] } else { all }
    }

    fn fails_server(self) -> bool {
        matches!(self, Self::ServerOfFiles | Self::ServerOfEtcd)
    }
}

/// The testbed, with traffic and a capture outside that must stay empty.
pub(crate) struct World {
    setup: Setup,
    drops_uncovered: bool,
    config: String,
    server_config: String,
    probes: Probes,
    capture: Option<Capture>,
    testbed: Testbed,
    etcd: Option<Etcd>,
    injector: Injector,
    /// What the gateway shows of itself without a fault.
    baseline: Value,
    /// The trial, and the calls that it has affected, for messages.
    trial: String,
    expected: Expected,
    /// Whether the policy change is made.
    is_covered: bool,
    /// Whether this process's XDP program was detached: each time, it is attached later.
    was_detached: bool,
    changes: u32,
    pub(crate) restarts: u32,
    _state: TempDir,
}

impl World {
    /// Starts all without a fault. Pods that no policy covers are dropped, or pass untranslated.
    pub(crate) fn new(setup: Setup, drops_uncovered: bool) -> Self {
        let mut testbed = Testbed::new("failing");
        testbed.accounting.allow_all();
        testbed.uses_policy_server = setup != Setup::Files;
        let injector = Injector::start(TRACER);
        if !setup.fails_server() {
            testbed.wrapper = injector.wrapper();
        }
        let etcd = (setup == Setup::ServerOfEtcd).then(|| Etcd::start(&testbed.gateway));
        let (state, config) = session_state();
        let cluster = if drops_uncovered { CLUSTER } else { "" };
        let config = if setup == Setup::Files { format!("{config}\n{cluster}") } else { config };
        let source = match &etcd {
            Some(_) => format!("source: {{etcd: {{endpoints: [\"{ENDPOINT}\"]}}}}"),
            None => format!("state: {}/policyd", testbed.folder.path().display()),
        };
        let flow = |pod: usize, server, source, alternative| Flow {
            pod: testbed.pods[pod].clone(),
            server,
            source,
            alternative,
        };
        let probes = Probes::start(&[
            flow(0, SERVER[0], VIP_A[0], None),
            flow(0, SERVER[1], VIP_A[1], None),
            flow(2, SERVER[0], VIP_B[0], None),
            flow(2, SERVER[1], VIP_B[1], None),
            flow(3, SERVER[0], VIP_B[0], (!drops_uncovered).then_some(EXTRA_ADDRESS)),
        ]);
        let mut world = Self {
            setup,
            drops_uncovered,
            config,
            server_config: format!("{cluster}\n{source}"),
            probes,
            capture: None,
            testbed,
            etcd,
            injector,
            baseline: Value::Null,
            trial: "no fault".to_owned(),
            expected: Expected::Running,
            is_covered: false,
            was_detached: false,
            changes: 0,
            restarts: 0,
            _state: state,
        };
        world.begin();
        world
    }

    fn begin(&mut self) {
        if let Some(etcd) = &self.etcd {
            for name in TENANTS {
                etcd.put(&self.testbed.read_policy(name));
            }
        }
        if self.setup == Setup::Server {
            self.testbed.start_policyd(&self.server_config);
        }
        self.start();
        if self.setup.fails_server() {
            self.testbed.spawn_gateway(&self.config);
        }
        self.wait_well();
        // Before the first start, the kernel forwards what pods send.
        self.probes.forget();
        self.baseline = self.observed();
        self.capture = Some(self.testbed.capture(if self.drops_uncovered { POD_FILTER } else { COVERED_FILTER }));
    }

    /// Starts the process whose calls fail.
    fn start(&mut self) {
        (self.expected, self.was_detached) = (Expected::Running, false);
        let pid = if self.setup.fails_server() {
            let settings = PolicydConfig { extra: &self.server_config, ..PolicydConfig::default() };
            let (wrapper, folder) = (self.injector.wrapper(), self.testbed.folder.path());
            let mut server = Policyd::spawn_with_wrapper(&wrapper, &self.testbed.gateway, folder, settings);
            let pid = server.process().id();
            self.testbed.policyd = Some(server);
            pid
        } else {
            self.testbed.spawn_gateway(&self.config);
            self.testbed.process().id()
        };
        self.injector.attach(pid);
    }

    /// Performs a scenario, with a fault until its end, and checks everything; returns what was counted meanwhile.
    pub(crate) fn perform(&mut self, scenario: Scenario, fault: Option<&Fault>) -> Report {
        self.trial = fault.map_or_else(|| "no fault".to_owned(), |fault| format!("{scenario:?}: {fault}"));
        match scenario {
            Scenario::Start => self.restart(fault),
            Scenario::Policy => self.change_policy(fault),
            Scenario::Interface => {
                self.arm(fault);
                self.change_interface();
            }
            Scenario::Stop => self.stop(fault),
            Scenario::Failover => unreachable!("there is one gateway"),
        }
        let report = self.injector.report();
        self.trial = format!("{}, affected: {:?}", self.trial, report.affected);
        self.recover(fault);
        report
    }

    fn arm(&mut self, fault: Option<&Fault>) {
        match fault {
            Some(fault) => self.injector.arm(fault),
            None => self.injector.count(),
        }
    }

    fn restart(&mut self, fault: Option<&Fault>) {
        self.changes += 1;
        self.end(if self.changes.is_multiple_of(2) { "TERM" } else { "KILL" });
        self.arm(fault);
        let started = Instant::now();
        self.start();
        wait_for(START_WINDOW, || !self.is_running() || self.is_well(started));
    }

    fn change_policy(&mut self, fault: Option<&Fault>) {
        self.arm(fault);
        self.is_covered = !self.is_covered;
        self.write_policy();
        // Where a map can't be written, packets of others are affected, too, but not for long.
        let is_of_maps = fault.is_some_and(|fault| fault.kind.name.starts_with("bpf/"));
        if self.setup == Setup::Server && self.is_covered && is_of_maps {
            self.check_acknowledgment();
        } else {
            wait_for(WINDOW, || self.is_in_force());
        }
    }

    /// What the policy server reports as in force at the gateway is in force.
    fn check_acknowledgment(&mut self) {
        let (code, ..) = self.testbed.policy_status(&["--endpoint", EXTRA_ADDRESS, "--wait", "2"]);
        if code != 0 {
            return;
        }
        let acknowledged = Instant::now();
        let is_answered = || self.probes.last_answered(EXTRA).is_some_and(|sent| sent > acknowledged);
        if !wait_for(IN_FORCE_TIMEOUT, is_answered) && self.is_running() {
            self.fail("an endpoint is acknowledged that isn't in force");
        }
    }

    fn write_policy(&self) {
        match &self.etcd {
            Some(etcd) if self.is_covered => drop(etcd.put(EXTRA_ENDPOINT)),
            Some(etcd) => etcd.delete("/vipgate/EndpointSlice/tenant-b/more"),
            None => {
                let name = TENANTS[1];
                let text = self.testbed.read_policy(name);
                let original = text.split("\n---\n# extra").next().unwrap_or_default();
                let extra = if self.is_covered { format!("\n---\n# extra{EXTRA_ENDPOINT}") } else { String::new() };
                self.testbed.write_policy(name, &format!("{original}{extra}"));
            }
        }
    }

    fn change_interface(&mut self) {
        self.changes += 1;
        let Testbed { gateway, switch, .. } = &self.testbed;
        match self.changes % 3 {
            0 if !self.was_detached => {
                gateway.ip(&["link", "set", "gw-in", "xdp", "off"]).unwrap();
                self.was_detached = true;
            }
            1 => {
                switch.ip(&["link", "set", "to-gw", "down"]).unwrap();
                thread::sleep(WINDOW / 4);
                switch.ip(&["link", "set", "to-gw", "up"]).unwrap();
            }
            _ => {
                let action = if self.changes.is_multiple_of(2) { "replace" } else { "del" };
                // There may be none to remove.
                let _ = gateway.ip(&["address", action, "10.99.0.1/32", "dev", "gw-in"]);
            }
        }
        thread::sleep(WINDOW);
    }

    fn stop(&mut self, fault: Option<&Fault>) {
        self.arm(fault);
        self.expected = Expected::Stopped;
        self.signal("TERM");
        let has_stopped = wait_for(STOP_TIMEOUT, || !self.is_running());
        // The handler of a signal wakes the runtime by such a call: when it fails, both are received with the next signal.
        if !has_stopped && fault.is_some_and(|fault| fault.kind.name == "sendto/unix") {
            self.arm(None);
            self.signal("TERM");
        }
        if !has_stopped && !wait_for(STOP_TIMEOUT, || !self.is_running()) {
            self.fail("it doesn't stop in time");
        }
    }

    /// Waits until all is as before, with restarts as by systemd, and checks what must not happen.
    fn recover(&mut self, fault: Option<&Fault>) {
        let since = Instant::now();
        loop {
            self.check_panic(fault);
            if self.is_well(since) {
                break;
            }
            if since.elapsed() > RECOVERY_TIMEOUT {
                let text = self.describe(since);
                self.fail(&text);
            }
            if !self.is_running() {
                self.check_end();
                self.restarts += 1;
                self.start();
            }
            thread::sleep(POLL_INTERVAL);
        }
        self.testbed.check_frames();
        self.check_traffic();
    }

    fn check_panic(&mut self, fault: Option<&Fault>) {
        if self.expected == Expected::Killed {
            return;
        }
        let Some(panic) = ends::panic(&self.log()) else { return };
        if !ends::is_refused_start(&panic, fault) {
            self.fail(&format!("it has panicked: {panic}"));
        }
        self.kill();
    }

    /// Checks how the process has ended.
    fn check_end(&mut self) {
        let (log, status) = (self.log(), self.reap());
        if let Err(text) = ends::check(status, self.expected, &log) {
            self.fail(&text);
        }
    }

    fn check_traffic(&mut self) {
        let wrong = self.probes.wrong();
        assert!(wrong.is_empty(), "sources: {wrong:?}\n{}", self.trial);
        if let Some(capture) = self.capture.take_if(|capture| !capture.is_empty()) {
            panic!("a pod's address leaked: {:?}\n{}", capture.end(), self.trial);
        }
    }

    /// Fails: something happened that must not.
    fn fail(&self, text: &str) -> ! {
        panic!("{text}\n{}\n{}", self.trial, self.log());
    }

    /// Whether all that was sent since then was answered as policy says, and all is as before.
    fn is_well(&self, since: Instant) -> bool {
        let is_answered = |flow: usize| self.probes.last_answered(flow).is_some_and(|sent| sent > since);
        (0..EXTRA).all(is_answered)
            && self.is_in_force()
            && is_ready(&self.testbed.gateway)
            && (self.baseline.is_null() || self.observed() == self.baseline)
            && (self.setup == Setup::Files || self.testbed.policy_status(&["--wait", "1"]).0 == 0)
    }

    /// Whether the last policy change is in force, as traffic shows.
    fn is_in_force(&self) -> bool {
        let is_answered = self.probes.last_answered(EXTRA).is_some_and(|sent| sent.elapsed() < RECENT);
        is_answered == self.is_covered
    }

    #[track_caller]
    fn wait_well(&mut self) {
        let since = Instant::now();
        assert!(wait_for(START_TIMEOUT, || self.is_well(since)), "{}\n{}", self.describe(since), self.log());
    }

    /// What the gateway shows of itself, as far as it doesn't change with traffic; null if it can't be queried.
    fn observed(&self) -> Value {
        let (code, stdout, _) = self.testbed.command(&["status", "--socket", &self.testbed.socket(), "-o", "json"]);
        if code != 0 {
            return Value::Null;
        }
        let status: Value = serde_json::from_str(&stdout).unwrap();
        let interfaces = status["interfaces"].as_array().into_iter().flatten();
        let programs: Vec<Value> =
            interfaces.map(|it| json!([it["name"], it["xdp"], it["guard"], it["down"]])).collect();
        json!({
            "programs": programs,
            "sockets": status["sockets"],
            "faults": status["faults"],
            "capture_error": status["capture_error"],
            "connected": status["policy"]["server"]["connected"],
            "cache_error": status["policy"]["server"]["cache_error"],
        })
    }

    fn describe(&mut self, since: Instant) -> String {
        let unanswered: Vec<usize> =
            (0..EXTRA).filter(|flow| self.probes.last_answered(*flow).is_none_or(|sent| sent <= since)).collect();
        format!(
            "not as before within {:?}: running {}, ready {}, unanswered flows {unanswered:?}, policy in force {}\n\
             before: {}\nnow: {}",
            since.elapsed(),
            self.is_running(),
            is_ready(&self.testbed.gateway),
            self.is_in_force(),
            self.baseline,
            self.observed()
        )
    }

    fn is_running(&mut self) -> bool {
        if self.setup.fails_server() {
            assert!(self.testbed.is_running(), "the gateway has ended with its server: {}", self.testbed.log());
            return self.testbed.policyd.as_mut().is_some_and(|server| server.process().is_alive());
        }
        self.testbed.is_running()
    }

    fn signal(&mut self, signal: &str) {
        // Fails if it has ended.
        let _ = match &mut self.testbed.policyd {
            Some(server) if self.setup.fails_server() => server.process().signal(signal),
            _ => self.testbed.process().signal(signal),
        };
    }

    /// Kills the process, if it is running.
    fn kill(&mut self) {
        self.expected = Expected::Killed;
        self.signal("KILL");
        assert!(wait_for(EXIT_TIMEOUT, || !self.is_running()), "it survives SIGKILL");
    }

    /// Ends the process by a signal, whatever its state.
    fn end(&mut self, signal: &str) {
        self.signal(signal);
        if !wait_for(STOP_TIMEOUT, || !self.is_running()) {
            self.kill();
        }
        self.reap();
    }

    /// The exit status of the process, which has ended.
    fn reap(&mut self) -> ExitStatus {
        if !self.setup.fails_server() {
            return self.testbed.wait_exit();
        }
        let mut server = self.testbed.policyd.take().expect("a server was started");
        server.process().wait(EXIT_TIMEOUT).expect("it has ended")
    }

    fn log(&self) -> String {
        if self.setup.fails_server() {
            return self.testbed.policyd.as_ref().map(Policyd::log).unwrap_or_default();
        }
        self.testbed.log()
    }
}
